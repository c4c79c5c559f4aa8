"""A session: one environment with its running episode. Sessions live on from rollout to rollout."""

from __future__ import annotations

import asyncio
import io
import itertools
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from PIL import Image

from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.prompts.memory import Memory, PastTurn
from lightning_agentrl.prompts.renderer import ChatRenderer
from lightning_agentrl.types import Segment, SegmentKind, flatten_ids

_STEP = "(observation, reward, terminated, truncated, info)"


@dataclass(frozen=True)
class Prompt:
    """The next prompt of an episode: ``context`` was read before (growing samples only), ``new`` is added to it."""

    context: tuple[Segment, ...]
    new: tuple[Segment, ...]
    history_cuts: int

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(flatten_ids((*self.context, *self.new)))

    def as_segment(self) -> Segment:
        """Everything as one prompt segment."""
        return Segment(SegmentKind.PROMPT, self.ids)


class ReplayDiffersError(RuntimeError):
    """An environment did not lead to the same observation from the same seed and actions."""


@dataclass(frozen=True)
class StepResult:
    """What the environment answered."""

    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]
    seconds: float


class Session:
    """One environment, its episode so far, and how that becomes a prompt.

    Args:
        index: number of the environment over all ranks.
        env: the environment; its blocking calls run in ``executor``.
        episode_seed: seed of the n-th episode.
        renderer: prompts as tokens.
        memory: what of the past is shown.
        remake: makes the environment anew after an error.
        retries: see :class:`EnvConfig`.
        pictures: keep a picture of each turn, where the environment draws itself.
        first_episode: number of the first episode.
    """

    def __init__(
        self,
        index: int,
        env: gymnasium.Env,
        episode_seed: Callable[[int], int],
        renderer: ChatRenderer,
        memory: Memory,
        executor: Executor,
        remake: Callable[[], gymnasium.Env] | None = None,
        retries: int = 0,
        pictures: bool = True,
        first_episode: int = 0,
    ) -> None:
        self.index = index
        self.env = env
        self.episode_seed = episode_seed
        self.renderer = renderer.free_text if self.free_text else renderer
        self.memory = memory
        self.executor = executor
        self.remake = remake
        self.retries = retries if remake else 0
        self.pictures = pictures
        self.env_errors: list[str] = []  # kinds of errors that were overcome since they were last taken
        self.first_episode = first_episode
        self.episode = first_episode - 1  # none yet
        self.turns_taken = 0  # over all episodes of this session
        self.observation = ""  # long-term text
        self.short_term = ""
        self.past: list[PastTurn] = []
        self.env_actions: list[str] = []  # what the environment was given in this episode, for replay
        self.context: tuple[Segment, ...] = ()
        self.episode_return = 0.0  # environment rewards of this episode so far
        self.closed = True  # the last sampled reply ended with the turn-close token
        self.env_call = ""  # what the environment is doing: reset, step, render, or nothing
        self.moved_at = 0.0  # when that changed, on the monotonic clock

    # Static data that an environment may offer (see docs/environments.md); plain text environments have none of it.

    @property
    def actions(self) -> Mapping[str, str]:
        return self._offered("actions", {})

    @property
    def aliases(self) -> Mapping[str, str]:
        return self._offered("aliases", {})

    @property
    def default_action(self) -> str:
        return self._offered("default_action", "")

    @property
    def system_prompt(self) -> str:
        return self._offered("system_prompt", "")

    @property
    def examples(self) -> Sequence[tuple[str, str]]:
        return self._offered("examples", ())

    @property
    def free_text(self) -> bool:
        """The whole reply is the action."""
        return bool(self._offered("free_text", False))

    @property
    def one_turn(self) -> bool:
        """Episodes have one turn, so a memory has nothing to show."""
        return bool(self._offered("one_turn", False))

    def _offered(self, name: str, default: Any) -> Any:
        return self.env.get_wrapper_attr(name) if self.env.has_wrapper_attr(name) else default  # wrappers may offer too

    @property
    def begun(self) -> bool:
        return self.episode >= self.first_episode

    async def start(self) -> None:
        """Reset the environment if no episode was begun yet."""
        if not self.begun:
            await self.reset()

    def begin(self) -> None:
        """Start the first episode outside of any event loop."""
        self.episode = self.first_episode
        with self._telling_where():
            self._reset_env()

    async def reset(self) -> None:
        """Begin the next episode."""
        self.episode += 1
        with self._telling_where():
            await self._in_executor("reset", self._reset_env)
        self.past, self.context, self.closed, self.episode_return = [], (), True, 0.0

    async def step(self, action: str) -> StepResult:
        """Let the environment take one action."""
        self.turns_taken += 1
        started = time.perf_counter()
        with self._telling_where(action):
            reward, terminated, truncated, info = await self._in_executor("step", self._step_env, action)
        self.episode_return += reward
        return StepResult(reward, terminated, truncated, info, time.perf_counter() - started)

    def prompt(self) -> Prompt:
        """The prompt for the current observation."""
        if self.context:
            new = self.renderer.continuation(
                self.system_prompt, self.observation, self.short_term, self.actions, self.closed
            )
            return Prompt(self.context, new, history_cuts=0)
        rendered = self.renderer.render(
            self.system_prompt,
            self.examples,
            self.memory.recall(self.past),
            self.observation,
            self.short_term,
            self.actions,
        )
        return Prompt((), rendered.segments, rendered.history_cuts)

    def remember(self, turn: PastTurn, prompt: Prompt, action: Segment) -> None:
        """Add a finished turn to the history."""
        self.past.append(turn)
        if self.memory.grows:
            self.context = (*prompt.context, *prompt.new, action)
            self.closed = action.ids[-1] == self.renderer.turn_close_id

    def state_dict(self) -> dict[str, Any]:
        """Plain types; the environment itself is its seed and the actions it was given."""
        return {
            "episode": self.episode,
            "turns_taken": self.turns_taken,
            "observation": self.observation,
            "past": [asdict(turn) for turn in self.past],
            "env_actions": list(self.env_actions),
            "context": [(str(s.kind), list(s.ids), list(s.logps)) for s in self.context],
            "closed": self.closed,
            "episode_return": self.episode_return,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the saved episode again and replay its actions.

        Raises:
            ReplayDiffersError: when the replay does not lead to the saved observation.
        """
        self.episode = state["episode"]
        self.turns_taken = state["turns_taken"]
        if not self.begun:
            return
        self._replay(state["env_actions"], state["observation"])
        self.past = [PastTurn(**turn) for turn in state["past"]]
        self.context = tuple(Segment(SegmentKind(k), tuple(i), tuple(p)) for k, i, p in state["context"])
        self.closed = state["closed"]
        self.episode_return = state["episode_return"]

    def close(self) -> None:
        self.env.close()

    async def image(self) -> bytes | None:
        """PNG of the environment as it is, where its ``render_mode`` is ``rgb_array``."""
        if not self.pictures or self.env.render_mode != "rgb_array":
            return None
        with self._telling_where("render"):
            return await self._in_executor("render", self._draw)

    def take_env_errors(self) -> tuple[str, ...]:
        """Kinds of errors that were overcome since the last time this was asked."""
        errors, self.env_errors = tuple(self.env_errors), []
        return errors

    async def _in_executor(self, call: str, fn: Callable[..., Any], *args: Any) -> Any:
        self.env_call, self.moved_at = call, time.monotonic()
        try:
            return await asyncio.get_running_loop().run_in_executor(self.executor, fn, *args)
        finally:
            self.env_call, self.moved_at = "", time.monotonic()

    def _reset_env(self) -> None:
        self.env_actions = []
        self._see(*self._retried(self._reset_once))

    def _step_env(self, action: str) -> tuple[float, bool, bool, Mapping[str, Any]]:
        answer = self._retried(lambda: self.env.step(action), action)
        observation, reward, terminated, truncated, info = _checked(answer, 5, "step", _STEP)
        self.env_actions.append(action)
        self._see(observation, info)
        if not isinstance(reward, SupportsFloat):
            raise EnvError(
                "contract", f"the environment gave a reward of type {type(reward).__name__}; it must be a number"
            )
        return float(reward), bool(terminated), bool(truncated), info

    def _reset_once(self) -> tuple[Any, Mapping[str, Any]]:
        return _checked(self.env.reset(seed=self.episode_seed(self.episode)), 2, "reset", "(observation, info)")

    def _retried(self, call: Callable[[], Any], action: str | None = None) -> Any:
        """Let the environment answer; after an error, make it anew, play the episode up to here and ask again."""
        last: Exception | None = None
        for attempt in itertools.count():
            try:
                if attempt:
                    self._revive(replay=action is not None)
                return call()
            except ReplayDiffersError as error:
                raise error from last  # nobody knows what state it would go on from
            except Exception as error:
                if attempt >= self.retries:
                    raise
                last = error
                self.env_errors.append(type(error).__name__)
                warnings.warn(f"{type(error).__name__}: {error} ({self._where(action)}); trying again", stacklevel=2)

    def _revive(self, replay: bool) -> None:
        assert self.remake is not None
        with suppress(Exception):  # whatever a broken environment says as it goes
            self.env.close()
        self.env = self.remake()
        if replay:
            self._replay(self.env_actions, self.observation)

    def _replay(self, actions: Sequence[str], observation: str) -> None:
        """Play the running episode from its start.

        Raises:
            ReplayDiffersError: when that does not lead to ``observation``, since the environment then draws randomness
                from elsewhere than its seed.
        """
        seen, info = self._reset_once()
        for action in actions:
            seen, _, _, _, info = self.env.step(action)
        if info.get("long_term_text", seen) != observation:
            raise ReplayDiffersError(
                f"environment {self.index} does not repeat its episode from seed and actions, so it cannot be resumed; "
                "draw all its randomness from self.np_random"
            )
        self._see(seen, info)
        self.env_actions = list(actions)

    @contextmanager
    def _telling_where(self, action: str | None = None) -> Iterator[None]:
        """Add to an error where it came from. Not in the executor, since asyncio copies a TimeoutError on its way."""
        try:
            yield
        except (EnvError, ReplayDiffersError) as error:
            error.add_note(self._where(action))
            raise
        except Exception as error:  # noqa: BLE001 - whatever an environment raises
            told = _of_environment(error)
            told.add_note(self._where(action))
            raise told from None

    def _where(self, action: str | None) -> str:
        doing = "in its reset" if action is None else f"in turn {len(self.env_actions)}, action {action!r}"
        seed = self.episode_seed(self.episode)
        return f"environment {self.index}, episode {self.episode} with seed {seed}, {doing}"

    def _draw(self) -> bytes:
        frame = np.asarray(self.env.render())
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise EnvError(
                "contract",
                f"environment {self.index} draws {frame.dtype} {list(frame.shape)}; with render_mode 'rgb_array' its "
                "render() must give uint8 [height, width, 3]",
            )
        file = io.BytesIO()
        Image.fromarray(frame).save(file, "PNG")
        return file.getvalue()

    def _see(self, observation: Any, info: Mapping[str, Any]) -> None:
        if not isinstance(observation, str):
            raise EnvError(
                "contract",
                f"environment {self.index} gave an observation of type {type(observation).__name__}; "
                "observations must be text (wrap the environment)",
            )
        self.observation = info.get("long_term_text", observation)
        self.short_term = info.get("short_term_text", "")


def _checked(answer: Any, count: int, call: str, form: str) -> Any:
    """What reset or step of an environment gave, if it has gymnasium's form."""
    if isinstance(answer, tuple) and len(answer) == count:
        return answer
    got = f"{len(answer)} values" if isinstance(answer, tuple) else f"a value of type {type(answer).__name__}"
    raise EnvError("contract", f"the environment's {call} gave {got}; it must give {form}")


def _of_environment(error: Exception) -> EnvError:
    """What an environment raised, with its own part of the traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        module = str(trace.tb_frame.f_globals.get("__name__"))
        if not module.startswith((__name__, "gymnasium.", "concurrent.", "asyncio.", "contextlib")):
            break
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    named = "".join(traceback.format_exception_only(error)).splitlines()[0]
    return EnvError(type(error).__name__, f"the environment raised {named}", text)
