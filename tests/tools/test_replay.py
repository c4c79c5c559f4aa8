"""Where two runs part: a replay is the same to the bit, and what was changed on purpose is found at its place."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import yaml
from torch.distributed.checkpoint.state_dict_saver import save as save_shares

from lightning_agentrl.agents.checkpoint import METADATA, OF_ZERO, write_manifest
from lightning_agentrl.callbacks import Chain
from lightning_agentrl.callbacks.chain import drop_links, link_path, read_link, read_links, write_link
from lightning_agentrl.engines import Reply, SamplingRequest, TransformersEngine
from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.rollout import TurnInteraction
from lightning_agentrl.tools.replay import _check_processes, bisect_runs, checkpoint_before
from lightning_agentrl.types import Turn
from tests.agents.harness import ByLength, make_agent, make_data, make_trainer
from tests.agents.processes import run_command
from tests.cli import Command, Config, changed, sentence
from tests.started import outcomes

ITERATIONS, ENVS, TURNS = 3, 4, 4


class Altered(TransformersEngine):
    """Changes one request or reply, that of a turn of an environment."""

    def __init__(self, what: str = "", env: int = 0, turn: int = 0) -> None:
        super().__init__(max_batch=1)
        self.what = what
        self.wanted = derive_seed(3, env, turn, 0)

    async def generate(self, request: SamplingRequest) -> Reply:
        if request.seed != self.wanted:
            return await super().generate(request)
        if self.what == "seed":
            return await super().generate(replace(request, seed=request.seed ^ 1))
        reply = await super().generate(request)
        if self.what == "token":
            return replace(reply, ids=(*reply.ids[:-1], (reply.ids[-1] + 1) % 200))
        return replace(reply, policy_version=99) if self.what == "version" else reply


class Generous(TurnInteraction):
    """Adds to the reward of one turn of an environment, of those that end no episode."""

    def __init__(self, env: int, turn: int) -> None:
        super().__init__(max_reply_tokens=4, parser=ByLength())
        self.env, self.turn = env, turn
        self.seen = 0

    async def _play(self, session: Any, *args: Any) -> Turn:
        turn = await super()._play(session, *args)
        if session.index != self.env or session.episode.turns_taken - 1 != self.turn:
            return turn
        return replace(turn, reward=turn.reward + 1e-3)


class BitFlip(L.Callback):
    """Flips the lowest bit of one number of a weight after the last step of an iteration."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.is_last_batch and trainer.current_epoch + 1 == self.iteration:
            _, weight = list(pl_module.named_parameters())[7]
            with torch.no_grad():
                weight.view(-1)[3:4].view(torch.int64).bitwise_xor_(1)


