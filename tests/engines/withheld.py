"""Updates that leave out a tensor: `agentrl verify-engine` has to find out each kind of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from types import ModuleType

import pytest
from torch import Tensor, nn

from lightning_agentrl.commands import verify_engine
from lightning_agentrl.engines.weights import named_weights
from lightning_agentrl.metrics.mismatch import EXACT
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
        plan: for each update, parts of names; tensors whose name has one of them are left out. Later ones are whole.
    """

    def __init__(self, plan: Sequence[Sequence[str]]) -> None:
        self.plan = plan
        self.left_out: list[list[str]] = []  # of each update

    def __call__(self, lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
        at = len(self.left_out)
        parts, names = self.plan[at] if at < len(self.plan) else (), list[str]()
        self.left_out.append(names)
        for name, weight in named_weights(lm):
            if any(part in name for part in parts):
                names.append(name)
            else:
                yield name, weight


REFUSED = re.compile(r"log-probs .*broken.*verify-engine")


def check_each_kind(
    run: Verify,
    config: Config,
    room: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command with a round for each kind, between two with whole updates; the gap of each round alone tells.

    A layer that lacks a part keeps whatever its memory held. Where that is not a number, the command ends with a
    sentence about the server, which finds it out too; it is started again with the kinds that are left.

    Args:
        run: the command.
        config: its config.
        room: module whose ``named_weights`` an update takes.
        monkeypatch: undoes what is changed.
        capsys: what the command writes.
    """
    left, found = list(KINDS), dict[str, bool]()
    while True:
        withholding = Withholding([(), *(KINDS[kind] for kind in left), ()])
        monkeypatch.setattr(room, "named_weights", withholding)
        monkeypatch.setattr(verify_engine, "ROUNDS", len(withholding.plan))
        code, lines = run(config)
        for names, parts in zip(withholding.left_out, withholding.plan, strict=False):
            assert len(names) == len(parts)
        whole, *lacking = (float(gap) for gap in re.findall(r"mismatch largest (\S+),", "\n".join(lines)))
        assert whole < 3e-4
        found |= {kind: not gap <= EXACT.largest for kind, gap in zip(left, lacking, strict=False)}
        refused = len(withholding.left_out) - 2  # the kind that the last update lacked, if the command was refused
        if code != 2:
            break
        assert REFUSED.search(capsys.readouterr().err)
        assert withholding.left_out[-1]
        found[left[refused]] = True
        left = left[refused + 1 :]
    assert (code, judged(lines)[2]) == ((1, "FAILED") if left else (0, "ok"))
    assert len(withholding.left_out) >= len(withholding.plan)
    assert lacking[-1] < 3e-4  # whole again
    assert list(found) == list(KINDS)
    assert all(found.values()), found
