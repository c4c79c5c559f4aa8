"""DeepSpeed ZeRO: its own engine on two CPU processes, and the optimizer that steps group by group.

Lightning starts DeepSpeed on CUDA only; ``cpu_zero.CPUZero`` leaves out that check and nothing else.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_agentrl.agents.optimizer import step_by_group
from lightning_agentrl.agents.strategies import check_strategy
from lightning_agentrl.agents.zero import GroupedAdamW, prepare_zero
from tests.agents.processes import fit, metrics, read

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the extra deepspeed")
SINGLE = ("--trainer.precision", "32-true")  # DeepSpeed has no float64
SCHEDULE = "{actor: {shape: cosine, warmup_steps: 1, steps: 7}, critic: {shape: linear, steps: 12}}"
SCHEDULED = (*SINGLE, "--model.init_args.optim.schedule", SCHEDULE)
SHARE = Path("checkpoint", "mp_rank_00_model_states.pt")  # where stages 1 and 2 have all weights
ROOT = Path(__file__).parents[2]


def groups(kind):
    torch.manual_seed(0)
    parameters = {name: torch.nn.Parameter(torch.randn(5)) for name in ("actor", "critic")}
    made = [{"name": name, "params": [p], "lr": 0.1} for name, p in parameters.items()]
    return parameters, kind(made, weight_decay=0.1)


def test_the_optimizer_below_zero_steps_and_clips_each_group_as_the_plain_one_does():
    """Warm-up first, in which the actor neither moves nor ages; then both."""
    limits = {"actor": 0.5, "critic": 100.0}
    told = []
    for kind in (torch.optim.AdamW, GroupedAdamW):
        parameters, optimizer = groups(kind)
        torch.manual_seed(1)
        norms = []
        for held in ("actor", "actor", None, None):
            for parameter in parameters.values():
                parameter.grad = torch.randn(5)
            norms.append(step_by_group(optimizer, limits, held, allowed=lambda norms: True, discard=optimizer.step))
            if held:
                assert not optimizer.state[parameters["actor"]]
        told.append((parameters, norms))
    (plain, plain_norms), (grouped, grouped_norms) = told
    for a, b in zip(plain_norms, grouped_norms, strict=True):
        assert a == pytest.approx(b, rel=1e-6)
    assert plain_norms[-1]["actor"] > limits["actor"]  # was clipped
    for name in plain:
        torch.testing.assert_close(plain[name], grouped[name])


def test_a_skipped_step_below_zero_moves_and_ages_no_group():
    limits = {"actor": 0.5, "critic": 100.0}
    parameters, optimizer = groups(GroupedAdamW)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = torch.randn(5)
    assert step_by_group(optimizer, limits, None, allowed=lambda norms: False, discard=optimizer.step) == {}
    assert all(torch.equal(before[name], p) and not optimizer.state[p] for name, p in parameters.items())
    assert all(p.grad is None for p in parameters.values())  # nothing of it is left for the next step


class Trainer:
    num_devices, num_nodes, precision = 4, 1, "32-true"

    def __init__(self, precision="32-true", **zero):
        self.precision = precision
        self.strategy = object.__new__(DeepSpeedStrategy)  # the real one asks for its package
        self.strategy.config = {"zero_optimization": {"stage": 2}}
        for key, value in zero.items():
            self.strategy.config["zero_optimization" if key == "zero" else key] = value


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_that_were_tried_are_taken_and_leave_the_boundary_of_a_step_to_us(stage):
    trainer = Trainer(zero={"stage": stage, "overlap_comm": True})
    check_strategy(trainer)
    prepare_zero(trainer.strategy)
    assert trainer.strategy.config["managed_gradient_accumulation"] is False
    assert trainer.strategy.config["zero_optimization"]["overlap_comm"] == (stage == 2)


@pytest.mark.parametrize(
    ("trainer", "lora", "said"),
    [
        (Trainer(zero={"stage": 3}), False, "trainer.strategy.init_args.stage to one of 1, 2"),
        (Trainer(zero={}), False, "trainer.strategy.init_args.stage"),
        (Trainer("bf16-mixed"), False, "ModelParallelStrategy with bf16-mixed"),
        (Trainer(gradient_clipping=1.0), False, "model.init_args.optim.max_grad_norm_actor"),
        (Trainer(zero={"stage": 2, "offload_optimizer": {"device": "cpu"}}), False, "offloading"),
        (Trainer(), True, "remove model.init_args.lora"),
    ],
)
def test_settings_of_zero_that_would_do_something_else_are_refused(trainer, lora, said):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - what it says is compared
        check_strategy(trainer, lora)
    assert said in str(error.value)


def chosen(logged):
    """What does not hang on the last digits of float32."""
    keys = ("grad_norm/actor", "grad_norm/critic", "critic/loss", "rollout/reward_per_turn")
    return {key: logged[key] for key in keys if key in logged}


@needs_deepspeed
@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 2])
def test_two_zero_processes_take_the_steps_of_one(tmp_path, tiny_folder, monkeypatch, stage):
    """In float32, to its rounding, and with rates that change. The first run compiles a part of DeepSpeed."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    strategy = f"{{class_path: tests.agents.cpu_zero.CPUZero, init_args: {{stage: {stage}}}}}"
    one = read(fit(tmp_path / "one", tiny_folder, "SeparateCritic", 1, *SCHEDULED, plugins="null"))
    two = fit(tmp_path / "two", tiny_folder, "SeparateCritic", 2, *SCHEDULED, strategy=strategy, plugins="null")
    weights = torch.load(two / SHARE, weights_only=False)["module"]
    assert one["state_dict"].keys() == weights.keys()
    for name, weight in one["state_dict"].items():
        # Adam makes full steps of gradients that are nothing but rounding; all others agree.
        assert (weight - weights[name]).abs().median() < 1e-5, name
    logged = [metrics(tmp_path / name) for name in ("one", "two")]
    assert len(logged[0]) == len(logged[1]) > 4
    for a, b in zip(*logged, strict=True):
        assert chosen(a) == pytest.approx(chosen(b), rel=1e-3, abs=1e-5)


