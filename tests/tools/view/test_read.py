from __future__ import annotations

import json
import os
import time
from datetime import datetime
from pathlib import Path

import pytest

from lightning_agentrl.run_files import find_run, read_turns, several
from lightning_agentrl.tools.view.listing import list_runs
from tests.tools.view.logs import Turn, make_turn, random_turns, write_log, write_run


def key(turn: Turn) -> tuple[int, int, int]:
    return turn["env"], turn["episode"], turn["turn"]


def read(run: Path) -> tuple[list[Turn], list[str]]:
    return read_turns(find_run(run).logs)


def test_rotated_files_of_several_ranks(tmp_path):
    played = random_turns(60, envs=4)
    for rank in (0, 1):
        write_log(tmp_path, [t for t in played if t["env"] % 2 == rank], per_file=7, rank=rank)
    (tmp_path / "turns" / "rank1-000000.jsonl").unlink()  # rotated away
    turns, notes = read(tmp_path)
    left = [t for t in played if t["env"] % 2 == 0] + [t for t in played if t["env"] % 2 == 1][7:]
    assert [key(t) for t in turns] == [key(t) for t in left]
    assert notes == []


def test_ten_files_are_read_in_the_order_of_their_numbers(tmp_path):
    (first,) = write_log(tmp_path, [make_turn(turn=0)])
    first.with_name("rank0-1000000.jsonl").write_text(json.dumps(make_turn(turn=2)))
    first.with_name("rank0-999999.jsonl").write_text(json.dumps(make_turn(turn=1)))
    assert [t["turn"] for t in read(tmp_path)[0]] == [0, 1, 2]


@pytest.mark.parametrize("last", [1, 2, 5, 40])
@pytest.mark.parametrize("cut", [b"", b'{"iteration": 9'])
def test_of_the_last_iterations_only_their_files_are_read(tmp_path, last, cut):
    turns = [make_turn(iteration=1 + k // 4, env=k % 4, turn=k // 4) for k in range(40)]
    for rank in (0, 1):
        paths = write_log(tmp_path, turns, per_file=7, rank=rank)
        paths[-1].write_bytes(paths[-1].read_bytes() + cut)
    (tmp_path / "turns" / "rank1-000006.jsonl").write_bytes(b"")  # just begun
    whole, _ = read(tmp_path)
    if last < 5:
        for rank in (0, 1):  # a file that is read would be refused
            first = tmp_path / "turns" / f"rank{rank}-000000.jsonl"
            first.write_text(first.read_text().replace('"reply_ids"', '"other"'))
    kept, _ = read_turns(find_run(tmp_path).logs, last)
    assert [key(t) for t in kept] == [key(t) for t in whole if t["iteration"] > 10 - last]


@pytest.mark.parametrize("rest", [b'{"iteration": 1, "prompt": "wh', b'{"prompt": "\xe2\x82', b"{\n\n"])
def test_a_cut_last_line_is_left_out_and_said(tmp_path, rest):
    (path,) = write_log(tmp_path, [make_turn(turn=0), make_turn(turn=1)])
    path.write_bytes(path.read_bytes() + rest)
    turns, notes = read(tmp_path)
    assert [t["turn"] for t in turns] == [0, 1]
    assert notes == ["The last line of rank0-000000.jsonl was cut short and is left out."]


def test_any_other_broken_line_is_named(tmp_path):
    (path,) = write_log(tmp_path, [make_turn(turn=k) for k in range(3)])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:40], lines[2], ""]))
    with pytest.raises(ValueError, match=r"2.*'.*rank0-000000\.jsonl'.*JSON"):
        read(tmp_path)


def test_a_resumed_run_tells_its_iterations_once(tmp_path):
    first = [make_turn(iteration=i, turn=i, reply=f"old {i}") for i in (1, 2, 3, 4)]
    again = [make_turn(iteration=i, turn=i, reply=f"new {i}") for i in (3, 4, 5)]
    write_log(tmp_path, first + again, per_file=5)
    turns, notes = read(tmp_path)
    assert [t["reply"] for t in turns] == ["old 1", "old 2", "new 3", "new 4", "new 5"]
    assert len(notes) == 1
    assert "went back from iteration 4 to 3" in notes[0]


def test_a_run_that_begins_anew_with_the_iteration_that_the_log_ends_with_is_not_mixed_with_it(tmp_path):
    def played(who: str, envs: int) -> list[Turn]:
        return [make_turn(env=env, turn=turn, reply=f"{who} {env} {turn}") for env in range(envs) for turn in (0, 1)]

    write_log(tmp_path, played("old", 3), per_file=4)  # the second file begins in the middle of the iteration
    turns, notes = read(tmp_path)
    assert [t["reply"] for t in turns] == [t["reply"] for t in played("old", 3)]
    assert notes == []
    (tmp_path / "turns" / "rank0-000002.jsonl").write_text("".join(json.dumps(t) + "\n" for t in played("new", 2)))
    turns, notes = read(tmp_path)
    assert [t["reply"] for t in turns] == [t["reply"] for t in played("new", 2)]
    assert len(notes) == 1
    assert "played iteration 1 twice" in notes[0]


