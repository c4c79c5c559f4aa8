"""Layers that pass a state from token to token, over a prefix tree."""
