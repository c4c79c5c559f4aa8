"""Demonstrations for behavior cloning, as mini-batches: whole episodes of scripted players or recorded runs."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lightning_agentrl.distributed import all_gather, rank, world_size
from lightning_agentrl.episodes.env_pool import EnvPool
from lightning_agentrl.episodes.scripted import chosen_actions, no_model, scripted_action
from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.episodes.sources import EnvConfig, Source
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.losses.aggregation import action_weights
from lightning_agentrl.prompts.renderer import shown
from lightning_agentrl.rollout.collector import Prepared
from lightning_agentrl.rollout.data_module import RolloutDataModule
from lightning_agentrl.rollout.event_loop import LoopThread
from lightning_agentrl.rollout.player import play_parts
from lightning_agentrl.rollout.stream import RolloutSource, RolloutStream
from lightning_agentrl.run_files import LoggedTurn, environment_of, find_run, json_object, read_turns
from lightning_agentrl.types import ModelInput, Rollout, Sample, Scores, Segment, SegmentKind, StopReason, Turn

EPISODES = 500
_SEEDS = 0x636C6F6E  # part of the seeds, so that episodes differ from training episodes
_SAME = (  # fields with the same name in a turn and in the turn log
    *("env", "episode", "observation", "reply", "thought", "action", "valid", "terminated", "truncated", "success"),
    *("hit_token_cap", "history_cuts", "policy_version", "env_seconds", "engine_seconds", "parsed_action"),
    *("thought_tokens", "asked_again"),
)
_NEEDED = (*_SAME, "prompt", "continues", "env_reward", "reward", "episode_return", "stop")


@dataclass(frozen=True)
class Demonstration:
    """A whole episode to clone."""

    samples: tuple[Sample, ...]

    @property
    def turns(self) -> list[Turn]:
        return [turn for sample in self.samples for turn in sample.turns]

    @property
    def outcome(self) -> float:
        """The sum of the environment's rewards in the episode."""
        return self.turns[-1].episode_return


class Demonstrations(ABC):
    """Source of the episodes to clone."""

    @abstractmethod
    def load(self, data: RolloutDataModule, tokenizer: PreTrainedTokenizerBase) -> list[Demonstration]:
        """Return the whole episodes of this rank.

        Args:
            data: data module with environments, prompts and interaction, connected to an agent.
            tokenizer: tokenizer of the model to train.

        Raises:
            ConfigError: the source has no whole episodes, or its episodes are for another model.
        """


class Expert(Demonstrations):
    """Episodes of the environments' scripted players, given by their method ``solver``.

    Args:
        episodes: number of episodes to play over all ranks.
    """

    def __init__(self, episodes: int = EPISODES) -> None:
        if episodes < 1:
            raise ValueError(f"Expert: episodes must be at least 1, got {episodes}")
        self.episodes = episodes

    def load(self, data: RolloutDataModule, tokenizer: PreTrainedTokenizerBase) -> list[Demonstration]:
        """Play the episodes with distinct seeds, none of which is held out."""
        at_a_time = data.sizes.at_a_time(world_size())
        pool = EnvPool([_with_expert(source) for source in data.pool.sources], threads=at_a_time)
        engine, chosen = no_model(), chosen_actions(data.interaction, scripted_action)
        player = replace(data.player, pool=pool, engine=engine, interaction=chosen, temperature=0.0)
        loop = LoopThread()
        played: dict[int, Demonstration] = {}

        async def play(number: int) -> None:
            seed, kind = derive_seed(data.seed, _SEEDS, number), pool.kind(number)
            session = player.session(kind, number, lambda _: seed)
            try:
                samples, lost = await player.play_episode(session)
            finally:
                pool.give_back(kind, session.worker)
            if samples and not lost:
                played[number] = Demonstration(tuple(samples))

        try:
            parts = [partial(play, number) for number in range(rank(), self.episodes, world_size())]
            loop.run(play_parts(parts, at_a_time, engine), data.stopping.look)
        finally:
            loop.stop()
            pool.close()
        return [played[number] for number in sorted(played)]


def _with_expert(source: Source) -> Source:
    if not isinstance(source, EnvConfig):
        raise ConfigError(
            f"the source {source.key} has no scripted player; clone recorded runs, or name environments only"
        )
    return source.with_expert()


