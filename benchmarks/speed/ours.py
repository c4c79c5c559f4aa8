"""This package as a contender: the agent's own training step in a Lightning Trainer, with a policy and nothing else.

Started by `compare.py`; its micro-batch is counted in tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast, get_args

import lightning as L
import torch
from torch import Tensor

from benchmarks.speed.job import Channel, Job, own_job
from benchmarks.speed.layouts import Row
from benchmarks.speed.logits import LargestLogits
from lightning_agentrl.advantages import AdvantageEstimator
from lightning_agentrl.agents import Agent, Compute, CurrentScores, Optim
from lightning_agentrl.losses import PPOClip
from lightning_agentrl.models.allocator import keep_freed_memory
from lightning_agentrl.models.kernels import Kernels
from lightning_agentrl.models.lora import LoRA
from lightning_agentrl.rollout import MiniBatch
from lightning_agentrl.types import ModelInput, Rollout, Sample, Segment, SegmentKind, Turn

KERNELS = get_args(Kernels)


class Given(AdvantageEstimator):
    """Advantages are given with the rollout."""

    def estimate(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        raise RuntimeError("nothing is estimated here")


class PolicyAgent(Agent):
    """No critic, no reference, no entropy bonus.

    There is one step per rollout, so the log-probs from before the update are the current ones, on both sides.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(
            model=job.model,
            advantage=Given(),
            optim=Optim(job.lr, job.lr, job.weight_decay, job.max_grad_norm, job.max_grad_norm),
            lora=LoRA() if job.lora else None,
            compute=Compute(
                job.micro_batch,
                gradient_checkpointing=job.checkpointing,
                kernels=cast(Kernels, job.variant if job.variant in KERNELS else "torch"),
            ),
        )
        self.loss = PPOClip(dual_clip=None)

    def policy_loss(self, batch: Rollout, scores: CurrentScores) -> Tensor:
        assert batch.advantages is not None
        return self.loss(scores.logps, scores.logps.detach(), batch.advantages, batch.trained_mask)

    def settings(self) -> dict[str, Any]:
        return {}  # no checkpoint is written

    def value_loss(self, batch: Rollout, values: Tensor) -> Tensor:
        raise RuntimeError("there is no critic")

    @torch.no_grad()
    def update_metrics(self, batch: Rollout, scores: CurrentScores) -> dict[str, Tensor]:
        """As PPOAgent, entropy and clip fractions."""
        assert batch.advantages is not None
        metrics = self.loss.metrics(scores.logps, scores.logps.detach(), batch.advantages, batch.trained_mask)
        return {"policy/entropy": scores.entropy, **{f"policy/{name}": x for name, x in metrics.items()}}


def rollout_of(rows: list[Row]) -> Rollout:
    """The rows as turns of environments; only tokens and advantages matter for an update."""
    samples = [_sample(row, index) for index, row in enumerate(rows)]
    return Rollout.from_samples(samples).union(advantages=torch.tensor([row.advantages for row in rows]))


def _sample(row: Row, index: int) -> Sample:
    turn = Turn(
        env=index // 8,
        episode=0,
        index=index % 8,
        observation="",
        reply="",
        thought="",
        action="",
        valid=True,
        env_reward=0.0,
        reward=0.0,
        episode_return=0.0,
        terminated=False,
        truncated=False,
        stop=None,
        success=None,
        hit_token_cap=False,
        history_cuts=0,
        policy_version=0,
        env_seconds=0.0,
        engine_seconds=0.0,
    )
    reply = Segment(SegmentKind.ACTION, ModelInput.of_ids(row.completion), (0.0,) * len(row.completion))
    return Sample((Segment(SegmentKind.PROMPT, ModelInput.of_ids(row.prompt)), reply), (turn,))


class GivenData(L.LightningDataModule):
    """One mini-batch in every epoch, the same, as a rollout data module would give it."""

    steps_per_iteration = 1
    groups = None
    max_staleness = 0
    interaction = None
    # There are no prompts and no engine.
    stream = SimpleNamespace(begin_iteration=lambda: None)
    player = SimpleNamespace(renderer=SimpleNamespace(template=SimpleNamespace(writes_date=False), stop_token_ids=()))
    longest_turn = None
    phase = "train"
    seed = 0

    def __init__(self, rollout: Rollout) -> None:
        super().__init__()
        self.rollout = rollout

    def check(self, tokenizer: object, context_length: int, image_reader: object = None) -> None:
        pass  # no prompts

    def connect(self, *arguments: object) -> None:
        pass  # no environments, no engine

    def train_dataloader(self) -> GivenData:
        return self

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[MiniBatch]:
        yield MiniBatch(self.rollout)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch


class StepByStep(L.Callback):
    """A step each time it is asked for, timed from where the loop begins it to where the loop ends it."""

    def __init__(self, channel: Channel, watch: LargestLogits | None) -> None:
        self.channel, self.watch = channel, watch

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> Any:
        if not self.channel.wait():
            trainer.should_stop = True
            return -1  # skip the rest of the epoch
        if self.watch is not None:
            self.watch.__enter__()
        return None

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if self.watch is not None:
            self.watch.__exit__(None, None, None)
        self.channel.stop()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.should_stop:
            metrics = trainer.callback_metrics
            loss, norm = float(metrics["policy/loss"]), float(metrics["grad_norm/actor"])
            self.channel.answer(loss, norm, largest_logits=0 if self.watch is None else self.watch.bytes)


def main() -> None:
    keep_freed_memory()
    job = own_job()
    channel = Channel(job.device)
    torch.set_num_threads(job.threads)
    watch = LargestLogits() if job.variant == "logits" else None
    make_trainer(job, StepByStep(channel, watch)).fit(PolicyAgent(job), GivenData(rollout_of(job.rows())))


def make_trainer(job: Job, *callbacks: L.Callback, max_epochs: int = -1) -> L.Trainer:
    """An epoch is one optimizer step."""
    return L.Trainer(
        accelerator="gpu" if job.device == "cuda" else "cpu",
        devices=1,
        precision=cast(Any, {"bf16": "bf16-mixed", "float32": "32-true"}[job.precision]),
        max_epochs=max_epochs,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


if __name__ == "__main__":
    main()
