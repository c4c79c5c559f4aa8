"""The BabyAI environments: determinism, ends, rewards, prompts, and that every level can be solved."""

import contextlib
import io
import pickle
import re
from collections import deque

import gymnasium
import numpy as np
import pytest

from agentrl_envs import baselines
from agentrl_envs.babyai.env import BabyAIEnv
from agentrl_envs.babyai.levels import _BROKEN, HELD_OUT, LEVELS
from lightning_agentrl.prompts.parser import TolerantParser

GOALS = ("GoTo", "PickUp", "Open", "PutNext", "PickUpSeqGoTo")
SMALL = tuple(name for name in LEVELS if name not in GOALS)
STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))  # Minigrid's directions: right, down, left, up


def play(env, actions, seed):
    """The whole record of an episode."""
    record = [env.reset(seed=seed)]
    for action in actions:
        record.append(env.step(action))
        if record[-1][2] or record[-1][3]:
            break
    return record


# ---- a scripted solver that sees the whole grid ------------------------------------------------------------------


def route(level, is_goal):
    """Shortest list of Minigrid moves (0 left, 1 right, 2 forward) to a state (cell, direction) that is a goal."""
    start = (tuple(int(v) for v in level.agent_pos), level.agent_dir)
    before = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        if is_goal(*state):
            moves = []
            while before[state] is not None:
                state, move = before[state]
                moves.append(move)
            return moves[::-1]
        (x, y), direction = state
        dx, dy = STEPS[direction]
        ahead = level.grid.get(x + dx, y + dy)
        options = [(0, ((x, y), (direction - 1) % 4)), (1, ((x, y), (direction + 1) % 4))]
        if ahead is None or ahead.can_overlap():
            options.append((2, ((x + dx, y + dy), direction)))
        for move, following in options:
            if following not in before:
                before[following] = (state, move)
                queue.append(following)
    raise AssertionError("no way")


def front(cell, direction):
    return cell[0] + STEPS[direction][0], cell[1] + STEPS[direction][1]


def find(level, kind, colour=None):
    return [
        (x, y)
        for x in range(level.grid.width)
        for y in range(level.grid.height)
        if (thing := level.grid.get(x, y)) and thing.type == kind and colour in (None, thing.color)
    ]


class Solver:
    def __init__(self, env):
        self.env = env
        self.level = env._level
        self.over = False
        self.names = {number: name for name, number in env._numbers.items()}

    def do(self, *numbers):
        for number in numbers:
            assert not self.over, "the episode ended before the plan"
            *_, terminated, truncated, self.info = self.env.step(self.names[number])
            self.over = terminated or truncated

    def face(self, cells):
        self.do(*route(self.level, lambda cell, direction: front(cell, direction) in cells))

    def solve(self):
        mission = self.env.mission
        if match := re.fullmatch(r"go to (.+) after you pick up (.+)", mission):
            mission = f"pick up {match[2]}, then go to {match[1]}"
        if match := re.fullmatch(r"put (.+) next to (.+)", mission):
            (moved, fixed) = (self.cells(name) for name in match.groups())
            self.face(moved)
            self.do(3)
            free = {
                (x + dx, y + dy) for x, y in fixed for dx, dy in STEPS if self.level.grid.get(x + dx, y + dy) is None
            }
            self.face(free)
            self.do(4)
        elif mission.startswith("open"):
            (door,) = find(self.level, "door")
            self.face(find(self.level, "key", self.level.grid.get(*door).color))
            self.do(3)
            self.face([door])
            self.do(5)
        else:
            for part in mission.split(", then "):
                self.face(self.cells(part.removeprefix("pick up ").removeprefix("go to ")))
                if part.startswith("pick up"):
                    self.do(3)

    def cells(self, name):
        _, colour, kind = name.split()
        return find(self.level, kind, colour)


@pytest.mark.parametrize("level", LEVELS)
def test_solver_wins_within_the_limit(level):
    env = BabyAIEnv(level)
    missions = set()
    for seed in range(25):
        env.reset(seed=seed)
        missions.add(env.mission)
        solver = Solver(env)
        solver.solve()
        assert solver.over, (seed, env.mission)
        assert solver.info["success"], (seed, env.mission)
        assert solver.info["progression"] == 1.0
    few = {"GoToRedBallNoDists": 1, "Open": 5}  # four door colours and the bare door
    assert len(missions) == few[level] if level in few else len(missions) > 5


