"""One JSON line for every turn, for `agentrl view` and for your own scripts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import lightning as L

from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.callbacks.run_folder import run_folder
from lightning_agentrl.callbacks.turn_record import turn_records
from lightning_agentrl.types import Rollout


class TurnLog(RolloutCallback):
    """A log of every turn that is trained on, with its tokens, scores and advantages, as one line of JSON each.

    Each process writes its own files ``rank<R>-<number>.jsonl``; a full one is followed by the next. A run that goes on
    from a checkpoint in the same folder first cuts off what was played after it, since these turns are played again.

    Args:
        folder: where to write; ``turns`` in the folder of the run when not given.
        file_mb: a file is full at this many megabytes.
        keep_files: full files kept for each process; the oldest are removed. A turn takes about 4 kB with a short reply
            and 60 kB with 500 tokens.
        every: iterations from one that is written to the next, for large rollouts.
    """

    def __init__(self, folder: str | None = None, file_mb: float = 50.0, keep_files: int = 20, every: int = 1) -> None:
        if file_mb <= 0 or keep_files < 1 or every < 1:
            raise ValueError(
                "TurnLog needs file_mb above 0, and keep_files and every of at least 1, got "
                f"{file_mb}, {keep_files} and {every}"
            )
        self.every = every
        self.folder = folder
        self.file_mb = file_mb
        self.keep_files = keep_files
        self._folder = Path()
        self._texts: dict[Any, dict[int, str]] = {}  # of the tokens seen, by tokenizer
        self._number: int | None = None  # of the file being written

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._folder = Path(self.folder) if self.folder else run_folder(trainer) / "turns"

    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        if trainer.current_epoch % self.every:
            return
        rank = trainer.global_rank
        head = {"iteration": trainer.current_epoch + 1, "phase": agent.phase, "rank": rank}
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._number is None:  # never into the file of an earlier run, which may end in a broken line
            if trainer.ckpt_path:
                self._cut(head["iteration"], rank, trainer.world_size)
            self._number = max(self._numbers(rank), default=-1) + 1
        first, texts = self._number, self._texts.setdefault(agent.tokenizer, {})
        file = self._path(rank, self._number).open("a", encoding="utf-8")
        try:
            for record in turn_records(rollout, agent.tokenizer, texts):
                if file.tell() >= self.file_mb * 1e6:
                    file.close()
                    self._number += 1
                    file = self._path(rank, self._number).open("a", encoding="utf-8")
                file.write(json.dumps(head | record, ensure_ascii=False, separators=(",", ":")) + "\n")
        finally:
            file.close()
        if self._number > first:
            for old in self._numbers(rank)[: -self.keep_files - 1]:
                self._path(rank, old).unlink()

    def _cut(self, iteration: int, rank: int, world: int) -> None:
        """Remove the turns from an iteration on, of this rank and of those beyond the last that it stands for."""
        ranks = {int(path.name[4:].split("-")[0]) for path in self._folder.glob("rank*-*.jsonl")}
        for other in sorted(ranks):
            if other % world == rank:
                for number in reversed(self._numbers(other)):  # of a rank, iterations only grow
                    if cut_from(self._path(other, number), iteration) > 0:
                        break

    def _path(self, rank: int, number: int) -> Path:
        return self._folder / f"rank{rank}-{number:06d}.jsonl"

    def _numbers(self, rank: int) -> list[int]:
        """Return the sorted numbers of the files of a rank."""
        found = (re.fullmatch(rf"rank{rank}-(\d+)\.jsonl", path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in found if match)


def cut_from(log: Path, iteration: int) -> int:
    """Cut a log off before its first turn of this iteration or a later one, also a last line that is not whole.

    Returns:
        Bytes that are left; a log of which nothing is left is removed.
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
