"""Evaluation of several policies on the same held-out seeds of several environments, with paired differences.

Shape suffixes: P is the number of policies, E of environments, S of seeds per environment, N of episodes per seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from lightning_agentrl.agents.policy import Policy
from lightning_agentrl.agents.saved_policy import SavedPolicy, find_policy
from lightning_agentrl.callbacks.turn_log import turn_records
from lightning_agentrl.engines import Engine
from lightning_agentrl.episodes.env_pool import EnvPool
from lightning_agentrl.episodes.scripted import Choose, chosen_actions, no_model, random_action, scripted_action
from lightning_agentrl.episodes.seeds import held_out_seeds
from lightning_agentrl.episodes.sources import EnvConfig, Source
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.metrics.comparison import bootstrap_interval, pass_at_k
from lightning_agentrl.metrics.episodes import EpisodeResult, wilson_interval
from lightning_agentrl.models.loading import KEY
from lightning_agentrl.rollout import RolloutDataModule
from lightning_agentrl.rollout.event_loop import LoopThread
from lightning_agentrl.rollout.policy_settings import PolicySettings
from lightning_agentrl.rollout.validation import WholeEpisode, play_episodes
from lightning_agentrl.run_files import LoggedTurn
from lightning_agentrl.tools.view import Entry, Report, Table, build_comparison
from lightning_agentrl.types import Rollout

BASELINES: dict[str, Choose] = {"random": random_action, "scripted": scripted_action}
SHOWN = 16  # number of seeds of each environment whose episodes the page shows
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ALL = "mean of all"

Number = tuple[float, float, float]  # a number and the bounds of its 95 % interval


@dataclass(frozen=True)
class Evaluation:
    """Results of several policies on the same seeds.

    Args:
        policies: names of the policies.
        envs: names of the environments.
        seeds: held-out seeds, the same for all policies and environments.
        k: k of pass@k.
        success: whether each episode succeeded [P, E, S, N].
        returns: sums of the environment's rewards [P, E, S, N].
        turns: number of turns of each episode [P, E, S, N].
        valid_turns: number of turns with a valid reply [P, E, S, N].
        lost: whether a fault of the environment ended the episode, which then counts as failed [P, E, S, N].
        records: turns of the first seeds as records for the page, by policy.
    """

    policies: tuple[str, ...]
    envs: tuple[str, ...]
    seeds: tuple[int, ...]
    k: int
    success: NDArray[np.bool_]
    returns: NDArray[np.float64]
    turns: NDArray[np.int64]
    valid_turns: NDArray[np.int64]
    lost: NDArray[np.bool_]
    records: Sequence[Sequence[LoggedTurn]] = ()

    def rates(self, policy: int, env: int | None = None) -> dict[str, Any]:
        """Return the rates of a policy in one environment, or their unweighted means over all environments (None).

        The interval of ``success`` is Wilson's interval over the seeds in one environment, and a bootstrap interval of
        the seeds over all environments.
        """
        envs = self._envs(env)
        success_ES, turns_E = self.success[policy, envs].mean(-1), self.turns[policy, envs].sum((1, 2))
        seeds = len(self.seeds)
        share = float(success_ES.mean())
        bounds = bootstrap_interval(success_ES) if len(envs) > 1 else wilson_interval(share * seeds, seeds)
        return {
            "success": (share, *bounds),
            f"pass@{self.k}": float(pass_at_k(self.success[policy, envs], self.k).mean()),
            "return": float(self.returns[policy, envs].mean()),
            "turns": float(self.turns[policy, envs].mean()),
            "valid": float((self.valid_turns[policy, envs].sum((1, 2)) / np.maximum(turns_E, 1)).mean()),
            "lost": int(self.lost[policy, envs].sum()),
        }

    def difference(self, first: int, second: int, env: int | None = None) -> dict[str, Number]:
        """Return mean differences of two policies on the same seeds (first minus second), with bootstrap intervals."""
        envs = self._envs(env)
        each = {
            "success": self.success.mean(-1),
            f"pass@{self.k}": pass_at_k(self.success, self.k),
            "return": self.returns.mean(-1),
        }
        gaps = {name: x_PES[first, envs] - x_PES[second, envs] for name, x_PES in each.items()}
        return {name: (float(gap.mean()), *bootstrap_interval(gap)) for name, gap in gaps.items()}

    def _envs(self, env: int | None) -> list[int]:
        return list(range(len(self.envs))) if env is None else [env]

    @property
    def places(self) -> dict[str, int | None]:
        """The indices of environments by name, and None for the mean of several environments."""
        every: dict[str, int | None] = dict(zip(self.envs, range(len(self.envs)), strict=True))
        return every if len(every) == 1 else every | {ALL: None}

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """All pairs of policies."""
        return list(combinations(range(len(self.policies)), 2))

    def table(self) -> str:
        """Return tables of rates and differences as text for a terminal."""
        most = f"pass@{self.k}"
        rows = [["environment", "", "success (95 %)", *[most] * (self.k > 1), "return", "turns", "valid"]]
        for name, env in self.places.items():
            for p in range(len(self.policies)):
                found = self.rates(p, env)
                rest = [_percent(found[most])] * (self.k > 1)
                rest += [f"{found['return']:.3f}", f"{found['turns']:.1f}", _percent(found["valid"])]
                rows.append([name if p == 0 else "", LETTERS[p], _success(found["success"]), *rest])
        gaps = [["difference (95 %)", "", "success", *[most] * (self.k > 1), "return"]]
        for name, env in self.places.items():
            for number, (first, second) in enumerate(self.pairs):
                found = self.difference(first, second, env)
                own = [_gap(found["success"]), *[_gap(found[most])] * (self.k > 1), _gap(found["return"])]
                gaps.append([name if number == 0 else "", f"{LETTERS[first]} - {LETTERS[second]}", *own])
        played = f"{len(self.seeds)} held-out seeds of each environment, episodes per seed: {self.success.shape[-1]}"
        parts = ["\n".join(f"{LETTERS[p]}  {name}" for p, name in enumerate(self.policies)), played, _aligned(rows)]
        return "\n\n".join([*parts, *[_aligned(gaps)] * bool(self.pairs)])

    def to_dict(self) -> dict[str, Any]:
        """Return rates, differences, and the outcome of each episode as a dictionary for JSON."""
        places = self.places.items()
        gaps = {
            f"{LETTERS[first]}-{LETTERS[second]}": {name: self.difference(first, second, env) for name, env in places}
            for first, second in self.pairs
        }
        arrays = {name: getattr(self, name).tolist() for name in ("success", "returns", "turns", "valid_turns", "lost")}
        return {
            "policies": dict(zip(LETTERS, self.policies, strict=False)),
            "environments": list(self.envs),
            "seeds": list(self.seeds),
            "k": self.k,
            "rates": {
                LETTERS[p]: {name: self.rates(p, env) for name, env in places} for p in range(len(self.policies))
            },
            "differences": gaps,
            "episodes": arrays,
        }

    def write(self, folder: str | Path, config: str = "") -> Path:
        """Write ``evaluation.json`` and ``evaluation.html``, a page with the episodes side by side; return the page.

        Args:
            folder: output folder, which is created.
            config: text of the suite, for the page.
        """
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        (place / "evaluation.json").write_text(json.dumps(self.to_dict()) + "\n", encoding="utf-8")
        runs = list(zip(self.policies, self.records, strict=True))
        notes = [f"The page shows the episodes of the first {SHOWN} seeds."] if len(self.seeds) > SHOWN else []
        return build_comparison("Evaluation", self._reports(), runs, config, notes, place / "evaluation.html")

    def _reports(self) -> list[Report]:
        reports = []
        for place, env in self.places.items():
            tables = []
            for p, name in enumerate(self.policies):
                found = self.rates(p, env)
                entries = [
                    Entry("success", _success(found["success"]), share=found["success"][0]),
                    *[Entry(f"pass@{self.k}", _percent(found[f"pass@{self.k}"]))] * (self.k > 1),
                    Entry("return", f"{found['return']:.3f}"),
                    Entry("turns", f"{found['turns']:.1f}"),
                    Entry("valid", _percent(found["valid"])),
                ]
                tables.append(Table(f"{LETTERS[p]} {name}", entries))
            gaps = [
                Entry(f"{LETTERS[first]} - {LETTERS[second]}: {name}", _gap(number))
                for first, second in self.pairs
                for name, number in self.difference(first, second, env).items()
                if self.k > 1 or "@" not in name
            ]
            reports.append(Report(place, [*tables, *[Table("paired differences (95 %)", gaps)] * bool(gaps)]))
        return reports


def evaluate(
    policies: Sequence[str | Path | Policy],
    suite: RolloutDataModule,
    samples: int = 1,
    k: int | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Evaluation:
    """Evaluate policies on the same held-out seeds of several environments.

    Args:
        policies: checkpoints, folders of ``agentrl export``, hub ids, ``demo``, ``random``, ``scripted``, or loaded
            policies.
        suite: data module with the environments, the engine, and, in ``validation``, the number of seeds, the number of
            concurrent environments and the temperature. Hub ids and ``demo`` use the suite's prompt, memory and
            interaction; checkpoints and exported folders have saved settings. The suite's ``max_turns`` applies to all.
        samples: number of episodes per seed.
        k: k of pass@k. Default: ``samples``.
        report: function that is called with each line of progress.

    Raises:
        ConfigError: ``k`` is above ``samples``, an environment cannot be created, or a policy cannot be found, has no
            prompt settings, or has prompts that cannot show an environment; raised before weights are loaded.
    """
    if samples < 1:
        raise ConfigError(f"--samples must be at least 1, got {samples}")
    k = samples if k is None else k
    if not 1 <= k <= samples:
        raise ConfigError(f"pass@{k} needs at least {k} episodes per seed, got --samples {samples}; raise --samples")
    if not 1 <= len(policies) <= len(LETTERS) or not suite.validation.episodes:
        raise ConfigError(f"an evaluation needs 1 to {len(LETTERS)} policies and at least one held-out seed")
    suite.pool.make_one_of_each()
    suite.pool.close()
    players = _contenders(policies, suite)
    for one in players:
        one.check()
    seeds, size = held_out_seeds()[: suite.validation.episodes], (len(players), len(suite.pool.sources))
    numbers = np.zeros((5, *size, suite.validation.episodes, samples))
    records: list[list[LoggedTurn]] = []
    suite.pool.start_sources(torch.device("cuda" if torch.cuda.is_available() else "cpu"), suite.date)
    loop = LoopThread()
    try:
        for p, one in enumerate(players):
            records.append(one.play(loop, seeds, numbers[:, p], report))
    finally:
        loop.stop()
        suite.pool.release_sources()
    success, returns, turns, valid, lost = numbers
    return Evaluation(
        policies=tuple(one.name for one in players),
        envs=tuple(suite.pool.names),
        seeds=seeds,
        k=k,
        success=success > 0,
        returns=returns,
        turns=turns.astype(np.int64),
        valid_turns=valid.astype(np.int64),
        lost=lost > 0,
        records=records,
    )


@dataclass
class _Contender:
    """A policy to evaluate. ``choose`` replaces the model of a baseline; ``loaded`` is a policy passed from Python."""

    name: str
    suite: RolloutDataModule
    saved: SavedPolicy
    settings: PolicySettings
    choose: Choose | None = None
    loaded: Policy | None = None

    def pool(self, env: int) -> EnvPool:
        """Return the pool of one environment, with its wording in the policy's training."""
        source: Source = self.suite.pool.sources[env]
        if isinstance(source, EnvConfig):
            source = self.settings.worded(source)
        if self.choose is scripted_action:
            if not isinstance(source, EnvConfig):
                raise ConfigError(f"the policy 'scripted' cannot play {source.name}: tasks have no scripted player")
            source = source.with_expert()
        return EnvPool([source], threads=self.suite.validation.num_envs)

    def check(self) -> None:
        """Check that the policy can play all environments, without loading weights."""
        for env in range(len(self.suite.pool.sources)):
            pool = self.pool(env)
            try:
                player = self._player(pool, no_model())
                player.check_prompts(self.saved.context_length)
                if self.choose is random_action:
                    worker = pool.take(0)
                    pool.give_back(0, worker)
                    if not worker.contract.actions:
                        raise ConfigError("it accepts free text, so there are no actions to choose from")
            except ValueError as error:
                place = f"the policy '{self.name}' cannot play {pool.sources[0].name}"
                raise ConfigError(f"{place}: {error}") from error
            finally:
                pool.close()

    def play(
        self, loop: LoopThread, seeds: Sequence[int], numbers: NDArray[np.float64], report: Callable[[str], None]
    ) -> list[LoggedTurn]:
        """Play all environments; return the turns for the page.

        Args:
            loop: event loop of the episodes.
            seeds: seeds of the episodes.
            numbers: array to fill with success, return, turns, valid turns and loss of each episode [5, E, S, N].
            report: function that is called with each line of progress.
        """
        policy = self.loaded
        if policy is None and self.choose is None:
            policy = Policy(self.saved, self.settings, copy(self.suite.engine))
        engine = no_model() if policy is None else policy.engine
        validation, records = self.suite.validation, list[LoggedTurn]()
        try:
            for env, name in enumerate(self.suite.pool.names):
                pool = self.pool(env)
                player = self._player(pool, engine)
                try:
                    for sample in range(numbers.shape[-1]):
                        at_a_time = validation.num_envs
                        playing = play_episodes(seeds, player, at_a_time, lambda: None, SHOWN, sample)
                        results, shown = loop.run(playing)
                        numbers[:, env, :, sample] = np.array([_summary(sides) for sides in results]).T
                        records += [one for e in shown for one in _records(e, self.saved.tokenizer, name)]
                finally:
                    pool.close()
                report(f"{self.name}: {name}, success {_percent(float(numbers[0, env].mean()))}")
        finally:
            if policy is not None and self.loaded is None:
                policy.close()
        return records

    def _player(self, pool: EnvPool, engine: Engine) -> Any:
        saved = self.saved
        player = self.settings.player(pool, saved.tokenizer, saved.image_reader, saved.context_length, engine)
        if self.choose is None:
            return player
        interaction = copy(player.interaction)
        interaction.reply_budget = None  # replies of a baseline are not tokens of a model
        return replace(player, interaction=chosen_actions(interaction, self.choose, capped=False))


