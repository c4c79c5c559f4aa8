"""PolicyFolder says at the start what would fail at the end, and writes what an export does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lightning_agentrl.callbacks import PolicyFolder
from lightning_agentrl.commands.export import export_checkpoint
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.models.lora import LoRA
from lightning_agentrl.rollout.collector import Collector
from tests.agents import processes
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.agents.test_fsdp2 import FSDP2
from tests.tiny import tiny_model_folder


@pytest.mark.parametrize("place", ["taken", "taken/policy"])
def test_a_folder_that_cannot_be_written_to_is_refused_before_the_agent_plays(
    place: str, tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("a file")
    data = make_data()
    monkeypatch.setattr(Collector, "collect", lambda *arguments: pytest.fail("the agent plays"))
    trainer = make_trainer(tmp_path, 1, [PolicyFolder(str(tmp_path / place))])
    with pytest.raises(ConfigError, match=rf"PolicyFolder .*'.*{place}'.*trainer\.callbacks"):
        trainer.fit(make_agent(tiny_folder), data)


def test_the_model_of_the_run_is_not_written_over(tmp_path: Path) -> None:
    """A resumed run reads it again, as its reference."""
    model = tiny_model_folder(tmp_path / "model")
    (tmp_path / "link").symlink_to(model)
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    with pytest.raises(ConfigError, match=r"'.*link'.*trainer\.callbacks"):
        make_trainer(tmp_path, 1, [PolicyFolder(str(tmp_path / "link"))]).fit(make_agent(model), make_data())
    assert {file.name: file.read_bytes() for file in model.iterdir()} == before


def assert_same_weights(folder: Path, exported: Path) -> None:
    weights, expected = (load_file(place / "model.safetensors") for place in (folder, exported))
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert weight.dtype == torch.float32, name
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize(
    ("precision", "lora"),
    [
        ("bf16-true", None),
        pytest.param("bf16-true", LoRA(rank=2), marks=pytest.mark.slow),
        pytest.param("bf16-mixed", LoRA(rank=2), marks=pytest.mark.slow),
        pytest.param("bf16-mixed", None, marks=pytest.mark.slow),
        pytest.param("32-true", LoRA(rank=2), marks=pytest.mark.slow),
    ],
)
def test_weights_are_those_of_an_export(precision: str, lora: LoRA | None, tmp_path: Path, tiny_folder: Path) -> None:
    """With all that 16 bits have no room for."""
    trainer = make_trainer(tmp_path, 1, [PolicyFolder(str(tmp_path / "policy"))], precision=precision)
    trainer.fit(make_agent(tiny_folder, lora=lora, lr_actor=1e-5), make_data())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    export_checkpoint(tmp_path / "one.ckpt", tmp_path / "exported")
    assert_same_weights(tmp_path / "policy", tmp_path / "exported")


@pytest.mark.long
def test_weights_of_shares_are_those_of_an_export(tmp_path: Path, tiny_folder: Path) -> None:
    written = ("--trainer.callbacks+", f"{{class_path: PolicyFolder, init_args: {{folder: {tmp_path / 'policy'}}}}}")
    mixed = ("--trainer.precision", "bf16-mixed", *written)
    saved = processes.fit(tmp_path, tiny_folder, "SharedCritic", 2, *mixed, strategy=FSDP2, plugins="null")
    export_checkpoint(saved, tmp_path / "exported")
    assert_same_weights(tmp_path / "policy", tmp_path / "exported")


def test_no_folder_is_not_the_working_folder():
    with pytest.raises(ValueError, match="needs a folder"):
        PolicyFolder("")