@needs_deepspeed
@pytest.mark.long
@pytest.mark.parametrize("stop", [1, 3], ids=["in the warm-up", "in the actor's schedule"])
def test_a_zero_run_is_continued(tmp_path, tiny_folder, monkeypatch, stop):
    """With exactly the weights of a run that did not stop, and at the rates that come next."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    def run(name, *arguments):
        strategy = "{class_path: tests.agents.cpu_zero.CPUZero, init_args: {stage: 2}}"
        path = tmp_path / name
        return fit(path, tiny_folder, "SeparateCritic", 2, *SCHEDULED, *arguments, strategy=strategy, plugins="null")

    whole, stopped = run("whole"), run("stopped", "--trainer.max_epochs", str(stop))
    resumed = run("resumed", "--ckpt_path", str(stopped))
    a, b = (torch.load(path / SHARE, weights_only=False) for path in (whole, resumed))
    assert all(torch.equal(a["module"][name], b["module"][name]) for name in a["module"])
    assert a["rates"]["taken"] == b["rates"]["taken"] == {"actor": 6, "critic": 10}


@needs_deepspeed
@pytest.mark.gpu
@pytest.mark.usefixtures("no_processes_left")
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_on_gpus_takes_the_steps_of_one_process(tmp_path, tiny_folder, stage):
    devices = min(torch.cuda.device_count(), 2)
    on_gpu = (*SINGLE, "--trainer.accelerator", "gpu")
    fit(tmp_path / "one", tiny_folder, "SeparateCritic", 1, *on_gpu, plugins="null")
    fit(
        tmp_path / "zero",
        tiny_folder,
        "SeparateCritic",
        devices,
        *on_gpu,
        strategy=f"deepspeed_stage_{stage}",
        plugins="null",
    )
    for a, b in zip(*(metrics(tmp_path / name) for name in ("one", "zero")), strict=True):
        assert chosen(a) == pytest.approx(chosen(b), rel=1e-3, abs=1e-5)
