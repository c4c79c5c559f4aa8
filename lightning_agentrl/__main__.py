"""`python -m lightning_agentrl` is the `agentrl` command."""

from lightning_agentrl.commands.main import main

if __name__ == "__main__":
    main()
