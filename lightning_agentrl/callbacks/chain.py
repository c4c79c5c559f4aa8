"""Records of the results of every iteration, to find where two runs diverge."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast
from zipfile import BadZipFile

import lightning as L
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.callbacks.run_folder import run_folder, whole_file
from lightning_agentrl.types import LATE, Rollout, Scores, input_of

Link = dict[str, np.ndarray]  # record of one iteration on one rank, by "stage/level/name" in order of computation

FOLDER = "chain"
_NAME = r"(\d+)-rank(\d+)"  # file name without extension
HELD_OUT = "val/"  # prefix of a validation's metrics


class Chain(RolloutCallback):
    """Record the results of every iteration, for `agentrl replay` and `agentrl bisect`.

    Each process writes one file per iteration: the turns and tokens of its part of the rollout with scores and
    advantages, the loss of each step, a digest of every weight after the last step, and the metrics of a validation, if
    it took place. Times are not recorded.

    Args:
        keep: number of iterations whose files are kept. A file takes about 30 bytes per sampled token.
    """

    def __init__(self, keep: int = 200) -> None:
        self.keep = keep
        self._folder = Path()
        self._link: Link = {}
        self._losses: list[float] = []
        self._alone = False  # whether files of earlier runs in this folder were removed

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._folder = run_folder(trainer) / FOLDER
        self._alone, self._link, self._losses = False, {}, []

    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        self._link |= rollout_fields(rollout)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any) -> None:
        """Write the file after the last step: a run that is stopped in a validation resumes with the next iteration."""
        self._losses.append(float(outputs["loss"]))
        if not trainer.is_last_batch:
            return
        self._link["update/step/loss"] = np.array(self._losses, np.float32)
        write_link(self._path(trainer), self._link | weight_fields(pl_module))
        self._path(trainer, self.keep).unlink(missing_ok=True)
        if not self._alone:
            drop_links(self._folder, trainer.current_epoch + 1, trainer.global_rank, trainer.world_size)
            self._alone = True
        self._link, self._losses = {}, []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        path, numbers = self._path(trainer), trainer.callback_metrics
        due = cast(Any, trainer).datamodule.validation_due
        # The file is missing if the run was resumed in another folder.
        if trainer.state.fn == TrainerFn.FITTING and due and path.exists():
            held_out = {name: float(x) for name, x in sorted(numbers.items()) if name.startswith(HELD_OUT)}
            repeated = {name: x for name, x in held_out.items() if not re.search("seconds|per_second", name)}
            link = {f"validation/number/{name}": np.array(x, np.float32) for name, x in repeated.items()}
            write_link(path, read_link(path) | link)

    def _path(self, trainer: L.Trainer, before: int = 0) -> Path:
        """Return the file of the iteration that is ``before`` iterations before the current one."""
        return link_path(self._folder, trainer.current_epoch + 1 - before, trainer.global_rank)


def write_link(path: Path, link: Link) -> None:
    """Write the record of one iteration, replacing an earlier file atomically."""
    with whole_file(path) as beside, beside.open("wb") as file:
        np.savez_compressed(file, **cast(Any, link))


def link_path(folder: Path, iteration: int, rank: int) -> Path:
    return folder / f"{iteration:06d}-rank{rank}.npz"


def drop_links(folder: Path, behind: int, rank: int, world: int) -> None:
    """Remove the files that an earlier run left in this folder for later iterations.

    Args:
        folder: folder of the files.
        behind: current iteration.
        rank: rank whose files of later iterations are removed. Rank 0 also removes the files of ranks that no longer
            exist, from the current iteration on.
        world: number of ranks.
    """
    for path in folder.glob("*.npz"):
        if match := re.fullmatch(_NAME, path.stem):
            iteration, owner = int(match[1]), int(match[2])
            gone = rank == 0 and owner >= world and iteration >= behind
            if gone or (owner == rank and iteration > behind):
                path.unlink(missing_ok=True)


def read_links(folder: Path) -> dict[int, dict[int, Path]]:
    """Return the files of a chain by iteration and rank.

    Raises:
        ValueError: the folder contains no files of a chain.
    """
    links: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.glob("*.npz")):
        if match := re.fullmatch(_NAME, path.stem):
            links.setdefault(int(match[1]), {})[int(match[2])] = path
    if not links:
        raise ValueError(f"there is no chain in '{folder}'; it is written by runs with the callback Chain")
    return links


def read_link(path: Path) -> Link:
    """Read the record of one iteration.

    Raises:
        ValueError: the file is missing or damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError as error:  # a run that is still writing has removed the file
        raise ValueError(f"the file '{path}' is gone: a run keeps only the latest files of its chain") from error
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error) as error:
        raise ValueError(f"the file '{path}' of the chain is damaged: {error}") from error


