"""Sampling with vLLM servers in processes of their own."""
