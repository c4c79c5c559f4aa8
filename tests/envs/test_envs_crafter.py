"""The Crafter environment: it repeats; ends, rewards, sleep, words; what chance and the scripted player reach."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import agentrl_envs
from agentrl_envs import baselines
from agentrl_envs.crafter.env import CrafterText
from agentrl_envs.crafter.game import ACHIEVEMENTS, ACTIONS, Game, crafter
from lightning_agentrl.prompts.parser import TolerantParser

SMALL = 18  # cells along a side of a world that is made quickly


@pytest.fixture(scope="module")
def env() -> CrafterText:
    return CrafterText(area=SMALL, render_mode="rgb_array")


# ---- repeatable ----------------------------------------------------------------------------------------------------


def digest(env: CrafterText, seed: int, turns: int, meanwhile: CrafterText | None = None) -> str:
    """What the first turns from a seed say: the scripted player's, then random ones; episodes follow each other."""
    generator = np.random.default_rng(seed)
    content = hashlib.sha256()
    env.reset(seed=seed)
    player = env.solver()
    for turn in range(turns):
        action = player() if turn < turns // 2 else str(generator.choice(list(env.actions)))
        text, reward, terminated, truncated, info = env.step(action)
        content.update(repr((text, reward, terminated, truncated, sorted(info.items()), env.system_prompt)).encode())
        if meanwhile is not None:
            env.render()
            random.random()
            np.random.rand()
            if turn == 0 or any(meanwhile.step("Move West")[2:4]):
                meanwhile.reset(seed=turn)
        if terminated or truncated:
            text, _ = env.reset()
            content.update(text.encode())
    return content.hexdigest()


def test_pickled_in_the_middle_of_an_episode(env: CrafterText) -> None:
    env.reset(seed=3)
    env.step("Move East")
    copy = pickle.loads(pickle.dumps(env))
    assert [copy.step(action) for action in env.actions] == [env.step(action) for action in env.actions]
    assert copy.reset() == env.reset()


@pytest.mark.slow
def test_same_seed_same_short_episode(env: CrafterText) -> None:
    first = digest(env, 5, 40)
    assert digest(env, 6, 20) != first
    assert digest(env, 5, 40, meanwhile=CrafterText(area=16)) == first


