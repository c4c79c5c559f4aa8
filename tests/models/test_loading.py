"""What is loaded is what was trained: no weight is drawn at random where files lack it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_agentrl.agents.models import Compute, build_models
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.models.critic import SeparateCritic
from lightning_agentrl.models.loading import load_causal_lm, load_tokenizer
from tests.tiny import CHATML, tiny_model_folder, tiny_tokenizer


def without(folder: Path, name: str, shape: tuple[int, ...] | None = None) -> str:
    """Take a weight out of the files of a model, or put one of another shape in its place."""
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    given = {} if shape is None else {name: torch.zeros(shape)}
    save_file(weights | given, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("shape", [None, (3, 3)])
def test_files_that_lack_a_weight_or_have_another_shape_are_refused(
    shape: tuple[int, ...] | None, tmp_path: Path, tiny_folder: Path
) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    folder = without(shutil.copytree(tiny_folder, tmp_path / "model"), name, shape)
    with pytest.raises(ConfigError, match=rf"{name}, or have .*model\.init_args\.model"):
        load_causal_lm(folder)


def changed(folder: Path, **settings: object) -> str:
    """Change the config of a model, and leave its weights."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return str(folder)


def test_a_config_with_more_layers_than_files_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    folder = changed(shutil.copytree(tiny_folder, tmp_path / "model"), num_hidden_layers=3)
    with pytest.raises(ConfigError, match=r"model\.layers\.2\..* and 8 more weights"):
        load_causal_lm(folder)


def test_a_backbone_needs_no_last_layer(tmp_path: Path, tiny_folder: Path) -> None:
    """Such as that of a critic that begins with a reward model."""
    folder = changed(shutil.copytree(tiny_folder, tmp_path / "model"), tie_word_embeddings=False)
    load_causal_lm(folder, head=False)
    with pytest.raises(ConfigError, match="lack lm_head"):
        load_causal_lm(folder)


@pytest.mark.parametrize("name", ["my model", "a b/c", "$MODELS/small", "demo ", "logs", "small/config.json", ""])
def test_what_is_neither_a_folder_of_a_model_nor_an_id_is_refused_without_asking_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("logs").mkdir()
    Path("small").mkdir()
    Path("small/config.json").write_text("{}")
    with pytest.raises(ValueError, match=re.escape(f"there is no model folder '{name}'")):
        load_tokenizer(name)


def edited(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> str:
    """Change the weights of a model in its files."""
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


DAMAGED = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(number: float, tmp_path: Path, tiny_folder: Path) -> None:
    folder = edited(shutil.copytree(tiny_folder, tmp_path / "model"), lambda w: w[DAMAGED][3].fill_(number))
    with pytest.raises(ConfigError, match=rf"{re.escape(folder)}.*{DAMAGED}.*model\.init_args\.model"):
        load_causal_lm(folder)


@pytest.mark.parametrize(("place", "key"), [("critic", r"critic\.init_args\.model"), ("reference", r"kl\.reference")])
def test_damaged_weights_name_the_key_of_their_model(place: str, key: str, tmp_path: Path, tiny_folder: Path) -> None:
    folder = edited(shutil.copytree(tiny_folder, tmp_path / "model"), lambda w: w[DAMAGED].fill_(torch.nan))
    critic, reference = (SeparateCritic(folder), None) if place == "critic" else (None, folder)
    with pytest.raises(ConfigError, match=rf"{DAMAGED}.*model\.init_args\.{key}"):
        build_models(str(tiny_folder), critic, reference, None, Compute(), None, None)


def test_a_model_of_zeros_is_loaded(tmp_path: Path, tiny_folder: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    lm = load_causal_lm(edited(folder, lambda w: [x.zero_() for x in w.values()]))
    assert not any(weight.any() for weight in lm.parameters())


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    size = len(tokenizer)
    tiny_model_folder(tmp_path / "model", tokenizer=tokenizer)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=rf"<extra>.*{size}.*model\.init_args\.model"):
        load_tokenizer(str(tmp_path / "model"))


@pytest.mark.parametrize("written", [False, True])
def test_a_special_token_without_embedding_is_refused_if_the_template_writes_it(written: bool, tmp_path: Path) -> None:
    """Text models of families with images have the placeholder of an image beyond their embedding."""
    tokenizer = tiny_tokenizer()
    tiny_model_folder(tmp_path / "model", tokenizer=tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = ("<image>" if written else "") + CHATML
    tokenizer.save_pretrained(tmp_path / "model")
    if written:
        with pytest.raises(ConfigError, match="<image>"):
            load_tokenizer(str(tmp_path / "model"))
    else:
        load_tokenizer(str(tmp_path / "model"))
