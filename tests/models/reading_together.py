"""Rows that a group of ranks reads together, compared with one rank that reads them all; imported by these ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_agentrl.models.kernels import checkpoint_activations
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm
from lightning_agentrl.models.packing import Packed, pack
from lightning_agentrl.models.sequence import Exchange, SequenceGroup, pack_shard, sequence_group
from lightning_agentrl.types import ModelInput, Row
from tests.inputs import random_ids, text_row
from tests.models.seen import rows_with_images

TEXTS = ("tree", "odd", "roots", "branches", "one")


@dataclass(frozen=True)
class Case:
    """What is read.

    Args:
        family: name of the folder of the model.
        rows: one of ``TEXTS``, or ``images``.
        owners: rank of each row: each in turn, or one of them has all.
        checkpointing: layers are computed again in the backward pass.
        broken: what is left out: the exchange of heads, or the sum of gradients over ranks.
    """

    family: str
    rows: str = "tree"
    owners: int | None = None
    checkpointing: bool = False
    broken: str = ""

    def __str__(self) -> str:
        owned = "" if self.owners is None else f" of {self.owners}"
        return f"{self.family} {self.rows}{owned}{' recomputed' * self.checkpointing} {self.broken}".strip()


def rows_of(case: Case, policy: LanguageModel, ranks: int) -> list[Row]:
    """Rows of the case; those of ``odd`` leave padding, and those with images have one that is cut in two."""
    if case.rows == "images":
        assert policy.image_reader is not None
        return next(rows for rows in with_images(policy) if cuts_image(pack(rows, reader=policy.image_reader), ranks))
    start = random_ids(0, {"tree": 50, "odd": 41, "branches": 200}.get(case.rows, 0))
    own = {"branches": 60, "one": 75}.get(case.rows, 20)
    rows = []
    for k in range(1 if case.rows == "one" else 5):
        ids = start + random_ids(k + 1, own + (k if case.rows in ("odd", "roots") else 0))
        rows.append(text_row(ids, tuple(range(len(ids) - own, len(ids), 2))))
    return rows


def with_images(policy: LanguageModel) -> Iterator[list[Row]]:
    assert policy.image_reader is not None
    rows = rows_with_images(policy.image_reader)
    for more in range(40):  # tokens before all others
        begun = [Row(ModelInput.of_ids(range(20, 20 + more)) + row.input, row.logit_positions) for row in rows[1:]]
        yield [rows[0], *begun]


def cuts_image(packed: Packed, ranks: int) -> bool:
    assert packed.images is not None
    size = -(-packed.tokens // ranks)
    places = set(packed.images.places.tolist())
    return all({cut - 1, cut} <= places for cut in range(size, packed.tokens, size)[:1])


def losses(policy: LanguageModel, packed: Packed, weights_KR: Tensor) -> tuple[Tensor, Tensor, int]:
    """Numbers of every kind [K, R] at the logit positions, a sum of all with these weights, and what layers keep."""
    with kept_bytes() as kept:
        hidden = policy.hidden(packed)
    scores = policy.token_scores(hidden, packed.targets.clamp_min(0), 1.0, sum_pi_squared=True)
    assert scores.sum_pi_squared is not None
    value = hidden @ torch.linspace(-1, 1, hidden.shape[1])
    numbers_KR = torch.stack([scores.logps, scores.entropy, scores.sum_pi_squared, value])
    return numbers_KR, (numbers_KR * weights_KR).sum(), kept[0]


def gradients(policy: LanguageModel, loss: Tensor) -> dict[str, Tensor]:
    policy.zero_grad()
    loss.backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in policy.named_parameters()}


@contextmanager
def kept_bytes() -> Iterator[list[int]]:
    """Count what is kept for the backward pass, each tensor once."""
    seen: dict[int, Any] = {}
    total = [0]

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if not isinstance(x, torch.nn.Parameter) and storage.data_ptr() not in seen:
            seen[storage.data_ptr()] = storage
            total[0] += storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield total


def compare(case: Case, folder: Path, group: SequenceGroup) -> dict[str, float]:
    """Relative errors of outputs, of all gradients and of the worst one; tokens and kept bytes beside one rank's."""
    policy = LanguageModel(load_causal_lm(str(folder / case.family))).train()
    if case.checkpointing:
        checkpoint_activations(policy.lm)
    rows, reader = rows_of(case, policy, group.size), policy.image_reader
    owners = [k % group.size if case.owners is None else case.owners for k in range(len(rows))]
    whole = pack(rows, reader=reader)
    weights_KR = torch.randn(4, len(whole.targets), generator=torch.Generator().manual_seed(0))
    expected_KR, loss, alone = losses(policy, whole, weights_KR)
    expected = gradients(policy, loss)

    packed = pack_shard(rows, owners, group, reader=reader)
    own_R = torch.tensor([o == group.rank for o, row in zip(owners, rows, strict=True) for _ in row.logit_positions])
    with pytest.MonkeyPatch.context() as patch:
        if case.broken == "without heads":
            patch.setattr(Exchange, "forward", staticmethod(own_heads_only(Exchange.forward)))
        found_KR, loss, kept = losses(policy, packed, weights_KR[:, own_R])
        found = gradients(policy, loss)
    if case.broken != "without sum":
        for gradient in found.values():
            dist.all_reduce(gradient)
    sizes_W = torch.stack([x.norm() for x in expected.values()])
    errors_W = torch.stack([(found[name] - x).norm() for name, x in expected.items()])
    least = 1e-3 * sizes_W.norm()  # some gradients are 0 but for rounding
    outputs = float((found_KR - expected_KR[:, own_R]).norm() / expected_KR.norm())
    return {
        "outputs": outputs,
        "gradients": float(errors_W.norm() / sizes_W.norm()),
        "worst": float((errors_W / sizes_W.clamp_min(least)).max()),
        "tokens": packed.tokens / whole.tokens,
        "kept": kept / alone,
    }


def own_heads_only(forward: Any) -> Any:
    """An exchange in which each rank keeps what it has, where all ranks give and get the same."""

    def kept(ctx: Any, x: Tensor, group: Any, sent: list[int], received: list[int]) -> Tensor:
        out = forward(ctx, x, group, sent, received)
        return x.clone() if set(sent) == set(received) == {1} else out

    return kept


def reads_nothing(folder: Path, group: SequenceGroup) -> dict[str, float]:
    """No rank has a row, so all read a token that is nobody's; gradients are 0."""
    policy = LanguageModel(load_causal_lm(str(folder / "qwen3")))
    packed = pack_shard([text_row((0,), (0,))], [-1], group)
    numbers_KR, loss, _ = losses(policy, packed, torch.zeros(4, 0))
    found = gradients(policy, loss)
    return {"outputs": float(numbers_KR.numel()), "gradients": max(float(x.norm()) for x in found.values())}


def run(rank: int, ranks: int, folder: str, cases: Sequence[Case]) -> None:
    """The work of one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting{ranks}", rank=rank, world_size=ranks)
    group = sequence_group(ranks)
    reports = {str(case): compare(case, Path(folder), group) for case in cases}
    reports["no rows"] = reads_nothing(Path(folder), group)
    Path(folder, f"{ranks}.{rank}.json").write_text(json.dumps(reports))
    dist.destroy_process_group()
