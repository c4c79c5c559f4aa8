"""`agentrl fit --dry-run`: the plan is that of the run, nothing is trained and nothing is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_agentrl.agents import PPOAgent
from lightning_agentrl.callbacks import CriticWarmup
from lightning_agentrl.commands.memory import (
    AllocatedBytes,
    LiveBytes,
    activation_bytes,
    budget_text,
    memory_plan,
    micro_batch_bytes,
    suggested_budget,
)
from lightning_agentrl.commands.plan import (
    DryRun,
    PlanShown,
    example_rows,
    first_prompts,
    step_rows,
)
from lightning_agentrl.engines import VLLMEngine
from lightning_agentrl.models.critic import Critic, LeastSquaresCritic, SeparateCritic, SharedCritic
from lightning_agentrl.models.language_model import LOGITS_PER_CHUNK
from lightning_agentrl.models.packing import plan_micro_batches
from lightning_agentrl.rollout import RolloutDataModule
from lightning_agentrl.types import Row
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
        "3 epochs, in which only the critic learns",
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
    ("free", "tokens", "expected"),
    [
        (100, 10**6, "64 tokens"),  # 0.9 of the free memory is used
        (65, 10**6, "32 tokens"),
        (1000, 40, "64 tokens"),  # the step has no more
        (1000, 10, "16 tokens"),
        (5, 10**6, "none fits"),
    ],
)
def test_plan_suggests_the_largest_useful_micro_batch_that_fits(free: int, tokens: int, expected: str) -> None:
    peaks = {size: size + 10 for size in (4, 8, 16, 32, 64, 128)}
    suggested = budget_text(peaks, budget=16, tokens=tokens, free=free)
    assert suggested.startswith(expected)
    assert ("max_tokens_per_micro_batch" in suggested) is (expected not in ("16 tokens", "none fits"))


@pytest.mark.gpu
def test_a_dry_run_on_a_gpu_measures_a_model_that_shares_prefixes(
    config: Config,
    served_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By FlexAttention, which takes heads of this width."""
    small = changed(config, "model.init_args.model", str(served_folder))
    small["trainer"] |= {"accelerator": "gpu", "logger": True, "default_root_dir": "runs/planned"}
    fit(small, tmp_path, monkeypatch, "--dry-run")
    shown = capsys.readouterr().out
    assert re.search(r"expected peak +[1-9]", shown)
    assert re.search(r"micro-batch budget +\d+ tokens need", shown)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_activations_on_a_gpu_are_foretold(served_folder: Path, tmp_path: Path, precision: str) -> None:
    """Without what its libraries take for themselves at their first use, of which the curve would make gigabytes."""
    agent, data = make_agent(served_folder, critic=SeparateCritic()), make_data()
    with pytest.raises(PlanShown):
        make_trainer(tmp_path, 3, [DryRun()], accelerator="gpu", precision=precision).fit(agent, data)
    foretold = activation_bytes(agent, 12000, 500)
    assert 0.9 <= foretold / micro_batch_bytes(agent, 12000, 500) <= 1.25
    data.teardown("fit")


@pytest.mark.gpu
def test_the_allocator_of_a_gpu_tells_what_live_bytes_tell() -> None:

    def peak(live: LiveBytes | AllocatedBytes) -> int:
        with live:
            for _ in range(2):
                once = known * 2
                (once * once).backward(torch.ones_like(once), inputs=[known])
                more = known.detach() * 3
                del once, more
                known.grad = None
        return live.peak

    known = torch.zeros(10**6, device="cuda", requires_grad=True)
    assert peak(AllocatedBytes()) == pytest.approx(peak(LiveBytes([known])), rel=0.01)


@pytest.mark.slow
def test_a_warm_up_that_outlasts_the_run_is_told(dry_run: Callable[[int], str]) -> None:
    assert "0, 0 turns; the actor would never be trained, raise trainer.max_epochs" in dry_run(3)


def rows_of(agent: PPOAgent, data: RolloutDataModule) -> list[Row]:
    return step_rows(agent.trainer, data, first_prompts(data.collector))


def test_live_bytes_are_those_that_are_there() -> None:
    """Views and what was there before count nothing, and what is freed leaves the count."""
    known = torch.zeros(1000, requires_grad=True)
    with LiveBytes([known]) as live:
        doubled = known * 2
        assert live.now == live.peak == 4000
        view = doubled[:10].view(2, 5)
        known.detach()
        assert live.now == 4000
        del doubled
        assert live.now == 4000  # the view holds it
        del view
        assert (live.now, live.peak) == (0, 4000)


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


