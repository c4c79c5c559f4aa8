"""Which files of a folder are a run's, where others were before it: as trained runs leave them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from lightning_agentrl.callbacks import RunCheckpoints, TurnLog
from lightning_agentrl.run_files import find_run, read_turns
from lightning_agentrl.tools.replay import checkpoint_before
from lightning_agentrl.tools.view.events import run_of_file
from lightning_agentrl.tools.view.listing import list_runs
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.cli import Config, changed, fit
from tests.tools.view.logs import make_turn

A, B = "a1a1a1a1a1a1", "b2b2b2b2b2b2"  # ids of two runs


def in_one_folder(config: Config, iterations: int, *callbacks: str, seed: int = 0) -> Config:
    """Return the config of a run whose files all lie in the working folder, with a validation at its end."""
    config = changed(config, "seed_everything", seed)
    logger = {"save_dir": ".", "name": "", "version": ""}
    config["trainer"] |= {
        "max_epochs": iterations,
        "logger": {"class_path": "lightning.pytorch.loggers.TensorBoardLogger", "init_args": logger},
        "callbacks": [
            {"class_path": "EngineCheck", "init_args": {"action": "off"}},
            *({"class_path": name} for name in ("TurnLog", "RunCheckpoints", *callbacks)),
        ],
    }
    return config


def shown(run: Path) -> dict[str, Any]:
    """Return what readers find of a run."""
    found = find_run(run, run_of_file)
    files = {kind: {path.name for path in getattr(found, kind)} for kind in ("logs", "held_out", "events", "tables")}
    turns, _ = read_turns(found.logs)
    checkpoint, _ = checkpoint_before(run, None)
    return files | {
        "iterations": sorted({turn["iteration"] for turn in turns}),
        "summary": found.summary,
        "checkpoint": checkpoint and checkpoint.name,
        "listed": list_runs(run).splitlines()[1].split("  ")[-1],
    }


def events_in(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("events*")}


@pytest.mark.slow
def test_a_run_that_began_anew_and_went_on_shows_nothing_of_the_run_before_it(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(in_one_folder(config, 3, "RunSummary"), tmp_path, monkeypatch)
    before = events_in(tmp_path)
    (tmp_path / "export.csv").write_text("step,a\n1,0.5\n")
    os.utime(tmp_path / "export.csv", (1e9, 1e9))
    fit(in_one_folder(config, 1, seed=1), tmp_path, monkeypatch)
    fit(in_one_folder(config, 2, seed=1), tmp_path, monkeypatch, "--ckpt_path", "checkpoints/last.ckpt")
    own = {
        "logs": {"rank0-000001.jsonl", "rank0-000002.jsonl"},
        "held_out": {"rank0-000001.jsonl", "rank0-000002.jsonl"},
        "events": events_in(tmp_path) - before,
        "tables": set(),
        "iterations": [1, 2],
        "summary": None,
        "checkpoint": "iteration-00002.ckpt",
        "listed": "2 iterations, no summary: not ended, or without RunSummary",
    }
    assert shown(tmp_path) == own
    copy = shutil.copytree(tmp_path, tmp_path.parent / "copy", copy_function=shutil.copyfile)  # all are as new as that
    (copy / "export.csv").unlink()
    assert shown(copy) == own


def facts(run: Path, **content: Any) -> None:
    run.mkdir(exist_ok=True)
    (run / "run.json").write_text(json.dumps({"started": "2026-01-02T03:04:05+00:00", **content}))


def log_of(run: Path, number: int, *iterations: int, run_id: str = "", folder: str = "turns") -> Path:
    """Write a turn log of the first process, as TurnLog does; without an id, what does not tell its run."""
    ids = {"run_id": run_id} if run_id else {}
    turns = [{"iteration": k, **ids, **make_turn(iteration=k)} for k in iterations]
    (run / folder).mkdir(parents=True, exist_ok=True)
    path = run / folder / f"rank0-{number:06d}.jsonl"
    path.write_text("".join(json.dumps(turn, separators=(",", ":")) + "\n" for turn in turns))
    return path


def events_of(run: Path, run_id: str, name: str) -> Path:
    """Write curves as TensorBoardLogger does, with the id where RunRecord puts it."""
    with SummaryWriter(str(run / name)) as writer:
        writer.add_scalar("hp_metric", -1.0, 0)
        writer.add_text("run_id", run_id, 0)
        writer.add_scalar("epoch", 0, 1)
    (written,) = (run / name).iterdir()
    return written.rename(run / f"events.out.tfevents.{name}")


def test_files_are_told_apart_by_their_ids_whatever_their_times(tmp_path: Path) -> None:
    first, second = log_of(tmp_path, 0, 1, 2, 3, run_id=A), log_of(tmp_path, 1, 1, run_id=B)
    curves = {run_id: events_of(tmp_path, run_id, str(place)) for place, run_id in enumerate((A, B))}
    (tmp_path / "summary.json").write_text(json.dumps({"run_id": A}))
    for path in (first, *curves.values(), tmp_path / "summary.json"):
        os.utime(path, (4e9, 4e9))
    for continues in (None, "last.ckpt"):
        facts(tmp_path, run_id=B, began="2026-01-02T03:04:05+00:00", continues=continues)
        found = find_run(tmp_path, run_of_file)
        assert (found.logs, found.events, found.summary) == ((second,), (curves[B],), None)
        assert all(name in found.notes[0] for name in (first.name, curves[A].name, "summary.json"))
        assert "1 iteration, no summary" in list_runs(tmp_path)
    facts(tmp_path, run_id=A, began=None, continues="last.ckpt")  # which went on after the second one
    found = find_run(tmp_path, run_of_file)
    assert (found.logs, found.events, found.summary) == ((first,), (curves[A],), tmp_path / "summary.json")
    assert "3 iterations" in list_runs(tmp_path)


def test_a_checkpoint_is_that_of_the_run_whose_id_it_has(tmp_path: Path) -> None:
    def saved(name: str, iterations: int, **content: Any) -> Path:
        loops = {"fit_loop": {"epoch_progress": {"current": {"ready": iterations, "completed": iterations}}}}
        torch.save({"loops": loops, "global_step": iterations, **content}, tmp_path / name)
        return tmp_path / name

    saved("iteration-00005.ckpt", 5, run_id=A)
    own = saved("iteration-00002.ckpt", 2, run_id=B)
    facts(tmp_path, run_id=B, began="2026-01-02T03:04:05+00:00", continues=str(own))
    assert checkpoint_before(tmp_path, None) == (own, 2)
    saved("iteration-00003.ckpt", 3)  # by something else
    with pytest.warns(UserWarning, match=r"iteration-00003.ckpt' is damaged or not a checkpoint of a run"):
        assert checkpoint_before(tmp_path, None) == (own, 2)


def test_files_without_an_id_are_of_the_run_unless_they_are_older_than_its_beginning(tmp_path: Path) -> None:
    """Of a run that went on from a checkpoint it is not known when it began, and they are its own."""
    old, new = log_of(tmp_path, 0, 1, 2), log_of(tmp_path, 1, 3, run_id=A)
    os.utime(old, (1e9, 1e9))
    facts(tmp_path, run_id=A, began=None, continues="last.ckpt")
    assert find_run(tmp_path).logs == (old, new)
    facts(tmp_path, run_id=A, began="2026-01-02T03:04:05+00:00", continues="last.ckpt")
    assert find_run(tmp_path).logs == (new,)


@pytest.mark.parametrize("record", [None, "", '{"run_id": "a1a1', "[]"])
def test_without_a_whole_run_json_the_run_is_that_of_the_last_turns(tmp_path: Path, record: str | None) -> None:
    """As from Python, where none is written."""
    log_of(tmp_path, 0, 1, 2, run_id=A)
    own = log_of(tmp_path, 1, 1, run_id=B)
    log_of(tmp_path, 0, 0, run_id=A, folder="turns/held_out")
    if record is not None:
        (tmp_path / "run.json").write_text(record)
    assert (find_run(tmp_path).logs, find_run(tmp_path).held_out) == ((own,), ())


def test_a_log_that_was_cut_short_in_its_id_does_not_tell_it(tmp_path: Path) -> None:
    log = log_of(tmp_path, 0, 1, run_id=A)
    log.write_bytes(log.read_bytes()[:24])
    facts(tmp_path, run_id=B, began="2026-01-02T03:04:05+00:00", continues=None)
    assert find_run(tmp_path).logs == (log,)
    os.utime(log, (1e9, 1e9))
    assert find_run(tmp_path).logs == ()


def test_turns_in_a_folder_of_their_own_belong_to_the_run_with_their_id(tmp_path: Path) -> None:
    """It may have gone on in another version."""
    first, second = log_of(tmp_path, 0, 1, run_id=A, folder="log"), log_of(tmp_path, 1, 1, run_id=B, folder="log")
    for number, run_id in enumerate((A, B, A)):
        facts(tmp_path / f"version_{number}", run_id=run_id, began=None, continues=None)
    found = find_run(tmp_path)
    assert (found.logs, found.facts) == ((second,), tmp_path / "version_1" / "run.json")
    third = log_of(tmp_path, 2, 2, run_id=A, folder="log")
    found = find_run(tmp_path)
    assert (found.logs, found.facts) == ((first, third), tmp_path / "version_2" / "run.json")


@pytest.mark.slow
def test_of_fits_from_python_in_one_folder_the_last_run_is_shown_from_its_beginning(
    tmp_path: Path, tiny_folder: Path
) -> None:
    """With one agent, also where the run went on elsewhere in between."""
    agent = make_agent(tiny_folder)

    def fit_again(epochs: int, folder: str, ckpt_path: str | None = None) -> None:
        callbacks = [TurnLog(), RunCheckpoints()]
        trainer = make_trainer(tmp_path / folder, epochs, callbacks, enable_checkpointing=True)
        trainer.fit(agent, make_data(), ckpt_path=ckpt_path)

    def logged(folder: str) -> list[str]:
        return [path.name for path in find_run(tmp_path / folder).logs]

    fit_again(2, "one")
    fit_again(1, "one")
    assert logged("one") == ["rank0-000001.jsonl"]
    last = str(tmp_path / "one" / "checkpoints" / "last.ckpt")
    fit_again(2, "other", last)
    assert logged("other") == ["rank0-000000.jsonl"]
    fit_again(2, "one", last)
    assert logged("one") == ["rank0-000001.jsonl", "rank0-000002.jsonl"]


@pytest.mark.slow
def test_a_run_that_goes_on_cuts_no_turns_of_another(tmp_path: Path, tiny_folder: Path) -> None:
    """That began anew in the same folder, and played further."""

    def fit_once(epochs: int, ckpt_path: str | None = None) -> None:
        callbacks = [TurnLog(), RunCheckpoints(keep=9)]
        trainer = make_trainer(tmp_path, epochs, callbacks, enable_checkpointing=True)
        trainer.fit(make_agent(tiny_folder), make_data(), ckpt_path=ckpt_path)

    fit_once(2)
    kept = shutil.copy(tmp_path / "checkpoints" / "iteration-00001.ckpt", tmp_path / "kept.ckpt")
    fit_once(3)
    other = tmp_path / "turns" / "rank0-000001.jsonl"
    before = other.read_bytes()
    fit_once(2, str(kept))
    assert other.read_bytes() == before
    found = find_run(tmp_path)
    assert [path.name for path in found.logs] == ["rank0-000000.jsonl", "rank0-000002.jsonl"]
    turns, notes = read_turns(found.logs)
    assert [turn["iteration"] for turn in turns] == [1] * 16 + [2] * 16
    assert notes == []
