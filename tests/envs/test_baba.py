"""The environment Baba Is AI: ids, levels, rewards, ends, what `info` says, the scripted player, random play."""

from __future__ import annotations

import pickle
import re
from collections import Counter
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import yaml

from agentrl_envs import ENV_IDS, baselines
from agentrl_envs.baba.env import BabaIsAIEnv
from agentrl_envs.baba.levels import LEVELS
from agentrl_envs.baba.solver import search
from agentrl_envs.baba.world import MOVES, World

DISTRACTIONS = ("", "-distr_obj", "-distr_rule", "-distr_obj_rule", "-distr_obj-irrelevant_rule")
ONE_ROOM = [f"{prefix}{suffix}" for prefix in ("goto_win", "make_win") for suffix in DISTRACTIONS]
TWO_ROOM = [
    f"two_room-{prefix}{suffix}"
    for prefix in ("goto_win", "break_stop-goto_win", "maybe_break_stop-goto_win", "make_win", "break_stop-make_win")
    for suffix in (*DISTRACTIONS, *(("-distr_win_rule",) if prefix in ("goto_win", "make_win") else ()))
]
SPECIAL = ["two_room-make_you", "two_room-make_you-make_win", "two_room-make_wall_win"]

LINE = "obj:baba {thing} . text:noun:baba text:is text:prop:you\ntext:noun:ball text:is text:prop:{word} . . ."
WIN = LINE.format(thing="obj:ball:red", word="win")
LOSE = LINE.format(thing="obj:ball:red", word="lose")
SENTENCE = "text:noun:baba text:is text:prop:you"
UNDONE = f". . .\n{SENTENCE}\n. obj:baba ."


def test_there_are_forty_levels_and_a_tiny_one_each_with_an_id():
    assert len(ONE_ROOM + TWO_ROOM + SPECIAL) == 40
    assert set(LEVELS) == {*ONE_ROOM, *TWO_ROOM, *SPECIAL, "you_win"}
    assert {env_id for env_id in ENV_IDS if env_id.startswith("BabaIsAI-")} == {
        "BabaIsAI-v0",
        *(f"BabaIsAI-{level}-v0" for level in LEVELS),
    }
    for level in LEVELS:
        own = gymnasium.make(f"agentrl_envs:BabaIsAI-{level}-v0").reset(seed=8)
        assert own == gymnasium.make("agentrl_envs:BabaIsAI-v0", level=level).reset(seed=8)


# ---- levels ------------------------------------------------------------------------------------------------------


def found(world: World) -> dict[str, list[tuple[int, int]]]:
    """Where each thing and each block lies, by its name in a map, objects without their colour."""
    places: dict[str, list[tuple[int, int]]] = {}
    for cell, stack in enumerate(world.cells):
        for element in stack:
            name = f"{element.name} block" if element.is_text else element.name
            places.setdefault(name, []).append(world.place(cell))
    return places


def within(cell: tuple[int, int], left: int, right: int, top: int, bottom: int) -> bool:
    return left <= cell[0] <= right and top <= cell[1] <= bottom


ASIDE = {(4, 6), (5, 6), (6, 6), (4, 1), (5, 1), (6, 1), (6, 2), (6, 3), (6, 4), (6, 5)}
ASIDE_RIGHT = {*((11, y) for y in range(2, 7)), (11, 7), (10, 7), (9, 7), (8, 7)}


def split(level: str) -> tuple[str, str]:
    suffix = max((one for one in (*DISTRACTIONS, "-distr_win_rule") if level.endswith(one)), key=len)
    return level.removesuffix(suffix), suffix


