"""Models that read images as policies and critics: what is trained of them, adapters, layers, export."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import CONFIG_MAPPING, AutoImageProcessor, AutoModelForImageTextToText

from lightning_agentrl.agents.checks import check_tower
from lightning_agentrl.agents.models import Compute, Models, build_models
from lightning_agentrl.engines.weights import named_as_in_files, named_weights
from lightning_agentrl.models.critic import Critic, SeparateCritic, SharedCritic
from lightning_agentrl.models.export import export_policy
from lightning_agentrl.models.families import check_family
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import decoder_layers, load_causal_lm, load_tokenizer, read_images
from lightning_agentrl.models.lora import LoRA, linear_layers, merge_adapters
from lightning_agentrl.models.packing import pack
from lightning_agentrl.models.sharding import release, shard, units
from lightning_agentrl.models.vision import text_decoder, tower
from lightning_agentrl.types import Row
from tests.inputs import text_row
from tests.models.seen import picture, reader_of, rows_with_images, text
from tests.tiny import tiny_vision_folder

OTHERS = ("qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3", "qwen3_5")
CLOSE = {"rtol": 0.0, "atol": 2e-5}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return lru_cache(lambda family: tiny_vision_folder(tmp_path_factory.mktemp(family), family))


@pytest.fixture(params=["smolvlm", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def folder(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Path:
    return folder_of(request.param)


def built(
    folder: Path,
    critic: Critic | None = None,
    lora: LoRA | None = None,
    train_tower: bool = False,
    compute: Compute | None = None,
) -> Models:
    return build_models(str(folder), critic, None, lora, compute or Compute(), None, None, train_tower)


def trained(module: nn.Module) -> set[str]:
    return {name for name, weight in module.named_parameters() if weight.requires_grad}


def tower_names(policy: LanguageModel) -> set[str]:
    """Names of its weights."""
    parts = {id(weight) for part in tower(policy.lm).values() for weight in part.parameters()}
    return {name for name, weight in policy.named_parameters() if id(weight) in parts}


def test_the_tower_is_trained_if_asked_for(folder: Path) -> None:
    models = built(folder, SeparateCritic())
    names = tower_names(models.actor)
    assert len(names) > 10
    assert trained(models.actor) == dict(models.actor.named_parameters()).keys() - names
    assert isinstance(models.critic, SeparateCritic)
    assert len(trained(models.critic)) == len(trained(models.actor)) + 2  # the value head
    assert tower_names(models.actor) <= trained(built(folder, train_tower=True).actor)


def test_critics_read_images(folder: Path) -> None:
    models = built(folder, SeparateCritic())
    rows, critic = rows_with_images(reader_of(models.actor)), models.critic
    assert isinstance(critic, SeparateCritic)
    nn.init.ones_(critic.head.linear.weight)
    shared = SharedCritic()
    shared.build(models.actor.hidden_size, load_causal_lm)
    nn.init.ones_(shared.head.linear.weight)
    packed = pack(rows, reader=models.actor.image_reader)
    values = critic(packed, None)
    torch.testing.assert_close(values, shared(packed, models.actor.hidden(packed)))
    apart = torch.cat([critic(pack([row], reader=models.actor.image_reader), None) for row in rows])
    torch.testing.assert_close(values, apart, rtol=1e-4, atol=1e-4)
    values.sum().backward()
    assert all(weight.grad is not None for weight in critic.parameters() if weight.requires_grad)


def test_a_critic_that_reads_images_otherwise_is_refused(
    folder_of: Callable[[str], Path], tiny_folder: Path, tmp_path: Path
) -> None:
    other = tiny_vision_folder(tmp_path, "qwen3_vl", patch_size=4)
    for model in (tiny_folder, other):
        with pytest.raises(ValueError, match=r"does not read images as the actor's does.*critic\.init_args\.model"):
            built(folder_of("qwen3_vl"), SeparateCritic(str(model)))
    built(folder_of("qwen3_vl"), SeparateCritic(str(folder_of("qwen3_vl"))))


@pytest.mark.parametrize("train_tower", [False, True])
def test_recomputed_activations_give_the_same_gradients(folder: Path, train_tower: bool) -> None:
    found = []
    for recompute in (False, True):
        actor = built(folder, train_tower=train_tower, compute=Compute(gradient_checkpointing=recompute)).actor
        actor.hidden(pack(rows_with_images(reader_of(actor)), reader=actor.image_reader)).square().sum().backward()
        found.append({name: p.grad for name, p in actor.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert bool(found[0].keys() & tower_names(actor)) == train_tower
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], msg=name)


@pytest.mark.parametrize(
    "targets",
    [
        "all-linear",
        ["self_attn.q_proj", "mlp.gate_proj"],
        *(pytest.param(names, marks=pytest.mark.slow) for names in (["q_proj", "fc1"], ["q_proj"])),
    ],
    ids=str,
)
def test_adapters_are_of_the_text_alone(folder: Path, targets: str | list[str]) -> None:
    lora = LoRA(rank=2, targets=targets)  # type: ignore[arg-type]
    actor = built(folder, lora=lora).actor
    names = trained(actor)
    text = {id(weight) for weight in text_decoder(actor.lm).parameters()}
    assert names
    assert not [name for name in tower_names(actor) if "lora_" in name]
    assert all("lora_" in name and id(actor.get_parameter(name)) in text for name in names)
    if targets == "all-linear":
        layers = linear_layers(load_causal_lm(str(folder)))
        assert {name.partition(".lora_")[0].removeprefix("lm.") for name in names} == set(layers)
    rows = rows_with_images(reader_of(actor))
    torch.manual_seed(0)
    with torch.no_grad():
        for name in sorted(names):
            actor.get_parameter(name).normal_(0, 0.2)
        packed = pack(rows, reader=actor.image_reader)
        merged = LanguageModel(merge_adapters(actor.lm))
        torch.testing.assert_close(merged.hidden(packed), actor.hidden(packed), **CLOSE)


def test_a_tower_is_no_layer_of_the_decoder(folder: Path, tmp_path: Path) -> None:
    policy = LanguageModel(load_causal_lm(str(folder)))
    layers = decoder_layers(policy)
    assert len(layers) == policy.lm.config.get_text_config().num_hidden_layers
    assert all(any(layer is module for module in text_decoder(policy.lm).modules()) for layer in layers)
    rows = rows_with_images(reader_of(policy))
    packed = pack(rows, reader=policy.image_reader)
    whole = policy.hidden(packed)
    whole.sum().backward()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sharded = LanguageModel(load_causal_lm(str(folder)))
        shard(sharded, init_device_mesh("cpu", (1,)), None)
        assert len(units(sharded)) == 1 + len(layers)
        hidden = sharded.hidden(packed)
        assert torch.equal(hidden, whole)
        hidden.sum().backward()
        release(sharded)
        for (name, a), (_, b) in zip(policy.named_parameters(), sharded.named_parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), name
            if a.grad is not None:
                torch.testing.assert_close(b.grad.full_tensor(), a.grad, msg=name)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoRA(rank=2)], ids=["all", "adapters"])
def test_an_export_reads_images_as_before(folder: Path, tmp_path: Path, lora: LoRA | None) -> None:
    policy = built(folder, lora=lora).actor
    export_policy(policy, load_tokenizer(str(folder)), tmp_path / "out")
    again = LanguageModel(load_causal_lm(str(tmp_path / "out")))
    assert reader_of(again).settings == reader_of(policy).settings
    assert load_tokenizer(str(tmp_path / "out")).chat_template == load_tokenizer(str(folder)).chat_template
    packed = pack(rows_with_images(reader_of(again)), reader=again.image_reader)
    torch.testing.assert_close(again.hidden(packed), policy.hidden(packed))
    AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    weights, files = (set(load_file(path / "model.safetensors")) for path in (tmp_path / "out", folder))
    assert weights == files  # with those of the tower
    if lora is None:
        assert files == {name for name, _ in named_as_in_files(policy.lm, named_weights(policy.lm))} - {
            "lm_head.weight"
        }
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out", backend="pil")
    assert processor.to_dict() == reader_of(policy).processor.to_dict()


@pytest.mark.slow
@pytest.mark.parametrize("train_tower", [False, True], ids=["frozen", "trained"])
def test_steps_on_what_was_seen_lower_its_loss(folder: Path, train_tower: bool) -> None:
    """Two answers to one text, told apart by the image alone."""
    actor = built(folder, train_tower=train_tower).actor
    reader = reader_of(actor)
    images = [reader.read(picture(seed)) for seed in (0, 1)]
    shown = [
        text(1) + image + text(2) + other + text(3, answer)
        for image, answer, other in zip(images, (4, 5), reversed(images), strict=True)
    ]
    rows = [Row(one, (len(one) - 2,)) for one in shown]
    packed = pack(rows, reader=reader)
    optimizer = torch.optim.AdamW([p for p in actor.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for _ in range(20):
        loss = -actor.token_scores(actor.hidden(packed), packed.targets, 1.0).logps.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.5 < losses[0]  # without the image it is log 2 at best


def test_sizes_are_those_of_the_text(folder: Path) -> None:
    policy = LanguageModel(load_causal_lm(str(folder)))
    assert (policy.hidden_size, policy.context_length) == (64, 2048)
    assert policy.shares_prefixes


TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "vocab_size": 384,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
TOWER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "head_dim": 16}
OWN = {
    "gemma4": {
        "text_config": {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 384,
            "global_head_dim": 8,
        },
        "audio_config": None,
    },
    "mistral3": {"text_config": {"model_type": "mistral"}, "vision_config": {"image_size": 28, "patch_size": 14}},
}


@pytest.mark.parametrize("family", sorted(OWN))
def test_models_with_a_tower_can_be_used_for_text_alone(family: str, tmp_path: Path) -> None:
    """As a prefix tree; the tower is kept, untrained, and so are the names that other engines know."""
    own = OWN[family]
    config = CONFIG_MAPPING[family](
        text_config=TEXT | own["text_config"],
        vision_config=TOWER | own.get("vision_config", {}),
        **{name: value for name, value in own.items() if not name.endswith(("text_config", "vision_config"))},
    )
    torch.manual_seed(0)
    plain = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    plain.save_pretrained(tmp_path)
    rows = [text_row(tuple(range(3, 15)) + end, (11, 13)) for end in ((20, 21, 22), (30, 31, 32))]
    expected = torch.cat([
        plain(input_ids=torch.tensor([row.ids]), output_hidden_states=True, use_cache=False)
        .hidden_states[-1][0, list(row.logit_positions)]
        for row in rows
    ])  # fmt: skip
    policy = LanguageModel(load_causal_lm(str(tmp_path)))
    assert policy.shares_prefixes
    assert policy.image_reader is None
    found = policy.hidden(pack(rows))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    found.sum().backward()
    towers = tower_names(policy)
    assert towers
    assert not [name for name, weight in policy.named_parameters() if name in towers and weight.grad is not None]
    policy.lm.save_pretrained(tmp_path / "again")
    names = [set(load_file(folder / "model.safetensors")) for folder in (tmp_path, tmp_path / "again")]
    assert (
        names[0]
        == names[1]
        == {name for name, _ in named_as_in_files(policy.lm, named_weights(policy.lm))} - {"lm_head.weight"}
    )


def test_a_family_with_an_unknown_tower_is_refused() -> None:
    with pytest.raises(ValueError, match=r"llava.*qwen3_vl.*key model\.init_args\.model"):
        check_family("some model", CONFIG_MAPPING["llava"]())


def test_a_missing_image_processor_is_told(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder_of("qwen3_vl") / "config.json").read_text())
    with pytest.raises(ValueError, match=r"key model\.init_args\.model"):
        read_images(str(tmp_path))


def test_a_tower_that_cannot_be_trained_is_told(folder_of: Callable[[str], Path], tiny_folder: Path) -> None:
    check_tower(True, str(folder_of("qwen3_vl")), lora=False)
    check_tower(False, str(tiny_folder), lora=True)
    for folder, lora in ((tiny_folder, False), (folder_of("qwen3_vl"), True)):
        with pytest.raises(ValueError, match=r"model\.init_args\.train_tower"):
            check_tower(True, str(folder), lora)


def test_the_tower_computes_without_dropout(folder: Path, tmp_path: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    if "attention_dropout" in settings["vision_config"]:
        settings["vision_config"]["attention_dropout"] = 0.5
    settings["text_config"]["attention_dropout"] = 0.5
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(settings))
    policy = LanguageModel(load_causal_lm(str(tmp_path))).train()
    packed = pack(rows_with_images(reader_of(policy)), reader=policy.image_reader)
    assert torch.equal(policy.hidden(packed), policy.hidden(packed))
