"""Sampling with transformers in the trainer's process."""