class Recorded(Demonstrations):
    """Whole episodes that the policy of a run played in training, from its turn log (callback ``TurnLog``).

    Prompts and replies are reused as token ids, so the run must have had the same tokenizer. Logs contain no pixels, so
    recorded episodes with images cannot be cloned.

    Args:
        run: folder of the run, which must have played the same game.
    """

    def __init__(self, run: str) -> None:
        self.run = run

    def load(self, data: RolloutDataModule, tokenizer: PreTrainedTokenizerBase) -> list[Demonstration]:
        """Return the episodes that began and ended in the log.

        Raises:
            ConfigError: the log has no such episodes, or the run had another game or tokenizer.
        """
        files = find_run(Path(self.run))
        if files.facts is not None:
            check_game(environment_of(json_object(files.facts)), [each.label for each in data.pool.sources], self.run)
        turns, _ = read_turns(files.logs, prompts=True)
        check_keys(turns, self.run)
        check_tokens(turns, tokenizer, self.run)
        episodes: dict[tuple[Any, ...], list[LoggedTurn]] = {}
        for turn in turns:
            episodes.setdefault((turn.get("group"), turn["env"], turn["episode"]), []).append(turn)
        whole = [own for own in episodes.values() if _is_whole(own)]
        if not whole:
            raise ConfigError(
                f"none of the {len(episodes)} episodes in the turn log of '{files.folder}' was played from its first "
                "turn to its end; name a longer run, or another version of it (--recorded)"
            )
        return [Demonstration(tuple(_samples(own))) for own in whole[rank() :: world_size()]]


def check_game(recorded: str, own: Sequence[str], run: str) -> None:
    """Check that a run played the sources of a config, with the same arguments.

    Args:
        recorded: game of the run, from its run.json; empty if unknown.
        own: labels of the config's sources.
        run: folder of the run, for the error message.

    Raises:
        ConfigError: the run played other environments.
    """
    others = [game for game in re.split(r" \(share [^ ()]+\)(?: and |$)", recorded) if game and game not in own]
    if others:
        raise ConfigError(
            f"the run '{run}' played {' and '.join(others)}, and the config has {' and '.join(own)}: name a run of "
            "this game (--recorded)"
        )


def check_keys(turns: Sequence[LoggedTurn], run: str) -> None:
    """Check that logged turns have all fields; ``run`` is the folder of the run, for the error message.

    Raises:
        ConfigError: a field is missing, for example since an earlier version wrote the log.
    """
    for turn in turns:
        if missing := [name for name in _NEEDED if name not in turn]:
            raise ConfigError(
                f"the turn log of '{run}' lacks {', '.join(missing)} (iteration {turn['iteration']}, environment "
                f"{turn['env']}, turn {turn['turn']}), maybe since an earlier version of the package wrote it: name a "
                "run of this version (--recorded)"
            )


def check_tokens(turns: Sequence[LoggedTurn], tokenizer: PreTrainedTokenizerBase, run: str) -> None:
    """Check that this tokenizer decodes logged turns to the logged texts.

    Raises:
        ConfigError: the texts differ, or a turn has images; ``run`` names the run in the message.
    """
    fix = "clone from the scripted player (leave out the recorded run), or use the model of that run"
    logged = {i: text for turn in turns for i, text in zip(turn["reply_ids"], turn["tokens"], strict=True)}
    ids = list(logged)
    own = tokenizer.batch_decode([[i] for i in ids], clean_up_tokenization_spaces=False)
    if len(tokenizer) <= max(ids, default=0) or own != list(logged.values()):
        place = next((k for k, i in enumerate(ids) if i >= len(tokenizer) or own[k] != logged[i]), 0)
        raise ConfigError(
            f"the run '{run}' had another tokenizer than '{tokenizer.name_or_path}': id {ids[place]} was "
            f"{logged[ids[place]]!r} there and is {own[place]!r} here; {fix}"
        )
    for turn in turns:
        if shown(tokenizer, ModelInput.of_ids(turn["prompt_ids"])) != turn["prompt"]:
            raise ConfigError(
                f"a prompt of the run '{run}' (iteration {turn['iteration']}, environment {turn['env']}, turn "
                f"{turn['turn']}) has another text with the tokenizer of '{tokenizer.name_or_path}', or it has "
                f"images, whose pixels are not in the log; {fix}"
            )


def _is_whole(turns: Sequence[LoggedTurn]) -> bool:
    """Return whether logged turns form a whole episode that did not end in a fault of the environment."""
    last = turns[-1]
    ended = bool(last["terminated"] or last["truncated"]) and last["stop"] != StopReason.ENV_FAULT
    return ended and [turn["turn"] for turn in turns] == list(range(len(turns)))


def _samples(turns: Sequence[LoggedTurn]) -> Iterator[Sample]:
    """Yield the samples of an episode; a turn that `continues` belongs to the sample of the turn before it."""
    segments: list[Segment] = []
    own: list[Turn] = []
    for turn in turns:
        if own and not turn["continues"]:
            yield Sample(tuple(segments), tuple(own))
            segments, own = [], []
        kind = SegmentKind.OBSERVATION if own else SegmentKind.PROMPT
        ids = tuple(turn["reply_ids"])
        reply = Segment(SegmentKind.ACTION, ModelInput.of_ids(ids), (0.0,) * len(ids))
        segments += [Segment(kind, ModelInput.of_ids(turn["prompt_ids"])), reply]
        own.append(_turn(turn))
    yield Sample(tuple(segments), tuple(own))


