"""Checks of the environment's own scripted player: whether it wins the levels, and what a win earns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from lightning_agentrl.tools.check_env.log import Log
from lightning_agentrl.tools.check_env.probe import BrokenError, Probe
from lightning_agentrl.tools.check_env.seen import Play, Seen

SECONDS = 20.0  # to make the player, or for one reply
_WINS = 0.8  # share of the levels that is not asked about
_PAID = 3  # wins at least, to compare what they earn


def play_levels(probe: Probe, levels: int, turns: int, spent: Callable[[], bool], episodes: list[Play]) -> bool:
    """Let the player play the first seeds.

    Args:
        probe: the environment.
        levels: seeds to play.
        turns: of an episode at most.
        spent: whether no time is left; one level is played all the same.
        episodes: empty; gets each as it was played.

    Returns:
        Whether neither the player nor the environment failed in them; False, too, without a player.
    """
    for seed in range(levels):
        if spent() and episodes:
            probe.log.cut["scripted player"] = f"{len(episodes)} of {levels} levels were played"
            break
        try:
            probe.reset(seed)
            maker = getattr(probe.unwrapped(), "solver", None)
            player = probe.call("solver", "solver", maker, SECONDS, "solver.raises") if callable(maker) else None
        except BrokenError:
            return False
        episode = None if player is None else _played(probe, seed, turns)
        if episode is None:
            return False
        episodes.append(episode)
    return True


def judge(log: Log, episodes: Sequence[Play], random_mean: float, enough: int) -> None:
    """Look whether the player wins, and whether a win earns more than random play.

    Args:
        log: where findings go.
        episodes: at least one.
        random_mean: return of random play.
        enough: levels at least, to say that too few are won.
    """
    wins = [_won(one) for one in episodes]
    log.figures["solver"] = {
        "levels": len(wins),
        "won": sum(wins),
        "turns": statistics.fmean(len(one.actions) for one in episodes),
        "return": statistics.fmean(one.total for one in episodes),
    }
    if len(wins) >= enough and sum(wins) < _WINS * len(wins):
        lost = episodes[wins.index(False)]
        idle = lost.seen[0].contract.default_action
        gave_up = all(set(one.actions) == {idle} for one, win in zip(episodes, wins, strict=True) if not win)
        if gave_up or not any(wins):  # it found no way, or plays for less than a success
            log.milder["solver.levels"] = "notice"
        said = f"the scripted player wins {sum(wins)} of {len(wins)} levels"
        log.add("solver.levels", said, lost.seed, lost.actions)
    paid = sorted((one.total, place) for place, one in enumerate(episodes) if wins[place])
    if len(paid) >= _PAID and paid[0][0] <= min(random_mean, 0.0):
        least = episodes[paid[0][1]]
        said = f"an episode that the scripted player wins earns {least.total:g}, random play {random_mean:.3g}"
        log.add("reward.success", said, least.seed, least.actions)


def _played(probe: Probe, seed: int, turns: int) -> Play | None:
    """Play one episode with the player, which `reset` makes ready; None if it raises."""
    players: list[Any] = []

    def choose(seen: list[Seen]) -> str:
        if not players:
            players.append(probe.unwrapped().solver())
        return str(probe.call("the scripted player", "solver", players[0], SECONDS, "solver.raises"))

    episode = probe.play(seed, "scripted", choose, turns)
    return None if episode.broken or not episode.actions else episode


def _won(episode: Play) -> bool:
    success = episode.seen[-1].success
    return episode.over and (episode.total > 0 if success is None else success)
