"""Critic warm-up: train the critic on the initial policy before the actor is trained."""

from __future__ import annotations

import math
from typing import Any, cast

import lightning as L
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_agentrl.agents import Agent
from lightning_agentrl.agents.optim import planned_steps
from lightning_agentrl.rollout import Phase, Prepared, RolloutDataModule, RolloutSource, RolloutStream
from lightning_agentrl.rollout.ahead import pooled, rows_of
from lightning_agentrl.rollout.stream import split
from lightning_agentrl.types import Rollout, rollout_from_plain


class CriticWarmup(L.Callback, RolloutSource):
    """Critic warm-up: collect rollouts with the frozen policy, and train the critic on samples of this data in rounds.

    Each round recomputes the values and targets of all data with the current critic, then trains once on a sample drawn
    without replacement. The actor does not change and has no optimizer state. A round takes as many epochs as its
    sample has rollouts, so the warm-up takes ``rounds * rollouts * fraction`` of ``max_epochs``. A second ``fit`` in
    Python starts a new warm-up.

    Args:
        rollouts: number of rollouts to collect.
        rounds: number of times that targets are recomputed.
        fraction: fraction of the data that each round trains on; ``rollouts * fraction`` must be a whole number.
        min_explained_variance: explained variance below which a warning says that the critic has not converged when
            the actor starts; null: no warning.
    """

    def __init__(
        self, rollouts: int = 40, rounds: int = 5, fraction: float = 0.1, min_explained_variance: float | None = 0.3
    ) -> None:
        if rollouts < 1 or rounds < 1 or not 0 < fraction <= 1:
            raise ValueError(
                f"CriticWarmup needs rollouts >= 1, rounds >= 1 and 0 < fraction <= 1, got {rollouts}, {rounds} and "
                f"{fraction}"
            )
        self.portions = round(rollouts * fraction)
        if abs(self.portions - rollouts * fraction) > 1e-9 or not self.portions:
            raise ValueError(
                f"CriticWarmup: {rollouts} rollouts * {fraction} = {rollouts * fraction:g} iterations per round, which "
                "must be a whole number of at least 1; change rollouts or fraction"
            )
        self.rollouts, self.rounds, self.fraction = rollouts, rounds, fraction
        self.min_explained_variance = min_explained_variance
        self.done_epochs = 0
        self._advice = ""  # advice for a critic with low explained variance
        self._warm = False  # whether the current epoch belongs to the warm-up
        self.buffer: Rollout | None = None
        self.prepared: Rollout | None = None

    @property
    def warmup_iterations(self) -> int:
        return self.rounds * self.portions

    @property
    def phase(self) -> Phase:
        """``critic_warmup`` until the end of the last epoch of the warm-up, then ``train``."""
        return "critic_warmup" if self._warm else "train"

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Reset the state of an earlier run; a checkpoint is loaded later."""
        if stage == "fit" and trainer.global_step == 0:
            self.done_epochs, self.buffer, self.prepared = 0, None, None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        critic = cast(Agent, pl_module).critic
        if critic is None:
            raise ValueError("CriticWarmup has no critic to warm up; remove the callback or set model.init_args.critic")
        more = "raise CriticWarmup's rounds, fraction or rollouts, or model.init_args.optim.lr_critic"
        if critic.fitted:  # one fit of the critic is optimal for the data, so more rounds do not help
            more = (
                "raise CriticWarmup's rollouts, so that it is solved on more turns; if the policy rarely succeeds, or "
            )
            more += "only by chance, returns are mostly noise: set min_explained_variance to null then"
        self._advice = more
        if planned_steps(trainer)["actor"] == 0:
            end = "max_epochs" if 0 < (trainer.max_epochs or 0) <= self.warmup_iterations else "max_steps"
            rank_zero_warn(
                f"warm-up takes {self.warmup_iterations} iterations (rounds * rollouts * fraction) and trainer.{end} "
                f"is {getattr(trainer, end)}, so the actor is never trained; raise trainer.{end}"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Select this rank's rows of the data in a checkpoint, which sharded strategies load after ``on_fit_start``."""
        sizes = cast(RolloutDataModule, cast(Any, trainer).datamodule).sizes
        envs = sizes.own_envs(trainer.global_rank, trainer.world_size)
        self.buffer, self.prepared = (
            None if rollout is None else rows_of(rollout, envs) for rollout in (self.buffer, self.prepared)
        )

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Provide the rollouts of the stream during the warm-up, and the first rollout after it."""
        stream = cast(RolloutDataModule, cast(Any, trainer).datamodule).stream
        assert stream is not None
        self._warm = self.done_epochs < self.warmup_iterations
        if self._warm or self.buffer is not None:
            stream.source = self

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count epochs by the trainer's counter, since a resumed run calls this hook twice for its last epoch."""
        self.done_epochs = min(trainer.current_epoch + 1, self.warmup_iterations)

    def next_rollout(self, stream: RolloutStream) -> Prepared:
        """Return the next portion of the round's sample; before the first round, collect the data."""
        if self.done_epochs == self.warmup_iterations:
            return self._hand_over(stream)
        buffer = self.buffer  # assigned to self.buffer only when the update begins, in case the iteration is stopped
        if buffer is None:
            buffer = Rollout.concat([stream.collect() for _ in range(self.rollouts)])
        round_, portion = divmod(self.done_epochs, self.portions)
        metrics: dict[str, float] = {}
        if portion == 0 or self.prepared is None:
            prepared = stream.prepare(buffer)
            self.prepared, metrics = prepared.rollout, prepared.metrics
            kept = {id(sample) for sample in self.prepared.samples}  # samples without non-finite numbers
            buffer = buffer.select([i for i, sample in enumerate(buffer.samples) if id(sample) in kept])
            # The buffer keeps log-probs; values will be recomputed.
            self.buffer = buffer.union(scores=self.prepared.scores)
        places = stream.places_of(self.prepared, round_, 1)
        return Prepared(self.prepared.select(split(places, self.portions, upto=self.fraction)[portion]), metrics)

    def _hand_over(self, stream: RolloutStream) -> Prepared:
        """Free the buffer, collect the actor's first rollout, and report the critic's explained variance on it."""
        stream.source = None
        self.buffer = self.prepared = None
        prepared = stream.next_rollout()
        explained = prepared.metrics.get("critic/explained_variance")
        if explained is None or math.isnan(explained):
            rank_zero_warn("critic warm-up has ended; all returns are equal, so it is unknown if the critic converged")
        elif self.min_explained_variance is not None and explained < self.min_explained_variance:
            rank_zero_warn(
                f"the critic has not converged when the actor starts: it explains {explained:.2f} of the variance of "
                f"the returns, less than {self.min_explained_variance}; {self._advice}"
            )
        else:
            rank_zero_info(f"critic warm-up has ended: it explains {explained:.2f} of the variance of the returns")
        return prepared

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the warm-up and, during it, the data of all ranks."""
        return {"done_epochs": self.done_epochs, "buffer": pooled(self.buffer), "prepared": pooled(self.prepared)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.done_epochs = state_dict["done_epochs"]
        buffer, prepared = state_dict["buffer"], state_dict["prepared"]
        self.buffer = None if buffer is None else rollout_from_plain(buffer)
        self.prepared = None if prepared is None else rollout_from_plain(prepared)
