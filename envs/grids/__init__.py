"""Games on a grid of cells: what FrozenLake and Sokoban share."""
