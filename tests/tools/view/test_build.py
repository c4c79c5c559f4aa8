from __future__ import annotations

import base64
import gzip
import json
import os
import re
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from lightning_agentrl.tools.view import build_page
from tests.disks import mounted
from tests.tools.view.logs import make_turn, random_turns, write_log, write_run

XSS = '</script><script>alert(1)</script><img src="http://example.org/x.png" onerror="alert(2)"><!--'


def index_of(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="index">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def chunks_of(page: Path, kind: str) -> list[list[dict[str, Any]]]:
    """Turns of every episode, in the order of the index."""
    tags = re.findall(rf'<script type="application/octet-stream" id="{kind}-\d+">([^<]*)</script>', page.read_text())
    return [turns for tag in tags for turns in json.loads(gzip.decompress(base64.b64decode(tag)))]


def test_the_page_lies_in_the_run_or_where_it_is_asked_for(tmp_path):
    write_log(tmp_path, [make_turn()])
    assert build_page(tmp_path) == tmp_path / "view.html"
    elsewhere = tmp_path / "pages" / "one.html"
    assert build_page(tmp_path, elsewhere) == elsewhere
    assert elsewhere.read_bytes() == (tmp_path / "view.html").read_bytes()
    with pytest.raises(ValueError, match=r"--out"):
        build_page(tmp_path, tmp_path)


def test_a_run_whose_name_is_no_utf8_has_a_page(tmp_path: Path) -> None:
    run = tmp_path / os.fsdecode(b"m\xfcller")
    write_log(run, [make_turn()])
    assert "<title>m\\udcfcller" in build_page(run).read_text(encoding="utf-8")


def test_a_page_that_finds_no_room_leaves_that_which_is_there(tmp_path: Path) -> None:
    write_log(tmp_path / "run", [make_turn()])
    with mounted(tmp_path / "disk", "1m") as disk:
        page = build_page(tmp_path / "run", disk / "page.html")
        before = page.read_bytes()
        (disk / "filler").write_bytes(bytes(1_000_000 - len(before)))
        write_log(tmp_path / "run", random_turns(200))
        with pytest.raises(OSError, match=r"No space left.*page\.html"):
            build_page(tmp_path / "run", page)
        assert page.read_bytes() == before
        assert {path.name for path in disk.iterdir()} == {"page.html", "filler"}


def test_a_page_goes_into_a_pipe_and_where_a_link_leads(tmp_path: Path) -> None:
    write_log(tmp_path, [make_turn()])
    page = build_page(tmp_path).read_bytes()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE)
    build_page(tmp_path, pipe)
    assert reader.communicate(timeout=60)[0] == page
    (tmp_path / "link.html").symlink_to("page.html")
    build_page(tmp_path, tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "page.html").read_bytes() == page


def test_a_log_without_turns(tmp_path):
    write_log(tmp_path, [])
    (tmp_path / "turns" / "rank0-000000.jsonl").touch()
    with pytest.raises(ValueError, match="has no turn yet; build the page after the first iteration"):
        build_page(tmp_path)


def test_turns_of_an_earlier_run_alone_are_told_as_such(tmp_path):
    """The run that was started last in the folder may have no turn log at all."""
    write_log(tmp_path, [make_turn()])
    (log,) = (tmp_path / "turns").glob("*.jsonl")
    began = datetime.now(UTC) + timedelta(minutes=1)
    (tmp_path / "run.json").write_text(json.dumps({"began": began.isoformat()}))
    with pytest.raises(ValueError, match=r"of an earlier run; .* add the callback TurnLog"):
        build_page(tmp_path)
    os.utime(log, (began.timestamp() + 1, began.timestamp() + 1))
    build_page(tmp_path)


def test_a_broken_summary_is_named(tmp_path):
    write_log(tmp_path, [make_turn()])
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(ValueError, match=r"summary\.json.*JSON"):
        build_page(tmp_path)


@pytest.mark.parametrize("text", ["a: [1", "a: &all [*all]", "", "a: 1\n"])
def test_a_broken_config_of_two_runs_is_named_and_an_empty_one_has_no_keys(tmp_path: Path, text: str) -> None:
    one, other = (write_run(tmp_path / name, random_turns(20)) for name in ("one", "other"))
    config = other / "lightning_logs" / "version_0" / "config.yaml"
    config.write_text(text)
    if "[" in text:
        with pytest.raises(ValueError, match=rf"'{config}' is {'nested too deeply' if '*' in text else 'not YAML'}"):
            build_page(one, other=other)
        return
    differences = index_of(build_page(one, other=other))["differences"]
    assert [key for key, *_ in differences] == [*(["a"] if text else []), "model.class_path", "seed_everything"]


def test_the_page_holds_every_turn_once(tmp_path):
    turns = random_turns(400)
    page = build_page(write_run(tmp_path, turns))
    index, texts, details = index_of(page), chunks_of(page, "text"), chunks_of(page, "detail")
    assert len(texts) == len(details) == len(index["episodes"]["env"])
    assert index["turns"] == len(turns) == sum(len(episode) for episode in details)
    assert len(set(index["episodes"]["chunk"])) > 2
    held = {
        (env, episode, d["turn"]): (t, d)
        for env, episode, ts, ds in zip(
            index["episodes"]["env"], index["episodes"]["episode"], texts, details, strict=True
        )
        for t, d in zip(ts, ds, strict=True)
    }
    for turn in turns:
        text, detail = held[turn["env"], turn["episode"], turn["turn"]]
        assert text["observation"] == turn["observation"]
        assert text["tokens"] == turn["tokens"]
        assert detail["prompt"] == turn["prompt"]
        assert detail["advantages"] == pytest.approx(turn["advantages"], rel=1e-4)
        assert detail["reply_ids"] == turn["reply_ids"]


