"""The process of one exam or of one replay: all checks of one environment."""

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

PLAY_SEEDS, PLAYS = 6, 8  # random episodes of each of some seeds
REPLAYED = 4  # episodes that are played again
LEVELS = 10  # seeds of the scripted player, of published answers and of leaks
EARNING_EPISODES = 24
_CHEAP, _DEAR = 0.005, 0.15  # seconds of a reset
_PLAYS_DEAR, _LEVELS_DEAR, _POLICIES_DEAR = 3, 4, 9  # where resets are dear, about a hundred in all
_DECLARED_TURNS = 600  # a declared limit that is played to
_DETERMINISM = ("seed.honoured", "replay.twice", "replay.used", "replay.interleaved", "replay.process", "replay.hash")
_GROWN = 200  # megabytes that are not asked about
_MEGABYTE = 1024  # in the unit of ru_maxrss


@dataclass
class Exam:
    """One environment and what is known of it so far.

    Args:
        recipe: how it is made.
        seconds: for everything but imports, making and resets.
        most_tokens: of a prompt.
        journal: see `Probe`.
    """

    recipe: Recipe
    seconds: float
    most_tokens: int
    journal: IO[str] | None = None
    log: Log = field(default_factory=Log)
    episodes: list[Play] = field(default_factory=list)
    """Random ones."""
    solved: list[Play] = field(default_factory=list)
    others: list[Play] = field(default_factory=list)
    limit: int | None = None
    first: Seen | None = None
    place: tuple[str, ...] = ()
    """The working folder and what lies in it, before the first reset."""
    held: int = 0
    """Megabytes after the first reset."""
    ordered: Sequence[dict[str, Any]] = ()
    """Episodes for other processes to play again."""

    def __post_init__(self) -> None:
        self.clock = Clock(self.seconds)
        self.probe = self.new()

    def new(self, raises_as: str = "raises") -> Probe:
        """Return a new instance."""
        probe = Probe(self.recipe, self.log, self.clock, self.most_tokens, self.journal)
        probe.raises_as = raises_as
        return probe

    @property
    def sections(self) -> dict[str, Callable[[], None]]:
        """Checks in each part of the exam."""
        does = (self.begin, self.seeds, self.play, self.solve, self.replays, self.hostile, self.earn, self.answer)
        return dict(zip(PARTS, (*does, self.look_back, self.end), strict=True))

    def begin(self) -> None:
        """Make it, reset it, and compare what it declares.

        Raises:
            BrokenError: it cannot be made or reset; nothing else can be looked at.
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
            self.log.add("spaces.change", "a space is another one after reset and steps")

    @property
    def dear(self) -> bool:
        """Whether resets are so slow that the exam must limit them."""
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
        """Return how many turns to play: up to the declared limit, where that is near, so that its end is seen."""
        near = self.limit if self.limit is not None and self.limit < _DECLARED_TURNS else None
        return near + 1 if near is not None and (number == 0 or near < TURNS) else TURNS

    def _hangs(self) -> bool:
        found = self.log.findings.get("hang")
        return found is not None and found.times >= 2

    def solve(self) -> None:
        """Play with the environment's scripted player, if it has one."""
        levels = _LEVELS_DEAR if self.dear else LEVELS
        spent, turns = self.clock.until(0.15), max(TURNS, self.limit or 0)
        if earnings.play_levels(self.probe, levels, turns, spent, self.solved):
            mean = statistics.fmean([one.total for one in self.episodes] or [0.0])
            earnings.judge_player(self.log, self.solved, mean, _LEVELS_DEAR)

    def replays(self) -> None:
        """Play episodes again, in every way in which they must be equal."""
        whole = [one for one in self.episodes if one.seen and not one.broken]
        chosen = [*whole[:REPLAYED], *self.solved[:1]]
        if not chosen or "seed.honoured" in self.log:
            self.log.cut["replays"] = "equal seeds do not begin equally" if chosen else "no episode could be played"
            return
        if not all(map(self._plays_again, chosen)):
            if "instances" in self.log:  # fresh processes can play, each after the other
                self.log.cut["replays"] = "there is one instance only; it is compared with fresh processes"
                self.ordered = checks.order(chosen)
            else:
                self.log.cut["replays"] = "what differs in a new instance would differ everywhere"
            return
        checks.check_used(self.probe, chosen)
        with self.new() as probe, self.new("instances") as other:
            checks.check_interleaved(probe, other, chosen[-2:])
        short = Play(chosen[-1].seed, "short", chosen[-1].actions[:30], chosen[-1].seen[:31])
        if short.seen[0].contract.worker != "process":
            with ThreadedProbe(self.recipe, self.log, self.clock, self.most_tokens, self.journal) as probe:
                checks.play_again(probe, short, "replay.thread", "in other threads than the main one")
        modes = (getattr(self.probe.made(), "metadata", None) or {}).get("render_modes") or ()
        if "rgb_array" in modes:
            drawn = Recipe(self.recipe.id, {**self.recipe.kwargs, "render_mode": "rgb_array"}, self.recipe.key)
            with Probe(drawn, self.log, self.clock, self.most_tokens, self.journal) as drawing:
                drawing.makes_as = "render.mode"
                checks.check_render(drawing, short)
        self.ordered = checks.order(chosen)

    def _plays_again(self, episode: Play) -> bool:
        """Play an episode again in a new instance beside the one that there is."""
        with self.new() as probe:
            probe.makes_as = "instances"
            return checks.play_again(probe, episode, "replay.twice", "played again")

    def hostile(self) -> None:
        """Send every hostile reply as the first one; where resets are dear, one after the other."""
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
        """Let policies play that know nothing of the game."""
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
        """Compare the published answer with what it earns, and with what stands in the text."""
        levels = range(_LEVELS_DEAR if self.dear else LEVELS)
        whole = [one for one in self.episodes if not one.broken]
        if whole and all(len(one.actions) == 1 for one in whole) and self.first and not self.first.contract.actions:
            earnings.check_answer(self.probe, levels)
        earnings.check_leak(self.probe, levels, earnings.full_return([*whole, *self.solved]))
        earnings.check_plan(self.log, self.solved)

    def look_back(self) -> None:
        """Look at all episodes that were played."""
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
            log.add("seed.ignored", "all seeds begin with the same text")
        elif firsts["different"] == 2 and firsts["seeds"] == len(checks.SEEDS):
            log.add("seed.ignored", f"{firsts['seeds']} seeds begin with only two texts")

    def end(self) -> None:
        """Step after the end of an episode, close the environment, and look for threads and files that remain."""
        ended = [one for one in self.episodes if one.over]
        if ended:
            checks.check_after_end(self.probe, ended[0].seed, ended[0].actions)
        checks.check_closing(self.probe)
        if left := threading.active_count() - 1 + len(multiprocessing.active_children()):
            self.log.add("left.threads", f"{left} threads or processes go on after close")
        if (place := _place()) != self.place:
            said = ", ".join(sorted(set(place) - set(self.place))[:3]) or "something is missing"
            self.log.add("left.files", f"the working folder is not what it was: {said}")
        grown = held_memory() - self.held
        resets = len(self.clock.times["reset"])
        if grown > _GROWN and grown > resets:
            self.log.add("memory", f"the process grew by {grown} megabytes in {resets} episodes")
        played.check_times(self.log, self.clock)


