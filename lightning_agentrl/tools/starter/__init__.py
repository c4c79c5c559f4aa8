"""The files of a new project, as `agentrl new` writes them."""
