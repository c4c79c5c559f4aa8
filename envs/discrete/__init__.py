"""Any gymnasium environment with discrete actions, told in words by a function of yours."""
