"""The command `agentrl`, with one file per subcommand."""
