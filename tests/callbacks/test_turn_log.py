"""The turn log: every trained turn once, as plain JSON, with the numbers of the rollout; files that rotate."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_agentrl.callbacks import CriticWarmup, RunCheckpoints, RunSummary, TurnLog, turn_log
from lightning_agentrl.callbacks.turn_log import TurnFiles, turn_records
from lightning_agentrl.models.loading import load_tokenizer
from lightning_agentrl.rollout import FullMemory, ValidationConfig
from lightning_agentrl.types import Rollout, Scores
from tests.agents.harness import KeepRollouts, make_agent, make_data, make_trainer
from tests.callbacks.continued_runs import in_processes
from tests.types.samples import growing


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Rollout]]:
    """Two rollouts of warm-up, played twice by the critic, and two of training."""
    path, keep = tmp_path_factory.mktemp("run"), KeepRollouts()
    callbacks = [CriticWarmup(rollouts=2, rounds=2, fraction=0.5), TurnLog(), keep]
    make_trainer(path, 4, callbacks).fit(make_agent(tiny_folder), make_data())
    return path, keep.rollouts


def test_every_trained_turn_is_one_line(run: tuple[Path, list[Rollout]], tiny_folder: Path) -> None:
    """Also of the warm-up, whose turns are scored in every round and logged once."""
    path, rollouts = run
    logged = lines(path / "turns")
    assert [len(rollout.turns) for rollout in rollouts] == [32, 16, 16]
    assert len(logged) == 64
    assert [record["iteration"] for record in logged] == [1] * 32 + [3] * 16 + [4] * 16
    assert [record["phase"] for record in logged] == ["critic_warmup"] * 32 + ["train"] * 32
    tokenizer = load_tokenizer(str(tiny_folder))
    for record, (sample, turn) in zip(
        logged, ((s, t) for r in rollouts for s in r.samples for t in s.turns), strict=True
    ):
        prompt, action = sample.segments
        assert (record["env"], record["episode"], record["turn"]) == (turn.env, turn.episode, turn.index)
        assert record["prompt_ids"] == list(prompt.ids)
        assert record["prompt"] == tokenizer.decode(prompt.ids)
        assert record["reply_ids"] == list(action.ids)
        assert record["reply"] == turn.reply
        assert [record[key] for key in ("action", "parsed_action", "valid", "reward", "success")] == [
            *(turn.action, turn.parsed_action, turn.valid, turn.reward, turn.success)
        ]
        assert record["stop"] == (turn.stop.value if turn.stop else None)
        assert record["policy_version"] == turn.policy_version
        assert record["metrics"] == turn.metrics


def test_the_numbers_are_those_of_the_rollout(run: tuple[Path, list[Rollout]]) -> None:
    path, rollouts = run
    logged = iter(lines(path / "turns"))
    for rollout in rollouts:
        columns = {
            "rollout_logps": rollout.rollout_logps,
            "old_logps": rollout.scores.old_logps,
            "ref_logps": rollout.scores.ref_logps,
            "values": rollout.scores.values,
            "entropy": rollout.scores.entropy,
            "advantages": rollout.advantages,
            "returns": rollout.returns,
        }
        for row in range(len(rollout)):
            record, mask = next(logged), rollout.action_mask[row]
            assert len(record["tokens"]) == len(record["reply_ids"]) == int(mask.sum())
            for name, x in columns.items():
                assert record[name] == pytest.approx(x[row][mask].tolist(), rel=1e-6), name


def test_a_growing_sample_gives_each_turn_its_own_part(tiny_folder: Path) -> None:
    samples = growing()
    rollout = Rollout.from_samples(samples)
    rollout = rollout.union(
        advantages=torch.arange(10.0).reshape(2, 5), scores=Scores(values=rollout.rollout_logps * 2)
    )
    first, second, third, other = turn_records(rollout, load_tokenizer(str(tiny_folder)))
    assert [r["continues"] for r in (first, second, third, other)] == [False, True, True, False]
    assert [r["prompt_ids"] for r in (first, second, third, other)] == [[1, 2], [7, 8, 8], [9], [1]]
    assert [r["reply_ids"] for r in (first, second, third, other)] == [[11, 12], [13], [14, 15], [16]]
    assert [r["advantages"] for r in (first, second, third, other)] == [[0, 1], [2], [3, 4], [5]]
    assert third["rollout_logps"] == [-1.4, -1.5]
    assert third["values"] == [-2.8, -3.0]
    assert first["old_logps"] is None


@pytest.mark.slow
def test_full_memory_is_logged_too(tiny_folder: Path, tmp_path: Path) -> None:
    keep = KeepRollouts()
    data = make_data(memory=FullMemory(), num_envs=4)
    make_trainer(tmp_path, 1, [TurnLog(str(tmp_path / "log")), keep]).fit(make_agent(tiny_folder), data)
    logged = lines(tmp_path / "log")
    assert len(logged) == 16
    for sample in keep.rollouts[0].samples:
        records = [r for r in logged if r["env"] == sample.turns[0].env and r["episode"] == sample.turns[0].episode]
        ids = [i for record in records for part in ("prompt_ids", "reply_ids") for i in record[part]]
        assert ids == list(sample.ids)


def test_numbers_that_are_no_numbers_are_null(tiny_folder: Path) -> None:
    rollout = Rollout.from_samples(growing())
    bad = torch.full_like(rollout.rewards, math.nan)
    bad[0, 1] = math.inf
    text = json.dumps(
        list(turn_records(rollout.union(advantages=bad), load_tokenizer(str(tiny_folder)))), allow_nan=False
    )
    assert json.loads(text)[0]["advantages"] == [None, None]


@pytest.mark.slow
def test_full_files_are_followed_and_the_oldest_removed(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_log, "FILE_MB", 0.02)
    monkeypatch.setattr(turn_log, "KEPT", 2)
    log = TurnLog(str(tmp_path))
    make_trainer(tmp_path / "run", 4, [log]).fit(make_agent(tiny_folder), make_data())
    names = sorted(path.name for path in tmp_path.glob("*.jsonl"))
    numbers = [int(name.split("-")[1].split(".")[0]) for name in names]
    assert len(names) == 3  # the one being written, and two full ones
    assert numbers == list(range(numbers[0], numbers[0] + 3))
    assert numbers[0] > 0
    longest = max(len(line) for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines())
    assert all(path.stat().st_size <= 0.02e6 + longest + 1 for path in tmp_path.glob("*.jsonl"))
    last = lines(tmp_path)[-1]
    assert last["iteration"] == 4
    before = len(lines(tmp_path))
    monkeypatch.undo()
    make_trainer(tmp_path / "run", 1, [TurnLog(str(tmp_path))]).fit(make_agent(tiny_folder), make_data())
    assert len(lines(tmp_path)) == before + 16  # a second run goes on after the first


@pytest.mark.slow
def test_iterations_between_are_left_out(tiny_folder: Path, tmp_path: Path) -> None:
    log = TurnLog(str(tmp_path), every=2)
    make_trainer(tmp_path / "run", 4, [log]).fit(make_agent(tiny_folder), make_data())
    assert {record["iteration"] for record in lines(tmp_path)} == {1, 3}


@pytest.mark.slow
def test_a_run_that_goes_on_logs_no_turn_twice(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those after the checkpoint are played again; a line that a kill left broken is not there any more."""
    monkeypatch.setattr(turn_log, "FILE_MB", 0.02)
    saved = str(tmp_path / "saved")

    def fit(epochs: int, ckpt_path: str | None = None) -> list[dict[str, Any]]:
        callbacks = [TurnLog(), RunCheckpoints(dirpath=saved, keep=9)]
        trainer = make_trainer(tmp_path, epochs, callbacks, enable_checkpointing=True)
        trainer.fit(make_agent(tiny_folder), make_data(), ckpt_path=ckpt_path)
        return lines(tmp_path / "turns")

    def what_was_played(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in turn.items() if not key.endswith("_seconds")} for turn in log]

    whole = fit(3)
    with max((tmp_path / "turns").iterdir()).open("a") as log:
        log.write('{"iteration":3,"env":')
    assert what_was_played(fit(3, f"{saved}/iteration-00001.ckpt")) == what_was_played(whole)


