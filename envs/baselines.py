"""Baselines without a model: uniformly random actions, and the same action every turn.

`python -m agentrl_envs.baselines BabyAIText-GoToObjS6-v0 --episodes 200 --set max_turns=12` prints a table. A trained
agent has learned nothing if its success is not clearly above the success in this table.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from agentrl_envs.text_env import TextEnv


@dataclass(frozen=True)
class Baseline:
    """The results of one baseline agent."""

    agent: str
    episodes: int
    success: float
    mean_return: float
    mean_turns: float


def random_agent(env_id: str, seeds: Iterable[int], **kwargs: Any) -> Baseline:
    """Play a uniformly random agent; the seed of an episode also seeds the choices, so results are reproducible."""

    def chooser(env: TextEnv, seed: int) -> Callable[[], str]:
        if not env.actions:
            raise ValueError(f"{env_id} takes free text, so there are no actions to draw from")
        generator = np.random.default_rng([seed, 1])

        def choose() -> str:
            names = list(env.actions)  # the actions may change from turn to turn
            return names[int(generator.integers(len(names)))]

        return choose

    return _play("random", env_id, seeds, chooser, kwargs)


def constant_agent(env_id: str, action: str, seeds: Iterable[int], **kwargs: Any) -> Baseline:
    """Play an agent that always takes the same action."""
    return _play(action, env_id, seeds, lambda env, seed: lambda: action, kwargs)


def _play(
    agent: str,
    env_id: str,
    seeds: Iterable[int],
    chooser: Callable[[TextEnv, int], Callable[[], str]],
    kwargs: dict[str, Any],
) -> Baseline:
    env = _make(env_id, kwargs)
    wins, returns, turns = [], [], []
    for seed in seeds:
        _, info = env.reset(seed=seed)
        choose, total, over = chooser(env, seed), 0.0, False
        while not over:
            _, reward, terminated, truncated, info = env.step(choose())
            total += reward
            over = terminated or truncated
        wins.append(info["success"])
        returns.append(total)
        turns.append(env.turn)
    env.close()
    if not wins:
        raise ValueError("A baseline needs at least one seed.")
    return Baseline(agent, len(wins), float(np.mean(wins)), float(np.mean(returns)), float(np.mean(turns)))


def solver_agent(env_id: str, seeds: Iterable[int], **kwargs: Any) -> Baseline:
    """Play the environment's own scripted player.

    Raises:
        ValueError: the environment has no scripted player.
    """

    def chooser(env: TextEnv, seed: int) -> Callable[[], str]:
        player = env.solver()
        if player is None:
            raise ValueError(f"{env_id} has no scripted player")
        return player

    return _play("scripted", env_id, seeds, chooser, kwargs)


def _make(env_id: str, kwargs: dict[str, Any]) -> TextEnv:
    env = gymnasium.make(env_id, disable_env_checker=True, **kwargs).unwrapped
    if not isinstance(env, TextEnv):
        raise TypeError(f"{env_id} is not a TextEnv, so it has no named actions.")
    return env


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form key=value")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def main(arguments: list[str] | None = None) -> None:
    """Play the random agent and every constant agent, and print their results."""
    parser = argparse.ArgumentParser(prog="python -m agentrl_envs.baselines", description=__doc__)
    parser.add_argument("env_id", metavar="ENV_ID")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--set", dest="settings", type=_setting, action="append", default=[], metavar="KEY=VALUE")
    chosen = parser.parse_args(arguments)
    kwargs = dict(chosen.settings)
    seeds = range(chosen.first_seed, chosen.first_seed + chosen.episodes)
    results = [random_agent(chosen.env_id, seeds, **kwargs)]
    results += [constant_agent(chosen.env_id, name, seeds, **kwargs) for name in _make(chosen.env_id, kwargs).actions]
    print(f"{chosen.env_id}, {chosen.episodes} episodes from seed {chosen.first_seed}, {kwargs or 'default settings'}")
    print(f"{'agent':<12} {'success':>8} {'return':>8} {'turns':>7}")
    for result in results:
        print(f"{result.agent:<12} {result.success:>8.3f} {result.mean_return:>8.3f} {result.mean_turns:>7.1f}")


if __name__ == "__main__":
    main()