def test_summary_facts_and_config_are_told(tmp_path):
    index = index_of(build_page(write_run(tmp_path, random_turns(20))))
    assert index["runs"][0]["summary"]["after"]["success"] == 0.9062
    assert index["runs"][0]["facts"]["versions"]["torch"] == "2.9.0"
    assert index["runs"][0]["config"].startswith("seed_everything: 0")
    assert index["curves"]["x"] == "iteration"


@pytest.mark.parametrize(
    ("envs", "message"),
    [(("Maze-v0 with {}", "Maze-v0 with {size: 9}"), True), (("a", "a"), False), (("a", ""), False)],
)
def test_runs_of_different_environments_are_told(tmp_path, envs, message):
    for name, env in zip(("one", "other"), envs, strict=True):
        write_log(tmp_path / name, [make_turn()])
        (tmp_path / name / "run.json").write_text(json.dumps({"rollout": {"env": env}} if env else {}))
    head = index_of(build_page(tmp_path / "one", other=tmp_path / "other"))
    assert ("different environments" in " ".join(head["notes"])) is message


def test_numbers_are_short_and_what_json_has_none_for_is_text(tmp_path):
    odd = [1 / 3, -1234567.0, float("nan"), float("inf"), -float("inf"), 0.0]
    write_log(tmp_path, [make_turn("a b c d e f", advantages=odd)])
    page = build_page(tmp_path)
    ((detail,),) = chunks_of(page, "detail")
    assert detail["advantages"] == [0.33333, -1234600, "NaN", "Infinity", "-Infinity", 0]


def test_optional_fields_may_be_missing_or_null(tmp_path):
    needed = ("iteration", "env", "episode", "turn", "reply_ids", "tokens", "reply", "observation")
    least = {key: value for key, value in make_turn().items() if key in needed}
    nulls = {key: value if key in needed else None for key, value in make_turn(turn=1).items()}
    write_log(tmp_path, [least, nulls])
    page = build_page(tmp_path)
    index = index_of(page)
    assert all("absent" in quantity for quantity in index["quantities"])
    assert index["episodes"]["outcome"] == ["running"]
    assert index["episodes"]["return"] == index["episodes"]["kl"] == [None]
    assert index["curves"]["series"] == {}
    ((first, second),) = chunks_of(page, "detail")
    assert set(first) == {"iteration", "turn", "reply_ids"}
    assert set(second) == set(first)


def test_growing_samples_keep_what_was_added(tmp_path):
    turns = [
        make_turn(turn=0, continues=False, prompt="all", prompt_ids=[1, 2, 3]),
        make_turn(turn=1, continues=True, prompt="more", prompt_ids=[4]),
    ]
    write_log(tmp_path, turns)
    ((first, second),) = chunks_of(build_page(tmp_path), "detail")
    assert (first["continues"], first["prompt"], first["prompt_tokens"]) == (False, "all", 3)
    assert (second["continues"], second["prompt"], second["prompt_tokens"]) == (True, "more", 1)


def test_a_reply_that_is_not_its_tokens_is_kept(tmp_path):
    write_log(tmp_path, [make_turn("go"), make_turn("é", turn=1, tokens=["�"])])
    ((same, other),) = chunks_of(build_page(tmp_path), "text")
    assert "reply" not in same
    assert other["reply"] == "é"


def test_texts_of_a_run_are_no_part_of_the_page(tmp_path):
    run = tmp_path / "<b>&run"
    write_log(run, [make_turn(XSS, observation=XSS, prompt=XSS, action=XSS, stop="<i>", terminated=True)])
    (run / "run.json").write_text(json.dumps({"model": XSS}))
    (run / "config.yaml").write_text(XSS)
    page = build_page(run)
    text = page.read_text()
    assert XSS not in text
    assert "alert(" not in text.replace(r"\u003cscript>alert(1)", "").replace('onerror=\\"alert(2)', "")
    assert text.count("<script") == text.count("</script>") == 4  # index, code and the two tags of one chunk
    assert "<title>&lt;b&gt;&amp;run</title>" in text
    (told,) = index_of(page)["runs"]
    assert told["facts"]["model"] == told["config"] == XSS


def test_the_page_refers_to_nothing_outside(tmp_path):
    text = build_page(write_run(tmp_path, random_turns(20))).read_text()
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?\s*(?:https?:)?//""", text)
    assert not re.findall(r"@import|url\(|\bfetch\(|XMLHttpRequest|WebSocket", text)
    assert "default-src 'none'" in text


def test_lone_surrogates_do_not_break_the_page(tmp_path):
    write_log(tmp_path, [make_turn("a", tokens=["\ud83d"], observation="\ud83d")])
    ((turn,),) = chunks_of(build_page(tmp_path), "text")
    assert turn["tokens"] == ["\ud83d"]
