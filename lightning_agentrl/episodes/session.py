"""A session: one environment with its running episode. Sessions live on from rollout to rollout."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from lightning_agentrl.episodes.contract import Contract
from lightning_agentrl.episodes.env_worker import EnvWorker, Start
from lightning_agentrl.episodes.environment import Answer
from lightning_agentrl.prompts.memory import Memory, PastTurn
from lightning_agentrl.prompts.renderer import ChatRenderer
from lightning_agentrl.types import ModelInput, Segment, SegmentKind, input_of
from lightning_agentrl.types.plain import segments_from_plain, segments_to_plain


@dataclass(frozen=True)
class Prompt:
    """The next prompt of an episode: ``context`` was read before (growing samples only), ``new`` is added to it."""

    context: tuple[Segment, ...]
    new: tuple[Segment, ...]
    history_cuts: int

    @cached_property
    def input(self) -> ModelInput:
        return input_of((*self.context, *self.new))

    def as_segment(self) -> Segment:
        """Return everything as one prompt segment."""
        return Segment(SegmentKind.PROMPT, self.input)


@dataclass(frozen=True)
class StepResult:
    """What the environment answered."""

    reward: float
    terminated: bool
    truncated: bool
    metrics: Mapping[str, float]
    info: Mapping[str, Any]
    seconds: float


class Session:
    """One environment and its episode so far, from which the next prompt is made.

    Args:
        index: number of the environment over all ranks.
        worker: where the environment lives.
        episode_seed: seed of the n-th episode.
        renderer: turns prompts into tokens.
        memory: what of the past a prompt shows.
        pictures: keep a picture of each turn, where the environment draws itself.
        first_episode: number of the first episode.
    """

    def __init__(
        self,
        index: int,
        worker: EnvWorker,
        episode_seed: Callable[[int], int],
        renderer: ChatRenderer,
        memory: Memory,
        pictures: bool = True,
        first_episode: int = 0,
    ) -> None:
        self.index = index
        self.worker = worker
        self.episode_seed = episode_seed
        self.memory = memory
        self.pictures = pictures
        self.first_episode = first_episode
        self.episode = first_episode - 1  # none yet
        self.turns_taken = 0  # over all episodes of this session
        self.observation = ""  # long-term text
        self.short_term = ""
        self.past: list[PastTurn] = []
        self.context: tuple[Segment, ...] = ()
        self.episode_return = 0.0  # environment rewards of this episode so far
        self.closed = True  # the last sampled reply ended with the turn-close token
        self._renderer = renderer

    @property
    def contract(self) -> Contract:
        """What the environment offers now, such as its actions."""
        return self.worker.contract

    @property
    def renderer(self) -> ChatRenderer:
        return self._renderer.free_text if self.contract.free_text else self._renderer

    @property
    def begun(self) -> bool:
        return self.episode >= self.first_episode

    async def start(self) -> None:
        """Begin the first episode, if none was begun yet."""
        if not self.begun:
            await self.reset()

    def begin(self) -> None:
        """Begin the first episode outside of any event loop."""
        self.episode = self.first_episode
        self._see(self.worker.reset_now(self._start))

    async def reset(self) -> None:
        """Begin the next episode."""
        self.episode += 1
        self._see(await self.worker.reset(self._start))
        self.past, self.context, self.closed, self.episode_return = [], (), True, 0.0

    async def step(self, action: str) -> StepResult:
        """Take one action in the environment and return what came of it."""
        started = time.perf_counter()
        answer = await self.worker.step(action)
        self._see(answer)
        self.turns_taken += 1
        self.episode_return += answer.reward
        seconds = time.perf_counter() - started
        return StepResult(answer.reward, answer.terminated, answer.truncated, answer.metrics, answer.info, seconds)

    async def image(self) -> bytes | None:
        """Return a PNG of the environment as it is, if its ``render_mode`` is ``rgb_array``."""
        if not self.pictures or self.contract.render_mode != "rgb_array":
            return None
        return await self.worker.draw()

    async def aclose(self) -> None:
        """Close the environment."""
        await self.worker.aclose()

    def close(self) -> None:
        """Close the environment outside of any event loop."""
        self.worker.close()

    def prompt(self) -> Prompt:
        """Return the prompt for the current observation."""
        contract = self.contract
        if self.context:
            new = self.renderer.continuation(
                contract.system_prompt, self.observation, self.short_term, contract.actions, self.closed
            )
            return Prompt(self.context, new, history_cuts=0)
        rendered = self.renderer.render(
            contract.system_prompt,
            contract.examples,
            self.memory.recall(self.past),
            self.observation,
            self.short_term,
            contract.actions,
        )
        return Prompt((), rendered.segments, rendered.history_cuts)

    def remember(self, turn: PastTurn, prompt: Prompt, action: Segment) -> None:
        """Add a finished turn to the history."""
        self.past.append(turn)
        if self.memory.grows:
            self.context = (*prompt.context, *prompt.new, action)
            self.closed = action.ids[-1] == self.renderer.turn_close_id

    def state_dict(self) -> dict[str, Any]:
        """Return the episode as plain types; the environment itself as its seed and actions."""
        return {
            "episode": self.episode,
            "turns_taken": self.turns_taken,
            "observation": self.observation,
            "past": [asdict(turn) for turn in self.past],
            "env_actions": list(self.worker.actions) if self.begun else [],
            "context": segments_to_plain(self.context),
            "closed": self.closed,
            "episode_return": self.episode_return,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the saved episode again and replay its actions.

        Raises:
            ReplayDiffersError: the replay does not lead to the saved observation.
        """
        self.episode = state["episode"]
        self.turns_taken = state["turns_taken"]
        if not self.begun:
            return
        self._see(self.worker.reset_now(self._start, state["env_actions"], state["observation"]))
        self.past = [PastTurn(**turn) for turn in state["past"]]
        self.context = segments_from_plain(state["context"])
        self.closed = state["closed"]
        self.episode_return = state["episode_return"]

    @property
    def _start(self) -> Start:
        return Start(self.index, self.episode, self.episode_seed(self.episode))

    def _see(self, answer: Answer) -> None:
        self.observation, self.short_term = answer.observation, answer.short_term
