"""Settings with which a policy plays outside of training: prompts, memory, interaction and parser."""

from __future__ import annotations

import json
from argparse import ArgumentError
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_agentrl.engines import Engine
from lightning_agentrl.episodes.env_pool import EnvPool
from lightning_agentrl.episodes.interaction import Interaction, TurnInteraction
from lightning_agentrl.episodes.sources import EnvConfig
from lightning_agentrl.episodes.wording import Wording
from lightning_agentrl.errors import ConfigError, one_line
from lightning_agentrl.prompts.memory import Memory, WindowMemory
from lightning_agentrl.prompts.messages import PromptFormat
from lightning_agentrl.prompts.renderer import ChatRenderer
from lightning_agentrl.prompts.template import RunDate
from lightning_agentrl.rollout.player import Player
from lightning_agentrl.types.model_input import ImageReader
from lightning_agentrl.types.plain_config import to_plain

SETTINGS_FILE = "agentrl.json"  # file in the folder of an exported policy


@dataclass(frozen=True)
class PolicySettings:
    """Settings with which a policy plays.

    Args:
        prompt: texts and limits of prompts.
        memory: memory, which selects what a prompt shows of past turns.
        interaction: turn loop with its parser.
        temperature: temperature of sampling in training.
        seed: seed of the run, from which the seeds of replies are derived.
        date: date of the run in ISO 8601, which some chat templates write; empty: now.
        wordings: wordings of the config by environment id.
    """

    prompt: PromptFormat = field(default_factory=PromptFormat)
    memory: Memory = field(default_factory=WindowMemory)
    interaction: Interaction = field(default_factory=TurnInteraction)
    temperature: float = 1.0
    seed: int = 0
    date: str = ""
    wordings: dict[str, Wording] = field(default_factory=dict)

    @classmethod
    def of_run(cls, data: Any, temperature: float) -> PolicySettings:
        """Return the settings of a run.

        Args:
            data: ``RolloutDataModule`` of the run.
            temperature: temperature of the agent.
        """
        date, sources = data.date.now.isoformat(), [one for one in data.pool.sources if isinstance(one, EnvConfig)]
        wordings = {one.id: one.wording for one in sources if one.wording is not None}
        return cls(data.prompt, data.memory, data.interaction, temperature, data.seed, date, wordings)

    def to_plain(self) -> dict[str, Any]:
        """Serialize the settings to JSON types; secrets in a user's classes are left out."""
        return {name: to_plain(value, strict=False) for name, value in vars(self).items()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], where: str) -> PolicySettings:
        """Restore settings from :meth:`to_plain`. Classes are imported by name and must have the right base class.

        Args:
            plain: serialized settings.
            where: description of their origin, for error messages.

        Raises:
            ConfigError: a class cannot be imported or created.
        """
        from jsonargparse import ArgumentParser  # slow to import

        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(cls, "policy", fail_untyped=False)
        try:
            made: PolicySettings = parser.instantiate(parser.parse_object({"policy": dict(plain)})).policy
        except (ArgumentError, ImportError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the prompt settings in {where} cannot be read: {one_line(str(error))}; import the module of your own "
                "classes first, and let them store their arguments as attributes of the same names"
            ) from error
        return made

    def as_file(self) -> dict[str, str]:
        """Return name and text of the settings file."""
        return {SETTINGS_FILE: json.dumps(self.to_plain(), indent=2) + "\n"}

    @classmethod
    def in_file(cls, file: Path) -> PolicySettings:
        """Read the settings file of an exported policy.

        Raises:
            ConfigError: the file is not a valid settings file.
        """
        try:
            plain = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"'{file}' is not JSON ({error}); export the policy again") from error
        return cls.from_plain(plain, f"'{file}'")

    def worded(self, source: EnvConfig) -> EnvConfig:
        """Return an environment with its wording from training. An environment that has a wording stays unchanged."""
        wordings = {name.split(":")[-1]: wording for name, wording in self.wordings.items()}
        other = copy(source)
        other.texts = tuple(self.prompt.places)
        if source.wording is None and source.name in wordings:
            other.wording = wordings[source.name]
        return other

    def player(
        self,
        pool: EnvPool,
        tokenizer: PreTrainedTokenizerBase,
        image_reader: ImageReader | None,
        context_length: int,
        engine: Engine,
    ) -> Player:
        """Return a player with these settings.

        Args:
            pool: pool of environments.
            tokenizer: tokenizer of the policy.
            image_reader: converter of images to model inputs; None if the policy reads text only.
            context_length: number of tokens that the policy can read.
            engine: sampler of replies.
        """
        date = RunDate()
        if self.date:
            date.now = datetime.fromisoformat(self.date)
        renderer = ChatRenderer(tokenizer, self.prompt, image_reader, date)
        return Player(
            pool, renderer, self.memory, self.interaction, engine, self.seed, self.temperature, context_length
        )
