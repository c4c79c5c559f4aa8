"""Episodes of recorded runs, read from their turn logs token by token."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_agentrl.distributed import rank, world_size
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.prompts.renderer import shown
from lightning_agentrl.rollout.data_module import RolloutDataModule
from lightning_agentrl.rollout.demonstrations import Demonstration, Demonstrations
from lightning_agentrl.run_files import LoggedTurn, environment_of, find_run, json_object, read_turns
from lightning_agentrl.types import ModelInput, Sample, Segment, SegmentKind, StopReason, Turn

_SAME = (  # of a turn and of its line in the log
    *("env", "episode", "observation", "reply", "thought", "action", "valid", "terminated", "truncated", "success"),
    *("hit_token_cap", "history_cuts", "policy_version", "env_seconds", "engine_seconds", "parsed_action"),
    *("thought_tokens", "asked_again"),
)
_NEEDED = (*_SAME, "prompt", "continues", "env_reward", "reward", "episode_return", "stop")


class Recorded(Demonstrations):
    """Whole episodes that the policy of a run played in training, from its turn log (callback ``TurnLog``).

    Prompts and replies are taken as they were, so the run must have had the same tokenizer. Logs hold no pixels, so
    episodes with images cannot be cloned from them.

    Args:
        run: folder of the run, which must have played the same game.
    """

    def __init__(self, run: str) -> None:
        self.run = run

    def load(self, data: RolloutDataModule, tokenizer: PreTrainedTokenizerBase) -> list[Demonstration]:
        """Read the episodes that began and ended in the log.

        Raises:
            ConfigError: there are none, they are of another game, or the model's tokenizer cannot read them.
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
    """Refuse a run that played something else than the sources of a config, or with other arguments.

    Args:
        recorded: what it played, as run.json says; empty if that does not say so.
        own: labels of the sources.
        run: folder of the run.

    Raises:
        ConfigError: one sentence.
    """
    others = [game for game in re.split(r" \(share [^ ()]+\)(?: and |$)", recorded) if game and game not in own]
    if others:
        raise ConfigError(
            f"the run '{run}' played {' and '.join(others)}, and the config has {' and '.join(own)}: name a run of "
            "this game (--recorded)"
        )


def check_keys(turns: Sequence[LoggedTurn], run: str) -> None:
    """Refuse turns that lack what a log holds today.

    Raises:
        ConfigError: one sentence.
    """
    for turn in turns:
        if missing := [name for name in _NEEDED if name not in turn]:
            raise ConfigError(
                f"the turn log of '{run}' lacks {', '.join(missing)} (iteration {turn['iteration']}, environment "
                f"{turn['env']}, turn {turn['turn']}), as one of an earlier version of the package may: name a run of "
                "this version (--recorded)"
            )


def check_tokens(turns: Sequence[LoggedTurn], tokenizer: PreTrainedTokenizerBase, run: str) -> None:
    """Refuse turns whose ids mean something else to this tokenizer, or that hold images.

    Raises:
        ConfigError: one sentence.
    """
    fix = "clone from the scripted player (leave out the recorded run), or take the model of that run"
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
                f"{turn['turn']}) does not read the same with the tokenizer of '{tokenizer.name_or_path}', or shows "
                f"images, whose pixels no log holds; {fix}"
            )


def _is_whole(turns: Sequence[LoggedTurn]) -> bool:
    """Return whether all turns of an episode are there, which it may lack in the log of some iterations, and where its
    environment failed.
    """
    last = turns[-1]
    ended = bool(last["terminated"] or last["truncated"]) and last["stop"] != StopReason.ENV_FAULT
    return ended and [turn["turn"] for turn in turns] == list(range(len(turns)))


def _samples(turns: Sequence[LoggedTurn]) -> Iterator[Sample]:
    """Yield the samples of an episode: a turn that continues a sample was read behind the turn before it."""
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
    """Return a turn with what a log holds of it."""
    return Turn(
        **{name: logged[name] for name in _SAME},
        index=logged["turn"],
        env_reward=logged["env_reward"] or 0.0,
        reward=logged["reward"] or 0.0,
        episode_return=logged["episode_return"] or 0.0,
        stop=None if logged["stop"] is None else StopReason(logged["stop"]),
    )
