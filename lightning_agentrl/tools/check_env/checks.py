"""Checks that play: what an environment declares, and whether equal seeds and actions lead to equal episodes."""

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

NO_ACTION = "qx zv 77"  # names no action of any game
_ACTIONS = 24  # that are tried one by one


def spaces_now(probe: Probe) -> tuple[str, str]:
    """Return both spaces as text."""
    env = probe.made()
    return repr(getattr(env, "observation_space", None)), repr(getattr(env, "action_space", None))


def check_spaces(probe: Probe, first: Seen) -> None:
    """Look whether observations and named actions lie in their spaces, if these are there."""
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
    except Exception:  # noqa: BLE001 - a space of the environment's own that expects other values
        return False


def check_aliases(probe: Probe, first: Seen) -> None:
    """Look whether names of actions can be told apart, and aliases lead to them."""
    log, actions = probe.log, first.contract.actions
    spoken: dict[str, str] = {}
    for name in actions:
        other = spoken.setdefault(" ".join(name.lower().replace("_", " ").split()), name)
        if other != name:
            log.add("actions.alike", f"the actions {other!r} and {name!r} are spoken alike")
    for alias, name in first.contract.aliases.items():
        if actions and name not in actions:
            log.add("actions.alias", f"the alias {alias!r} means {name!r}, which is not an action")
        if spoken.get(alias, name) != name:
            log.add("actions.alias", f"the alias {alias!r} means {name!r}, but is an action itself")


def check_examples(probe: Probe, first: Seen) -> None:
    """Look for worked examples whose reply is not an action."""
    names = {name.lower() for name in (*first.contract.actions, *first.contract.aliases)}
    for _, reply in first.contract.examples:
        if names and not any(name in reply.lower() for name in names):
            probe.log.add("actions.example", f"the reply {reply!r} of an example names no action")


