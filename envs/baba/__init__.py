"""Baba Is AI: a puzzle in which the rules are blocks that can be pushed."""
