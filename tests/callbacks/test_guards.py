"""Guards: bounds on numbers of a run, before the update, and what happens beyond them."""

from __future__ import annotations

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_agentrl.agents import Attempt, Verdict
from lightning_agentrl.callbacks import (
    EntropyBounds,
    GradientSpikes,
    Guard,
    KLCeiling,
    RepetitionGuard,
    ValidActionFloor,
)
from lightning_agentrl.errors import RunStoppedError
from lightning_agentrl.models.critic import SharedCritic
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.agents.processes import read

NUMBERS = {  # of a rollout within all bounds below
    "kl/reference": 0.1,
    "rollout/valid_action_ratio": 0.9,
    "text/distinct_in_turn": 0.8,
    "rollout/entropy": 1.0,
}
GUARDS = [  # with a number beyond the bound
    (KLCeiling, {"ceiling": 0.2}, {"kl/reference": 0.3}),
    (ValidActionFloor, {"floor": 0.5}, {"rollout/valid_action_ratio": 0.4}),
    (RepetitionGuard, {"floor": 0.3}, {"text/distinct_in_turn": 0.2}),
    (EntropyBounds, {"low": 0.5}, {"rollout/entropy": 0.1}),
    (EntropyBounds, {"low": 0.5, "high": 2.0}, {"rollout/entropy": 3.0}),
    (Guard, {"metric": "kl/reference", "high": 0.2}, {"kl/reference": 0.3}),
]


def attempt(number=0, index=0, rollout=None, metrics=None, norms=None):
    return Attempt(number, index, metrics or {}, norms or {}, NUMBERS | (rollout or {}))


def trainer_of():
    return L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")


@pytest.mark.parametrize(("kind", "bounds", "beyond"), GUARDS)
def test_a_guard_of_a_rollout_skips_the_whole_iteration_and_no_other(kind, bounds, beyond):
    guard, trainer = kind(**bounds, action="skip"), trainer_of()
    (name,) = beyond
    said = [guard.before_step(trainer, attempt(n, n % 2, beyond if n in (2, 3) else None)) for n in range(6)]
    assert [verdict for verdict, _ in said] == [Verdict.STEP, Verdict.STEP, Verdict.SKIP, Verdict.SKIP] + [
        Verdict.STEP
    ] * 2
    assert name in said[2][1]
    assert kind.__name__ in said[2][1]


def test_an_iteration_whose_first_step_was_not_finite_is_judged_before_the_next():
    """Guards are not asked about such a step."""
    guard, trainer = ValidActionFloor(action="skip"), trainer_of()
    beyond = {"rollout/valid_action_ratio": 0.0}
    assert guard.before_step(trainer, attempt(0, 0, beyond))[0] is Verdict.SKIP
    assert guard.before_step(trainer, attempt(3, 1))[0] is Verdict.STEP
    assert guard.before_step(trainer, attempt(5, 1, beyond))[0] is Verdict.SKIP


@pytest.mark.slow
def test_an_iteration_of_another_run_is_judged_although_it_has_the_same_number(tmp_path, exact_folder):
    """As where a run is tried again from the same checkpoint, or another agent is given the same callbacks."""
    guard = ValidActionFloor(1.0, action="skip")
    guard.judge = lambda attempt: "too few"
    make_trainer(tmp_path, 1, [guard]).fit(make_agent(exact_folder), make_data())
    guard.judge = lambda attempt: ""
    trainer = make_trainer(tmp_path, 1, [guard])
    trainer.fit(make_agent(exact_folder), make_data())
    assert trainer.global_step == 2


@pytest.mark.slow
def test_a_guard_of_a_misspelt_metric_says_so(tmp_path, exact_folder):
    with pytest.warns(UserWarning, match="rollout/entrpy of a Guard is not logged.*rollout/entropy"):
        make_trainer(tmp_path, 1, [Guard("rollout/entrpy", low=0.1)]).fit(make_agent(exact_folder), make_data())


@pytest.mark.slow
def test_a_second_run_with_the_same_guards_begins_at_full_rates_and_compares_with_its_own_norms(tmp_path, exact_folder):
    guard, spikes, used = ValidActionFloor(1.0, action="lower", patience=2), GradientSpikes(after=2), []
    guard.judge = lambda attempt: "too few"
    for _ in range(2):
        rates = RatesUsed()
        make_trainer(tmp_path, 3, [guard, spikes, rates]).fit(make_agent(exact_folder), make_data())
        used.append(rates.seen)
        assert [len(norms) for norms in spikes.norms.values()] == [6, 6]
    assert used[0] == [1e-3] * 3 + [5e-4] * 3  # the second iteration in a row lowers, between its start and its step
    assert used[1] == used[0]


def test_each_action_does_what_it_says():
    beyond = attempt(rollout={"kl/reference": 9.0})
    assert KLCeiling(1.0, action="stop").before_step(trainer_of(), beyond)[0] is Verdict.STOP
    with pytest.warns(UserWarning, match="kl/reference is 9, above 1"):
        assert KLCeiling(1.0).before_step(trainer_of(), beyond)[0] is Verdict.STEP
    trainer = trainer_of()
    guard = KLCeiling(1.0, action="lower", factor=0.25)
    with pytest.warns(UserWarning, match="learning rates"):
        assert guard.before_step(trainer, beyond)[0] is Verdict.STEP
    assert guard.lowered == 0.25  # by which the agent multiplies (tests/agents/test_schedule.py)
    guard.before_step(trainer, attempt(1, 1, {"kl/reference": 9.0}))  # of the same iteration
    assert guard.lowered == 0.25


