"""Any gymnasium environment with discrete actions, described in words by a user's function."""
