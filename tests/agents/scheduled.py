"""An agent with schedulers in Lightning's way. A module of its own: processes import it by its name."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from lightning_agentrl.agents import PPOAgent


class Halving(PPOAgent):
    """Halves the actor's rate every second step, and the critic's never."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()["optimizer"]
        scheduler = LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 1.0])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 2}}


class OnPlateau(PPOAgent):
    """Multiplies rates by .1 after each iteration in which the success was no higher than before."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()["optimizer"]
        scheduler = ReduceLROnPlateau(optimizer, "max", factor=0.1, patience=0, threshold=0.0)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        success = self.trainer.callback_metrics.get("rollout/success")
        if success is not None:
            scheduler.step(success)