def _contenders(policies: Sequence[str | Path | Policy], suite: RolloutDataModule) -> list[_Contender]:
    """Find policies and their settings. Baselines use settings of the first model, or of ``demo`` without a model."""
    suites = PolicySettings.of_run(suite, suite.validation.temperature)
    found: dict[int, _Contender] = {}
    for place, given in enumerate(policies):
        settings: PolicySettings | None
        if isinstance(given, Policy):
            saved, settings = given.saved, given.settings
        elif str(given) in BASELINES:
            continue
        else:
            saved = _find(given)
            settings = saved.settings or (None if Path(given).expanduser().exists() else suites)
            if settings is None:
                raise ConfigError(
                    f"the folder '{given}' has no prompt settings (agentrl.json), so its prompts would differ from "
                    "those of its training; export the checkpoint of its run again (agentrl export), or name a base "
                    "model by its hub id, which uses the prompts of the suite"
                )
        loaded = given if isinstance(given, Policy) else None
        found[place] = _Contender(saved.source, suite, saved, _equal(settings, suites), loaded=loaded)
    reads = next(iter(found.values()), None) or _Contender("demo", suite, _find("demo"), suites)
    for place, given in enumerate(policies):
        if place not in found:
            found[place] = replace(reads, name=str(given), choose=BASELINES[str(given)], loaded=None)
    return [found[place] for place in range(len(policies))]


