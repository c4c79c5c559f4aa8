"""ZoomSearch: boxes, rewards, what images tell and what they do not, and replies of every kind."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from agentrl_envs import baselines
from agentrl_envs.tags import Answer, Call, CallError, last_tag, read_tag
from agentrl_envs.zoom_search.boxes import holds, overlap, sound_box, view
from agentrl_envs.zoom_search.env import ZoomSearch
from agentrl_envs.zoom_search.scene import COLOURS, NUMBERS, Level, draw_scene

SMALL = {"canvas_px": 512}


def zoom(*box: float | str, tag: str = "call") -> str:
    return f"<{tag}>{json.dumps({'name': 'zoom', 'arguments': {'box': list(box)}})}</{tag}>"


def begun(seed: int = 0, **kwargs) -> ZoomSearch:
    env = ZoomSearch(**SMALL | kwargs)
    env.reset(seed=seed)
    return env


# ---- boxes


@pytest.mark.parametrize(
    ("said", "box"),
    [
        ([100, 100, 300, 250], (100, 100, 300, 250)),
        ([-50, -1, 5000, 80.4], (0, 0, 1000, 80)),  # clamped
        ([500, 500, 501, 501], (485, 485, 517, 517)),  # one pixel: enlarged round its centre
        ([0, 0, 1, 1], (0, 0, 32, 32)),  # and moved back into the picture
        ([999.5, 999.5, 1000, 1000], (968, 968, 1000, 1000)),
        ([0, 400, 1000, 400.2], (0, 384, 1000, 416)),  # the ratio is that after enlarging
    ],
)
def test_boxes_are_made_sound(said, box) -> None:
    assert sound_box(said, 1.0, (1000, 1000), 32, 100) == box


@pytest.mark.parametrize(
    "said",
    [
        None, "1,2,3,4", [1, 2, 3], [1, 2, 3, 4, 5], [1, 2, "3", 4], [True, 0, 1, 1], {"x": 1}, [[1], 2, 3, 4],
        [float("nan"), 0, 10, 10], [0, 0, float("inf"), 10], [10**400, 0, 1, 1],
        [300, 0, 100, 10], [0, 300, 10, 100], [5, 5, 5, 9],  # reversed, empty
        [1000, 0, 1200, 10], [-20, 0, -10, 10],  # outside
    ],
)  # fmt: skip
def test_what_is_no_box_is_refused(said) -> None:
    with pytest.raises(CallError):
        sound_box(said, 1.0, (1000, 1000), 32, 100)


@pytest.mark.parametrize(
    ("ratio", "fine"), [(100, (True, True)), (101, (False, True)), (200, (False, True)), (201, (False, False))]
)
def test_the_ratio_of_a_box_is_limited(ratio, fine) -> None:
    for limit, is_fine in zip((100, 200), fine, strict=True):
        for said, size in (([0, 0, 5 * ratio, 5], (3000, 9)), ([0, 0, 5, 5 * ratio], (9, 3000))):
            if is_fine:
                assert sound_box(said, 1.0, size, 2, limit) == tuple(said)
            else:
                with pytest.raises(CallError, match=f"at most {limit} times"):
                    sound_box(said, 1.0, size, 2, limit)


@given(
    said=st.lists(st.floats(-2000, 2000) | st.integers(-2000, 2000), min_size=4, max_size=4),
    scale=st.floats(0.1, 10),
    size=st.tuples(st.integers(1, 900), st.integers(1, 900)),
)
def test_a_sound_box_lies_in_the_picture(said, scale, size) -> None:
    try:
        left, top, right, bottom = sound_box(said, scale, size, 32, 100)
    except CallError:
        return
    assert 0 <= left < right <= size[0]
    assert 0 <= top < bottom <= size[1]
    assert right - left >= min(32, size[0])
    assert bottom - top >= min(32, size[1])


def test_overlap_and_holding() -> None:
    assert overlap((0, 0, 10, 10), (0, 0, 10, 10)) == 1
    assert overlap((0, 0, 10, 10), (5, 0, 15, 10)) == pytest.approx(1 / 3)
    assert overlap((0, 0, 10, 10), (20, 20, 30, 30)) == 0
    assert holds((0, 0, 10, 10), (0, 2, 10, 9))
    assert not holds((0, 0, 10, 10), (0, 2, 11, 9))


def test_a_view_is_cut_from_the_original() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8)
    picture = Image.fromarray(pixels)
    assert (view(picture, (120, 40, 184, 104), 64, 64) == pixels[40:104, 120:184]).all()
    tall = view(picture, (10, 20, 42, 84), 64, 64)  # half as wide as high: grey on both sides
    assert (tall[:, 16:48] == pixels[20:84, 10:42]).all()
    assert (tall[:, :16] == 128).all()
    assert (tall[:, 48:] == 128).all()
    small = view(picture, (0, 0, 128, 128), 64, 64).astype(float)
    means = pixels[:128, :128].reshape(64, 2, 64, 2, 3).mean((1, 3))
    assert np.abs(small - means).max() <= 1
    assert view(picture, (0, 0, 128, 128), 64, 160).shape == (160, 160, 3)


@pytest.mark.parametrize(("coords", "unit"), [("norm1000", 1000 / 512), ("original_px", 1.0), ("shown_px", 96 / 512)])
def test_boxes_are_given_in_the_units_that_the_prompt_names(coords, unit) -> None:
    env = begun(coords=coords, view_px=96)
    seen, *_ = env.step(zoom(*(place * unit for place in (64, 128, 128, 192))))
    assert env._shown[-1] == (64, 128, 128, 192)
    assert (seen["images"][0] == view(env._scene.picture, (64, 128, 128, 192), 64, 96)).all()
    words = {"norm1000": "thousandths", "original_px": "512 pixels", "shown_px": "96 pixels"}
    assert words[coords] in env.system_prompt


# ---- replies


@pytest.mark.parametrize(
    ("reply", "meant"),
    [
        ("<answer>7</answer>", Answer("7")),
        ('I see <answer>1</answer>, no: <answer> "red" </answer>!', Answer("red")),
        (f"<answer>1</answer> {zoom(1, 2, 3, 4)}", Call("zoom", {"box": [1, 2, 3, 4]})),
        (f"{zoom(1, 2, 3, 4)}<answer>2</answer>", Answer("2")),
        (f"{zoom(4, 3, 2, 1)} or {zoom(1, 2, 3, 4, tag='tool_call')}", Call("zoom", {"box": [1, 2, 3, 4]})),
        (f"{zoom(4, 3, 2, 1, tag='tool_call')} or {zoom(1, 2, 3, 4)}", Call("zoom", {"box": [1, 2, 3, 4]})),
        (f"{zoom(1, 2, 3, 4)} <answer>2", Call("zoom", {"box": [1, 2, 3, 4]})),  # not closed
        ("<answer><answer>5</answer>", Answer("5")),
    ],
)
def test_the_last_whole_tag_counts(reply, meant) -> None:
    assert read_tag(last_tag(reply)) == meant


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "7",
        "<answer>",
        "</answer>",
        "</answer><answer>",
        "<answer></answer>",
        '<answer>""</answer>',
        "<tool_call></tool_call>",
        "<tool_call>zoom(1,2,3,4)</tool_call>",
        "<tool_call>[1]</tool_call>",
        "<tool_call>3</tool_call>",
        '<tool_call>{"name": "zoom"}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "zoom", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "run", "arguments": {}}</tool_call>',
        "<tool_call>__import__('os').abort()</tool_call>",
        "<tool_call>" + "[" * 900 + "</tool_call>",
        "<tool_call>" + "[" * 99_000 + "</tool_call>",
        "<answer>" + "x" * 5000 + "</answer>",
        zoom(1e400, 0, 1, 1),
        zoom("a", 0, 1, 1),
        zoom(600, 0, 100, 9),
        zoom(float("nan"), 0, 1, 1),
        "<tool_call>" + "9" * 990 + "</tool_call>",
        "\ud800<answer",
        "<answer>" * 20_000,
    ],
)
def test_a_reply_that_cannot_be_used_is_told_and_costs_little(reply) -> None:
    env = begun()
    seen, reward, terminated, truncated, info = env.step(reply)
    assert (reward, terminated, truncated, seen["images"]) == (-0.05, False, False, ())
    assert info["invalid_action"]
    assert info["error"] in seen["text"]
    assert info["error"]
    assert env.observation_space.contains(seen)


def test_invalid_turns_cost_four_times_and_an_episode_without_answer_once() -> None:
    env = begun(max_turns=7)
    turns = [env.step("hm") for _ in range(7)]
    assert [turn[1] for turn in turns] == pytest.approx([-0.05] * 4 + [0, 0, -0.2])
    assert turns[-1][2:4] == (False, True)
    env = begun(no_tag="end")
    assert env.step("hm")[1:4] == (-0.25, True, False)
    env = begun(no_tag="end")
    assert env.step("<tool_call></tool_call>")[1:4] == (-0.05, False, False)


# ---- rewards


@pytest.mark.parametrize("level", ["colour", "number", "two_steps"])
def test_a_right_answer_pays_more_once_the_target_was_seen_whole(level: Level) -> None:
    env = begun(level=level)
    left, top, right, bottom = (place * 1000 / 512 for place in env._scene.targets[0])
    answer = f"<answer>{env._scene.answers[0]}</answer>"
    assert env.step(answer)[1:3] == (1.0, True)
    assert env.success()
    env = begun(level=level)
    half = zoom(left, top, (left + right) / 2, bottom + 60)
    assert len(env.step(half)[0]["images"]) == 1
    assert env.step(answer)[1] == 1.0
    env = begun(level=level)
    env.step(zoom(left - 5, top - 5, right + 5, bottom + 5))
    *_, info = answered = env.step(answer)
    assert answered[1] == pytest.approx(1.2)
    assert info["metrics"] == {"zooms": 1, "invalid_calls": 0, "target_seen": 1}
    env = begun(level=level)
    env.step(zoom(left - 5, top - 5, right + 5, bottom + 5))
    wrong = next(name for name in (COLOURS if level == "colour" else NUMBERS) if name != env._scene.answers[0])
    *_, info = answered = env.step(f"<answer>{wrong}</answer>")
    assert answered[1:4] == (0.0, True, False)
    assert not info["success"]


def test_what_was_shown_is_not_shown_again() -> None:
    env = begun()
    for box, images in (((0, 0, 1000, 1000), 0), ((0, 0, 960, 960), 0), ((0, 0, 500, 500), 1), ((0, 0, 510, 490), 0)):
        seen, reward, *_ = env.step(zoom(*box))
        assert (len(seen["images"]), reward) == (images, 0.0)
    assert not env._found or holds((0, 0, 256, 256), env._scene.targets[0])


def test_images_of_an_episode_are_limited() -> None:
    env = begun(max_images=2, max_turns=20)
    counts = [len(env.step(zoom(100 * place, 0, 100 * place + 100, 100))[0]["images"]) for place in range(4)]
    assert counts == [1, 0, 0, 0]


@pytest.mark.parametrize("level", ["colour", "number", "two_steps"])
def test_the_scripted_player_gets_all(level) -> None:
    result = baselines.solver_agent("ZoomSearch-v0", range(6), level=level, **SMALL)
    assert (result.success, result.mean_return) == (1.0, pytest.approx(1.2))


@pytest.mark.parametrize(
    ("kwargs", "earned"), [({"min_side": 300}, 1.2), ({"min_side": 512}, 1.0), ({"max_images": 1}, 1.0)]
)
@pytest.mark.parametrize("level", ["number", "two_steps"])
def test_the_scripted_player_answers_also_where_zooms_are_limited(level, kwargs, earned) -> None:
    result = baselines.solver_agent("ZoomSearch-v0", range(6), level=level, **SMALL, **kwargs)
    assert (result.success, result.mean_return) == (1.0, pytest.approx(earned))


def test_twenty_turns_with_views_of_a_thousand_tokens() -> None:
    env = ZoomSearch(canvas_px=512, view_px=1024, max_turns=20)
    seen, _ = env.reset(seed=1)
    images = list(seen["images"])
    boxes = [
        (250 * x + shift, 250 * y, 250 * x + 250 + shift, 250 * y + 250)
        for shift in (0, -80)
        for y in range(4)
        for x in range(4)
    ]
    for turn in range(19):
        seen, _, terminated, truncated, _ = env.step(zoom(*boxes[turn]))
        images += seen["images"]
    seen, reward, terminated, truncated, _ = env.step(f"<answer>{env._scene.answers[0]}</answer>")
    assert (reward, terminated, truncated) == (1.2, True, False)
    assert {image.shape for image in images} == {(1024, 1024, 3)}
    assert sum((image.shape[0] // 32) * (image.shape[1] // 32) for image in images) == 1024 * len(images)


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**32), level=st.sampled_from(["colour", "number", "two_steps"]))
def test_every_target_lies_in_the_picture_and_looks_as_its_seed_says(seed, level) -> None:
    scene, again = (draw_scene(np.random.default_rng(seed), level, 512) for _ in range(2))
    assert holds((0, 0, 512, 512), scene.targets[0])
    assert scene.answers[0] in (COLOURS if level == "colour" else NUMBERS)
    assert scene.picture.tobytes() == again.picture.tobytes()
    assert (scene.targets, scene.answers, scene.mark) == (again.targets, again.answers, again.mark)


def test_prompts_hold_no_tag_that_is_a_token_of_a_model() -> None:
    env = begun()
    assert "tool_call" not in env.system_prompt + env.step("?")[0]["text"]


def test_the_gymnasium_checker_accepts() -> None:
    check_env(ZoomSearch(**SMALL), skip_render_check=True)
    env = begun(render_mode="rgb_array")
    assert env.render().shape == (256, 256, 3)


# ---- what can be told from the first image


def templates(level: Level, downscale: int, seeds: range) -> tuple[np.ndarray, list[str]]:
    """The targets as the first image shows them, and the answers."""
    patches, answers = [], []
    for seed in seeds:
        scene = draw_scene(np.random.default_rng(seed), level, 512)
        whole = view(scene.picture, (0, 0, 512, 512), 512 // downscale, 512 // downscale)
        left, top, right, bottom = scene.targets[0]
        high, wide = (-(-side // downscale) for side in (bottom - top, right - left))
        padded = np.pad(whole, ((0, 1), (0, 1), (0, 0)), mode="edge")
        patches.append(padded[top // downscale :, left // downscale :][:high, :wide].astype(float).ravel())
        answers.append(scene.answers[0])
    return np.array(patches), answers


def share_told(level: Level, downscale: int, known: int, asked: int) -> float:
    """Share of answers that the nearest mean template gives, at the right place of the first image."""
    patches, answers = templates(level, downscale, range(known))
    names = sorted(set(answers))
    means = np.array([patches[[answer == name for answer in answers]].mean(0) for name in names])
    patches, answers = templates(level, downscale, range(known, known + asked))
    nearest = ((patches[:, None] - means) ** 2).sum(-1).argmin(1)
    return float(np.mean([names[number] == answer for number, answer in zip(nearest, answers, strict=True)]))


def test_colours_can_be_told_without_a_zoom() -> None:
    assert share_told("colour", 8, 80, 40) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("level", ["number", pytest.param("two_steps", marks=pytest.mark.long)])
def test_numerals_cannot_be_told_without_a_zoom(level) -> None:
    assert share_told(level, 8, 300, 200) < 0.18


@pytest.mark.slow
def test_a_blind_guess_is_right_as_often_as_chance() -> None:
    for level, names in (("number", NUMBERS), ("two_steps", NUMBERS), ("colour", tuple(COLOURS))):
        env = ZoomSearch(level=level, **SMALL)
        right = []
        for seed in range(150):
            env.reset(seed=seed)
            right.append(env.step(f"<answer>{names[seed % len(names)]}</answer>")[1])
        assert np.mean(right) == pytest.approx(1 / len(names), abs=0.07)


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"level": "word"}, "'two_steps', not 'word'"),
        ({"coords": "px"}, "not 'px'"),
        ({"no_tag": "stop"}, "not 'stop'"),
        ({"render_mode": "human"}, "not 'human'"),
        ({"canvas_px": 511}, "512 to 1536 pixels, not 511"),
        ({"downscale": 7}, "and 7 does not"),
        ({"view_px": 100}, "at least canvas_px / downscale, 192"),
        ({"view_px": 5000}, "not 5000"),
        ({"min_side": 0}, "not 0"),
        ({"max_images": 0}, "not 0"),
    ],
)
def test_wrong_arguments(kwargs, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        ZoomSearch(**kwargs)


# ---- pictures of a user


PIXELS = np.random.default_rng(7).integers(0, 256, (600, 1400, 3), dtype=np.uint8)


def own_pictures(folder: Path, **changes: object) -> Path:
    """A folder with one wide picture, of which two parts have to be seen."""
    Image.fromarray(PIXELS).save(folder / "street.png")
    row = {"question": "Which shop is left of the bank?", "answer": ["Bakery", "the bakery"], "image": "street.png"}
    row |= {"boxes": [[100, 50, 180, 90], [1200, 500, 1300, 560]]} | changes
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def test_zooms_of_own_pictures_are_cut_from_the_original(tmp_path: Path) -> None:
    env = ZoomSearch(source=str(own_pictures(tmp_path)), view_px=112)
    seen, _ = env.reset(seed=0)
    picture = Image.fromarray(PIXELS)
    assert (seen["images"][0] == view(picture, (0, 0, 1400, 600), 112, 112)).all()
    assert "Which shop is left of the bank?" in env.system_prompt
    seen, reward, *_ = env.step(zoom(50, 50, 150, 200))  # thousandths of width and height
    box = (70, 30, 210, 120)
    assert env._shown[-1] == box
    assert (seen["images"][0] == view(picture, box, 112, 112)).all()
    assert reward == 0
    assert "[50, 50, 150, 200]" in seen["text"]
    _, reward, terminated, _, info = env.step("<answer>The Bakery.</answer>")
    assert (reward, terminated, info["success"]) == (1.0, True, True)  # the second part was not seen
    env.reset(seed=0)
    env.step(zoom(50, 50, 150, 200))
    env.step(zoom(840, 800, 950, 960))
    assert env.step("<answer>bakery</answer>")[1] == pytest.approx(1.2)
    env.reset(seed=0)
    assert env.step("<answer>bank</answer>")[1] == 0


@pytest.mark.parametrize("coords", ["norm1000", "original_px"])
def test_the_scripted_player_sees_all_parts_of_own_pictures(tmp_path: Path, coords: str) -> None:
    env = ZoomSearch(source=str(own_pictures(tmp_path)), view_px=112, coords=coords)
    env.reset(seed=1)
    player, rewards, over = env.solver(), [], False
    while not over:
        _, reward, terminated, truncated, _ = env.step(player())
        rewards.append(reward)
        over = terminated or truncated
    assert rewards == pytest.approx([0, 0, 1.2])
    if coords == "original_px":
        assert "1400 pixels wide and 600 high" in env.system_prompt


@pytest.mark.parametrize(
    ("row", "arguments", "message"),
    [
        ({"boxes": [[0, 0, 2000, 10]]}, {}, r"Row 0 .* box .* 1400 x 600"),
        ({"box": "left", "boxes": None}, {}, r"Row 0 .* box 'left'"),
        ({"answer": ""}, {}, "has no answer"),
        ({"image": "other.png"}, {}, "cannot be read"),
        ({}, {"coords": "shown_px"}, "norm1000"),
        ({}, {"level": "colour"}, "generated pictures"),
        ({}, {"split": "test"}, "test.jsonl"),
    ],
)
def test_rows_and_arguments_that_cannot_be_used_are_told(tmp_path: Path, row, arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        ZoomSearch(source=str(own_pictures(tmp_path, **row)), **arguments)
