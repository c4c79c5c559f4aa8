"""Search: questions about an invented archipelago, answered with a tool that searches an archive about it."""
