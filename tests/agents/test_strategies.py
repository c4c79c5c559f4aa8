"""Which strategies are taken, and what the ranks of a sharded one agree on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

from lightning_agentrl.agents.scoring import Reader, action_rows
from lightning_agentrl.agents.sharding import check_mesh, check_strategy
from lightning_agentrl.agents.update import micro_batch_losses
from lightning_agentrl.losses import aggregate
from lightning_agentrl.models.critic import SeparateCritic
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.inputs import text_row


def trainer(tmp_path, strategy, devices=4, **kwargs):
    return make_trainer(tmp_path, 2, strategy=strategy, devices=devices, precision="32-true", **kwargs)


def fsdp2(data_parallel_size, tensor_parallel_size=1):
    return ModelParallelStrategy(data_parallel_size, tensor_parallel_size)


@pytest.mark.parametrize(
    ("strategy", "kwargs"),
    [(DDPStrategy(), {}), (fsdp2(4), {}), (fsdp2(8), {"num_nodes": 2})],
    ids=["ddp", "one node", "two nodes"],
)
def test_these_are_taken(tmp_path, strategy, kwargs):
    made = trainer(tmp_path, strategy, **kwargs)
    for lora in (False, True):
        check_strategy(made, lora)


@pytest.mark.parametrize(("data", "tensors"), [(2, 2), (1, 4)], ids=["both", "as Lightning's default"])
def test_tensor_parallel_models_are_refused(monkeypatch, data, tensors):
    mesh = {
        "data_parallel": SimpleNamespace(size=lambda: data),
        "tensor_parallel": SimpleNamespace(size=lambda: tensors),
    }
    monkeypatch.setattr(ModelParallelStrategy, "device_mesh", mesh)
    with pytest.raises(ValueError, match=r"tensor_parallel_size.*set trainer\.strategy to .*data_parallel_size: 4"):
        check_mesh(ModelParallelStrategy())
    monkeypatch.setitem(mesh, "tensor_parallel", SimpleNamespace(size=lambda: 1))
    check_mesh(ModelParallelStrategy())


def test_weights_in_bfloat16_are_refused_under_fsdp2(tmp_path):
    with pytest.raises(ValueError, match=r"trainer\.precision.*'bf16-true'.*ModelParallelStrategy"):
        check_strategy(make_trainer(tmp_path, 2, strategy=fsdp2(4), devices=4, precision="bf16-true"))


def test_the_first_version_of_fsdp_is_refused_with_the_second_one_named():
    class Trainer:  # the real one asks for a GPU first
        num_devices, num_nodes, strategy = 4, 1, object.__new__(FSDPStrategy)

    with pytest.raises(ValueError, match=r"FSDPStrategy.*ModelParallelStrategy.*data_parallel_size: 4"):
        check_strategy(Trainer())


def test_a_rank_with_fewer_micro_batches_ends_with_empty_ones():
    rows = [text_row((k, k, k), (1,)) for k in range(3)]
    alone = Reader(1.0, 3, torch.device("cpu"), True).micro_batches(rows)
    reader = Reader(1.0, 3, torch.device("cpu"), True, agree=lambda count: count + 2)
    assert reader.micro_batches(rows) == [*alone, [], []]
    assert reader.micro_batches([]) == [[], []]
    assert reader.pack([]).ids.shape == (1, 1)


def test_an_empty_micro_batch_runs_every_layer_and_adds_no_gradient(tmp_path, tiny_folder):
    """Each parameter has a gradient, or the ranks of a sharded model would wait for each other for ever."""
    agent, seen = make_agent(tiny_folder, SeparateCritic()), []

    class Probe(type(agent)):
        def training_step(self, batch, batch_idx):
            empty, packed = batch.rollout.select([]), self.reader.pack([])
            assert action_rows(empty) == []
            for policy_loss, value_loss, metrics in micro_batch_losses(self, empty, packed):
                for loss in (policy_loss, value_loss):
                    if loss is not None:
                        aggregate(loss, empty.action_mask, torch.ones(0)).backward(retain_graph=True)
                assert all(x.numel() == 0 for x in metrics.values())
            seen.append([None if p.grad is None else float(p.grad.abs().max()) for p in self.parameters()])
            self.zero_grad()

    agent.__class__ = Probe
    make_trainer(tmp_path, 1).fit(agent, make_data())
    assert seen
    assert all(largest == 0.0 for gradients in seen for largest in gradients)
