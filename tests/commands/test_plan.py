"""`agentrl fit --dry-run`: the plan is that of the run, counted without weights; nothing is trained or written."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_agentrl.agents.models import Compute, Models, build_models
from lightning_agentrl.commands.memory import Place, Step, activation_bytes, budget_text, memory_plan
from lightning_agentrl.commands.plan import RunPlan, example_rows, planned_trainer
from lightning_agentrl.engines import EngineMemory, VLLMEngine
from lightning_agentrl.models.critic import Critic, LeastSquaresCritic, SeparateCritic, SharedCritic
from lightning_agentrl.models.packing import pack, plan_micro_batches
from lightning_agentrl.models.shapes import SHAPES, empty_causal_lm, shape_of
from lightning_agentrl.types import ModelInput, Row
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.cli import Config, changed, fit
from tests.tiny import tiny_model_folder


@pytest.fixture
def dry_run(
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[[int], str]:
    """Run `agentrl fit --dry-run` with a warm-up of three epochs; gives what it shows."""

    def run(max_epochs: int) -> str:
        warmup = {"class_path": "CriticWarmup", "init_args": {"rollouts": 2, "rounds": 3, "fraction": 0.5}}
        others = [{"class_path": name} for name in ("TurnLog", "RunSummary", "ModelCheckpoint")]
        small = changed(config, "trainer.callbacks", [warmup, *others])
        small["trainer"] |= {"max_epochs": max_epochs, "logger": True, "default_root_dir": "runs/planned"}
        fit(small, tmp_path, monkeypatch, "--dry-run")
        return capsys.readouterr().out

    return run


def test_a_dry_run_shows_the_plan_and_writes_nothing(dry_run: Callable[[int], str], tmp_path: Path) -> None:
    shown = dry_run(10)
    assert [path.name for path in tmp_path.iterdir()] == ["given.yaml"]
    for line in (
        "4 environments * 2 turns = 8",
        "2, each on 4 turns",
        "3 epochs, in which only the critic",
        "7, 56 turns",
        "SharedCritic, 33 parameters",
        "frozen copy of the initial policy",
        "at most 4 tokens",
        "learning rate of the critic  1e-05",
    ):
        assert line in shown
    head, prompt = shown.split("one prompt: ")
    total, parts = re.match(r"(\d+) tokens \(([^)]*)\)", prompt).groups()
    assert sum(int(part.split()[1]) for part in parts.split(", ")) == int(total)
    assert "<|im_start|>assistant" in prompt
    assert re.search(r"expected peak +\d", head)


@pytest.mark.parametrize(
    ("gpu", "tokens", "expected"),
    [
        (90, 10**6, "64 tokens"),  # a twentieth is left to the allocator
        (65, 10**6, "32 tokens"),
        (1000, 40, "64 tokens"),  # the step has no more
        (1000, 10, "16 tokens"),
        (5, 10**6, "none fits"),
    ],
)
def test_plan_suggests_the_largest_useful_micro_batch_that_fits(gpu: int, tokens: int, expected: str) -> None:
    suggested = budget_text(lambda size: size + 10, budget=16, tokens=tokens, gpu=gpu)
    assert suggested.startswith(expected)
    assert ("max_tokens_per_micro_batch" in suggested) is (expected not in ("16 tokens", "none fits"))


@pytest.mark.slow
def test_a_warm_up_that_outlasts_the_run_is_told(dry_run: Callable[[int], str]) -> None:
    assert "0, 0 turns; the actor is never trained, raise trainer.max_epochs" in dry_run(3)


@pytest.mark.slow
def test_the_plan_of_a_run_that_goes_on_is_of_what_is_left(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saving = {"class_path": "RunCheckpoints", "init_args": {"dirpath": str(tmp_path / "saved")}}
    config = changed(config, "trainer.callbacks", [{"class_path": "RunSummary"}, saving])
    config = changed(changed(config, "trainer.max_epochs", 2), "data.init_args.validation.every", 2)
    fit(config, tmp_path, monkeypatch)
    capsys.readouterr()
    more = ("--trainer.max_epochs=7", f"--ckpt_path={tmp_path / 'saved' / 'last.ckpt'}", "--dry-run")
    fit(config, tmp_path, monkeypatch, *more)
    shown = capsys.readouterr().out
    assert re.search(r"epochs +7, 2 of them done\n", shown)
    assert re.search(r"held-out episodes +2 after every 2 epochs and after it; 6 in all\n", shown)


def test_rows_that_two_ranks_read_together_are_counted_as_half(tmp_path: Path, tiny_folder: Path) -> None:
    """Each row is longer than the budget, so it is a micro-batch of its own."""
    alone, shared = (
        RunPlan(
            make_trainer(tmp_path, 3, devices=2, strategy="ddp"),
            make_agent(tiny_folder, sequence_parallel=parts, max_tokens_per_micro_batch=20),
            make_data(),
        )
        for parts in (1, 2)
    )
    assert shared.step.tokens == -(-alone.step.tokens // 2)
    assert shared.step.reads == alone.step.reads
    constant = 2 * shared.memory.activations - alone.memory.activations  # logits, gradient of the embedding
    assert 0 <= constant < alone.memory.activations / 2


@pytest.mark.parametrize("critic", [SharedCritic, SeparateCritic, LeastSquaresCritic])
def test_weights_gradients_and_optimizer_are_those_of_the_run(
    tiny_folder: Path, tmp_path: Path, critic: type[Critic]
) -> None:
    plan = RunPlan(make_trainer(tmp_path, 3), make_agent(tiny_folder, critic=critic()), make_data())
    agent, data = make_agent(tiny_folder, critic=critic()), make_data()
    make_trainer(tmp_path, 1).fit(agent, data)
    trained = sum(p.nbytes for p in agent.parameters())
    reference = sum(p.nbytes for p in agent.models.reference.parameters())
    memory = plan.memory
    assert memory.program > 2**26  # torch alone takes more
    assert (memory.weights, memory.gradients, memory.optimizer) == (trained + reference, trained, 2 * trained)
    assert memory.peak == memory.program + memory.weights + 3 * trained + memory.activations + memory.fragmentation
    rows = example_rows(plan.prompts, 8, plan.data)
    assert len({row.ids for row in rows}) == 8
    assert plan_micro_batches(rows, 64)
    plan.close()


def models_of(model: Path | str, critic: Critic, compute: Compute, precision: str, empty: bool = True) -> Models:
    args = str(model), critic, None, None, compute, precision, None
    if not empty:
        return build_models(*args)
    with torch.device("meta"):
        return build_models(*args, load=empty_causal_lm)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("tokens", "reads"), [(1000, 60), (1400, 1300)])
def test_activations_are_counted_as_they_are_measured(
    tmp_path: Path, precision: str, checkpointing: bool, tokens: int, reads: int
) -> None:
    folder = tiny_model_folder(tmp_path, num_hidden_layers=8)
    compute = Compute(gradient_checkpointing=checkpointing, kernels="torch")
    counted = activation_bytes(
        models_of(folder, SharedCritic(), compute, precision), compute, Place(precision=precision), tokens, reads
    )
    models = models_of(folder, SharedCritic(), compute, precision, empty=False)
    packed = pack([Row(ModelInput.of_ids((0,) * (tokens + 1)), tuple(range(tokens - reads, tokens)))])
    trained = list(models.actor.parameters())
    live = LiveBytes([*trained, *models.actor.buffers()])
    context = torch.autocast("cpu", torch.bfloat16) if precision == "bf16-mixed" else nullcontext()
    with context, live:
        scores = models.actor.token_scores(models.actor.hidden(packed), packed.targets, 1.0)
        hooks = [p.register_hook(lambda gradient: gradient.new_zeros(()).expand_as(gradient)) for p in trained]
        torch.autograd.grad([scores.logps.sum(), scores.entropy.sum()], trained, allow_unused=True)
    assert len(hooks) == len(trained)
    assert 0.85 <= counted / live.peak <= 1.35  # rather too much than too little


def test_a_strategy_shares_what_it_shares() -> None:
    """Per process, for eight processes and a model of 0.5B with bf16-mixed."""
    compute, step = Compute(gradient_checkpointing=True), Step(2, 1024, 256, 4096)

    def plan(sharing: Any, precision: str = "bf16-mixed", model: str = "Qwen/Qwen2.5-0.5B-Instruct") -> Any:
        models = models_of(model, SharedCritic(), compute, precision)
        return memory_plan(models, compute, Place(True, 8, 1, sharing, precision), step, EngineMemory())

    weights = 4 * 494_032_768 + 4 * 897  # with the value head
    ddp, fsdp2, zero1, zero2 = map(plan, ("ddp", "fsdp2", "zero1", "zero2"))
    assert (ddp.weights, ddp.gradients, ddp.optimizer) == (weights, 2 * weights, 2 * weights)
    assert (fsdp2.weights, fsdp2.gradients) == (weights // 8, weights // 8)
    assert (zero1.gradients, zero1.optimizer) == (weights, 3 * -(-weights // 8))
    assert (zero2.gradients, zero2.weights) == (-(-weights // 8), weights)
    assert fsdp2.gathered > 0 == ddp.gathered
    with HalfPrecision("bf16-true").module_init_context():
        true = plan("", "bf16-true")
    assert true.weights == 2 * 494_032_768 + 4 * 897
    assert (true.gradients, true.optimizer) == (true.weights + weights, 3 * weights)  # summed and stepped in float32


def test_a_share_of_a_gpu_has_to_hold_the_policy() -> None:
    """7.6 billion weights in bfloat16 need 15.2 GB of the share."""
    compute, place = Compute(gradient_checkpointing=True), Place(True, 64, 8, "fsdp2", "bf16-mixed")
    models = models_of("Qwen/Qwen2.5-7B-Instruct", SharedCritic(), compute, "bf16-mixed")

    def smallest(share: float) -> int | None:
        engine = EngineMemory(share=share, released=True)
        return memory_plan(models, compute, place, Step(2, 1024, 256, 4096), engine, sends_layers=True).smallest_gpu

    assert [smallest(share) for share in (0.7, 0.35, 0.15)] == [24, 48, 141]


def test_an_engine_beside_the_policy_is_counted(tiny_folder: Path, tmp_path: Path) -> None:
    """An engine of vLLM has weights of its own, and keeps its keys and values while the policy is updated."""
    without = RunPlan(make_trainer(tmp_path, 3), make_agent(tiny_folder), make_data())
    data = make_data(engine=VLLMEngine(kv_cache_gb=0.25, dtype="bfloat16"))
    plan = RunPlan(make_trainer(tmp_path, 3), make_agent(tiny_folder), data)
    own = sum(p.numel() for p in plan.models.actor.lm.parameters()) * 2
    assert (plan.memory.engine, plan.memory.sampling) == (own + 2**28, 0)
    assert plan.memory.peak - plan.memory.program == without.memory.peak - without.memory.program + plan.memory.engine
    assert without.memory.engine == 0
    assert without.memory.sampling > 0
    for each in (plan, without):
        each.close()


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"devices": 8, "num_nodes": 2}, Place(True, 16, 2)),
        ({"devices": "0,1"}, Place(True, 2, 1)),
        ({"devices": 4, "strategy": "deepspeed_stage_2"}, Place(True, 4, 1, "zero2")),
        ({"accelerator": "cpu", "devices": "auto", "precision": "bf16-mixed"}, Place(False, 1, 1, "", "bf16-mixed")),
        ({"devices": 1, "strategy": ModelParallelStrategy(data_parallel_size=1)}, Place(True)),
    ],
)
def test_the_place_of_a_run_is_planned_on_any_machine(given: dict[str, Any], place: Place) -> None:
    defaults = {"accelerator": "gpu", "num_nodes": 1, "strategy": "auto", "precision": None}
    planned, instead = planned_trainer(defaults | given)
    assert planned == place
    assert instead.get("accelerator", "cpu") == "cpu"


def test_shapes_that_the_hub_cannot_give_are_in_the_table() -> None:
    sizes = {name: sum(p.numel() for p in empty_causal_lm(name).parameters()) for name in SHAPES}
    assert sizes["Qwen/Qwen2.5-3B-Instruct"] == 3_085_938_688
    assert sizes["Qwen/Qwen2.5-7B-Instruct"] == 7_615_616_512
    assert sizes["Qwen/Qwen2.5-VL-7B-Instruct"] == 8_292_166_656
    assert sizes["Qwen/Qwen3-VL-2B-Instruct"] == 2_127_532_032
    with pytest.raises(ValueError, match=r"hub does not have it.*model\.init_args\.model"):
        shape_of("Qwen/Qwen2.5-3B-Instrukt")


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operations inside have made and that are still there, and the most there were.

    Args:
        known: tensors that were there before.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes = {x.untyped_storage()._cdata: 0 for x in known}  # by the address of a storage
        self._watched: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        storages = [x.untyped_storage() for x in tree_leaves(made) if isinstance(x, Tensor)]
        for storage in storages:
            if (key := storage._cdata) not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self._watched[key] = weakref.ref(storage, partial(self._end, key))
                self.now += self._sizes[key]
                self.peak = max(self.peak, self.now)
        return made

    def _end(self, key: int, _: Any) -> None:
        self.now -= self._sizes.pop(key)
        del self._watched[key]