def test_a_log_whose_folder_was_removed_goes_on(tmp_path: Path) -> None:
    """It held what is lost; the run is worth more."""
    log = TurnFiles(tmp_path / "turns", 0)
    log.write([{"iteration": 1}])
    shutil.rmtree(tmp_path / "turns")
    log.write([{"iteration": 2}])
    assert [path.read_text() for path in (tmp_path / "turns").iterdir()] == ['{"iteration":2}\n']


def test_a_run_cuts_off_its_own_turns_and_those_of_unknown_runs(tmp_path: Path) -> None:
    """Also where another run has logged behind them in the meantime."""
    texts = [
        f'{{"iteration":1,{run}"a":2}}\n{{"iteration":2,{run}"a":3}}\n' for run in ('"run_id":"ab",', '"run_id":"cd",')
    ]
    for number, text in enumerate(texts):
        (tmp_path / f"rank0-{number:06d}.jsonl").write_text(text)
    (tmp_path / "rank0-000002.jsonl").write_text('{"iteration":2,"a":3}\n')
    TurnFiles(tmp_path, 0).cut(2, 1, "ab")
    left = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert left == {"rank0-000000.jsonl": texts[0].splitlines(keepends=True)[0], "rank0-000001.jsonl": texts[1]}


def test_a_new_run_with_fewer_processes_drops_the_files_of_the_others(tiny_folder: Path, tmp_path: Path) -> None:
    """One that is continued keeps the turns before its checkpoint, whoever wrote them."""
    names = ("rank0-000000.jsonl", "rank1-000000.jsonl", "rank3-000000.jsonl", "rank3-000001.jsonl", "rankings.jsonl")

    def write_old() -> None:
        for name in names:
            (tmp_path / name).write_text('{"iteration":1,"a":2}\n')

    write_old()
    TurnFiles(tmp_path, 1).drop_gone(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names[:2], names[4]]
    write_old()
    TurnFiles(tmp_path, 1).cut(2, 2, "ab12")
    TurnFiles(tmp_path, 3).drop_gone(4)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    make_trainer(tmp_path / "run", 1, [TurnLog(str(tmp_path))]).fit(make_agent(tiny_folder), make_data())
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == [names[0], "rank0-000001.jsonl", names[4]]


