"""Sizes of rollouts, mini-batches and the shares of ranks, and checks of a data module's arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from lightning_agentrl.engines import Engine
from lightning_agentrl.episodes.agent_program import AgentProgram
from lightning_agentrl.episodes.interaction import Interaction
from lightning_agentrl.episodes.sources import Source
from lightning_agentrl.prompts.memory import Memory
from lightning_agentrl.prompts.messages import PromptFormat
from lightning_agentrl.rollout.player import FaultLimits
from lightning_agentrl.rollout.validation import ValidationConfig
from lightning_agentrl.types.plain_config import check_kind

KEYS = "data.init_args"  # config key of a data module's arguments
LARGEST_SEED = 2**32 - 1  # the limit of Lightning's seed_everything

TURNS_PER_ENV, MINI_BATCH_TURNS = 8, 128  # defaults of a data module without groups
MOST = 2**31 - 1  # limit of all counts; an environment's index has 31 bits in the label of an episode
MOST_ENVS = 100_000  # limit of concurrent environments; a small environment takes 50 kB
MOST_EPISODES = 1_000_000  # limit of episodes in an iteration, which are all in memory


def check_whole(value: object, key: str, least: int | None = None, most: int | None = None) -> None:
    """Check that a value is an integer within bounds.

    Args:
        value: value to check.
        key: config key of the value, for the error message.
        least: lower bound; None means no bound.
        most: upper bound; None means no bound.

    Raises:
        ValueError: the value is not an integer within the bounds.
    """
    if not isinstance(value, Integral):
        raise ValueError(f"{key} must be a whole number, got {value!r}")
    if least is not None and int(value) < least:
        raise ValueError(f"{key} must be at least {least}, got {value}")
    if most is not None and int(value) > most:
        raise ValueError(f"{key} must be at most {most}, got {value}")


@dataclass(frozen=True)
class GroupRollout:
    """Sizes of iterations of whole groups. The episodes of a group share environment, task and seed.

    Args:
        size: number of episodes in a group.
        per_rollout: number of groups in an iteration, over all ranks.
        mini_batches: number of optimizer steps in each pass over a rollout.
        ahead: number of groups of later iterations that are played ahead in each iteration, to keep environments busy
            while the longest episodes end. Episodes played ahead continue with the weights of the next iteration.
        ahead_turns: number of turns per iteration that an episode of a later iteration is played ahead.
    """

    size: int = 8
    per_rollout: int = 16
    mini_batches: int = 2
    ahead: int = 0
    ahead_turns: int = 1

    def __post_init__(self) -> None:
        for name, least in (("size", 1), ("per_rollout", 1), ("mini_batches", 1), ("ahead", 0), ("ahead_turns", 1)):
            check_whole(getattr(self, name), f"data.init_args.groups.{name}", least, MOST)
        check_whole(self.episodes, "data.init_args.groups.size * per_rollout", most=MOST_EPISODES)
        if self.mini_batches > self.episodes:
            raise ValueError(
                f"{self.mini_batches} mini-batches need as many episodes, and an iteration has size * per_rollout = "
                f"{self.size} * {self.per_rollout} = {self.episodes}; lower data.init_args.groups.mini_batches"
            )

    @property
    def episodes(self) -> int:
        """Number of episodes of an iteration over all ranks. An episode's index is ``env`` of its turns."""
        return self.size * self.per_rollout

    @property
    def longest_ahead(self) -> int:
        """Largest number of iterations between the first turn of a group and the training on this group."""
        return math.ceil(self.ahead / self.per_rollout)

    def place(self, group: int, member: int) -> int:
        """Return the index of an episode among the episodes of its iteration."""
        return group % self.per_rollout * self.size + member

    def places(self, rank: int, world: int) -> list[int]:
        """Return the indices of a rank's episodes, which are the same in every iteration."""
        return [self.place(group, member) for group in self.due(0, rank, world) for member in range(self.size)]

    def due(self, rollout: int, rank: int, world: int) -> range:
        """Return the groups of a rank that are complete at the end of a rollout; rollouts are counted from 0."""
        return range(rollout * self.per_rollout + rank, (rollout + 1) * self.per_rollout, world)

    def begun_ahead(self, rollout: int, rank: int, world: int) -> range:
        """Return the groups of a rank that are played ahead in a rollout."""
        first = (rollout + 1) * self.per_rollout
        return range(first + rank, first + self.ahead, world)


