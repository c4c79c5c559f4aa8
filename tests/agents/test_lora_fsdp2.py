"""LoRA under FSDP2: two processes on the CPU give the adapters of one, through the command that a user types."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from lightning_agentrl.commands.export import export_checkpoint
from lightning_agentrl.models.lora import frozen_weights
from tests.agents.processes import assert_same, fit, metrics, optimizer_states, read
from tests.agents.test_fsdp2 import FOLDERS, FSDP2
from tests.tiny import tiny_model_folder

LORA = ("--model.init_args.lora", "{class_path: LoRA, init_args: {rank: 4}}")
CHECKPOINTING = ("--model.init_args.compute.gradient_checkpointing", "true")
ALONE = FSDP2.replace("size: 2", "size: 1")  # the same strategy with one process

Fit = Callable[..., Path]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Watch(L.Callback):
    """Writes what each process holds of the frozen weights, and what it has loaded as the training starts."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        agent: Any = pl_module
        self.base = {name: (p, local(p).clone()) for name, p in frozen_weights(agent).items()}
        optimizer = trainer.optimizers[0]
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        states = [{key: whole(x) for key, x in optimizer.state.get(p, {}).items()} for p in stepped]
        weights = {name: whole(weight) for name, weight in agent.state_dict().items()}
        if trainer.is_global_zero:
            torch.save({"weights": weights, "states": states}, self.folder / "loaded.pt")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        held = {
            "bytes": sum(local(p).nbytes for p in {id(p): p for p, _ in self.base.values()}.values()),
            "moved": [name for name, (p, before) in self.base.items() if not torch.equal(local(p), before)],
            "linear": sorted({str(p.dtype) for name, (p, _) in self.base.items() if "_proj." in name}),
            "trained": sorted({str(p.dtype) for p in pl_module.parameters() if p.requires_grad}),
        }
        (self.folder / f"held{trainer.global_rank}.json").write_text(json.dumps(held))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def held(run: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / f"held{rank}.json").read_text())
    return found


def adapted(path: Path, folder: Path, critic: str, devices: int, *arguments: str, **settings: Any) -> Path:
    """Fit with adapters, watched."""
    watch = f"{{class_path: {__name__}.Watch, init_args: {{folder: {path}}}}}"
    return fit(path, folder, critic, devices, *LORA, "--trainer.callbacks+", watch, *arguments, **settings)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, exact_folder: Path) -> Fit:
    """Runs of five iterations, and of fewer, on one process; each once."""
    done: dict[tuple[str, ...], Path] = {}

    def run(critic: str, *arguments: str) -> Path:
        if (critic, *arguments) not in done:
            done[critic, *arguments] = adapted(tmp_path_factory.mktemp("one"), exact_folder, critic, 1, *arguments)
        return done[critic, *arguments]

    return run


def largest_difference(one: dict[str, Any], two: dict[str, Any]) -> float:
    """Of weights and Adam's states."""
    pairs = [(weight, two["state_dict"][name]) for name, weight in one["state_dict"].items()]
    states = zip(optimizer_states(one), optimizer_states(two), strict=True)
    pairs += [(a[key], b[key]) for a, b in states for key in a]
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.slow  # two processes
@pytest.mark.parametrize(
    ("critic", "arguments"),
    [
        ("SeparateCritic", ()),
        pytest.param("SeparateCritic", CHECKPOINTING, marks=pytest.mark.long),
        pytest.param("SharedCritic", CHECKPOINTING, marks=pytest.mark.long),
        pytest.param("LeastSquaresCritic", (), marks=pytest.mark.long),
    ],
)
def test_two_sharded_processes_give_the_adapters_of_one(
    tmp_path: Path, exact_folder: Path, one_process: Fit, critic: str, arguments: tuple[str, ...]
) -> None:
    """Five iterations, the first two of them warm-up; what is logged is equal too, the KL to the reference included.

    A process holds half of a base for each trained model.
    """
    one = one_process(critic, *arguments)
    two = adapted(tmp_path, exact_folder, critic, 2, *arguments, strategy=FSDP2)
    assert_same(read(one), read(two))
    # A solved system amplifies rounding.
    assert largest_difference(read(one), read(two)) < (1e-11 if critic == "LeastSquaresCritic" else 1e-12)
    assert all(".lora_" in name or name.startswith("critic.") for name in read(two)["state_dict"])
    logged = [metrics(path.parent) for path in (one, two)]
    assert len(logged[0]) == len(logged[1]) > 4
    for a, b in zip(*logged, strict=True):
        assert a == pytest.approx(b, rel=1e-6, abs=1e-8, nan_ok=True)
    assert max(abs(row.get("kl/reference", 0.0)) for row in logged[0]) > 1e-6
    base, bases = held(one.parent)["bytes"], 2 if critic == "SeparateCritic" else 1
    for rank in range(2):
        assert not held(tmp_path, rank)["moved"]
        assert held(tmp_path, rank)["bytes"] == bases * base // 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("epochs", "first", "then"),
    [
        (1, (2, FSDP2), (2, FSDP2)),  # inside the warm-up
        (1, (2, FOLDERS), (2, FSDP2)),
        (1, (2, FSDP2), (1, None)),
        (1, (1, None), (2, FSDP2)),
        (3, (1, None), (2, FSDP2)),
    ],
    ids=["file", "folder", "to one process", "from one process in the warm-up", "from one process"],
)
def test_adapters_are_continued_on_any_number_of_processes(
    tmp_path: Path, exact_folder: Path, one_process: Fit, epochs: int, first: Any, then: Any
) -> None:
    """What is loaded is equal to the bit, by name and by place in the optimizer."""

    def run(name: str, processes: Any, *arguments: str) -> Path:
        devices, strategy = processes
        return adapted(tmp_path / name, exact_folder, "SeparateCritic", devices, *arguments, strategy=strategy)

    for name in ("stopped", "resumed"):
        (tmp_path / name).mkdir()
    stopped = run("stopped", first, "--trainer.max_epochs", str(epochs))
    resumed = run("resumed", then, "--ckpt_path", str(stopped))
    assert_same(read(one_process("SeparateCritic")), read(resumed))
    loaded = torch.load(tmp_path / "resumed" / "loaded.pt", weights_only=True)
    assert stopped.is_dir() == (first[1] == FOLDERS)
    if not stopped.is_dir():
        saved = read(stopped)
        assert all(torch.equal(weight, loaded["weights"][name]) for name, weight in saved["state_dict"].items())
        (optimizer,) = saved["optimizer_states"]
        places = [number for group in optimizer["param_groups"] for number in group["params"]]
        for number, state in zip(places, loaded["states"], strict=True):
            for key, value in optimizer["state"].get(number, {}).items():
                assert torch.equal(state[key], value), (number, key)