def rollout_fields(rollout: Rollout) -> Link:
    """Return the record of a rollout: collected data by turn [T] and token [N], and computed data by token or row [B].

    Fields are in the order in which a difference would propagate: a turn's observation, its reply, its outcome.
    """
    turns = rollout.turns
    placed = [one for sample in rollout.samples for one in sample.placed_turns()]
    read: dict[str, Sequence[Any]] = {
        "env": [turn.env for turn in turns],
        "episode": [turn.episode for turn in turns],
        "index": [turn.index for turn in turns],
        "observation": [_digest("\n".join(turn.state)) for turn in turns],
        "prompt": [
            _digest(repr(input_of(one.read).ids)) for sample in rollout.samples for one in sample.placed_turns()
        ],
        "policy_version": [turn.policy_version for turn in turns],
    }
    followed: dict[str, Sequence[Any]] = {
        "action": [_digest(turn.action) for turn in turns],
        "env_reward": [turn.env_reward for turn in turns],
        "reward": [turn.reward for turn in turns],
        "ended": [_digest(str(turn.stop)) for turn in turns],
        "metrics": [_digest(repr(sorted(turn.metrics.items()))) for turn in turns],
        "timeouts": [turn.env_errors.count("timeout") + turn.env_errors.count(LATE) for turn in turns],
    }
    link = {f"rollout/turn/{name}": np.array(values) for name, values in read.items()}
    link["rollout/token/turn"] = np.repeat(np.arange(len(turns)), [len(one.action) for one in placed])
    link["rollout/token/ids"] = np.array([i for one in placed for i in one.action.ids])
    link["rollout/token/logps"] = rollout.rollout_logps[rollout.action_mask].numpy(force=True)
    link |= {f"rollout/turn/{name}": np.array(values) for name, values in followed.items()}
    made = {f.name: getattr(rollout.scores, f.name) for f in fields(Scores)}
    made |= {
        name: getattr(rollout, name) for name in ("shaped_rewards", "weights", "loss_mask", "advantages", "returns")
    }
    made |= {"bootstrap_values": rollout.bootstrap_values}
    for name, x in made.items():
        if x is not None:
            level, values = ("token", x[rollout.action_mask]) if x.dim() == 2 else ("row", x)
            link[f"scores/{level}/{name}"] = values.float().numpy(force=True)
    return link


def weight_fields(module: nn.Module) -> Link:
    """Return digest, sum and norm of each weight, or of this rank's shard of it."""
    link = {}
    for name, weight in module.named_parameters():
        local = weight.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        bits = hashlib.blake2b(
            local.contiguous().view(-1).view(torch.uint8).numpy(force=True).data, digest_size=8
        ).digest()
        sums = [local.sum(dtype=torch.float64).item(), torch.linalg.vector_norm(local, dtype=torch.float64).item()]
        link[f"weights/tensor/{name}"] = np.array([np.frombuffer(bits, np.uint64)[0], *np.array(sums).view(np.uint64)])
    return link


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") >> 1
