"""Numbers that are not finite: found, named with their turn, and kept out of training and of checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_agentrl.agents.hooks import Verdict
from lightning_agentrl.distributed import all_gather
from lightning_agentrl.types import Rollout, Scores, Turn

SHOWN = 3  # turns or tensors that a sentence names


class LeftOut:
    """What of a rollout is not trained on, since a number of it is not finite: whole episodes, so far as they are here.

    An advantage is made of the numbers of a whole episode, so one of them spoils all.
    """

    def __init__(self) -> None:
        self.turns = 0
        self.names: list[str] = []  # of the numbers, each with its turn
        self._episodes: set[int] = set()

    def of(self, rollout: Rollout) -> Rollout:
        """Return the rollout with these episodes masked, and what was not finite as 0, or as the engine's log-prob."""
        bad = {name: _not_finite(x, rollout.action_mask) for name, x in _numbers(rollout).items()}
        if not any(bool(found.any()) for found in bad.values()):
            return rollout
        rows_B = torch.stack([found.any(1) for found in bad.values()]).any(0)
        out_B = torch.isin(rollout.episode, rollout.episode[rows_B].unique()) & rollout.trained_mask.any(1)
        self._episodes |= set(rollout.episode[rows_B].tolist())
        self.turns += sum(len(rollout.samples[i].turns) for i in out_B.nonzero().flatten().tolist())
        self.names += [f"{name} of {named(_turns_at(rollout, found))}" for name, found in bad.items() if found.any()]
        engine = rollout.rollout_logps.nan_to_num(0.0, 0.0, 0.0)

        def finite(name: str, x: Tensor) -> Tensor:
            return torch.where(x.isfinite(), x, engine.to(x.dtype) if name in ("old_logps", "ref_logps") else 0.0)

        found = {name: finite(name, x) for name, x in _numbers(rollout).items() if bad[name].any()}
        scores = {name: found.pop(name) for name in [f.name for f in fields(Scores)] if name in found}
        rollout = rollout.union(scores=Scores(**scores), **found)
        return replace(rollout, loss_mask=rollout.trained_mask & ~out_B[:, None])

    def rows(self, rollout: Rollout) -> Tensor:
        """Return the rows [B] (bool) of these episodes. Nothing may read them again: NaN times 0 is NaN."""
        return torch.tensor([episode in self._episodes for episode in rollout.episode.tolist()], dtype=torch.bool)

    def tell(self, turns: int, stop: Callable[[str], None]) -> dict[str, float]:
        """Warn of the turns that are not trained on; return how many of all ranks they are, for the log.

        Every rank must call it.

        Args:
            turns: of the rollout on this rank.
            stop: ends the run for a reason; called if none is left.
        """
        parts = all_gather((self.turns, turns, self.names[:SHOWN]))
        out, every = sum(part[0] for part in parts), sum(part[1] for part in parts)
        names = [name for part in parts for name in part[2]]
        if out:
            rank_zero_warn(f"{out} of {every} turns are not trained on; not finite: {', '.join(names)}")
        if out and out == every:
            stop(f"no turn of the rollout has finite numbers ({', '.join(names)})")
        return {"guard/turns_left_out": float(out)}


class FiniteSteps:
    """Steps whose loss or gradient is not finite: they are not taken, and so many of them in a row stop the run.

    Args:
        limit: so many.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_a_row = 0

    def judge(self, fault: str, norms: Mapping[str, float]) -> tuple[Verdict, str]:
        """Return what to do with a step, on all ranks the same; every rank must call it.

        Args:
            fault: what of the step is not finite on this rank, named with its turn; empty if nothing is.
            norms: of the whole gradient by group, as far as they are known.
        """
        wrong = [f"the gradient of the {name} has the norm {x}" for name, x in norms.items() if not math.isfinite(x)]
        parts = all_gather((fault, ", ".join(wrong)))
        reason = "; ".join([own for own, _ in parts if own]) or next((norm for _, norm in parts if norm), "")
        self.in_a_row = self.in_a_row + 1 if reason else 0
        if self.in_a_row >= self.limit:
            return Verdict.STOP, f"{reason}, in {self.in_a_row} steps in a row (model.init_args.optim.max_not_finite)"
        return (Verdict.SKIP, reason) if reason else (Verdict.STEP, "")


class LossFault:
    """Tokens of a micro-batch whose losses are not finite, on the device until somebody asks.

    Args:
        losses: [B, A], by name.
        rollout: the micro-batch.
    """

    def __init__(self, losses: Mapping[str, Tensor], rollout: Rollout) -> None:
        self._bad = {name: _not_finite(x.detach(), rollout.trained_mask) for name, x in losses.items()}
        self._rollout = rollout

    @property
    def there(self) -> Tensor:
        """Whether there are any; a scalar."""
        return torch.stack([found.any() for found in self._bad.values()]).any()

    def __str__(self) -> str:
        """Name their turns."""
        bad = [(name, _turns_at(self._rollout, found)) for name, found in self._bad.items()]
        return ", ".join(f"{name} of {named(turns)} is not finite" for name, turns in bad if turns)


def gradients_are_finite(optimizer: Any) -> Tensor:
    """Return whether what this rank holds of the gradients is finite; a scalar on the device."""
    found = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return torch.nn.utils.get_total_norm([x.to_local() if isinstance(x, DTensor) else x for x in found]).isfinite()


def not_finite_in(state: Any, path: str = "") -> Iterator[str]:
    """Yield the names of the tensors in nested mappings and sequences that are not finite in what this rank holds."""
    if isinstance(state, Tensor):
        local = state.to_local() if isinstance(state, DTensor) else state
        if local.is_floating_point() and not bool(local.isfinite().all()):
            yield path
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from not_finite_in(value, f"{path}.{key}".lstrip("."))
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            yield from not_finite_in(value, f"{path}.{number}".lstrip("."))


def named(turns: Sequence[Turn]) -> str:
    """Return the places of turns, the first few by name."""
    places = "; ".join(f"environment {t.env}, episode {t.episode}, turn {t.index}" for t in turns[:SHOWN])
    return places + (f" and {len(turns) - SHOWN} more turns" if len(turns) > SHOWN else "")


def _numbers(rollout: Rollout) -> dict[str, Tensor]:
    """Return what there is of numbers per token [B, A] and per row [B], but for those that are NaN where an episode was
    lost or a state was not forked.
    """
    may_lack = ("greedy_scores", "state_values", "forked_end_values")
    every = [(f.name, getattr(rollout, f.name)) for f in fields(Rollout) if f.name not in may_lack]
    every += [(f.name, getattr(rollout.scores, f.name)) for f in fields(Scores)]
    return {name: x for name, x in every if isinstance(x, Tensor) and x.is_floating_point()}


def _not_finite(x: Tensor, mask_BA: Tensor) -> Tensor:
    """Return [B, A] bool: tokens of the mask with a number that is not finite; one per row counts at all its tokens."""
    bad = ~x.isfinite()
    return mask_BA & (bad if bad.dim() == 2 else bad[:, None])


def _turns_at(rollout: Rollout, where_BA: Tensor) -> list[Turn]:
    """Return the turns of the tokens that are set, each once."""
    found = []
    for row in where_BA.any(1).nonzero().flatten().tolist():
        wanted = set(rollout.turn_ids[row][where_BA[row]].tolist())
        found += [turn for turn in rollout.samples[row].turns if turn.index in wanted]
    return found
