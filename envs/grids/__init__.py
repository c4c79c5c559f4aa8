"""Games on a grid of cells: code that FrozenLake and Sokoban share."""
