"""Sampling with vLLM servers, processes of their own."""
