"""Behaviour cloning: an agent that learns to reply as in given episodes."""

from __future__ import annotations

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_agentrl.advantages import ReinforcePlusPlus
from lightning_agentrl.agents.agent import KEYS, Agent
from lightning_agentrl.agents.models import Compute
from lightning_agentrl.agents.optim import Optim, Schedule, Schedules
from lightning_agentrl.agents.update import CurrentScores
from lightning_agentrl.distributed import raise_once
from lightning_agentrl.models.lora import LoRA
from lightning_agentrl.rollout.demonstrations import ClonedTurns, Demonstrations, Expert, chosen, what_is_cloned
from lightning_agentrl.types import Rollout
from lightning_agentrl.types.plain_config import check_kind

LR = 2e-5
FALLING = Schedules(actor=Schedule("linear"))


class CloneAgent(Agent):
    """Behaviour cloning: cross-entropy on the tokens of given replies, in the prompts of a run.

    An iteration has as many turns and steps as in reinforcement learning with the same data module, but the turns are
    demonstrated, not sampled. The policy itself plays held-out episodes only.

    Args:
        model: hub id, local folder, or ``demo`` (``demo-tools``: with tools) for the bundled model.
        demonstrations: whole episodes; those of the environments' scripted players by default.
        min_return: episodes that earned less are left out; null: none is.
        action_share: share of a reply's weight on the tokens that name the action, if the reply has a thought.
        lora: train adapters on the frozen model; None: all weights.
        train_tower: also train the vision tower of a model with images.
        optim: learning rate, weight decay and clip; those of the critic are not used. By default 2e-5, falling along a
            line to 0 at the end of the run.
        compute: settings that trade memory for time.
        temperature: of log-probs and of held-out play; the one with which the policy will be sampled.
    """

    def __init__(
        self,
        model: str,
        demonstrations: Demonstrations | None = None,
        min_return: float | None = None,
        action_share: float = 0.5,
        lora: LoRA | None = None,
        train_tower: bool = False,
        optim: Optim | None = None,
        compute: Compute | None = None,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(
            model,
            advantage=ReinforcePlusPlus(),  # estimates nothing here; it needs neither a critic nor groups
            lora=lora,
            train_tower=train_tower,
            optim=optim or Optim(lr_actor=LR, schedule=FALLING),
            compute=compute,
            temperature=temperature,
        )
        if not 0 < action_share <= 1:
            raise ValueError(f"{KEYS}.action_share must be above 0 and at most 1, got {action_share}")
        self.demonstrations = check_kind(demonstrations, Demonstrations, f"{KEYS}.demonstrations") or Expert()
        self.min_return = min_return
        self.action_share = action_share

    def policy_loss(self, batch: Rollout, scores: CurrentScores) -> Tensor:
        assert batch.weights is not None
        return -scores.logps * batch.weights

    def value_loss(self, batch: Rollout, values: Tensor) -> Tensor:
        raise NotImplementedError("cloning has no critic")

    def update_metrics(self, batch: Rollout, scores: CurrentScores) -> dict[str, Tensor]:
        return {"clone/cross_entropy": -scores.logps.detach(), "policy/entropy": scores.entropy.detach()}

    def on_fit_start(self) -> None:
        """Have the episodes ready before anything is played or trained."""
        super().on_fit_start()
        data = self.datamodule
        with raise_once(), self.clock.stage("collect"):
            episodes = self.demonstrations.load(data, self.tokenizer)
        with raise_once():
            kept = chosen(episodes, float("-inf") if self.min_return is None else self.min_return)
        with raise_once():
            source = ClonedTurns(kept, data, self.action_share)
        assert data.stream is not None
        data.stream.source = source
        rank_zero_info(what_is_cloned(kept, len(episodes), len(source.samples) / source.count))
