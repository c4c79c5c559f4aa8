"""Attention over prefix trees: an exact definition, and kernels that give the same result."""
