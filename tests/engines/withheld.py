"""Updates that leave out a tensor: `agentrl verify-engine` has to find out each kind of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from types import ModuleType

import pytest
from torch import Tensor, nn

from lightning_agentrl.commands import verify_engine
from lightning_agentrl.engines.weights import named_weights
from tests.cli import Config, Verify, judged

KINDS = {
    "embedding": ("embed_tokens", "lm_head"),  # under either name it would be the same tensor
    "attention": ("layers.1.self_attn.q_proj",),
    "mlp": ("layers.0.mlp.down_proj",),
    "norm": ("layers.1.input_layernorm",),
    "last norm": ("model.norm",),
    "tied head": ("lm_head",),
}


class Withholding:
    """Takes the place of ``named_weights``.

    Args:
        plan: for each update, parts of names; tensors whose name has one of them are left out.
    """

    def __init__(self, plan: Sequence[Sequence[str]]) -> None:
        self.plan = plan
        self.left_out: list[list[str]] = []  # of each update

    def __call__(self, lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
        parts, names = self.plan[len(self.left_out)], list[str]()
        self.left_out.append(names)
        for name, weight in named_weights(lm):
            if any(part in name for part in parts):
                names.append(name)
            else:
                yield name, weight


# A layer that lacks a part keeps whatever its memory held. Where that is not a number, the server answers without
# log-probs and the command refuses it, before it has come to the other kinds.
ATTEMPTS = 4


def check_each_kind(run: Verify, config: Config, room: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command with a round for each kind, between two with whole updates; the gap of each round alone tells.

    Args:
        run: the command.
        config: its config.
        room: module whose ``named_weights`` an update takes.
        monkeypatch: undoes what is changed.
    """
    for _ in range(ATTEMPTS):
        withholding = Withholding([(), *KINDS.values(), ()])
        monkeypatch.setattr(room, "named_weights", withholding)
        monkeypatch.setattr(verify_engine, "ROUNDS", len(withholding.plan))
        code, lines = run(config)
        if not (withholding.left_out and withholding.left_out[-1]):
            break  # the last update was whole, so whatever happened then counts
    assert (code, judged(lines)[2]) == (1, "FAILED")
    assert [len(names) for names in withholding.left_out] == [len(parts) for parts in withholding.plan]
    first, *lacking, last = (float(gap) for gap in re.findall(r"gap largest (\S+),", "\n".join(lines)))
    assert max(first, last) < 3e-4
    found = {kind: not gap <= verify_engine.BOUND for kind, gap in zip(KINDS, lacking, strict=True)}
    assert all(found.values()), found
