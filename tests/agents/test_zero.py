"""DeepSpeed ZeRO: its own engine on two CPU processes, and the optimizer that steps group by group.

Lightning starts DeepSpeed on CUDA only; ``cpu_zero.CPUZero`` leaves out that check and nothing else.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, SingleDeviceStrategy

from lightning_agentrl.agents.checkpoint import OF_ZERO
from lightning_agentrl.agents.checks import check_critic
from lightning_agentrl.agents.optim import clip_by_group, step_or_discard
from lightning_agentrl.agents.saved_policy import PREFIX
from lightning_agentrl.agents.sharding import GroupedAdamW, check_strategy, prepare_zero
from lightning_agentrl.commands.export import export_checkpoint
from lightning_agentrl.models.critic import LeastSquaresCritic, SharedCritic
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm
from tests.agents.harness import make_agent, make_data
from tests.agents.processes import fit, metrics, read

ROOT = Path(__file__).parents[2]
INSTALLED = importlib.util.find_spec("deepspeed") is not None
APART = ROOT / "build" / "deepspeed"  # `make test-rest` puts it there, where only these tests find it
needs_deepspeed = pytest.mark.skipif(not (INSTALLED or APART.is_dir()), reason="`make build/deepspeed` installs it")
SINGLE = ("--trainer.precision", "32-true")  # DeepSpeed has no float64
SCHEDULE = "{actor: {shape: cosine, warmup_steps: 1, steps: 7}, critic: {shape: linear, steps: 12}}"
SCHEDULED = (*SINGLE, "--model.init_args.optim.schedule", SCHEDULE)
MIXED = ("--trainer.precision", "bf16-mixed")


def groups(kind):
    torch.manual_seed(0)
    parameters = {name: torch.nn.Parameter(torch.randn(5)) for name in ("actor", "critic")}
    made = [{"name": name, "params": [p], "lr": 0.1} for name, p in parameters.items()]
    return parameters, kind(made, weight_decay=0.1)


class Wrapper:
    """Lightning's wrapper of an optimizer, and the strategy that steps past it."""

    def __init__(self, optimizer):
        self.optimizer, self.param_groups, self.step = optimizer, optimizer.param_groups, optimizer.step

    def optimizer_step(self, optimizer, closure):
        optimizer.step(closure)


def step(optimizer, limits, held, allowed=True):
    wrapper = Wrapper(optimizer)
    norms = clip_by_group(wrapper, limits, held)
    return norms | step_or_discard(wrapper, wrapper, allowed)


def test_the_optimizer_below_zero_steps_and_clips_each_group_as_the_plain_one_does():
    """First nothing, then a warm-up, in which the actor neither moves nor ages; then both."""
    limits = {"actor": 0.5, "critic": 100.0}
    results = []
    for kind in (torch.optim.AdamW, GroupedAdamW):
        parameters, optimizer = groups(kind)
        torch.manual_seed(1)
        norms = []
        for held in (["actor", "critic"], ["actor"], ["actor"], [], []):
            for parameter in parameters.values():
                parameter.grad = torch.randn(5)
            norms.append(step(optimizer, limits, held))
            if held:
                assert not optimizer.state[parameters["actor"]]
        results.append((parameters, norms))
    (plain, plain_norms), (grouped, grouped_norms) = results
    for a, b in zip(plain_norms, grouped_norms, strict=True):
        assert a == pytest.approx(b, rel=1e-6)
    assert plain_norms[-1]["actor"] > limits["actor"]  # was clipped
    for name in plain:
        torch.testing.assert_close(plain[name], grouped[name])


@pytest.mark.parametrize(("scale", "limit"), [(1.0, 0.5), (1.0, 100.0), (1e-6, 1e-7)])
def test_shares_below_zero_are_clipped_as_one_gradient_is(scale, limit):
    results = []
    for kind in (torch.optim.AdamW, GroupedAdamW):
        torch.manual_seed(0)
        shares = [torch.nn.Parameter(torch.randn(size)) for size in (3, 4)]
        for share in shares:
            share.grad = scale * torch.randn(share.shape)
        optimizer = kind([{"name": "actor", "params": shares}], lr=0.1)
        norms = step(optimizer, {"actor": limit}, [])
        results.append((norms["actor"], [share.grad for share in shares]))
    (norm, gradients), (below_norm, below_gradients) = results
    assert below_norm == pytest.approx(norm, rel=1e-6)
    torch.testing.assert_close(below_gradients, gradients, rtol=1e-5, atol=0)


def test_a_skipped_step_below_zero_moves_and_ages_no_group():
    limits = {"actor": 0.5, "critic": 100.0}
    parameters, optimizer = groups(GroupedAdamW)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = torch.randn(5)
    assert step(optimizer, limits, [], allowed=False) == {}
    assert all(torch.equal(before[name], p) and not optimizer.state[p] for name, p in parameters.items())
    assert all(p.grad is None for p in parameters.values())  # nothing of it is left for the next step


class Trainer:
    num_devices, num_nodes, precision = 4, 1, "32-true"
    max_epochs, max_steps, callbacks = 1, -1, ()

    def __init__(self, precision="32-true", **zero):
        self.precision = precision
        self.strategy = object.__new__(DeepSpeedStrategy)  # the real one asks for its package
        self.strategy.precision_plugin = DeepSpeedPrecision(precision)
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


def test_gradients_of_a_second_run_are_seen_by_its_own_watch_alone(tiny_folder):
    agent = make_agent(tiny_folder)
    agent.configure_model()
    agent._trainer = Trainer()
    agent._trainer.datamodule = make_data()
    watches = [agent.configure_optimizers() and agent.steps.gradient_watch for _ in range(2)]
    (torch.inf * next(agent.actor.parameters()).sum()).backward()
    assert [watch.finite() for watch in watches] == [True, False]


