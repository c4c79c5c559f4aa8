from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from lightning_agentrl.tools.view import events as event_files
from lightning_agentrl.tools.view.curves import Curves, curves_index, read_curves
from lightning_agentrl.tools.view.episodes import Episode, group
from lightning_agentrl.tools.view.events import read_events
from lightning_agentrl.tools.view.quantities import QUANTITIES
from tests.tools.view.logs import make_turn, write_events


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        ({"terminated": True, "success": True, "episode_return": -1.0}, "solved"),
        ({"terminated": True, "success": False, "episode_return": 1.0}, "failed"),
        ({"terminated": True, "success": None, "episode_return": 0.5}, "solved"),
        ({"truncated": True, "success": None, "episode_return": 0.0}, "failed"),
        ({"truncated": True, "success": None, "episode_return": None}, "failed"),
        ({"success": True, "episode_return": 1.0}, "running"),
    ],
)
def test_success_is_what_the_environment_says_else_a_positive_return(end, outcome):
    turns = (make_turn(turn=0, success=True), make_turn(turn=1, **end))
    assert Episode(turns).outcome == outcome


def test_an_episode_goes_on_over_iterations():
    turns = [make_turn(iteration=i, env=e, turn=i - 1) for i in (1, 2, 3) for e in (0, 1)]
    first, second = group(turns)
    assert [t["turn"] for t in first.turns] == [0, 1, 2]
    row = second.row()
    assert (row["env"], row["first"], row["last"], row["turns"]) == (1, 1, 3, 3)


def test_an_episode_whose_start_left_the_log_keeps_its_length():
    (episode,) = group([make_turn(turn=k, iteration=k) for k in (5, 4)])
    assert [t["turn"] for t in episode.turns] == [4, 5]
    assert episode.row()["turns"] == 6


def test_a_turn_that_was_logged_twice_counts_once():
    (episode,) = group([make_turn("old"), make_turn("new")])
    assert [t["reply"] for t in episode.turns] == ["new"]


def test_what_the_list_counts():
    turns = [
        make_turn("a b", turn=0, old_logps=[-1.0, -2.0], ref_logps=[-1.5, -2.5], valid=False),
        make_turn("a", turn=1, old_logps=[-1.0], ref_logps=[-3.0], hit_token_cap=True),
        make_turn("a", turn=2, ref_logps=None),
    ]
    row = Episode(tuple(turns)).row()
    assert row["kl"] == pytest.approx((0.5 + 0.5 + 2.0) / 3)
    assert (row["invalid"], row["capped"]) == (1, 1)
    assert Episode((make_turn(ref_logps=None),)).row()["kl"] is None


def test_numbers_that_were_not_finite_are_left_out_of_means_and_scales():
    turn = make_turn("a b c", old_logps=[-1.0, None, -1.0], ref_logps=[-2.0, -2.0, None], values=[None, 1.0, 3.0])
    assert Episode((turn,)).row()["kl"] == 1.0
    assert scale("KL to reference", [turn])["max"] == 1.0
    assert (scale("value", [turn])["min"], scale("value", [turn])["max"]) == (1.0, 3.0)


# Scales


def scale(name, turns):
    (quantity,) = (q for q in QUANTITIES if q.name == name)
    return quantity.scale(turns)


def test_scales_of_signed_quantities_lie_around_zero():
    turns = [make_turn("a " * 50, advantages=[0.01 * k for k in range(-50, 50)][:51])]
    entry = scale("advantage", [make_turn("a" + " a" * 99, advantages=[0.01 * k for k in range(-99, 1)])])
    assert entry["low"] == -entry["high"]
    assert entry["high"] == pytest.approx(0.97, abs=0.02)
    assert (entry["min"], entry["max"]) == (-0.99, 0.0)
    assert turns


def test_one_outlier_does_not_set_the_scale():
    values = [k / 1000 for k in range(1000)] + [1e6]
    entry = scale("value", [make_turn("a" + " a" * 1000, values=values)])
    assert entry["high"] < 1.0
    assert entry["max"] == 1e6


def test_missing_quantities_say_why():
    turns = [make_turn(values=None, ref_logps=None, entropy=None), make_turn(values=None, ref_logps=None, entropy=None)]
    assert scale("value", turns)["absent"] == "no critic"
    assert scale("KL to reference", turns)["absent"] == "no reference model"
    assert scale("entropy", turns)["absent"] == "not scored"
    assert "absent" not in scale("log-prob gap", turns)
    assert "absent" not in scale("value", [*turns, make_turn()])  # one turn has it


def test_a_scale_of_nothing_but_zeros_or_nan():
    assert scale("advantage", [make_turn("a", advantages=[0.0])])["high"] == 1.0
    assert scale("advantage", [make_turn("a b", advantages=[float("nan"), 0.5])])["max"] == 0.5
    assert "absent" in scale("advantage", [make_turn("a", advantages=[float("nan")])])


# Curves


def of_one(curves: Curves) -> dict[str, Any]:
    return curves_index([curves])