@pytest.mark.parametrize("level", [*ONE_ROOM, *TWO_ROOM])
def test_things_and_blocks_lie_where_the_level_says(level):
    prefix, suffix = split(level)
    two, broken = prefix.startswith("two_room"), "make_win" in prefix
    for seed in range(25):
        world = LEVELS[level](np.random.default_rng(seed))
        assert (world.width, len(world.cells)) == ((13, 13 * 9) if two else (8, 8 * 8))
        assert all(len(stack) <= 1 for stack in world.cells)
        places = found(world)
        rules = [str(rule) for rule in world.rules.told]
        base = (1, 7) if two else (1, 6)
        assert (places["baba block"], places["you block"]) == ([base], [(3, base[1])])
        objects = [name for name in ("ball", "key", "door") if name in places]
        blocks = [name for name in ("ball", "key", "door") if f"{name} block" in places]
        assert len(objects) == 1 + ("distr_obj" in suffix or "distr_win" in suffix)
        win = (9, 1) if two else (1, 1)
        assert (win[0] + 2, win[1]) in places["win block"]
        # Which noun is whose: the rule of winning names the target, if it is whole.
        wins = [rule.split()[0] for rule in rules if rule.endswith("win")]
        assert len(wins) == (not broken) + (suffix == "-distr_win_rule")
        if not broken:
            target = next(rule for rule in wins if win in places[f"{rule} block"])
            assert target in objects
            others = [name for name in blocks if name != target]
        else:
            targets = [
                name
                for name in objects
                if f"{name} block" in places
                and within(places[f"{name} block"][0], *((7, 10, 3, 5) if two else (2, 5, 2, 5)))
            ]
            assert targets
            target = targets[0]
            others = [name for name in blocks if name not in targets]
        if suffix == "-distr_obj-irrelevant_rule":
            assert len(blocks) == 2
            assert not set(others) & set(objects)
            assert all(within(places[f"{name} block"][0], 7, 10, 3, 5) for name in others if two)
        elif suffix == "-distr_rule":
            assert len(blocks) == 2
            assert all(within(places[f"{name} block"][0], 7, 10, 3, 5) for name in others if two)
        elif suffix == "-distr_obj_rule":
            assert set(blocks) == set(objects)
            assert all(places[f"{name} block"][0] in (ASIDE_RIGHT if two else ASIDE) for name in others)
        elif suffix == "-distr_win_rule":
            assert len(blocks) == 3
            assert ASIDE_RIGHT & {cell for name in objects for cell in places[f"{name} block"]}
            assert (11, 4) in places["win block"]
        else:
            assert len(blocks) == 1
        if not two:
            assert within(places["baba"][0], 1, 6, 2, 6)
            assert all(within(places[name][0], 1, 6, 2, 6) for name in objects)
            continue
        assert places["wall"] == [(6, y) for y in range(1, 8)]
        stop = not prefix.startswith(("two_room-goto", "two_room-make"))
        assert ("wall is stop" in rules) is stop
        assert within(places["baba"][0], 2, 5, 3, 5)
        side = (1, 11, 2, 7) if "maybe" in prefix else (7, 10, 2, 7) if stop else (1, 4, 1, 7)
        assert all(within(places[name][0], *side) for name in objects)


def test_special_levels_and_the_tiny_one():
    for seed in range(25):
        for level, stop, base in (
            ("two_room-make_you", (1, 1), (1, 6)),
            ("two_room-make_you-make_win", (1, 1), (1, 6)),
            ("two_room-make_wall_win", (2, 2), (1, 7)),
        ):
            world = LEVELS[level](np.random.default_rng(seed))
            places = found(world)
            assert (places["baba block"], places["wall block"]) == ([base], [stop])
            assert within(places["baba"][0], 2, 4, 3, 5)
            objects = [name for name in ("ball", "key", "door") if name in places]
            assert len(objects) == 2
            assert all(within(places[name][0], 7, 10, 2, 7) for name in objects)
            whole = [rule for rule in world.rules.told if rule.word == "win"]
            assert len(whole) == (level == "two_room-make_you")
        world = LEVELS["you_win"](np.random.default_rng(seed))
        assert len(world.cells) == 36
        assert len(search(world, 10).moves or ()) == 1


