"""The folder of a run, atomic writing of files, and the record `run.json`."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from lightning_agentrl.agents import Agent
from lightning_agentrl.agents.resume import versions
from lightning_agentrl.distributed import raise_once
from lightning_agentrl.errors import ConfigError, naming_file
from lightning_agentrl.models.loading import resolve_model
from lightning_agentrl.rollout import RolloutDataModule
from lightning_agentrl.run_files import FACTS, json_object


def run_folder(trainer: L.Trainer) -> Path:
    """Return the folder of this run, with the logger's files and checkpoints; without a logger: the trainer's root.

    Every rank must call this function, which returns the first rank's result.
    """
    logger = trainer.logger
    folder = Path(trainer.default_root_dir)
    if isinstance(logger, TensorBoardLogger | CSVLogger):
        folder = Path(logger.log_dir)
    elif logger is not None:  # same folder as ModelCheckpoint's
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        folder = Path(logger.save_dir or folder) / str(logger.name) / version
    return Path(trainer.strategy.broadcast(str(folder)))


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Provide a temporary path to write to, then rename it to ``path``, so that readers never see a partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    with naming_file(beside):
        yield beside
    beside.replace(path)


_claims: set[int] = set()  # file descriptors of the locks that this process holds


def _leave_claims() -> None:
    """Close locks in a forked process, which would otherwise hold them after the run has ended."""
    for opened in _claims:
        os.close(opened)
    _claims.clear()


os.register_at_fork(after_in_child=_leave_claims)


def claim(folder: Path) -> int:
    """Create a run's folder, if it does not exist, and lock it for one run.

    Returns:
        The file descriptor that holds the lock until :func:`release`, or until the process ends.

    Raises:
        ConfigError: another run has locked the folder; the message names the keys to change.
    """
    folder.mkdir(parents=True, exist_ok=True)
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(opened)
        raise ConfigError(
            f"another run is writing to '{folder}' now, and the checkpoints and turn logs of both would "
            "be mixed; wait until it ends, or set another trainer.default_root_dir or another version of the logger "
            "for this run"
        ) from None
    except OSError:  # the file system does not support locks of folders
        pass
    _claims.add(opened)
    return opened


def release(opened: int) -> None:
    """Release the lock of :func:`claim`."""
    with suppress(OSError):
        fcntl.flock(opened, fcntl.LOCK_UN)
    os.close(opened)
    _claims.discard(opened)


class RunRecord(SaveConfigCallback):
    """Record of the run: its config, in a file and in loggers that store configs, and ``run.json``.

    ``run.json`` contains the run id (which is also written to TensorBoard's files), the command, seed, versions,
    device, precision, the model with its number of parameters, and the sizes of the rollout. A validation, or a run
    that is refused before it begins, does not overwrite an existing record, which may belong to another run.
    """

    began: str  # time before which the run wrote nothing; set in setup
    _claimed: int | None = None  # file descriptor of the folder's lock during training

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.began = _now()
        record = run_folder(trainer) / self.config_filename
        if not record.exists():
            self._save(trainer, record)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Lock the folder for this run.

        Raises:
            ConfigError: another run is writing to the folder; the message names the keys to change.
        """
        folder = run_folder(trainer)
        with raise_once():
            if trainer.is_global_zero:
                self._claimed = claim(folder)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._release()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._release()

    def _release(self) -> None:
        if self._claimed is not None:
            release(self._claimed)
            self._claimed = None

    @rank_zero_only
    def _save(self, trainer: L.Trainer, record: Path) -> None:
        """Save the config once, replacing an earlier file atomically."""
        if self.already_saved:
            return
        with whole_file(record) as beside:
            beside.touch()  # raises an OSError if the folder is not writable; the parser would raise another class
            # The config was checked when it was parsed.
            self.parser.save(self.config, beside, skip_unset=False, skip_validation=True, overwrite=True)
        self.already_saved = True
        for logger in trainer.loggers:
            if not isinstance(logger, TensorBoardLogger | CSVLogger):  # these two loggers have the file in their folder
                logger.log_hyperparams(self.config.as_dict())

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        folder = run_folder(trainer)
        self._save(trainer, folder / self.config_filename)
        self._write(folder, facts(trainer, cast(Agent, pl_module)))
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("run_id", cast(Agent, pl_module).run_id, trainer.global_step)

    @rank_zero_only
    def _write(self, folder: Path, content: dict[str, Any]) -> None:
        """Write ``run.json``. A run that is resumed in the same folder keeps the time of its first start."""
        record = folder / FACTS
        before = json_object(record)
        began = None if content["continues"] else self.began
        if before.get("run_id") == content["run_id"]:
            began = before.get("began")
        with whole_file(record) as beside:  # atomic, since the run may be killed and the next start reads the file
            beside.write_text(json.dumps({**content, "began": began}, indent=2) + "\n")


def facts(trainer: L.Trainer, agent: Agent) -> dict[str, Any]:
    """Return the facts that are needed to repeat a run."""
    data = agent.datamodule
    modules = {"actor": agent.actor, "critic": agent.critic}
    return {
        "run_id": agent.run_id,
        "started": _now(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "seed": int(os.environ.get("PL_GLOBAL_SEED", 0)),
        "commit": _commit(),
        "versions": versions(),
        "continues": str(trainer.ckpt_path) if trainer.ckpt_path else None,
        "machine": {
            "platform": platform.platform(),
            "device": str(agent.device),
            "processes": trainer.world_size,
            "precision": str(trainer.precision),
        },
        "model": {
            "name": agent.model,
            "folder_or_id": Path(resolve_model(agent.model)).name,
            "type": agent.actor.lm.config.model_type,
            "reference": agent.needs.ref_logps,
            "parameters": {
                name: {"all": count_parameters(module), "trained": count_parameters(module, trained=True)}
                for name, module in modules.items()
                if module is not None
            },
        },
        "rollout": {
            "env": data.pool.label,
            "num_envs": data.sizes.num_envs,
            **_sizes(data),
            "update_epochs": data.sizes.update_epochs,
            "seed": data.seed,
        },
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _sizes(data: RolloutDataModule) -> dict[str, Any]:
    if data.groups is not None:
        return {"groups": asdict(data.groups)}
    return {"turns_per_env": data.sizes.turns_per_env, "mini_batch_turns": data.sizes.mini_batch_turns}


def count_parameters(module: torch.nn.Module, trained: bool = False) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)


def _commit() -> str:
    """Return the git commit of the working folder, with a mark if files differ; empty outside a repository."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
