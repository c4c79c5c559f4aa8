"""Sampling with vLLM servers in separate processes."""
