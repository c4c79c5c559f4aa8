"""Environment around an agent program: an observation is the program's next model call, an action the reply."""

from __future__ import annotations

import io
import json
import math
import queue
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from lightning_agentrl.episodes.env_worker import ReplayDiffersError
from lightning_agentrl.episodes.seeds import held_out_seeds
from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.gateway.agent_process import INFRASTRUCTURE, AgentProcess
from lightning_agentrl.gateway.conversation import (
    Call,
    Episode,
    Pending,
    Place,
    Refusal,
    Reply,
    Reward,
    ToolCall,
)

if TYPE_CHECKING:
    from lightning_agentrl.gateway.server import Line

LOOK_SECONDS = 0.05  # interval at which a program that makes no call is checked for its end
Score = Callable[[Mapping[str, Any], str], float]  # function (task, last text of the assistant) -> reward


class AgentEnv(gymnasium.Env[dict[str, Any] | str, str]):
    """Environment around an agent program, which is started for each episode with one task.

    An observation holds the new messages of a call, the turn that the messages follow, and the limits of the reply.
    An action is a :class:`Reply` as JSON. The episode ends with the program.

    Args:
        command: program and arguments.
        tasks: tasks of the file; the seed of an episode selects one.
        score: function whose result is added to the reward of the last call; None means no function.
        held_out: whether to use each task once, in order, for validation.
        seconds_between_calls: time limit between a reply and the program's next call, in seconds.
        max_calls: number of calls after which the episode is truncated; None means no limit.
        parallel: whether several calls may wait at once.
        on_error: reward if the program fails after its first reply; with None, the failure raises an EnvError.
        environment: names of environment variables that the program inherits.
        preload: modules that a Python interpreter imports once, before it forks for each episode.
    """

    free_text = True

    def __init__(
        self,
        command: Sequence[str],
        tasks: Sequence[Mapping[str, Any]],
        score: Score | None = None,
        held_out: bool = False,
        seconds_between_calls: float = 60.0,
        max_calls: int | None = 50,
        parallel: bool = True,
        on_error: float | None = None,
        environment: Sequence[str] = (),
        preload: Sequence[str] = (),
    ) -> None:
        self.command, self.tasks, self.score, self.held_out = command, tasks, score, held_out
        self.seconds_between_calls, self.max_calls = seconds_between_calls, max_calls
        self.parallel, self.on_error, self.environment, self.preload = parallel, on_error, environment, preload
        self.observation_space = gymnasium.spaces.Dict()
        self.action_space = gymnasium.spaces.Text(max_length=2**20, min_length=0)
        self.tool_schemas: Sequence[Mapping[str, Any]] = ()  # tools of the waiting call
        self.task: Mapping[str, Any] = {}
        self._line: Line | None = None
        self._process: AgentProcess | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any] | str, dict[str, Any]]:
        from lightning_agentrl.gateway.server import gateway  # imported here, since few runs need a server

        super().reset(seed=seed)
        self.close()
        chosen = int(self.np_random.integers(len(self.tasks)))
        if self.held_out and seed is not None:
            chosen = held_out_seeds().index(seed) % len(self.tasks)
        self.task = self.tasks[chosen]
        self._episode, self._counts = Episode(), Counter[str]()
        self._turns: dict[str, int] = {}  # index of a turn by the id of its completion
        self._text = ""  # text of the last reply
        self._now: tuple[Pending, Place] | None = None  # the call of the current observation
        self._others: list[tuple[Pending, Place]] = []  # calls that wait for their turn
        self._line = gateway().open(self.parallel)
        self._folder = tempfile.TemporaryDirectory(prefix="agentrl-agent-")
        self._result = Path(self._folder.name) / "result.json"
        variables = {
            "OPENAI_BASE_URL": f"{self._line.url}/v1",
            "OPENAI_API_KEY": self._line.token,
            "ANTHROPIC_BASE_URL": self._line.url,
            "ANTHROPIC_API_KEY": self._line.token,
            "AGENTRL_TASK": json.dumps(self.task),
            "AGENTRL_SEED": str(seed or 0),
            "AGENTRL_RESULT": str(self._result),
        }
        self._process = AgentProcess(self.command, variables, self.environment, self.preload)
        observation, _, ended = self._next()
        if ended:
            host = self._line.url.removesuffix(self._line.token)
            raise EnvError(
                "no_call",
                f"the agent ended (exit code {self._process.exit_code}) without a call of the model at {host}, the "
                f"address in OPENAI_BASE_URL and ANTHROPIC_BASE_URL{self._said()}",
            )
        return observation, self._info({})

    def step(self, action: str) -> tuple[dict[str, Any] | str, float, bool, bool, dict[str, Any]]:
        assert self._line is not None, "reset comes first"
        assert self._now is not None
        given = json.loads(action)
        calls = tuple(ToolCall(**call) for call in given.pop("tool_calls", ()))
        self._find(given.pop("key", None))
        reply = Reply(**given, tool_calls=calls)
        pending, _ = self._now
        self._turns[pending.id] = self._episode.add(pending.call, reply)
        self._text = reply.text
        self._line.answer(pending, reply)
        self._now = None
        observation, rewards, ended = self._next()
        reward = rewards.pop(self._episode.turns - 1, 0.0)
        truncated = not ended and self.max_calls is not None and self._episode.turns >= self.max_calls
        if ended:
            reward += self._end()
        return observation, reward, ended, truncated, self._info(rewards, ended, truncated)

    def _find(self, key: str | None) -> None:
        """Select the waiting call with this key, since parallel calls may arrive in another order than before."""
        while key is not None and self._now is not None and _key(*self._now) != key:
            self._others.append(self._now)
            self._now = None
            later = next((one for one in self._others if _key(*one) == key), None)
            if later is not None:
                self._others.remove(later)
                self._now = later
            elif not self.parallel or not self._waits_for_another():
                first = observation_of(self._others[0][0].call, self._others[0][1])["call"]
                sentence = "the agent makes another call than when the episode was recorded"
                raise ReplayDiffersError(sentence, call=first, turn=self._episode.turns)

    def _waits_for_another(self) -> bool:
        """Wait for another call, and return whether one arrived."""
        try:
            return not self._next(from_others=False)[2]
        except EnvError as error:
            if error.kind != "timeout":
                raise
            return False

    def refuse(self, sentence: str) -> None:
        """Answer the waiting call with an error in the provider's format, for example for a prompt that is too long."""
        if self._line is not None and self._now is not None:
            self._line.answer(self._now[0], Refusal(sentence))

    def close(self) -> None:
        """End the program and its descendants."""
        if self._line is not None:
            self._line.close()
        if self._process is not None:
            self._process.end()
        if self._folder is not None:
            self._folder.cleanup()
        self._line = self._process = self._folder = None

    def _next(self, from_others: bool = True) -> tuple[dict[str, Any] | str, dict[int, float], bool]:
        """Wait for the next call or the end of the program.

        Args:
            from_others: whether to return a call that already waits, if there is one.

        Returns:
            The observation of the call, the rewards posted meanwhile by turn, and whether the program has ended.
        """
        assert self._line is not None
        assert self._process is not None
        rewards: dict[int, float] = {}
        if from_others and self._others:
            self._now = self._others.pop(0)
            self.tool_schemas = self._now[0].call.tools
            return observation_of(self._now[0].call, self._now[1]), rewards, False
        deadline = time.monotonic() + self.seconds_between_calls
        while True:
            ended = self._process.exit_code is not None  # read before the queue, so that no last event is missed
            try:
                event = self._line.events.get(timeout=0 if ended else LOOK_SECONDS)
            except queue.Empty:
                if ended:
                    self._now, self.tool_schemas = None, ()
                    return "", rewards, True
                if time.monotonic() > deadline:
                    raise EnvError(
                        "timeout",
                        f"the agent made no call for {self.seconds_between_calls:g} s, the limit set by "
                        f"seconds_between_calls{self._said()}",
                    ) from None
                continue
            if isinstance(event, Reward):
                if not math.isfinite(event.value):
                    raise EnvError("reward", f"the agent posted the reward {event.value}; it must be finite")
                turn = self._turns.get(event.call, self._episode.turns - 1)
                rewards[turn] = rewards.get(turn, 0.0) + event.value
                self._counts["rewarded"] += 1
                continue
            place = self._episode.place(event.call)
            last = self._episode.turns - 1
            kind = "anew" if place.follows is None else "continued" if place.follows == last else "earlier"
            self._counts[kind] += 1
            self._now, self.tool_schemas = (event, place), event.call.tools
            return observation_of(event.call, place), rewards, False

    def _end(self) -> float:
        """Return the final reward: from the program's result file and the scorer, or ``on_error`` after a failure.

        Raises:
            EnvError: the program failed and ``on_error`` is None, or its result file cannot be read.
        """
        assert self._process is not None
        if code := self._process.exit_code:
            if self.on_error is None or code == INFRASTRUCTURE:
                kind = "infrastructure" if code == INFRASTRUCTURE else "exit"
                raise EnvError(kind, f"the agent ended with exit code {code}{self._said()}")
            self._counts["rewarded"] += 1
            return self.on_error
        reward = 0.0
        if self._result.exists():
            self._counts["rewarded"] += 1
            try:
                reward += float(json.loads(self._result.read_text())["reward"])
            except (ValueError, TypeError, LookupError) as error:
                raise EnvError("reward", f'the agent\'s result is not {{"reward": a number}}: {error}') from None
            if not math.isfinite(reward):
                raise EnvError("reward", f"the agent's result has the reward {reward}; it must be finite")
        if self.score is not None:
            self._counts["rewarded"] += 1
            reward += self.score(self.task, self._text)
        return reward

    def _info(self, rewards: Mapping[int, float], ended: bool = False, truncated: bool = False) -> dict[str, Any]:
        """Return the info of a step: rewards of earlier turns and, at the end of an episode, its counts."""
        assert self._line is not None
        counts = {
            "agent/calls": self._episode.turns,
            "agent/rows": self._counts["earlier"] + self._counts["anew"],  # rows, if no rollout cuts the episode
            **{f"agent/{name}": self._counts[name] for name in ("continued", "earlier", "anew")},
            "agent/abandoned": self._line.abandoned,
            **({"agent/no_reward": not self._counts["rewarded"]} if ended else {}),  # a reward may follow a truncation
        }
        metrics = {name: float(count) for name, count in counts.items()} if ended or truncated else {}
        return {"earlier_rewards": dict(rewards), "metrics": metrics}

    def _said(self) -> str:
        """Return the last refusal and the end of the program's output, to append to an error message."""
        said = self._process.excerpt() if self._process is not None else ""
        refused = f"; a call was refused: {self._line.refused}" if self._line and self._line.refused else ""
        return refused + (f"; it wrote: {said}" if said else "")


