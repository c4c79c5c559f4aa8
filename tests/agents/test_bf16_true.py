"""Weights in bfloat16 with masters in float32: what 16 bits would lose is kept."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_agentrl.agents import Optim, PPOAgent
from lightning_agentrl.agents.master_weights import MasterWeights
from lightning_agentrl.engines import TransformersEngine
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.models.critic import SeparateCritic, SharedCritic
from tests.agents import processes
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.agents.processes import optimizer_states, read


def fit(path, folder, epochs, critic=None, ckpt_path=None, **kwargs):
    agent = make_agent(folder, critic, **{"lr_actor": 1e-6, "lr_critic": 1e-6, **kwargs})
    checkpoint = ModelCheckpoint(path, filename="last", enable_version_counter=False, save_on_train_epoch_end=True)
    trainer = make_trainer(path, epochs, [checkpoint], precision="bf16-true", enable_checkpointing=True)
    data = make_data(engine=TransformersEngine(max_batch=1))  # in bfloat16 replies depend on who shares a batch
    trainer.fit(agent, data, ckpt_path=ckpt_path)
    return agent, torch.load(path / "last.ckpt", weights_only=True)


@pytest.mark.slow
def test_small_steps_are_kept(tmp_path, tiny_folder):
    agent, saved = fit(tmp_path, tiny_folder, 2)
    initial = make_agent(tiny_folder)
    initial.configure_model()
    moved = unseen = 0
    for name, before in initial.actor.named_parameters():
        name, before = f"actor.{name}", before.bfloat16()
        model, master = dict(agent.named_parameters())[name], saved["state_dict"][name]
        assert model.dtype == torch.bfloat16
        assert master.dtype == torch.float32
        assert torch.equal(model, master.bfloat16())
        moved += int((master != before.float()).sum())
        unseen += int(((master != before.float()) & (model == before)).sum())
    head = saved["state_dict"]["actor.lm.lm_head.weight"]  # tied, and saved under both names
    assert torch.equal(head, saved["state_dict"]["actor.lm.model.embed_tokens.weight"])
    assert head.dtype == torch.float32
    assert moved > 10_000
    assert unseen > moved / 2  # without masters these steps would be lost


@pytest.mark.slow
def test_values_are_computed_in_float32(tmp_path, tiny_folder):
    agent, _ = fit(tmp_path, tiny_folder, 1, SeparateCritic(), lr_critic=1e-2)
    assert agent.critic.head.linear.weight.dtype == torch.float32
    assert agent.critic.head.linear.weight.any()
    assert agent.critic.backbone.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("critic", [pytest.param(SharedCritic, marks=pytest.mark.long), SeparateCritic])
def test_a_resumed_run_goes_on_with_its_masters(tmp_path, tiny_folder, critic):
    """So do the units of a head that is rescaled."""
    _, whole = fit(tmp_path / "whole", tiny_folder, 4, critic(popart=0.3))
    fit(tmp_path / "part", tiny_folder, 2, critic(popart=0.3))
    _, resumed = fit(tmp_path / "part", tiny_folder, 4, critic(popart=0.3), ckpt_path=tmp_path / "part" / "last.ckpt")
    for name, weight in whole["state_dict"].items():
        assert torch.equal(weight, resumed["state_dict"][name]), name


def test_gradients_are_added_up_in_float32():
    """A thousand small gradients after a large one: in bfloat16 their sum would not move."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    masters = MasterWeights([("weight", weight)], {})
    (master,) = masters.of([weight])
    for gradient in [1.0] + [2.0**-10] * 1024:
        (weight * gradient).sum().backward()
        assert weight.grad is None
    assert master.grad.tolist() == [2.0] * 3
    optimizer = torch.optim.SGD([master], lr=2.0**-12)
    masters.attach(optimizer)
    for _ in range(8):
        optimizer.step()
    assert master.tolist() == [1 - 2.0**-8] * 3
    assert weight.tolist() == [1 - 2.0**-8] * 3


def test_masters_begin_as_the_saved_weights():
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    exact = torch.tensor([1.0009765625])
    masters = MasterWeights([("weight", weight)], {"weight": exact})
    (master,) = masters.of([weight])
    assert master.item() == exact.item()
    assert master.data_ptr() != exact.data_ptr()
    full = torch.nn.Parameter(torch.ones(1))
    assert len(MasterWeights([("weight", full)], {})) == 0


