"""Geometry: answers are read and scored, figures ask what they show, and data sets are read or refused."""

from __future__ import annotations

import io
import json
import math
import sys
from base64 import b64encode
from pathlib import Path

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from agentrl_envs.geometry.dataset import GeometryTasks
from agentrl_envs.geometry.drawn import DrawnGeometry
from agentrl_envs.geometry.figures import KINDS
from agentrl_envs.geometry.scoring import is_right, number
from agentrl_envs.geometry.tasks import _lines, fit
from agentrl_envs.openenv.images import read_images

CHECK = '<tool_call>{{"name": "check", "arguments": {{"answer": {}}}}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12.5", 12.5), (" x = -3 ", -3), ("1,200", 1200), ("3/4", 0.75), (r"\frac { 25 } { 4 }", 6.25),
        (r"2 \sqrt { 221 }", 2 * math.sqrt(221)), (r"27 ^ { \circ }", 27), ("27°", 27), ("9π", 9 * math.pi),
        (r"\frac{1}{2}\pi", math.pi / 2), ("5 cm", 5), ("90 degrees", 90), ("(1+2)*3-4", 5), (".5", 0.5), ("$7$", 7),
        (r"\frac{\sqrt{3}}{2}", math.sqrt(3) / 2), ("10-2-3", 5), ("8/2/2", 2),
        ("12 cm^2", 12), ("12 units^2", 12), (r"12\text{ cm}^2", 12), ("12 cm²", 12), ("12 ft", 12), ("5 meters", 5),
        ("2 inches", 2), ("5.", 5), ("5 cm.", 5), ("−5", -5), (r"\frac12", 0.5), (r"$\boxed{5}$.", 5),
        (r"9\pi cm^2", 9 * math.pi), ("12 square feet", 12), ("3 1/2", None), (r"3\frac{1}{2}", None),
        (r"3 \frac { 1 } { 2 }", None), (r"3\dfrac12", None), ("1.2.3", None),
        (r"3\frac{\sqrt{2}}{2}", 1.5 * math.sqrt(2)), (r"3*\frac{1}{2}", 1.5), ("5 min", None), ("m", None),
        ("", None), ("cat", None), ("1/0", None), ("--3", None), ("5}", None), ("2(3", None), ("9**9", None),
        (r"\sqrt{-1}", None), ("1 2", 12), ("(" * 90, None), ("9" * 101, None), ("nan", None), ("inf", None),
        ("12°30\u2032", 12.5), ("12° 30' ", 12.5), ("12 degrees 30\u2019", 12.5), (r"12^\circ 30'", 12.5),
        (r"27 ^ { \circ } 15 ^ { \prime }", 27.25), (r"$12^{\circ}30^\prime$", 12.5), ("-1°30'", -1.5),
        ("90°-12°30'", 77.5), ("45°.", 45),
        ("10°20\u203230\u2033", 10 + 20 / 60 + 30 / 3600), ("10°20'30\"", 10 + 20 / 60 + 30 / 3600),
        ("x = 0°1.5'", 0.025),
        (r"10^\circ 20' 30''", 10 + 20 / 60 + 30 / 3600), ("12°60'", None), ("12°30", None), ("12 degrees 30", None),
        (r"12^\circ30", None), ("30'", None), ("12°30'5", None), ("12°30°", None),
        ("frac", None), ("__import__('os')", None),
    ],
)  # fmt: skip
def test_numbers_are_read_as_they_are_written(text, value) -> None:
    assert number(text) == (value if value is None else pytest.approx(value))


@given(st.text(r"0123456789\fracsqtpi{}()+-*/. =^°'x", max_size=60))
def test_any_text_is_a_number_or_none(text) -> None:
    value = number(text)
    assert value is None or math.isfinite(value)


def test_answers_are_scored() -> None:
    assert is_right("100.9", "100", 0.01)
    assert not is_right("101.1", "100", 0.01)
    assert is_right("0.009", "0", 0.01)
    assert not is_right("no idea", "100", 0.01)
    assert is_right("12.5", "12°30\u2032", 0.01)
    assert not is_right("12°30", "1230", 0.01)  # digits on both sides of a sign are not one number
    assert is_right("Iso sceles", "isosceles", 0.01)
    choices = ("30", "45", "60")
    for said in ("B", "b", "(B)", "B. 45", "b)", "45"):
        assert is_right(said, "B", 0.01, choices)
    for said in ("A", "45.1", "Because", "BC", "", "D"):
        assert not is_right(said, "B", 0.01, choices)
    assert is_right("$24$", "B", 0.01, ["12", "24"])
    assert is_right("24.0", "B", 0.01, ["12", "24"])
    assert not is_right("12.0", "B", 0.01, ["12", "24"])
    assert not is_right("24.0", "B", 0.01, ["24", "24.00"])  # both would be meant


