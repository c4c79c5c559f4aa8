"""Sampling with vLLM in the trainer's process."""