def test_weights_that_are_loaded_after_a_checkpoint_are_trained(tmp_path, tiny_folder):
    """The first step must not put those of the checkpoint in their place."""
    trainer = make_trainer(tmp_path, 1, precision="bf16-true")
    trainer.fit(make_agent(tiny_folder, SharedCritic()), make_data())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    agent = PPOAgent.load_from_checkpoint(tmp_path / "one.ckpt", optim=Optim(lr_actor=1e-6))
    other = {name: 0.5 * weight for name, weight in agent.actor.state_dict().items()}
    agent.actor.load_state_dict(other)
    make_trainer(tmp_path, 1, precision="bf16-true").fit(agent, make_data())
    for name, weight in agent.actor.state_dict().items():
        assert torch.allclose(weight.float(), other[name].float(), rtol=0.01, atol=0.01), name


def test_the_masters_of_the_next_run_take_the_gradients():
    """And begin as those before, unless the weight was given another value meanwhile."""
    weights = {name: torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for name in ("a", "b")}
    exact = torch.full((2,), 1.0009765625)
    before = MasterWeights(weights.items(), dict.fromkeys(weights, exact))
    with torch.no_grad():
        weights["b"].fill_(2.0)
    kept = before.release(weights.items())
    assert kept.keys() == {"a"}
    after = MasterWeights(weights.items(), kept)
    masters = after.of(weights.values())
    assert [master.tolist() for master in masters] == [exact.tolist(), [2.0, 2.0]]
    sum(weight.sum() for weight in weights.values()).backward()
    assert [master.grad.tolist() for master in masters] == [[1.0, 1.0]] * 2
    assert all(master.grad is None for master in before.of(weights.values()))


class OwnOptimizer(PPOAgent):
    """Plain SGD, on the parameters that it is given or on those of the model."""

    of_model = False

    def configure_optimizers(self):
        groups = super().configure_optimizers()["optimizer"].param_groups
        if self.of_model:
            groups = [{"name": "actor", "params": list(self.actor.parameters())}]
        return torch.optim.SGD([{"name": group["name"], "params": group["params"]} for group in groups], lr=10.0)


@pytest.mark.slow
def test_the_optimizer_of_a_subclass_moves_the_model(tmp_path, tiny_folder):
    agent, initial = OwnOptimizer(str(tiny_folder), critic=SharedCritic()), make_agent(tiny_folder)
    make_trainer(tmp_path, 1, precision="bf16-true").fit(agent, make_data())
    initial.configure_model()
    before = {name: weight.bfloat16() for name, weight in initial.actor.named_parameters()}
    assert all(not torch.equal(weight, before[name]) for name, weight in agent.actor.named_parameters())
    agent = OwnOptimizer(str(tiny_folder), critic=SharedCritic())
    agent.of_model = True
    with pytest.raises(ConfigError, match="configure_optimizers"):
        make_trainer(tmp_path, 1, precision="bf16-true").fit(agent, make_data())


@pytest.mark.slow
def test_an_agent_trains_again_in_a_second_run(tmp_path, tiny_folder):
    agent, data = make_agent(tiny_folder, SharedCritic()), make_data()
    for _ in range(2):
        before = agent.state_dict() if hasattr(agent, "models") else None
        before = before and {name: weight.clone() for name, weight in before.items()}
        make_trainer(tmp_path, 1, precision="bf16-true").fit(agent, data)
    assert any(not torch.equal(weight, before[name]) for name, weight in agent.actor.named_parameters("actor"))


@pytest.mark.long
def test_two_processes_add_up_the_gradients_of_one(tmp_path, tiny_folder):
    """Of the same turns, in other micro-batches, so in bfloat16 not to the last digit.

    Without the sum over processes, the first moments would be those of half of the turns.
    """
    arguments = ["--trainer.precision", "bf16-true", "--trainer.max_epochs", "3"]  # two of warm-up, one with the actor
    arguments += ["--data.init_args.mini_batch_turns", "16"]
    arguments += ["--data.init_args.engine", "{class_path: TransformersEngine, init_args: {max_batch: 1}}"]
    one, two = (
        read(processes.fit(tmp_path / name, tiny_folder, "SharedCritic", devices, *arguments, plugins="null"))
        for name, devices in (("one", 1), ("two", 2))
    )
    moments = [[state["exp_avg"] for state in optimizer_states(checkpoint)] for checkpoint in (one, two)]
    for a, b in zip(*moments, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.1 * a.norm()
