"""The comparison of two commits: what it takes for equal, and how names that have changed are followed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.same_as import Difference, Notes, compare, digest, flat, named, record
from benchmarks.same_as_cases import Config, one_list_of_sources, translated

ROW = {"step": 3.0, "loss": 0.5, "kl": math.nan, "reply_ids[0]": 7}


def test_equal_records_are_equal_to_the_last_value() -> None:
    assert compare([ROW, ROW], [dict(ROW), dict(ROW)]) == 8


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", math.nextafter(0.5, 1)),
        ("loss", -0.5),
        ("loss", math.nan),
        ("kl", 0.0),
        ("reply_ids[0]", 7.0),
        ("new", None),
    ],
)
def test_any_other_value_is_a_difference(name: str, value: Any) -> None:
    found = compare([ROW, ROW], [ROW, ROW | {name: value}])
    assert isinstance(found, Difference)
    assert (found.place, found.name, found.unequal) == ("row 1, step 3.0", name, 1)
    assert (found.old, found.new) == (repr(ROW[name]) if name in ROW else "nothing", repr(value))


def test_zeros_of_both_signs_differ() -> None:
    assert isinstance(compare([{"x": 0.0}], [{"x": -0.0}]), Difference)


@pytest.mark.parametrize(("old", "new"), [([ROW], [ROW, ROW]), ([ROW, ROW], [ROW])])
def test_a_missing_row_is_a_difference(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> None:
    found = compare(old, new)
    assert isinstance(found, Difference)
    assert found.unequal == len(ROW)


def test_tensors_are_equal_to_the_bit() -> None:
    x = torch.tensor([1.0, 0.0])
    changes = [x.clone(), x.bfloat16(), x[None], torch.tensor([1.0, -0.0]), torch.nextafter(x, 2 * x + 1)]
    assert [digest(x) == digest(y) for y in changes] == [True, False, False, False, False]
    assert digest(x.bfloat16()) == digest(x.bfloat16())
    assert digest(torch.tensor(3.0)) != digest(torch.tensor(3))


def test_record_reads_held_out_turns_and_cloned_models(tmp_path: Path) -> None:
    (tmp_path / "turns" / "held_out").mkdir(parents=True)
    (tmp_path / "turns" / "held_out" / "rank0-000000.jsonl").write_text('{"reward": 1.0}\n')
    # Versions number parameters differently; what counts is their place in the optimizer.
    state = {"state": {7: {"step": 3}}, "param_groups": [{"lr": 0.1, "params": [4]}, {"lr": 0.2, "params": [7]}]}
    torch.save({"state_dict": {"w": torch.ones(2)}, "optimizer_states": [state]}, tmp_path / "last.ckpt")
    (tmp_path / "cloned").mkdir()
    save_file({"w": torch.zeros(2)}, tmp_path / "cloned" / "model.safetensors")
    found = record(tmp_path, Notes())
    assert found["turns"] == [{"reward": 1.0}]
    assert found["weights"] == [{"w": digest(torch.ones(2))}, {"cloned/w": digest(torch.zeros(2))}]
    groups = {
        f"[0].param_groups[{n}].{name}": x
        for n, lr in enumerate((0.1, 0.2))
        for name, x in (("lr", lr), ("params[0]", n))
    }
    assert found["optimizer"] == [{"[0].state.1.step": 3, **groups}]


def test_new_names_take_the_values_of_old_ones_and_times_none() -> None:
    notes = Notes()
    turn = {"trajectory": {"kind": "a", "env_seconds": 0.1}, "reply_ids": [4, 5], "trajectory_end": True, "empty": []}
    rules = [(r"trajectory", "episode"), (r"(reply|prompt)_ids", r"\1_tokens"), ("episode", "whole_episode")]
    assert named(flat(turn), rules, notes) == {
        "whole_episode.kind": "a",
        "reply_tokens[0]": 4,
        "reply_tokens[1]": 5,
        "trajectory_end": True,
        "empty": [],
    }
    assert notes.left_out == {"trajectory.env_seconds"}
    assert "trajectory.kind -> whole_episode.kind" in notes.renamed
    assert len(notes.renamed) == 3


def test_a_rename_hides_no_value() -> None:
    with pytest.raises(ValueError, match="two values are called new"):
        named([("old", 1), ("new", 1)], [("old", "new")], Notes())


@pytest.mark.parametrize(
    ("name", "is_time"),
    [
        ("time/update_seconds", True),
        ("time/score_tokens_per_second", True),
        ("metrics.env_seconds", True),
        ("time/collect_to_update", True),
        ("time/update_shared", False),
        ("rollout/time_limits", False),
        ("turn", False),
    ],
)
def test_times_are_left_out_and_nothing_else(name: str, is_time: bool) -> None:
    notes = Notes()
    assert bool(named([(name, 1.0)], [], notes)) is not is_time
    assert notes.left_out == ({name} if is_time else set())


OLD: Config = {
    "model": {"init_args": {"lr_actor": 0.1, "kl_loss": 0.0, "policy_loss": {"init_args": {"clip": 0.2}}}},
    "data": {"init_args": {"env": {"id": "a"}, "other_envs": [{"id": "b"}], "tasks": {"path": "c"}}},
}
KEYS = [
    ("model.init_args.lr_actor", "model.init_args.optim.lr_actor"),
    ("model.init_args.lr_critic", "model.init_args.optim.lr_critic"),  # not set
    ("model.init_args.kl_loss", "model.init_args.kl.loss"),
]
SOURCES = [("data.init_args.other_envs", one_list_of_sources)]


def test_a_commit_that_has_the_old_keys_gets_them() -> None:
    printed = {"model": {"init_args": {"lr_actor": 1e-6, "kl_loss": 0.0}}, "data": {"init_args": {"other_envs": None}}}
    assert translated(OLD, printed, KEYS, SOURCES) == (OLD, [])


def test_a_commit_without_the_old_keys_gets_the_new_ones() -> None:
    printed = {"model": {"init_args": {"optim": None, "kl_loss": 0.0}}, "data": {"init_args": {"envs": None}}}
    new, applied = translated(OLD, printed, KEYS, SOURCES)
    assert new["model"]["init_args"] == {
        "optim": {"lr_actor": 0.1},
        "kl_loss": 0.0,
        "policy_loss": {"init_args": {"clip": 0.2}},
    }
    assert new["data"]["init_args"] == {"envs": [{"id": "a"}, {"id": "b"}, {"path": "c"}]}
    assert applied == [
        "model.init_args.lr_actor -> model.init_args.optim.lr_actor",
        "data.init_args.other_envs: one_list_of_sources",
    ]
    assert OLD["model"]["init_args"]["lr_actor"] == 0.1