def _turn(logged: LoggedTurn) -> Turn:
    """Convert a logged turn to a Turn."""
    return Turn(
        **{name: logged[name] for name in _SAME},
        index=logged["turn"],
        env_reward=logged["env_reward"] or 0.0,
        reward=logged["reward"] or 0.0,
        episode_return=logged["episode_return"] or 0.0,
        stop=None if logged["stop"] is None else StopReason(logged["stop"]),
    )


def chosen(episodes: Sequence[Demonstration], min_return: float) -> list[Demonstration]:
    """Return this rank's episodes with a return of at least ``min_return``. Every rank must call this function.

    Raises:
        ConfigError: no rank has such episodes, or this rank has none.
    """
    outcomes = [outcome for part in all_gather([episode.outcome for episode in episodes]) for outcome in part]
    if not outcomes:
        raise ConfigError("there is no whole episode to clone; give more episodes, or a longer recorded run")
    enough = sum(outcome >= min_return for outcome in outcomes)
    if not enough:
        raise ConfigError(
            f"none of {len(outcomes)} episodes has a return of at least min_return {min_return:g}, and the best has "
            f"{max(outcomes):g}; lower min_return"
        )
    kept = [episode for episode in episodes if episode.outcome >= min_return]
    if not kept:
        raise ConfigError(
            f"process {rank()} has none of the {enough} episodes to clone, which {world_size()} processes share; "
            "use more episodes, or fewer processes (trainer.devices)"
        )
    return kept


def what_is_cloned(kept: Sequence[Demonstration], episodes: int, iterations: float) -> str:
    """Describe the cloned episodes of all ranks. Every rank must call this function.

    Args:
        kept: episodes of this rank that are cloned.
        episodes: number of episodes of this rank before some were left out.
        iterations: number of iterations of one pass over the episodes.
    """
    own = (sum(len(each.turns) for each in kept), len(kept), episodes, math.fsum(each.outcome for each in kept))
    parts = all_gather((own, iterations))
    turns, count, every, earned = (sum(each) for each in zip(*(part for part, _ in parts), strict=True))
    return (
        f"cloning {turns} turns of {count} of {every} episodes, with a mean return of {earned / count:.3g}; one pass "
        f"takes {max(passes for _, passes in parts):.1f} iterations"
    )


class ClonedTurns(RolloutSource):
    """Rollout source that yields demonstrated turns instead of rollouts, in a new random order in each pass.

    An iteration has as many turns as a rollout. The index of an iteration determines the turns, so a resumed run
    continues exactly. A rank with more turns uses more turns per iteration, so that all ranks finish a pass together.
    Every rank must create such a source.

    Args:
        episodes: episodes of this rank.
        data: data module, for the number of turns per iteration.
        action_share: share of a reply's loss weight on the tokens that name the action, if the reply has a thought.
    """

    def __init__(self, episodes: Sequence[Demonstration], data: RolloutDataModule, action_share: float) -> None:
        self.samples = [sample for episode in episodes for sample in episode.samples]
        self.action_share = action_share
        self.seed = data.seed
        # Environment indices that spread the rows over mini-batches.
        self.places = data.sizes.own_envs(rank(), world_size())
        own = (sum(len(sample.turns) for sample in self.samples), len(episodes), len(self.places))
        turns, played, places = (sum(each) for each in zip(*all_gather(own), strict=True))
        per_place = turns / played if data.groups is not None else data.sizes.turns_per_env
        wanted = places * per_place * len(self.samples) / turns
        self.count = max(round(wanted), data.sizes.mini_batches)
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, int))  # index and order of the last pass

    def next_rollout(self, stream: RolloutStream) -> Prepared:
        """Return the samples of the next iteration with the weights of their tokens."""
        first = stream.collector.iteration * self.count
        picked = [self._sample(place) for place in range(first, first + self.count)]
        placed = [_placed(sample, self.places[k % len(self.places)]) for k, sample in enumerate(picked)]
        rollout = Rollout.from_samples(placed)
        weights = action_weights(rollout, self.action_share, drop_invalid=True)
        # No engine sampled these replies, so there is no mismatch. Zeros stand for the log-probs before the update.
        scores = Scores(old_logps=rollout.rollout_logps)
        return Prepared(rollout.union(weights=weights, scores=scores), {"clone/passes": first / len(self.samples)})

    def _sample(self, place: int) -> Sample:
        number, at = divmod(place, len(self.samples))
        if self._order[0] != number:
            generator = np.random.default_rng(derive_seed(self.seed, number))
            self._order = (number, generator.permutation(len(self.samples)))
        return self.samples[self._order[1][at]]


def _placed(sample: Sample, env: int) -> Sample:
    return replace(sample, turns=tuple(replace(turn, env=env) for turn in sample.turns))
