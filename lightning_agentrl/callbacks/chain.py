"""What every iteration computed, without times: enough to say where two runs part."""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, cast
from zipfile import BadZipFile

import lightning as L
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.callbacks.run_folder import run_folder, whole_file
from lightning_agentrl.distributed import all_gather, raise_once
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.types import LATE, Rollout, Scores, input_of

Link = dict[str, np.ndarray]  # fields of one iteration on one rank, by "stage/level/name", in the order of their making

FOLDER = "chain"
_NAME = r"(\d+)-rank(\d+)"  # of a file, without its extension
HELD_OUT = "val/"  # begins the names of numbers of a validation
BLOCK = 1 << 22  # numbers of a weight that are summed at a time
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number


class Chain(RolloutCallback):
    """A chain of what every iteration computed, for `agentrl replay` and `agentrl bisect`.

    Each process writes one file per iteration: the turns and tokens of its part of the rollout with scores and
    advantages, the losses and other metrics of the update, a checksum of every weight after it, and the numbers of a
    validation, if there was one. Times are left out.

    Args:
        keep: iterations of which the files are kept. One takes about 30 bytes for each sampled token.
    """

    def __init__(self, keep: int = 200) -> None:
        self.keep = keep
        self._folder = Path()
        self._link: Link = {}
        self._alone = False
        self._claimed: int | None = None  # while a run is training

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._folder = run_folder(trainer) / FOLDER
        self._alone = False  # no file of a run that was in this folder before is left
        self._link = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse a folder to which another run is writing now.

        Raises:
            ConfigError: with the keys to change.
        """
        with raise_once():
            if trainer.is_global_zero:
                self._claimed = claim(self._folder)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._release()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._release()

    def _release(self) -> None:
        if self._claimed is not None:
            release(self._claimed)
            self._claimed = None

    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        self._link |= rollout_fields(rollout)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """Write after the last step, since a run that is stopped in its validation goes on with the next iteration."""
        if not trainer.is_last_batch:
            return
        # Lightning itself tells them only after a validation.
        means = cast(Any, trainer)._results.metrics(on_step=False)["callback"]
        write_link(self._path(trainer), self._link | number_fields("update", means) | weight_fields(pl_module))
        self._path(trainer, self.keep).unlink(missing_ok=True)
        if not self._alone:
            drop_links(self._folder, trainer.current_epoch + 1, trainer.global_rank, trainer.world_size)
            self._alone = True
        self._link = {}

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        path, numbers = self._path(trainer), trainer.callback_metrics
        if trainer.state.fn == TrainerFn.FITTING and path.exists():  # it may be in the folder of the run before
            held_out = {name: x for name, x in numbers.items() if name.startswith(HELD_OUT)}
            write_link(path, read_link(path) | number_fields("validation", held_out))

    def _path(self, trainer: L.Trainer, before: int = 0) -> Path:
        """Return the file of the running iteration, or of one before it."""
        return link_path(self._folder, trainer.current_epoch + 1 - before, trainer.global_rank)


def number_fields(stage: str, numbers: Mapping[str, Any]) -> Link:
    """Return the numbers that an equal run repeats, in float32: under 64-true, time decides whether more is kept."""
    repeated = sorted((name, float(x)) for name, x in numbers.items() if _is_repeatable(name))
    return {f"{stage}/number/{name}": np.array(x, np.float32) for name, x in repeated}


_claims: set[int] = set()  # what is open in this process


def _leave_claims() -> None:
    """Close them in a forked process, which would hold them for as long as it lives, after the run has ended."""
    for opened in _claims:
        os.close(opened)
    _claims.clear()


os.register_at_fork(after_in_child=_leave_claims)


def claim(folder: Path) -> int:
    """Make a chain's folder, if it is not there, and claim it for one run.

    Returns:
        What holds the claim until it is given to :func:`release`, or the process ends, however it does.

    Raises:
        ConfigError: another run has claimed it, with the keys to change.
    """
    folder.mkdir(parents=True, exist_ok=True)
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(opened)
        raise ConfigError(
            f"another run is writing to '{folder.parent}' now, and the checkpoints, chains and turn logs of both would "
            "be mixed; wait for its end, or give this run another trainer.default_root_dir or another version of its "
            "logger"
        ) from None
    except OSError:  # a file system without locks of folders
        pass
    _claims.add(opened)
    return opened


def release(opened: int) -> None:
    """Give up a claim."""
    with suppress(OSError):
        fcntl.flock(opened, fcntl.LOCK_UN)
    os.close(opened)
    _claims.discard(opened)


def write_link(path: Path, link: Link) -> None:
    """Write the fields of one iteration; what was there before is there until they are."""
    with whole_file(path) as beside, beside.open("wb") as file:
        np.savez_compressed(file, **cast(Any, link))


def link_path(folder: Path, iteration: int, rank: int) -> Path:
    return folder / f"{iteration:06d}-rank{rank}.npz"


def drop_links(folder: Path, behind: int, rank: int, world: int) -> None:
    """Remove the files of another run, which was here before: those of a rank for iterations behind this one.

    The first rank removes those of ranks that there are no more, for this iteration too.
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
        ValueError: there are none.
    """
    links: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.glob("*.npz")):
        if match := re.fullmatch(_NAME, path.stem):
            links.setdefault(int(match[1]), {})[int(match[2])] = path
    if not links:
        raise ValueError(f"there is no chain in '{folder}'; it is written by runs with the callback Chain")
    return links


def read_link(path: Path) -> Link:
    """Return the fields of one file.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError as error:  # of a run that is going on
        raise ValueError(f"the file '{path}' is no longer in the chain, of which a run keeps the last ones") from error
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error) as error:
        raise ValueError(f"the file '{path}' of the chain is damaged: {error}") from error


