"""Trial of user-written estimators and losses on a small random rollout before a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_agentrl.advantages import estimated
from lightning_agentrl.agents.update import CurrentScores
from lightning_agentrl.errors import first_line
from lightning_agentrl.errors.config_errors import OWN_PACKAGES
from lightning_agentrl.types import ModelInput, Rollout, Sample, Scores, Segment, SegmentKind, Turn

GROUPS, EPISODES, TURNS, TOKENS = 2, 2, 2, 3  # groups, episodes per group, turns per episode, tokens per reply


def try_own_parts(agent: Any) -> list[str]:
    """Call the user-written estimator and losses of an agent on a small random rollout; return their names.

    Args:
        agent: an ``Agent``.

    Raises:
        ValueError: an estimator or loss raised an error, or returned a shape other than [B, A]; the message names the
            estimator or loss.
    """
    advantage, loss = agent.advantage, agent if _is_own(agent) else getattr(agent, "loss", agent)
    parts: dict[str, tuple[object, Callable[[Rollout], Any]]] = {
        f"{type(advantage).__name__}.estimate": (advantage, lambda batch: estimated(advantage, batch)),
        f"the policy loss of {type(loss).__name__}": (loss, lambda batch: _policy_loss(agent, batch)),
        f"the value loss of {type(agent).__name__}": (agent, lambda batch: agent.value_loss(batch, _random(batch))),
    }
    tried = []
    for name, (owner, call) in parts.items():
        if not _is_own(owner) or (agent.critic is None and "value" in name):
            continue
        batch = made_up_rollout()
        try:
            found = call(batch)
        except Exception as error:
            why = f"{type(error).__name__}: {first_line(error)}"
            raise ValueError(f"{name} fails on a small rollout of random numbers: {why}") from error
        for x in found if isinstance(found, tuple) else (found,):
            shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            if shape != list(batch.action_mask.shape):
                raise ValueError(
                    f"{name} returned {shape} for a rollout of {list(batch.action_mask.shape)}; it must return a "
                    "number for each action token [B, A]"
                )
        tried.append(name)
    return tried


def made_up_rollout(seed: int = 0) -> Rollout:
    """Return a rollout of whole episodes in groups, with random rewards, scores, advantages and returns."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        samples = [_sample(env, index) for env in range(GROUPS * EPISODES) for index in range(TURNS)]
        rollout = Rollout.from_samples(samples)
        old, ref, values, entropy = (_random(rollout) for _ in range(4))
        scores = Scores(-old.abs(), -ref.abs(), values, entropy.abs(), torch.rand_like(values) * rollout.action_mask)
        zeros_B = torch.zeros(len(rollout))
        return rollout.union(
            scores=scores,
            shaped_rewards=rollout.rewards,
            bootstrap_values=zeros_B,
            greedy_scores=zeros_B,
            state_values=values,
            forked_end_values=zeros_B,
            advantages=_random(rollout),
            returns=_random(rollout),
        )


def _policy_loss(agent: Any, batch: Rollout) -> Tensor:
    logps = (-_random(batch).abs()).requires_grad_()
    if agent.needs.mini_batch_logps:
        batch = replace(batch, picked=_random(batch) > 0)
    loss: Tensor = agent.policy_loss(batch, CurrentScores(logps, _random(batch).abs()))
    return loss


def _is_own(part: object) -> bool:
    return type(part).__module__.split(".")[0] not in OWN_PACKAGES


def _random(batch: Rollout) -> Tensor:
    return torch.randn(batch.action_mask.shape) * batch.action_mask


def _sample(env: int, index: int) -> Sample:
    last = index + 1 == TURNS
    reward = float(last and env % EPISODES)
    ids = tuple(range(index, index + TOKENS))
    turn = Turn(
        env, 0, index, "", "", "", "", True, reward, reward, reward, last, False, None, None, False, 0, 0, 0.0, 0.0,
        group=env // EPISODES,
    )  # fmt: skip
    prompt = Segment(SegmentKind.PROMPT, ModelInput.of_ids((env, index)))
    return Sample((prompt, Segment(SegmentKind.ACTION, ModelInput.of_ids(ids), (-1.0,) * TOKENS)), (turn,))
