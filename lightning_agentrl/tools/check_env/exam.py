"""Process that runs all checks of one environment, or replays recorded episodes."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from lightning_agentrl.episodes.recipe import Recipe
from lightning_agentrl.errors.problem import ConfigError, one_line
from lightning_agentrl.tools.check_env import checks, earnings, played
from lightning_agentrl.tools.check_env.checks import play_order
from lightning_agentrl.tools.check_env.findings import PARTS, Log
from lightning_agentrl.tools.check_env.played import texts
from lightning_agentrl.tools.check_env.probe import TURNS, BrokenError, Clock, Probe, ThreadedProbe, listen_to_alarms
from lightning_agentrl.tools.check_env.seen import Play, Seen
from lightning_agentrl.tools.check_env.texts import CANARY, HOSTILE, shown

PLAY_SEEDS, PLAYS = 6, 8  # number of seeds, and of random episodes per seed
REPLAYED = 4  # number of episodes to replay
LEVELS = 10  # number of seeds for the scripted player, published answers and leaks
EARNING_EPISODES = 24
_CHEAP, _DEAR = 0.005, 0.15  # seconds below which a reset is fast, and above which it is slow
_PLAYS_DEAR, _LEVELS_DEAR, _POLICIES_DEAR = 3, 4, 9  # counts for slow resets, about a hundred resets in all
_DECLARED_TURNS = 600  # declared limits below this number of turns are played to the end
_DETERMINISM = ("seed.honoured", "replay.twice", "replay.used", "replay.interleaved", "replay.process", "replay.hash")
_GROWN = 200  # largest growth of memory in megabytes without a finding
_MEGABYTE = 1024  # one megabyte in units of ru_maxrss


@dataclass
class Exam:
    """Exam of one environment, with its findings so far.

    Args:
        recipe: recipe of the environment.
        seconds: time limit in seconds, without imports, creation and resets.
        most_tokens: largest number of tokens of a prompt.
        journal: file of the current episode; see `Probe`.
    """

    recipe: Recipe
    seconds: float
    most_tokens: int
    journal: IO[str] | None = None
    log: Log = field(default_factory=Log)
    episodes: list[Play] = field(default_factory=list)
    """Random episodes."""
    solved: list[Play] = field(default_factory=list)
    others: list[Play] = field(default_factory=list)
    limit: int | None = None
    first: Seen | None = None
    place: tuple[str, ...] = ()
    """The working folder and its files before the first reset."""
    held: int = 0
    """Megabytes of memory after the first reset."""
    ordered: Sequence[dict[str, Any]] = ()
    """Episodes to replay in other processes."""

    def __post_init__(self) -> None:
        self.clock = Clock(self.seconds)
        self.probe = self.new()

    def new(self, raises_as: str = "raises") -> Probe:
        """Return a probe of a new instance; the probe's errors are added to the check ``raises_as``."""
        probe = Probe(self.recipe, self.log, self.clock, self.most_tokens, self.journal)
        probe.raises_as = raises_as
        return probe

    @property
    def sections(self) -> dict[str, Callable[[], None]]:
        """The parts of the exam by name."""
        does = (self.begin, self.seeds, self.play, self.solve, self.replays, self.hostile, self.earn, self.answer)
        return dict(zip(PARTS, (*does, self.look_back, self.end), strict=True))

    def begin(self) -> None:
        """Create and reset the environment, and check its attributes, spaces and actions.

        Raises:
            BrokenError: the environment cannot be created or reset, so no other check is possible.
        """
        probe = self.probe
        before = checks.spaces_now(probe)
        self.place = _place()
        self.first = first = probe.reset(0)
        self.held = held_memory()
        if not first.contract.deterministic:
            self.log.milder |= dict.fromkeys(_DETERMINISM, "notice")
        self.limit = checks.declared_limit(probe)
        checks.check_spaces(probe, first)
        checks.check_aliases(probe, first)
        checks.check_examples(probe, first)
        checks.check_actions(probe, 0, self.dear)
        checks.check_unseeded(probe, 0)
        if checks.spaces_now(probe) != before:
            self.log.add("spaces.change", "a space has changed after reset and steps")

    @property
    def dear(self) -> bool:
        """Whether resets are slow, so that the exam must limit their number."""
        return statistics.median(self.clock.times["reset"] or [0.0]) > _DEAR

    def seeds(self) -> None:
        firsts = checks.check_seeds(self.probe)
        self.log.figures["first_texts"] = {"different": len(set(firsts)), "seeds": len(firsts)}

    def play(self) -> None:
        spent = self.clock.until(0.25)
        for number in range(_PLAYS_DEAR if self.dear else PLAYS):
            for seed in range(PLAY_SEEDS):
                if spent() and len(self.episodes) >= REPLAYED:
                    self.log.cut["random play"] = f"{len(self.episodes)} of {PLAYS * PLAY_SEEDS} episodes were played"
                    return
                self.episodes.append(self.probe.play(seed, "random", _random(seed, number), self._turns(number)))
                if self._hangs():
                    return

    def _turns(self, number: int) -> int:
        """Return the number of turns to play: one more than a small declared limit, to see the episode end there."""
        near = self.limit if self.limit is not None and self.limit < _DECLARED_TURNS else None
        return near + 1 if near is not None and (number == 0 or near < TURNS) else TURNS

    def _hangs(self) -> bool:
        found = self.log.findings.get("hang")
        return found is not None and found.times >= 2

    def solve(self) -> None:
        """Play with the environment's scripted player, if the environment has one."""
        levels = _LEVELS_DEAR if self.dear else LEVELS
        spent, turns = self.clock.until(0.15), max(TURNS, self.limit or 0)
        if earnings.play_levels(self.probe, levels, turns, spent, self.solved):
            mean = statistics.fmean([one.total for one in self.episodes] or [0.0])
            earnings.judge_player(self.log, self.solved, mean, _LEVELS_DEAR)

    def replays(self) -> None:
        """Replay episodes under all conditions in which they must be equal."""
        whole = [one for one in self.episodes if one.seen and not one.broken]
        chosen = [*whole[:REPLAYED], *self.solved[:1]]
        if not chosen or "seed.honoured" in self.log:
            self.log.cut["replays"] = "resets with equal seeds differ" if chosen else "no episode could be played"
            return
        if not all(map(self._plays_again, chosen)):
            if "instances" in self.log:  # run replays in new processes one after the other
                self.log.cut["replays"] = "only one instance is possible; replays run in new processes"
                self.ordered = checks.order(chosen)
            else:
                self.log.cut["replays"] = "replays in a new instance already differ"
            return
        checks.check_used(self.probe, chosen)
        with self.new() as probe, self.new("instances") as other:
            checks.check_interleaved(probe, other, chosen[-2:])
        short = Play(chosen[-1].seed, "short", chosen[-1].actions[:30], chosen[-1].seen[:31])
        if short.seen[0].contract.worker != "process":
            with ThreadedProbe(self.recipe, self.log, self.clock, self.most_tokens, self.journal) as probe:
                checks.play_again(probe, short, "replay.thread", "in threads other than the main thread")
        modes = (getattr(self.probe.made(), "metadata", None) or {}).get("render_modes") or ()
        if "rgb_array" in modes:
            drawn = Recipe(self.recipe.id, {**self.recipe.kwargs, "render_mode": "rgb_array"}, self.recipe.key)
            with Probe(drawn, self.log, self.clock, self.most_tokens, self.journal) as drawing:
                drawing.makes_as = "render.mode"
                checks.check_render(drawing, short)
        self.ordered = checks.order(chosen)

    def _plays_again(self, episode: Play) -> bool:
        """Replay an episode in a new instance while the old one exists."""
        with self.new() as probe:
            probe.makes_as = "instances"
            return checks.play_again(probe, episode, "replay.twice", "played again")

    def hostile(self) -> None:
        """Send every hostile reply as the first action; with slow resets, send several replies in one episode."""
        spent = self.clock.until(0.2)
        seen = None
        for place, reply in enumerate(HOSTILE):
            if spent() or self._hangs():
                self.log.cut["hostile replies"] = f"{place} of {len(HOSTILE)} were sent"
                return
            try:
                if seen is None or seen.over or not self.dear:
                    self.probe.reset(place)
                seen = self.probe.step(reply)
            except BrokenError:
                self.probe.drop()
                seen = None
            if canary():
                self.log.add("code", "a reply was run as code", self.probe.seed, self.probe.actions)
                return
        rng = random.Random(7)
        for seed in range(2):
            said = lambda seen: rng.choice([*HOSTILE, *seen[-1].legal()])  # noqa: E731
            self.others.append(self.probe.play(seed, "hostile", said, 60))

    def earn(self) -> None:
        """Play with policies that ignore the game, and check their returns."""
        first = self.first
        if first is None:
            return
        spent = self.clock.until(0.3)
        reset = statistics.median(self.clock.times["reset"])
        few = EARNING_EPISODES if reset < _CHEAP else 2 if self.dear else 8
        whole = [one for one in self.episodes if not one.broken]
        random_mean = statistics.fmean([one.total for one in whole] or [0.0])
        best = earnings.full_return([*whole, *self.solved])
        free = not first.contract.actions
        one_turn = free and bool(whole) and all(len(one.actions) == 1 and one.over for one in whole)
        honest, table = float("-inf"), []
        tried = earnings.policies(first)[: _POLICIES_DEAR if self.dear else None]
        default = first.contract.default_action
        tried = [*([("", "default", lambda seen: default)] if default else []), *tried]
        for place, policy in enumerate(tried):
            if (spent() and place) or self._hangs():
                self.log.cut["what replies earn"] = f"{place} of {len(tried)} policies were tried"
                break
            earned = earnings.play_policy(self.probe, policy, range(min(few, 8)), spent)
            if few > 8 and earnings.suspicious(earned, best):
                more = earnings.play_policy(self.probe, policy, range(8, few), spent)
                earned = earnings.Earned(earned.policy, earned.kind, [*earned.episodes, *more.episodes])
            if policy[1] == "default":
                honest = earned.mean
            elif policy[0]:
                flagged = [seen.invalid is True for one in earned.episodes for seen in one.seen[1:]]
                said_so = all(flagged) and policy[0] != "gaming.constant"
                earnings.judge(self.log, earned, random_mean, best, honest if said_so else float("-inf"), one_turn)
            table.append({"policy": policy[1], "episodes": len(earned.episodes), "return": earned.mean})
            self.others += earned.episodes
        self.log.figures["earned"] = table

    def answer(self) -> None:
        """Check the reward of the published answer, and that the text does not contain this answer."""
        levels = range(_LEVELS_DEAR if self.dear else LEVELS)
        whole = [one for one in self.episodes if not one.broken]
        if whole and all(len(one.actions) == 1 for one in whole) and self.first and not self.first.contract.actions:
            earnings.check_answer(self.probe, levels)
        earnings.check_leak(self.probe, levels, earnings.full_return([*whole, *self.solved]))
        earnings.check_plan(self.log, self.solved)

    def look_back(self) -> None:
        """Check properties of all played episodes."""
        log, every = self.log, [*self.episodes, *self.solved, *self.others]
        played.describe(log, self.episodes)
        played.check_spread(log, self.episodes, [*self.solved, *self.others])
        played.check_ends(log, every, self.limit)
        played.check_longest(log, every, self.limit)
        played.check_success(log, every)
        played.check_texts(log, self.episodes)
        played.check_repeated(log, [*self.episodes, *self.others])
        played.check_memory_needed(log, self.episodes)
        same = {tuple(seen.same() for seen in one.seen) for one in self.solved[:LEVELS]} or {
            one.seen[0].same() for one in self.episodes if one.seen
        }
        firsts = self.log.figures.get("first_texts", {"different": 0, "seeds": 0})
        if len(same) == 1 and firsts["different"] == 1:
            log.add("seed.ignored", "all seeds have the same first text")
        elif firsts["different"] == 2 and firsts["seeds"] == len(checks.SEEDS):
            log.add("seed.ignored", f"{firsts['seeds']} seeds have only two different first texts")

    def end(self) -> None:
        """Check a step after the end, closing, and threads, files and memory that remain."""
        ended = [one for one in self.episodes if one.over]
        if ended:
            checks.check_after_end(self.probe, ended[0].seed, ended[0].actions)
        checks.check_closing(self.probe)
        if left := threading.active_count() - 1 + len(multiprocessing.active_children()):
            self.log.add("left.threads", f"{left} threads or processes are still running after close")
        if (place := _place()) != self.place:
            said = ", ".join(sorted(set(place) - set(self.place))[:3]) or "something is missing"
            self.log.add("left.files", f"the working folder has changed: {said}")
        grown = held_memory() - self.held
        resets = len(self.clock.times["reset"])
        if grown > _GROWN and grown > resets:
            self.log.add("memory", f"the process grew by {grown} megabytes in {resets} episodes")
        played.check_times(self.log, self.clock)


