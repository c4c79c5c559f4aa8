"""Recurrent and convolution layers over a prefix tree."""
