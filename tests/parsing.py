"""The parser of the command, without a run."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_agentrl.commands.fit import AgentCLI


class Parsed(Exception):
    """Ends a command once its parser is built."""


def fit_parser() -> Any:
    """What `agentrl fit` parses its arguments with."""

    class OnlyParser(AgentCLI):
        def parse_arguments(self, parser: Any, args: Any) -> None:
            raise Parsed(parser)

    with pytest.raises(Parsed) as made:
        OnlyParser(["fit"])
    return made.value.args[0]
