"""Checks of an environment's attributes, and checks that equal seeds and actions lead to equal episodes."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from lightning_agentrl.episodes.environment import AsEnvErrors
from lightning_agentrl.episodes.observation import is_image
from lightning_agentrl.episodes.seeds import derive_seed, held_out_seeds
from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.tools.check_env.probe import (
    RESET_SECONDS,
    STEP_SECONDS,
    BrokenError,
    Clock,
    HangError,
    Probe,
    alarm,
    time_limit,
)
from lightning_agentrl.tools.check_env.seen import Play, Seen
from lightning_agentrl.tools.check_env.texts import shown

NO_ACTION = "qx zv 77"  # a text that names no action of any game
_ACTIONS = 24  # largest number of actions to try one by one


def spaces_now(probe: Probe) -> tuple[str, str]:
    """Return the observation space and the action space as text."""
    env = probe.made()
    return repr(getattr(env, "observation_space", None)), repr(getattr(env, "action_space", None))


def check_spaces(probe: Probe, first: Seen) -> None:
    """Check that the first observation and the named actions are in their spaces, if the environment has spaces."""
    env, log = probe.made(), probe.log
    observation, action = getattr(env, "observation_space", None), getattr(env, "action_space", None)
    for name, space in (("observation_space", observation), ("action_space", action)):
        if space is None:
            log.add("spaces.missing", f"there is no {name}")
    if isinstance(observation, spaces.Space) and not _lies_in(first.raw, observation):
        log.add("spaces.observation", f"the first observation is outside {type(observation).__name__}", probe.seed)
    if isinstance(action, spaces.Space):
        named = first.legal()[:_ACTIONS] if first.contract.actions else []
        outside = [name for name in named if not _lies_in(name, action)]
        if not isinstance(action, spaces.Text):
            log.add("spaces.action", f"the action space is {type(action).__name__}, not Text")
        elif outside:
            log.add("spaces.action", f"the action {outside[0]!r} is outside the action space")


def _lies_in(value: Any, space: spaces.Space) -> bool:
    try:
        return value in space
    except Exception:  # noqa: BLE001 - a custom space may raise any exception for other values
        return False


def check_aliases(probe: Probe, first: Seen) -> None:
    """Check that names of actions are distinct, and that aliases stand for actions."""
    log, actions = probe.log, first.contract.actions
    spoken: dict[str, str] = {}
    for name in actions:
        other = spoken.setdefault(" ".join(name.lower().replace("_", " ").split()), name)
        if other != name:
            log.add("actions.alike", f"the actions {other!r} and {name!r} differ only in case and blanks")
    for alias, name in first.contract.aliases.items():
        if actions and name not in actions:
            log.add("actions.alias", f"the alias {alias!r} means {name!r}, which is not an action")
        if spoken.get(alias, name) != name:
            log.add("actions.alias", f"the alias {alias!r} means {name!r}, but is an action itself")


def check_examples(probe: Probe, first: Seen) -> None:
    """Check that the replies of worked examples name actions."""
    names = {name.lower() for name in (*first.contract.actions, *first.contract.aliases)}
    for _, reply in first.contract.examples:
        if names and not any(name in reply.lower() for name in names):
            probe.log.add("actions.example", f"the reply {reply!r} of an example names no action")


def check_actions(probe: Probe, seed: int, dear: bool) -> None:
    """Check that every named action is accepted and executed, and that a text without an action is reported as invalid.

    If resets are slow (``dear``), the actions are sent in one episode.
    """
    with suppress(BrokenError):
        seen = probe.reset(seed)
        offered = seen.contract
        for name in list(offered.actions)[:_ACTIONS]:
            if seen.over or not dear:
                probe.reset(seed)
            seen = probe.step(name)
            executed = seen.info.get("executed_action")
            if seen.invalid:
                probe.log.add("actions.refused", f"the action {name!r} is reported as invalid", seed, [name])
            elif executed in offered.actions and executed != name:
                said = f"{name!r} was sent, but {executed!r} is reported as executed"
                probe.log.add("actions.executed", said, seed, [name])
        if offered.actions and not offered.free_text:
            probe.reset(seed)
            if probe.step(NO_ACTION).invalid is False:
                said = f"the text {NO_ACTION!r} names no action, but info['invalid_action'] is false"
                probe.log.add("actions.invalid_flag", said, seed, [NO_ACTION])


def check_unseeded(probe: Probe, seed: int) -> None:
    """Check that a reset without a seed and a reset with options work."""
    with suppress(BrokenError):
        probe.reset(seed)
        env = probe.made()
        probe.call("reset without a seed", "reset", lambda: env.reset(), RESET_SECONDS, "contract.unseeded")
        again = partial(env.reset, seed=seed, options={})
        probe.call("reset with options={}", "reset", again, RESET_SECONDS, "contract.options")


def check_picture(picture: Any) -> str:
    """Describe the fault of a rendered picture; empty for a valid picture."""
    if not isinstance(picture, np.ndarray):
        return f"render returned a value of type {type(picture).__name__}"
    if not is_image(picture):
        return f"render returned {picture.dtype} of shape {list(picture.shape)}"
    return ""


def check_after_end(probe: Probe, seed: int, actions: list[str]) -> None:
    """Check that a step after the end of an episode raises an error."""
    with suppress(BrokenError):
        seen = probe.reset(seed)
        for action in actions:
            seen = seen if seen.over else probe.step(action)
        env = probe.made()
        try:
            with AsEnvErrors(), alarm(STEP_SECONDS):
                answer: Any = env.step(actions[-1])
        except EnvError as error:  # any error except a timeout passes the check
            if error.kind == HangError.__name__:
                said = f"a step after the end did not return within {STEP_SECONDS:g} seconds"
                probe.log.add("ends.after", said, seed, [*actions, actions[-1]])
            return
        paid = f", with a reward of {answer[1]}" if isinstance(answer, tuple) and len(answer) == 5 else ""
        probe.log.add("ends.after", f"a step after the end is answered{paid}", seed, [*actions, actions[-1]])


def check_closing(probe: Probe) -> None:
    """Check that an instance can be closed twice."""
    with suppress(BrokenError):
        env = probe.made()
        for _ in range(2):
            probe.call("close", "close", env.close, STEP_SECONDS, "contract.close")
    probe.env = None


def declared_limit(probe: Probe) -> int | None:
    """Return the smallest limit of turns that the environment, its registration or a wrapper declares, or None."""
    env = probe.made()
    declared = (
        getattr(env.unwrapped, "max_turns", None),
        getattr(env.spec, "max_episode_steps", None),
        time_limit(env),
    )
    limits = [limit for limit in declared if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0]
    return min(limits, default=None)


SEEDS = (0, 1, 2, 3, 17, 2**31 - 1, derive_seed(5, 7), held_out_seeds()[0])
"""Seeds to check, including values that programs may treat as missing, and seeds that the trainer uses."""


def digest(seen: Seen) -> str:
    """Return a hash of everything that must be equal in a replay."""
    return hashlib.sha256(repr(seen.same()).encode("utf-8", "backslashreplace")).hexdigest()[:16]


def difference(one: Seen, other: Seen) -> str:
    """Describe the first difference between two answers."""
    if one.text != other.text:
        at = next((i for i, pair in enumerate(zip(one.text, other.text, strict=False)) if pair[0] != pair[1]), 0)
        at = max(at - 20, 0)
        return f"the text {shown(one.text[at:], 60)!r} against {shown(other.text[at:], 60)!r}"
    if one.state != other.state:
        return "the images"
    for name in ("reward", "terminated", "truncated"):
        if getattr(one, name) != getattr(other, name):
            return f"{name} {getattr(one, name)} against {getattr(other, name)}"
    for name in ("system_prompt", "actions", "examples"):
        if (mine := getattr(one.contract, name)) != (theirs := getattr(other.contract, name)):
            return f"{name} {shown(str(mine), 60)!r} against {shown(str(theirs), 60)!r}"
    return "long_term_text or short_term_text of info"


def check_seeds(probe: Probe) -> list[str]:
    """Check that two resets with the same seed give equal texts; return the texts of the first resets."""
    firsts = []
    with suppress(BrokenError):
        for seed in SEEDS:
            first = probe.reset(seed)
            firsts.append(first.prompt)
        for seed, text in zip(SEEDS, firsts, strict=True):
            again = probe.reset(seed)
            if again.prompt != text:
                said = f"two resets with seed {seed} differ: {shown(text)!r} against {shown(again.prompt)!r}"
                probe.log.add("seed.honoured", said, seed)
    return firsts


def play_again(probe: Probe, episode: Play, check: str, how: str) -> bool:
    """Replay an episode in a probe and return whether all answers were equal."""
    try:
        return sum(1 for _ in equal_turns(probe, episode, check, how)) == len(episode.seen)
    except BrokenError:
        return False


def equal_turns(probe: Probe, episode: Play, check: str, how: str) -> Iterator[list[str]]:
    """Replay an episode, and yield the actions so far after each equal answer; a different answer ends the replay.

    Args:
        probe: instance in which to replay.
        episode: recorded episode.
        check: name of the check to which a difference is added.
        how: description of the replay, for the finding.
    """
    for turn, expected in enumerate(episode.seen):
        actions = episode.actions[:turn]
        seen = probe.step(actions[-1]) if actions else probe.reset(episode.seed)
        if seen.same() != expected.same():
            probe.log.add(check, f"{how}, turn {turn} differs: {difference(expected, seen)}", episode.seed, actions)
            return
        yield actions


def check_used(probe: Probe, episodes: Sequence[Play]) -> None:
    """Check replays in one instance, with an unfinished episode between each two replays."""
    for episode in episodes:
        with suppress(BrokenError):
            seen = probe.reset(episode.seed + 1000)
            for reply in ["?", *seen.legal()[:2]]:
                if not seen.over:
                    seen = probe.step(reply)
        if not play_again(probe, episode, "replay.used", "in an instance that has played before"):
            return


def check_interleaved(probe: Probe, other: Probe, episodes: Sequence[Play]) -> None:
    """Check replays while another instance plays and the global generators are reseeded between all steps."""
    state = random.getstate(), np.random.get_state()
    for episode in episodes:
        rival: Seen | None = None
        try:
            turns = equal_turns(probe, episode, "replay.interleaved", "beside another instance")
            for turn in range(len(episode.seen)):
                rival = other.reset(episode.seed + 500) if rival is None or rival.over else other.step(rival.legal()[0])
                random.seed(turn)
                np.random.seed(turn)
                if next(turns, None) is None:
                    return
        except BrokenError:
            return
        finally:
            random.setstate(state[0])
            np.random.set_state(state[1])


def check_render(probe: Probe, episode: Play) -> None:
    """Check that rendering after every turn returns pictures and does not change the episode."""
    with suppress(BrokenError):
        for actions in equal_turns(probe, episode, "replay.render", "drawn after every turn"):
            picture = probe.call("render", "render", probe.made().render, STEP_SECONDS)
            if wrong := check_picture(picture):
                probe.log.add("render.picture", wrong, episode.seed, actions)
                return


def order(episodes: Sequence[Play]) -> list[dict[str, Any]]:
    """Serialize episodes for a replay in another process: seed, actions, and hash and text of each answer."""
    return [
        {
            "seed": one.seed,
            "actions": one.actions,
            "expected": [[digest(seen), shown(seen.text, 200)] for seen in one.seen],
        }
        for one in episodes
    ]


def play_order(probe: Probe, ordered: Sequence[dict[str, Any]], clock: Clock) -> dict[str, Any] | None:
    """Replay serialized episodes in this process; return the first difference, or None without a difference.

    Raises:
        BrokenError: the environment failed.
    """
    spent = clock.until(1.0)
    for one in ordered:
        for turn, (expected, text) in enumerate(one["expected"]):
            if spent():
                return None
            actions = one["actions"][:turn]
            seen = probe.step(actions[-1]) if actions else probe.reset(one["seed"])
            if digest(seen) != expected:
                same = shown(seen.text, 200) == text
                what = (
                    "reward, end, prompt or actions" if same else f"the text {text!r} against {shown(seen.text, 200)!r}"
                )
                return {"seed": one["seed"], "actions": actions, "said": f"turn {turn} differs: {what}"}
    return None
