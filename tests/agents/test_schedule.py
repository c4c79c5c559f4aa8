"""Learning rates follow the steps that actor and critic have taken, also where a run is continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR

from lightning_agentrl.agents import Agent, Attempt, Optim, PPOAgent, Schedule, Schedules
from lightning_agentrl.agents.optim import check_schedules, planned_steps
from lightning_agentrl.callbacks import CriticWarmup
from lightning_agentrl.callbacks.guards import Guard
from lightning_agentrl.models.critic import SharedCritic
from lightning_agentrl.rollout import EnvConfig
from tests.agents import processes
from tests.agents.guards import SkipSome
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.agents.processes import assert_same, read
from tests.agents.scheduled import Halving, OnPlateau
from tests.agents.test_fsdp2 import FSDP2


def shares(schedule: Schedule, run: int) -> list[float]:
    return [schedule.share(taken, run) for taken in range(run + 2)]


def test_a_rate_rises_in_equal_parts_and_falls_along_its_shape() -> None:
    assert shares(Schedule(), 3) == [1.0] * 5
    assert shares(Schedule(warmup_steps=3), 3) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert shares(Schedule("linear", warmup_steps=1), 5) == [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert shares(Schedule("linear", steps=2, final=0.5), 5) == [1.0, 0.75, 0.5, 0.5, 0.5, 0.5, 0.5]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    torchs = CosineAnnealingLR(optimizer, 9, eta_min=0.1)
    for share in shares(Schedule("cosine", final=0.1), 9)[:10]:
        assert share == pytest.approx(torchs.get_last_lr()[0])
        optimizer.step()
        torchs.step()


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({"shape": "cosin"}, "constant, linear, cosine"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"final": 0.1}, "constant"),
        ({"shape": "linear", "warmup_steps": 9, "steps": 9}, "steps"),
        ({"shape": "linear", "final": 1.5}, "final"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(wrong: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        Schedule(**wrong)


def test_a_schedule_that_does_not_fit_the_run_is_told() -> None:
    with pytest.warns(UserWarning, match=r"critic\.warmup_steps 8 .* 8 steps"):  # such as a first short try
        check_schedules(Schedules(critic=Schedule(warmup_steps=8)), {"actor": 6, "critic": 8})
    with pytest.raises(ValueError, match=r"actor\.steps"):
        check_schedules(Schedules(actor=Schedule("cosine")), {"actor": None, "critic": None})
    check_schedules(Schedules(actor=Schedule("cosine", steps=9, warmup_steps=8)), {"actor": None, "critic": None})


@pytest.mark.parametrize(
    ("epochs", "steps", "warmup", "expected"),
    [
        (4, -1, 0, (8, 8)),
        (4, 6, 0, (6, 6)),
        (-1, 6, 1, (4, 6)),
        (4, -1, 3, (2, 8)),
        (4, -1, 5, (0, 8)),
        (-1, -1, 1, (None, None)),
    ],
)
def test_the_steps_of_a_run_end_with_its_epochs_or_its_steps_and_the_actors_begin_after_the_warm_up(
    tmp_path: Path, epochs: int, steps: int, warmup: int, expected: tuple[int | None, int | None]
) -> None:
    callbacks = [CriticWarmup(rollouts=warmup, rounds=1, fraction=1.0)] if warmup else []
    trainer = make_trainer(tmp_path, epochs, callbacks, max_steps=steps)
    trainer.datamodule = make_data()  # type: ignore[attr-defined]
    assert trainer.datamodule.steps_per_iteration == 2  # type: ignore[attr-defined]
    assert planned_steps(trainer) == dict(zip(("actor", "critic"), expected, strict=True))


class Used(L.Callback):
    """The rates of actor and critic with which each step was taken."""

    def __init__(self) -> None:
        self.rates: list[tuple[float, float]] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        actor, critic = (group["lr"] for group in optimizer.param_groups)
        self.rates.append((actor, critic))


class LowersOnce(Guard):
    """Halves the rates at one attempt."""

    def __init__(self, number: int) -> None:
        super().__init__("policy/loss", high=0.0, action="lower", factor=0.5)
        self.number = number

    def judge(self, attempt: Attempt) -> str:
        return "now" if attempt.number == self.number else ""


def fit(
    path: Path,
    agent: Agent,
    epochs: int,
    callbacks: list[L.Callback],
    ckpt_path: Path | None = None,
    data: dict[str, Any] | None = None,
    **kwargs: Any,
) -> list[tuple[float, float]]:
    """The rates of each step."""
    used = Used()
    last = ModelCheckpoint(path, filename="last", enable_version_counter=False, save_on_train_epoch_end=True)
    trainer = make_trainer(path, epochs, [used, last, *callbacks], enable_checkpointing=True, **kwargs)
    trainer.fit(agent, make_data(**(data or {})), ckpt_path=ckpt_path)
    return used.rates


class StopsAfter(L.Callback):
    """Ends a run that would be longer."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop = trainer.current_epoch + 1 >= self.epochs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_skipped_steps_and_the_warm_up_do_not_advance_the_actor_and_a_resumed_run_goes_on(
    tmp_path: Path, exact_folder: Path
) -> None:
    """Four iterations of two steps, the first of them warm-up. The fourth attempt is skipped, the sixth lowers."""
    schedule = Schedules(Schedule("linear", warmup_steps=1), Schedule("cosine", steps=6, final=0.5))

    logs: dict[str, list[float]] = {}

    def run(name: str, stop: int = 4, ckpt_path: Path | None = None) -> list[tuple[float, float]]:
        monitor = LearningRateMonitor()
        warmup, guards = CriticWarmup(rollouts=1, rounds=1, fraction=1.0), (SkipSome([3]), LowersOnce(5))
        agent = make_agent(exact_folder, SharedCritic(), schedule=schedule)
        logged = {"logger": CSVLogger(tmp_path / name), "log_every_n_steps": 1}
        rates = fit(tmp_path / name, agent, 4, [warmup, *guards, monitor, StopsAfter(stop)], ckpt_path, **logged)
        logs[name] = [monitor.lrs[f"lr-AdamW/{group}"][-1] for group in ("actor", "critic")]
        return rates

    whole = run("whole")
    part = run("part", stop=2)
    resumed = run("part", ckpt_path=tmp_path / "part" / "last.ckpt")
    lowered = [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5]  # of the steps taken
    actor = [schedule.actor.share(taken, 6) for taken in (0, 0, 0, 1, 2, 3, 4)]
    critic = [schedule.critic.share(taken, 8) for taken in range(7)]
    assert whole == [(1e-3 * a * low, 1e-2 * c * low) for a, c, low in zip(actor, critic, lowered, strict=True)]
    assert part + resumed == whole
    assert logs["whole"] == logs["part"] == list(whole[-1])
    assert_same(read(tmp_path / "whole" / "last.ckpt"), read(tmp_path / "part" / "last.ckpt"))