# ---- the scripted player -----------------------------------------------------------------------------------------

MINIGRID = sorted(name for name in gymnasium.registry if name.startswith("BabyAI-") and name not in _BROKEN)


def plays_on(env, seed, strays=0):
    """Whether the scripted player wins, after some random actions if the level is not over by then."""
    generator = np.random.default_rng(seed)
    env.reset(seed=seed)
    over, info = False, {}
    player = env.solver() if seed % 2 else None  # made at the beginning, or in the middle
    while not over:
        if env.turn < strays:
            action = list(env.actions)[generator.integers(min(3, len(env.actions)))]
        else:
            player = player or env.solver()
            action = player()
        *_, terminated, truncated, info = env.step(action)
        over = terminated or truncated
    return info["success"]


@pytest.mark.parametrize("level", LEVELS)
def test_the_scripted_player_plays_on_from_any_state(level):
    env = BabyAIEnv(level, actions="goal")
    assert all(plays_on(env, seed, strays=7) for seed in range(4))


@pytest.mark.long
@pytest.mark.parametrize("level", LEVELS)
def test_the_scripted_player_wins_two_hundred_levels(level):
    result = baselines.solver_agent(f"BabyAIText-{level}-v0", range(200))
    print(result)
    assert result.success == 1.0


@pytest.mark.parametrize("level", ["BabyAI-GoToLocalS8N7-v0", "BabyAI-GoToSeqS5R2-v0", "BabyAI-UnlockPickup-v0"])
def test_levels_of_minigrid(level):
    env = BabyAIEnv(level)
    limits = set()
    for seed in range(3):
        assert plays_on(env, seed, strays=3)
        limits.add(env.max_turns)
        assert env.max_turns == env._level.max_steps
        assert env.mission in env.system_prompt
    assert (len(limits) > 1) == (level == "BabyAI-GoToSeqS5R2-v0")  # there the mission decides
    copy = pickle.loads(pickle.dumps(env))
    assert copy.reset(seed=9) == env.reset(seed=9)
    assert BabyAIEnv(level, max_turns=9).max_turns == 9


@pytest.mark.long
@pytest.mark.parametrize("level", MINIGRID)
def test_every_level_of_minigrid_can_be_won(level):
    env = BabyAIEnv(level)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        won = [plays_on(env, seed) for seed in range(3)]
    assert out.getvalue() == ""
    if "OrderN" in level and "Debug" in level:  # a wrong door is the end, which the player does not know
        return
    assert any(won) if level == "BabyAI-UnlockToUnlock-v0" else all(won)


def test_a_player_that_goes_round_in_circles_gives_up():
    env = BabyAIEnv("BabyAI-UnlockToUnlock-v0", max_turns=30)
    assert not plays_on(env, seed=1)
    assert env.turn == 30


def test_there_are_ninety_two_levels():
    assert len(MINIGRID) == 92


def test_distractors():
    env = BabyAIEnv("GoTo", num_dists=8)
    env.reset(seed=0)
    assert sum(len(find(env._level, kind)) for kind in ("key", "ball", "box")) == 9
    for seed in range(20):
        env.reset(seed=seed)
        solver = Solver(env)
        solver.solve()
        assert solver.info["success"]


def test_wrong_order_is_no_success():
    env = BabyAIEnv("PickUpSeqGoTo")
    for seed in range(5):
        env.reset(seed=seed)
        solver = Solver(env)
        name = re.search(r"go to (the \w+ \w+)", env.mission)[1]
        solver.face(solver.cells(name))
        assert not solver.over