# ---- rewards and ends --------------------------------------------------------------------------------------------


def play(map_text: str, *actions: str, **kwargs) -> tuple:
    env = BabaIsAIEnv(map=map_text, **kwargs)
    env.reset(seed=0)
    for action in actions:
        answer = env.step(action)
    return answer[1:]


@pytest.mark.parametrize(
    ("map_text", "reward", "expected"),
    [
        (WIN, "binary", (1.0, True, False)),
        (WIN, "native", (1 - 0.9 * 2 / 100, True, False)),
        (LOSE, "binary", (0.0, True, False)),
        (LOSE, "native", (-1.0, True, False)),
    ],
)
def test_winning_and_losing(map_text, reward, expected):
    *answer, info = play(map_text, "idle", "right", reward=reward)
    assert tuple(answer) == pytest.approx(expected)
    assert info["success"] is (map_text == WIN)
    assert info["progression"] == float(map_text == WIN)
    assert info["no_you"] is False


@pytest.mark.parametrize("reward", ["binary", "native"])
def test_without_you_the_episode_ends_as_lost(reward):
    *answer, info = play(UNDONE, "up", reward=reward)
    assert answer == [0.0, True, False]
    assert (info["no_you"], info["success"], info["rules"]) == (True, False, [])


def test_a_new_episode_forgets_how_the_last_one_ended():
    env = BabaIsAIEnv(map=UNDONE)
    first = env.reset()
    assert env.step("up")[4]["no_you"] is True
    assert env.reset() == first


def test_the_limit_truncates_and_idle_changes_nothing():
    env = BabaIsAIEnv(level="make_win")
    assert env.max_turns == 100
    text, info = env.reset(seed=1)
    ends = []
    for _ in range(100):
        after, reward, terminated, truncated, later = env.step("idle")
        assert (after, reward, later["map"], later["rules"]) == (text, 0.0, info["map"], info["rules"])
        ends.append((terminated, truncated))
    assert ends == [(False, False)] * 99 + [(False, True)]
    assert play(WIN, "idle", "right", max_turns=2)[1:3] == (True, False)


def test_info_has_rules_and_map_after_the_turn():
    env = BabaIsAIEnv(map=f"{SENTENCE}\n. . .\nobj:ball:blue . obj:baba")
    text, info = env.reset()
    assert info["rules"] == ["baba is you"]
    assert text.startswith("Active rules:\nbaba is you\n\nObjects on the map:\nrule `baba` 2 steps to the left and 2 ")
    info = env.step("left")[4]
    assert info["map"].splitlines()[2] == "obj:ball:blue obj:baba ."
    info = env.step("west")[4]
    assert info["executed_action"] == "left"
    assert info["map"].splitlines()[2] == "obj:ball:blue+obj:baba . ."
    again = BabaIsAIEnv(map=info["map"])
    assert again.reset()[1]["map"] == info["map"]


def test_a_picture_and_a_pickle_in_the_middle():
    env = BabaIsAIEnv(level="two_room-make_wall_win", render_mode="rgb_array")
    env.reset(seed=2)
    before = env.render()
    assert (before.shape, before.dtype) == ((9 * 32, 13 * 32, 3), np.uint8)
    env.step("up")
    assert (env.render() != before).any()
    copy = pickle.loads(pickle.dumps(env))
    assert [copy.step(move) for move in MOVES] == [env.step(move) for move in MOVES]
    assert copy.reset()[0] == env.reset()[0]
    assert BabaIsAIEnv().render() is None


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"level": "goto_lose"}, "'goto_lose'"),
        ({"level": ["goto_win"]}, "Unknown Baba Is AI level"),
        ({"level": "goto_win", "map": WIN}, "not both"),
        ({"map": "obj:bal"}, "'obj:bal'"),
        ({"map": "obj:baba text:noun:key text:is text:prop:you"}, "YOU"),
        ({"reward": "sparse"}, "'sparse'"),
        ({"render_mode": "human"}, "'human'"),
    ],
)
def test_wrong_arguments_are_answered_with_a_sentence(kwargs, message):
    with pytest.raises(ValueError, match=r"\w") as caught:
        BabaIsAIEnv(**kwargs)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_map_of_the_docs_can_be_played_and_won():
    page = (Path(__file__).parents[2] / "docs" / "games.md").read_text()
    (example,) = (block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "map: |" in block)
    env = BabaIsAIEnv(**yaml.safe_load(example)["env"]["kwargs"])
    env.reset()
    choose = env.solver()
    while not env.step(choose())[2]:
        assert env.turn < 20
    assert env.success()


