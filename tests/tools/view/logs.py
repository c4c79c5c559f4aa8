"""Turn logs of made-up runs, in the format of the callback TurnLog."""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

Turn = dict[str, Any]

COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")
THINGS = ("ball", "box", "key", "door", "wall", "goal")
ACTIONS = ("go forward", "turn left", "turn right", "pick up", "drop", "toggle")
WORDS = tuple(
    "".join(p) for p in zip(*[iter(random.Random(0).choices("abcdefghiklmnoprstuvw", k=5 * 900))] * 5, strict=True)
)
SYSTEM = "You are an agent in a room. Reply with THINK: and your thought, then ACTION: and one of " + ", ".join(ACTIONS)


def make_turn(reply: str = "THINK: the ball is ahead.\nACTION: go forward<|im_end|>", **changes: Any) -> Turn:
    """One valid turn; ``changes`` replace what is made here."""
    tokens = re.findall(r"<\|\w+\|>|\n|[ ]?\w+|[^\w\n]", reply)
    ids = [zlib.crc32(token.encode()) % 50_000 for token in tokens]
    thought = next((i for i, token in enumerate(tokens) if token == "ACTION"), 0)
    n = len(tokens)
    turn = {
        "iteration": 1,
        "phase": "train",
        "rank": 0,
        "env": 0,
        "episode": 0,
        "turn": 0,
        "policy_version": 0,
        "continues": False,
        "prompt_ids": list(range(7)),
        "prompt": "<|im_start|>user\nwhat now?<|im_end|>\n",
        "reply_ids": ids,
        "reply": reply.removesuffix("<|im_end|>"),
        "tokens": tokens,
        "thought_tokens": thought,
        "observation": "a red ball is ahead",
        "thought": "the ball is ahead.",
        "parsed_action": "go forward",
        "action": "go forward",
        "valid": True,
        "reward": 0.0,
        "env_reward": 0.0,
        "episode_return": 0.0,
        "terminated": False,
        "truncated": False,
        "stop": None,
        "success": None,
        "history_cuts": 0,
        "hit_token_cap": False,
        "env_seconds": 0.0123,
        "engine_seconds": 0.456,
        "env_errors": [],
        "metrics": {},
        "rollout_logps": [-0.5] * n,
        "old_logps": [-0.5] * n,
        "ref_logps": [-0.75] * n,
        "values": [0.25] * n,
        "entropy": [1.5] * n,
        "advantages": [0.125] * n,
        "returns": [0.375] * n,
        "image": None,
    }
    return turn | changes


def write_log(run: Path, turns: Sequence[Turn], per_file: int = 10_000, rank: int = 0) -> list[Path]:
    """Write turns as the rotating files of one rank below ``run/turns``."""
    folder = run / "turns"
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, start in enumerate(range(0, len(turns), per_file)):
        path = folder / f"rank{rank}-{number:06d}.jsonl"
        path.write_text("".join(json.dumps(turn) + "\n" for turn in turns[start : start + per_file]))
        paths.append(path)
    return paths