@pytest.mark.parametrize(
    ("trainer", "lora", "said"),
    [
        (Trainer(zero={"stage": 3}), False, "trainer.strategy.init_args.stage to one of 1, 2"),
        (Trainer(zero={}), False, "trainer.strategy.init_args.stage"),
        (Trainer("bf16-true"), False, "one of 32-true, bf16-mixed"),
        (Trainer(gradient_clipping=1.0), False, "model.init_args.optim.max_grad_norm_actor"),
        (Trainer(zero={"stage": 2, "offload_optimizer": {"device": "cpu"}}), False, "offloading"),
        (Trainer(), True, "is untested"),
    ],
)
def test_settings_of_zero_that_would_do_something_else_are_refused(trainer, lora, said):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - what it says is compared
        check_strategy(trainer, lora)
    assert said in str(error.value)


def test_weights_that_are_rescaled_behind_the_back_of_zero_are_refused():
    strategy = Trainer(zero={"stage": 1}).strategy
    with pytest.raises(ValueError, match=r"popart does not work with DeepSpeedStrategy"):
        check_critic(SharedCritic(popart=0.1), strategy)
    with pytest.raises(ValueError, match=r"^LeastSquaresCritic does not work with DeepSpeedStrategy.*SharedCritic"):
        check_critic(LeastSquaresCritic(), strategy)
    for fine in (SharedCritic(), None):
        check_critic(fine, strategy)
    check_critic(LeastSquaresCritic(), SingleDeviceStrategy(torch.device("cpu")))


def chosen(logged):
    """What does not hang on the last digits of float32."""
    keys = ("grad_norm/actor", "grad_norm/critic", "critic/loss", "rollout/reward_per_turn")
    return {key: logged[key] for key in keys if key in logged}


@pytest.fixture
def zero(tmp_path, tiny_folder, monkeypatch):
    """Fit with two processes under ZeRO; the checkpoint."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    path = (str(ROOT), str(APART), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))

    def run(name, stage, *arguments):
        strategy = f"{{class_path: tests.agents.cpu_zero.CPUZero, init_args: {{stage: {stage}}}}}"
        path = tmp_path / name
        return fit(path, tiny_folder, "SeparateCritic", 2, *arguments, strategy=strategy, plugins="null", typed=True)

    return run


def weights(checkpoint):
    return torch.load(checkpoint / OF_ZERO, weights_only=True)["module"]


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 2])
def test_two_zero_processes_take_the_steps_of_one(tmp_path, tiny_folder, zero, stage):
    """In float32, to its rounding, and with rates that change; stage 2 shares the gradients, too."""
    one = read(fit(tmp_path / "one", tiny_folder, "SeparateCritic", 1, *SCHEDULED, plugins="null"))
    two = zero("two", stage, *SCHEDULED)
    assert one["state_dict"].keys() == weights(two).keys()
    for name, weight in one["state_dict"].items():
        # Adam makes full steps of gradients that are nothing but rounding; all others agree.
        assert (weight - weights(two)[name]).abs().median() < 1e-5, name
    logged = [metrics(tmp_path / name) for name in ("one", "two")]
    assert len(logged[0]) == len(logged[1]) > 4
    for a, b in zip(*logged, strict=True):
        assert chosen(a) == pytest.approx(chosen(b), rel=1e-3, abs=1e-5)
    export_checkpoint(two, tmp_path / "exported")
    actor = {name.removeprefix(PREFIX): w for name, w in weights(two).items() if name.startswith(PREFIX)}
    exported = LanguageModel(load_causal_lm(str(tmp_path / "exported"))).state_dict()
    assert actor.keys() == exported.keys()
    assert all(torch.equal(weight, exported[name]) for name, weight in actor.items())


@needs_deepspeed
@pytest.mark.long
def test_bf16_under_zero_rounds_no_weight(tmp_path, tiny_folder, zero):
    """As in one process, to the rounding of bfloat16, until that samples another token."""
    fit(tmp_path / "one", tiny_folder, "SeparateCritic", 1, *MIXED, plugins="null")
    two = zero("two", 2, *MIXED)
    for name, weight in weights(two).items():
        assert weight.dtype == torch.float32
        assert name.endswith("norm.weight") or not torch.equal(weight, weight.bfloat16().float()), name
    first, second = (metrics(tmp_path / name)[0] for name in ("one", "two"))
    assert chosen(first) == pytest.approx(chosen(second), rel=2e-2, abs=1e-3)


@needs_deepspeed
@pytest.mark.parametrize(
    "stop",
    [
        pytest.param(1, id="in the warm-up", marks=pytest.mark.long),
        pytest.param(3, id="in the actor's schedule", marks=pytest.mark.slow),
    ],
)
def test_a_zero_run_is_continued(zero, stop):
    """With exactly the weights of a run that did not stop, and at the rates that come next."""
    whole, stopped = zero("whole", 2, *SCHEDULED), zero("stopped", 2, *SCHEDULED, "--trainer.max_epochs", str(stop))
    resumed = zero("resumed", 2, *SCHEDULED, "--ckpt_path", str(stopped))
    a, b = (torch.load(path / OF_ZERO, weights_only=False) for path in (whole, resumed))
    assert all(torch.equal(a["module"][name], b["module"][name]) for name in a["module"])
    for saved in (a, b):
        assert (saved["lr_schedulers"][0]["last_epoch"], saved["warmup_steps"]) == (10, 4)


@pytest.mark.skipif(not INSTALLED, reason="needs the extra deepspeed")
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
        typed=True,
    )
    for a, b in zip(*(metrics(tmp_path / name) for name in ("one", "zero")), strict=True):
        assert chosen(a) == pytest.approx(chosen(b), rel=1e-3, abs=1e-5)