@dataclass(frozen=True)
class RolloutSizes:
    """Sizes of rollouts, from the arguments of a :class:`RolloutDataModule`.

    Raises:
        ValueError: sizes do not match; the message names the key to change.
    """

    num_envs: int
    turns_per_env: int = TURNS_PER_ENV
    mini_batch_turns: int = MINI_BATCH_TURNS
    update_epochs: int = 1
    groups: GroupRollout | None = None  # None if a rollout has a fixed number of turns

    def __post_init__(self) -> None:
        check_kind(self.groups, GroupRollout, f"{KEYS}.groups")
        for name in ("num_envs", "turns_per_env", "mini_batch_turns", "update_epochs"):
            check_whole(getattr(self, name), f"data.init_args.{name}", 1, MOST_ENVS if name == "num_envs" else MOST)
        if self.groups is not None:
            self._refuse_turns()
        elif self.turns_per_rollout % self.mini_batch_turns:
            raise ValueError(
                f"an iteration has num_envs * turns_per_env = {self.num_envs} * {self.turns_per_env} = "
                f"{self.turns_per_rollout} turns, which do not divide into mini-batches of {self.mini_batch_turns}; "
                "change data.init_args.mini_batch_turns"
            )
        check_whole(self.steps_per_iteration, "mini-batches * data.init_args.update_epochs", most=MOST)

    def _refuse_turns(self) -> None:
        for name, default in (("turns_per_env", TURNS_PER_ENV), ("mini_batch_turns", MINI_BATCH_TURNS)):
            if getattr(self, name) != default:
                instead = "per_rollout and size" if name == "turns_per_env" else "mini_batches"
                raise ValueError(
                    f"groups are whole episodes, so a rollout has no fixed number of turns; remove "
                    f"data.init_args.{name} and set {instead} of data.init_args.groups"
                )

    @property
    def turns_per_rollout(self) -> int:
        """Number of turns of a rollout with a fixed number of turns, so not with groups."""
        return self.num_envs * self.turns_per_env

    @property
    def envs_per_rollout(self) -> int:
        """Number of different ``env`` values of a rollout's turns over all ranks; with groups, one per episode."""
        return self.num_envs if self.groups is None else self.groups.episodes

    @property
    def unit(self) -> str:
        """Unit that the progress bar of a collection counts."""
        return "turns" if self.groups is None else "episodes"

    @property
    def mini_batches(self) -> int:
        """Number of mini-batches in a pass over a rollout."""
        return self.turns_per_rollout // self.mini_batch_turns if self.groups is None else self.groups.mini_batches

    @property
    def steps_per_iteration(self) -> int:
        """Number of optimizer steps of an iteration, that is of mini-batches in a Lightning epoch."""
        return self.mini_batches * self.update_epochs

    def own_envs(self, rank: int, world: int) -> Sequence[int]:
        """Return the indices, over all ranks, of a rank's environments."""
        if self.groups is not None:
            return self.groups.places(rank, world)
        share = self.num_envs // world
        return range(rank * share, (rank + 1) * share)

    def at_a_time(self, world: int) -> int:
        """Return the number of concurrent environments on each rank."""
        return self.num_envs // world

    def check_processes(self, world: int) -> None:
        """Check that environments and groups can be shared evenly by ``world`` processes.

        Raises:
            ValueError: the sizes are not divisible; the message names the key to change.
        """
        if self.num_envs % world:
            raise ValueError(
                f"{self.num_envs} environments cannot be shared evenly by {world} processes; "
                "change data.init_args.num_envs or trainer.devices"
            )
        for name in ("per_rollout", "ahead") if self.groups is not None else ():
            if getattr(self.groups, name) % world:
                raise ValueError(
                    f"{getattr(self.groups, name)} groups cannot be shared evenly by {world} processes, and a group "
                    f"stays on one; change data.init_args.groups.{name} or trainer.devices"
                )


def check_arguments(data: Any, sources: Sequence[Source], seed: int | None) -> None:
    """Check classes and combinations of a data module's arguments.

    Args:
        data: data module.
        sources: sources of episodes.
        seed: argument ``seed``.

    Raises:
        ValueError: an argument is wrong; the message names the key to change.
    """
    kinds = {"memory": Memory, "prompt": PromptFormat, "interaction": Interaction, "engine": Engine}
    for name, kind in (kinds | {"validation": ValidationConfig, "faults": FaultLimits}).items():
        check_kind(getattr(data, name), kind, f"{KEYS}.{name}")
    if seed is not None:
        check_whole(seed, f"{KEYS}.seed", 0, LARGEST_SEED)
    memory, sizes, max_staleness = data.memory, data.sizes, data.max_staleness
    if not memory.grows and any(isinstance(source, AgentProgram) for source in sources):
        raise ValueError(
            f"an agent program keeps its own history, so {KEYS}.memory must be FullMemory, got {type(memory).__name__}"
        )
    if sizes.groups is None and memory.grows and sizes.num_envs < sizes.mini_batches:
        raise ValueError(
            f"{type(memory).__name__} keeps the turns of an episode in one sample, so each mini-batch needs an "
            f"environment: {sizes.mini_batches} mini-batches, {sizes.num_envs} environments; raise "
            f"{KEYS}.num_envs or mini_batch_turns"
        )
    key = f"{KEYS}.max_staleness"
    check_whole(max_staleness, key, 0)
    if max_staleness and not data.engine.own_weights:
        raise ValueError(
            f"{type(data.engine).__name__} does not declare its own copy of the weights (Engine.own_weights), so it "
            "cannot sample while the policy is trained; use VLLMEngine, VLLMServerEngine or TransformersEngine "
            f"(key {KEYS}.engine), or {key} 0"
        )
    oldest = 1 if sizes.groups is None else 1 + sizes.groups.longest_ahead
    if 0 < max_staleness < oldest:
        raise ValueError(
            f"groups begun {oldest - 1} iteration{'s' * (oldest > 2)} ahead, in rollouts collected 1 iteration ahead, "
            f"have turns that are up to {oldest} iterations old; raise {key} from {max_staleness} to {oldest} "
            f"or lower {KEYS}.groups.ahead"
        )
