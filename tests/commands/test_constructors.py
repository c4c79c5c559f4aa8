"""Classes of a user's own that refuse to be made."""

from __future__ import annotations

from lightning_agentrl.rollout import WindowMemory
from tests.cli import Command, Config, changed, sentence


class Silent(WindowMemory):
    """Says nothing of why it cannot be made."""

    def __init__(self, turns: int = 1) -> None:
        raise ValueError


def test_one_that_says_nothing_is_named_with_its_error_and_line(agentrl: Command, config: Config) -> None:
    own = {"class_path": "tests.commands.test_constructors.Silent", "init_args": {"turns": 2}}
    message = sentence(agentrl(config=changed(config, "data.init_args.memory", own)))
    for part in ("ValueError without a message", "test_constructors.py, line 13", "data.init_args.memory"):
        assert part in message