@pytest.mark.parametrize("kind", KINDS)
def test_a_figure_asks_for_what_it_shows(kind) -> None:
    for seed in range(30):
        figure = KINDS[kind](np.random.default_rng(seed))
        given = [number(text.partition(":")[2] or text.partition("=")[2] or text) for text, _ in figure.labels]
        known = [value for value in given if value is not None]
        assert len(known) == {"circle_area": 1}.get(kind, 2)
        first, second = known[0], known[-1]
        expected = {
            "triangle_angle": 180 - first - second,
            "hypotenuse": math.hypot(first, second),
            "leg": math.sqrt(abs(second**2 - first**2)),
            "rectangle_area": first * second,
            "rectangle_perimeter": 2 * (first + second),
            "triangle_area": first * second / 2,
            "circle_area": math.pi * first**2,
        }[kind]
        assert figure.answer == pytest.approx(expected)
        assert not any(character.isdigit() for character in figure.question)
        if kind == "triangle_angle":  # drawn to scale
            a, b, c = figure.corners
            angle = math.acos(
                ((a[0] - c[0]) * (b[0] - c[0]) + (a[1] - c[1]) * (b[1] - c[1])) / math.dist(a, c) / math.dist(b, c)
            )
            assert math.degrees(angle) == pytest.approx(figure.answer)


def test_an_answer_ends_the_episode_and_checks_have_a_price() -> None:
    env = DrawnGeometry(checks=2, max_turns=4)
    seen, _ = env.reset(seed=0)
    right = env._task.answer
    assert len(seen["images"]) == 1
    assert env.observation_space.contains(seen)
    rewards = []
    for reply in (CHECK.format(-1), CHECK.format(f'"{right}"'), CHECK.format(3)):
        seen, reward, terminated, _, _ = env.step(reply)
        rewards.append((reward, terminated, seen["images"], "not right" in seen["text"], "right" in seen["text"]))
    assert rewards == [(-0.1, False, (), True, True), (-0.1, False, (), False, True), (0.0, False, (), False, False)]
    answer = env.step(f"<answer>{right}</answer>")
    assert answer[1:4] == (1.0, True, False)
    assert answer[4]["success"]
    assert answer[4]["metrics"] == {"checks": 2}
    env.reset(seed=0)
    assert env.step("<answer>-1</answer>")[1:4] == (0.0, True, False)


@pytest.mark.parametrize(
    "reply", ["", "7", CHECK.format("[1]"), CHECK.format("true"), '<tool_call>{"name": "x"}</tool_call>']
)
def test_a_reply_that_cannot_be_used_takes_a_turn(reply) -> None:
    env = DrawnGeometry(checks=1, max_turns=2)
    env.reset(seed=0)
    assert env.step(reply)[1:4] == (0.0, False, False)
    *answer, info = env.step(reply)
    assert answer[1:] == [0.0, False, True]
    assert info["invalid_action"]
    assert info["error"] in answer[0]["text"]


def test_without_checks_there_is_no_tool() -> None:
    env = DrawnGeometry()
    env.reset(seed=0)
    assert "check" not in env.system_prompt
    assert env.step(CHECK.format(1))[4]["invalid_action"]
    check_env(DrawnGeometry(), skip_render_check=True)


# ---- data sets


def folder(path: Path, rows: list, picture: Image.Image | None = None) -> Path:
    (picture or Image.new("RGB", (90, 60), "red")).save(path / "a.png")
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (path / "train.jsonl").write_text("\n".join(lines) + "\n")
    return path


ROW = {"question": "<image>Find x.", "answer": "2 \\sqrt{5}", "image": "a.png"}


def test_a_line_of_a_file_ends_where_json_lines_do(tmp_path) -> None:
    odd = "a\u2028b\u0085c"  # which end lines of text, and need no escape in JSON
    (tmp_path / "train.jsonl").write_text(json.dumps({**ROW, "problem": odd}, ensure_ascii=False) + "\n", "utf-8")
    assert [row["problem"] for row in _lines(tmp_path / "train.jsonl")] == [odd]


