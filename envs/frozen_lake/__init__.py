"""FrozenLake: walk over ice, past holes, to the goal."""
