"""One JSON line for every turn, for `agentrl view` and for your own scripts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.callbacks.run_folder import run_folder
from lightning_agentrl.callbacks.turn_files import TurnFiles
from lightning_agentrl.callbacks.turn_record import turn_records
from lightning_agentrl.distributed import raise_once
from lightning_agentrl.errors import ConfigError, naming_file
from lightning_agentrl.rollout.validation import WholeEpisode
from lightning_agentrl.types import Rollout

HELD_OUT = "held_out"  # folder inside that of the trained turns, and the phase of its turns


class TurnLog(RolloutCallback):
    """A log of every turn that is trained on, with its tokens, scores and advantages, as one line of JSON each.

    Each process writes its own files ``rank<R>-<number>.jsonl``; at 50 MB the next one begins, and the last 20 full
    ones are kept. A turn takes about 4 kB with a short reply and 60 kB with 500 tokens. Each line has the
    ``run_id`` of its run. A run that goes on from a checkpoint in the same folder first cuts off what it had played
    after it, since these turns are played again; a new run there first removes the files of processes that it does
    not have.
    Held-out episodes lie in the folder ``held_out`` beside the files, each with the number of iterations before it.

    Args:
        folder: where to write; ``turns`` in the folder of the run when not given.
        every: iterations from one that is written to the next, for large rollouts.
        held_out: how many episodes of each validation are written, those with the first seeds; 0: none.
    """

    def __init__(self, folder: str | None = None, every: int = 1, held_out: int = 32) -> None:
        if every < 1 or held_out < 0:
            raise ValueError(f"TurnLog needs every >= 1 and held_out >= 0, got {every} and {held_out}")
        self.every = every
        self.held_out_watched = held_out
        self.folder = folder
        self._folder = Path()
        self._texts: dict[Any, dict[int, str]] = {}  # of the tokens seen, by tokenizer
        self._files: dict[Path, TurnFiles] = {}  # by their folder
        self._first: int | None = None  # iteration that the run begins or goes on with

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        usual = run_folder(trainer) / "turns"
        self._folder = Path(self.folder) if self.folder else usual
        self._files, self._first = {}, None
        logs = [one for one in cast(Any, trainer).callbacks if isinstance(one, TurnLog)]
        folders = [(Path(one.folder) if one.folder else usual).resolve() for one in logs]
        with raise_once():
            if (count := folders.count(self._folder.resolve())) > 1:
                raise ConfigError(
                    f"{count} TurnLog in trainer.callbacks would write all turns into one folder; leave one out, "
                    "or give one another init_args.folder"
                )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._first = trainer.current_epoch + 1

    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        if trainer.current_epoch % self.every:
            return
        iteration = trainer.current_epoch + 1
        head = _head(trainer, agent, iteration, agent.phase)
        # A run that was stopped in a validation does not collect the rollout of its iteration again.
        records = (head | record for record in self._records(agent, rollout))
        self._write(trainer, agent, self._folder, iteration, records)

    def on_held_out(self, trainer: L.Trainer, agent: Any, episodes: Sequence[WholeEpisode]) -> None:
        if trainer.state.fn == TrainerFn.FITTING:  # a validation by itself is no part of the run
            done = trainer.current_epoch + trainer.validating  # inside an epoch it comes after the update
            head = _head(trainer, agent, done, HELD_OUT)
            own = (episode for episode in episodes if episode.place < self.held_out_watched and episode.samples)
            # another callback may play as training starts, before this one is told of it
            first = trainer.current_epoch + 1 if self._first is None else self._first
            self._write(trainer, agent, self._folder / HELD_OUT, first, self._held_out(agent, head, own))

    def _held_out(self, agent: Any, head: Mapping[str, Any], own: Iterable[WholeEpisode]) -> Iterator[dict[str, Any]]:
        """Yield the turns of held-out episodes, of which ``env`` is the place of its seed in the list."""
        for episode in own:
            for record in self._records(agent, Rollout.from_samples(episode.samples)):
                yield {**head, **record, "env": episode.place}

    def _records(self, agent: Any, rollout: Rollout) -> Iterator[dict[str, Any]]:
        return turn_records(rollout, agent.tokenizer, self._texts.setdefault(agent.tokenizer, {}))

    def _write(self, trainer: L.Trainer, agent: Any, folder: Path, cut: int, records: Iterable[dict[str, Any]]) -> None:
        """Write records. Before the first of them, a run that goes on from a checkpoint removes its own from iteration
        ``cut`` on, and a new one those of processes that it does not have.
        """
        if folder not in self._files:
            self._files[folder] = TurnFiles(folder, trainer.global_rank)
            if trainer.ckpt_path:
                self._files[folder].cut(cut, trainer.world_size, agent.run.id)
            else:
                self._files[folder].drop_gone(trainer.world_size)
        with naming_file(folder):
            self._files[folder].write(records)


def _head(trainer: L.Trainer, agent: Any, iteration: int, phase: str) -> dict[str, Any]:
    """Return what each line begins with."""
    return {"iteration": iteration, "run_id": agent.run.id, "phase": phase, "rank": trainer.global_rank}
