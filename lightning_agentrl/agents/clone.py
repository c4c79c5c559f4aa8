"""Behavior cloning: an agent that learns to imitate the replies of given episodes."""

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
    """Behavior cloning: cross-entropy on the tokens of demonstrated replies, with the prompts of a run.

    An iteration has as many turns and steps as in reinforcement learning with the same data module, but the turns are
    demonstrations. The policy samples only in held-out episodes.

    Args:
        model: hub id, local folder, or ``demo`` (``demo-tools``: with tools) for the bundled model.
        demonstrations: source of whole episodes; by default the scripted players of the environments.
        min_return: smallest return of an episode to learn from; null: use all episodes.
        action_share: fraction of a reply's weight on the tokens that name the action, if the reply has a thought.
        lora: adapters to train on the frozen model; None: train all weights.
        train_tower: whether to train the vision tower of a model with images, too.
        optim: learning rate, weight decay and gradient clip of the actor. By default the learning rate is 2e-5 and
            decays linearly to 0 at the end of the run.
        compute: settings that trade memory for time.
        temperature: temperature of log-probs and of held-out episodes; use the temperature at which the policy will be
            sampled.
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
            advantage=ReinforcePlusPlus(),  # not used; this estimator requires neither a critic nor groups
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
        """Load the demonstrations before training begins."""
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
