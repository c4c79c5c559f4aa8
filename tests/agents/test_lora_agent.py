"""LoRA in the agent: one frozen base below actor, critic and reference."""

from __future__ import annotations

import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_agentrl.advantages import ReinforcePlusPlus
from lightning_agentrl.agents import KL, Optim, PPOAgent
from lightning_agentrl.agents.scoring import score_policy
from lightning_agentrl.callbacks import CriticWarmup, EngineCheck
from lightning_agentrl.models.critic import SeparateCritic, SharedCritic
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm
from lightning_agentrl.models.lora import LoRA
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.tiny import tiny_model_folder


class Spy(L.Callback):
    """Rollouts, gradients, weights and the actor's filled optimizer states."""

    def __init__(self) -> None:
        self.rollouts = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.weights: list[dict[str, torch.Tensor]] = []  # at the start, then after each epoch
        self.actor_states: list[int] = []

    def on_train_start(self, trainer, agent):
        self.weights.append({n: p.detach().clone() for n, p in agent.named_parameters()})

    def on_train_batch_start(self, trainer, agent, batch, batch_idx):
        self.rollouts.append(batch.rollout)

    def on_before_optimizer_step(self, trainer, agent, optimizer):
        self.gradients.append({n: p.grad.clone() for n, p in agent.named_parameters() if p.grad is not None})

    def on_train_epoch_end(self, trainer, agent):
        self.weights.append({n: p.detach().clone() for n, p in agent.named_parameters()})
        state = trainer.optimizers[0].state
        self.actor_states.append(sum(p in state and bool(state[p]) for p in agent.actor.parameters()))


def lora_agent(folder, critic=None, **kwargs):
    """With learning rates at which adapters move the policy."""
    defaults = {"lora": LoRA(rank=4), "lr_actor": 3e-2, "lr_critic": 3e-2}
    return make_agent(folder, critic or SeparateCritic(), **{**defaults, **kwargs})