def test_rows_of_a_folder_are_played(tmp_path) -> None:
    rows = [ROW, {**ROW, "choices": ["1", "2", "3"], "answer": "2"}, {"problem": "p", "answer": 4, "images": ["a.png"]}]
    env = GeometryTasks(str(folder(tmp_path, rows)))
    asked = set()
    for seed in range(12):
        seen, info = env.reset(seed=seed)
        asked.add((info["question"], env._task.answer))
        assert [image.shape for image in seen["images"]] == [(60, 90, 3)]
        assert env.observation_space.contains(seen)
        assert env.step(env.solver()())[1] == 1.0
    assert asked == {("Find x.", "2 \\sqrt{5}"), ("Find x.", "B"), ("p", "4")}
    one = GeometryTasks(str(tmp_path / "train.jsonl"), first=1, count=1)
    one.reset(seed=0)
    assert one.system_prompt.endswith("Find x.\nA. 1\nB. 2\nC. 3")
    assert "<answer>a letter</answer>" in one.system_prompt


@pytest.mark.parametrize(
    ("rows", "kwargs", "sentence"),
    [
        ([{"question": "q", "answer": "1"}], {}, "Row 0 of .* has no image"),
        ([{"question": "q", "answer": "", "image": "a.png"}], {}, "has no answer"),
        ([{**ROW, "image": "b.png"}], {}, "image of Row 0 .* cannot be read"),
        ([{**ROW, "image": "train.jsonl"}], {}, "cannot be read"),
        ([{**ROW, "image": ["a.png", "a.png"]}], {}, "has 2 images"),
        ([{**ROW, "choices": ["1", "2"], "answer": "E"}], {}, "neither a choice nor the letter"),
        ([{**ROW, "image": "a\0.png"}], {}, "image of Row 0 .* cannot be read"),
        ([{**ROW, "choices": 5}], {}, "Row 0 of .* has the choices 5, which are not a list"),
        ([{**ROW, "choices": "1, 2"}], {}, "has the choices '1, 2', which are not a list"),
        (["{"], {}, "Line 1 of .* is not JSON"),
        (["[" * 100_000], {}, "Line 1 of .* is not JSON"),
        (["3"], {}, "Line 1 of .* is not a JSON object"),
        ([], {}, "has 0 rows"),
        ([ROW], {"first": 1}, "no 0 rows from row 1 on"),
        ([ROW], {"split": "test"}, "neither test.jsonl nor test.parquet"),
        ([ROW], {"checks": 3}, "0 to 2 checks, not 3"),
        ([ROW], {"tolerance": float("nan")}, "not nan"),
        ([ROW], {"most_px": 1}, "64 to 4096 pixels, not 1"),
    ],
)
def test_what_cannot_be_played_is_said(tmp_path, rows, kwargs, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        GeometryTasks(str(folder(tmp_path, rows)), **kwargs)


def test_a_file_in_another_encoding_is_named(tmp_path) -> None:
    (tmp_path / "train.jsonl").write_bytes('{"question": "é"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"train\.jsonl is not a text in UTF-8"):
        GeometryTasks(str(tmp_path))


def test_a_missing_package_or_file_is_said(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        GeometryTasks("somebody/geometry")
    with pytest.raises(ValueError, match="does not exist"):
        GeometryTasks("./nowhere")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "train.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match="pip install pyarrow"):
        GeometryTasks(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "shown"),
    [
        ((1, 1), (32, 32)),
        ((5000, 40), (1024, 32)),
        ((3000, 1500), (1024, 512)),
        ((90, 60), (90, 60)),
        ((4, 900), (32, 900)),
    ],
)
def test_pictures_are_made_fit_to_be_seen(size, shown) -> None:
    for mode in ("RGB", "RGBA", "L", "1", "P", "I;16", "CMYK"):
        picture = fit(Image.new(mode, size), 1024)
        assert (picture.mode, picture.size) == ("RGB", shown)


def test_shades_of_16_bits_are_kept() -> None:
    shades = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)
    file = io.BytesIO()
    Image.fromarray(shades).save(file, "PNG")
    with Image.open(file) as picture:
        shown = np.asarray(fit(picture, 1024))
    assert np.array_equal(shown[..., 0], shades >> 8)
    assert np.array_equal(read_images(b64encode(file.getvalue()).decode())[0], shown)


def test_what_is_see_through_is_white() -> None:
    assert np.asarray(fit(Image.new("RGBA", (40, 40), (0, 0, 0, 0)), 64)).min() == 255


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [({"kinds": ["cube"]}, "not \\['cube'\\]"), ({"kinds": []}, "not \\[\\]"), ({"side_px": 20}, "not 20")],
)
def test_wrong_arguments_of_drawn_geometry(kwargs, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        DrawnGeometry(**kwargs)
