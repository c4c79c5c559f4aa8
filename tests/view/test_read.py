from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lightning_agentrl.view.locate import find_run
from lightning_agentrl.view.read import read_turns
from tests.view.logs import Turn, make_turn, random_turns, write_log, write_run


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


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"values": [0.0]}, "'values' has 1 entries for 13 reply tokens"),
        ({"tokens": ["a"]}, "'tokens' has 1 entries for 13 reply tokens"),
        ({"turn": None}, "'turn' is missing or of another type"),
    ],
)
def test_a_turn_that_does_not_fit_is_named_also_in_the_last_line(tmp_path, change, why):
    write_log(tmp_path, [make_turn(), make_turn(**{"turn": 1, **change})])
    with pytest.raises(ValueError, match=f"2.*{why}"):
        read(tmp_path)


def test_a_line_that_is_no_object_is_named(tmp_path):
    (path,) = write_log(tmp_path, [make_turn()])
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match=r"1.*JSON"):
        read(tmp_path)


def test_a_resumed_run_tells_its_iterations_once(tmp_path):
    first = [make_turn(iteration=i, turn=i, reply=f"old {i}") for i in (1, 2, 3, 4)]
    again = [make_turn(iteration=i, turn=i, reply=f"new {i}") for i in (3, 4, 5)]
    write_log(tmp_path, first + again, per_file=5)
    turns, notes = read(tmp_path)
    assert [t["reply"] for t in turns] == ["old 1", "old 2", "new 3", "new 4", "new 5"]
    assert len(notes) == 1
    assert "went back from iteration 4 to 3" in notes[0]


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
    with pytest.raises(ValueError, match=r"is a file; give the folder of a run$"):
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


def test_of_several_runs_the_one_written_last(tmp_path):
    for name, number, seconds in (("a", 7, 100), ("b", 0, 300), ("b", 1, 200)):
        (path,) = write_log(tmp_path / name / f"version_{number}", [make_turn()])
        os.utime(path, (seconds, seconds))
    assert find_run(tmp_path).logs[0].is_relative_to(tmp_path / "b" / "version_1")


def test_what_is_told_about_a_run(tmp_path):
    run = write_run(tmp_path / "goto", random_turns(20))
    version = run / "lightning_logs" / "version_0"
    for given in (run, run / "lightning_logs", version):
        found = find_run(given)
        assert found.summary == run / "summary.json"
        assert found.events == found.config.parent == found.facts.parent == version
    write_log(run / "lightning_logs" / "version_1", [make_turn()])
    assert find_run(version).summary is None  # it was written again by version 1
    newest = find_run(run)
    assert newest.summary == run / "summary.json"
    assert newest.facts is newest.config is newest.events is None


def test_a_validation_afterwards_hides_nothing(tmp_path):
    run = write_run(tmp_path, random_turns(20))
    (run / "lightning_logs" / "version_1").mkdir()
    (run / "lightning_logs" / "version_1" / "config.yaml").touch()
    found = find_run(run)
    assert found.config == run / "lightning_logs" / "version_0" / "config.yaml"
    assert found.summary == run / "summary.json"