class RatesSeen(L.Callback):
    """Phase and age of the oldest turn, by iteration."""

    def __init__(self) -> None:
        self.of_iterations: list[tuple[str, float]] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        age = float(trainer.callback_metrics["mismatch/staleness_max"])
        self.of_iterations.append((cast(Agent, pl_module).phase, age))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_a_second_run_warms_up_and_schedules_anew(tmp_path: Path, tiny_folder: Path) -> None:
    """Of two iterations of warm-up, with the same objects; turns do not age in them."""
    warmup = CriticWarmup(rollouts=2, rounds=2, fraction=0.5)
    agent = make_agent(tiny_folder, schedule=Schedules(Schedule("linear"), Schedule("linear")))
    runs, held = [], []
    for _ in range(2):
        rates_seen = RatesSeen()
        rates = fit(tmp_path, agent, 5, [warmup, rates_seen], data={"max_staleness": 1})
        runs.append((rates, rates_seen.of_iterations))
        held.append(agent.steps.held(agent.trainer))
    assert [phase for phase, _ in runs[0][1]] == ["critic_warmup"] * 2 + ["train"] * 3
    assert runs[0][1][-1][1] == 1.0
    assert runs[0] == runs[1]
    assert held == [range(4), range(10, 14)]  # of all attempts of this agent


