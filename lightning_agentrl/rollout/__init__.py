"""Rollouts: from environments and a policy to samples."""
