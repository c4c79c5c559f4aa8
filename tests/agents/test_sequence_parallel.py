"""Runs in which ranks read their rows together take the steps of one process."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from transformers import CONFIG_MAPPING

from lightning_agentrl.agents.checks import check_sequence
from lightning_agentrl.models.critic import SeparateCritic
from tests.agents import sequence_ranks
from tests.agents.harness import make_agent
from tests.agents.processes import POPART, assert_same, fit, metrics, read
from tests.agents.test_fsdp2 import FSDP2
from tests.started import together
from tests.tiny import tiny_model_folder

TOGETHER = ("--model.init_args.compute.sequence_parallel", "2")
# so that there are several micro-batches, and recomputed layers
SMALL = (
    *("--model.init_args.compute.max_tokens_per_micro_batch", "200"),
    *("--model.init_args.compute.gradient_checkpointing", "true"),
)


def assert_equal_runs(one: Path, other: Path) -> None:
    assert_same(read(one / "last.ckpt"), read(other / "last.ckpt"))
    logged = [metrics(path) for path in (one, other)]
    assert len(logged[0]) == len(logged[1]) > 4
    for a, b in zip(*logged, strict=True):
        assert a == pytest.approx(b, rel=1e-6, abs=1e-8, nan_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("critic", "strategy"),
    [
        ("SeparateCritic", None),
        *(
            pytest.param(critic, strategy, marks=pytest.mark.long)
            for critic, strategy in (
                ("SharedCritic", None),
                ("LeastSquaresCritic", None),
                ("SeparateCritic", FSDP2),
                ("SharedCritic", FSDP2),
                ("LeastSquaresCritic", FSDP2),
            )
        ),
    ],
)
def test_two_ranks_that_read_together_give_the_weights_of_one_process(tmp_path, exact_folder, critic, strategy):
    settings = SMALL if critic == "LeastSquaresCritic" else (*SMALL, *POPART)
    fit(tmp_path / "one", exact_folder, critic, 1, *settings)
    fit(tmp_path / "two", exact_folder, critic, 2, *settings, *TOGETHER, strategy=strategy)
    assert_equal_runs(tmp_path / "one", tmp_path / "two")


@pytest.mark.long
@pytest.mark.parametrize("strategy", [None, FSDP2.replace("data_parallel_size: 2", "data_parallel_size: 4")])
def test_two_groups_of_two_give_the_weights_of_one_process(tmp_path, exact_folder, strategy):
    fit(tmp_path / "one", exact_folder, "SeparateCritic", 1, *SMALL)
    fit(tmp_path / "four", exact_folder, "SeparateCritic", 4, *SMALL, *TOGETHER, strategy=strategy)
    assert_equal_runs(tmp_path / "one", tmp_path / "four")


@pytest.mark.long
@pytest.mark.parametrize("strategy", [None, FSDP2], ids=["ddp", "fsdp2"])
def test_adapters_are_trained_together(tmp_path, exact_folder, strategy):
    lora = ("--model.init_args.lora", "{class_path: LoRA, init_args: {rank: 4}}", *SMALL)
    fit(tmp_path / "one", exact_folder, "SeparateCritic", 1, *lora)
    fit(tmp_path / "two", exact_folder, "SeparateCritic", 2, *lora, *TOGETHER, strategy=strategy)
    assert_equal_runs(tmp_path / "one", tmp_path / "two")


@pytest.mark.long
@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_a_run_goes_on_with_another_number_of_ranks_that_read_together(tmp_path, exact_folder, first, then):
    def run(name: str, parts: int, *arguments: str) -> Path:
        together = TOGETHER if parts == 2 else ()
        return fit(tmp_path / name, exact_folder, "SharedCritic", 2, *SMALL, *together, *arguments)

    one = fit(tmp_path / "one", exact_folder, "SharedCritic", 1, *SMALL)
    stopped = run("stopped", first, "--trainer.max_epochs", "3")
    assert_same(read(one), read(run("resumed", then, "--ckpt_path", str(stopped))))


@pytest.fixture(scope="module")
def reports(tmp_path_factory, exact_folder) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("together")
    together(2, sequence_ranks.run, str(folder), str(exact_folder))
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_losses_of_no_rows_may_be_constant(tmp_path, exact_folder, reports):
    folder, found = reports
    assert sum(report["empty"] for report in found) > 0
    alone = sequence_ranks.fit(sequence_ranks.ConstantOfNothing, tmp_path, str(exact_folder), 1, 1).state_dict()
    for rank in range(2):
        for name, weight in torch.load(folder / f"{rank}.pt").items():
            torch.testing.assert_close(weight, alone[name], rtol=0, atol=1e-8, msg=name)


@pytest.mark.slow
def test_ranks_stop_together_after_scoring(reports):
    assert [report["stopped"] for report in reports[1]] == [signal.SIGTERM] * 2


NAMES = ("compute", "needs", "reference", "critic", "model")


def config_folder(path: Path, family: str, **settings: Any) -> Path:
    CONFIG_MAPPING[family](**settings).save_pretrained(path)
    return path


def checked(model: Path, parts: int, world: int, strategy: Any = None, **settings: Any) -> None:
    agent = make_agent(model, sequence_parallel=parts, **settings)
    trainer = SimpleNamespace(num_devices=world, num_nodes=1, strategy=strategy or DDPStrategy())
    check_sequence(SimpleNamespace(**{name: getattr(agent, name) for name in NAMES}, trainer=trainer))


def test_heads_decide_how_many_ranks_can_read_together(tmp_path):
    ten = config_folder(tmp_path / "ten", "llama", num_attention_heads=10, num_key_value_heads=2, hidden_size=80)
    checked(ten, 2, 4)
    with pytest.raises(ValueError, match=r"sequence_parallel 4 cannot .*'num_attention_heads': 10.* can be 1 or 2"):
        checked(ten, 4, 4)
    four = config_folder(tmp_path / "four", "llama", num_attention_heads=4, num_key_value_heads=2, hidden_size=32)
    for other in ({"critic": SeparateCritic(str(ten))}, {"kl_reference": str(ten)}):
        with pytest.raises(ValueError, match="cannot divide the attention heads"):
            checked(four, 4, 8, **other)


def test_processes_make_whole_groups(tmp_path):
    with pytest.raises(ValueError, match="needs a multiple of 2 processes, and the run has 3"):
        checked(tmp_path, 2, 3)
    with pytest.raises(ValueError, match=r"sequence_parallel must be at least 1, got 0"):
        checked(tmp_path, 0, 1)


def test_models_that_cannot_be_read_together_are_refused(tmp_path):
    with pytest.raises(ValueError, match="DeepSpeedStrategy is not supported"):
        checked(tmp_path, 2, 2, object.__new__(DeepSpeedStrategy))
    with pytest.raises(ValueError, match=r"recurrent or convolution layers, so .*sequence_parallel must be 1"):
        checked(config_folder(tmp_path / "states", "lfm2"), 2, 2)
    with pytest.raises(ValueError, match=r"family bloom, .* so .*sequence_parallel must be 1"):
        checked(config_folder(tmp_path / "padded", "bloom"), 2, 2)


@pytest.mark.gpu
@pytest.mark.usefixtures("no_processes_left")
@pytest.mark.parametrize("strategy", [None, FSDP2], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize("precision", ["exact", "bf16-mixed"])
def test_two_gpus_that_read_together_give_the_weights_of_one(tmp_path, exact_folder, strategy, precision):
    """In float64 by dense attention; in bfloat16 by both kernels of a GPU, with a window and without."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    settings = ("--trainer.accelerator", "gpu", *SMALL)
    if precision == "exact":
        folders, bound, options = [exact_folder], 1e-8, {}
    else:
        folders = [
            tiny_model_folder(tmp_path / "qwen3", "qwen3", head_dim=64),
            tiny_model_folder(tmp_path / "mistral", "mistral", head_dim=64, sliding_window=16),
        ]
        settings, bound, options = (*settings, "--trainer.precision", precision), 5e-3, {"plugins": "null"}
    for k, folder in enumerate(folders):
        one = fit(tmp_path / f"one{k}", folder, "SeparateCritic", 1, *settings, **options)
        two = fit(
            *(tmp_path / f"two{k}", folder, "SeparateCritic", 2, *settings, *TOGETHER),
            strategy=strategy,
            typed=True,
            **options,
        )
        for name, weight in read(one)["state_dict"].items():
            torch.testing.assert_close(read(two)["state_dict"][name], weight, rtol=0, atol=bound, msg=name)
