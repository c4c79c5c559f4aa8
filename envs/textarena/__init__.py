"""The games of TextArena."""
