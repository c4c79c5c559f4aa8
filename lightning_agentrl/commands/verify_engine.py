"""`agentrl verify-engine`: whether the engine samples from the weights that are trained, with correct log-probs.

The proof of `agents/proof.py` with more rounds, in float32, with every round shown.
"""

from __future__ import annotations

from typing import cast

import lightning as L
from lightning.pytorch.utilities import rank_zero_only

from lightning_agentrl.agents import Agent
from lightning_agentrl.metrics.gap import Bounds

ROUNDS = 3  # the last with the policy's own weights, all others with moved ones


class EngineVerified(Exception):
    """The end of a verification, raised after all rounds so that nothing else is done."""

    def __init__(self, ok: bool) -> None:
        super().__init__("ok" if ok else "FAILED")
        self.ok = ok


class VerifyEngine(L.Callback):
    """The gap of a connected agent, measured when a validation begins, which is then ended.

    Args:
        largest: largest gap that is accepted; None: what rounding explains.
        mean: largest mean gap of a round that is accepted; None: what rounding explains.
    """

    def __init__(self, largest: float | None = None, mean: float | None = None) -> None:
        self.largest = largest
        self.mean = mean

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        agent = cast(Agent, pl_module)
        engine, proof = agent.datamodule.engine, agent.engine_proof()
        usual = proof.bounds
        if not (self.mean is None and self.largest is None):
            proof.rounding = None
        proof.bounds = Bounds(
            usual.mean if self.mean is None else self.mean, usual.largest if self.largest is None else self.largest
        )
        show = rank_zero_only(print)
        weights = f"{agent.model}, {trainer.ckpt_path}" if trainer.ckpt_path else agent.model
        show(f"{type(engine).__name__} with {weights}, trainer in {trainer.precision}", flush=True)
        rounds = []
        for found in proof.rounds(ROUNDS, agent.policy_version):
            rounds.append(found)
            show(f"round {found.number + 1}: {found.seen}", flush=True)
        wrong = proof.first_wrong(rounds)
        if wrong is not None:
            cause = proof.cause(wrong, sent_before=True)
            bounds = proof.allowed(wrong.seen)
            show(f"round {wrong.number + 1} is above the bounds ({bounds}), or sampled otherwise; likely {cause}")
        largest, mean = (max(getattr(found.seen, name) for found in rounds) for name in ("largest", "mean"))
        show(f"gap_max={largest:.3g} gap_mean={mean:.3g} {'ok' if wrong is None else 'FAILED'}", flush=True)
        raise EngineVerified(wrong is None)
