"""A copy of the policy that an engine samples from while the policy is trained."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from lightning_agentrl.engines import PolicyHandle, Reply, SamplingRequest, TransformersEngine
from lightning_agentrl.engines.weights import (
    copied_bytes,
    copy_weights,
    frozen_copy,
    moved,
    named_as_in_files,
    named_weights,
)
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm
from lightning_agentrl.models.lora import LoRA
from lightning_agentrl.models.sharding import shard
from tests.inputs import text
from tests.models.test_families import tiny_config
from tests.moving import move


def equal(a: LanguageModel, b: LanguageModel) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_a_copy_has_weights_of_its_own_until_they_are_copied(tiny_folder):
    policy = LanguageModel(load_causal_lm(str(tiny_folder))).train()
    copied = frozen_copy(policy)
    assert equal(policy, copied)
    assert not {id(p) for p in policy.parameters()} & {id(p) for p in copied.parameters()}
    assert copied.lm.get_output_embeddings().weight is copied.lm.get_input_embeddings().weight  # tied as before
    assert not copied.training
    assert not any(p.requires_grad for p in copied.parameters())
    assert policy.training
    assert all(p.requires_grad for p in policy.parameters())
    move(policy, seed=0, share=0.1)
    assert not equal(policy, copied)
    copy_weights(policy, to=copied)
    assert equal(policy, copied)


def test_a_copy_that_runs_under_autocast_takes_less_and_reads_the_same_bits(tiny_folder):
    policy = LanguageModel(load_causal_lm(str(tiny_folder)))
    copied = frozen_copy(policy, torch.bfloat16)
    assert sum(weight.nbytes for weight in copied.parameters()) == copied_bytes(policy, torch.bfloat16)
    assert copied_bytes(policy, torch.bfloat16) < copied_bytes(policy) == sum(p.nbytes for p in policy.parameters())
    move(policy, seed=0, share=0.1)
    copy_weights(policy, to=copied)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ids = torch.arange(8)[None]
        assert torch.equal(copied.lm(ids).logits, policy.lm(ids).logits)
    assert {weight.dtype for weight in policy.parameters()} == {torch.float32}


def test_what_a_copy_shares_is_not_rounded(tiny_folder):
    policy = LanguageModel(LoRA(rank=2).adapt(load_causal_lm(str(tiny_folder)), "actor"))
    frozen_copy(policy, torch.bfloat16)
    assert {weight.dtype for weight in policy.parameters()} == {torch.float32}


def test_below_adapters_the_base_is_shared(tiny_folder):
    policy = LanguageModel(LoRA(rank=2).adapt(load_causal_lm(str(tiny_folder)), "actor"))
    copied = frozen_copy(policy)
    for (name, own), (_, trained) in zip(copied.named_parameters(), policy.named_parameters(), strict=True):
        assert (own is trained) == (".lora_" not in name)
    move(policy, seed=0, share=0.1)
    copy_weights(policy, to=copied)
    assert equal(policy, copied)


def test_a_sharded_policy_is_refused(tmp_path, tiny_folder):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        policy = LanguageModel(load_causal_lm(str(tiny_folder)))
        shard(policy, init_device_mesh("cpu", (1,)), None)
        with pytest.raises(ValueError, match=r"max_staleness.*VLLMEngine"):
            frozen_copy(policy)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("trained_meanwhile", [False, True])
def test_an_engine_samples_from_the_weights_of_its_last_update(tiny_folder, trained_meanwhile):
    policy = LanguageModel(load_causal_lm(str(tiny_folder)).double())
    engine = TransformersEngine()
    engine.start(PolicyHandle(policy, (2,), nullcontext, trained_meanwhile=trained_meanwhile))

    def sample() -> Reply:
        return asyncio.run(engine.generate(SamplingRequest(text(5, 6, 7, 8), max_tokens=8, temperature=0.0, seed=0)))

    try:
        engine.sync(0)
        before = sample()
        move(policy, seed=0, share=0.5)
        assert (sample() == before) == trained_meanwhile
        engine.sync(1)
        after = sample()
        assert after.policy_version == 1
        assert after.logps != before.logps
    finally:
        engine.stop()


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moved_weights_are_far_away_and_put_back_bit_for_bit(tiny_folder, lora, dtype):
    lm = load_causal_lm(str(tiny_folder)).to(dtype)
    if lora:
        pytest.importorskip("peft")
    policy = LanguageModel(LoRA(rank=2).adapt(lm, "actor") if lora else lm)
    with torch.no_grad():
        next(policy.parameters())[0, :2] = torch.tensor([-0.0, 0.0])
    before = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    seen = []
    for number in (0, 1):
        with suppress(KeyboardInterrupt), moved(policy, number):
            seen.append({name: weight.detach().clone() for name, weight in policy.named_parameters()})
            raise KeyboardInterrupt
    for name, weight in policy.named_parameters():
        assert torch.equal(weight.view(torch.uint8), before[name].view(torch.uint8))  # signs of zeros too
        for a, b in ((before, seen[0]), (before, seen[1]), (seen[0], seen[1])):
            distance = float((a[name] - b[name]).float().norm()) / (float(a[name].float().norm()) or 1.0)
            assert (distance > 0.3) == weight.requires_grad, name


def test_only_chosen_weights_are_moved(tiny_folder):
    policy = LanguageModel(load_causal_lm(str(tiny_folder)))
    before = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    with moved(policy, 0, lambda name: "down_proj" in name):
        for name, weight in policy.named_parameters():
            assert torch.equal(weight, before[name]) == ("down_proj" not in name)


@pytest.mark.parametrize("family", ["qwen2", "mixtral", "glm4_moe"])
def test_weights_go_by_the_names_and_values_of_the_files(family: str, tmp_path: Path) -> None:
    """Experts one by one, and with the buffers that are saved."""
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(tiny_config(family))
    for _, weight in named_weights(lm):
        torch.nn.init.normal_(weight)
    lm.save_pretrained(tmp_path)
    in_file = load_file(tmp_path / "model.safetensors")
    given = dict(named_as_in_files(lm, named_weights(lm)))
    assert in_file.keys() == given.keys()
    assert any("experts.1." in name for name in given) == (family != "qwen2")
    assert any("e_score_correction_bias" in name for name in given) == (family == "glm4_moe")
    assert all(torch.equal(weight, given[name]) for name, weight in in_file.items())
