"""Numbers that are not finite: nothing is trained on them, the turn is named, and no such weight is saved."""

from __future__ import annotations

import math
import re
import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_agentrl.agents import Optim, Verdict
from lightning_agentrl.agents.optim import Steps
from lightning_agentrl.agents.selection import corrected, without_not_finite
from lightning_agentrl.agents.sharding import GradientWatch
from lightning_agentrl.callbacks import CriticWarmup
from lightning_agentrl.errors import RunStoppedError
from lightning_agentrl.losses import TruncatedWeights
from lightning_agentrl.models.critic import SeparateCritic
from lightning_agentrl.types import Rollout, Sample, Scores
from tests.agents import processes
from tests.agents.faulty import FaultyAgent
from tests.agents.guards import SkipSome
from tests.agents.harness import grouped, make_agent, make_data, make_trainer
from tests.agents.processes import assert_same, read
from tests.agents.test_fsdp2 import FSDP2
from tests.types.samples import action, prompt, turn

COUNTED = {"guard/not_finite", "guard/skipped", "guard/turns_left_out"}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


class Watch(L.Callback):
    """Weights before each attempt, and what was logged in each iteration."""

    def __init__(self):
        self.weights, self.logged = [], []

    def on_train_batch_start(self, trainer, agent, batch, batch_idx):
        self.weights.append([p.detach().clone() for p in agent.parameters()])

    def on_train_epoch_end(self, trainer, agent):
        self.logged.append({name: float(x) for name, x in trainer.callback_metrics.items()})

    def on_train_end(self, trainer, agent):
        self.on_train_batch_start(trainer, agent, None, 0)

    @property
    def moved(self):
        pairs = zip(self.weights, self.weights[1:], strict=False)
        return [any(not torch.equal(a, b) for a, b in zip(x, y, strict=True)) for x, y in pairs]


def faulty(folder, fault, at, critic=None, **kwargs):
    settings = {"kl_reward": 0.01, "lr_actor": 1e-3, "lr_critic": 1e-2, **kwargs}
    return FaultyAgent(str(folder), critic=critic or SeparateCritic(), fault=fault, at=at, **grouped(settings))


def newest(path):
    return ModelCheckpoint(path, filename="last", enable_version_counter=False, save_on_train_epoch_end=True)


