"""Folders that transformers and peft load, from policies and from checkpoints."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import peft
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_agentrl import cli
from lightning_agentrl.agents.master_weights import MasterWeights
from lightning_agentrl.commands.export import export_checkpoint
from lightning_agentrl.models.critic import SeparateCritic
from lightning_agentrl.models.export import export_policy, load_policy, take_weights
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm, load_tokenizer
from lightning_agentrl.models.lora import LoRA
from lightning_agentrl.models.vision import tower
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.disks import mounted
from tests.tiny import tiny_model_folder, tiny_vision_folder

IDS = torch.tensor([[1, 5, 9, 33, 70, 12, 8]])


@torch.no_grad()
def logits(lm):
    return lm.eval()(IDS).logits


def trained(path, folder, lora, **kwargs):
    """An agent after one iteration, and its checkpoint."""
    agent = make_agent(folder, SeparateCritic(), lora=lora, lr_actor=3e-2, **kwargs)
    trainer = make_trainer(path, 1)
    trainer.fit(agent, make_data())
    trainer.save_checkpoint(path / "run.ckpt")
    return agent, path / "run.ckpt"


@pytest.mark.slow
@pytest.mark.parametrize(
    "lora",
    [
        pytest.param(None, marks=pytest.mark.slow),
        LoRA(rank=2),
        pytest.param(LoRA(rank=2, targets=["q_proj", "down_proj"]), marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_becomes_the_whole_model(tmp_path, tiny_folder, lora):
    agent, checkpoint = trained(tmp_path, tiny_folder, lora)
    export_checkpoint(checkpoint, tmp_path / "out")
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert lm.dtype == torch.float64  # of the run
    found, expected = logits(lm), logits(agent.actor.lm)
    assert (found - expected).abs().max() < 1e-6
    if lora is None:
        assert all(torch.equal(p, agent.actor.lm.get_parameter(name)) for name, p in lm.named_parameters())
    assert (found - logits(load_causal_lm(str(tiny_folder)).double())).abs().max() > 1e-2
    tokenizer, original = AutoTokenizer.from_pretrained(tmp_path / "out"), load_tokenizer(str(tiny_folder))
    assert tokenizer.chat_template == original.chat_template
    assert tokenizer("a red ball")["input_ids"] == original("a red ball")["input_ids"]
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"model.safetensors", "generation_config.json"}
    names = set(lm.state_dict())
    assert names == set(load_causal_lm(str(tiny_folder)).state_dict())  # and nothing of a critic


@pytest.mark.slow
def test_adapters_become_a_folder_of_peft(tmp_path, tiny_folder):
    agent, checkpoint = trained(tmp_path, tiny_folder, LoRA(rank=2, alpha=3, dropout=0.1))
    export_checkpoint(checkpoint, tmp_path / "out", merge=False)
    saved = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(tiny_folder.resolve())
    assert (saved["r"], saved["lora_alpha"], saved["task_type"]) == (2, 3, "CAUSAL_LM")
    assert saved["inference_mode"]
    lm = peft.PeftModel.from_pretrained(load_causal_lm(str(tiny_folder)).double(), tmp_path / "out")
    expected = logits(agent.actor.lm)
    assert (logits(lm) - expected).abs().max() < 1e-12
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")  # finds the base by itself
    assert (logits(again) - expected).abs().max() < 1e-4
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen3", "gpt_neox"))]
)
@pytest.mark.parametrize("merge", [True, False])
def test_a_policy_is_exported_and_stays_as_it_is(tmp_path, family, merge):
    folder = tiny_model_folder(tmp_path / family, family=family)
    base = load_causal_lm(str(folder))
    lm = LoRA(rank=2).adapt(base, "actor")
    for parameter in lm.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.2)
    policy = LanguageModel(lm)
    before, weights = logits(lm), {name: p.clone() for name, p in policy.named_parameters()}
    export_policy(policy, load_tokenizer(str(folder)), tmp_path / "out", merge=merge)
    assert torch.equal(logits(lm), before)
    assert all(torch.equal(p, weights[name]) for name, p in policy.named_parameters())
    assert sum(p.requires_grad for p in policy.parameters()) > 0
    if merge:
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
        assert again.dtype == torch.float32
    else:
        again = peft.PeftModel.from_pretrained(load_causal_lm(str(folder)), tmp_path / "out")
    assert (logits(again) - before).abs().max() < 1e-4  # float32


def test_a_whole_model_leaves_no_earlier_adapters_in_its_folder(tmp_path, tiny_folder):
    """Transformers would load them with it."""
    lm = LoRA(rank=2).adapt(load_causal_lm(str(tiny_folder)), "actor")
    policy, tokenizer = LanguageModel(lm), load_tokenizer(str(tiny_folder))
    for merge in (False, True):
        for parameter in lm.parameters():
            if parameter.requires_grad:
                parameter.data.normal_(0, 0.2)
        export_policy(policy, tokenizer, tmp_path / "out", merge=merge)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert (logits(again) - logits(lm)).abs().max() < 1e-4


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)], ids=["whole", "merged"])
def test_settings_for_generation_are_exported_as_they_were(tmp_path, tiny_folder, lora):
    """Also those that transformers loads and does not save, such as a temperature without do_sample."""
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20, "eos_token_id": 2}))
    policy = load_policy(str(folder), lora)
    export_policy(policy, load_tokenizer(str(folder)), tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert {key: saved.get(key) for key in ("temperature", "top_k", "eos_token_id", "do_sample")} == {
        "temperature": 0.6,
        "top_k": 20,
        "eos_token_id": 2,
        "do_sample": None,
    }
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.generation_config.temperature == policy.lm.generation_config.temperature == 0.6


def test_an_export_that_fails_leaves_no_folder(tmp_path, tiny_folder, monkeypatch):
    policy, tokenizer = load_policy(str(tiny_folder), None), load_tokenizer(str(tiny_folder))
    monkeypatch.setattr(tokenizer, "save_pretrained", lambda folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_policy(policy, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_export_onto_a_full_disk_leaves_the_earlier_one_as_it_was(tmp_path, tiny_folder):
    tokenizer, larger = load_tokenizer(str(tiny_folder)), tiny_model_folder(tmp_path / "larger", num_hidden_layers=9)
    with mounted(tmp_path / "disk", "400k") as disk:
        export_policy(LanguageModel(load_causal_lm(str(tiny_folder))), tokenizer, disk / "out")
        before = contents(disk / "out")
        for folder in (disk / "out", disk / "new"):
            with pytest.raises(OSError, match=f"'{folder}' cannot be written: .*No space left on device"):
                export_policy(LanguageModel(load_causal_lm(str(larger))), tokenizer, folder)
        assert contents(disk / "out") == before
        assert not (disk / "new").exists()  # so that the same command can be given again


def test_an_export_leaves_nothing_of_earlier_weights_and_of_one_that_was_killed(tmp_path, tiny_folder):
    policy, tokenizer = LanguageModel(load_causal_lm(str(tiny_folder))), load_tokenizer(str(tiny_folder))
    export_policy(policy, tokenizer, tmp_path / "clean")
    out = tmp_path / "out"
    (out / ".draft").mkdir(parents=True)
    parts = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json")
    for name in (*parts, "adapter_config.json", "model.safetensors", "notes.txt", ".draft/model.safetensors"):
        (out / name).write_text("of before")
    export_policy(policy, tokenizer, out)
    assert contents(out) == contents(tmp_path / "clean") | {"notes.txt": b"of before"}


def test_a_tower_of_16_bits_takes_no_bits_from_what_is_trained(tmp_path):
    """It is not trained, has no float32 masters, and comes first among the weights."""
    folder = tiny_vision_folder(tmp_path / "model", "qwen2_5_vl")
    policy = LanguageModel(load_causal_lm(str(folder))).bfloat16()
    for part in tower(policy.lm).values():
        part.requires_grad_(False)
    masters = MasterWeights(policy.named_parameters(), {})
    for master in masters.of(p for p in policy.parameters() if p.requires_grad):
        master.data += 2.0**-20
    weights = masters.in_place_of(policy.state_dict())
    assert next(iter(weights.values())).dtype == torch.bfloat16
    again = load_policy(str(folder), None)
    take_weights(again, weights)
    assert all(torch.equal(weight, weights[name].float()) for name, weight in again.state_dict().items())


@pytest.mark.slow
def test_an_untied_head_is_exported(tmp_path, tiny_folder):
    lm = load_causal_lm(str(tiny_folder))
    lm.config.tie_word_embeddings = False
    lm.lm_head.weight = torch.nn.Parameter(torch.randn_like(lm.lm_head.weight))
    lm.save_pretrained(tmp_path / "untied")
    load_tokenizer(str(tiny_folder)).save_pretrained(tmp_path / "untied")
    agent, checkpoint = trained(tmp_path, tmp_path / "untied", LoRA(rank=2))
    export_checkpoint(checkpoint, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert (logits(again) - logits(agent.actor.lm)).abs().max() < 1e-6
    assert torch.equal(again.lm_head.weight.float(), lm.lm_head.weight)


@pytest.mark.slow
def test_a_run_of_the_command_can_be_exported_from_another_folder(config, tmp_path, tiny_folder, monkeypatch):
    """The model is named by a relative path in the config; the checkpoint knows where that was."""
    lora = {"class_path": "LoRA", "init_args": {"rank": 2, "targets": ["q_proj"]}}
    config["model"]["init_args"] |= {"model": f"../{tiny_folder.name}", "lora": lora}
    (tmp_path / tiny_folder.name).symlink_to(tiny_folder)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(run)
    monkeypatch.setattr(sys, "argv", ["agentrl", "fit", "--config", "config.yaml"])
    command = cli.run()
    monkeypatch.chdir(tmp_path)
    export_checkpoint(Path(command.trainer.checkpoint_callback.best_model_path), tmp_path / "out")
    expected = logits(command.model.actor.lm)
    assert (logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")) - expected).abs().max() < 1e-5


@pytest.fixture
def plain_checkpoint(tmp_path, tiny_folder):
    return trained(tmp_path, tiny_folder, None)[1]


@pytest.mark.slow
def test_wrong_requests_are_told_in_one_sentence(tmp_path, tiny_folder, exact_folder, plain_checkpoint):
    def told(checkpoint, folder=tmp_path / "out", **kwargs):
        with pytest.raises(ValueError) as refused:  # noqa: PT011 - what is said is looked at below
            export_checkpoint(checkpoint, folder, **kwargs)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    (tmp_path / "text.ckpt").write_text("no weights here")
    (tmp_path / "empty.ckpt").touch()
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    assert told(tmp_path / "nowhere.ckpt") == f"there is no checkpoint file '{tmp_path}/nowhere.ckpt'"
    for name in ("text", "empty", "foreign"):
        assert f"'{tmp_path}/{name}.ckpt' is not a checkpoint of agentrl" in told(tmp_path / f"{name}.ckpt")
    assert "exists and is not empty" in told(plain_checkpoint, tmp_path)
    (tmp_path / "killed" / ".draft").mkdir(parents=True)
    export_checkpoint(plain_checkpoint, tmp_path / "killed")
    assert not (tmp_path / "killed" / ".draft").exists()
    assert "exists and is not empty" in told(plain_checkpoint, plain_checkpoint)
    for merge in (True, False):
        assert "has no adapters; leave out --merge" in told(plain_checkpoint, merge=merge)
    assert f"do not fit the model '{exact_folder}'" in told(plain_checkpoint, model=str(exact_folder))
    assert re.search("there is no model folder '/nowhere'.*argument --model", told(plain_checkpoint, model="/nowhere"))
    assert not (tmp_path / "out").exists()
