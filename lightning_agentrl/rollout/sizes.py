"""How much a rollout holds, how ranks share it and how it is cut into mini-batches."""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L

from lightning_agentrl.prompts.memory import Memory
from lightning_agentrl.rollout.collection import Collection, FixedTurns
from lightning_agentrl.rollout.groups import GroupRollout, Groups
from lightning_agentrl.rollout.session_maker import SessionMaker

TURNS_PER_ENV, MINI_BATCH_TURNS = 8, 128


class RolloutSizes(L.LightningDataModule):
    """The counts of a :class:`RolloutDataModule`, whose arguments these are.

    Raises:
        ValueError: sizes that do not fit each other, with the key to change.
    """

    def __init__(
        self,
        num_envs: int,
        turns_per_env: int,
        mini_batch_turns: int,
        groups: GroupRollout | None,
        update_epochs: int,
        memory: Memory,
    ) -> None:
        super().__init__()
        self.num_envs = num_envs
        self.turns_per_env = turns_per_env
        self.mini_batch_turns = mini_batch_turns
        self.groups = groups
        self.update_epochs = update_epochs
        self.memory = memory
        for name in ("num_envs", "turns_per_env", "mini_batch_turns", "update_epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.init_args.{name} must be at least 1, got {getattr(self, name)}")
        if groups is None:
            self._check_turns()
        else:
            self._refuse_turns()

    @property
    def turns_per_rollout(self) -> int:
        """Of a rollout of a fixed number of turns."""
        return self.num_envs * self.turns_per_env

    @property
    def envs_per_rollout(self) -> int:
        """The environments that turns of a rollout name, over all ranks; with groups each episode has its own."""
        return self.num_envs if self.groups is None else self.groups.episodes

    @property
    def own_envs(self) -> Sequence[int]:
        """Those of this rank, numbered over all ranks."""
        rank, world = self._place
        if self.groups is not None:
            return self.groups.places(rank, world)
        share = self.num_envs // world
        return range(rank * share, (rank + 1) * share)

    @property
    def at_a_time(self) -> int:
        """Environments that play at a time on this rank."""
        return self.num_envs // self._place[1]

    @property
    def unit(self) -> str:
        """What the progress of a collection counts."""
        return FixedTurns.unit if self.groups is None else Groups.unit

    @property
    def mini_batches(self) -> int:
        """Of a pass over a rollout."""
        return self.turns_per_rollout // self.mini_batch_turns if self.groups is None else self.groups.mini_batches

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps, which are the mini-batches of a Lightning epoch."""
        return self.mini_batches * self.update_epochs

    def check_processes(self, world: int) -> None:
        """Refuse a number of processes that cannot share the environments.

        Raises:
            ValueError: with the key to change.
        """
        if self.num_envs % world:
            raise ValueError(
                f"{self.num_envs} environments cannot be shared evenly by {world} processes; "
                "change data.init_args.num_envs or trainer.devices"
            )
        if self.groups is not None:
            self.groups.check_processes(world)

    @property
    def _place(self) -> tuple[int, int]:
        """Rank and number of ranks."""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def _new_collection(self, make: SessionMaker, greedy: bool, collected: int) -> Collection:
        """What this rank collects.

        Args:
            make: makes its sessions.
            greedy: with a greedy episode for each group.
            collected: rollouts that were collected before.
        """
        if self.groups is None:
            return FixedTurns([make.fixed(i, pictures=True) for i in self.own_envs], self.turns_per_env)
        return Groups(
            self.groups,
            make.of_group,
            make.mix.kind,
            *self._place,
            at_a_time=self.at_a_time,
            grows=self.memory.grows,
            greedy=greedy,
            collected=collected,
        )

    def _check_turns(self) -> None:
        if self.turns_per_rollout % self.mini_batch_turns:
            raise ValueError(
                f"an iteration has num_envs * turns_per_env = {self.num_envs} * {self.turns_per_env} = "
                f"{self.turns_per_rollout} turns, which do not divide into mini-batches of {self.mini_batch_turns}; "
                "change data.init_args.mini_batch_turns"
            )
        if self.memory.grows and self.num_envs < self.turns_per_rollout // self.mini_batch_turns:
            raise ValueError(
                f"{type(self.memory).__name__} keeps the turns of an episode in one sample, so each mini-batch needs "
                f"an environment: {self.turns_per_rollout // self.mini_batch_turns} mini-batches, {self.num_envs} "
                "environments; raise data.init_args.num_envs or mini_batch_turns"
            )

    def _refuse_turns(self) -> None:
        for name, default in (("turns_per_env", TURNS_PER_ENV), ("mini_batch_turns", MINI_BATCH_TURNS)):
            if getattr(self, name) != default:
                instead = "per_rollout and size" if name == "turns_per_env" else "mini_batches"
                raise ValueError(
                    f"groups are whole episodes, so a rollout has no fixed number of turns; remove "
                    f"data.init_args.{name} and set {instead} of data.init_args.groups"
                )
