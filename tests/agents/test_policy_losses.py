"""Every loss and every correction in short real fits: what the agent computes for them, and that they train."""

from __future__ import annotations

import math
from itertools import pairwise

import lightning as L
import pytest
import torch

from lightning_agentrl.agents import KL, PPOAgent, scoring, update
from lightning_agentrl.agents.selection import token_noise
from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.losses import (
    GSPO,
    Bypass,
    ClipCov,
    DivergenceRejection,
    IcePop,
    KLCov,
    OffPolicyCorrection,
    PPOClip,
    RatioRejection,
    RejectOnly,
    TruncatedWeights,
)
from lightning_agentrl.models.critic import SeparateCritic
from tests.agents.harness import Misread, make_agent, make_data, make_trainer
from tests.agents.processes import assert_same, fit, metrics, read
from tests.losses.test_conformance import LOSSES, make


class Spy(L.Callback):
    """Keeps mini-batches, weights, gradients and what is logged of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.rollouts = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_fit_start(self, trainer, agent):
        log_dict = agent.log_dict

        def log(numbers, **how):
            if "guard/skipped" in numbers:  # of a step
                self.steps.append(dict(numbers))
            log_dict(numbers, **how)

        agent.log_dict = log
        self.keep(agent)

    def keep(self, agent):
        self.weights.append({n: p.detach().clone() for n, p in agent.actor.named_parameters()})

    def on_train_batch_start(self, trainer, agent, batch, batch_idx):
        self.rollouts.append(batch.rollout)

    def on_before_optimizer_step(self, trainer, agent, optimizer):
        self.gradients.append({n: p.grad.clone() for n, p in agent.named_parameters() if p.grad is not None})

    def on_train_batch_end(self, trainer, agent, outputs, batch, batch_idx):
        self.keep(agent)


def train(tmp_path, folder, agent_class=PPOAgent, data=None, precision="64-true", **kwargs):
    spy = Spy()
    agent = make_agent(folder, **{"max_grad_norm_actor": 1e9, **kwargs})
    agent.__class__ = agent_class
    make_trainer(tmp_path, 1, [spy], precision=precision).fit(agent, make_data(**(data or {})))
    return spy


def assert_trained(spy):
    assert len(spy.steps) == len(spy.gradients) > 0
    for step in spy.steps:
        unclear = [name for name, number in step.items() if not math.isfinite(number)]
        assert set(unclear) <= {"critic/explained_variance"}  # all returns may be equal
        assert "policy/loss" in step
    for before, after in pairwise(spy.weights):
        assert all(weight.isfinite().all() for weight in after.values())
        assert any((after[name] - weight).abs().max() > 1e-6 for name, weight in before.items())


KINDS = ("PPOClip", "GSPO", "ClipCov")  # by tokens, by rows, with picked tokens
EVERY = [pytest.param(cls, marks=() if cls.__name__ in KINDS else pytest.mark.slow) for cls in LOSSES]


@pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.__name__)
def test_every_loss_trains(tmp_path, tiny_folder, cls):
    assert_trained(train(tmp_path, tiny_folder, policy_loss=make(cls)))


@pytest.mark.parametrize(
    "correction",
    [
        TruncatedWeights(rejections=[DivergenceRejection(0.16, "k2", "mean")]),
        pytest.param(IcePop("sequence", normalise=True), marks=pytest.mark.slow),
        pytest.param(RejectOnly([RatioRejection("token", 0.6, 1.6)]), marks=pytest.mark.slow),
        pytest.param(Bypass(), marks=pytest.mark.slow),
        Bypass([RatioRejection("token", 0.6, 1.6)]),
    ],
    ids=lambda correction: type(correction).__name__,
)
def test_every_correction_trains(tmp_path, tiny_folder, correction):
    spy = train(tmp_path, tiny_folder, Misread, correction=correction)
    assert_trained(spy)
    if correction.rejections:
        assert 0 < spy.steps[0]["mismatch/rejected"] < 1


# Aggregation


def test_a_loss_names_its_aggregation_and_the_agent_may_choose_another(tiny_folder):
    folder = str(tiny_folder)
    assert PPOAgent(folder).aggregation == "token-mean"
    assert PPOAgent(folder, policy_loss=GSPO()).aggregation == "seq-mean-token-mean"
    assert PPOAgent(folder, policy_loss=GSPO(aggregation="token-sum")).aggregation == "token-sum"
    with pytest.raises(ValueError, match="norm_tokens must be set"):
        PPOClip(aggregation="seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match=r"kl\.loss must not be negative, got -1"):
        PPOAgent(folder, kl=KL(loss=-1.0))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"policy_loss": GSPO()}, marks=pytest.mark.slow),
        pytest.param(
            {"policy_loss": ClipCov(0.1, 0.0, 100.0, aggregation="seq-mean-token-sum")}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"policy_loss": PPOClip(aggregation="seq-mean-token-sum-norm", norm_tokens=4), "kl_loss": 0.1},
            marks=pytest.mark.slow,
        ),
        {"correction": TruncatedWeights("sequence", rejections=[RatioRejection("token", 0.6, 1.6)])},
    ],
    ids=["GSPO", "ClipCov", "norm", "correction"],
)
def test_gradient_does_not_depend_on_the_split(tmp_path, exact_folder, settings):
    whole, cut = (
        train(tmp_path, exact_folder, Misread, max_tokens_per_micro_batch=tokens, **settings) for tokens in (10**6, 1)
    )
    for one, other in zip(whole.gradients, cut.gradients, strict=True):
        assert any(gradient.abs().max() > 1e-6 for gradient in one.values())
        for name, gradient in one.items():
            assert torch.allclose(gradient, other[name], rtol=0, atol=1e-9), name


# Picked tokens


def counted_passes(monkeypatch):
    """Counts the passes of the policy without gradients."""
    made = []
    real = scoring.score_policy
    for module in (scoring, update):
        monkeypatch.setattr(module, "score_policy", lambda *a: made.append(len(a[1])) or real(*a))
    return made


def test_tokens_are_picked_by_current_log_probs_of_the_whole_mini_batch(tmp_path, exact_folder, monkeypatch):
    """Those of the rollout in its first step, and one more pass over the mini-batch in the second."""
    made, seen = counted_passes(monkeypatch), []

    class Watched(KLCov):
        def pick(self, logps, old_logps, advantages, mask, noise, gather):
            seen.append((logps, old_logps, noise))
            return super().pick(logps, old_logps, advantages, mask, noise, gather)

    spy = train(tmp_path, exact_folder, policy_loss=Watched(0.1), kl_reward=0.0, max_tokens_per_micro_batch=300)
    assert made == [16, 8]
    (first, old, _), (second, old_of_second, noise) = seen
    assert torch.equal(first, old)
    assert (second - old_of_second).abs().max() > 1e-4
    gap = (old_of_second - second).double()[spy.rollouts[1].action_mask].mean()
    assert spy.steps[1]["policy/approx_kl"] == pytest.approx(float(gap), abs=1e-9)
    assert torch.equal(noise, token_noise(spy.rollouts[1], derive_seed(3, 1)))


def test_weights_that_were_cast_for_the_pass_are_trained(tmp_path, tiny_folder):
    """Autocast keeps casts of weights; those made without gradients would leave the weights out of the step."""
    spy = train(tmp_path, tiny_folder, policy_loss=ClipCov(0.1, 0.0, 100.0), precision="bf16-mixed")
    first, second = ({n for n, g in gradients.items() if g.any()} for gradients in spy.gradients)
    assert first == second
    assert any("q_proj" in name for name in second)


def test_noise_belongs_to_a_token_wherever_its_row_lies(tmp_path, tiny_folder):
    rollout = train(tmp_path, tiny_folder).rollouts[0]
    noise = token_noise(rollout, 5)
    assert not noise[~rollout.action_mask].any()
    assert len(noise[rollout.action_mask].unique()) == int(rollout.action_mask.sum())
    rows = [5, 0, 3]
    other = token_noise(rollout.select(rows), 5)
    assert torch.equal(other, noise[rows, : other.shape[1]])
    assert not torch.equal(token_noise(rollout, 6), noise)


# Correction


@pytest.mark.slow
def test_a_bypass_needs_no_pass_of_the_trainer(tmp_path, exact_folder, monkeypatch):
    made = counted_passes(monkeypatch)
    settings = {"critic": SeparateCritic(), "kl_reward": 0.0}
    train(tmp_path, exact_folder, correction=Bypass(), **settings)
    assert made == []
    train(tmp_path, exact_folder, correction=Bypass(), policy_loss=ClipCov(), **settings)
    assert made == [16, 8]
    made.clear()
    train(tmp_path, exact_folder, correction=Bypass([RatioRejection()]), **settings)
    assert made == [16]
    train(tmp_path, exact_folder, correction=TruncatedWeights(), data={"mini_batch_turns": 16}, **settings)
    assert made == [16, 16]  # also where one step per rollout would need none


def test_in_a_bypass_the_ratio_is_that_to_the_engine(tmp_path, exact_folder):
    spy = train(tmp_path, exact_folder, Misread, correction=Bypass(), policy_loss=PPOClip())
    gaps = [(r.rollout_logps - r.scores.old_logps)[r.action_mask] for r in spy.rollouts]
    assert spy.steps[0]["policy/approx_kl"] == pytest.approx(float(gaps[0].mean()), abs=1e-6)
    assert spy.steps[0]["policy/clip_fraction"] > 0.1
    gap = float(torch.cat(gaps).abs().mean())
    assert spy.steps[0]["mismatch/logp_gap_mean"] == pytest.approx(gap, abs=1e-6)  # the trainer's, not those replaced
    assert all(rollout.weights is None for rollout in spy.rollouts)


class RejectAll(OffPolicyCorrection):
    def __call__(self, old_logps, rollout_logps, mask, reduce=None):
        return None, torch.zeros_like(mask)

    def weights(self, log_ratio, mask, keep, reduce=None):
        return None


@pytest.mark.parametrize("aggregation", ["token-mean", pytest.param("seq-mean-token-mean", marks=pytest.mark.slow)])
def test_where_everything_is_rejected_nothing_is_learned_and_nothing_breaks(tmp_path, tiny_folder, aggregation):
    spy = train(tmp_path, tiny_folder, correction=RejectAll(), policy_loss=PPOClip(aggregation=aggregation))
    assert spy.steps[0]["mismatch/rejected"] == 1.0
    assert spy.steps[0]["mismatch/ess"] == 0.0
    for step, gradients in zip(spy.steps, spy.gradients, strict=True):
        assert not {"grad_norm/actor", "policy/loss"} & step.keys()
        assert not gradients
    for before, after in pairwise(spy.weights):
        assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_weights_of_a_rollout_are_made_over_all_of_it(tmp_path, exact_folder):
    spy = train(tmp_path, exact_folder, Misread, correction=TruncatedWeights(cap=1.5, normalise=True))
    masks = [rollout.action_mask for rollout in spy.rollouts]
    weights = torch.cat([rollout.weights[mask] for rollout, mask in zip(spy.rollouts, masks, strict=True)])
    assert float(weights.double().mean()) == pytest.approx(1.0, abs=1e-6)
    assert all(abs(float(r.weights[m].mean()) - 1) > 1e-4 for r, m in zip(spy.rollouts, masks, strict=True))
    assert spy.steps[0]["mismatch/weight"] == pytest.approx(1.0, abs=1e-6)
    assert not any(rollout.weights[~mask].any() for rollout, mask in zip(spy.rollouts, masks, strict=True))


@pytest.mark.long
def test_two_processes_give_the_weights_of_one(tmp_path, exact_folder):
    """Picked tokens, normalised weights and means over rows are those of both processes together."""
    clip_cov = "{class_path: ClipCov, init_args: {share: 0.1, cov_low: 0.0, cov_high: 100.0}}"
    settings = [
        *("--model.init_args.policy_loss", clip_cov),
        *("--model.init_args.policy_loss.init_args.aggregation", "seq-mean-token-mean"),
        *("--model.init_args.correction", "{class_path: TruncatedWeights, init_args: {normalise: true}}"),
    ]
    one = fit(tmp_path / "one", exact_folder, "SharedCritic", 1, *settings)
    two = fit(tmp_path / "two", exact_folder, "SharedCritic", 2, *settings)
    assert_same(read(one), read(two))
    logged = [metrics(tmp_path / name) for name in ("one", "two")]
    for a, b in zip(*logged, strict=True):
        assert a == pytest.approx(b, rel=1e-6, abs=1e-8, nan_ok=True)
    assert any("policy/picked_fraction" in row for row in logged[0])
