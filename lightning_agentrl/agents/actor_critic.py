"""Actor, critic and reference as one LightningModule: how they are made, moved, optimised and saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_agentrl.agents.checkpoints import accept_checkpoint, check_weights, prepare_checkpoint
from lightning_agentrl.agents.gradients import start_adam
from lightning_agentrl.agents.master_weights import MasterWeights
from lightning_agentrl.agents.strategies import in_lockstep
from lightning_agentrl.agents.zero import GroupedAdamW, prepare_zero
from lightning_agentrl.distributed import all_gather, sum_over_ranks
from lightning_agentrl.models.critic import Critic
from lightning_agentrl.models.families import why_unshared
from lightning_agentrl.models.kernels import Kernels, check_kernels, use_kernels
from lightning_agentrl.models.language_model import LanguageModel, load_causal_lm, load_tokenizer
from lightning_agentrl.models.lora import LoRA, round_linear_layers
from lightning_agentrl.models.sharding import release, shard


class ActorCritic(L.LightningModule):
    """The models of an agent. Arguments are those of :class:`Agent`."""

    actor: LanguageModel

    def __init__(
        self,
        model: str,
        critic: Critic | None,
        needs_reference: bool,
        lr_actor: float,
        lr_critic: float,
        weight_decay: float,
        gradient_checkpointing: bool,
        recompute_logits: bool,
        lora: LoRA | None,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        self.model = model
        self.critic = critic
        self.needs_reference = needs_reference
        self.lr_actor, self.lr_critic, self.weight_decay = lr_actor, lr_critic, weight_decay
        self.gradient_checkpointing = gradient_checkpointing
        self.recompute_logits = recompute_logits
        self.lora = lora
        self.kernels: Kernels = kernels
        self.tokenizer: PreTrainedTokenizerBase = cast(PreTrainedTokenizerBase, None)  # set in setup
        self.masters = MasterWeights((), {})  # of the weights that are trained; set with the optimizer
        self._reference: list[LanguageModel] = []  # in a list: not a submodule, so neither optimised nor saved
        self._saved_weights: dict[str, Tensor] = {}  # of a checkpoint, until the optimizer is made

    @property
    def references(self) -> list[LanguageModel]:
        """The frozen copy of the initial policy, where one is kept."""
        return self._reference

    @property
    def shares_prefixes(self) -> bool:
        """Whether rows may be read as a prefix tree, by actor and critic."""
        return self.actor.shares_prefixes and (self.critic is None or self.critic.shares_prefixes)

    @property
    def shared_critic(self) -> Critic | None:
        """The critic, where it reads the hidden states of the actor."""
        return self.critic if self.critic is not None and self.critic.shares_trunk else None

    def setup(self, stage: str) -> None:
        self.tokenizer = load_tokenizer(self.model)
        if isinstance(self.trainer.strategy, DeepSpeedStrategy):
            prepare_zero(self.trainer.strategy)
        if self.lora is not None:
            self.lora.check(self.model)
        on_gpu, sharded = isinstance(self.trainer.accelerator, CUDAAccelerator), in_lockstep(self.trainer.strategy)
        check_kernels(self.kernels, on_gpu, sharded)

    def configure_model(self) -> None:
        """Load actor, critic and reference; called once the strategy is up, harmless when called again."""
        if hasattr(self, "actor"):
            return
        base = None if self.lora is None else load_causal_lm(self.model)  # below the adapters of actor and critic
        self.actor = LanguageModel(self._backbone("actor", None, base), self.recompute_logits)
        self._shard(self.actor)  # before the next model is read
        if self.critic is not None:
            self.critic.build(self.actor.hidden_size, lambda model: self._backbone("critic", model, base))
            self._shard(self.critic)
            self._modules["critic"] = self._modules.pop("critic")  # behind the actor, the order of the optimizer
        if self.needs_reference:
            initial = load_causal_lm(self.model) if base is None else base
            self._reference = [LanguageModel(initial).requires_grad_(False).eval()]
            self._shard(self._reference[0])
        if base is not None and self._trainer is not None and self._trainer.precision == "bf16-mixed":
            round_linear_layers(base, torch.bfloat16)
        if not self.shares_prefixes:
            why = why_unshared(self.actor.lm.config)
            who = f"'{self.model}' ({why})" if why else "the critic"
            rank_zero_warn(
                f"{who} cannot read several rows as one, so the beginnings that prompts have in common are computed "
                "for each turn anew"
            )

    def _shard(self, model: nn.Module) -> None:
        """Under FSDP2 keep this rank's share only; the reference is shared out like the models that are trained."""
        if self.device_mesh is not None:
            mixed = self.trainer.precision == "bf16-mixed"
            shard(model, self.device_mesh["data_parallel"], torch.bfloat16 if mixed else None)

    def _backbone(self, name: str, model: str | None, base: PreTrainedModel | None) -> PreTrainedModel:
        """All weights to be trained, or for the actor's own model with LoRA, adapters called ``name`` on its base."""
        if self.lora is not None and base is not None and model is None:
            lm = self.lora.adapt(base, name)
        else:
            lm = load_causal_lm(model or self.model)
        use_kernels(lm, self.kernels)
        if self.gradient_checkpointing:
            lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return lm.train()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.masters = masters = MasterWeights(self.named_parameters(), self._saved_weights)
        self._saved_weights = {}
        actor = masters.of(_trainable(self.actor))
        groups: list[dict[str, Any]] = [{"name": "actor", "params": actor, "lr": self.lr_actor}]
        if self.critic is not None:
            critic = masters.of(_trainable(self.critic))
            groups.append({"name": "critic", "params": critic, "lr": self.lr_critic})
        kind = GroupedAdamW if isinstance(self.trainer.strategy, DeepSpeedStrategy) else torch.optim.AdamW
        optimizer = kind(groups, weight_decay=self.weight_decay, fused=True)
        masters.attach(optimizer)
        if self.device_mesh is not None:
            start_adam(optimizer)  # a distributed checkpoint takes no state that is missing
        return optimizer

    def on_train_start(self) -> None:
        """A resumed run takes learning rates and weight decay from its configuration, not from the checkpoint."""
        rates = {"actor": self.lr_actor, "critic": self.lr_critic}
        for group in self.trainer.optimizers[0].param_groups:
            wanted = {"lr": rates[group["name"]], "weight_decay": self.weight_decay}
            for key, value in wanted.items():
                if group[key] != value:
                    rank_zero_info(f"{key} of the {group['name']}: {value}, in the checkpoint it was {group[key]}")
            group.update(wanted)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        prepare_checkpoint(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        accept_checkpoint(self, checkpoint)
        if "state_dict" in checkpoint:  # sharded strategies have read the weights already
            self._saved_weights = checkpoint["state_dict"]
            check_weights(self._saved_weights, self.state_dict())

    @contextmanager
    def cached_precision(self) -> Iterator[None]:
        """The trainer's precision; under autocast, weights are cast once and not in each forward pass."""
        with self.trainer.precision_plugin.forward_context():
            torch.set_autocast_cache_enabled(True)  # Lightning turns it off; autocast restores it on leaving
            yield

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Eval mode, no gradients, the trainer's precision."""
        self.eval()
        try:
            with torch.no_grad(), self.cached_precision():
                yield
        finally:
            self.train()
            for model in (self.actor, self.critic, *self._reference):
                if model is not None:
                    release(model)

    def reduce_sum(self, x: Tensor) -> Tensor:
        """Sum over all ranks, on the CPU."""
        return sum_over_ranks(x.to(self.device)).cpu()

    def gather(self, x: Tensor) -> list[Tensor]:
        """What every rank holds, on the CPU; sizes may differ."""
        return all_gather(x.cpu())

    def reduce_dict(self, numbers: dict[str, float]) -> dict[str, float]:
        """Sum over all ranks by name; a rank may lack names."""
        parts = all_gather(numbers)
        return {name: sum(part.get(name, 0.0) for part in parts) for name in sorted(set().union(*parts))}


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