def fit(path, agent, callbacks=(), epochs=2, ckpt_path=None, **trainer):
    watch = Watch()
    settings = {"enable_checkpointing": True, **trainer}
    made = make_trainer(path, epochs, [watch, newest(path), *callbacks], **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.fit(agent, make_data(), ckpt_path=ckpt_path)
    return watch, made, [str(one.message) for one in caught]


def skipped(sentences):
    return [text for text in sentences if "is skipped" in text]


@pytest.mark.parametrize(
    ("fault", "said", "precision"),
    [
        ("loss", r"policy/loss of (environment 3, episode \d+, turn \d+(; )?)+ is not finite", "64-true"),
        slow("constant", r"policy/loss of environment 3, ", "bf16-true"),
        slow("gradient", r"the gradient of the actor has the norm (nan|inf)", "64-true"),
        slow("value loss", r"critic/loss of environment 3, ", "64-true"),
    ],
)
def test_a_step_that_is_not_finite_moves_nothing_and_is_named(tmp_path, exact_folder, fault, said, precision):
    agent = faulty(exact_folder, fault, [1], max_tokens_per_micro_batch=100)
    watch, trainer, caught = fit(tmp_path, agent, precision=precision)
    assert watch.moved == [True, False, True, True]
    assert (agent.policy_version, trainer.global_step) == (4, 3)
    (sentence,) = skipped(caught)
    assert re.search(said, sentence), sentence
    assert "environment 0" not in sentence
    assert [(logged["guard/not_finite"], logged["guard/skipped"]) for logged in watch.logged] == [(0.5, 0.5), (0, 0)]
    assert all(math.isfinite(x) for logged in watch.logged for x in logged.values())


@pytest.mark.slow
def test_so_many_in_a_row_stop_the_run_which_names_its_last_checkpoint(tmp_path, exact_folder):
    agent = faulty(exact_folder, "loss", [1, *range(3, 20)], max_not_finite=3)
    with pytest.raises(RunStoppedError, match=r"stopped before optimizer step 6.*3 steps in a row") as error:
        fit(tmp_path, agent, epochs=9)
    assert error.value.checkpoint == str(tmp_path / "last.ckpt")
    assert error.value.checkpoint in str(error.value)
    saved = read(tmp_path / "last.ckpt")
    assert saved["attempts"] == 4  # the last iteration before that in which a step was taken
    assert all(weight.isfinite().all() for weight in saved["state_dict"].values())


@pytest.mark.slow
def test_steps_of_a_run_that_was_stopped_are_not_in_a_row_with_those_of_the_next(tmp_path, exact_folder):
    agent = faulty(exact_folder, "loss", [0, 1], max_not_finite=2)
    with pytest.raises(RunStoppedError, match="2 steps in a row"):
        fit(tmp_path, agent, epochs=1)
    watch, _, caught = fit(tmp_path, agent, epochs=1)
    assert len(skipped(caught)) == 1  # attempt 1 once more
    assert watch.moved == [False, True]


class Poison(L.Callback):
    """Writes a NaN into each weight of a model behind a step."""

    def __init__(self, epoch: int, part: str) -> None:
        self.epoch, self.part = epoch, part

    def on_train_epoch_end(self, trainer, agent):
        if trainer.current_epoch == self.epoch:
            for weight in getattr(agent, self.part).parameters():
                weight.data.view(-1)[0] = math.nan


@pytest.mark.slow
@pytest.mark.parametrize("part", [slow("actor"), "critic"])
def test_weights_that_are_not_finite_are_not_saved(tmp_path, exact_folder, part):
    agent = make_agent(exact_folder, SeparateCritic())
    with pytest.raises(RunStoppedError, match=f"not finite, such as state_dict.{part}.*not written") as error:
        fit(tmp_path, agent, [Poison(1, part)], epochs=3)
    assert error.value.checkpoint == str(tmp_path / "last.ckpt")
    assert read(tmp_path / "last.ckpt")["epoch"] == 0


@pytest.mark.slow
def test_where_no_turn_has_finite_numbers_the_run_stops(tmp_path, exact_folder):
    """The critic of a run that saves nothing is broken between two iterations."""
    with pytest.raises(RunStoppedError, match=r"no turn .*values of environment 0.*there is no checkpoint"):
        make_trainer(tmp_path, 3, [Poison(0, "critic")]).fit(make_agent(exact_folder, SeparateCritic()), make_data())


@pytest.mark.parametrize(("fault", "said"), [("values", "values"), slow("rewards", "shaped_rewards")])
def test_a_turn_that_is_scored_with_nan_is_named_and_not_trained_on(tmp_path, exact_folder, fault, said):
    agent = faulty(exact_folder, fault, [2])  # the second rollout
    watch, trainer, caught = fit(tmp_path, agent)
    assert [logged["guard/turns_left_out"] for logged in watch.logged] == [0, 4]
    (sentence,) = [text for text in caught if "not trained on" in text]
    assert f"{said} of environment 3, " in sentence
    assert {attempt for attempt, env in agent.trained if env == 3} == {0, 1}
    assert {attempt for attempt, env in agent.trained if env == 0} == {0, 1, 2, 3}
    assert not {"mismatch/rejected", "mismatch/ess"} & {name for logged in watch.logged for name in logged}
    assert trainer.global_step == 4
    assert all(weight.isfinite().all() for weight in watch.weights[-1])


@pytest.mark.slow
def test_a_warm_up_goes_on_without_an_episode_that_is_scored_with_nan(tmp_path, exact_folder):
    agent = faulty(exact_folder, "values", [0])
    warmup = CriticWarmup(rollouts=2, rounds=2, fraction=0.5)
    watch, trainer, caught = fit(tmp_path, agent, [warmup], epochs=3)
    (sentence,) = [text for text in caught if "not trained on" in text]
    assert "values of environment 3, " in sentence
    assert watch.logged[0]["guard/turns_left_out"] == 8
    assert trainer.global_step == 6
    assert all(weight.isfinite().all() for weight in watch.weights[-1])


def scored() -> Rollout:
    """Two episodes of two turns, the second with another model's NaN."""
    samples = [Sample((prompt(1), action(5, 6)), (turn(env=env, index=index),)) for env in (0, 1) for index in (0, 1)]
    rollout = Rollout.from_samples(samples)
    logps = torch.full((4, 2), -1.0)
    logps[2, 1] = -math.inf
    return rollout.union(scores=Scores(old_logps=logps), bootstrap_values=torch.zeros(4))


def test_the_whole_episode_is_left_out_since_its_advantages_hang_together():
    rollout, faulty_B, names = without_not_finite(scored())
    assert faulty_B.tolist() == [False, False, True, True]
    assert rollout.trained_mask.any(1).tolist() == [True, True, False, False]
    assert names == ["old_logps of environment 1, episode 0, turn 0"]
    assert rollout.scores.old_logps[2].tolist() == [-1.0, 0.0]
    assert without_not_finite(rollout)[0] is rollout  # nothing is left to find


def test_a_log_prob_that_is_not_finite_does_not_spoil_the_weights_of_other_turns():
    weighed = corrected(scored(), TruncatedWeights(normalise=True), lambda x: x)
    assert weighed.weights is not None
    assert float(weighed.weights[weighed.trained_mask].mean()) == pytest.approx(1.0)
    rollout, _, _ = without_not_finite(weighed)
    assert rollout.trained_mask.any(1).tolist() == [True, True, False, False]


def test_a_rollout_with_finite_numbers_stays_as_it_is():
    rollout = scored()
    rollout = rollout.with_tensors({name: x.nan_to_num(-9.0, -9.0, -9.0) for name, x in rollout.scores.tensors.items()})
    assert without_not_finite(rollout)[0] is rollout


def test_the_count_begins_anew_with_a_finite_step():
    steps, finite, nan = Steps(Optim(max_not_finite=2)), {"actor": 1.0}, {"actor": 1.0, "critic": math.nan}
    assert steps.judge("", finite) == (Verdict.STEP, "")
    assert steps.judge("", nan)[0] is Verdict.SKIP
    assert "critic" in Steps(Optim(max_not_finite=9)).judge("", nan)[1]
    assert steps.judge("", finite)[0] is Verdict.STEP
    assert steps.judge("the loss of turn 3", finite) == (Verdict.SKIP, "the loss of turn 3")
    assert steps.judge("", {"actor": math.inf})[0] is Verdict.STOP


def test_gradients_are_watched_where_they_are_moved_away_as_zero_does():
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda w: setattr(w, "grad", None))
    watch = GradientWatch(weights)
    (weights[0].sum() + weights[1].sum()).backward()
    assert watch.finite()
    (weights[0].sum() + (weights[1] - 1).sqrt().sum()).backward()
    assert not watch.finite()
    assert watch.finite()  # each is told once