def test_curves_run_over_iterations(tmp_path):
    write_events(tmp_path, 4, ["rollout/success", "kl/reference", "time/update_seconds", "rollout/entropy"])
    curves = of_one(read_curves([*tmp_path.iterdir()])[0])
    assert curves["x"] == "iteration"
    assert curves["main"] == ["rollout/success", "kl/reference", "rollout/entropy"]
    assert curves["series"]["time/update_seconds"][0][0] == [1, 2, 3, 4]
    assert "epoch" not in curves["series"]


def test_entropy_is_shown_once(tmp_path):
    write_events(tmp_path, 2, ["policy/entropy", "rollout/entropy"])
    curves = of_one(read_curves([*tmp_path.iterdir()])[0])
    assert curves["main"] == ["policy/entropy"]
    assert "rollout/entropy" in curves["series"]


def test_curves_without_epochs_run_over_steps(tmp_path):
    write_events(tmp_path, 0, [])
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("rollout/success", 0.5, 7)
        writer.add_scalar("rollout/success", float("nan"), 9)
    curves = of_one(read_curves([*tmp_path.iterdir()])[0])
    assert curves["x"] == "step"
    assert curves["series"]["rollout/success"][0][0] == [7, 9]


def test_a_damaged_event_file_is_named(tmp_path):
    write_events(tmp_path, 40, ["rollout/success"])
    (events,) = tmp_path.iterdir()
    whole = events.read_bytes()
    for kept in (len(whole), len(whole) - 3):  # the second as of a run that is writing
        events.write_bytes(whole[:kept])
        assert read_curves([*tmp_path.iterdir()])[1] == []
    middle = len(whole) // 4
    for width in (1, 40):
        turned = bytes(255 - byte for byte in whole[middle : middle + width])
        events.write_bytes(whole[:middle] + turned + whole[middle + width :])
        curves, (note,) = read_curves([*tmp_path.iterdir()])
        assert 0 < len(curves.points["rollout/success"]) < 40
        assert f"{events.name} is damaged" in note


def test_curves_are_those_that_tensorboard_reads(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    for number, begins in enumerate((None, 3)):  # the second one restarts, and the first goes on beyond it
        with SummaryWriter(str(tmp_path / "new"), purge_step=begins) as writer:
            for step in range(begins or 0, 6 - number):
                writer.add_scalar("rollout/success", step + 10 * number, step)
                writer.add_scalar(f"only/{number}", float("nan"), step)
                writer.add_histogram("rollout/replies", np.arange(9), step)
        (file,) = (tmp_path / "new").iterdir()
        file.rename(tmp_path / f"events.out.tfevents.{number}")  # its own name may sort before that of an earlier one
    read, damaged = read_events([path for path in tmp_path.iterdir() if path.is_file()])
    known = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    known.Reload()
    names = known.Tags()["scalars"]
    expected = {name: {float(e.step): e.value for e in known.Scalars(name)} for name in names}
    assert damaged == []
    assert str(read) == str({name: expected[name] for name in read})
    assert sorted(read) == sorted(names) == ["only/0", "only/1", "rollout/success"]
    assert read["rollout/success"] == {0: 0, 1: 1, 2: 2, 3: 13, 4: 14}


def test_of_events_only_what_was_added_is_checked(tmp_path, monkeypatch):
    from torch.utils.tensorboard import SummaryWriter

    checked = []

    def counted(data):
        checked.append(len(data))
        return masked_crc32c(data)

    def read():
        checked.clear()
        points, damaged = read_events([path for path in tmp_path.iterdir() if path.is_file()])
        assert damaged == []
        return sorted(points["a"]), sum(checked)

    monkeypatch.setattr(event_files, "masked_crc32c", counted)
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(200):
            writer.add_scalar("a", 0.5, step)
        writer.flush()
        steps, all_of_it = read()
        assert steps == list(range(200))
        (path,) = tmp_path.iterdir()
        assert all_of_it > 0.5 * path.stat().st_size
        assert read() == (steps, 0)
        writer.add_scalar("a", 0.5, 200)
        writer.flush()
        steps, added = read()
    assert steps == list(range(201))
    assert 0 < added < all_of_it / 50
    with SummaryWriter(str(tmp_path / "other")) as writer:  # another one takes the name of the file
        for step in range(7, 900):
            writer.add_scalar("a", 0.25, step)
    next((tmp_path / "other").iterdir()).replace(path)
    assert read()[0] == list(range(7, 900))


def test_a_run_without_events_has_no_curves():
    assert of_one(read_curves([])[0])["series"] == {}


LIGHTNING = """epoch,step,rollout/success,val/success,note
0,1,0.25,,first
0,1,,0.5,
1,3,0.75,,
"""
HISTORY = """_step,_timestamp,epoch,rollout/success,trainer/global_step,val/success
0,1.5,0,0.25,1,
1,2.5,0,NaN,1,0.5
2,3.5,1,0.75,3,
"""
CHART = """"Step","calm-sea-3 - rollout/success","calm-sea-3 - rollout/success__MIN","calm-sea-3 - rollout/success__MAX"
"1","0.25","0.25","0.25"
"3","0.75","0.75","0.75"
"""
BY_EPOCH = CHART.replace("Step", "epoch").replace('"1"', '"0"').replace('"3"', '"1"')


@pytest.mark.parametrize(
    ("text", "x", "success"),
    [
        (LIGHTNING, "iteration", {1: 0.25, 2: 0.75}),
        (HISTORY, "iteration", {1: 0.25, 2: 0.75}),
        ("\ufeff" + CHART, "step", {1: 0.25, 3: 0.75}),
        (BY_EPOCH, "iteration", {1: 0.25, 2: 0.75}),
    ],
    ids=["CSVLogger", "history of Weights & Biases", "chart of Weights & Biases", "chart over epochs"],
)
def test_curves_of_tables(tmp_path, text, x, success):
    table = tmp_path / "metrics.csv"
    table.write_text(text, encoding="utf-8")
    curves, notes = read_curves([], [table])
    assert (curves.x, notes) == (x, [])
    points = {step: y for step, y in curves.points["rollout/success"].items() if y == y}
    assert points == success
    assert curves.points.keys() <= {"rollout/success", "val/success"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("name,value\na,1\n", "no column step"),
        ("", "no column step"),
        ('"Step","a - x","a - x__MIN","b - x"\n"1","2","2","3"\n', "2 runs"),
    ],
)
def test_a_table_without_curves_of_one_run_is_told(tmp_path, text, why):
    (tmp_path / "table.csv").write_text(text)
    curves, notes = read_curves([], [tmp_path / "table.csv"])
    assert curves.points == {}
    assert "table.csv" in notes[0]
    assert why in notes[0]


