"""Backbones and heads: log-probs, entropies and values at chosen positions, and the bundled demo model."""