@pytest.mark.slow
def test_all_processes_write_the_id_of_one_run_also_when_it_goes_on(exact_folder: Path, tmp_path: Path) -> None:
    for start in (None, tmp_path / "iteration-00003.ckpt"):
        assert in_processes(tmp_path, exact_folder, "windowed", start=start, devices=2) == [0, 0]
    logs = sorted((tmp_path / "turns").rglob("rank*.jsonl"))
    assert {path.name[:5] for path in logs} == {"rank0", "rank1"}
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["run_id"]
    assert {json.loads(line)["run_id"] for log in logs for line in log.read_text().splitlines()} == {saved}


@pytest.mark.slow
def test_held_out_episodes_are_logged_apart(tiny_folder: Path, tmp_path: Path) -> None:
    """Before training, after it and at each validation between, each with the iterations that came before it."""
    log = TurnLog(held_out=3)
    trainer = make_trainer(tmp_path, 3, [log, RunSummary()], limit_val_batches=1)
    validation = ValidationConfig(episodes=8, num_envs=4, every=2)
    trainer.fit(make_agent(tiny_folder), make_data(validation=validation))
    logged = lines(tmp_path / "turns" / "held_out")
    assert {record["phase"] for record in logged} == {"held_out"}
    played: dict[tuple[int, int], list[int]] = {}
    for record in logged:
        played.setdefault((record["iteration"], record["env"]), []).append(record["turn"])
        assert record["prompt_ids"]
        assert len(record["rollout_logps"]) == len(record["tokens"])
        assert record["advantages"] is None
    assert set(played) == {(iteration, place) for iteration in (0, 2, 3) for place in range(3)}
    assert all(turns == list(range(len(turns))) for turns in played.values())
    assert len(lines(tmp_path / "turns")) == 3 * 16
    trainer.validate(make_agent(tiny_folder), make_data(), verbose=False)
    assert lines(tmp_path / "turns" / "held_out") == logged  # no part of the run


def held_out_after(
    epochs: int, folder: Path, path: Path, callbacks: list[Callback], begun_by: str | None = None, **settings: Any
) -> list[tuple[Any, ...]]:
    """Train, or go on from a checkpoint in the same folder, and return the held-out turns of the log."""
    saver = RunCheckpoints(dirpath=str(path / "saved"), keep=9)
    trainer = make_trainer(path, epochs, [*callbacks, saver], enable_checkpointing=True, **settings)
    ckpt_path = None if begun_by is None else str(path / "saved" / begun_by)
    validation = ValidationConfig(episodes=8, num_envs=4, every=1)
    trainer.fit(make_agent(folder), make_data(validation=validation), ckpt_path=ckpt_path)
    return [(r["iteration"], r["env"], r["turn"], r["reply"]) for r in lines(path / "turns" / "held_out")]


@pytest.mark.slow
def test_a_resumed_run_has_each_validation_once(tiny_folder: Path, tmp_path: Path) -> None:
    def go_on(begun_by: str | None = None) -> list[tuple[Any, ...]]:
        return held_out_after(3, tiny_folder, tmp_path, [TurnLog(held_out=2)], begun_by, limit_val_batches=1)

    whole = go_on()
    assert {turn[0] for turn in whole} == {1, 2, 3}
    assert go_on("iteration-00001.ckpt") == whole


@pytest.mark.slow
def test_a_resumed_run_cuts_what_a_summary_has_played_at_the_end(tiny_folder: Path, tmp_path: Path) -> None:
    """Also where nothing was played before its own end; what was played before training stays."""

    def go_on(epochs: int, begun_by: str | None = None) -> set[int]:
        callbacks = [RunSummary(), TurnLog(held_out=2)]
        return {turn[0] for turn in held_out_after(epochs, tiny_folder, tmp_path, callbacks, begun_by)}

    assert go_on(2) == {0, 2}
    assert go_on(3, "iteration-00001.ckpt") == {0, 3}