def fit(path, agent, epochs=2, callbacks=(), ckpt_path=None, seed=0, **kwargs):
    """Runs of one seed start from the same random adapters."""
    torch.manual_seed(seed)
    spy = Spy()
    trainer = make_trainer(path, epochs, [spy, *callbacks], **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(agent, make_data(), ckpt_path=ckpt_path)
    return spy


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen3", "gpt_neox"))]
)
def test_actor_and_reference_start_as_the_base(tmp_path, family):
    """KL 0 to the last bit in the first iteration; then the actor has moved and the reference has not."""
    folder = tiny_model_folder(tmp_path / family, family=family)
    agent = lora_agent(folder)
    spy = fit(tmp_path, agent)
    first, last = spy.rollouts[0].scores, spy.rollouts[-1].scores
    assert torch.equal(first.old_logps, first.ref_logps)
    assert (last.old_logps - last.ref_logps).abs().max() > 1e-3
    frozen = LanguageModel(load_causal_lm(str(folder)).double())
    for rollout in spy.rollouts:
        expected, _ = score_policy(frozen, rollout, agent.reader)
        found, _ = score_policy(agent.models.reference, rollout, agent.reader)
        assert torch.equal(found.old_logps, expected.old_logps)
        assert torch.allclose(rollout.scores.ref_logps, expected.old_logps, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_in_mixed_precision_the_base_takes_half_the_memory(tmp_path, tiny_folder):
    """And the actor still starts as the reference, bit for bit; see tests/models for the rounding."""
    agent = lora_agent(tiny_folder)
    spy = fit(tmp_path, agent, 2, precision="bf16-mixed")
    first, last = spy.rollouts[0].scores, spy.rollouts[-1].scores
    assert torch.equal(first.old_logps, first.ref_logps)
    assert (last.old_logps - last.ref_logps).abs().max() > 1e-2
    for lm in (agent.actor.lm, agent.critic.backbone, agent.models.reference.lm):
        dtypes = {name: p.dtype for name, p in lm.named_parameters() if "_proj" in name}
        assert all(dtype == (torch.float32 if ".lora_" in name else torch.bfloat16) for name, dtype in dtypes.items())
    frozen = LanguageModel(load_causal_lm(str(tiny_folder)))
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = score_policy(frozen, spy.rollouts[-1], agent.reader)
        found, _ = score_policy(agent.models.reference, spy.rollouts[-1], agent.reader)
    assert torch.equal(found.old_logps, expected.old_logps)


@pytest.mark.slow
def test_the_engine_samples_from_the_adapters(tmp_path, exact_folder):
    """Before and after updates, sampled log-probs are those of the scores."""
    spy = fit(tmp_path, lora_agent(exact_folder), 3)
    for rollout in spy.rollouts:
        assert torch.allclose(rollout.rollout_logps.double(), rollout.scores.old_logps, rtol=0, atol=1e-5)
    last = spy.rollouts[-1].scores
    assert (last.old_logps - last.ref_logps).abs().max() > 1e-2


class TwoModels(SeparateCritic):
    """As before, but the adapters lie on a copy of the base."""

    def build(self, actor_hidden_size, load):
        def load_copy(model):
            lm = load(model)
            for module in lm.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    if not parameter.requires_grad:
                        setattr(module, name, torch.nn.Parameter(parameter.clone(), requires_grad=False))
            return lm

        super().build(actor_hidden_size, load_copy)


@pytest.mark.slow
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_gradients_are_those_of_two_models(tmp_path, exact_folder, gradient_checkpointing):
    def gradients(critic, **kwargs):
        agent = lora_agent(exact_folder, critic, max_grad_norm_actor=1e9, max_grad_norm_critic=1e9, **kwargs)
        torch.manual_seed(1)
        agent.configure_model()
        trained = [(n, p) for n, p in agent.named_parameters() if p.requires_grad]
        for _, parameter in sorted(trained):
            parameter.data.normal_(0, 0.1)
        return fit(tmp_path, agent, 1).gradients[0]

    shared = gradients(SeparateCritic(), gradient_checkpointing=gradient_checkpointing)
    apart = gradients(TwoModels())
    # Of these micro-batches, actor and critic take turns.
    cut = gradients(SeparateCritic(), gradient_checkpointing=gradient_checkpointing, max_tokens_per_micro_batch=1)
    assert shared.keys() == apart.keys() == cut.keys()
    assert {name.split(".")[0] for name in shared} == {"actor", "critic"}
    for name, gradient in apart.items():
        assert gradient.abs().max() > 1e-9, name
        assert torch.allclose(shared[name], gradient, rtol=0, atol=1e-10), name
        assert torch.allclose(cut[name], gradient, rtol=0, atol=1e-10), name


@pytest.mark.slow
@pytest.mark.parametrize("critic", [pytest.param(SharedCritic, marks=pytest.mark.slow), SeparateCritic])
def test_the_actor_rests_in_the_warm_up_and_the_base_always(tmp_path, tiny_folder, critic):
    spy = fit(tmp_path, lora_agent(tiny_folder, critic()), 3, [CriticWarmup(rollouts=2, rounds=2, fraction=0.5)])
    start, warm, end = spy.weights[0], spy.weights[2], spy.weights[3]
    adapters = {name for name in start if ".lora_" in name and name.startswith("actor")}
    assert spy.actor_states[:2] == [0, 0]
    assert spy.actor_states[2] == len(adapters) > 0
    for name, weight in start.items():
        if name in adapters:
            assert torch.equal(warm[name], weight), name
            assert not torch.equal(end[name], weight), name
        elif name.startswith("critic.head") or ".lora_B." in name:
            assert not torch.equal(warm[name], weight), name
        elif ".lora_" not in name:
            assert torch.equal(end[name], weight), name


@pytest.mark.parametrize("critic", [SharedCritic, pytest.param(SeparateCritic, marks=pytest.mark.slow)])
def test_only_adapters_and_head_are_optimised_and_saved(tmp_path, tiny_folder, critic):
    agent = lora_agent(tiny_folder, critic())
    checkpoint = ModelCheckpoint(tmp_path, filename="stop", save_on_train_epoch_end=True)
    fit(tmp_path, agent, 1, [checkpoint], enable_checkpointing=True)
    saved = torch.load(tmp_path / "stop.ckpt", weights_only=True)
    trained = {name for name, p in agent.named_parameters() if p.requires_grad}
    assert set(saved["state_dict"]) == trained
    assert all(".lora_" in name or name.startswith("critic.head.") for name in trained)
    groups = agent.trainer.optimizers[0].param_groups
    assert [group["name"] for group in groups] == ["actor", "critic"]
    assert sum(len(group["params"]) for group in groups) == len(trained)
    assert len(saved["optimizer_states"][0]["state"]) == len(trained)
    assert saved["agent"]["lora"] == {"rank": 4, "alpha": 8.0, "targets": "all-linear"}


@pytest.mark.slow
def test_a_critic_with_a_model_of_its_own_trains_all_of_it(tmp_path, tiny_folder, exact_folder):
    agent = lora_agent(tiny_folder, SeparateCritic(str(exact_folder)))
    spy = fit(tmp_path, agent, 1)
    assert all(p.requires_grad for p in agent.critic.parameters())
    assert not any(".lora_" in name for name in spy.weights[0] if name.startswith("critic"))
    assert any("lora_B.actor" in name and gradient.any() for name, gradient in spy.gradients[0].items())


def test_dropout_in_the_only_step_is_not_taken_for_a_gap_to_the_engine(tmp_path, tiny_folder):
    """Log-probs from before the step are those without dropout. The adapters add nothing until the second iteration."""
    lora = LoRA(rank=4, dropout=0.5)
    agent = PPOAgent(str(tiny_folder), advantage=ReinforcePlusPlus(), kl=KL(reward=0.0), lora=lora, optim=Optim(1e-2))
    trainer = make_trainer(tmp_path, 2, [EngineCheck()], precision="32-true")
    trainer.fit(agent, make_data(mini_batch_turns=16))
    assert trainer.callback_metrics["mismatch/logp_gap_mean"] < 1e-4
    assert trainer.callback_metrics["policy/approx_kl"].abs() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_resumed_run_equals_one_run(tmp_path, tiny_folder, dropout):
    """Stopped inside the warm-up and after it; other random adapters do not survive the checkpoint."""
    compare_with_resumed(tmp_path, tiny_folder, dropout, tolerance=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_resumed_run_on_a_gpu_equals_one_run(tmp_path, served_folder, dropout):
    """By FlexAttention, and with what a GPU draws."""
    compare_with_resumed(tmp_path, served_folder, dropout, tolerance=1e-4, accelerator="gpu", precision="32-true")


def compare_with_resumed(tmp_path, folder, dropout, tolerance, **trainer):

    def callbacks():
        return [CriticWarmup(rollouts=2, rounds=1, fraction=1.0)]

    def agent():
        return lora_agent(folder, lora=LoRA(rank=4, dropout=dropout))

    every = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    whole = fit(tmp_path, agent(), 4, [*callbacks(), every], enable_checkpointing=True, **trainer).weights[-1]
    for epoch in (0, 2):
        path = tmp_path / f"epoch={epoch}.ckpt"
        last = fit(tmp_path, agent(), 4, callbacks(), ckpt_path=path, seed=9, **trainer).weights[-1]
        assert whole.keys() == last.keys()
        for name, weight in whole.items():
            torch.testing.assert_close(last[name], weight, rtol=0, atol=tolerance, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "given", "message"),
    [
        (LoRA(rank=4), None, "has adapters of rank 4 and alpha 8 on all-linear, this run has no adapters"),
        pytest.param(None, LoRA(rank=4), "has no adapters, this run has adapters of rank 4", marks=pytest.mark.slow),
        pytest.param(LoRA(rank=4), LoRA(rank=2), "has adapters of rank 4 .* rank 2", marks=pytest.mark.slow),
        pytest.param(LoRA(rank=4), LoRA(rank=4, alpha=4), "has .* alpha 8 .* alpha 4", marks=pytest.mark.slow),
        pytest.param(
            LoRA(rank=4),
            LoRA(rank=4, targets=["q_proj", "v_proj"]),
            "has .* all-linear, .* on q_proj, v_proj",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_checkpoint_with_other_adapters_is_refused(tmp_path, tiny_folder, saved, given, message):
    fit(tmp_path, first := lora_agent(tiny_folder, SharedCritic(), lora=saved), 1)
    first.trainer.save_checkpoint(tmp_path / "stop.ckpt")
    with pytest.raises(ValueError, match=f"{message}.*model.init_args.lora"):
        fit(tmp_path, lora_agent(tiny_folder, SharedCritic(), lora=given), 2, ckpt_path=tmp_path / "stop.ckpt")


@pytest.mark.slow
def test_adapters_that_go_to_another_model_are_told(tmp_path, tiny_folder):
    fit(tmp_path, first := lora_agent(tiny_folder, SharedCritic()), 1)
    first.trainer.save_checkpoint(tmp_path / "stop.ckpt")
    other = tiny_model_folder(tmp_path / "other", seed=1)
    trainer, agent = make_trainer(tmp_path, 2), lora_agent(other, SharedCritic())
    agent.resume_with_changes = ["model.init_args.model"]
    with pytest.warns(UserWarning, match=f"'{tiny_folder}'.*'{other}'"):
        trainer.fit(agent, make_data(), ckpt_path=str(tmp_path / "stop.ckpt"))
