"""The numbers of the update: `policy/*`, `critic/loss`, `grad_norm/*`, `kl/coefficient`; how an iteration is logged.

A short real fit in float64; each optimizer step is computed again from its weights and its mini-batch, token by token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_agentrl.agents import PPOAgent
from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.losses import AdaptiveKL, KLCov, PPOClip, RatioRejection, TruncatedWeights
from lightning_agentrl.metrics.episodes import EpisodeResult
from lightning_agentrl.models.critic import SeparateCritic, SharedCritic
from lightning_agentrl.rollout import FullMemory, WindowMemory
from lightning_agentrl.types import Rollout, Sample
from tests.agents.harness import Misread, make_agent, make_data, make_trainer

# Settings under which no number is 0, or equal to another by chance
TEMPERATURE, ENTROPY_BONUS = 0.9, 0.1
CLIP_LOW, CLIP_HIGH, DUAL_CLIP = 0.05, 0.1, 1.2
VALUE_CLIP, FIRST_TOKEN_WEIGHT = 0.01, 3.0
KL_LOSS = 0.2
MAX_NORM = 0.01
KL_START, KL_TARGET, KL_HORIZON, KL_CLIP = 0.02, 0.001, 40, 0.2
TURNS = 16  # of an iteration

OF_STEPS = {
    "policy/loss",
    "policy/entropy",
    "policy/approx_kl",
    "policy/kl_loss",
    "policy/clip_fraction",
    "policy/dual_clip_fraction",
    "critic/loss",
    "grad_norm/actor",
    "grad_norm/critic",
    "variance_proxy/proxy1_signal_strength",
    "variance_proxy/proxy2_total_power",
    "variance_proxy/proxy3_pure_noise",
    "variance_proxy/proxy3_pure_noise_raw",
    "variance_proxy/token_total_power",
}
OF_TOKENS = {name for name in OF_STEPS if name.startswith(("policy/", "critic/"))}
OF_COEFFICIENT = {"kl/coefficient"}
OF_PICKS = {"policy/picked_fraction"}


@dataclass
class Step:
    """One optimizer step: what went in and what it told the logger."""

    rollout: Rollout
    weights: dict[str, Tensor]
    logged: dict[str, float] = field(default_factory=dict)


class Spy(RolloutCallback):
    """Keeps what passes through a fit."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.rollouts: list[Rollout] = []
        self.held_out: list[list[EpisodeResult]] = []
        self.logged: list[dict[str, float]] = []  # of each iteration

    def on_fit_start(self, trainer: L.Trainer, agent: Any) -> None:
        log_dict = agent.log_dict

        def log(numbers: dict[str, float], **how: Any) -> None:
            if "policy/loss" in numbers:
                self.steps[-1].logged = dict(numbers)
            log_dict(numbers, **how)

        agent.log_dict = log

    def on_train_start(self, trainer: L.Trainer, agent: Any) -> None:
        collector = agent.datamodule.collector
        play = collector.play_held_out

        def play_held_out(*arguments: Any) -> Any:
            results, watched = play(*arguments)
            self.held_out.append(results)
            return results, watched

        collector.play_held_out = play_held_out

    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        self.rollouts.append(rollout)

    def on_train_batch_start(self, trainer: L.Trainer, agent: Any, batch: Any, batch_idx: int) -> None:
        weights = {name: p.detach().clone() for name, p in agent.named_parameters()}
        self.steps.append(Step(batch.rollout, weights))

    def on_train_epoch_end(self, trainer: L.Trainer, agent: Any) -> None:
        self.logged.append({name: float(number) for name, number in trainer.callback_metrics.items()})


@dataclass
class Fit:
    agent: PPOAgent
    spy: Spy


# Growing samples are of different lengths, so their tensors have padding
CORRECTION = TruncatedWeights(cap=1.3, rejections=[RatioRejection("token", 0.6, 1.6)])
CASES = {
    "shared critic": (SharedCritic, WindowMemory, None),
    "critic of its own, growing samples": (SeparateCritic, FullMemory, None),
    "corrected": (SharedCritic, FullMemory, CORRECTION),
}


SLOW = ("shared critic", "corrected")


@pytest.fixture(
    scope="module", params=[pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES]
)
def fit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, exact_folder: Path) -> Fit:
    """Two iterations of two steps each, every step in several micro-batches."""
    critic, memory, correction = CASES[request.param]
    torch.manual_seed(0)
    agent = make_agent(
        exact_folder,
        critic(),
        policy_loss=PPOClip(CLIP_LOW, CLIP_HIGH, DUAL_CLIP),
        kl_reward=AdaptiveKL(KL_START, KL_TARGET, KL_HORIZON, KL_CLIP),
        entropy_bonus=ENTROPY_BONUS,
        value_clip=VALUE_CLIP,
        first_token_weight=FIRST_TOKEN_WEIGHT,
        temperature=TEMPERATURE,
        max_grad_norm_actor=MAX_NORM,
        max_grad_norm_critic=MAX_NORM,
        max_tokens_per_micro_batch=300,
        variance_proxy=True,
        kl_loss=KL_LOSS,
        correction=correction,
    )
    agent.__class__ = PPOAgent if correction is None else Misread
    spy = Spy()
    folder = tmp_path_factory.mktemp("fit")
    make_trainer(folder, 2, [spy], limit_val_batches=1.0).fit(agent, make_data(memory=memory()))
    return Fit(agent, spy)