def random_turns(count: int, seed: int = 0, envs: int = 16, turns_per_env: int = 8, limit: int = 12) -> list[Turn]:
    """At least ``count`` turns of a run that gets better: varied texts, episodes across iterations, several ends."""
    rng = random.Random(seed)
    episodes = [_Episode(env, 0) for env in range(envs)]
    turns: list[Turn] = []
    iteration = 0
    total = -(-count // (envs * turns_per_env))
    while len(turns) < count:
        iteration += 1
        for env in range(envs):
            for _ in range(turns_per_env):
                turns.append(episodes[env].play(rng, iteration, iteration / total, limit))
                if turns[-1]["stop"]:
                    episodes[env] = _Episode(env, episodes[env].number + 1)
    return turns


class _Episode:
    """Plays made-up turns."""

    def __init__(self, env: int, number: int) -> None:
        self.env, self.number, self.turn, self.total = env, number, 0, 0.0
        self.history: list[str] = []

    def play(self, rng: random.Random, iteration: int, skill: float, limit: int) -> Turn:
        seen = [f"a {rng.choice(COLOURS)} {rng.choice(THINGS)} is {rng.randint(1, 9)} steps {rng.choice(WORDS)}"]
        seen += [f"{rng.choice(WORDS)} {rng.choice(WORDS)} {rng.randint(1, 99)}" for _ in range(6)]
        observation = f"Mission: go to the {rng.choice(COLOURS)} {rng.choice(THINGS)}. You see " + ", ".join(seen) + "."
        action, valid = rng.choice(ACTIONS), rng.random() < 0.75 + 0.22 * skill
        idea = "the mission is " + " ".join(rng.choice(WORDS) for _ in range(rng.randint(12, 26)))
        reply = f"THINK: {idea}.\nACTION: {action if valid else rng.choice(WORDS)}<|im_end|>"
        won = self.turn >= 2 and rng.random() < 0.05 + 0.3 * skill
        lost = not won and not valid and rng.random() < 0.15
        over = not won and not lost and self.turn + 1 == limit
        self.total += 1.0 if won else 0.0
        prompt = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
        prompt += "".join(self.history[-2:]) + f"<|im_start|>user\n{observation}<|im_end|>\n<|im_start|>assistant\n"
        self.history.append(f"<|im_start|>user\n{observation}<|im_end|>\n<|im_start|>assistant\n{reply}\n")
        turn = make_turn(
            reply,
            iteration=iteration,
            phase="critic_warmup" if iteration <= 2 else "train",
            env=self.env,
            episode=self.number,
            turn=self.turn,
            policy_version=2 * (iteration - 1),
            prompt=prompt,
            prompt_ids=list(range(len(prompt) // 4)),
            observation=observation,
            thought=idea,
            parsed_action=action if valid else None,
            action=action if valid else "go forward",
            valid=valid,
            reward=(1.0 if won else 0.0) - (0.0 if valid else 0.1),
            env_reward=1.0 if won else 0.0,
            episode_return=self.total,
            terminated=won,
            truncated=lost or over,
            stop="env_done" if won else "invalid_action" if lost else "max_turns" if over else None,
            success=won if won or over else None,
            hit_token_cap=rng.random() < 0.04,
            env_seconds=rng.random() / 50,
            engine_seconds=rng.random(),
            metrics={"progression": round(self.turn / limit, 3)},
        )
        self.turn += 1
        return turn | _numbers(rng, len(turn["tokens"]), skill)


def _numbers(rng: random.Random, n: int, skill: float) -> Turn:
    sampled = [-rng.expovariate(1.5) for _ in range(n)]
    old = [x + rng.gauss(0, 0.004) for x in sampled]
    credit, value = rng.gauss(0, 0.5), rng.random() * skill
    values = [value + rng.gauss(0, 0.05) for _ in range(n)]
    advantages = [credit + rng.gauss(0, 0.2) for _ in range(n)]
    return {
        "rollout_logps": sampled,
        "old_logps": old,
        "ref_logps": [x - rng.gauss(0.08, 0.3) * skill for x in old],
        "values": values,
        "entropy": [rng.expovariate(1.2) for _ in range(n)],
        "advantages": advantages,
        "returns": [a + v for a, v in zip(advantages, values, strict=True)],
    }


def write_events(folder: Path, iterations: int, names: Iterable[str], seed: int = 0) -> None:
    """TensorBoard curves as Lightning writes them: two optimizer steps per iteration, ``epoch`` from 0."""
    rng = random.Random(seed)
    with SummaryWriter(str(folder)) as writer:
        for name in names:
            x = rng.random()
            for epoch in range(iterations):
                x += rng.gauss(0.02, 0.1)
                writer.add_scalar(name, x, 2 * epoch + 1)
        for epoch in range(iterations):
            writer.add_scalar("epoch", epoch, 2 * epoch + 1)


def write_run(run: Path, turns: Sequence[Turn], iterations: int | None = None) -> Path:
    """A run folder as a finished training leaves it."""
    version = run / "lightning_logs" / "version_0"
    write_log(version, turns, per_file=1000)
    names = (
        *("rollout/success", "rollout/return", "rollout/reward_per_turn", "rollout/valid_action_ratio"),
        *("rollout/reply_tokens", "rollout/entropy", "val/success", "kl/reference", "kl/thought", "kl/action"),
        *("policy/entropy", "policy/approx_kl", "policy/clip_fraction", "critic/explained_variance", "critic/loss"),
        *("mismatch/logp_gap_mean", "grad_norm/actor", "time/collect_seconds", "time/update_seconds"),
    )
    write_events(version, iterations or turns[-1]["iteration"], names)
    (version / "config.yaml").write_text("seed_everything: 0\nmodel:\n  class_path: PPOAgent\n")
    facts = {
        "started": "2026-01-02T03:04:05+00:00",
        "began": "2026-01-02T03:04:02+00:00",
        "model": "demo",
        "seed": 0,
        "versions": {"torch": "2.9.0", "lightning": "2.6.6"},
        "devices": ["cpu"],
    }
    (version / "run.json").write_text(json.dumps(facts))
    before = {"success": 0.3203, "success_low": 0.2457, "success_high": 0.4054, "episodes": 128, "mean_turns": 10.4}
    after = {"success": 0.9062, "success_low": 0.8433, "success_high": 0.9456, "episodes": 128, "mean_turns": 5.9}
    summary = {"version": "lightning_logs/version_0", "seed": 0, "before": before, "after": after, "minutes": 7.59}
    for folder in (run, version):  # the copy names the version
        (folder / "summary.json").write_text(json.dumps(summary))
    return run
