"""An agent and the engine that samples from it, while they are connected: weights are sent and sessions played."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning_agentrl.engines import Engine, PolicyHandle
from lightning_agentrl.episodes.interaction import Interaction
from lightning_agentrl.metrics.stages import StageClock
from lightning_agentrl.rollout.event_loop import LoopThread
from lightning_agentrl.rollout.player import Player
from lightning_agentrl.rollout.session_maker import SessionMaker
from lightning_agentrl.rollout.watchdog import Watchdog
from lightning_agentrl.stalls import waiting_for
from lightning_agentrl.types import ForkPlan

T = TypeVar("T")


@dataclass(frozen=True)
class Connection:
    """Everything that a data module has only while an agent is connected, and how it plays with it.

    Args:
        engine: started.
        handle: what the engine was started with.
        make: makes the sessions.
        loop: where they are played.
        interaction: the loop over turns.
        in_a_row: episodes that an environment may lose one after the other.
        stall_seconds: without any move, after which a warning says what is waited for; 0: never.
        rank_and_world: rank of this process, and number of ranks.
        policy_version: returns the number of optimizer steps attempted before.
        held_steps: returns the numbers of the attempts that leave the policy as it is.
        temperature: of training.
        clock: times stages and shows their progress.
        after_sync: called before each rollout, when the engine has taken over the weights.
        greedy_baseline: play one more episode of each group without randomness.
        forks: which states of a rollout are valued by playing on from them; None: none.
    """

    engine: Engine
    handle: PolicyHandle
    make: SessionMaker
    loop: LoopThread
    interaction: Interaction
    in_a_row: int
    stall_seconds: float
    rank_and_world: tuple[int, int]
    policy_version: Callable[[], int]
    held_steps: Callable[[], range]
    temperature: float
    clock: StageClock
    after_sync: Callable[[], None]
    greedy_baseline: bool
    forks: ForkPlan | None

    def send_weights(self) -> None:
        """Let the engine take over the current weights."""
        with self.clock.part("sync"), self._taking_weights():
            self.engine.sync(self.policy_version())

    def send_before_rollout(self) -> None:
        """Send the weights, and let callbacks use the engine."""
        self.send_weights()
        with self._taking_weights():
            self.after_sync()

    def player(self, temperature: float, stage: str = "") -> Player:
        """Return what plays a session.

        Args:
            temperature: of sampling.
            stage: what warnings call it; the running stage of the clock when not given.
        """
        return Player(
            self.interaction,
            self.engine,
            self.make.memory.grows,
            temperature,
            self.make.seed,
            self.clock.advance,
            self._watchdog(stage),
            self.in_a_row,
        )

    def play(self, player: Player, playing: Coroutine[Any, Any, T], look: Callable[[], None]) -> T:
        """Play until the end, on guard against what does not move.

        Args:
            player: plays.
            playing: what it plays.
            look: called now and then; may raise to leave.
        """
        assert player.watchdog is not None
        with self.engine.collecting(), player.watchdog.on_guard():
            return self.loop.run(playing, look)

    def _taking_weights(self) -> AbstractContextManager[None]:
        what = f"{type(self.engine).__name__} to take over the weights"
        return waiting_for(what, lambda: self.clock.running)

    def _watchdog(self, stage: str = "") -> Watchdog:
        return Watchdog(self.stall_seconds, type(self.engine).__name__, lambda: stage or self.clock.running)
