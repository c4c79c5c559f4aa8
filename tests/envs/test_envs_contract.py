"""What every TextEnv promises, tried on the small games and on every registered id."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import agentrl_envs
from agentrl_envs import ENV_IDS, TextEnv, baselines, normalise
from agentrl_envs.games.bandit import Bandit
from agentrl_envs.games.guess_number import GuessNumber
from tests.envs.test_determinism import QUICKER

INFO_KEYS = {
    "success",
    "progression",
    "executed_action",
    "invalid_action",
    "long_term_text",
    "short_term_text",
    "metrics",
}


class Counter(TextEnv):
    """Counts to three with `add`; has short-term text, a reward without an end, and a loss."""

    actions = {"Add One": "add 1", "wait": "do nothing", "lose": "end without reward"}
    aliases = {"plus": "Add One"}
    default_action = "wait"
    max_turns = 4

    @property
    def system_prompt(self) -> str:
        return "Count to three."

    def _start(self, seed, options):
        self.count = 0

    def _act(self, action):
        self.count += action == "Add One"
        return float(self.count == 3 or action == "wait"), self.count == 3 or action == "lose"

    def _observe(self):
        return f"count {self.count}", f"turn {self.turn}" if self.turn else ""

    def progression(self):
        return self.count / 3


def python(code: str, **variables: str) -> subprocess.CompletedProcess:
    root = str(Path(agentrl_envs.__file__).parent.parent)
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **variables},
        timeout=60,
    )


def make(env_id: str, **kwargs) -> gymnasium.Env:
    return gymnasium.make(f"agentrl_envs:{env_id}", **kwargs)


@pytest.mark.parametrize("env_id", ENV_IDS)
def test_every_id_can_be_made_and_keeps_the_contract(env_id):
    env = make(env_id, **QUICKER.get(env_id, {}))
    inner = env.unwrapped
    assert isinstance(inner, TextEnv)
    observation, info = env.reset(seed=5)
    assert env.observation_space.contains(observation)
    assert observation
    assert set(info) >= INFO_KEYS
    assert inner.system_prompt
    assert inner.free_text or inner.default_action in inner.actions
    for text, name in inner.examples:
        assert env.observation_space.contains(text)
        assert name in inner.actions
    over = False
    for action in (*inner.actions, *inner.aliases):
        assert env.action_space.contains(action)
        if over:
            env.reset(seed=5)
        meant = inner.aliases.get(action, action)
        observation, reward, terminated, truncated, info = env.step(action)
        assert env.observation_space.contains(observation)
        assert set(info) >= INFO_KEYS
        assert not info["invalid_action"]
        assert info["executed_action"] == meant
        over = terminated or truncated
        assert isinstance(reward, float)
        assert isinstance(terminated, bool)
        assert isinstance(truncated, bool)
        assert 0.0 <= info["progression"] <= 1.0


@pytest.mark.parametrize(
    "env_id", ["Bandit-v0", "GuessNumber-v0", "BabyAIText-GoToObjS6-v0", "SokobanText-v0", "Search-v0"]
)
def test_gymnasium_checker_accepts(env_id):
    check_env(make(env_id, disable_env_checker=True).unwrapped, skip_render_check=True)


def test_normalise():
    assert normalise("  Turn_Left. \nand then") == "turn left"
    assert normalise("GO   forward!!") == "go forward"
    assert normalise("") == normalise(" \n ") == normalise("...") == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Add One", ("Add One", True)),
        ("add_one.", ("Add One", True)),
        ("PLUS!", ("Add One", True)),
        ("add", ("wait", False)),
        ("", ("wait", False)),
        ("plus one\nplus", ("wait", False)),
        ("加", ("wait", False)),
    ],
)
def test_resolve_action(text, expected):
    assert Counter().resolve_action(text) == expected


def test_invalid_action_runs_the_default_and_says_so():
    env = Counter()
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step("jump")
    assert (reward, terminated, truncated) == (1.0, False, False)
    assert info["invalid_action"] is True
    assert info["executed_action"] == "wait"
    assert env.step("plus")[4]["invalid_action"] is False


def test_short_term_text_comes_first():
    env = Counter()
    assert env.reset(seed=0)[0] == "count 0"
    observation, *_, info = env.step("plus")
    assert observation == "turn 1\ncount 1"
    assert (info["short_term_text"], info["long_term_text"]) == ("turn 1", "count 1")


def test_limit_is_truncated_and_never_terminated():
    env = Counter()
    env.reset(seed=0)
    ends = [env.step("wait")[2:4] for _ in range(4)]
    assert ends == [(False, False)] * 3 + [(False, True)]
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("wait")


def test_success_in_the_last_turn_is_terminated_only():
    env = Counter()
    env.reset(seed=0)
    for action in ("wait", "plus", "plus"):
        *_, info = env.step(action)
        assert info["success"] is False
    assert info["progression"] == pytest.approx(2 / 3)
    _, reward, terminated, truncated, info = env.step("plus")
    assert (reward, terminated, truncated, info["success"], info["progression"]) == (1.0, True, False, True, 1.0)
    assert env.reset()[1]["success"] is False


def test_loss_is_terminated_without_success():
    env = Counter()
    env.reset(seed=0)
    _, _, terminated, truncated, info = env.step("lose")
    assert (terminated, truncated, info["success"]) == (True, False, False)


def test_step_before_reset_is_refused():
    with pytest.raises(gymnasium.error.ResetNeeded):
        Counter().step("wait")


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ({"default_action": "fly"}, "default action 'fly'"),
        ({"aliases": {"up": "fly"}}, "means 'fly'"),
        ({"aliases": {"Plus": "wait"}}, "never match"),
        ({"max_turns": 0}, "max_turns is 0"),
    ],
)
def test_bad_data_is_refused(fault, sentence):
    env = Counter()
    for key, value in fault.items():
        setattr(env, key, value)
    with pytest.raises(ValueError, match=sentence):
        env.reset(seed=0)


@pytest.mark.parametrize(
    ("env_id", "kwargs", "sentence"),
    [
        ("GuessNumber", {"highest": 1}, "highest must be 2 to 10000, not 1"),
        ("GuessNumber", {"highest": 10**30}, "highest must be 2 to 10000"),
        ("SokobanText", {"pulls": 10**30}, "pulls must be 1 to 10000"),
        ("SokobanText", {"pulls": 0}, "pulls must be 1 to 10000"),
        ("FrozenLakeText", {"min_way": 17}, "min_way must be at most max_turns"),
        ("BabyAIText-GoTo", {"num_dists": -1}, "num_dists must be at least 0"),
    ],
)
def test_numbers_with_which_no_episode_can_begin_are_refused_when_an_environment_is_made(env_id, kwargs, sentence):
    with pytest.raises(ValueError, match=sentence):
        gymnasium.make(f"agentrl_envs:{env_id}-v0", **kwargs)


def test_pickled_in_the_middle_of_an_episode():
    env = GuessNumber(highest=9)
    env.reset(seed=4)
    env.step("5")
    copy = pickle.loads(pickle.dumps(env))
    assert copy.step("3") == env.step("3")
    assert [copy.reset()[0], copy._number] == [env.reset()[0], env._number]


def test_bandit_pays_only_the_arm_of_the_word():
    pays = {"sun": "hat", "rain": "umbrella", "snow": "gloves"}
    env = Bandit()
    seen = set()
    for seed in range(30):
        for arm in pays.values():
            observation, _ = env.reset(seed=seed)
            word = observation.removeprefix("Weather: ")
            _, reward, terminated, truncated, info = env.step(arm)
            assert (terminated, truncated) == (True, False)
            assert reward == float(pays[word] == arm)
            assert info["success"] is (pays[word] == arm)
            seen.add(word)
    assert seen == set(pays)
    assert set(Bandit(arms=2).actions) == {"hat", "umbrella"}
    with pytest.raises(ValueError, match="2 to 3"):
        Bandit(arms=4)


@pytest.mark.parametrize("highest", [2, 5, 10, 31])
def test_guess_number_is_won_by_halving(highest):
    env = GuessNumber(highest)
    numbers = set()
    for seed in range(80):
        env.reset(seed=seed)
        low, high, over = 1, highest, False
        while not over:
            middle = (low + high) // 2
            text, reward, terminated, truncated, info = env.step(str(middle))
            over = terminated or truncated
            answer = text.splitlines()[-1]
            low, high = (middle + 1, high) if answer.endswith("too low.") else (low, middle - 1)
        assert info["success"]
        assert reward == 1.0
        assert answer == f"{middle} is correct."
        numbers.add(middle)
    assert {1, highest} <= numbers or highest == 31


def test_guess_number_history_and_limit():
    env = GuessNumber()
    seed = next(seed for seed in range(50) if env.reset(seed=seed) and env._number == 3)
    assert env.reset(seed=seed)[0] == "No guess yet."
    env.step("one")
    text, _, _, truncated, _ = env.step("5")
    assert text == "1 is too low.\n5 is too high."
    assert not truncated
    _, reward, terminated, truncated, info = env.step("4")
    assert (reward, terminated, truncated, info["success"]) == (0.0, False, True, False)


@pytest.mark.parametrize("name", ["Bandit-v0", "GuessNumber-v0"])
def test_the_scripted_player_wins_two_hundred_games(name):
    assert baselines.solver_agent(name, range(200)).success == 1.0


def test_the_scripted_player_goes_on_from_any_guess():
    env = GuessNumber(31, max_turns=8)
    for seed in range(31):
        env.reset(seed=seed)
        player = env.solver()
        over = any(env.step(guess)[2] for guess in ("20", "1", "25"))
        while not over:
            _, _, over, truncated, _ = env.step(player())
            assert not truncated


def test_baselines_of_the_games():
    random = baselines.random_agent("Bandit-v0", range(300))
    assert 0.25 < random.success < 0.42
    assert (random.episodes, random.mean_turns, random.mean_return) == (300, 1.0, random.success)
    assert random == baselines.random_agent("Bandit-v0", range(300))
    hat = baselines.constant_agent("Bandit-v0", "hat", range(300))
    assert 0.25 < hat.success < 0.42
    guess = baselines.random_agent("GuessNumber-v0", range(300))
    assert 0.40 < guess.success < 0.57  # 1 - (4/5)^3 = 0.488
    constant = baselines.constant_agent("GuessNumber-v0", "3", range(300))
    assert 0.12 < constant.success < 0.28
    assert 2.4 < constant.mean_turns < 2.8


def test_baselines_command(capsys):
    baselines.main(["GuessNumber-v0", "--episodes", "20", "--set", "highest=4", "--set", "max_turns=1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["random", "1", "2", "3", "4"]
    assert all(float(line.split()[-1]) == 1.0 for line in lines[2:])
    assert sum(float(line.split()[1]) for line in lines[3:]) == pytest.approx(1.0)


def test_without_minigrid_the_package_works_and_babyai_says_what_to_install():
    done = python(
        "import sys; sys.modules['minigrid'] = None\n"
        "import gymnasium, agentrl_envs, agentrl_envs.babyai.text\n"
        "gymnasium.make('agentrl_envs:Bandit-v0').reset(seed=0)\n"
        "gymnasium.make('agentrl_envs:BabyAIText-GoTo-v0')\n"
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: The BabyAI environments need minigrid")
    assert 'pip install "lightning-agentrl[envs]"' in last


def test_without_crafter_its_texts_work_and_the_game_says_what_to_install():
    done = python(
        "import sys; sys.modules['crafter'] = None\n"
        "import gymnasium, agentrl_envs\n"
        "from agentrl_envs.crafter import describe\n"
        "gymnasium.make('agentrl_envs:CrafterText-v0')\n"
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: The Crafter environments need crafter")
    assert 'pip install "lightning-agentrl[envs]"' in last


@pytest.mark.slow
def test_another_process_tells_the_same_texts():
    code = (
        "import gymnasium\n"
        "def texts():\n"
        "    for env_id in ('BabyAIText-GoToLocalS6N2-v0', 'BabyAIText-Open-v0', 'GuessNumber-v0',\n"
        "                   'FrozenLakeText-v0', 'SokobanText-v0', 'Search-v0'):\n"
        "        env = gymnasium.make('agentrl_envs:' + env_id)\n"
        "        for seed in (3, 4):\n"
        "            yield env.reset(seed=seed)[0] + env.unwrapped.system_prompt\n"
        "            yield env.step([*env.unwrapped.actions, 'search: the town', 'search: the town'][1])[0]\n"
        "        yield env.reset()[0]\n"
    )
    here: dict = {}
    exec(code, here)
    done = python(code + "print(repr(list(texts())))", PYTHONHASHSEED="7")
    assert done.stdout.strip() == repr(list(here["texts"]())), done.stderr


def test_import_loads_no_game_and_no_trainer():
    done = python(
        "import sys, agentrl_envs; print([m for m in ('minigrid', 'torch', 'lightning_agentrl') if m in sys.modules])"
    )
    assert done.stdout.strip() == "[]", done.stderr