def canary() -> bool:
    """Return whether a reply was run as code, which sets an environment variable."""
    return os.environ.pop(CANARY, None) is not None


def _place() -> tuple[str, ...]:
    return (os.getcwd(), *sorted(os.listdir()))


def held_memory() -> int:
    """Return the peak memory of this process so far, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // _MEGABYTE


def _random(seed: int, number: int) -> Callable[[list[Seen]], str]:
    rng = random.Random(f"{seed} {number}")
    return lambda seen: rng.choice(seen[-1].legal())


def run(exam: Exam, tell: Callable[[dict[str, Any]], None]) -> None:
    """Run all parts of an exam, and send the findings after each part with ``tell``."""
    for name, section in exam.sections.items():
        tell({"doing": name})
        try:
            section()
            tell({"done": name, **state(exam)})
            continue
        except BrokenError:
            pass
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - a value of the environment may raise when it is compared or shown
            said = f"in the part '{name}' a value of the environment raised an error when it was compared or shown"
            exam.log.add("contract.values", f"{said}: {one_line(f'{type(error).__name__}: {error}')}", exam.probe.seed)
            exam.log.cut[name] = "a value raised an error"
        tell(state(exam))
        if exam.first is None:
            exam.log.cut |= dict.fromkeys(PARTS[1:], "it cannot be created or reset")
            return
        exam.probe.drop()
        tell({"done": name})


def state(exam: Exam) -> dict[str, Any]:
    """Return findings, figures, times and cuts so far, for JSON."""
    return {
        "findings": [one.plain() for one in exam.log.findings.values()],
        "figures": {**exam.log.figures, "play_seconds": exam.clock.spent(), "megabytes": held_memory()},
        "times": {kind: sum(found) for kind, found in exam.clock.times.items()},
        "cut": exam.log.cut,
        "ordered": list(exam.ordered),
    }


def main(order: Mapping[str, Any]) -> None:
    """Execute an order, an exam or a replay, and write each message as a line of JSON to standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listen_to_alarms()
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    printed = Path(order["folder"], "printed.txt")
    with printed.open("wb") as sink:
        os.dup2(sink.fileno(), 1)  # keep output of the environment out of the messages

    def tell(what: Mapping[str, Any]) -> None:
        pipe.write(json.dumps(what, default=str) + "\n")
        pipe.flush()

    recipe = Recipe(order["id"], order["kwargs"], "env")
    started = time.perf_counter()
    try:
        recipe.load()
    except ConfigError as error:
        tell({"refused": str(error)})
        return
    tell({"imported": time.perf_counter() - started})
    with Path(order["folder"], "journal.txt").open("w", encoding="utf-8") as journal:
        if order["episodes"]:
            probe = Probe(recipe, Log(), clock := Clock(order["seconds"]), order["most_tokens"], journal)
            try:
                tell({"replayed": play_order(probe, order["episodes"], clock)})
            except BrokenError as error:
                tell({"replayed": {"seed": probe.seed, "actions": probe.actions, "said": str(error)}})
            return
        exam = Exam(recipe, order["seconds"], order["most_tokens"], journal)
        try:
            run(exam, tell)
        except ConfigError as error:
            tell({"refused": str(error)})
            return
        sys.stdout.flush()
        if text := printed.read_text(encoding="utf-8", errors="replace").strip():
            exam.log.add("prints", f"it writes to standard output: {shown(text)!r}")
        named = bool(exam.first and exam.first.contract.actions)
        tell({**state(exam), "texts": texts(exam.episodes, exam.solved, named), "over": True})


if __name__ == "__main__":
    main(json.loads(Path(sys.argv.pop()).read_text(encoding="utf-8")))
    os._exit(0)  # exit without waiting for threads that the environment has left
