"""Checks of an environment before training: findings with a way to reproduce and to fix each."""