def test_a_resumed_guard_keeps_the_rates_lowered_and_counts_on():
    guard, beyond = KLCeiling(1.0, action="lower", patience=2), {"kl/reference": 9.0}
    first = trainer_of()
    guard.before_step(first, attempt(0, 0, beyond))
    assert guard.lowered == 1.0
    with pytest.warns(UserWarning, match="learning rates"):
        guard.before_step(first, attempt(1, 0, beyond))
    guard.before_step(first, attempt(2, 0, beyond))
    assert guard.lowered == 0.5
    resumed, trainer = KLCeiling(1.0, action="lower", patience=2), trainer_of()
    resumed.load_state_dict(guard.state_dict())
    with pytest.warns(UserWarning, match="by 0.25 in all"):
        resumed.before_step(trainer, attempt(3, 0, beyond))  # the second in a row
    assert resumed.lowered == 0.25


def test_one_guard_may_warn_and_another_of_its_class_stop():
    guards = [kind(**bounds, action=action) for kind, bounds, _ in GUARDS[:4] for action in ("warn", "stop")]
    assert len({guard.state_key for guard in guards}) == len(guards)
    L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", callbacks=guards)  # refuses equal ones


def test_a_number_that_is_missing_says_nothing():
    trainer, empty = trainer_of(), Attempt(0, 0, {}, {}, {})
    for kind, bounds, _ in GUARDS:
        assert kind(**bounds, action="stop").before_step(trainer, empty)[0] is Verdict.STEP
    entropy = EntropyBounds(low=0.5, action="stop")
    assert entropy.before_step(trainer, Attempt(0, 0, {"policy/entropy": 0.1}, {}, {}))[0] is Verdict.STOP


def test_the_kl_of_the_update_skips_the_steps_that_are_left():
    guard, trainer = KLCeiling(0.1, of="update", action="skip"), trainer_of()
    kls = [0.0, 0.05, 0.2, 0.05, 0.0]
    said = [
        guard.before_step(trainer, attempt(n, n % 4, metrics={"policy/approx_kl": kl}))[0] for n, kl in enumerate(kls)
    ]
    assert said == [Verdict.STEP, Verdict.STEP, Verdict.SKIP, Verdict.SKIP, Verdict.STEP]
    assert guard.state_key != KLCeiling(0.1).state_key  # both may be in one run


def spikes(norms, **settings):
    guard, trainer = GradientSpikes(after=4, action="skip", **settings), trainer_of()
    return guard, [
        guard.before_step(trainer, attempt(n, 0, norms={"actor": norm, "critic": 1.0}))[0] is Verdict.SKIP
        for n, norm in enumerate(norms)
    ]


def test_a_spike_is_far_above_the_norms_before_it_and_does_not_move_their_scale():
    quiet = [1.0, 1.1, 0.9, 1.05, 0.95]
    _, found = spikes([*quiet, 50.0, 1.0, 50.0, 0.01, 1.0])
    assert found == [False] * 5 + [True, False, True, False, False]
    assert spikes([50.0, 1.0, 1.0, 1.0])[1] == [False] * 4  # too early to tell
    assert spikes([*quiet, 0.0, 1.0])[1][-1] is False  # a gradient of nothing is no number to compare with


def test_a_lasting_change_becomes_the_new_scale():
    _, found = spikes([1.0] * 6 + [50.0] * 6, window=6)
    assert found[6]
    assert not found[-1]


def test_norms_are_in_the_state():
    guard, _ = spikes([1.0, 1.1, 0.9, 1.05, 0.95])
    resumed = GradientSpikes(after=4, action="skip")
    resumed.load_state_dict(guard.state_dict())
    assert resumed.before_step(trainer_of(), attempt(5, 0, norms={"actor": 50.0}))[0] is Verdict.SKIP


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: KLCeiling(1.0, action="halt"), "action"),
        (lambda: KLCeiling(1.0, factor=2.0), "factor"),
        (lambda: KLCeiling(1.0, patience=0), "patience"),
        (lambda: EntropyBounds(), "low"),
        (lambda: GradientSpikes(after=200), "after"),
    ],
)
def test_wrong_settings_are_refused(make, key):
    with pytest.raises(ValueError, match=rf"\b{key}\b"):
        make()


class RatesUsed(L.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, agent, batch, batch_idx):
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


class Weights(L.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, agent, batch, batch_idx):
        self.seen.append([p.detach().clone() for p in agent.parameters()])


@pytest.mark.slow
def test_in_a_run_a_guard_acts_before_the_update_and_names_the_checkpoint(tmp_path, exact_folder):
    """A random model's replies in words are all invalid for the parser that games have."""
    last = ModelCheckpoint(tmp_path, filename="last", enable_version_counter=False, save_on_train_epoch_end=True)
    guard = KLCeiling(1e-9, action="stop")  # the first rollout is the reference's own
    weights = Weights()
    trainer = make_trainer(tmp_path, 5, [last, guard, weights], enable_checkpointing=True)
    with pytest.raises(RunStoppedError, match=r"KLCeiling: kl/reference is .*above 1e-09") as error:
        trainer.fit(make_agent(exact_folder, SharedCritic()), make_data())
    assert error.value.checkpoint == str(tmp_path / "last.ckpt")
    saved = read(tmp_path / "last.ckpt")
    assert saved["attempts"] == 2  # all steps of the first iteration, none of the second
    assert guard.state_key in saved["callbacks"]
    assert trainer.global_step == 2
    assert len(weights.seen) == 3


def test_a_ceiling_needs_the_reference_it_speaks_of(tmp_path, exact_folder):
    trainer = make_trainer(tmp_path, 1, [KLCeiling(0.1)])
    with pytest.raises(ValueError, match=r"model.init_args.kl.reward"):
        trainer.fit(make_agent(exact_folder, SharedCritic(), kl_reward=0.0), make_data())
