"""Numbers that say what happened."""
