"""`agentrl play`: play an environment as a human, with exactly the prompts that the model would get."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_agentrl.agents.saved_policy import find_policy
from lightning_agentrl.commands.ending import leave_out_noise
from lightning_agentrl.commands.files import naming_argument
from lightning_agentrl.commands.run_config import DataOnlyCLI
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.prompts.messages import PromptFormat
from lightning_agentrl.rollout import EnvConfig, TurnInteraction
from lightning_agentrl.rollout.policy_settings import PolicySettings
from lightning_agentrl.tools.play import Play


def play_environment(
    id: str,
    config: Path | None = None,
    model: str | None = None,
    kwargs: dict[str, Any] | None = None,
    seed: int = 0,
) -> None:
    """Play an environment yourself: read the prompt of the model with its token count, and type the reply.

    Args:
        id: id of the environment, as in a config, such as agentrl_envs:GuessNumber-v0. If the config has an
            environment with this id, its arguments and texts are used.
        config: config of a run, for its prompts, memory, interaction and model. Default: the default values of these
            keys.
        model: hub id or folder of the model with the chat template and tokenizer, or a checkpoint, whose prompts are
            shown unless a config is given. Default: the config's model, or demo.
        kwargs: arguments of the environment, such as '{highest: 9}'.
        seed: seed of the first episode; the seed grows by 1 with each episode.

    Raises:
        ValueError: an argument is wrong.
    """
    leave_out_noise()
    kwargs = kwargs or {}
    if seed < 0:
        raise ConfigError(f"--seed must be at least 0, got {seed}")
    settings, source = None, EnvConfig(id, kwargs)
    named: AbstractContextManager[None] = nullcontext() if model is None else naming_argument()
    if config is not None:
        cli = DataOnlyCLI(["--config", str(config), "--quiet=true"])
        data, model = cli.datamodule, model or cli.model.model
        settings = PolicySettings.of_run(data, temperature=1.0)
        own = [one for one in data.pool.sources if isinstance(one, EnvConfig) and one.id == id]
        if own:
            source = replace(own[0], kwargs={**own[0].kwargs, **kwargs})
    with named:
        saved = find_policy(model or "demo")
    settings = settings or saved.settings
    if settings is None:
        interaction = TurnInteraction(max_reply_tokens=min(512, saved.context_length // 2))
        prompt = PromptFormat(max_prompt_tokens=saved.context_length - interaction.max_reply_tokens)
        settings = PolicySettings(prompt, interaction=interaction)
    source.check()
    play = Play(saved, settings, settings.worded(source), seed)
    try:
        play.player.check_prompts(saved.context_length)
        play.go_on()
    finally:
        play.player.pool.close()