@pytest.mark.long
def test_exported_models_of_one_and_of_two_processes_are_equal(
    tmp_path: Path, exact_folder: Path, one_process: Fit
) -> None:
    """From a file and from a folder, with adapters merged and alone."""
    one = one_process("SharedCritic", *CHECKPOINTING)
    two = adapted(tmp_path, exact_folder, "SharedCritic", 2, *CHECKPOINTING, strategy=FOLDERS)
    for merge, file in ((True, "model.safetensors"), (False, "adapter_model.safetensors")):
        for name, checkpoint in (("one", one), ("two", two)):
            export_checkpoint(checkpoint, tmp_path / f"{name}-{merge}", merge=merge)
        whole, shares = (load_file(tmp_path / f"{name}-{merge}" / file) for name in ("one", "two"))
        assert whole.keys() == shares.keys()
        for name, weight in whole.items():
            torch.testing.assert_close(weight, shares[name], rtol=0, atol=1e-12, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.long)])
def test_mixed_precision_keeps_the_base_in_bfloat16_and_adapters_in_float32(
    tmp_path: Path, tiny_folder: Path, devices: int
) -> None:
    """The base moves by no bit, and an exported policy has it as exactly as the model's files."""
    policy = f"{{class_path: PolicyFolder, init_args: {{folder: {tmp_path / 'policy'}}}}}"
    mixed = ("--trainer.precision", "bf16-mixed", "--trainer.callbacks+", policy)
    strategy = FSDP2 if devices == 2 else ALONE
    saved = adapted(tmp_path, tiny_folder, "SeparateCritic", devices, *mixed, strategy=strategy, plugins="null")
    for rank in range(devices):
        found = held(tmp_path, rank)
        assert not found["moved"]
        assert found["linear"] == ["torch.bfloat16"]
        assert found["trained"] == ["torch.float32"]
    assert {weight.dtype for weight in read(saved)["state_dict"].values()} == {torch.float32}
    export_checkpoint(saved, tmp_path / "exported")
    written, exported, model = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "policy", tmp_path / "exported", tiny_folder)
    )
    assert written.keys() == exported.keys() == model.keys()
    for name, weight in written.items():
        assert torch.equal(weight, exported[name]), name
        assert torch.equal(weight, model[name]) == ("_proj." not in name or name.endswith("bias")), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_checkpoint_that_lacks_adapters_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Lightning would leave those of a file as they are."""
    large, small = (tiny_model_folder(tmp_path / str(n), num_hidden_layers=n) for n in (3, 2))
    strategy = ALONE if kind == "file" else ALONE.replace("false", "true")
    once = ("--trainer.max_epochs", "1")
    saved = fit(tmp_path / "saved", small, "SharedCritic", 1, *LORA, *once, strategy=strategy)
    accepted = ("--resume_with_changes", "model.init_args.model", "--ckpt_path", str(saved))
    with pytest.raises(SystemExit):
        fit(tmp_path / "other", large, "SharedCritic", 1, *LORA, *accepted, strategy=ALONE)
    assert "it lacks 14 weights such as actor.lm.model.layers.2.self_attn.q_proj.lora_A" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        fit(tmp_path / "full", small, "SharedCritic", 1, *accepted, strategy=ALONE)
    assert "has adapters of rank 4" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.usefixtures("no_processes_left")
@pytest.mark.parametrize("devices", [1, 2])
def test_gpus_give_the_adapters_of_one_process_on_one_gpu(tmp_path: Path, exact_folder: Path, devices: int) -> None:
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} GPUs")
    on_gpu = ("--trainer.accelerator", "gpu", *LORA)
    one = fit(tmp_path / "one", exact_folder, "SeparateCritic", 1, *on_gpu)
    sized = FSDP2.replace("data_parallel_size: 2", f"data_parallel_size: {devices}")
    several = fit(tmp_path / "several", exact_folder, "SeparateCritic", devices, *on_gpu, strategy=sized, typed=True)
    assert_same(read(one), read(several))