def test_missions_have_the_known_forms_and_no_held_out_pair():
    thing = r"(the|a) (red|green|blue|purple|yellow|grey) (key|ball|box)"
    door = r"open the (yellow |green |blue |purple )?door"
    forms = {
        "GoTo": rf"go to {thing}",
        "PickUp": rf"pick up {thing}",
        "Open": door,
        "PutNext": rf"put {thing} next to {thing}",
        "PickUpSeqGoTo": rf"(pick up {thing}, then go to {thing}|go to {thing} after you pick up {thing})",
    }
    for level, form in forms.items():
        env = BabyAIEnv(level)
        missions = []
        for seed in range(60):
            _, info = env.reset(seed=seed)
            missions.append(info["mission"])
        assert all(re.fullmatch(form, mission) for mission in missions), level
        assert not any(pair in mission for mission in missions for pair in HELD_OUT)
        if level == "Open":
            assert 15 < missions.count("open the door") < 45
        if level == "PickUpSeqGoTo":
            assert 15 < sum("after you" in mission for mission in missions) < 45


# ---- determinism -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["GoToLocalS6N2", "Open"])
def test_same_seed_same_episode_also_after_another_one(level):
    env = BabyAIEnv(level)
    actions = [list(env.actions)[i] for i in np.random.default_rng(0).integers(len(env.actions), size=20)]
    first = play(env, actions, seed=11)
    other = play(env, actions[::-1], seed=12)
    env.reset()
    assert play(env, actions, seed=11) == first
    assert play(BabyAIEnv(level), actions, seed=11) == first
    assert other != first
    assert len({env.reset()[0] for _ in range(10)}) > 1  # without a seed the episodes go on changing


def test_vectorised_worker_processes_give_the_same_texts():
    kwargs = {"level": "GoToObjS6", "mission_in": "observation"}

    def maker():
        return BabyAIEnv(**kwargs)

    mode = gymnasium.vector.AutoresetMode.SAME_STEP
    single = [maker() for _ in range(3)]
    vector = gymnasium.vector.AsyncVectorEnv([maker] * 3, shared_memory=False, autoreset_mode=mode)
    try:
        texts, _ = vector.reset(seed=[1, 2, 3])
        assert list(texts) == [env.reset(seed=seed)[0] for env, seed in zip(single, (1, 2, 3), strict=True)]
        for action in ("forward", "left", "forward", "right", "forward", "forward", "left") * 4:
            texts, rewards, *_ = vector.step([action] * 3)
            for env, text, reward in zip(single, texts, rewards, strict=True):
                expected, expected_reward, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    expected, _ = env.reset()
                assert (text, reward) == (expected, expected_reward)
    finally:
        vector.close()


def test_pickled_in_the_middle_of_an_episode():
    env = BabyAIEnv("PutNext")
    actions = list(env.actions) * 6
    play(env, actions[:7], seed=3)
    copy = pickle.loads(pickle.dumps(env))
    assert [copy.step(action) for action in actions] == [env.step(action) for action in actions]
    assert copy.reset() == env.reset()


def test_generation_prints_nothing():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for level in ("GoTo", "PutNext", "GoToLocalS5N2"):
            env = BabyAIEnv(level)
            for seed in range(60):
                env.reset(seed=seed)
    assert out.getvalue() == ""


# ---- ends and rewards --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_turns", "limit"), [(None, 36), (5, 5)])
def test_the_limit_truncates(max_turns, limit):
    env = BabyAIEnv("GoToObjS6", max_turns=max_turns)
    for seed in range(30):
        env.reset(seed=seed)
        ends = []
        while not ends or not any(ends[-1]):
            _, reward, terminated, truncated, info = env.step("forward")
            ends.append((terminated, truncated))
        assert ends[-1] in ((True, False), (False, True))
        assert ends[-1][0] == info["success"] == (reward > 0)
        assert len(ends) == limit or ends[-1][0]
    assert limit == env.max_turns


@pytest.mark.parametrize("level", ["GoToObjS6", "PickUp", "Open"])
@pytest.mark.parametrize("max_turns", [None, 100])
def test_rewards_on_success(level, max_turns):
    for reward in ("binary", "native"):
        env = BabyAIEnv(level, reward=reward, max_turns=max_turns)
        env.reset(seed=8)
        rewards = []
        step = env.step
        env.step = lambda action, step=step, rewards=rewards: (out := step(action), rewards.append(out[1]))[0]
        Solver(env).solve()
        limit = max_turns or {"GoToObjS6": 36, "PickUp": 64, "Open": 128}[level]
        expected = 1.0 if reward == "binary" else 1 - 0.9 * len(rewards) / limit
        assert rewards == [0.0] * (len(rewards) - 1) + [pytest.approx(expected)]