def fit(tiny_folder: Path, path: Path, what: str = "", env: int = 0, turn: int = 0) -> Path:
    """Train with one thing altered, and return the folder."""
    callbacks = [BitFlip(turn // TURNS + 1)] if what == "weight bit" else []
    plain = TurnInteraction(max_reply_tokens=4, parser=ByLength())
    data = make_data(
        num_envs=ENVS,
        turns_per_env=TURNS,
        engine=Altered(what, env, turn),
        interaction=Generous(env, turn) if what == "reward" else plain,
    )
    torch.manual_seed(0)
    make_trainer(path, ITERATIONS, [*callbacks, Chain()]).fit(make_agent(tiny_folder), data)
    return path


@pytest.fixture(scope="module")
def untouched(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(tiny_folder, tmp_path_factory.mktemp("chain") / "untouched")


@pytest.mark.slow
def test_equal_runs_are_equal_to_the_bit(untouched: Path, tiny_folder: Path, tmp_path: Path) -> None:
    compared, *said = bisect_runs(untouched, fit(tiny_folder, tmp_path / "again"), 1e-5)
    assert compared.startswith(f"compared iterations 1 to {ITERATIONS} of ")
    assert said == ["first difference: none, equal to the bit"]


@pytest.mark.parametrize(
    ("what", "env", "turn"),
    [
        pytest.param(what, env, turn, marks=pytest.mark.slow if first else pytest.mark.long)
        for what in ("token", "seed", "version", "reward", "weight bit")
        for first, (env, turn) in zip((True, False, False, False), [(2, 5), (0, 0), (3, 11), (1, 8)], strict=True)
    ],
)
def test_what_was_altered_is_found(
    what: str, env: int, turn: int, untouched: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    """Twenty alterations: of five kinds, in every iteration and environment."""
    other = fit(tiny_folder, tmp_path / "altered", what, env, turn)
    difference = bisect_runs(untouched, other, 1e-5)[1].removeprefix("first difference: ")
    iteration = turn // TURNS + 1
    if what == "weight bit":
        assert difference.startswith(f"iteration {iteration}, weights: checksum of ")
        return
    link = read_link(link_path(untouched / "chain", iteration, 0))
    mine = [i for i, e in enumerate(link["rollout/turn/env"]) if e == env]
    at = mine[turn % TURNS]
    place = f"environment {env}, episode {link['rollout/turn/episode'][at]}, turn {link['rollout/turn/index'][at]}"
    field = {"token": "ids", "seed": "ids", "version": "policy_version", "reward": "reward"}[what]
    assert difference.startswith(f"iteration {iteration}, rollout: {field} of {place}"), difference


@pytest.mark.slow
def test_a_small_gap_is_told_apart_from_a_large_one(untouched: Path, tmp_path: Path) -> None:
    (tmp_path / "chain").mkdir()
    for iteration in (1, 2, 3):
        link = read_link(link_path(untouched / "chain", iteration, 0))
        if iteration == 2:
            link["scores/token/old_logps"][5] *= 1 + 1e-6
        if iteration == 3:
            link["scores/token/advantages"][9] = np.nan
        np.savez(link_path(tmp_path / "chain", iteration, 0), **link)  # type: ignore[arg-type]
    _, at_all, beyond = bisect_runs(untouched, tmp_path, 1e-5)
    assert "iteration 2, scores: old_logps of environment" in at_all
    assert "iteration 3, scores: advantages of environment" in beyond
    assert beyond.endswith(" and nan")


Replay = Callable[[int], tuple[int, str]]


@pytest.fixture
def replay(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Replay:
    """Replay an iteration of the run in the folder ``run``; returns the exit code and what was said."""

    def said(iteration: int) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["agentrl", "replay", str(tmp_path / "run"), "--iteration", str(iteration)])
        capsys.readouterr()
        from lightning_agentrl.commands.main import main

        try:
            main()
        except SystemExit as stop:
            return int(stop.code or 0), capsys.readouterr().out
        return 0, capsys.readouterr().out

    return said


def fit_apart(config: Config, path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Train in a process like that of the replay, into the folder ``run``: in this one other tests have run.

    Validations are after every second iteration, checkpoints after each.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = changed(config, "seed_everything", 3)
    config = changed(config, "data.init_args.validation.every", 2)
    config = changed(
        config, "data.init_args.engine", {"class_path": "TransformersEngine", "init_args": {"max_batch": 1}}
    )
    saver = {"class_path": "ModelCheckpoint", "init_args": {"save_top_k": -1, "save_on_train_epoch_end": True}}
    config = changed(config, "trainer.callbacks", [saver, {"class_path": "Chain"}])
    config["trainer"] |= {"default_root_dir": str(path / "run"), **settings}
    (path / "given.yaml").write_text(yaml.safe_dump(config))
    command = ["fit", "--config", str(path / "given.yaml"), "--quiet"]
    ((code, said),) = outcomes(1, run_apart, path, command, folder=path, seconds=300)
    assert code == 0, said


def run_apart(rank: int, path: Path, command: Sequence[str]) -> None:
    run_command(path, command)


@pytest.mark.slow
def test_every_iteration_replays_to_the_bit(
    config: Config, tmp_path: Path, replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, from the nearest checkpoint or from the start; a changed weight is found."""
    fit_apart(config, tmp_path, monkeypatch, max_epochs=3)
    code, text = replay(3)
    assert code == 0, text
    assert "replayed iterations 3 to 3" in text
    path = link_path(tmp_path / "run" / "chain", 1, 0)
    link = read_link(path)
    name = next(name for name in link if name.startswith("weights/"))
    link[name][0] ^= 1
    np.savez(path, **link)  # type: ignore[arg-type]
    code, text = replay(1)
    assert code == 1
    assert "iteration 1, weights: checksum of" in text


@pytest.mark.long
def test_a_replay_keeps_rates_that_fall_until_the_end_of_the_run(
    config: Config, tmp_path: Path, replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a validation at the end of the replayed iteration, then with none."""
    rates = {"lr_actor": 1e-3, "lr_critic": 1e-2, "schedule": {"actor": {"shape": "cosine"}}}
    config = changed(config, "model.init_args.optim", rates)
    fit_apart(config, tmp_path, monkeypatch, max_epochs=4)
    for iteration in (2, 3):
        code, text = replay(iteration)
        assert code == 0, text
        assert f"replayed iterations {iteration} to {iteration}" in text
        assert text.rstrip().endswith(f"iteration {iteration} is the same to the bit")


def test_chains_without_a_common_iteration_are_told_with_theirs(agentrl: Command, tmp_path: Path) -> None:
    for name, iterations in (("one", (3, 4)), ("other", (1, 2))):
        (tmp_path / name / "chain").mkdir(parents=True)
        for iteration in iterations:
            link_path(tmp_path / name / "chain", iteration, 0).touch()
    message = sentence(agentrl(str(tmp_path / "one"), str(tmp_path / "other"), command="bisect"))
    assert re.search(r"one' \(3 to 4\) and '.*other' \(1 to 2\)", message)


def test_an_iteration_that_one_chain_lacks_is_not_said_to_be_compared(tmp_path: Path) -> None:
    for name, iterations in (("one", (1, 2, 4, 5)), ("other", (1, 3, 4))):
        (tmp_path / name / "chain").mkdir(parents=True)
        for iteration in iterations:
            write_link(link_path(tmp_path / name / "chain", iteration, 0), {"update/step/loss": np.zeros(1)})
    compared, left_out, said = bisect_runs(tmp_path / "one", tmp_path / "other", 1e-5)
    assert compared.startswith("compared iterations 1 to 4 of ")
    assert left_out == "not compared, since they are missing in one chain: 2, 3"
    assert said == "first difference: none, equal to the bit"


@pytest.mark.slow
def test_what_cannot_be_compared_is_told(agentrl: Command, tmp_path: Path, untouched: Path) -> None:
    def told(*arguments: str) -> str:
        return sentence(agentrl(*arguments[1:], command=arguments[0]))

    assert "no chain is in" in told("bisect", str(tmp_path), str(untouched))
    assert "no chain is in" in told("replay", str(tmp_path), "--iteration", "2")
    assert "iterations 1 to 3, not 9" in told("replay", str(untouched), "--iteration", "9")
    (tmp_path / "chain").mkdir()
    link_path(tmp_path / "chain", 1, 0).write_bytes(link_path(untouched / "chain", 1, 0).read_bytes()[:900])
    assert "is damaged" in told("bisect", str(tmp_path), str(untouched))


KINDS: dict[str, dict[str, Any]] = {
    "windowed": {"data.init_args.env": {"id": "agentrl_envs:GuessNumber-v0"}, "data.init_args.turns_per_env": 4},
    "full memory": {
        "data.init_args.env": {"id": "agentrl_envs:GuessNumber-v0"},
        "data.init_args.memory": {"class_path": "FullMemory"},
    },
    "groups": {
        "data.init_args.env": {"id": "agentrl_envs:GuessNumber-v0"},
        "data.init_args.groups": {"size": 2, "per_rollout": 4, "mini_batches": 2},
        "model.init_args.advantage": {"class_path": "GRPO"},
        "model.init_args.critic": None,
    },
    "ahead": {"data.init_args.max_staleness": 1},
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_random_iterations_replay_to_the_bit(config: Config, tmp_path: Path, kind: str) -> None:
    """Five of twelve, each in a process of its own; a checkpoint is kept of every third iteration."""
    saver = {"class_path": "RunCheckpoints", "init_args": {"every_n_epochs": 3, "keep": 9}}
    settings = KINDS[kind] | {"seed_everything": 3, "trainer.max_epochs": 12}
    settings["trainer.callbacks"] = [saver, {"class_path": "Chain"}]
    if kind == "groups":
        del config["data"]["init_args"]["turns_per_env"], config["data"]["init_args"]["mini_batch_turns"]
    for key, value in settings.items():
        config = changed(config, key, value)
    config["trainer"] |= {"default_root_dir": "run", "limit_val_batches": 0}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))

    def agentrl(*arguments: str) -> str:
        variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
        command = [sys.executable, "-m", "lightning_agentrl", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=variables, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
        return done.stdout

    agentrl("fit", "--config", "config.yaml")
    for iteration in random.Random(kind).sample(range(1, 13), 5):
        assert f"to {iteration}" in agentrl("replay", "run", "--iteration", str(iteration))


def saved(path: Path, iterations: int, run_id: str = "a") -> Path:
    """Write a checkpoint of a run with so many iterations behind it, and no more than that."""
    path.parent.mkdir(parents=True, exist_ok=True)
    loops = {"fit_loop": {"epoch_progress": {"current": {"ready": iterations, "completed": iterations}}}}
    torch.save({"loops": loops, "run_id": run_id, "global_step": iterations}, path)
    return path


def continued(run: Path, named: Path | str) -> Path:
    """Make a run that went on from a checkpoint."""
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"run_id": "a", "continues": str(named), "began": None}))
    return run


def test_a_damaged_checkpoint_hides_no_whole_one(tmp_path: Path) -> None:
    saved(tmp_path / "first.ckpt", 2)
    newest = saved(tmp_path / "second.ckpt", 4)
    (tmp_path / "third.ckpt").write_bytes(newest.read_bytes()[:-100])
    (tmp_path / "other.ckpt").write_bytes(random.Random(0).randbytes(3000))
    torch.save({"weights": 1}, tmp_path / "foreign.ckpt")
    with pytest.warns(UserWarning, match="is damaged or not a checkpoint") as caught:
        assert checkpoint_before(tmp_path, None) == (newest, 4)
    assert len(caught) == 3


def test_checkpoints_and_beginnings_of_runs_below_are_not_those_of_a_run(tmp_path: Path) -> None:
    """A run without a logger lies in the root, and those with one below it."""
    below = continued(tmp_path / "lightning_logs" / "version_0", "elsewhere.ckpt")
    saved(below / "checkpoints" / "last.ckpt", 4)
    assert checkpoint_before(tmp_path, None) == (None, 0)
    own = saved(tmp_path / "checkpoints" / "last.ckpt", 2)
    assert checkpoint_before(tmp_path, None) == checkpoint_before(tmp_path, 5) == (own, 2)
    assert checkpoint_before(tmp_path, 2) == (None, 0)  # it began anew
    assert checkpoint_before(below, None) == (below / "checkpoints" / "last.ckpt", 4)


def test_checkpoints_of_a_run_that_was_in_the_folder_before_are_not_those_of_a_new_one(tmp_path: Path) -> None:
    before, own = saved(tmp_path / "iteration-00005.ckpt", 5, "a"), saved(tmp_path / "iteration-00002.ckpt", 2, "b")
    facts = {"run_id": "b", "began": "2026-01-02T03:04:05+00:00", "continues": None}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    assert checkpoint_before(tmp_path, None) == (own, 2)
    facts = {"run_id": "a", "began": None, "continues": str(before)}  # as where the first one goes on after it
    (tmp_path / "run.json").write_text(json.dumps(facts))
    assert checkpoint_before(tmp_path, None) == (before, 5)


def test_checkpoints_of_sharded_runs_are_folders(tmp_path: Path) -> None:
    """As FSDP2 and DeepSpeed write them; one that cannot be read, or holds nothing that is known, is left out."""
    saved(tmp_path / "file.ckpt", 1)
    sharded, of_zero = tmp_path / "checkpoints" / "sharded.ckpt", tmp_path / "checkpoints" / "zero.ckpt"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save_shares({"state_dict": {"weight": torch.ones(3)}}, checkpoint_id=sharded)
    saved(sharded / METADATA, 2)
    write_manifest(sharded)
    saved(of_zero / OF_ZERO, 3)
    (of_zero / "latest").write_text("checkpoint")
    (tmp_path / "damaged.ckpt" / OF_ZERO).parent.mkdir(parents=True)
    (tmp_path / "damaged.ckpt" / OF_ZERO).write_bytes((of_zero / OF_ZERO).read_bytes()[:-100])
    (tmp_path / "empty.ckpt").mkdir()
    (tmp_path / "last.ckpt").symlink_to(of_zero)
    with pytest.warns(UserWarning, match=r"(damaged|empty)\.ckpt' is damaged or not a checkpoint") as caught:
        assert [checkpoint_before(tmp_path, i) for i in (None, 3, 2)] == [
            *((of_zero, 3), (sharded, 2), (tmp_path / "file.ckpt", 1)),
        ]
    left_out = [str(one.message).split("'")[1] for one in caught if "is ignored" in str(one.message)]
    assert sorted(left_out) == sorted([str(tmp_path / name) for name in ("damaged.ckpt", "empty.ckpt")] * 3)
    run = continued(tmp_path / "next", sharded)
    assert checkpoint_before(run, 3) == (sharded, 2)


def test_a_run_that_went_on_is_replayed_from_where_it_did(tmp_path: Path) -> None:
    before = saved(tmp_path / "before.ckpt", 2)
    run = continued(tmp_path / "run", before)
    assert checkpoint_before(run, 3) == (before, 2)
    own = saved(run / "own.ckpt", 4)
    assert checkpoint_before(run, 6) == (own, 4)
    before.unlink()
    with pytest.raises(ValueError, match=r"resumed from .*before\.ckpt'.*before iteration 3"):
        checkpoint_before(run, 3)


def test_a_run_that_went_on_in_its_folder_is_replayed_from_the_start_before_that(tmp_path: Path) -> None:
    run = continued(tmp_path / "run", tmp_path / "run" / "own.ckpt")
    saved(run / "own.ckpt", 2)
    assert checkpoint_before(run, 3) == (run / "own.ckpt", 2)
    assert checkpoint_before(run, 2) == (None, 0)


def test_a_run_is_replayed_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoint is named from the folder that it was started in; another run may lie in this one."""
    named = "runs/version_0/checkpoints/iteration-00002.ckpt"
    before = saved(tmp_path / "begun" / named, 2)
    run = continued(tmp_path / "begun" / "runs" / "version_1", named)
    saved(tmp_path / "elsewhere" / named, 2)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert checkpoint_before(run, 3) == (before, 2)
    monkeypatch.chdir(tmp_path / "begun" / "runs")
    assert checkpoint_before(Path("version_1"), 3) == (before, 2)


@pytest.mark.parametrize("named", ["/begun/runs/version_0/checkpoints/a.ckpt", "runs/version_0/checkpoints/a.ckpt"])
def test_a_run_that_was_moved_is_replayed_from_another_of_its_versions(tmp_path: Path, named: str) -> None:
    moved = tmp_path / "moved"
    run = continued(moved / "version_2", named)
    saved(moved / "version_1" / "checkpoints" / "a.ckpt", 2)
    before = saved(moved / "version_0" / "checkpoints" / "a.ckpt", 2)
    assert checkpoint_before(run, 3) == (before, 2)
    saved(before, 2, run_id="b")
    with pytest.raises(ValueError, match=r"was resumed from .*a\.ckpt', which is missing"):
        checkpoint_before(run, 3)  # it is of another run


def test_links_of_a_longer_run_in_the_same_folder_are_dropped(tmp_path: Path) -> None:
    """Those of other ranks are theirs to drop, and what has another name is not of a chain."""
    for name in ("000001-rank0.npz", "000002-rank0.npz", "000003-rank0.npz", "000003-rank1.npz", "notes-rank0.npz"):
        (tmp_path / name).touch()
    drop_links(tmp_path, 2, 0, 2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["000001-rank0.npz", "000002-rank0.npz", "000003-rank1.npz", "notes-rank0.npz"]


def test_links_of_more_processes_are_dropped_where_fewer_go_on(tmp_path: Path) -> None:
    """Those of the iterations before are left, and cannot be replayed by fewer."""
    for iteration, rank in product((1, 2, 3), (0, 1, 2)):
        link_path(tmp_path, iteration, rank).touch()
    drop_links(tmp_path, 2, 1, 2)
    drop_links(tmp_path, 2, 0, 2)
    assert read_links(tmp_path) == {
        1: {rank: link_path(tmp_path, 1, rank) for rank in (0, 1, 2)},
        2: {rank: link_path(tmp_path, 2, rank) for rank in (0, 1)},
    }
    with pytest.raises(ValueError, match="iteration 1 was run by 3 processes and replayed by 2"):
        _check_processes(1, read_links(tmp_path)[1], [0, 1])
