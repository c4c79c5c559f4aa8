"""Other kernels compute the same."""

from __future__ import annotations

import importlib.util
import random
import shutil

import pytest
import torch

from lightning_agentrl.models.critic import SeparateCritic
from lightning_agentrl.models.kernels import automatic_kernels, check_kernels, use_kernels
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import decoder_layers, load_causal_lm
from lightning_agentrl.models.packing import pack
from lightning_agentrl.types import Row
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.inputs import text_row
from tests.tiny import VOCABULARY


def rows(seed: int, count: int) -> list[Row]:
    draw = random.Random(seed)
    prefix = draw.choices(range(VOCABULARY), k=20)
    made = [(*prefix, *draw.choices(range(VOCABULARY), k=5 + k % 3)) for k in range(count)]
    return [text_row(ids, (18, len(ids) - 2)) for ids in made]


def numbers(policy: LanguageModel, count: int) -> list[torch.Tensor]:
    packed = pack(rows(count, count), policy.lm.device)
    policy.zero_grad()
    scores = policy.token_scores(policy.hidden(packed), packed.targets, 1.0)
    (scores.logps.sum() + scores.entropy.sum()).backward()
    return [scores.logps.detach(), *(p.grad for p in policy.parameters() if p.grad is not None)]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for the CPU with g++")
def test_compiled_layers_compute_the_same(tiny_folder):
    """Trees of several sizes are no reason to compile again for each of them."""
    plain = LanguageModel(load_causal_lm(str(tiny_folder)))
    compiled = LanguageModel(load_causal_lm(str(tiny_folder)))
    use_kernels(compiled.lm, "compiled")
    torch._dynamo.reset()
    for count in (2, 5, 9, 14):
        for a, b in zip(numbers(compiled, count), numbers(plain, count), strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 0 < graphs <= 4  # before and after the attention, at most twice


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for the CPU with g++")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_run_with_compiled_layers_takes_the_steps_of_a_plain_one(tmp_path, exact_folder, checkpointing):
    """Collecting, scoring and two steps of actor and critic."""

    def weights(kernels):
        torch.manual_seed(0)
        agent = make_agent(exact_folder, SeparateCritic(), kernels=kernels, gradient_checkpointing=checkpointing)
        make_trainer(tmp_path, 1).fit(agent, make_data())
        return agent.state_dict()

    plain, compiled = weights("torch"), weights("compiled")
    assert plain.keys() == compiled.keys()
    for name, weight in plain.items():
        torch.testing.assert_close(weight, compiled[name], rtol=0, atol=1e-6)


@pytest.mark.gpu
def test_compiled_layers_compute_the_same_on_a_gpu(served_folder):
    """Around FlexAttention, which is compiled by itself."""
    plain = LanguageModel(load_causal_lm(str(served_folder))).cuda()
    compiled = LanguageModel(load_causal_lm(str(served_folder))).cuda()
    use_kernels(compiled.lm, "compiled")
    for count in (2, 5, 9, 14):
        for a, b in zip(numbers(compiled, count), numbers(plain, count), strict=True):
            assert (a - b).norm() <= 1e-4 * b.norm()


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason='pip install "lightning-agentrl[liger]"')
def test_liger_kernels_compute_the_same(tiny_folder):
    plain = LanguageModel(load_causal_lm(str(tiny_folder))).cuda()
    liger = LanguageModel(load_causal_lm(str(tiny_folder))).cuda()
    use_kernels(liger.lm, "liger")
    for a, b in zip(numbers(liger, 9), numbers(plain, 9), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_auto_compiles_only_where_a_gpu_scores_and_trains():
    cases = [(gpu, sharded, samples) for gpu in (True, False) for sharded in (True, False) for samples in (True, False)]
    chosen = [case for case in cases if automatic_kernels(*case) != "torch"]
    assert chosen == [(True, False, False)]


def test_auto_compiles_layers_of_families_that_share_prefixes(tiny_folder):
    sharing = load_causal_lm(str(tiny_folder))
    use_kernels(sharing, "auto")
    assert all(layer._compiled_call_impl is not None for layer in decoder_layers(sharing))
    other = load_causal_lm(str(tiny_folder))
    other.config.model_type = "untested"
    use_kernels(other, "auto")
    assert all(layer._compiled_call_impl is None for layer in decoder_layers(other))


def test_default_kernels_leave_layers_plain_on_a_cpu(tmp_path, tiny_folder):
    agent = make_agent(tiny_folder)
    make_trainer(tmp_path, 1).fit(agent, make_data())
    assert agent.compute.kernels == "auto"
    assert all(layer._compiled_call_impl is None for layer in decoder_layers(agent.actor.lm))


def test_liger_kernels_need_a_gpu():
    with pytest.raises(ValueError, match=r"GPU.*model\.init_args\.compute\.kernels"):
        check_kernels("liger", on_gpu=False, sharded=False)
    with pytest.raises(ValueError, match=r"model\.init_args\.compute\.kernels"):
        check_kernels("compiled", on_gpu=True, sharded=True)
    check_kernels("compiled", on_gpu=False, sharded=False)