def test_usual_limits():
    limits = {level: BabyAIEnv(level).max_turns for level in LEVELS}
    assert [limits[level] for level in GOALS] == [64, 64, 128, 128, 128]
    assert [limits[level] for level in SMALL] == [16, 36, 25, 36, 64]
    for level, limit in limits.items():  # they are Minigrid's own
        env = LEVELS[level].build(**LEVELS[level].kwargs)
        env.reset(seed=0)
        assert env.max_steps == limit


# ---- texts, prompts, actions -------------------------------------------------------------------------------------


def test_observation_follows_the_grid():
    env = BabyAIEnv("PickUp")
    env.reset(seed=2)
    level = env._level
    thing = next(cell for cell in level.grid.grid if cell and cell.type in ("key", "ball", "box"))
    level.grid.set(*thing.cur_pos, None)
    level.put_obj(thing, 4, 2)
    level.agent_pos, level.agent_dir = (2, 5), 3  # looks up; walls at x 0, 7 and y 0, 7
    name = f"{thing.color} {thing.type}"
    env.step("turn left")
    observation = env.step("turn right")[0]
    assert observation == f"a wall 5 steps forward\na wall 2 steps left\na {name} 2 steps right and 3 steps forward"
    level.agent_pos, level.agent_dir = (4, 3), 3
    assert env.step("pick up")[0] == f"You carry a {name}\na wall 3 steps forward\na wall 3 steps right"


def test_mission_in_system_or_observation():
    in_system = BabyAIEnv("GoToObjS6", mission_in="system")
    observation, info = in_system.reset(seed=1)
    assert in_system.mission in in_system.system_prompt
    assert "Mission" not in observation
    assert info["mission"] == in_system.mission
    for level in ("GoToObjS6", "GoTo"):
        env = BabyAIEnv(level, mission_in="observation")
        prompts = set()
        for seed in range(5):
            observation, info = env.reset(seed=seed)
            prompts.add(env.system_prompt)
            for _ in range(3):
                assert observation.splitlines()[0] == f"Mission: {env.mission}"
                assert observation == info["long_term_text"]
                observation, *_, info = env.step("left")
        assert len(prompts) == 1
        assert all(text.startswith("Mission: go to the ") for text, _ in env.examples)


def test_examples_speak_of_the_mission_and_name_offered_actions():
    env = BabyAIEnv("GoToLocalS6N2")
    for seed in range(10):
        env.reset(seed=seed)
        target = " ".join(env.mission.split()[-2:])
        assert [name for _, name in env.examples] == ["forward", "left", "right"]
        assert f"a {target} 2 steps left" in env.examples[1][0]
        assert all("{" not in text for text, _ in env.examples)
    full = BabyAIEnv("GoTo")
    full.reset(seed=0)
    assert [name for _, name in full.examples] == ["go forward", "turn left", "turn right"]
    for level in ("PickUp", "Open", "PutNext", "PickUpSeqGoTo"):
        env = BabyAIEnv(level)
        for seed in range(6):
            env.reset(seed=seed)
            assert env.examples == ()


@pytest.mark.parametrize("example", [0, 1])
def test_examples_are_optimal_moves_in_a_real_room(example):
    """Where a room shows the target as in the example, the example's action shortens the way."""
    env = BabyAIEnv("GoToRedBallNoDists")
    env.reset(seed=0)
    text, name = env.examples[example]
    shape = re.search(r"a red ball.*", text)[0]
    found = 0
    for seed in range(400):
        observation, _ = env.reset(seed=seed)
        if shape in observation.splitlines():
            target = find(env._level, "ball")
            moves = route(env._level, lambda cell, direction, target=target: front(cell, direction) in target)
            env.step(name)
            after = route(env._level, lambda cell, direction, target=target: front(cell, direction) in target)
            assert len(after) == len(moves) - 1
            found += 1
    assert found