def read(agent: PPOAgent, sample: Sample) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Of every reply token its id, the log-probs of all tokens at its place, and the value."""
    ids = torch.tensor([sample.ids])
    out = agent.actor.lm(ids, output_hidden_states=True)
    log_pi = (out.logits[0] / TEMPERATURE).log_softmax(-1)
    critic: Any = agent.critic
    hidden = out.hidden_states[-1] if critic.shares_trunk else critic.backbone.base_model(ids).last_hidden_state
    values = hidden[0] @ critic.head.linear.weight[0] + critic.head.linear.bias[0]
    for place in sample.action_positions:
        yield sample.ids[place], log_pi[place - 1], values[place - 1]


def computed(agent: PPOAgent, step: Step) -> dict[str, float]:
    """The numbers of a step, one token after the other."""
    with torch.no_grad():
        for name, parameter in agent.named_parameters():
            parameter.copy_(step.weights[name])
    agent.zero_grad()
    rollout: Any = step.rollout  # its scores, advantages and returns are there
    sums: dict[str, Any] = dict.fromkeys(OF_TOKENS, 0.0)
    tokens = rejected = 0
    powers, token_powers = [], []
    for row, sample in enumerate(rollout.samples):
        turn_before = None
        energies, advantages = [], []
        for column, (token, log_pi, value) in enumerate(read(agent, sample)):
            turn = int(rollout.turn_ids[row, column])
            first, turn_before = turn != turn_before, turn
            factor = 1.0 if rollout.weights is None else float(rollout.weights[row, column])
            if rollout.loss_mask is not None and not rollout.loss_mask[row, column]:
                rejected += 1
                continue
            old = float(rollout.scores.old_logps[row, column])
            ref = float(rollout.scores.ref_logps[row, column])
            advantage = float(rollout.advantages[row, column])
            old_value, target = float(rollout.scores.values[row, column]), float(rollout.returns[row, column])
            ratio = (log_pi[token] - old).exp()
            entropy = -(log_pi.exp() * log_pi).sum()
            loss = -min(advantage * ratio, advantage * ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH))
            if advantage < 0:
                loss = min(loss, torch.tensor(-advantage * DUAL_CLIP))
            distance = log_pi[token] - ref
            k3, k2 = (-distance).exp() + distance - 1, distance.square() / 2
            kl = ratio.detach() * (k3.detach() + k2 - k2.detach())  # the gradient is that of k2
            near = old_value + (value - old_value).clamp(-VALUE_CLIP, VALUE_CLIP)
            weight = FIRST_TOKEN_WEIGHT if first else 1.0

            tokens += 1
            energies.append(factor**2 * (1 - 2 * math.exp(old) + float(rollout.scores.sum_pi_squared[row, column])))
            advantages.append(advantage)
            sums["policy/loss"] += factor * loss - ENTROPY_BONUS * entropy + KL_LOSS * kl
            sums["policy/kl_loss"] += kl
            sums["policy/entropy"] += entropy
            sums["policy/approx_kl"] += old - log_pi[token]
            sums["policy/clip_fraction"] += (advantage > 0 and ratio > 1 + CLIP_HIGH) or (
                advantage < 0 and ratio < 1 - CLIP_LOW
            )
            sums["policy/dual_clip_fraction"] += advantage < 0 and ratio > DUAL_CLIP
            sums["critic/loss"] += weight * 0.5 * max((value - target) ** 2, (near - target) ** 2)
        if advantages:
            powers.append(sum(energies) * (sum(advantages) / len(advantages)) ** 2)
            token_powers.append(sum(w * a**2 for w, a in zip(energies, advantages, strict=True)))
    assert tokens + rejected == int(rollout.action_mask.sum())
    assert (rejected > 0) == (rollout.weights is not None)
    ((sums["policy/loss"] + sums["critic/loss"]) / tokens).backward()
    squares = {
        part: sum(float(p.grad.square().sum()) for p in getattr(agent, part).parameters() if p.grad is not None)
        for part in ("actor", "critic")
    }
    norms = {f"grad_norm/{part}": math.sqrt(square) for part, square in squares.items()}
    power, signal = sum(powers) / len(powers), squares["actor"]
    noise = (power - signal) / (len(powers) - 1)
    proxies = {
        "variance_proxy/proxy1_signal_strength": signal,
        "variance_proxy/proxy2_total_power": power,
        "variance_proxy/proxy3_pure_noise": max(noise, 0.0),
        "variance_proxy/proxy3_pure_noise_raw": noise,
        "variance_proxy/token_total_power": sum(token_powers) / len(token_powers),
    }
    return {name: float(torch.as_tensor(total).detach()) / tokens for name, total in sums.items()} | norms | proxies


def test_numbers_of_every_step_by_hand(fit):
    assert len(fit.spy.steps) == 4
    for step in fit.spy.steps:
        assert {name: step.logged[name] for name in OF_STEPS} == pytest.approx(computed(fit.agent, step), rel=1e-6)


def test_the_steps_above_have_something_to_tell(fit):
    """In the first step of an iteration the policy is the old one, in the second it has moved."""
    for step in fit.spy.steps[::2]:
        assert step.logged["policy/approx_kl"] == pytest.approx(0, abs=1e-12)
        assert step.logged["policy/clip_fraction"] == step.logged["policy/dual_clip_fraction"] == 0
    for step in fit.spy.steps[1::2]:
        assert abs(step.logged["policy/approx_kl"]) > 1e-4
        assert 0 < step.logged["policy/clip_fraction"] < 1
    assert all(step.logged["grad_norm/actor"] > MAX_NORM for step in fit.spy.steps)  # before clipping
    if fit.agent.correction is None:  # which leaves few tokens, none of them at the dual clip
        assert any(0 < step.logged["policy/dual_clip_fraction"] < 1 for step in fit.spy.steps[1::2])
        assert all(step.logged["grad_norm/critic"] > MAX_NORM for step in fit.spy.steps)


def test_an_iteration_is_the_mean_of_its_steps(fit):
    for iteration, logged in enumerate(fit.spy.logged):
        first, second = (step.logged for step in fit.spy.steps[2 * iteration : 2 * iteration + 2])
        for name in OF_STEPS:
            assert logged[name] == pytest.approx((first[name] + second[name]) / 2, rel=1e-6), name


def test_the_coefficient_is_the_one_that_shaped_the_rewards(fit):
    """An adaptive one moves by the KL that was seen, after the rollout that it was seen in."""
    first, second = fit.spy.logged
    error = min(max(first["kl/reference"] / KL_TARGET - 1, -KL_CLIP), KL_CLIP)
    assert first["kl/coefficient"] == pytest.approx(KL_START)
    assert second["kl/coefficient"] == pytest.approx(KL_START * (1 + error * TURNS / KL_HORIZON))
    assert second["kl/coefficient"] != first["kl/coefficient"]
    rollout, mask = fit.spy.rollouts[1], fit.spy.rollouts[1].action_mask
    scores = rollout.scores
    price = second["kl/coefficient"] * (scores.old_logps - scores.ref_logps)
    assert torch.allclose(rollout.shaped_rewards[mask], (rollout.rewards - price)[mask])
    assert second["kl/reference"] == pytest.approx(float((scores.old_logps - scores.ref_logps)[mask].mean()))


def test_a_rollout_is_logged_once_and_not_divided_by_the_steps(fit):
    solved: list[bool] = []
    for rollout, logged in zip(fit.spy.rollouts, fit.spy.logged, strict=True):
        ended = [turn for turn in rollout.turns if turn.done]
        solved += [turn.succeeded for turn in ended]
        assert len(rollout.turns) == TURNS
        assert logged["rollout/episodes"] == len(ended)
        assert logged["rollout/success"] == pytest.approx(sum(solved[-len(ended) :]) / len(ended))
        assert logged["rollout/reward_per_turn"] == pytest.approx(sum(turn.reward for turn in rollout.turns) / TURNS)
        assert logged["rollout/reply_tokens"] == pytest.approx(int(rollout.action_mask.sum()) / TURNS)
        assert logged["critic/value_mean"] == pytest.approx(float(rollout.scores.values[rollout.action_mask].mean()))
    assert 0 < sum(solved) < len(solved)


def test_held_out_episodes_are_those_of_this_validation(fit):
    """Not of the one before too."""
    assert len(fit.spy.held_out) == 2
    for results, logged in zip(fit.spy.held_out, fit.spy.logged, strict=True):
        turns = sum(result.turns for result in results)
        assert logged["val/episodes"] == len(results) == 8
        assert logged["val/success"] == sum(result.success for result in results) / 8
        assert logged["val/return"] == pytest.approx(sum(result.total_reward for result in results) / 8)
        assert logged["val/mean_turns"] == pytest.approx(turns / 8)
        assert logged["val/valid_action_ratio"] == pytest.approx(sum(result.valid_turns for result in results) / turns)


def test_the_share_of_picked_tokens_by_hand(tmp_path, exact_folder):
    spy = Spy()
    agent = make_agent(exact_folder, policy_loss=KLCov(share=0.1), max_tokens_per_micro_batch=300)
    make_trainer(tmp_path, 1, [spy]).fit(agent, make_data())
    for step in spy.steps:
        tokens = int(step.rollout.action_mask.sum())
        assert {name: step.logged[name] for name in OF_PICKS} == {
            "policy/picked_fraction": pytest.approx(max(1, tokens // 10) / tokens)
        }
