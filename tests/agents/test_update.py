"""The update: what one optimizer step is made of."""

from __future__ import annotations

import lightning as L
import pytest
import torch

from lightning_agentrl.agents import Needs, PPOAgent, scoring, update
from lightning_agentrl.agents.scoring import action_rows, bootstrap_rows
from lightning_agentrl.agents.update import accumulate_gradients
from lightning_agentrl.models import language_model
from lightning_agentrl.models.critic import SeparateCritic, SharedCritic
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.packing import pack, plan_micro_batches
from lightning_agentrl.rollout import FullMemory
from tests.agents.harness import grouped, make_agent, make_data, make_trainer
from tests.host_reads import waits


class Spy(L.Callback):
    """Keeps what passes: gradients before clipping is impossible to see from outside, so clipping is set far away."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.rollouts = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_train_batch_start(self, trainer, agent, batch, batch_idx):
        self.rollouts.append(batch.rollout)
        self.weights.append({n: p.detach().clone() for n, p in agent.named_parameters()})

    def on_before_optimizer_step(self, trainer, agent, optimizer):
        self.gradients.append({n: p.grad.clone() for n, p in agent.named_parameters() if p.grad is not None})


def gradients(tmp_path, folder, critic, tokens, memory=None, **kwargs):
    spy = Spy()
    agent = make_agent(
        folder, critic, max_tokens_per_micro_batch=tokens, max_grad_norm_actor=1e9, max_grad_norm_critic=1e9, **kwargs
    )
    data = make_data(**({"memory": memory} if memory else {}))
    make_trainer(tmp_path, 1, [spy]).fit(agent, data)
    return spy


@pytest.fixture(scope="module")
def shared(tmp_path_factory, exact_folder):
    """With a shared critic, in micro-batches that hold a whole mini-batch."""
    return gradients(tmp_path_factory.mktemp("shared"), exact_folder, SharedCritic(), 10**6)


@pytest.mark.parametrize("critic", [SharedCritic, pytest.param(SeparateCritic, marks=pytest.mark.slow)])
def test_gradient_does_not_depend_on_the_split(shared, tmp_path, exact_folder, critic):
    whole = shared if critic is SharedCritic else gradients(tmp_path, exact_folder, critic(), 10**6)
    cut = gradients(tmp_path, exact_folder, critic(), 1)  # every row by itself
    some = gradients(tmp_path, exact_folder, critic(), 400)
    assert whole.gradients[0].keys() == cut.gradients[0].keys()
    assert any(g.abs().max() > 1e-6 for n, g in whole.gradients[0].items() if n.startswith("actor"))
    for other in (cut, some):
        for name, gradient in whole.gradients[0].items():
            assert torch.allclose(gradient, other.gradients[0][name], rtol=0, atol=1e-10), name


@pytest.mark.slow
def test_recomputed_logits_give_the_gradients_of_kept_ones(tmp_path, exact_folder, monkeypatch):
    monkeypatch.setattr(language_model, "LOGITS_PER_CHUNK", 4)
    heads = []
    real = language_model._head_scores
    monkeypatch.setattr(language_model, "_head_scores", lambda *a: heads.append(torch.is_grad_enabled()) or real(*a))
    recomputed = gradients(tmp_path, exact_folder, SharedCritic(), 10**6)
    twice, heads[:] = sum(heads), []
    kept = gradients(tmp_path, exact_folder, SharedCritic(), 10**6, recompute_logits=False)
    assert twice == 2 * sum(heads) > 4
    for name, gradient in kept.gradients[0].items():
        assert torch.allclose(gradient, recomputed.gradients[0][name], rtol=0, atol=1e-10), name


def test_scores_are_those_of_each_sample_alone(tmp_path, exact_folder):
    spy = Spy()
    agent = make_agent(exact_folder, SharedCritic(), variance_proxy=True)
    torch.manual_seed(1)
    agent.configure_model()
    agent.critic.head.linear.weight.data.normal_()
    initial = {n: p.detach().double().clone() for n, p in agent.named_parameters()}
    make_trainer(tmp_path, 1, [spy]).fit(agent, make_data())
    with torch.no_grad():  # back to the weights that scored
        for name, parameter in agent.named_parameters():
            parameter.copy_(initial[name])
    rollout = spy.rollouts[0]
    agent.eval()
    for i, (sample, row) in enumerate(zip(rollout.samples, action_rows(rollout), strict=True)):
        with torch.no_grad():
            out = agent.actor.lm(torch.tensor([sample.ids]), output_hidden_states=True)
        log_pi = out.logits[0].log_softmax(-1)
        values = agent.critic.head(out.hidden_states[-1][0])
        for column, position in enumerate(sample.action_positions):
            assert row.logit_positions[column] == position - 1
            expected = log_pi[position - 1, sample.ids[position]]
            assert rollout.scores.old_logps[i, column].item() == pytest.approx(expected.item(), abs=1e-9)
            assert rollout.rollout_logps[i, column].item() == pytest.approx(expected.item(), abs=1e-5)
            entropy = -(log_pi[position - 1].exp() * log_pi[position - 1]).sum()
            assert rollout.scores.entropy[i, column].item() == pytest.approx(entropy.item(), abs=1e-9)
            squares = log_pi[position - 1].exp().square().sum()
            assert rollout.scores.sum_pi_squared[i, column].item() == pytest.approx(squares.item(), abs=1e-9)
            assert rollout.scores.values[i, column].item() == pytest.approx(values[position - 1].item(), abs=1e-9)
    for i, row in bootstrap_rows(rollout).items():
        with torch.no_grad():
            hidden = agent.actor.lm(torch.tensor([row.ids]), output_hidden_states=True).hidden_states[-1][0, -1:]
        expected = agent.critic.head(hidden).item()
        assert rollout.bootstrap_values[i].item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.slow
def test_squared_probabilities_are_summed_only_where_something_needs_them(tmp_path, exact_folder):
    """A single step per iteration needs no scoring pass otherwise."""
    for wanted in (False, True):
        for turns in (8, 16):
            spy = Spy()
            agent = make_agent(exact_folder, SeparateCritic(), kl_reward=0.0, variance_proxy=wanted)
            make_trainer(tmp_path, 1, [spy]).fit(agent, make_data(mini_batch_turns=turns))
            assert agent.needs.sum_pi_squared is wanted
            scores = spy.rollouts[0].scores
            assert (scores.sum_pi_squared is not None) is wanted
            assert (scores.old_logps is not None) is (wanted or turns == 8)


def test_terminated_turns_have_no_bootstrap_and_cut_turns_have_one(tmp_path, tiny_folder):
    spy = Spy()
    make_trainer(tmp_path, 2, [spy]).fit(make_agent(tiny_folder), make_data())
    kinds = set()
    for rollout in spy.rollouts:
        for sample in rollout.samples:
            turn = sample.turns[-1]
            kinds.add((turn.terminated, turn.truncated))
            assert (turn.bootstrap is None) or not turn.terminated
            assert not turn.truncated or turn.bootstrap is not None
    assert {(False, True), (False, False)} <= kinds


@pytest.mark.slow
def test_full_memory_trains_growing_samples(tmp_path, exact_folder):
    spy = gradients(tmp_path, exact_folder, SharedCritic(), 10**6, FullMemory())
    cut = gradients(tmp_path, exact_folder, SharedCritic(), 1, FullMemory())
    assert any(len(sample.turns) > 1 for rollout in spy.rollouts for sample in rollout.samples)
    for name, gradient in spy.gradients[0].items():
        assert torch.allclose(gradient, cut.gradients[0][name], rtol=0, atol=1e-10), name


@pytest.mark.slow
def test_collect_comes_strictly_after_the_update(tmp_path, tiny_folder):
    stages: list[str] = []
    agent = make_agent(tiny_folder)
    agent.clock.listeners.append(lambda stage, done, total: stages.append(stage) if stages[-1:] != [stage] else None)
    make_trainer(tmp_path, 3, []).fit(agent, make_data())
    assert stages == ["collect", "score", "log", "update"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("critic", [SharedCritic, pytest.param(SeparateCritic, marks=pytest.mark.slow)])
def test_every_stage_says_how_far_it_is(tmp_path, tiny_folder, critic):
    """Steps up to its total: turns collected, rows scored, rows of all mini-batches trained on."""
    reported: dict[str, list[tuple[int, int]]] = {}
    agent = make_agent(tiny_folder, critic=critic(), max_tokens_per_micro_batch=100)
    agent.clock.listeners.append(lambda stage, done, total: reported.setdefault(stage, []).append((done, total)))
    make_trainer(tmp_path, 1, []).fit(agent, make_data())
    assert reported["collect"] == [(done, 16) for done in range(17)]
    for stage in ("score", "update"):
        done, totals = zip(*reported[stage], strict=True)
        assert list(done) == sorted(done)
        assert len(reported[stage]) > 3
        assert done[0] == 0
        assert done[-1] == totals[-1]
    assert reported["update"][-1] == (16, 16)


@pytest.mark.slow
def test_old_policy_is_the_sampling_policy_in_the_first_mini_batch(tmp_path, tiny_folder):
    """Ratio 1: the policy version of every turn is the number of optimizer steps before the rollout."""
    spy = Spy()
    make_trainer(tmp_path, 3, [spy]).fit(make_agent(tiny_folder), make_data())
    for k, rollout in enumerate(spy.rollouts):
        assert {turn.policy_version for turn in rollout.turns} == {k // 2 * 2}


def test_groups_are_clipped_apart(tmp_path, tiny_folder):
    spy = Spy()
    agent = make_agent(tiny_folder, max_grad_norm_actor=0.01, max_grad_norm_critic=0.5)
    make_trainer(tmp_path, 1, [spy]).fit(agent, make_data())

    def norm(prefix: str) -> float:
        return float(torch.stack([g.norm() for n, g in spy.gradients[0].items() if n.startswith(prefix)]).norm())

    assert norm("actor") == pytest.approx(0.01, rel=1e-3)
    assert norm("critic") <= 0.5 + 1e-6
    assert norm("critic") > 0.01


def test_a_checkpoint_inside_an_iteration_is_refused(tmp_path, tiny_folder):
    checkpoint = L.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=1)
    trainer = make_trainer(tmp_path, 1, [checkpoint], enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="inside an iteration"):
        trainer.fit(make_agent(tiny_folder), make_data())


@pytest.mark.parametrize("share", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_it_says_how_much_was_shared_and_padded(tmp_path, tiny_folder, monkeypatch, share):
    if not share:
        monkeypatch.setattr(LanguageModel, "shares_prefixes", False)
    spy = Spy()
    agent = make_agent(tiny_folder, max_tokens_per_micro_batch=1000)
    trainer = make_trainer(tmp_path, 1, [spy])
    trainer.fit(agent, make_data(mini_batch_turns=16))
    rows = action_rows(spy.rollouts[0])
    plan = plan_micro_batches(rows, 1000, share)
    packs = [pack([rows[i] for i in index], share=share) for index in plan]
    held, computed = sum(len(row.input_ids) for row in rows), sum(packed.tokens for packed in packs)
    padding = sum(int((packed.padding == 0).sum()) for packed in packs if packed.padding is not None)
    logged = {name: float(number) for name, number in trainer.callback_metrics.items()}
    assert logged["time/update_padding"] == pytest.approx(padding / computed)
    assert logged["time/update_shared"] == pytest.approx(1 - (computed - padding) / held)
    assert logged["time/update_shared"] > 0.3 if share else padding > 0


def one_step(tmp_path, folder, agent_class=PPOAgent, **kwargs):
    """An iteration of a single optimizer step, with a critic that has its own backbone."""
    settings = {"lr_actor": 1e-3, "lr_critic": 1e-2, "kl_reward": 0.0, **kwargs}
    agent = agent_class(str(folder), critic=SeparateCritic(), **grouped(settings))
    data = make_data(mini_batch_turns=16)
    trainer = make_trainer(tmp_path, 2, [])
    trainer.fit(agent, data)
    return {n: p.detach().clone() for n, p in agent.named_parameters()}, trainer.logged_metrics


@pytest.mark.slow
def test_one_step_per_rollout_needs_no_pass_for_old_log_probs(tmp_path, exact_folder, monkeypatch):
    scored = []
    real = scoring.score_policy
    monkeypatch.setattr(scoring, "score_policy", lambda *a: scored.append(1) or real(*a))
    left_out, metrics = one_step(tmp_path, exact_folder)
    assert not scored

    class Careful(PPOAgent):
        @property
        def needs(self):
            return super().needs | Needs(old_logps=True)

    expected, all_metrics = one_step(tmp_path, exact_folder, Careful)
    assert len(scored) == 2
    for name, weight in expected.items():
        assert torch.allclose(weight, left_out[name], rtol=0, atol=1e-12), name
    for name in ("mismatch/logp_gap_mean", "mismatch/logp_gap_max"):
        gap, expected_gap = (float(m[name]) for m in (metrics, all_metrics))
        assert gap == pytest.approx(expected_gap, abs=1e-9)
    assert float(metrics["mismatch/logp_gap_max"]) > float(metrics["mismatch/logp_gap_mean"]) > 0

    class Shaper(Careful):
        def shape_rewards(self, rollout):
            return rollout.rewards + 0.1 * rollout.scores.entropy

    one_step(tmp_path, exact_folder, Shaper)
    one_step(tmp_path, exact_folder, kl_reward=0.1)
    assert len(scored) == 2 + 2 + 2 * 2  # with the reference's


@pytest.mark.gpu
def test_a_micro_batch_does_not_wait_for_the_one_before(monkeypatch, tmp_path, served_folder):
    """Torch's own count of the waits in a step, in one micro-batch and in many."""
    seen: dict[str, list[tuple[int, int]]] = {}

    def counted(agent, rollout, first):
        results = []
        noticed = waits(lambda: results.append(accumulate_gradients(agent, rollout, first)), "cuda")
        seen[cut].append((len(agent.reader.micro_batches(action_rows(rollout))), noticed))
        return results[0]

    monkeypatch.setattr(update, "accumulate_gradients", counted)
    for cut, tokens in (("whole", 10**6), ("rows", 1)):
        seen[cut] = []
        agent = make_agent(served_folder, SeparateCritic(), max_tokens_per_micro_batch=tokens)
        make_trainer(tmp_path, 1, accelerator="gpu", precision="bf16-mixed").fit(agent, make_data())
    assert {count for count, _ in seen["whole"]} == {1}
    assert min(count for count, _ in seen["rows"]) > 3
    assert [noticed for _, noticed in seen["rows"]] == [noticed for _, noticed in seen["whole"]]
