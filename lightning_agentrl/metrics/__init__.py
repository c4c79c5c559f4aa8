"""Metrics of rollouts, episodes, tokens and stages."""
