"""Client of environments behind a URL: OpenEnv's protocol without OpenEnv's package."""

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
from gymnasium import spaces

from agentrl_envs.openenv.connection import Connection, LostSocketError, ProtocolError, fetch_schema, reach
from agentrl_envs.openenv.fields import choose_fields, choose_images
from agentrl_envs.openenv.images import FIELD, read_images, with_images
from agentrl_envs.text_env import PRINTABLE

_MOST_CHARS = 2**20
# Entries of the protocol's metadata that become entries of `info`.
_REPORTED = ("success", "progression", "executed_action", "invalid_action", "long_term_text", "short_term_text")


class OpenEnv(gymnasium.Env[Any, str]):
    """A session with an OpenEnv server, as a gymnasium environment.

    Each socket has one environment at the server. A lost socket ends the episode with a `LostSocketError`. The socket
    is not reopened within an episode, since the environment of a new socket was not reset. The next `reset` opens a new
    socket, as after every other error.

    The protocol neither distinguishes truncated from terminated episodes nor has names of actions. A server can add
    `truncated` and the names to the metadata of an observation, as `agentrl serve-env` does. Without names, the whole
    reply is the action.

    Args:
        url: address of the server, such as `http://127.0.0.1:8000`.
        action: field of an action that takes the reply; by default the only text field that an action needs.
        text: field of an observation that is shown to the policy; by default the observation's only text field.
        images: field of an observation with pictures, in a form that `read_images` accepts; by default `images`, if the
            server has this field.
        max_turns: turns after which an episode is truncated. If a server does not report truncation, give fewer turns
            than the server's own limit.
        timeout_seconds: time limit for connecting, and for each reset and step. If a server that has answered before
            is unreachable or full when a socket is reopened, the client waits for the server up to this time.
        token: token that the server requires, as with `agentrl serve-env --token`; write `${NAME}` in a config to read
            the token from an environment variable.

    Raises:
        ValueError: no server answers at the address; the server is no OpenEnv server, uses another version of the
            protocol or accepts no further session; or the field of the action or of the text must be named.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - declared by gymnasium
    deterministic = False  # a server may ignore the seed, and an episode ends with its socket

    def __init__(
        self,
        url: str,
        action: str | None = None,
        text: str | None = None,
        images: str | None = None,
        max_turns: int | None = None,
        timeout_seconds: float = 60.0,
        token: str = "",
    ) -> None:
        if max_turns is not None and max_turns < 1:
            raise ValueError(f"max_turns must be at least 1 or None, not {max_turns}.")
        if not 0 < timeout_seconds < math.inf:
            raise ValueError(f"timeout_seconds must be above 0, not {timeout_seconds}.")
        self.url = _address(url)
        self.max_turns = max_turns
        self.timeout_seconds = timeout_seconds
        self._connect = partial(Connection, token=token)
        try:
            schema = reach(partial(fetch_schema, token=token), self.url, timeout_seconds)
            self.fields = choose_fields(schema, action, text)
            self.images = choose_images(schema, images)
            self._connection: Connection | None = reach(self._connect, self.url, timeout_seconds)
        except (OSError, RuntimeError) as error:
            raise ValueError(str(error)) from error
        self.observation_space = spaces.Text(_MOST_CHARS, min_length=0, charset=PRINTABLE)
        self.action_space = spaces.Text(_MOST_CHARS, min_length=0, charset=PRINTABLE)
        self._active = False
        self._offered: dict[str, Any] = {}
        self._turn = self._no_reward = 0

    # The properties below come from the metadata of the server.

    @property
    def actions(self) -> Mapping[str, str]:
        """Names and descriptions of the actions; empty if the server names no actions."""
        return self._offered.get("actions", {})

    @property
    def aliases(self) -> Mapping[str, str]:
        """Other names of actions."""
        return self._offered.get("aliases", {})

    @property
    def default_action(self) -> str:
        """Action that is executed when a reply names no action."""
        return self._offered.get("default_action", "")

    @property
    def system_prompt(self) -> str:
        """System prompt with the rules and the task."""
        return self._offered.get("system_prompt", "")

    @property
    def mission(self) -> str:
        """Task of this episode."""
        return self._offered.get("mission", "")

    @property
    def tips(self) -> str:
        """Hints for the policy."""
        return self._offered.get("tips", "")

    @property
    def examples(self) -> Sequence[tuple[str, str]]:
        """Pairs of an observation and a reply."""
        return self._offered.get("examples", ())

    @property
    def free_text(self) -> bool:
        """Whether the whole reply is the action, because the server names no actions."""
        return self._offered.get("free_text", not self.actions)

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:
        """Functions that a reply may call."""
        return self._offered.get("tool_schemas", ())

    @property
    def observation_role(self) -> str:
        """Role of the messages that follow an action."""
        return self._offered.get("observation_role", "user")

    @property
    def one_turn(self) -> bool:
        """Whether every episode has one turn."""
        return self._offered.get("one_turn", False)

    # The methods below are gymnasium's.

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; `options` are further arguments of the server's reset."""
        super().reset(seed=seed)
        self._active = False
        seed = int(self.np_random.integers(2**31)) if seed is None else int(seed)
        message = {"type": "reset", "data": {**(options or {}), "seed": seed}}
        kept = self._connection is not None
        try:
            answer = self._ask(message)
        except LostSocketError:
            if not kept:
                raise
            answer = self._ask(message)  # the socket was lost between two episodes, so try a new socket
        self._turn = self._no_reward = 0
        self._offered = {}
        observation, _, done, info = self._read(answer)
        if done:
            raise ProtocolError(f"the server at {self.url} says that an episode is over as it begins")
        self._active = True
        return observation, info

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Send the reply and return the server's result."""
        if not self._active:
            raise gymnasium.error.ResetNeeded("The episode is over or has not begun: call reset() before step().")
        self._active = False  # the episode is over if an error follows
        answer = self._ask({"type": "step", "data": {self.fields[0]: action}})
        self._turn += 1
        self._no_reward += answer.get("reward") is None
        observation, reward, done, info = self._read(answer)
        at_limit = self._turn == self.max_turns
        cut = _metadata(answer).get("truncated")
        if done and at_limit and cut is None:
            info["metrics"]["doubtful_end"] = 1.0
            warnings.warn(
                f"the server at {self.url} ended an episode at turn {self._turn} and does not say whether it was cut "
                "off; give max_turns below its own limit",
                stacklevel=2,
            )
        truncated = bool(cut) if done else at_limit  # a server may send 1 for true
        self._active = not (done or truncated)
        return observation, reward, done and not truncated, truncated, info

    def close(self) -> None:
        """Close the socket."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if self._connection is None:
            self._connection = reach(self._connect, self.url, self.timeout_seconds)
        try:
            return self._connection.ask(message)
        except Exception:
            self.close()
            raise

    def _read(self, answer: Mapping[str, Any]) -> tuple[Any, float, bool, dict[str, Any]]:
        """Return the observation, the reward, whether the episode is over, and `info` from an answer.

        Raises:
            ProtocolError: the answer has a wrong form.
        """
        observation, reward, done = answer.get("observation"), answer.get("reward"), answer.get("done")
        text = observation.get(self.fields[1]) if isinstance(observation, dict) else None
        metadata = _metadata(answer)
        metrics = metadata.get("metrics", {})
        self._need(isinstance(text, str), f"the field {self.fields[1]} of the observation must be a text", text)
        self._need(isinstance(done, bool), "done must be true or false", done)
        self._need(reward is None or _is_number(reward), "the reward must be a number", reward)
        self._need(metadata.get("truncated") in (None, True, False), "truncated must be true or false", metadata)
        self._need(isinstance(metrics, dict), "metrics must be names and numbers", metrics)
        self._offered |= {name: value for name, value in metadata.items() if name in _OFFERS}
        info = {name: metadata[name] for name in _REPORTED if metadata.get(name) is not None}
        info["metrics"] = {**metrics, "no_reward": float(self._no_reward)}
        assert isinstance(text, str)
        assert isinstance(observation, dict)
        assert isinstance(done, bool)
        return self._shown(text, observation, metadata), float(reward or 0.0), done, info

    def _shown(self, text: str, observation: Mapping[str, Any], metadata: Mapping[str, Any]) -> Any:
        """Return the text, with the pictures of the observation if it has any, or the environment's own messages.

        Raises:
            ProtocolError: pictures or messages have a wrong form.
        """
        given = observation.get(self.images) if self.images else None
        try:
            pictures = read_images(given)
            if "own_messages" in metadata:
                return {"messages": with_images(metadata["own_messages"], pictures)}
        except ValueError as error:
            self._need(False, f"the field {self.images or FIELD} must hold pictures, but {error}", given)
        return {"text": text, "images": pictures} if pictures else text

    def _need(self, right: bool, sentence: str, given: Any) -> None:
        if not right:
            self.close()
            raise ProtocolError(f"the server at {self.url} answered {str(given)[:80]!r}: {sentence}")


_OFFERS = tuple(name for name, value in vars(OpenEnv).items() if isinstance(value, property))


def _is_number(reward: Any) -> bool:
    """Return whether a reward is a number that fits into a float; JSON allows integers of any length."""
    return type(reward) in (int, float, bool) and (isinstance(reward, float) or abs(reward) <= sys.float_info.max)


def _metadata(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of an answer; servers put metadata beside the observation, into the observation, or both."""
    observation = answer.get("observation")
    inside = observation.get("metadata") if isinstance(observation, dict) else None
    found = [part for part in (inside, answer.get("metadata")) if isinstance(part, dict)]
    return {name: value for part in found for name, value in part.items()}


def _address(url: str) -> str:
    """Return the address of the server with http or https and without `/ws`.

    Raises:
        ValueError: the given text is not an address.
    """
    kind, separator, rest = url.partition("://")
    kinds = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
    rest = rest.rstrip("/").removesuffix("/ws").rstrip("/")
    if not separator or kind not in kinds or not rest or "?" in rest or " " in rest:
        raise ValueError(f"url is {url!r}, but must be the address of a server, such as http://127.0.0.1:8000.")
    return f"{kinds[kind]}://{rest}"