# ---- players -----------------------------------------------------------------------------------------------------


def solved(level: str, seeds: range) -> Counter:
    """How the scripted player fares: "won", "no way" where a whole search proves that there is none, "unknown"."""
    counted: Counter = Counter()
    env = BabaIsAIEnv(level=level)
    for seed in seeds:
        env.reset(seed=seed)
        choose, over = env.solver(), False
        start = env._world
        while not over:
            *_, terminated, truncated, info = env.step(choose())
            over = terminated or truncated
        if info["success"]:
            counted["won"] += 1
        else:
            counted["no way" if search(start, 100_000).complete else "unknown"] += 1
    return counted


@pytest.mark.parametrize("level", ["goto_win-distr_obj_rule", "you_win", "two_room-goto_win", "two_room-make_you"])
def test_the_scripted_player_wins(level):
    assert solved(level, range(5)) == {"won": 5}


@pytest.mark.slow
@pytest.mark.parametrize("level", ONE_ROOM)
def test_the_scripted_player_wins_every_level_of_one_room_that_can_be_won(level):
    assert solved(level, range(8)) == {"won": 8}  # of these seeds all can be won


def test_the_player_goes_on_from_wherever_it_finds_the_game():
    env = BabaIsAIEnv(level="goto_win")
    env.reset(seed=0)
    choose = env.solver()
    choose()
    for action in ("left", "idle", "up", "left"):
        assert not env.step(action)[2]
    while not env.step(choose())[2]:
        assert env.turn < 30
    assert env.success()
    env = BabaIsAIEnv(map=f"obj:baba border . {SENTENCE}")
    env.reset()
    assert env.solver()() == "idle"


BANDS = {
    "goto_win": (0.77, 0.87),
    "two_room-goto_win": (0.42, 0.60),
    "two_room-maybe_break_stop-goto_win": (0.28, 0.50),
    "two_room-break_stop-goto_win": (0.12, 0.20),
}


def random_success(level: str, seeds: range, turns: int = 100) -> float:
    wins = 0
    for seed in seeds:
        generator = np.random.default_rng([seed, 1])
        world = LEVELS[level](generator)
        for number in generator.integers(len(MOVES), size=turns):
            world, outcome = world.after(list(MOVES)[number])
            if outcome:
                wins += outcome == "win"
                break
    return wins / len(seeds)


@pytest.mark.slow
@pytest.mark.parametrize("level", sorted({split(level)[0] for level in ONE_ROOM + TWO_ROOM}))
def test_random_play_wins_as_often_as_published(level):
    low, high = BANDS.get(level, (0.0, 0.03))
    count = 200
    slack = 2.5 * (0.25 / count) ** 0.5 if level in BANDS else 0.0  # of a measured share
    assert low - slack <= random_success(level, range(count)) <= high + slack


def test_random_play_of_the_tiny_level():
    assert 0.38 < random_success("you_win", range(300), turns=3) < 0.58
    assert baselines.random_agent("BabaIsAI-you_win-v0", range(20)) == baselines.random_agent(
        "BabaIsAI-v0", range(20), level="you_win"
    )
