"""The command `agentrl`, one file for each of its subcommands."""
