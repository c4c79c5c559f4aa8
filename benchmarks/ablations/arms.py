"""What is compared: a base run, and six runs that differ from it in one choice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

BASE = "base"
BASE_CONFIG = Path(__file__).with_name("base.yaml")
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Comparison:
    """One arm against the base run."""

    arm: str
    title: str
    base_is: str
    arm_is: str
    overrides: Mapping[str, Any]  # dotted keys of the command line
    expected: Literal["lower", "higher"]  # held-out success of the arm, by what is published
    why: str


COMPARISONS = (
    Comparison(
        arm="single_discount",
        title="Dual discount against single discount",
        base_is="0.95 from turn to turn, 1 inside a turn",
        arm_is="0.95 from token to token",
        overrides={
            "model.init_args.advantage.init_args.gamma_token": 0.95,
            "model.init_args.advantage.init_args.lam_token": 0.95,
        },
        expected="lower",
        why="The published recipe discounts by turns, so that a reward is as near after a long reply as after a short "
        "one. Replies here are two or three tokens, so the horizon of the arm is shorter by that factor only; with "
        "thoughts of hundreds of tokens the same change would leave nothing of a reward.",
    ),
    Comparison(
        arm="no_warmup",
        title="Critic warm-up against none",
        base_is="two of the iterations train the critic alone",
        arm_is="actor and critic learn from the first iteration",
        overrides={"trainer.callbacks": [{"class_path": "RunSummary"}]},
        expected="lower",
        why="The published recipe trains the critic for 100 to 400 steps before 300 iterations of the actor, since the "
        "first advantages of an untrained critic are noise. Base and arm play the same number of turns, so the arm has "
        "two iterations more of the actor, which are half as many again: this asks whether warm-up is worth its turns "
        "in a run this short, not whether the same iterations go better after it.",
    ),
    Comparison(
        arm="no_kl",
        title="KL in the reward against none",
        base_is="weight 0.001",
        arm_is="weight 1e-9",
        # At 0 there would be no reference, and so no drift to report; 1e-9 is below the rounding of a reward.
        overrides={"model.init_args.kl.reward": 1e-9},
        expected="lower",
        why="Published with the recipe: without KL the policy drifts and ends in poor solutions. That was said of "
        "hundreds of iterations. The arm's weight is 1e-9, which changes nothing but keeps the drift measured.",
    ),
    Comparison(
        arm="first_token_1",
        title="First-token weight 3 against 1",
        base_is="weight 3",
        arm_is="weight 1",
        overrides={"model.init_args.first_token_weight": 1.0},
        expected="lower",
        why="The value of a turn's first token bootstraps the turn before, which is why the recipe weighs it three "
        "times in the value loss. It is one of hundreds of tokens there and one of two or three here.",
    ),
    Comparison(
        arm="separate_critic",
        title="Shared against separate critic",
        base_is="a value head on the actor's trunk, learning rate 3e-4",
        arm_is="a second model with a value head, learning rate 1e-4",
        # All of a second model learns at lr_critic, which would be much for a trunk at the rate of the head alone.
        overrides={
            "model.init_args.critic": {"class_path": "SeparateCritic"},
            "model.init_args.optim.lr_critic": 1e-4,
        },
        expected="higher",
        why="The recipe has a separate critic: two losses do not pull at one trunk, and the warm-up can train all of "
        "it, where a shared critic warms up its head alone. It costs a second model. Its learning rate was set, not "
        "searched.",
    ),
    Comparison(
        arm="fewer_envs",
        title="More environments against more turns of each",
        base_is="32 environments, 4 turns of each",
        arm_is="8 environments, 16 turns of each",
        overrides={"data.init_args.num_envs": 8, "data.init_args.turns_per_env": 16},
        expected="higher",
        why="Published: more turns of fewer environments give a better result and fewer turns per second. With 16 "
        "turns a rollout holds whole episodes (12 turns at most) and bootstraps less; with 32 environments it has more "
        "levels.",
    ),
)
ARMS: tuple[str, ...] = (BASE, *(comparison.arm for comparison in COMPARISONS))


def overrides_of(arm: str) -> dict[str, Any]:
    return next((dict(comparison.overrides) for comparison in COMPARISONS if comparison.arm == arm), {})


def as_arguments(overrides: Mapping[str, Any]) -> list[str]:
    """As options of the command line, which reads values as YAML."""
    return [f"--{key}={json.dumps(value)}" for key, value in overrides.items()]


def fingerprints() -> dict[str, str]:
    """Of all settings of each arm; a record with another one is out of date. Comments and order do not count."""
    base = yaml.safe_load(BASE_CONFIG.read_text())
    settings = {arm: json.dumps([base, overrides_of(arm)], sort_keys=True) for arm in ARMS}
    return {arm: hashlib.sha256(text.encode()).hexdigest()[:16] for arm, text in settings.items()}