@pytest.mark.parametrize(
    ("said", "name"),
    [("turn left", "left"), ("Turn to the Right.", "right"), ("move_forward", "forward"), ("straight", "forward")],
)
def test_aliases_of_three_actions(said, name):
    env = BabyAIEnv("GoToObjS6")
    assert env.resolve_action(said) == (name, True)


@pytest.mark.parametrize(
    ("said", "name"),
    [("turnleft", "turn left"), ("goforward", "go forward"), ("step forward", "go forward"), ("left", "turn left"),
     ("pickup", "pick up"), ("pick it up", "pick up"), ("open", "toggle"), ("turn_right!", "turn right")],
)  # fmt: skip
def test_aliases_of_six_actions(said, name):
    env = BabyAIEnv("GoTo")
    assert env.resolve_action(said) == (name, True)


@pytest.mark.parametrize(
    ("said", "name"),
    [("turn left and go forward", "turn left"), ("Turn right, then go forward.", "turn right"),
     ("pick it up and go forward", "pick up"), ("go forward then toggle", "go forward")],
)  # fmt: skip
def test_one_action_and_a_remark(said, name):
    env = BabyAIEnv("GoTo")
    assert env.resolve_action(said) == (name, True)
    assert TolerantParser().parse(f"ACTION: {said}", list(env.actions), env.aliases).action == name
    assert env.resolve_action("left or right") == ("go forward", False)
    assert env.resolve_action("and left") == ("go forward", False)


def test_invalid_action_goes_forward():
    env = BabyAIEnv("GoToRedBallNoDists")
    for seed in range(5):
        env.reset(seed=seed)
        wrong = env.step("pick up")
        env.reset(seed=seed)
        right = env.step("forward")
        assert wrong[:4] == right[:4]
        assert wrong[4]["invalid_action"] is True
        assert wrong[4]["executed_action"] == "forward"
        assert wrong[4] | {"invalid_action": False} == right[4]


def test_action_sets():
    env = BabyAIEnv("GoTo", actions=["left", "right", "forward"])
    env.reset(seed=0)
    assert list(env.actions) == ["left", "right", "forward"]
    assert len(env.system_prompt) < 200
    env = BabyAIEnv("GoToObjS6", actions=["turn left", "go forward", "pick up"])
    env.reset(seed=0)
    assert env.resolve_action("right") == ("go forward", False)
    assert "- pick up: " in env.system_prompt
    assert "turn right" not in env.system_prompt


def test_the_table_of_a_goal_is_what_it_can_use():
    moves = ["turn left", "turn right", "go forward"]
    tables = {
        "GoTo": moves,
        "PickUp": [*moves, "pick up", "drop"],
        "Open": [*moves, "pick up", "drop", "toggle"],
        "PutNext": [*moves, "pick up", "drop"],
        "PickUpSeqGoTo": [*moves, "pick up", "drop"],
        "GoToObjS4": ["left", "right", "forward"],
        "BabyAI-Open-v0": [*moves, "pick up", "drop", "toggle"],
    }
    assert {level: list(BabyAIEnv(level, actions="goal").actions) for level in tables} == tables


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"level": "GoToMoon"}, "Unknown BabyAI level"),
        ({"level": "BabyAI-GoToMoon-v0"}, "Unknown BabyAI level"),
        ({"level": "MiniGrid-Empty-5x5-v0"}, "Unknown BabyAI level"),
        ({"level": "BabyAI-KeyInBox-v0"}, "broken"),
        ({"level": "Open", "actions": ["turn left", "go forward", "toggle"]}, "'pick up'"),
        ({"level": "BabyAI-GoTo-v0", "num_dists": 2}, "fixed number"),
        ({"reward": "huge"}, "reward must be"),
        ({"mission_in": "dream"}, "mission_in must be"),
        ({"actions": ["left", "fly"]}, "fly"),
        ({"actions": ["left", "turn left", "forward"]}, "one move twice"),
        ({"level": "PickUp", "actions": ["left", "right", "forward"]}, "cannot be solved"),
        ({"level": "GoToObjS4", "num_dists": 2}, "fixed number"),
    ],
)
def test_bad_arguments_are_refused(kwargs, sentence):
    with pytest.raises(ValueError, match=sentence):
        BabyAIEnv(**kwargs)