def test_line_ends_inside_texts_end_no_line(tmp_path):
    (path,) = write_log(tmp_path, []) or [tmp_path / "turns" / "rank0-000000.jsonl"]
    path.write_text(json.dumps(make_turn(observation="a\u2028b\x85c"), ensure_ascii=False) + "\n", encoding="utf-8")
    assert read(tmp_path)[0][0]["observation"] == "a\u2028b\x85c"


def test_of_prompts_only_the_number_of_tokens_is_kept(tmp_path):
    write_log(tmp_path, [make_turn(prompt_ids=[5, 6, 7])])
    (turn,) = read(tmp_path)[0]
    assert turn["prompt_tokens"] == 3
    assert "prompt_ids" not in turn


# Which files


def test_no_folder_no_log():
    with pytest.raises(ValueError, match=r"'nowhere'"):
        find_run(Path("nowhere"))


def test_a_file_is_no_run(tmp_path):
    (path,) = write_log(tmp_path, [make_turn()])
    with pytest.raises(ValueError, match=r"is a file; name the folder of a run$"):
        find_run(path)


def test_no_turn_log(tmp_path):
    (tmp_path / "turns").mkdir()
    (tmp_path / "turns" / "notes.jsonl").touch()
    with pytest.raises(ValueError, match=r"'.*'.*TurnLog"):
        find_run(tmp_path)


def test_the_newest_version_is_shown_and_said(tmp_path):
    for number in (2, 10, 9):
        write_log(tmp_path / "lightning_logs" / f"version_{number}", [make_turn(turn=number)])
    found = find_run(tmp_path)
    assert [p.parent.parent.name for p in found.logs] == ["version_10"]
    assert found.name == f"{tmp_path.name} / version_10"
    assert "3 versions have turn logs; this is lightning_logs/version_10, the newest." in found.notes[0]
    assert "lightning_logs/version_2, lightning_logs/version_9" in found.notes[0]


def test_a_log_in_a_folder_of_another_name(tmp_path):
    (path,) = write_log(tmp_path, [make_turn()])
    path.parent.rename(tmp_path / "log")
    for given in (tmp_path, tmp_path / "log"):
        assert find_run(given).logs == (tmp_path / "log" / path.name,)


def test_an_argument_chooses_a_version(tmp_path):
    for number in (0, 1):
        write_log(tmp_path / f"version_{number}", [make_turn(turn=number)])
    found = find_run(tmp_path / "version_0")
    assert [p.parent.parent.name for p in found.logs] == ["version_0"]
    assert found.notes == ()


def test_of_several_runs_one_must_be_chosen(tmp_path):
    for name, number in (("a", 7), ("b", 0), ("b", 1)):
        write_log(tmp_path / name / f"version_{number}", [make_turn()])
    with pytest.raises(ValueError, match=r"several runs .*: a, b$"):
        find_run(tmp_path)
    assert several(tmp_path)
    assert not several(tmp_path / "b")
    assert find_run(tmp_path / "b").folder.name == "version_1"


def test_what_is_told_about_a_run_is_its_own(tmp_path):
    """The copy at the root is of the run that ended last, which need not be the one that is shown."""
    run = write_run(tmp_path / "goto", random_turns(20))
    version = run / "lightning_logs" / "version_0"
    for given in (run, run / "lightning_logs", version):
        found = find_run(given)
        (events,) = found.events
        assert events.parent == found.config.parent == found.facts.parent == found.summary.parent == version
    write_log(run / "lightning_logs" / "version_1", [make_turn()])  # begun anew, and failed
    assert find_run(version).summary == version / "summary.json"
    newest = find_run(run)
    assert newest.folder.name == "version_1"
    assert newest.summary is newest.facts is newest.config is None
    assert newest.events == ()


def test_a_start_without_a_turn_log_is_told(tmp_path):
    run = write_run(tmp_path, random_turns(20))
    failed = run / "lightning_logs" / "version_1"
    failed.mkdir()
    (failed / "run.json").write_text("{}")
    found = find_run(run)
    assert found.folder.name == "version_0"
    assert found.notes == ("Started later and without a turn log: lightning_logs/version_1.",)


def test_turns_in_a_folder_of_their_own_belong_to_the_only_run_beside_it(tmp_path):
    run = write_run(tmp_path, random_turns(20))
    version = run / "lightning_logs" / "version_0"
    (version / "turns").rename(run / "log")
    found = find_run(run)
    assert found.folder == run / "log"
    assert found.facts == version / "run.json"
    (run / "lightning_logs" / "version_1").mkdir()
    (run / "lightning_logs" / "version_1" / "run.json").write_text("{}")
    found = find_run(run)
    assert found.facts is found.summary is None
    assert "It is unknown" in found.notes[0]


