"""`agentrl play`: a person in place of the policy, who reads exactly what the model would read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L

from lightning_agentrl.commands.ending import leave_out_noise
from lightning_agentrl.commands.files import naming_argument
from lightning_agentrl.commands.run_config import RunConfigCLI
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.models.loading import load_tokenizer, read_context_length, read_images
from lightning_agentrl.prompts.messages import PromptFormat
from lightning_agentrl.rollout import EnvConfig, RolloutDataModule, TurnInteraction
from lightning_agentrl.tools.play import Play


class PlayCLI(RunConfigCLI):
    """The prompts, memory and interaction of a run's config, without its trainer."""

    def __init__(self, config: Path) -> None:
        super().__init__(["--config", str(config), "--quiet=true"])

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Return one that is not used: the config's may need devices that are not here."""
        bare: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        return L.Trainer(**bare, enable_progress_bar=False, enable_model_summary=False)


def play_environment(
    id: str,
    config: Path | None = None,
    model: str | None = None,
    kwargs: dict[str, Any] | None = None,
    seed: int = 0,
) -> None:
    """Play an environment yourself: read the prompt of the model with its token count, and type the reply.

    Args:
        id: id of the environment, as in a config, such as agentrl_envs:GuessNumber-v0. If the config has one of this
            id, its arguments and words count.
        config: config of a run, for its prompts, memory, interaction and model. Default: the default of each key.
        model: hub id or folder of the model with the chat template and tokenizer. Default: the config's model, or demo.
        kwargs: arguments of the environment, such as '{highest: 9}'.
        seed: seed of the first episode; the next one has the next.

    Raises:
        ValueError: wrong input, in a sentence.
    """
    leave_out_noise()
    kwargs = kwargs or {}
    if seed < 0:
        raise ConfigError(f"--seed must be at least 0, got {seed}")
    data: RolloutDataModule | None = None
    named: AbstractContextManager[None] = nullcontext() if model is None else naming_argument()
    if config is not None:
        cli = PlayCLI(config)
        data, model = cli.datamodule, model or cli.model.model
    model = model or "demo"
    with named:
        tokenizer, context, image_reader = load_tokenizer(model), read_context_length(model), read_images(model)
    if data is None:
        interaction = TurnInteraction(max_reply_tokens=min(512, context // 2))
        prompt = PromptFormat(max_prompt_tokens=context - interaction.max_reply_tokens)
        data = RolloutDataModule(EnvConfig(id, kwargs), prompt=prompt, interaction=interaction)
    else:
        data = _with(data, id, kwargs)
    try:
        data.check(tokenizer, context, image_reader)
        Play(data, tokenizer, image_reader, seed).go_on()
    finally:
        data.pool.close()


def _with(data: RolloutDataModule, env_id: str, kwargs: Mapping[str, Any]) -> RolloutDataModule:
    """Return the data module of a config with one environment alone."""
    own = [source for source in data.pool.sources if isinstance(source, EnvConfig) and source.id == env_id]
    env = own[0] if own else EnvConfig(env_id)
    env = replace(env, kwargs={**env.kwargs, **kwargs})
    return RolloutDataModule(env, memory=data.memory, prompt=data.prompt, interaction=data.interaction)