@pytest.mark.slow
@pytest.mark.parametrize("critic", [SharedCritic, SeparateCritic, LeastSquaresCritic])
def test_weights_gradients_and_optimizer_are_counted(
    tiny_folder: Path, tmp_path: Path, critic: type[Critic], capsys: pytest.CaptureFixture[str]
) -> None:
    agent, data = make_agent(tiny_folder, critic=critic()), make_data()
    callback = CriticWarmup(rollouts=1, rounds=1, fraction=1.0)
    with pytest.raises(PlanShown):
        make_trainer(tmp_path, 3, [DryRun(), callback]).fit(agent, data)
    plan = memory_plan(agent, data, rows_of(agent, data))
    assert ("learning rate of the critic" in capsys.readouterr().out) is not agent.critic.fitted
    trained = sum(p.numel() * p.element_size() for p in agent.parameters())
    reference = sum(p.numel() * p.element_size() for p in agent.models.reference.parameters())
    assert plan.program > 2**26  # torch alone takes more
    assert plan.weights == trained + reference
    assert plan.gradients == trained
    assert plan.optimizer == 2 * trained
    assert plan.peak == plan.program + plan.weights + 3 * trained + plan.activations + plan.holes
    rows = example_rows(first_prompts(data.collector), 8, data)
    assert len({row.ids for row in rows}) == 8
    assert plan_micro_batches(rows, agent.compute.max_tokens_per_micro_batch)
    data.teardown("fit")


def test_plan_suggests_a_smaller_micro_batch_with_less_memory(tiny_folder: Path, tmp_path: Path) -> None:
    agent, data = make_agent(tiny_folder, max_tokens_per_micro_batch=64), make_data()
    with pytest.raises(PlanShown):
        make_trainer(tmp_path, 3, [DryRun()]).fit(agent, data)
    rows = rows_of(agent, data)
    plan = replace(memory_plan(agent, data, rows), sampling=0)  # else it may be more than an update of so few tokens

    def tokens(free: int) -> int:
        ((_, suggested),) = suggested_budget(agent, plan, rows, free)
        return int(suggested.split()[0])

    assert tokens(2 * plan.peak) >= 64 > tokens((plan.peak - plan.activations // 2) * 10 // 9)
    assert suggested_budget(agent, plan, rows, None) == []
    data.teardown("fit")


@pytest.mark.slow
def test_memory_of_an_engine_beside_the_policy_is_counted(tiny_folder: Path, tmp_path: Path) -> None:
    """An engine of vLLM has weights of its own, and keeps its keys and values while the policy is updated."""
    agent, data = make_agent(tiny_folder), make_data()
    with pytest.raises(PlanShown):
        make_trainer(tmp_path, 3, [DryRun()]).fit(agent, data)
    without = memory_plan(agent, data, rows_of(agent, data))
    started, data.engine = data.engine, VLLMEngine(kv_cache_gb=0.25, dtype="bfloat16")
    plan = memory_plan(agent, data, rows_of(agent, data))
    data.engine = started
    own = sum(p.numel() for p in agent.actor.lm.parameters()) * 2
    assert (plan.engine, plan.sampling) == (own + 2**28, 0)
    assert plan.peak - plan.program == without.peak - without.program + plan.engine
    assert without.engine == 0
    assert without.sampling > 0
    data.teardown("fit")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "reads", "recompute"),
    [
        (2000, 200, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((3000, 1024, True), (900, 30, True), (3000, 1400, False))
        ),
    ],
)
def test_activations_of_a_length_that_was_not_measured_are_foretold(
    tiny_folder: Path, tmp_path: Path, tokens: int, reads: int, recompute: bool
) -> None:
    """The curve through short rows meets a longer one."""
    agent, data = make_agent(tiny_folder, recompute_logits=recompute), make_data()
    with pytest.raises(PlanShown):
        make_trainer(tmp_path, 3, [DryRun()]).fit(agent, data)
    foretold = activation_bytes(agent, tokens, reads)
    assert 0.95 <= foretold / micro_batch_bytes(agent, tokens, reads) <= 1.25  # rather too much than too little
    more = activation_bytes(agent, tokens, 4 * LOGITS_PER_CHUNK)  # in chunks, each of which is computed again
    assert (more == activation_bytes(agent, tokens, LOGITS_PER_CHUNK)) is recompute
    data.teardown("fit")


def test_copies_that_autocast_keeps_of_both_models_are_counted(tmp_path: Path) -> None:
    """From the second micro-batch on those of the critic are there while the actor is differentiated."""
    folder = tiny_model_folder(tmp_path / "model", num_hidden_layers=16)
    agent, data = make_agent(folder, critic=SeparateCritic()), make_data()
    with pytest.raises(PlanShown):
        make_trainer(tmp_path, 3, [DryRun()], precision="bf16-mixed").fit(agent, data)
    linear = [m.weight for m in (*agent.actor.modules(), *agent.critic.modules()) if isinstance(m, torch.nn.Linear)]
    read = {id(weight): weight for weight in linear}  # the critic's output head is not
    read.pop(id(agent.critic.backbone.get_output_embeddings().weight))
    assert micro_batch_bytes(agent, 4, 1) >= sum(2 * weight.numel() for weight in read.values())
    data.teardown("fit")
