"""FSDP2 units on one process: what is computed, gathered and kept; many processes are in tests/agents/test_fsdp2.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_agentrl.engines.weights import merged_weights
from lightning_agentrl.models.critic import SeparateCritic
from lightning_agentrl.models.export import save_adapters
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm
from lightning_agentrl.models.lora import LoRA, Unadapted, merge_adapters
from lightning_agentrl.models.packing import pack
from lightning_agentrl.models.sharding import gathered, release, shard, units
from tests.inputs import text_row

PACKED = pack([text_row((5, 6, 7, 8), (1, 2)), text_row((5, 6, 9, 4), (1, 2))])


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def scores(policy):
    return policy.token_scores(policy.hidden(PACKED), PACKED.targets, 1.0, sum_pi_squared=True)


def test_a_sharded_policy_has_the_scores_and_gradients_of_a_whole_one(mesh, tiny_folder):
    """The sum of squared probabilities is over the whole vocabulary."""
    whole, sharded = (LanguageModel(load_causal_lm(str(tiny_folder))) for _ in range(2))
    shard(sharded, mesh, None)
    for policy in (whole, sharded):
        for _ in range(2):  # gradients of two micro-batches add up
            found = scores(policy)
            (found.logps + found.entropy + found.sum_pi_squared).sum().backward()
    for name in ("logps", "entropy", "sum_pi_squared"):
        assert torch.equal(getattr(scores(whole), name), getattr(scores(sharded), name))
    release(sharded)
    for (name, a), (_, b) in zip(whole.named_parameters(), sharded.named_parameters(), strict=True):
        assert isinstance(b, DTensor)
        torch.testing.assert_close(a.grad, b.grad.full_tensor(), msg=name)


def test_layers_and_the_rest_are_units_and_tied_weights_are_in_the_rest(mesh, tiny_folder):
    policy = LanguageModel(load_causal_lm(str(tiny_folder)))
    shard(policy, mesh, None)
    assert len(units(policy)) == 1 + policy.lm.config.num_hidden_layers
    assert units(policy)[0] is policy
    assert policy.lm.get_output_embeddings().weight is policy.lm.get_input_embeddings().weight


def test_gathered_weights_are_whole_inside_and_shares_again_afterwards(mesh, tiny_folder):
    policy = LanguageModel(load_causal_lm(str(tiny_folder)))
    shard(policy, mesh, torch.bfloat16)
    with gathered(policy), torch.no_grad():
        for _ in range(2):  # a forward pass of a layer alone, as an engine does it, lets nothing go
            policy.lm.base_model(input_ids=PACKED.ids)
            assert not any(isinstance(p, DTensor) for p in policy.parameters())
        assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}
    assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in policy.parameters())
    scores(policy).logps.sum().backward()  # layers let their weights go after a pass, as before
    release(policy)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in policy.parameters())


def test_values_stay_in_float32_where_the_backbone_computes_in_bfloat16(mesh, tiny_folder):
    critic = SeparateCritic()
    critic.build(32, lambda _: load_causal_lm(str(tiny_folder)))
    shard(critic, mesh, torch.bfloat16)
    torch.nn.init.ones_(critic.head.linear.weight)
    values = critic(PACKED, None)
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())
    values.sum().backward()
    assert critic.head.linear.weight.grad.dtype == torch.float32


def test_adapters_of_a_sharded_policy_are_sent_alone_merged_and_left_out(mesh, tiny_folder, tmp_path):
    """To vLLM alone, to servers merged; the reference leaves them out, and they are trained as before after that."""
    torch.manual_seed(0)
    lm = LoRA(rank=2).adapt(load_causal_lm(str(tiny_folder)), "actor", share=False)
    adapters = {name: p for name, p in lm.named_parameters() if p.requires_grad}
    for parameter in adapters.values():
        torch.nn.init.normal_(parameter, std=0.2)
    expected = dict(merge_adapters(lm).named_parameters(remove_duplicate=False))
    save_adapters(lm, tmp_path)
    alone = load_file(tmp_path / "adapter_model.safetensors")
    shard(policy := LanguageModel(lm), mesh, None)
    save_adapters(lm, tmp_path)
    assert all(isinstance(p, DTensor) for p in policy.parameters())
    sent = load_file(tmp_path / "adapter_model.safetensors")
    assert sent.keys() == alone.keys()
    assert all(torch.equal(sent[name], weight) for name, weight in alone.items())
    with gathered(policy):  # which frees them in the end
        merged = dict(merged_weights(lm))
        assert merged.keys() == expected.keys()
        assert all(torch.equal(merged[name], weight) for name, weight in expected.items())
    base = LanguageModel(load_causal_lm(str(tiny_folder)))
    assert torch.equal(scores(Unadapted(policy)).logps, scores(base).logps)
    assert not torch.equal(scores(policy).logps, scores(base).logps)
    assert {name for name, p in lm.named_parameters() if p.requires_grad} == adapters.keys()