def _key(pending: Pending, place: Place) -> str:
    return f"{pending.call.digest}#{place.occurrence}"


def observation_of(call: Call, place: Place) -> dict[str, Any]:
    """Return the observation of a call: its settings, and the messages that the call adds to an earlier turn."""
    images: list[np.ndarray] = []
    messages = []
    for message in call.messages[place.known :]:
        content: list[str | None] = []
        for part in message.parts:
            content.append(part if isinstance(part, str) else None)
            if isinstance(part, bytes):
                images.append(_pixels(part))
        given: dict[str, Any] = {"role": message.role, "content": content}
        if message.tool_calls:
            given["tool_calls"] = [asdict(one) for one in message.tool_calls]
        if message.answers:
            given["tool_call_id"] = message.answers
        if message.name:
            given["name"] = message.name
        messages.append(given)
    return {
        "call": {
            "messages": messages,
            "images": images,
            "follows": place.follows,
            "key": f"{call.digest}#{place.occurrence}",
            "stop": list(call.stop),
            "max_tokens": call.max_tokens,
            "model": call.model,
            "calls_tools": call.calls_tools,
            "must_call": call.must_call,
        }
    }


def _pixels(file: bytes) -> np.ndarray:
    """Return the pixels of an image file, uint8 [height, width, 3]."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))
