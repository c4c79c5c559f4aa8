"""Adapters: several models on the tensors of one base."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from lightning_agentrl.models.kernels import checkpoint_activations, round_linear_layers
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm
from lightning_agentrl.models.lora import LoRA, frozen_weights, has_adapters, merge_adapters
from lightning_agentrl.models.packing import pack
from tests.inputs import text_row
from tests.tiny import tiny_model_folder

FAMILIES = ("llama", "qwen2", "qwen3", "gpt_neox")
IDS = torch.tensor([[1, 5, 9, 33, 70, 12, 8]])


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("lora") / request.param, family=request.param)


def shake(lm: torch.nn.Module, scale: float = 0.2) -> None:
    """Random adapters; the second matrix of a new one is zero."""
    for parameter in lm.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, scale)


@torch.no_grad()
def logits(lm):
    return lm.eval()(IDS).logits


def test_a_new_adapter_changes_no_bit(folder):
    base = load_causal_lm(str(folder))
    before = logits(base)
    assert torch.equal(logits(LoRA(rank=2).adapt(base, "actor")), before)
    assert not has_adapters(base)
    assert not any(p.requires_grad for p in base.parameters())


def test_models_on_one_base_share_its_tensors_and_nothing_else(folder):
    base = load_causal_lm(str(folder))
    before = logits(base)
    actor, critic = LoRA(rank=2).adapt(base, "actor"), LoRA(rank=2).adapt(base, "critic")
    shake(actor)
    one = logits(actor)
    shake(critic)
    assert torch.equal(logits(actor), one)
    assert torch.equal(logits(base), before)
    assert (one - before).abs().max() > 1e-2
    assert (logits(critic) - one).abs().max() > 1e-2
    module = torch.nn.ModuleDict({"actor": actor, "critic": critic}).double()  # as a trainer does
    own = {id(p) for p in base.parameters()}
    for lm in (actor, critic):
        assert {id(p) for p in lm.parameters() if not p.requires_grad} == own
        assert {p.dtype for p in lm.parameters()} == {torch.float64}
    assert len(list(module.parameters())) == len(own) + sum(p.requires_grad for p in module.parameters())
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    assert set(frozen_weights(module)) == {name for name in names if ".lora_" not in name}


@pytest.mark.gpu
def test_tensors_stay_shared_on_the_way_to_a_gpu(folder):
    base = load_causal_lm(str(folder))
    actor, critic = LoRA(rank=2).adapt(base, "actor"), LoRA(rank=2).adapt(base, "critic")
    torch.nn.ModuleDict({"actor": actor, "critic": critic}).to("cuda")
    assert {p.device.type for p in base.parameters()} == {"cuda"}
    assert {id(p) for p in actor.parameters()} & {id(p) for p in critic.parameters()} == set(map(id, base.parameters()))


def test_all_linear_layers_but_the_head_get_adapters(folder):
    lm = LoRA(rank=2).adapt(load_causal_lm(str(folder)), "actor")
    adapted = {name.split(".lora_")[0] for name, p in lm.named_parameters() if p.requires_grad}
    base = load_causal_lm(str(folder))
    head = base.get_output_embeddings()
    linear = {n for n, m in base.named_modules() if isinstance(m, torch.nn.Linear) and m is not head}
    assert adapted == linear
    assert len(linear) >= 8


def test_adapters_go_to_the_targets_only(tiny_folder):
    lora = LoRA(rank=2, targets=["v_proj", "q_proj", "q_proj"])
    lora.check(str(tiny_folder))
    lm = lora.adapt(load_causal_lm(str(tiny_folder)), "actor")
    adapted = {name.split(".")[4] for name, p in lm.named_parameters() if p.requires_grad}
    assert adapted == {"q_proj", "v_proj"}
    assert lora.settings == LoRA(rank=2, alpha=4, targets=["q_proj", "v_proj"]).settings


def test_merging_gives_the_same_model_and_leaves_the_weights_alone(folder):
    base = load_causal_lm(str(folder)).double()
    weights = {name: p.clone() for name, p in base.named_parameters()}
    actor = LoRA(rank=2).adapt(base, "actor").double()
    shake(actor)
    before = logits(actor)
    plain = merge_adapters(actor)
    assert not has_adapters(plain)
    assert plain.state_dict().keys() == base.state_dict().keys()
    assert (logits(plain) - before).abs().max() < 1e-6
    assert torch.equal(logits(actor), before)
    for name, p in base.named_parameters():
        assert torch.equal(p, weights[name]), name


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dropout_is_for_training_only(tiny_folder, dropout):
    lm = LoRA(rank=2, dropout=dropout).adapt(load_causal_lm(str(tiny_folder)), "actor")
    shake(lm)
    policy, packed = LanguageModel(lm), pack([text_row(tuple(IDS[0].tolist()), (3, 4))])
    with torch.no_grad():
        assert torch.equal(policy.eval().hidden(packed), policy.hidden(packed))
        assert torch.equal(policy.train().hidden(packed), policy.hidden(packed)) == (dropout == 0)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_bfloat16_autocast_gives_gradients(tiny_folder, checkpointing):
    lm = LoRA(rank=2).adapt(load_causal_lm(str(tiny_folder)), "actor").train()
    shake(lm)
    if checkpointing:
        checkpoint_activations(lm)
    with torch.autocast("cpu", torch.bfloat16):
        loss = lm(IDS, labels=IDS).loss
    loss.backward()
    for name, p in lm.named_parameters():
        assert (p.grad is not None and p.grad.dtype == torch.float32) == p.requires_grad, name


def test_rounded_weights_give_the_same_bits_under_autocast(folder):
    """Output and gradients; adapters stay in float32, and so does the merged model."""
    base = load_causal_lm(str(folder))
    lm = LoRA(rank=2).adapt(base, "actor").train()
    shake(lm)

    def run():
        lm.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = lm(IDS, labels=IDS)
        out.loss.backward()
        return {"logits": out.logits} | {name: p.grad for name, p in lm.named_parameters() if p.requires_grad}

    before = run()
    round_linear_layers(base, torch.bfloat16)
    for name, tensor in run().items():
        assert torch.equal(tensor, before[name]), name
    kept = {name for name, p in base.named_parameters() if p.dtype == torch.float32}
    assert all("norm" in name or "embed" in name for name in kept)
    assert {p.data_ptr() for p in frozen_weights(lm).values()} == {p.data_ptr() for p in base.parameters()}
    assert {p.dtype for p in merge_adapters(lm).parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"rank": 0}, "rank"),
        ({"alpha": 0.0}, "alpha"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": -0.1}, "dropout"),
        ({"targets": []}, "targets"),
        ({"targets": "q_proj"}, "targets"),
    ],
)
def test_wrong_arguments_are_refused(arguments, key):
    with pytest.raises(ValueError, match=rf"LoRA.*model.init_args.lora.init_args.*{key}"):
        LoRA(**arguments)


@pytest.mark.parametrize("target", ["q_prj", "lm_head", "embed_tokens", "layers"])
def test_unknown_targets_are_refused_before_weights_are_read(tiny_folder, tmp_path, target):
    (tmp_path / "config.json").write_text((tiny_folder / "config.json").read_text())  # no weights at all
    known = "known: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    with pytest.raises(ValueError, match=f"'{target}'.*{known}") as refused:
        LoRA(targets=["v_proj", target]).check(str(tmp_path))
    assert ("did you mean q_proj?" in str(refused.value)) == (target == "q_prj")


def test_a_missing_peft_is_told(tiny_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r'pip install "lightning-agentrl\[lora\]" \(key model.init_args.lora\)'):
        LoRA().check(str(tiny_folder))
