"""The games that were written for the sweep of the checker are sound, as it takes them to be."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

PLAY = """
import random
import gymnasium
import env_sweep
from env_sweep.small import GAMES

def episode(env, seed, odd=("", "{}", "9" * 5000, "\\u00b2")):
    draws = random.Random(seed)
    steps = [env.reset(seed=seed)]
    offers = [*getattr(env.unwrapped, "actions", ()), *"abcde12", "123", "25", "take 1 from A", "go east", "go west"]
    while len(steps) < 2 or not (steps[-1][2] or steps[-1][3]):
        steps.append(env.step(draws.choice([*offers, *odd])))
        assert not (steps[-1][2] and steps[-1][3])
    return steps

def paid(name):
    # a few lines of a player that knows the hidden state
    env = gymnasium.make(name, disable_env_checker=True)
    env.reset(seed=3)
    game = env.unwrapped
    if name == "Hangman-v0":
        return [env.step(letter)[1] for letter in dict.fromkeys(game._word)][-1]
    if name == "BullsAndCows-v0":
        return env.step(game._number)[1]
    if name == "Sums-v0":
        return sum(env.step(str(game._first + game._second))[1] for _ in range(5))
    return env.step(str(game._least))[1]

for game in GAMES:
    used = gymnasium.make(f"{game}-v0", disable_env_checker=True)
    for seed in range(30):
        assert episode(used, seed) == episode(gymnasium.make(f"{game}-v0", disable_env_checker=True), seed), game
assert [round(paid(f"{name}-v0"), 6) for name in ("Hangman", "BullsAndCows", "Sums")] == [1.0, 1.0, 1.0]
assert paid("Haggling-v0") > 0
"""


@pytest.mark.slow
def test_the_small_games_repeat_and_pay_for_what_they_ask():
    answer = subprocess.run([sys.executable, "-c", PLAY], cwd=BENCHMARKS, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
