"""The generated questions of reasoning-gym."""
