"""Search: questions about an invented archipelago, answered with a search tool over its archive."""