@pytest.mark.slow
def test_what_was_watched_in_a_faulty_step_is_no_fault_of_the_next(tmp_path, exact_folder, monkeypatch):
    """With the watch that there is under ZeRO, and each row in a micro-batch of its own."""
    configure = FaultyAgent.configure_optimizers

    def watched(agent):
        optimizer = configure(agent)
        agent.steps.gradient_watch = GradientWatch(agent.parameters())
        return optimizer

    monkeypatch.setattr(FaultyAgent, "configure_optimizers", watched)
    agent = faulty(exact_folder, "loss", [0], max_tokens_per_micro_batch=1)
    _, trainer, caught = fit(tmp_path, agent, epochs=1)
    (sentence,) = skipped(caught)
    assert "step 1 is skipped" in sentence
    assert (agent.policy_version, trainer.global_step) == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [[0, 1], [2, 3]], ids=["warm-up", "training"])
def test_an_iteration_without_a_step_changes_nothing_but_the_count(tmp_path, exact_folder, lost):
    """Its end, the engine's weights, checkpoints and a resume. A checkpoint is written where a step was taken."""

    def run(name, epochs, ckpt_path=None):
        agent = make_agent(exact_folder, SeparateCritic())
        warmup = CriticWarmup(rollouts=1, rounds=1, fraction=1.0)
        watch, trainer, _ = fit(tmp_path / name, agent, [SkipSome(lost), warmup], epochs, ckpt_path)
        return watch, agent, trainer

    watch, whole, trainer = run("whole", 4)
    assert [logged["guard/skipped"] for logged in watch.logged] == [float(i == lost[0] // 2) for i in range(4)]
    assert watch.moved == [number not in lost for number in range(8)]
    assert (whole.policy_version, trainer.global_step) == (8, 6)
    run("part", 3)
    assert read(tmp_path / "part" / "last.ckpt")["attempts"] == 6
    _, resumed, _ = run("part", 4, tmp_path / "part" / "last.ckpt")
    assert resumed.policy_version == 8
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


@pytest.mark.slow
def test_a_run_that_skipped_still_ends_at_the_end_of_an_iteration(tmp_path, exact_folder):
    agent = make_agent(exact_folder)
    _, trainer, _ = fit(tmp_path, agent, [SkipSome([1])], epochs=-1, max_steps=4)
    assert (agent.policy_version, trainer.global_step) == (4, 3)


FAULTY = ("--model", "tests.agents.faulty.FaultyAgent", "--model.init_args.fault")


@pytest.mark.slow  # two processes
@pytest.mark.parametrize("strategy", ["ddp", pytest.param(FSDP2, marks=pytest.mark.long)], ids=["ddp", "fsdp2"])
def test_nan_on_one_rank_alone_skips_the_step_of_both(tmp_path, exact_folder, strategy):
    """Environment 3 is on the second rank. Two processes end as one does, with a guard that skips too."""
    guard = "{class_path: GradientSpikes, init_args: {deviations: 0.05, after: 2, action: skip}}"
    arguments = (*FAULTY, "loss", "--model.init_args.at", "[5, 8]", f"--trainer.callbacks+={guard}")
    one, two = (
        processes.fit(
            tmp_path / str(count),
            exact_folder,
            SeparateCritic.__name__,
            count,
            *arguments,
            strategy=strategy if count > 1 else None,
        )
        for count in (1, 2)
    )
    assert read(one)["attempts"] == read(two)["attempts"] == 10
    assert read(one)["global_step"] == read(two)["global_step"] < 8
    assert_same(read(one), read(two))
    for name in ("1", "2"):
        shares = [row["guard/not_finite"] for row in processes.metrics(tmp_path / name) if "guard/not_finite" in row]
        assert shares == [0, 0, 0.5, 0, 0.5]


@pytest.mark.long  # two processes
def test_a_turn_that_is_scored_with_nan_on_one_rank_alone_is_told_by_both(tmp_path, exact_folder):
    """Else the ranks would wait for each other in different places."""
    arguments = (*FAULTY, "values", "--model.init_args.at", "[6]")
    for count in (1, 2):
        processes.fit(tmp_path / str(count), exact_folder, SeparateCritic.__name__, count, *arguments)
    one, two = (processes.metrics(tmp_path / name) for name in ("1", "2"))
    assert [row["guard/turns_left_out"] for row in one if "guard/turns_left_out" in row] == [0, 0, 4, 0]
    assert [row.keys() for row in one] == [row.keys() for row in two]
    for alone, of_both in zip(one, two, strict=True):
        assert of_both == pytest.approx(alone, rel=0, abs=1e-8, nan_ok=True)


@pytest.mark.slow
def test_a_command_that_stops_says_where_to_go_on_from(tmp_path, exact_folder, capsys):
    always = ("--model.init_args.at", str([*range(6, 99)]), "--model.init_args.optim.max_not_finite", "3")
    with pytest.raises(SystemExit) as stop:
        processes.fit(tmp_path, exact_folder, "SeparateCritic", 1, *FAULTY, "loss", *always)
    assert stop.value.code == 1
    printed = capsys.readouterr().err
    assert f"the last good checkpoint is '{tmp_path / 'last.ckpt'}'" in printed
    assert "Traceback" not in printed