@pytest.mark.long
def test_same_seed_same_hundreds_of_turns_everywhere() -> None:
    """In one process, on a used instance, interleaved and drawn, and in fresh interpreters with other hash seeds."""
    turns = 400
    code = (
        "from tests.envs.test_envs_crafter import CrafterText, digest\n"
        f"print([digest(CrafterText(area=32), seed, {turns}) for seed in (1,)])"
    )
    root = Path(__file__).parents[2]
    path = os.pathsep.join(
        [str(root), str(Path(agentrl_envs.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    )
    fresh = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for hash_seed in ("1", "2")
    ]
    expected = [digest(CrafterText(area=32), seed, turns) for seed in (1,)]
    used = CrafterText(area=32, render_mode="rgb_array")
    other = CrafterText(area=16)
    assert [digest(used, seed, turns, meanwhile=other) for seed in (1,)] == expected
    assert [process.communicate(timeout=120)[0].strip() for process in fresh] == [repr(expected)] * 2


@pytest.mark.slow
def test_the_game_is_the_published_one() -> None:
    """Until creatures come and go, from the tenth frame on, every frame is the same."""
    ours, theirs = Game(SMALL), crafter.Env(area=(SMALL, SMALL), seed=7)
    ours.begin(7)
    theirs.reset()
    for action in (6, 1, 2, 3, 4, 5, 5, 8, 11):
        reward = ours.frame(action)
        _, expected, _, info = theirs.step(action)
        assert (reward, ours.map().tolist()) == (expected, info["semantic"].tolist())
        assert ours.player.inventory == info["inventory"]


# ---- turns ---------------------------------------------------------------------------------------------------------


def test_the_map_ends_at_its_edges(env: CrafterText) -> None:
    env.reset(seed=0)
    world, player = env._game._world, env._game.player
    for x in range(SMALL):
        for y in range(SMALL):
            world[x, y] = "grass"
    for thing in world.objects:
        if thing is not player:
            world.remove(thing)
    for corner, (west, north, east, south) in {(0, 0): (0, 0, 4, 3), (SMALL - 1, SMALL - 1): (4, 3, 0, 0)}.items():
        world.move(player, corner)
        seen = [[(x - 4, y - 3) for x in range(9) if row[x] == 2] for y, row in enumerate(env._game.window())]
        cells = {cell for row in seen for cell in row}
        assert cells == {(x, y) for x in range(-west, east + 1) for y in range(-north, south + 1) if (x, y) != (0, 0)}
    text = env.step("Move South")[0]
    assert text.endswith("You see:\n- grass 1 step to your west\n\nYou face nothing at your front.")


def test_one_turn_of_sleep_lasts_until_the_player_wakes(env: CrafterText) -> None:
    env.reset(seed=1)
    env._game.player.inventory.update(energy=3, health=9)
    _, reward, terminated, _, info = env.step("Sleep")
    assert not terminated
    assert 60 < info["metrics"]["frames"] < 80
    assert info["metrics"]["achievement_wake_up"] == 1.0
    assert reward == pytest.approx(1.0)
    assert "- energy: 9/9" in info["short_term_text"]
    assert "asleep" not in info["long_term_text"]


def test_sleep_ends_with_death(env: CrafterText) -> None:
    env.reset(seed=1)
    env.step("Noop")
    env._game.player.inventory.update(health=1, food=0, drink=0, energy=0)
    env._game._last_health = env._game.player._last_health = 1
    text, reward, terminated, truncated, info = env.step("Sleep")
    assert (terminated, truncated, info["success"]) == (True, False, False)
    assert reward == pytest.approx(-0.1)
    assert "You died." in text


def test_sleep_frame_by_frame() -> None:
    env = CrafterText(area=SMALL, sleep_until_awake=False)
    env.reset(seed=1)
    env._game.player.inventory.update(energy=8)
    place = env._game.player.pos.tolist()
    assert env.step("Sleep")[4]["long_term_text"].startswith("You are asleep")
    turns = 0
    while env._game.helpless:
        _, _, terminated, _, info = env.step("Move West")
        turns += 1
        assert not terminated
        assert (info["executed_action"], info["invalid_action"]) == ("Sleep", False)
        assert env._game.player.pos.tolist() == place
    assert turns == 10
    assert env.step("Noop")[4]["metrics"]["achievement_wake_up"] == 1.0


def test_rewards_achievements_and_the_prompt(env: CrafterText) -> None:
    _, info = env.reset(seed=4)
    assert (info["progression"], info["success"]) == (0.0, False)
    assert sum(value for name, value in info["metrics"].items() if name.startswith("achievement_")) == 0
    assert {name.removeprefix("achievement_") for name in info["metrics"]} == {*ACHIEVEMENTS, "frames"}
    assert env.system_prompt.count("\n- Place Table\n") == 1
    env._game.player.inventory["wood"] = 5
    world, (x, y) = env._game._world, env._game.player.pos
    world[x, y + 1] = "grass"
    env.step("Noop")
    _, reward, _, _, info = env.step("make_crafting_table")
    assert (reward, info["executed_action"], info["invalid_action"]) == (1.0, "Place Table", False)
    assert info["progression"] == pytest.approx(1 / 22)
    assert info["metrics"]["achievement_place_table"] == 1.0
    assert info["long_term_text"].endswith("You face table at your front.")
    assert "\n- Place Table\n" not in env.system_prompt
    assert env.step("Make Wood Sword")[1] == 1.0
    assert env.step("Make Wood Sword")[1] == 0.0  # once only
    env.goals = "all"
    assert "\n- Place Table\n" in env.system_prompt
    env.goals = "open"


def test_lava_kills_and_the_limit_truncates() -> None:
    env = CrafterText(area=SMALL, max_turns=3)
    env.reset(seed=0)
    assert [env.step("Noop")[2:4] for _ in range(3)] == [(False, False), (False, False), (False, True)]
    env.reset(seed=0)
    x, y = env._game.player.pos
    env._game._world[x + 1, y] = "lava"
    _, reward, terminated, truncated, _ = env.step("Move East")
    assert (reward, terminated, truncated) == (pytest.approx(-0.9), True, False)


def test_drawing(env: CrafterText) -> None:
    env.reset(seed=0)
    assert env.render().shape == (288, 288, 3)
    assert env.render().dtype == np.uint8
    assert CrafterText(area=SMALL).render() is None


@pytest.mark.parametrize("given", [{"area": 8}, {"area": 32.5}, {"goals": "none"}, {"render_mode": "human"}])
def test_bad_arguments_are_refused(given: dict[str, object]) -> None:
    (value,) = given.values()
    with pytest.raises(ValueError, match=str(value)):
        CrafterText(**given)


# ---- words ---------------------------------------------------------------------------------------------------------

SPOKEN = {
    "Do": (
        "Collect Stone|Mine Stone|Chop Tree|Chop|Chop Trees|Cut Tree|Chop_Tree|Cut|Collect Wood|Drink|Drink From Water|"
        "Drink From Lakes|Mine|Collect Coal|Collect Iron|Mine Coal|Defeat Zombie|Defeat Skeleton|Eat Cow|Attack|"
        "Collect Sapling|Do (collect wood)|Drink Water|Mine Iron|Collect Diamond|do."
    ),
    "Place Table": "Make Table|Make Crafting Table|Craft Table|Place Crafting Table",
    "Place Furnace": "Make Furnace",
    "Move North": "Move North 1 Step|Move North 2 Steps|Move North 3 Steps|Move North 4 Steps|move_north|MOVE NORTH,",
    "Move West": "Move West 1 Step|move west\nbecause",
    "Noop": "noop|do nothing",
}


@pytest.mark.parametrize(("said", "name"), [(said, name) for name in SPOKEN for said in SPOKEN[name].split("|")])
def test_what_models_say(env: CrafterText, said: str, name: str) -> None:
    env.reset(seed=0) if not env._active else None
    assert env.resolve_action(said) == (name, True)
    assert TolerantParser().parse(f"ACTION: {said}", list(env.actions), env.aliases).action == name


def test_a_diagonal_is_one_of_its_directions(env: CrafterText) -> None:
    env.reset(seed=2)
    for said in ("Move North West", "move_north-west", "Move Northwest"):
        executed = set()
        for _ in range(12):
            parsed = TolerantParser().parse(said, list(env.actions), env.aliases).action
            info = env.step(said)[4]
            assert info["executed_action"] == parsed
            executed.add(parsed)
        assert executed == {"Move North", "Move West"}


def test_the_order_of_actions_is_the_games() -> None:
    west = {"west": "left", "east": "right", "north": "up", "south": "down"}
    names = [name.lower().replace(" ", "_") for name in CrafterText.actions]
    assert tuple("move_" + west[name[5:]] if name.startswith("move_") else name for name in names) == ACTIONS


# ---- what chance and the scripted player reach ---------------------------------------------------------------------


@pytest.mark.slow
def test_chance_and_the_scripted_player() -> None:
    chance = baselines.random_agent("CrafterText-v0", range(6), area=32)
    assert 0.5 < chance.mean_return < 3.0
    assert 90 <= chance.mean_turns <= 250
    assert baselines.solver_agent("CrafterText-v0", range(2)).mean_return > 10


@pytest.mark.long
def test_return_of_chance_and_of_the_scripted_player() -> None:
    """Frame by frame, as the published game is played."""
    chance = baselines.random_agent("CrafterText-v0", range(50), sleep_until_awake=False)
    print(chance)
    assert 1.0 <= chance.mean_return <= 2.0
    assert 150 <= chance.mean_turns <= 250
    scripted = baselines.solver_agent("CrafterText-v0", range(20))
    print(scripted)
    assert scripted.mean_return > 14


def test_numba_is_not_loaded() -> None:
    """VLLM cannot start in a process beside what numba loads."""
    code = "import sys, agentrl_envs.crafter.game as game; print('numba' in sys.modules, 'llvmlite' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
