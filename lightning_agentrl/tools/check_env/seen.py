"""Records of an environment's answers and episodes, and checks of a single answer."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_agentrl.episodes.contract import Contract
from lightning_agentrl.episodes.observation import INFO_FLAGS, INFO_TEXTS, LARGEST_REWARD, read_flag, read_metrics
from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.tools.check_env.findings import Log
from lightning_agentrl.tools.check_env.texts import CONTROL, MARKERS, mined, shown, tokens

_OFFERED = ("available_actions", "admissible_commands", "valid_actions", "legal_actions", "actions")  # lists in info


@dataclass(frozen=True)
class Seen:
    """Observation and attributes of an environment after a reset or a step."""

    text: str
    contract: Contract
    info: Mapping[str, Any]
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    state: str = ""
    """Identity of the observation: its text and hashes of its images, which would need too much memory."""
    raw: Any = None
    """The observation as returned, a text or a dictionary; only for the first call of an instance."""
    mended: bool = False
    """Whether the text had lone surrogates."""

    @property
    def prompt(self) -> str:
        """Text that a policy reads."""
        return f"{self.contract.system_prompt}\n{self.text}"

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated

    @property
    def success(self) -> bool | None:
        value = self.info.get("success")
        return None if value is None else bool(value)

    @property
    def invalid(self) -> bool | None:
        """Whether the environment reports that the text named no action; None without a report."""
        value = self.info.get("invalid_action")
        return None if value is None else bool(value)

    def legal(self) -> list[str]:
        """Return possible replies: named actions, else actions in info, else replies that the text seems to offer."""
        if self.contract.actions:
            return list(self.contract.actions)
        for name in _OFFERED:
            offered = self.info.get(name)
            if isinstance(offered, list | tuple) and offered and all(isinstance(one, str) for one in offered):
                return list(offered)
        return mined(self.prompt)

    def same(self) -> tuple[Any, ...]:
        """Return everything that must be equal in a replay."""
        texts = tuple(self.info.get(name) for name in INFO_TEXTS[:2])
        offered = self.contract.system_prompt, tuple(self.contract.actions), self.contract.examples
        return self.state, self.reward, self.terminated, self.truncated, *offered, *texts


@dataclass
class Play:
    """A played episode."""

    seed: int
    policy: str
    actions: list[str] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    broken: bool = False

    @property
    def over(self) -> bool:
        return bool(self.seen) and self.seen[-1].over

    @property
    def total(self) -> float:
        return sum(one.reward for one in self.seen)

    @property
    def progression(self) -> float:
        """Reported progression at the end of the episode; 1 without a report."""
        value = self.seen[-1].info.get("progression") if self.seen else None
        return float(value) if isinstance(value, int | float | np.number) else 1.0


LARGEST = 100.0  # largest reward without a finding
_LONG_REPLY = 1000  # number of characters above which a reply is long
Note = Callable[[str, str], None]  # function (check, finding)


def check_info(info: dict[str, Any], observation: str, note: Note) -> None:
    """Check an info dictionary, and remove its flags if they are invalid."""
    try:
        read_metrics(info)
        for name in INFO_FLAGS:
            if info.get(name) is not None:
                read_flag(f"info[{name!r}]", info[name])
    except EnvError as error:
        note("contract.info", str(error))
        for name in INFO_FLAGS:
            info.pop(name, None)
    for name in INFO_TEXTS:
        if not isinstance(info.get(name, ""), str):
            note("contract.info", f"info[{name!r}] is {form(info[name])}, not text")
    parts = [info[name] for name in INFO_TEXTS[:2] if isinstance(info.get(name), str)]
    if any(part not in observation for part in parts):
        note("text.hidden", "long_term_text or short_term_text of info is not part of the observation")
    progression = info.get("progression", 0)
    if isinstance(progression, int | float | np.number) and not 0 <= progression <= 1:
        note("info.progression", f"info['progression'] is {progression}")


def check_pickles(info: Mapping[str, Any], note: Note) -> None:
    for name, value in info.items():
        try:
            pickle.dumps(value)
        except Exception:  # noqa: BLE001 - pickling may raise any exception
            note("info.pickle", f"info[{str(name)!r}] cannot be pickled")
            return


def checked_reward(reward: Any, note: Note) -> float:
    """Return a reward as a float; 0 if it is invalid."""
    if isinstance(reward, bool | np.bool_) or not isinstance(reward, int | float | np.number):
        note("reward.type", f"the reward is {form(reward)}: {shown(looks(reward) or '')}")
        return 0.0
    try:
        value = float(reward.real)
    except OverflowError:
        value = math.inf
    if not abs(value) <= LARGEST_REWARD:
        note("reward.finite", f"the reward is {value:g}; it must be finite, {LARGEST_REWARD:g} at most")
        return 0.0
    if abs(value) > LARGEST:
        note("reward.size", f"a reward of {value:g}")
    return value


def checked_ends(terminated: Any, truncated: Any, at_limit: bool, note: Note) -> tuple[bool, bool]:
    """Return the flags ``terminated`` and ``truncated`` as bools.

    Args:
        terminated: value that the environment returned.
        truncated: value that the environment returned.
        at_limit: whether gymnasium's TimeLimit truncates at this turn, even if the game also ends there.
        note: function to which findings are passed.
    """
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(value, bool | np.bool_):
            note("ends.type", f"{name} is {form(value)}: {shown(looks(value) or '')}")
    terminated, truncated = _true(terminated), _true(truncated)
    if terminated and truncated:
        if at_limit:
            return True, False
        note("ends.both", "an episode ends terminated and truncated at once")
    return terminated, truncated


def check_texts(seen: Seen, last: Seen | None, said: str, most_tokens: int, log: Log, note: Note) -> None:
    """Check the texts that a policy reads.

    Args:
        seen: answer of the environment.
        last: previous answer; None after a reset.
        said: action before the answer; empty after a reset.
        most_tokens: largest number of tokens of a prompt.
        log: earlier findings; strings that the environment wrote before the reply are no echo of the reply.
        note: function to which findings are passed.
    """
    actions = seen.contract.actions
    # If the system prompt lacks actions, the trainer lists them.
    listed = all(name in seen.contract.system_prompt for name in actions)
    whole = "\n".join([seen.prompt, *(() if listed else [*actions, *actions.values()])])
    whole += "\n".join(text for pair in seen.contract.examples for text in pair)
    if seen.mended:
        echoed = any("\ud800" <= char <= "\udfff" for char in said)
        note("text.echo" if echoed else "text.encoding", "the observation contains a lone surrogate")
    if found := MARKERS.search(whole):
        echoed = found[0] in said and "text.markers" not in log
        check, who = ("text.echo", "the reply's") if echoed else ("text.markers", "the")
        note(check, f"the text contains {who} marker {found[0]!r}")
    if found := CONTROL.search(whole):
        check = "text.echo" if found[0] in said and "text.control" not in log else "text.control"
        note(check, f"the text contains the character {found[0]!a}")
    shown_before = last is not None and said[:_LONG_REPLY] in last.prompt
    if len(said) >= _LONG_REPLY and said[:_LONG_REPLY] in seen.text and not shown_before:
        note("text.echo", f"the text repeats a reply of {len(said)} characters")
    if not (seen.state.strip() or seen.terminated) and not (last is None and seen.contract.system_prompt):
        note("text.empty", "the observation is empty")
    if len(said) < _LONG_REPLY and len(whole) > most_tokens and (length := tokens(whole)) > most_tokens:
        note("text.long", f"a prompt has about {length} tokens, more than {most_tokens}")


def looks(value: Any) -> str | None:
    """Return the repr of a value; None if repr fails, for example for an integer with thousands of digits."""
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - a class of the environment may raise any exception
        return None


def form(value: Any) -> str:
    """Describe the type of a value."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"of type {type(value).__name__}"


def _true(end: Any) -> bool:
    try:
        return bool(end)
    except ValueError:  # raised by an array
        return bool(np.any(end))