# ---- how far chance gets -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "low", "high"),
    [
        ("GoTo", 0.19, 0.38),
        ("PickUp", 0.05, 0.20),
        ("Open", 0.0, 0.02),
        pytest.param("PutNext", 0.0, 0.12, marks=pytest.mark.long),
        pytest.param("PickUpSeqGoTo", 0.03, 0.19, marks=pytest.mark.long),
        pytest.param("GoToObjS4", 0.62, 0.80, marks=pytest.mark.long),
        ("GoToObjS6", 0.38, 0.60),
        pytest.param("GoToLocalS5N2", 0.42, 0.62, marks=pytest.mark.long),
        pytest.param("GoToRedBallNoDists", 0.33, 0.53, marks=pytest.mark.long),
    ],
)
def test_random_success_is_in_the_known_band(level, low, high):
    result = baselines.random_agent(
        f"BabyAIText-{level}-v0",
        range({"Open": 20, "PutNext": 60, "PickUpSeqGoTo": 80, "PickUp": 150, "GoTo": 150}.get(level, 200)),
    )
    assert low <= result.success <= high


# ---- how far the text alone gets ---------------------------------------------------------------------------------


def read_and_act(mission: str, observation: str) -> str:
    """A policy without memory that reads only what a language model would read."""
    target = mission.removeprefix("go to ").replace("the ", "a ", 1)
    for line in observation.splitlines():
        if line.startswith(target):
            ahead = re.search(r"(\d+) steps? forward", line)
            if ahead and not re.search(r" (wall|ball|key|box) 1 step forward", observation):
                return "forward"
            return "left" if "left" in line else "right"
    return "right"


@pytest.mark.parametrize("level", SMALL)
def test_the_text_is_enough_for_a_policy_without_memory(level):
    env = BabyAIEnv(level)
    wins = []
    for seed in range(60):
        observation, info = env.reset(seed=seed)
        over = False
        while not over:
            observation, _, terminated, truncated, info = env.step(read_and_act(env.mission, observation))
            over = terminated or truncated
        wins.append(info["success"])
    assert np.mean(wins) >= 0.9


def test_all_randomness_comes_from_the_generator_of_the_environment():
    """A trainer that restores `np_random` gets the same next episodes."""
    texts = []
    for _ in range(2):
        env = BabyAIEnv("GoToLocalS6N2")
        env.np_random = np.random.default_rng(7)
        texts.append([env.reset()[0] for _ in range(5)])
    assert texts[0] == texts[1]


def test_the_door_is_locked_and_its_key_is_on_the_side_of_the_agent():
    env = BabyAIEnv("Open", num_dists=2)
    sides = set()
    for seed in range(15):
        env.reset(seed=seed)
        level = env._level
        ((door_x, door_y),) = find(level, "door")
        door = level.grid.get(door_x, door_y)
        assert door.is_locked
        keys = find(level, "key", door.color)
        assert any((x < door_x) == (level.agent_pos[0] < door_x) for x, _ in keys)
        sides.add(bool(level.agent_pos[0] < door_x))
        solver = Solver(env)
        solver.face([(door_x, door_y)])
        assert f"a locked {door.color} door 1 step forward" in env._observe()[0]
        solver.do(5)
        assert not solver.over
    assert sides == {True, False}


def test_steps_against_a_wall_are_counted():
    env = BabyAIEnv("GoToRedBallNoDists")
    for seed in range(5):
        env.reset(seed=seed)
        start = env._level.agent_pos
        for _ in range(10):
            *_, info = env.step("forward")
        walked = sum(abs(a - b) for a, b in zip(env._level.agent_pos, start, strict=True))
        assert walked < 10
        assert info["metrics"] == {"bumps": 10 - walked}
        assert env.step("left")[-1]["metrics"] == {"bumps": 10 - walked}
        assert env.reset(seed=seed)[1]["metrics"] == {"bumps": 0}