def _find(given: str | Path) -> SavedPolicy:
    try:
        return find_policy(given)
    except ValueError as error:
        raise ConfigError(str(error).replace(f" (key {KEY})", "")) from error


def _equal(settings: PolicySettings, suites: PolicySettings) -> PolicySettings:
    """Return settings with seed, temperature and limit of turns replaced by the suite's values."""
    interaction = copy(settings.interaction)
    if suites.interaction.max_turns is not None:
        interaction.max_turns = suites.interaction.max_turns
    return replace(settings, interaction=interaction, seed=suites.seed, temperature=suites.temperature)


def _summary(sides: Sequence[EpisodeResult]) -> tuple[float, ...]:
    """Return success, return, turns, valid turns and loss of an episode, over all sides of a game."""
    return (
        all(side.success for side in sides),
        sum(side.total_reward for side in sides) / len(sides),
        sum(side.turns for side in sides),
        sum(side.valid_turns for side in sides),
        any(side.lost for side in sides),
    )


def _records(episode: WholeEpisode, tokenizer: PreTrainedTokenizerBase, source: str) -> list[LoggedTurn]:
    found = []
    for record in turn_records(Rollout.from_samples(episode.samples), tokenizer, {}) if episode.samples else ():
        prompt_tokens = len(record.pop("prompt_ids"))
        head: Mapping[str, Any] = {"iteration": 1, "phase": "evaluate", "env": episode.place, "source": source}
        found.append({**record, **head, "prompt_tokens": prompt_tokens})
    return found


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _success(number: Number) -> str:
    share, low, high = (100 * x for x in number)
    return f"{share:.1f} % ({low:.1f} to {high:.1f})"


def _gap(number: Number) -> str:
    mean, low, high = number
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([f"{x:<{w}}" for x, w in zip(row[:2], widths, strict=False)]) for row in rows]
    rest = ["".join(f"  {x:>{w}}" for x, w in zip(row[2:], widths[2:], strict=True)) for row in rows]
    return "\n".join((left + right).rstrip() for left, right in zip(lines, rest, strict=True))