def canary() -> bool:
    """Return whether the reply that sets it was run as code."""
    return os.environ.pop(CANARY, None) is not None


def _place() -> tuple[str, ...]:
    return (os.getcwd(), *sorted(os.listdir()))


def held_memory() -> int:
    """Return the most memory that this process held so far, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // _MEGABYTE


def _random(seed: int, number: int) -> Callable[[list[Seen]], str]:
    rng = random.Random(f"{seed} {number}")
    return lambda seen: rng.choice(seen[-1].legal())


def run(exam: Exam, tell: Callable[[dict[str, Any]], None]) -> None:
    """Make all checks and tell what is known after each part."""
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
        except Exception as error:  # noqa: BLE001 - whatever a value of the environment raises where it is looked at
            said = f"in the part '{name}' a value of the environment cannot be looked at"
            exam.log.add("contract.values", f"{said}: {one_line(f'{type(error).__name__}: {error}')}", exam.probe.seed)
            exam.log.cut[name] = "a value cannot be looked at"
        tell(state(exam))
        if exam.first is None:
            exam.log.cut |= dict.fromkeys(PARTS[1:], "it cannot be made or reset")
            return
        exam.probe.drop()
        tell({"done": name})


def state(exam: Exam) -> dict[str, Any]:
    """Return what is known so far."""
    return {
        "findings": [one.plain() for one in exam.log.findings.values()],
        "figures": {**exam.log.figures, "play_seconds": exam.clock.spent(), "megabytes": held_memory()},
        "times": {kind: sum(found) for kind, found in exam.clock.times.items()},
        "cut": exam.log.cut,
        "ordered": list(exam.ordered),
    }


def main(order: Mapping[str, Any]) -> None:
    """Do what the order says, and write one line of JSON for each thing to tell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listen_to_alarms()
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    printed = Path(order["folder"], "printed.txt")
    with printed.open("wb") as sink:
        os.dup2(sink.fileno(), 1)  # what the environment prints is not for the one who reads the answers

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
    os._exit(0)  # threads that an environment has left do not hold it up