def test_large_steps_are_told_as_they_are(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,a\n" + "".join(f"{123451 + k},{k}\n" for k in range(3)))
    curves, _ = read_curves([], [tmp_path / "metrics.csv"])
    (steps, _) = curves_index([curves])["series"]["a"][0]
    assert repr(steps) == "[123451, 123452, 123453]"  # the page rounds what is no whole number to five digits


def test_steps_and_epochs_that_are_no_numbers_are_left_out(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,epoch,a,b\n1,0,0.5,\nNaN,0,0.6,1\n3,inf,0.7,\n4,NaN,0.8,\n5,1,0.9,\n")
    curves, notes = read_curves([], [tmp_path / "metrics.csv"])
    assert curves == Curves("iteration", {"a": {1: 0.5, 2: 0.9}})
    assert notes == []


def test_a_row_that_is_cut_short_is_left_out(tmp_path):
    table = tmp_path / "metrics.csv"
    table.write_text("step,a,b\n1,0.25,\n2,0.53,1.5\n3,17")  # of 170, say
    assert read_curves([], [table]) == (Curves("step", {"a": {1: 0.25, 2: 0.53}, "b": {2: 1.5}}), [])
    table.write_text("step,a,b\n1,0.25,\n2,0.53,1.5")  # whole, by a program that ends no last line
    assert read_curves([], [table])[0].points == {"a": {1: 0.25, 2: 0.53}, "b": {2: 1.5}}


def test_curves_of_two_runs_share_their_names():
    one, other = Curves("iteration", {"rollout/success": {2: 0.5, 1: 0.25}}), Curves("iteration", {"b": {1: 1.0}})
    index = curves_index([one, other])
    assert index["series"] == {"b": [None, [[1], [1.0]]], "rollout/success": [[[1, 2], [0.25, 0.5]], None]}
    assert (index["x"], index["main"]) == ("iteration", ["rollout/success"])


# Held-out episodes


def test_each_validation_has_its_own_held_out_episodes():
    """Of an episode that was played twice after the same iteration, only the later one is there."""
    held = [make_turn(phase="held_out", iteration=k, turn=turn) for k in (0, 5) for turn in (0, 1)]
    again = make_turn(phase="held_out", iteration=5, turn=0, reply="again")
    episodes = group([*held, make_turn(iteration=5), again])
    assert [(e.row()["held"], e.row()["last"], len(e.turns)) for e in episodes] == [
        *((True, 0, 2), (False, 5, 1), (True, 5, 1)),
    ]
    assert episodes[-1].last["reply"] == "again"


def test_a_curve_at_steps_of_its_own_has_iterations_too(tmp_path):
    """A monitor of learning rates logs before the steps at whose end the epoch is noted."""
    log = tmp_path / "metrics.csv"
    log.write_text("epoch,step,rollout/success,lr\n,0,,0.1\n0,1,0.25,\n,2,,0.2\n1,3,0.5,\n,4,,0.3\n")
    curves, _ = read_curves([], [log])
    assert curves.x == "iteration"
    assert curves.points == {"rollout/success": {1: 0.25, 2: 0.5}, "lr": {1: 0.1, 2: 0.3}}
