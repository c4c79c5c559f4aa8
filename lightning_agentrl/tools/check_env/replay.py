"""Checks that equal seeds and actions lead to equal episodes, wherever and after whatever they are played."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from lightning_agentrl.episodes.seeds import derive_seed, held_out_seeds
from lightning_agentrl.tools.check_env.declared import check_picture
from lightning_agentrl.tools.check_env.probe import STEP_SECONDS, BrokenError, Probe
from lightning_agentrl.tools.check_env.seen import Play, Seen
from lightning_agentrl.tools.check_env.stopwatch import Clock
from lightning_agentrl.tools.check_env.texts import shown

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