def check_actions(probe: Probe, seed: int, dear: bool) -> None:
    """Look whether every named action is taken as what it is, and a text that names none is called invalid.

    Where resets are dear, one action follows the other.
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
                probe.log.add("actions.refused", f"the action {name!r} is called invalid", seed, [name])
            elif executed in offered.actions and executed != name:
                said = f"{name!r} was sent, and {executed!r} is said to be executed"
                probe.log.add("actions.executed", said, seed, [name])
        if offered.actions and not offered.free_text:
            probe.reset(seed)
            if probe.step(NO_ACTION).invalid is False:
                said = f"the text {NO_ACTION!r} names no action, and info['invalid_action'] is false"
                probe.log.add("actions.invalid_flag", said, seed, [NO_ACTION])


def check_unseeded(probe: Probe, seed: int) -> None:
    """Reset without a seed, and with options."""
    with suppress(BrokenError):
        probe.reset(seed)
        env = probe.made()
        probe.call("reset without a seed", "reset", lambda: env.reset(), RESET_SECONDS, "contract.unseeded")
        again = partial(env.reset, seed=seed, options={})
        probe.call("reset with options={}", "reset", again, RESET_SECONDS, "contract.options")


def check_picture(picture: Any) -> str:
    """Return what is wrong with a picture; empty if nothing is."""
    if not isinstance(picture, np.ndarray):
        return f"render gave a value of type {type(picture).__name__}"
    if not is_image(picture):
        return f"render gave {picture.dtype} of {list(picture.shape)}"
    return ""


def check_after_end(probe: Probe, seed: int, actions: list[str]) -> None:
    """Step once more after the end, which should be refused."""
    with suppress(BrokenError):
        seen = probe.reset(seed)
        for action in actions:
            seen = seen if seen.over else probe.step(action)
        env = probe.made()
        try:
            with AsEnvErrors(), alarm(STEP_SECONDS):
                answer: Any = env.step(actions[-1])
        except EnvError as error:  # any refusal will do, but it has to come
            if error.kind == HangError.__name__:
                said = f"a step after the end did not come back within {STEP_SECONDS:g} seconds"
                probe.log.add("ends.after", said, seed, [*actions, actions[-1]])
            return
        paid = f", with a reward of {answer[1]}" if isinstance(answer, tuple) and len(answer) == 5 else ""
        probe.log.add("ends.after", f"a step after the end is answered{paid}", seed, [*actions, actions[-1]])


def check_closing(probe: Probe) -> None:
    """Close an instance twice."""
    with suppress(BrokenError):
        env = probe.made()
        for _ in range(2):
            probe.call("close", "close", env.close, STEP_SECONDS, "contract.close")
    probe.env = None


def declared_limit(probe: Probe) -> int | None:
    """Return the least number of turns that the environment, its registration or a wrapper declares as a limit."""
    env = probe.made()
    declared = (
        getattr(env.unwrapped, "max_turns", None),
        getattr(env.spec, "max_episode_steps", None),
        time_limit(env),
    )
    limits = [limit for limit in declared if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0]
    return min(limits, default=None)


SEEDS = (0, 1, 2, 3, 17, 2**31 - 1, derive_seed(5, 7), held_out_seeds()[0])
"""Also those that programs treat as none, and those that the trainer uses."""


def digest(seen: Seen) -> str:
    """Return a short text that differs if anything differs that must be equal."""
    return hashlib.sha256(repr(seen.same()).encode("utf-8", "backslashreplace")).hexdigest()[:16]


def difference(one: Seen, other: Seen) -> str:
    """Return what differs between two answers."""
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
    """Reset each seed twice; return the first texts."""
    firsts = []
    with suppress(BrokenError):
        for seed in SEEDS:
            first = probe.reset(seed)
            firsts.append(first.prompt)
        for seed, text in zip(SEEDS, firsts, strict=True):
            again = probe.reset(seed)
            if again.prompt != text:
                said = f"two resets with seed {seed} begin differently: {shown(text)!r} against {shown(again.prompt)!r}"
                probe.log.add("seed.honoured", said, seed)
    return firsts


def play_again(probe: Probe, episode: Play, check: str, how: str) -> bool:
    """Play the actions of an episode in a probe and return whether all was equal."""
    try:
        return sum(1 for _ in equal_turns(probe, episode, check, how)) == len(episode.seen)
    except BrokenError:
        return False


def equal_turns(probe: Probe, episode: Play, check: str, how: str) -> Iterator[list[str]]:
    """Play the actions of an episode, and yield those so far after each answer that is equal; one that is not is noted
    and ends it.
    """
    for turn, expected in enumerate(episode.seen):
        actions = episode.actions[:turn]
        seen = probe.step(actions[-1]) if actions else probe.reset(episode.seed)
        if seen.same() != expected.same():
            probe.log.add(check, f"{how}, turn {turn} differs: {difference(expected, seen)}", episode.seed, actions)
            return
        yield actions


def check_used(probe: Probe, episodes: Sequence[Play]) -> None:
    """One instance that plays all of them, with an abandoned episode between each two."""
    for episode in episodes:
        with suppress(BrokenError):
            seen = probe.reset(episode.seed + 1000)
            for reply in ["?", *seen.legal()[:2]]:
                if not seen.over:
                    seen = probe.step(reply)
        if not play_again(probe, episode, "replay.used", "in an instance that has played before"):
            return


def check_interleaved(probe: Probe, other: Probe, episodes: Sequence[Play]) -> None:
    """Between all steps, another instance plays and somebody else draws from the global generators."""
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
    """Draw after every turn: pictures are pictures, and nothing else changes."""
    with suppress(BrokenError):
        for actions in equal_turns(probe, episode, "replay.render", "drawn after every turn"):
            picture = probe.call("render", "render", probe.made().render, STEP_SECONDS)
            if wrong := check_picture(picture):
                probe.log.add("render.picture", wrong, episode.seed, actions)
                return


def order(episodes: Sequence[Play]) -> list[dict[str, Any]]:
    """Return episodes as another process needs them, with what it must find."""
    return [
        {
            "seed": one.seed,
            "actions": one.actions,
            "expected": [[digest(seen), shown(seen.text, 200)] for seen in one.seen],
        }
        for one in episodes
    ]


def play_order(probe: Probe, ordered: Sequence[dict[str, Any]], clock: Clock) -> dict[str, Any] | None:
    """Play ordered episodes in this process; return the first difference, None if there is none.

    Raises:
        BrokenError: the environment failed here.
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
