"""The seeded defects of the checker's benchmark: five environments that are sound, eight mistakes in each."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

PLAY = """
import random
from collections import Counter
import gymnasium
import env_defects
from env_defects.catalogue import DEFECTS, SOUND

def episode(env, seed, policy):
    steps = [env.reset(seed=seed)]
    while len(steps) < 2 or not (steps[-1][2] or steps[-1][3]):
        steps.append(env.step(policy(env)))
    return steps

def noise(seed, odd=("", "{}", "[", "9" * 5000, "\\ud800", "\\u00b2", "no")):
    draws = random.Random(seed)
    return lambda env: draws.choice([*getattr(env.unwrapped, "actions", ("[1]", "[5]", "[7]")), draws.choice(odd)])

for name in SOUND:
    used = gymnasium.make(name, disable_env_checker=True)
    for seed in range(30):
        new = gymnasium.make(name, disable_env_checker=True)
        assert episode(used, seed, noise(seed)) == episode(new, seed, noise(seed)), name
        solved = episode(new, seed, lambda env: env.unwrapped.solver()())
        assert solved[-1][1] > 0 and solved[-1][2] is True and solved[-1][3] is False, (name, seed)
for flaw in DEFECTS:
    gymnasium.make(flaw.id, disable_env_checker=True)
assert len(SOUND) == 5 and len(DEFECTS) == 40 and sum(flaw.withheld for flaw in DEFECTS) == 20
assert set(Counter(flaw.id.split("-")[0] for flaw in DEFECTS).values()) == {8}
"""


def test_the_sound_ones_repeat_and_can_be_won_and_there_are_forty_mistakes():
    answer = subprocess.run([sys.executable, "-c", PLAY], cwd=BENCHMARKS, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