def of_class(kind: type[PPOAgent], folder: Path, **kwargs: Any) -> PPOAgent:
    return kind(str(folder), critic=SharedCritic(), optim=Optim(lr_actor=1e-3, lr_critic=1e-2), **kwargs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_schedulers_of_a_subclass_are_stepped_and_go_on(tmp_path: Path, exact_folder: Path) -> None:
    """Three iterations of two steps; the third attempt is skipped, the fifth lowers."""
    again, guards = [StopsAfter(2)], (lambda: [SkipSome([2]), LowersOnce(4)])
    whole = fit(tmp_path / "whole", of_class(Halving, exact_folder), 3, guards())
    part = fit(tmp_path / "part", of_class(Halving, exact_folder), 3, [*guards(), *again])
    resumed = fit(
        tmp_path / "part", of_class(Halving, exact_folder), 3, guards(), ckpt_path=tmp_path / "part" / "last.ckpt"
    )
    lowered = [1.0, 1.0, 1.0, 0.5, 0.5]
    assert whole == [(1e-3 * 0.5 ** (taken // 2) * low, 1e-2 * low) for taken, low in enumerate(lowered)]
    assert part + resumed == whole
    assert_same(read(tmp_path / "whole" / "last.ckpt"), read(tmp_path / "part" / "last.ckpt"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_scheduler_can_follow_a_metric(tmp_path: Path, exact_folder: Path) -> None:
    """Episodes of twelve turns, four of them in an iteration: the first value is that of the third."""
    long = {"env": EnvConfig("tests.episodes.small_envs:Walk-v0", {"length": 12})}
    rates = fit(tmp_path, of_class(OnPlateau, exact_folder), 5, [], data=long)
    assert [actor for actor, _ in rates] == pytest.approx([1e-3] * 8 + [1e-4] * 2)


class Returning(PPOAgent):
    """Returns something else from configure_optimizers."""

    def returned(self, optimizer: torch.optim.Optimizer) -> Any:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        return self.returned(super().configure_optimizers()["optimizer"])


class Nameless(Returning):
    def returned(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.SGD(self.actor.parameters(), lr=1e-3)


class TwoOptimizers(Returning):
    def returned(self, optimizer: torch.optim.Optimizer) -> Any:
        return [torch.optim.SGD([group], lr=1e-3) for group in optimizer.param_groups]


class TwoSchedulers(Returning):
    def returned(self, optimizer: torch.optim.Optimizer) -> Any:
        return [optimizer], [ConstantLR(optimizer), ConstantLR(optimizer)]


class Unscheduled(Returning):
    def returned(self, optimizer: torch.optim.Optimizer) -> Any:
        return optimizer


@pytest.mark.parametrize(
    ("kind", "schedule", "message"),
    [
        (Nameless, Schedules(), r"one optimizer whose groups are named actor and critic, got \[None\]"),
        (TwoOptimizers, Schedules(), r"one optimizer whose groups .* got \['actor', 'critic'\]"),
        (TwoSchedulers, Schedules(), "2 schedulers; join them"),
        (Unscheduled, Schedules(Schedule("linear")), "schedule would set them too"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_a_subclass_returns_is_refused_where_it_cannot_be_used(
    tmp_path: Path, exact_folder: Path, kind: type[PPOAgent], schedule: Schedules, message: str
) -> None:
    optim = Optim(lr_actor=1e-3, lr_critic=1e-2, schedule=schedule)
    agent = kind(str(exact_folder), critic=SharedCritic(), optim=optim)
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, agent, 1, [])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_changed_rates_and_decay_apply_after_a_resume(tmp_path: Path, exact_folder: Path, log: list[str]) -> None:
    schedule = Schedules(Schedule("linear", warmup_steps=1))
    fit(tmp_path, make_agent(exact_folder, schedule=schedule), 3, [StopsAfter(1)])
    changed = make_agent(
        exact_folder, lr_actor=3e-3, weight_decay=0.05, schedule=Schedules(Schedule("linear", steps=10))
    )
    changed.resume_with_changes = ["model"]
    rates = fit(tmp_path, changed, 2, [LowersOnce(3)], ckpt_path=tmp_path / "last.ckpt")
    assert [rate for both in rates for rate in both] == pytest.approx([3e-3 * 0.8, 1e-2, 3e-3 * 0.7 / 2, 1e-2 / 2])
    assert read(tmp_path / "last.ckpt")["optimizer_states"][0]["param_groups"][0]["weight_decay"] == 0.05
    differ = [sentence.partition(":")[0] for sentence in log if "in the checkpoint it was" in sentence]
    assert differ == ["lr of the actor", "weight_decay of the actor", "weight_decay of the critic"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_run_ends_after_max_steps_were_attempted(tmp_path: Path, exact_folder: Path) -> None:
    """One of four is skipped; the run does not begin a third iteration, and neither does one that is resumed."""
    rates = fit(tmp_path, make_agent(exact_folder), 9, [SkipSome([1])], max_steps=4)
    assert len(rates) == 3
    again = fit(tmp_path, make_agent(exact_folder), 9, [], max_steps=4, ckpt_path=tmp_path / "last.ckpt")
    assert again == []


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", pytest.param(FSDP2, marks=pytest.mark.long, id="fsdp2")])
@pytest.mark.parametrize("agent", [None, pytest.param("tests.agents.scheduled.Halving", marks=pytest.mark.long)])
def test_two_processes_go_on_in_the_middle_of_a_schedule(
    tmp_path: Path, exact_folder: Path, strategy: str, agent: str | None
) -> None:
    """Three iterations after two of warm-up; one process is stopped after the first of them, and two go on."""
    schedule = "{actor: {shape: cosine, warmup_steps: 1, steps: 7}, critic: {shape: linear, steps: 12}}"
    chosen = ("--model.class_path", agent) if agent else ("--model.init_args.optim.schedule", schedule)

    def run(name: str, devices: int, *arguments: str) -> Path:
        kind = strategy if devices > 1 else None
        path = tmp_path / name
        return processes.fit(path, exact_folder, "SeparateCritic", devices, *chosen, *arguments, strategy=kind)

    one, stopped = run("one", 1), run("stopped", 1, "--trainer.max_epochs", "3")
    resumed = run("resumed", 2, "--ckpt_path", str(stopped))
    assert_same(read(one), read(resumed))
    rates = [[group["lr"] for group in read(path)["optimizer_states"][0]["param_groups"]] for path in (one, resumed)]
    assert rates[0] == rates[1] != [1e-3, 1e-2]
