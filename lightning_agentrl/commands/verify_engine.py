"""`agentrl verify-engine`: whether the engine samples from the weights that are trained, with correct log-probs.

Every trained weight is moved, the engine loads the new weights and samples, and the log-probs that it gives with the
sampled tokens are compared with the trainer's own. A weight that an update leaves out, or of which an engine keeps an
old copy, shows as a gap that rounding does not explain.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_agentrl.agents import Agent
from lightning_agentrl.agents.scoring import row_logps
from lightning_agentrl.distributed import all_gather
from lightning_agentrl.engines import Engine, Reply, SamplingRequest, VLLMEngine, VLLMServerEngine
from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.models.packing import Row
from lightning_agentrl.rollout.event_loop import LoopThread
from lightning_agentrl.types import ModelInput

ROUNDS = 3
REPLIES = 16  # of a round
TOKENS = 32  # of a reply, at most
SHARE = 0.02  # how far weights are moved, as a share of their size
BOUND, ROUGH_BOUND = 1e-3, 0.8  # largest gap in float32, and where one side computes at a lower precision


class EngineVerified(Exception):
    """The end of a verification, raised after all rounds so that nothing else is done."""

    def __init__(self, ok: bool) -> None:
        super().__init__("ok" if ok else "FAILED")
        self.ok = ok


@dataclass(frozen=True)
class Gaps:
    """Log-probs of the same sampled tokens under engine and trainer."""

    engine: tuple[float, ...]
    trainer: tuple[float, ...]

    @property
    def distances(self) -> list[float]:
        return [abs(a - b) for a, b in zip(self.engine, self.trainer, strict=True)]

    @property
    def largest(self) -> float:
        """The largest distance; NaN if any distance is."""
        return math.nan if any(map(math.isnan, self.distances)) else max(self.distances)

    @property
    def mean(self) -> float:
        return sum(self.distances) / len(self.distances)

    @property
    def ratios(self) -> list[float]:
        """Probabilities under the trainer, divided by those under the engine."""
        return [math.exp(min(b - a, 700.0)) for a, b in zip(self.engine, self.trainer, strict=True)]

    def __str__(self) -> str:
        ratios = self.ratios
        return (
            f"{len(ratios)} tokens, gap largest {self.largest:.2g}, mean {self.mean:.2g}; ratio mean "
            f"{sum(ratios) / len(ratios):.6f}, {min(ratios):.6f} to {max(ratios):.6f}"
        )

    @classmethod
    def together(cls, parts: Iterable[Gaps]) -> Gaps:
        parts = list(parts)
        return cls(tuple(x for part in parts for x in part.engine), tuple(x for part in parts for x in part.trainer))


class VerifyEngine(L.Callback):
    """The gap of a connected agent, measured when a validation begins, which is then ended.

    Args:
        bound: largest gap that is accepted; None for 0.001, or 0.8 where engine or trainer do not compute in float32.
    """

    def __init__(self, bound: float | None = None) -> None:
        self.bound = bound

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        agent = cast(Agent, pl_module)
        bound = default_bound(trainer, agent.datamodule.engine) if self.bound is None else self.bound
        show = rank_zero_only(print)
        show(f"{type(agent.datamodule.engine).__name__} with {agent.model}, trainer in {trainer.precision}", flush=True)
        rounds = []
        for number in range(ROUNDS):
            rounds.append(Gaps.together(all_gather(measure(agent, number))))
            show(f"round {number + 1}: {rounds[-1]}", flush=True)
        every = Gaps.together(rounds)
        ok = every.largest <= bound
        if not ok:
            show(
                f"the largest gap is above the bound of {bound:g}: the engine samples from different weights or at a "
                "lower precision"
            )
        show(f"gap_max={every.largest:.3g} gap_mean={every.mean:.3g} {'ok' if ok else 'FAILED'}", flush=True)
        raise EngineVerified(ok)


def default_bound(trainer: L.Trainer, engine: Engine) -> float:
    """Return the default bound, which rounding alone stays well below."""
    rough_engine = isinstance(engine, VLLMEngine | VLLMServerEngine) and engine.dtype not in ("auto", "float32")
    return ROUGH_BOUND if rough_engine or "16" in str(trainer.precision) else BOUND


def measure(agent: Agent, number: int) -> Gaps:
    """Run one round on this rank: move, sync, sample, and read the same tokens as in training."""
    data = agent.datamodule
    prompts = data.first_prompts(REPLIES)
    tokens = min(TOKENS, data.interaction.max_reply_tokens)
    requests = [
        SamplingRequest(prompts[i % len(prompts)], tokens, agent.temperature, derive_seed(data.seed, number, i))
        for i in range(REPLIES)
    ]
    move(agent.actor, derive_seed(data.seed, number))
    data.engine.sync(number)
    loop = LoopThread()
    try:
        with data.engine.collecting():
            replies = loop.run(_sample(data.engine, requests))
    finally:
        loop.stop()
    rows = []
    for request, reply in zip(requests, replies, strict=True):
        start = len(request.prompt) - 1
        rows.append(Row(request.prompt + ModelInput.of_ids(reply.ids), tuple(range(start, start + len(reply.ids)))))
    with agent.evaluation_mode():
        read = row_logps(agent.actor, rows, agent.reader())
    engine = tuple(x for reply in replies for x in reply.logps)
    return Gaps(engine, tuple(float(x) for logps in read for x in logps))


async def _sample(engine: Engine, requests: Sequence[SamplingRequest]) -> list[Reply]:
    return list(await asyncio.gather(*map(engine.generate, requests)))


@torch.no_grad()
def move(module: nn.Module, seed: int, share: float = SHARE) -> None:
    """Add noise to every trained weight, of scale ``share`` times its root mean square; weights of all 0 move too."""
    random = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        size = float(own.float().square().mean().sqrt()) if own.numel() else 0.0
        noise = torch.randn(own.shape, generator=random) * share * (size or 1.0)
        own.add_(noise.to(own.device, own.dtype))
