"""Turn log: one line of JSON per turn, for `agentrl view` and your own scripts."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.callbacks.run_folder import run_folder
from lightning_agentrl.errors import naming_file
from lightning_agentrl.prompts.renderer import shown
from lightning_agentrl.rollout.validation import WholeEpisode
from lightning_agentrl.run_files import run_in
from lightning_agentrl.types import ModelInput, Rollout, Scores, Segment, Turn, input_of

FILE_MB = 50.0  # size of a full file in megabytes
KEPT = 20  # number of full files to keep per process; older files are removed


class TurnFiles:
    """The files ``rank<R>-<number>.jsonl`` of one process in a folder.

    Each run begins a new file, since the file of an earlier run may end with a broken line.

    Args:
        folder: folder of the files; created if it does not exist.
        rank: rank of the process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.rank = rank
        self._number: int | None = None  # sequence number of the file that is being written

    def cut(self, iteration: int, world: int, run_id: str) -> None:
        """Remove the turns of a run from an iteration on, for this rank and for the former ranks that it cleans up.

        Files of other runs are not changed. A file without a readable run id counts as a file of this run.

        Args:
            iteration: first iteration to remove.
            world: number of ranks.
            run_id: id of the run.
        """
        for other in self._ranks(world):
            paths = (self._path(other, number) for number in reversed(self._numbers(other)))
            for path in paths:  # newest first; within a rank, iterations of a run never decrease
                if run_in(path) in ("", run_id) and cut_from(path, iteration) > 0:
                    break

    def drop_gone(self, world: int) -> None:
        """Remove all files of former ranks that this rank cleans up, left by an earlier run with more ranks."""
        for other in self._ranks(world):
            if other >= world:
                for number in self._numbers(other):
                    self._path(other, number).unlink()

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append a line for each record; the first key of a record must be the iteration."""
        self.folder.mkdir(parents=True, exist_ok=True)  # the user may have removed the folder
        if self._number is None:
            self._number = max(self._numbers(self.rank), default=-1) + 1
        first = self._number
        file = self._path(self.rank, self._number).open("a", encoding="utf-8")
        try:
            for record in records:
                if file.tell() >= FILE_MB * 1e6:
                    file.close()
                    self._number += 1
                    file = self._path(self.rank, self._number).open("a", encoding="utf-8")
                file.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")
        finally:
            file.close()
        if self._number > first:
            for old in self._numbers(self.rank)[: -KEPT - 1]:
                self._path(self.rank, old).unlink()

    def _path(self, rank: int, number: int) -> Path:
        return self.folder / f"rank{rank}-{number:06d}.jsonl"

    def _ranks(self, world: int) -> list[int]:
        """Return the ranks whose files this rank cleans up: the ranks equal to it modulo the number of ranks."""
        found = (re.fullmatch(r"rank(\d+)-\d+\.jsonl", path.name) for path in self.folder.iterdir())
        return sorted({rank for match in found if match and (rank := int(match[1])) % world == self.rank})

    def _numbers(self, rank: int) -> list[int]:
        """Return the sorted sequence numbers of a rank's files."""
        found = (re.fullmatch(rf"rank{rank}-(\d+)\.jsonl", path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)


def cut_from(log: Path, iteration: int) -> int:
    """Truncate a log before the first turn of this iteration or a later one, or before a broken line.

    An empty log is removed.

    Returns:
        Remaining size in bytes.
    """
    kept = 0
    with log.open("rb+") as opened:
        for line in opened:
            begun = re.match(rb'{"iteration":(\d+),', line)
            if begun is None or int(begun[1]) >= iteration or not line.endswith(b"\n"):
                break
            kept += len(line)
        opened.truncate(kept)
    if not kept:
        log.unlink()
    return kept


DIGITS = 7  # number of significant digits in the log


def turn_records(
    rollout: Rollout, tokenizer: PreTrainedTokenizerBase, texts: dict[int, str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield one dictionary per turn. Lists of numbers have one entry per token of the reply; None means not computed.

    Args:
        rollout: rollout whose turns are recorded.
        tokenizer: tokenizer of the policy.
        texts: cache of the texts of tokens by id, updated in place.
    """
    texts = {} if texts is None else texts
    for row, sample in enumerate(rollout.samples):
        for turn, read, action, _, here in sample.placed_turns():
            yield {
                **_what_happened(turn),
                "continues": here.start > 0,
                **_tokens(input_of(read), action, tokenizer, texts),
                "rollout_logps": _numbers(rollout.rollout_logps, row, here),
                **_scores(rollout.scores, row, here),
                "advantages": _numbers(rollout.advantages, row, here),
                "returns": _numbers(rollout.returns, row, here),
            }


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], texts: dict[int, str]) -> list[str]:
    """Return the text of each token, special tokens included; tokens with part of a character give U+FFFD."""
    new = [i for i in dict.fromkeys(ids) if i not in texts]
    if new:
        decoded = tokenizer.batch_decode([[i] for i in new], clean_up_tokenization_spaces=False)
        texts.update(zip(new, decoded, strict=True))
    return [texts[i] for i in ids]


def _what_happened(turn: Turn) -> dict[str, Any]:
    return {
        "env": turn.env,
        "episode": turn.episode,
        "group": turn.group,
        "turn": turn.index,
        "policy_version": turn.policy_version,
        "observation": turn.observation,
        "call": turn.call,
        "model": turn.model,
        "thought": turn.thought,
        "thought_tokens": turn.thought_tokens,
        "parsed_action": turn.parsed_action,
        "action": turn.action,
        "valid": turn.valid,
        "reward": _number(turn.reward),
        "env_reward": _number(turn.env_reward),
        "episode_return": _number(turn.episode_return),
        "terminated": turn.terminated,
        "truncated": turn.truncated,
        "stop": None if turn.stop is None else turn.stop.value,
        "success": turn.success,
        "history_cuts": turn.history_cuts,
        "hit_token_cap": turn.hit_token_cap,
        "env_seconds": round(turn.env_seconds, 4),
        "engine_seconds": round(turn.engine_seconds, 4),
        "env_errors": list(turn.env_errors),
        "lost": list(turn.lost),
        "asked_again": turn.asked_again,
        "branch_returns": [_number(value) for value in turn.branch_returns],
        "metrics": {name: _number(value) for name, value in turn.metrics.items()},
        "image": None if turn.image is None else base64.b64encode(turn.image).decode(),
    }


def _tokens(
    prompt: ModelInput, action: Segment, tokenizer: PreTrainedTokenizerBase, texts: dict[int, str]
) -> dict[str, Any]:
    reply_ids = list(action.ids)
    return {
        "prompt_ids": list(prompt.ids),
        "prompt": shown(tokenizer, prompt),
        "reply_ids": reply_ids,
        "reply": tokenizer.decode(reply_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False),
        "tokens": token_texts(tokenizer, reply_ids, texts),
    }


def _scores(scores: Scores, row: int, here: slice) -> dict[str, list[float | None] | None]:
    names = ("old_logps", "ref_logps", "values", "entropy")
    return {name: _numbers(getattr(scores, name), row, here) for name in names}


def _numbers(x_BA: Tensor | None, row: int, here: slice) -> list[float | None] | None:
    return None if x_BA is None else [_number(x) for x in x_BA[row, here].tolist()]


def _number(x: float) -> float | None:
    return float(f"{x:.{DIGITS}g}") if math.isfinite(x) else None  # JSON has no NaN


HELD_OUT = "held_out"  # name of the subfolder and of the phase of held-out turns


class TurnLog(RolloutCallback):
    """Log every turn that is trained on, with its tokens, scores and advantages, as one line of JSON.

    Each process writes separate files ``rank<R>-<number>.jsonl``. A new file begins at 50 MB, and the last 20 full
    files are kept. A turn takes about 4 kB with a short reply and 60 kB with 500 tokens. Each line has the ``run_id``
    of its run. A run that is resumed in the same folder first removes the turns after its checkpoint, since these turns
    are played again; a new run first removes the files of ranks that it does not have. Turns of held-out episodes are
    in the subfolder ``held_out``, with the number of iterations before the validation.

    Args:
        folder: folder to write to; by default ``turns`` in the folder of the run.
        every: number of iterations from one logged rollout to the next.
        held_out: number of episodes to log in each validation, starting from the first seed; 0: no episodes.
    """

    def __init__(self, folder: str | None = None, every: int = 1, held_out: int = 32) -> None:
        if every < 1 or held_out < 0:
            raise ValueError(f"TurnLog needs every >= 1 and held_out >= 0, got {every} and {held_out}")
        self.every = every
        self.held_out_watched = held_out
        self.folder = folder
        self._folder = Path()
        self._texts: dict[Any, dict[int, str]] = {}  # texts of tokens by tokenizer
        self._files: dict[Path, TurnFiles] = {}  # files by folder
        self._first: int | None = None  # first iteration since this start of the run

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        usual = run_folder(trainer) / "turns"
        self._folder = Path(self.folder) if self.folder else usual
        self._files, self._first = {}, None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._first = trainer.current_epoch + 1

    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        if trainer.current_epoch % self.every:
            return
        iteration = trainer.current_epoch + 1
        head = _head(trainer, agent, iteration, agent.phase)
        # A run that was stopped in a validation resumes after it, so this iteration is the first to be rewritten.
        records = (head | record for record in self._records(agent, rollout))
        self._write(trainer, agent, self._folder, iteration, records)

    def on_held_out(self, trainer: L.Trainer, agent: Any, episodes: Sequence[WholeEpisode]) -> None:
        if trainer.state.fn == TrainerFn.FITTING:  # a separate validation is not part of the run
            done = trainer.current_epoch + trainer.validating  # a validation inside an epoch comes after the update
            head = _head(trainer, agent, done, HELD_OUT)
            own = (episode for episode in episodes if episode.place < self.held_out_watched and episode.samples)
            # Another callback may play episodes in its on_train_start, before this callback's on_train_start.
            first = trainer.current_epoch + 1 if self._first is None else self._first
            self._write(trainer, agent, self._folder / HELD_OUT, first, self._held_out(agent, head, own))

    def _held_out(self, agent: Any, head: Mapping[str, Any], own: Iterable[WholeEpisode]) -> Iterator[dict[str, Any]]:
        """Yield the records of held-out turns; ``env`` is the index of the episode's seed in the list of seeds."""
        for episode in own:
            for record in self._records(agent, Rollout.from_samples(episode.samples)):
                yield {**head, **record, "env": episode.place}

    def _records(self, agent: Any, rollout: Rollout) -> Iterator[dict[str, Any]]:
        return turn_records(rollout, agent.tokenizer, self._texts.setdefault(agent.tokenizer, {}))

    def _write(self, trainer: L.Trainer, agent: Any, folder: Path, cut: int, records: Iterable[dict[str, Any]]) -> None:
        """Write records to a folder.

        Before its first record, a resumed run removes its own records from iteration ``cut`` on, and a new run removes
        the files of ranks that it does not have.
        """
        if folder not in self._files:
            self._files[folder] = TurnFiles(folder, trainer.global_rank)
            if trainer.ckpt_path:
                self._files[folder].cut(cut, trainer.world_size, agent.run_id)
            else:
                self._files[folder].drop_gone(trainer.world_size)
        with naming_file(folder):
            self._files[folder].write(records)


def _head(trainer: L.Trainer, agent: Any, iteration: int, phase: str) -> dict[str, Any]:
    """Return the entries at the start of each line."""
    return {"iteration": iteration, "run_id": agent.run_id, "phase": phase, "rank": trainer.global_rank}
