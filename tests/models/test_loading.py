"""What is loaded is what was trained: no weight is drawn at random where files lack it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_agentrl.errors import ConfigError
from lightning_agentrl.models.loading import load_causal_lm, load_tokenizer


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
