"""Backbones and heads: log-probs, entropies and values at chosen positions; the bundled demo model."""