def rollout_fields(rollout: Rollout) -> Link:
    """Return what was collected, by turn [T] and by token [N], and what was made of it, by token or by row [B].

    Of a turn, what it was shown comes first, then its reply, then what followed: the order in which a fault spreads.
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
    """Return a checksum, the sum and the norm of each weight, over all shards of it."""
    own = [(name, *_sums(weight)) for name, weight in module.named_parameters()]
    sharded = any(isinstance(weight, DTensor) for weight in module.parameters())
    parts = all_gather(own) if sharded else [own]
    link = {}
    for rows in zip(*parts, strict=True):
        checksum = sum(row[1] for row in rows) % 2**64
        total, squares = (math.fsum(row[i] for row in rows) for i in (2, 3))
        link[f"weights/tensor/{rows[0][0]}"] = np.array(
            [checksum, *np.array([total, squares]).view(np.uint64)], np.uint64
        )
    return link


def _sums(weight: Tensor) -> tuple[int, float, float]:
    """Return a checksum of bits and places that adds up over shards, the sum, and the sum of squares."""
    start, local = 0, weight.detach()
    if isinstance(local, DTensor):
        shape, offset = compute_local_shape_and_global_offset(local.shape, local.device_mesh, local.placements)
        if any(offset[1:]) or list(shape[1:]) != list(local.shape[1:]):
            raise NotImplementedError("a weight that is sharded along another dimension than the first")
        start, local = offset[0] * math.prod(local.shape[1:]), local.to_local()
    checksum, total, squares = 0, 0.0, 0.0
    for block in local.reshape(-1).split(BLOCK):
        places = torch.arange(start, start + len(block), device=block.device) * 2 + 1
        checksum += int((block.view(_INTEGERS[block.element_size()]).long() * places).sum())
        doubles = block.double()
        total, squares = total + float(doubles.sum()), squares + float(doubles.square().sum())
        start += len(block)
    return checksum, total, squares


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") >> 1


def _is_repeatable(name: str) -> bool:
    return not name.startswith("time/") and "seconds" not in name and "per_second" not in name