def test_nothing_of_a_run_that_was_in_the_folder_before_is_shown(tmp_path):
    """Also where the new one has played no held-out episode and written no summary yet."""
    run = write_run(tmp_path / "run", random_turns(200)) / "lightning_logs" / "version_0"
    log = run / "turns" / "rank0-000000.jsonl"
    (run / "turns" / "held_out").mkdir()
    held_out = run / "turns" / "held_out" / "rank0-000000.jsonl"
    held_out.write_text(json.dumps(make_turn(phase="held_out", iteration=2)) + "\n")
    (run / "metrics.csv").write_text("step,a\n1,0.5\n")
    (events,) = run.glob("events*")
    old = (log, held_out, events, run / "metrics.csv", run / "summary.json")
    began = datetime.fromisoformat("2026-01-02T03:04:02+00:00").timestamp()  # by its run.json
    new = log.with_name("rank0-000001.jsonl")
    new.write_text(json.dumps(make_turn()) + "\n")
    assert find_run(run).logs == (log, new)  # a copy, say, whose files are all as new as that
    for path in old:
        os.utime(path, (began - 60, began - 60))
    found = find_run(run)
    assert (found.logs, found.held_out, found.events, found.tables, found.summary) == ((new,), (), (), (), None)
    assert all(path.name in found.notes[0] for path in old)
    assert "1 iteration, no summary" in list_runs(run)
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(facts | {"continues": "last.ckpt", "began": None}))
    found = find_run(run)
    assert found.logs == (log, new)
    assert found.notes == ()
    os.utime(new, (began + 1, began + 1))  # held-out episodes before training are played before run.json is written
    (run / "run.json").write_text(json.dumps(facts))
    assert find_run(run).logs == (new,)


# The runs to choose from


def test_a_run_whose_lines_are_very_long_has_iterations_too(tmp_path):
    write_log(tmp_path / "seen", [make_turn(iteration=k, image="A" * 3_000_000) for k in (1, 2)])
    write_log(tmp_path / "other", [make_turn()])
    assert "2 iterations, no summary: not ended, or without RunSummary" in list_runs(tmp_path)
    assert "1 iteration, " in list_runs(tmp_path)
    (tmp_path / "seen" / "summary.json").write_text('{"before": {}, "after": {}}')
    assert "2 iterations, no held-out episodes in its summary" in list_runs(tmp_path)
    (tmp_path / "seen" / "summary.json").write_text('{"before": 0.5, "after": [0.7]}')  # of another program
    assert "2 iterations, no held-out episodes in its summary" in list_runs(tmp_path)


def test_iterations_of_an_earlier_run_in_the_same_folder_do_not_count(tmp_path):
    for rank in (0, 1):
        write_log(tmp_path, [make_turn(iteration=k) for k in (*range(1, 13), 1, 2)], per_file=12, rank=rank)
    assert [t["iteration"] for t in read(tmp_path)[0]] == [1, 2] * 2
    assert "2 iterations" in list_runs(tmp_path)


@pytest.fixture
def far_east(monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_the_start_of_a_run_is_told_by_the_clock_of_the_machine(tmp_path, far_east):
    for name, started in (("one", "2026-05-06T20:08:09+00:00"), ("two", "yesterday"), ("three", "0001-01-01T00:00:00")):
        write_log(tmp_path / name, [make_turn()])
        (tmp_path / name / "run.json").write_text(json.dumps({"started": started}))
    told = {Path(line.split()[0]).name: line for line in list_runs(tmp_path).splitlines()[1:4]}
    assert "2026-05-07 05:08" in told["one"]
    assert "start unknown" in told["two"]
    assert "three" in told


def test_runs_are_listed_with_what_they_came_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "one", random_turns(40, envs=2))
    write_log(tmp_path / "two", [make_turn(iteration=k) for k in (1, 2, 3)])
    log = tmp_path / "two" / "turns" / "rank0-000000.jsonl"
    log.write_text(log.read_text() + '{"iteration":')
    (tmp_path / "two" / "run.json").write_text('{"started": "2026-05-06T07:08:09+00:00"}')
    _, newest, older, *_ = list_runs(tmp_path).splitlines()
    assert newest.split()[:3] == ["two", "2026-05-06", "07:08"]
    assert "3 iterations" in newest
    held_out = tmp_path / "two" / "turns" / "held_out"
    held_out.mkdir()
    (held_out / "rank0-000000.jsonl").write_text('{"iteration":4,"phase":"held_out"}\n')
    assert "4 iterations" in list_runs(tmp_path)
    assert older.split()[0] == "one/lightning_logs/version_0"
    assert "32.0% before, 90.6% after" in older
    (tmp_path / "one" / "lightning_logs" / "version_0" / "empty").mkdir()
    with pytest.raises(ValueError, match="no run"):
        list_runs(tmp_path / "one" / "lightning_logs" / "version_0" / "empty")
