"""Export of the trained policy as a transformers folder at the end of training."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryFile
from typing import cast

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from lightning_agentrl.agents import Agent
from lightning_agentrl.distributed import raise_once
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.models.export import export_policy, load_policy, take_weights
from lightning_agentrl.models.loading import resolve_model
from lightning_agentrl.models.lora import frozen_weights
from lightning_agentrl.models.sharding import gathered, units
from lightning_agentrl.rollout.policy_settings import PolicySettings


class PolicyFolder(L.Callback):
    """Write the policy with its tokenizer at the end of training, as ``agentrl export`` does from a checkpoint.

    Adapters are merged into the model. The folder can be used as ``model.init_args.model`` of another run.

    Args:
        folder: folder to create; files of an earlier export are overwritten. The folder must not be that of the model
            that the run starts from.
    """

    def __init__(self, folder: str) -> None:
        if not folder:
            raise ValueError("PolicyFolder needs a folder, got ''")
        self.folder = folder

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Create the folder at the start, so that a wrong path is reported early.

        Raises:
            ConfigError: the folder is not writable, or it is the folder of a model that this run uses.
        """
        with raise_once():
            if stage == "fit" and trainer.is_global_zero:
                agent, folder = cast(Agent, pl_module), Path(self.folder).resolve()
                models = {Path(resolve_model(model)).resolve() for model in (agent.model, agent.reference) if model}
                if folder.is_dir() and folder in models:
                    raise ConfigError(
                        f"PolicyFolder would overwrite a model that this run uses, '{self.folder}'; choose another "
                        "folder (key trainer.callbacks)"
                    )
                try:
                    Path(self.folder).mkdir(parents=True, exist_ok=True)
                    TemporaryFile(dir=self.folder).close()
                except OSError as error:
                    raise ConfigError(
                        f"PolicyFolder cannot write to '{self.folder}': {error.strerror}; choose another folder (key "
                        "trainer.callbacks)"
                    ) from error

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        agent = cast(Agent, pl_module)
        # In 16 bits, the actor's weights are rounded if they have master weights, are gathered shards, or are LoRA's
        # base.
        sharded, bf16 = bool(units(agent.actor)), "bf16" in str(trainer.precision)
        rounds = bf16 and any((agent.steps.masters, sharded, agent.lora))
        # Merging adapters copies layers, which is not possible for sharded layers.
        exact = exact_weights(agent) if rounds or (sharded and agent.lora) else None
        with gathered(agent.actor) if exact is None else nullcontext():
            if trainer.is_global_zero:
                policy = agent.actor
                if exact is not None:
                    take_weights(policy := load_policy(agent.model, agent.lora), exact)
                settings = PolicySettings.of_run(agent.datamodule, agent.temperature)
                export_policy(policy, agent.tokenizer, Path(self.folder), files=settings.as_file())
        rank_zero_info(f"wrote the policy to {self.folder}")


def exact_weights(agent: Agent) -> dict[str, Tensor]:
    """Return the unrounded weights of the policy, as in a checkpoint, on the first rank; every rank must call this."""
    actor = agent.actor
    if units(actor):
        adapted = agent.lora is not None  # load frozen weights from the model, since the run's copies may be rounded
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapted)
        return cast(dict[str, Tensor], get_model_state_dict(actor, options=options))
    weights = agent.steps.masters.in_place_of(actor.state_dict())
    frozen = {} if agent.lora is None else frozen_weights(actor)
    return {name: weight for name, weight in weights.items() if name not in frozen}
