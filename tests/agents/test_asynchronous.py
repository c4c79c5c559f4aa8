"""The next rollout is collected while the current one trains: order of events, versions, learning, resume, errors."""

from __future__ import annotations

import copy
import threading
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import lightning as L
import pytest
import torch

from benchmarks.laboratory.every_estimator import BANDIT
from lightning_agentrl.advantages import GRPO, DualDiscountGAE
from lightning_agentrl.agents import PPOAgent
from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.agents.scoring import action_rows, row_scores
from lightning_agentrl.callbacks import CriticWarmup
from lightning_agentrl.commands.plan import RunPlan
from lightning_agentrl.engines import Engine, TransformersEngine, VLLMEngine
from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.losses import Bypass, NoCorrection, TruncatedWeights
from lightning_agentrl.models.critic import SeparateCritic, SharedCritic
from lightning_agentrl.models.words import word_model
from lightning_agentrl.rollout import (
    EnvConfig,
    FaultLimits,
    GroupRollout,
    PromptFormat,
    RawParser,
    RolloutDataModule,
    TurnInteraction,
    WindowMemory,
)
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.rollout.scripted import FREE_TEXT, Scripted

ENGINES = [
    TransformersEngine,
    pytest.param(lambda: VLLMEngine(kv_cache_gb=0.05), marks=pytest.mark.vllm, id="VLLMEngine"),
]
EVENTS: list[str] = []
LOCK = threading.Lock()
STEPPED, UPDATED = threading.Event(), threading.Event()
TURNS = 16  # of an iteration


class Noted(Scripted):
    """Counts the steps of all its instances. Those of the second rollout wait for the first optimizer step."""

    def step(self, action: str) -> Any:
        with LOCK:
            number = sum(event.startswith("turn") for event in EVENTS) + 1
            EVENTS.append(f"turn {number}")
        if number > TURNS:
            STEPPED.set()
            assert UPDATED.wait(60)
        if number == BREAKS_AT[0]:
            raise OSError("the game has crashed")
        return super().step(action)


gymnasium.register("Noted-v0", Noted)
BREAKS_AT = [0]


def forget() -> None:
    EVENTS.clear()
    BREAKS_AT[0] = 0
    STEPPED.clear()
    UPDATED.clear()


@pytest.fixture(autouse=True)
def afresh() -> None:
    forget()


def noted_data(engine: Engine | None = None, **settings: Any) -> RolloutDataModule:
    return make_data(
        env=EnvConfig("Noted-v0", {"length": 3}, retries=0),
        prompt=FREE_TEXT,
        interaction=TurnInteraction(4, RawParser()),
        engine=engine,
        faults=FaultLimits(in_a_row=0),  # the first one ends the run
        **({"max_staleness": 1} | settings),
    )


class Meet(L.Callback):
    """The second optimizer step waits for a turn of the next rollout, which waits for the first step."""

    def on_train_batch_start(self, trainer, agent, batch, batch_idx):
        if trainer.current_epoch == 0 and batch_idx == 1:
            assert STEPPED.wait(60), "nothing is collected while the policy is trained"
        EVENTS.append(f"step {trainer.global_step} begins")

    def on_train_batch_end(self, trainer, agent, outputs, batch, batch_idx):
        EVENTS.append(f"step {trainer.global_step} is over")
        UPDATED.set()


class Keep(RolloutCallback):
    """Rollouts with the version that trains on them, the weights of each version, and what was logged."""

    def __init__(self) -> None:
        self.rollouts, self.versions, self.weights, self.logged = [], [], {}, []

    def on_rollout(self, trainer, agent, rollout):
        self.rollouts.append(rollout)
        self.versions.append(agent.policy_version)
        self.weights[agent.policy_version] = copy.deepcopy(agent.actor.state_dict())

    def on_train_epoch_end(self, trainer, agent):
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@pytest.mark.parametrize("engine", ENGINES)
def test_the_next_rollout_is_collected_between_two_optimizer_steps(tmp_path, served_folder, engine):
    collects_between_steps(tmp_path, served_folder, engine())


def collects_between_steps(path: Path, folder: Path, engine: Engine) -> None:
    """Each waits for the other, so neither can be over before the other has begun."""
    make_trainer(path, 2, [Meet()], precision="32-true").fit(make_agent(folder), noted_data(engine))
    when = {event: place for place, event in enumerate(EVENTS)}
    assert when["turn 16"] < when["turn 17"] < when["step 1 begins"]
    assert when["step 1 is over"] < when["turn 21"] < when["turn 32"] < when["step 2 begins"]  # which trains on it


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_turns_are_of_the_weights_one_iteration_before(tmp_path, served_folder, engine):
    trains_on_the_weights_before(tmp_path, served_folder, engine())


def trains_on_the_weights_before(path: Path, folder: Path, engine: Engine) -> None:
    """By the version of turns, and by their log-probs under the weights of that version."""
    keep, agent = Keep(), make_agent(folder)
    make_trainer(path, 4, [keep], precision="32-true").fit(agent, make_data(engine=engine, max_staleness=1))
    assert keep.versions == [0, 2, 4, 6]
    assert [{turn.policy_version for turn in rollout.turns} for rollout in keep.rollouts] == [{0}, {0}, {2}, {4}]
    for name in ("mismatch/staleness_mean", "mismatch/staleness_max"):
        assert [logged[name] for logged in keep.logged] == [0, 1, 1, 1]
    check_weights(keep, agent)
    for rollout in keep.rollouts:
        weights = (rollout.scores.old_logps - rollout.rollout_logps).exp().clamp(max=2.0)
        assert torch.allclose(rollout.weights[rollout.action_mask], weights[rollout.action_mask])


def check_weights(keep: Keep, agent: PPOAgent) -> None:
    """Log-probs of turns are those under the weights of their version, and all but the first rollout are older."""
    policy = copy.deepcopy(agent.actor)
    for number, rollout in enumerate(keep.rollouts):
        policy.load_state_dict(keep.weights[rollout.turns[0].policy_version])
        logps = torch.cat([logps for logps, _ in row_scores(policy, action_rows(rollout), agent.reader)])
        sampled = rollout.rollout_logps[rollout.action_mask]
        assert (logps - sampled).abs().max() < 5e-4
        moved = (rollout.scores.old_logps[rollout.action_mask] - sampled).abs().max()
        assert (moved > 5e-3) == (number > 0)


@pytest.mark.long
def test_it_learns_what_the_synchronous_mode_learns(tmp_path):
    """At a learning rate that suits older turns: at this one both modes take the same 50 iterations."""
    keep = Keep()
    folder = word_model(BANDIT.words, tmp_path / "words")
    agent = make_agent(
        folder, SharedCritic(), kl_reward=0.0, lr_actor=2e-3, lr_critic=2e-3, advantage=DualDiscountGAE()
    )
    data = make_data(
        env=EnvConfig("agentrl_envs:Bandit-v0"),
        num_envs=32,
        turns_per_env=2,
        mini_batch_turns=32,
        memory=WindowMemory(0),
        prompt=PromptFormat(think=False, instruction="", system="", examples=False, max_prompt_tokens=64),
        interaction=TurnInteraction(max_reply_tokens=1),
        max_staleness=1,
    )
    make_trainer(tmp_path, 60, [keep], precision="32-true").fit(agent, data)
    success = [sum(bool(turn.success) for turn in r.turns) / len(r.turns) for r in keep.rollouts]
    assert sum(success[:2]) / 2 < 0.4
    assert sum(success[-6:]) / 6 >= 0.9


GROUPS = {
    "groups": GroupRollout(size=2, per_rollout=4, mini_batches=2, ahead=4, ahead_turns=1),
    "turns_per_env": 8,
    "mini_batch_turns": 128,
    "max_staleness": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop_after", "settings"),
    [
        *(pytest.param(epoch, {}, marks=pytest.mark.long) for epoch in (1, 2)),
        (3, {}),
        (3, GROUPS),
    ],
)
def test_a_resumed_run_equals_one_run(tmp_path, exact_folder, stop_after, settings):
    """Stopped inside the warm-up, at its end, and with a rollout that was collected ahead."""

    def run(epochs, *callbacks, ckpt_path=None):
        agent = make_agent(exact_folder, SeparateCritic(), advantage=GRPO() if settings else DualDiscountGAE())
        warmup = CriticWarmup(rollouts=2, rounds=1, fraction=1.0)
        data = make_data(**({"max_staleness": 1} | settings))
        trainer = make_trainer(tmp_path, epochs, [warmup, *callbacks], enable_checkpointing=bool(callbacks))
        trainer.fit(agent, data, ckpt_path=ckpt_path)
        return agent

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole_keep, resumed_keep = Keep(), Keep()
        whole = run(5, whole_keep)
        run(stop_after, L.pytorch.callbacks.ModelCheckpoint(tmp_path, filename="stop", save_on_train_epoch_end=True))
        resumed = run(5, resumed_keep, ckpt_path=str(tmp_path / "stop.ckpt"))
    assert (torch.load(tmp_path / "stop.ckpt")["RolloutDataModule"]["ahead"] is None) == (stop_after < 3)
    for a, b in zip(reversed(whole_keep.rollouts), reversed(resumed_keep.rollouts), strict=False):
        assert [t.reply for t in a.turns] == [t.reply for t in b.turns]
        assert [t.policy_version for t in a.turns] == [t.policy_version for t in b.turns]
    for (name, a), (_, b) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-9), name


@pytest.mark.slow
def test_the_warm_up_collects_with_the_policy_that_does_not_move(tmp_path, tiny_folder):
    """In its own time; the first rollout of the actor is fresh, and from then on they are collected ahead."""
    keep = Keep()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callbacks = [keep, CriticWarmup(rollouts=2, rounds=1, fraction=1.0)]
        make_trainer(tmp_path, 4, callbacks).fit(make_agent(tiny_folder), make_data(max_staleness=1))
    assert keep.versions == [0, 4, 6]
    assert [{turn.policy_version for turn in rollout.turns} for rollout in keep.rollouts] == [{0}, {4}, {4}]


@pytest.mark.slow
def test_turns_do_not_age_in_a_warm_up_whose_policy_does_not_move(tmp_path, tiny_folder):
    """Groups are begun in it that are trained on after it: nothing is dropped, and ages begin where it ends."""
    keep, groups = Keep(), GroupRollout(size=2, per_rollout=1, mini_batches=1, ahead=2, ahead_turns=1)
    callbacks = [keep, CriticWarmup(rollouts=1, rounds=5, fraction=1.0)]
    data = make_data(groups=groups, max_staleness=3, num_envs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(tmp_path, 9, callbacks).fit(make_agent(tiny_folder, SeparateCritic()), data)
    assert not [warning for warning in caught if "it is dropped" in str(warning.message)]
    assert keep.versions == [0, 5, 6, 7, 8]
    assert min(turn.policy_version for turn in keep.rollouts[2].turns) == 0  # the number stays that of the steps
    ages = [logged["mismatch/staleness_max"] for logged in keep.logged if "mismatch/staleness_max" in logged]
    assert ages[-4:] == [0, 1, 2, 3]
    assert not any(ages[:-4])


@pytest.mark.slow
def test_an_error_in_the_background_ends_the_run_after_its_iteration_was_saved(tmp_path, tiny_folder):
    UPDATED.set()
    BREAKS_AT[0] = TURNS + 3
    checkpoint = L.pytorch.callbacks.ModelCheckpoint(tmp_path, filename="last", save_on_train_epoch_end=True)
    trainer = make_trainer(tmp_path, 3, [checkpoint], enable_checkpointing=True)
    data = noted_data()
    with pytest.raises(EnvError, match="OSError: the game has crashed") as error:
        trainer.fit(make_agent(tiny_folder), data)
    data.teardown("fit")
    assert any(note.startswith("environment ") for note in error.value.__notes__)
    saved = torch.load(tmp_path / "last.ckpt")
    assert saved["global_step"] == 2
    assert all(session["turns_taken"] == 4 for session in saved["RolloutDataModule"]["sessions"].values())
    BREAKS_AT[0] = 0
    keep = Keep()
    trainer = make_trainer(tmp_path, 2, [keep])
    trainer.fit(make_agent(tiny_folder), noted_data(), ckpt_path=str(tmp_path / "last.ckpt"))
    assert [{turn.policy_version for turn in rollout.turns} for rollout in keep.rollouts] == [{2}]


@pytest.mark.slow
def test_an_interrupt_in_an_update_ends_the_collection_too(tmp_path, tiny_folder):
    """Its turns wait for an optimizer step that never comes."""

    class Stop(L.Callback):
        def on_train_batch_start(self, trainer, agent, batch, batch_idx):
            assert STEPPED.wait(60)
            threading.Timer(0.2, UPDATED.set).start()  # an environment's own call cannot be interrupted
            raise KeyboardInterrupt

    data, others = noted_data(), set(threading.enumerate())  # what other tests left
    with pytest.raises(SystemExit):
        make_trainer(tmp_path, 2, [Stop()]).fit(make_agent(tiny_folder), data)
    data.teardown("fit")
    assert not data.sessions
    left = {thread.name for thread in set(threading.enumerate()) - others}
    assert not left & {"rollout-loop", "transformers-engine"}
    state = data._state
    assert all(session["turns_taken"] == 4 for session in state.sessions.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("staleness", "given", "kind"),
    [
        pytest.param(0, None, type(None), marks=pytest.mark.slow),
        (1, None, TruncatedWeights),
        pytest.param(1, NoCorrection(), NoCorrection, marks=pytest.mark.slow),
        pytest.param(1, Bypass(), Bypass, marks=pytest.mark.slow),
    ],
)
def test_importance_weights_correct_unless_the_config_says_otherwise(tmp_path, tiny_folder, staleness, given, kind):
    keep, agent = Keep(), make_agent(tiny_folder, correction=given)
    make_trainer(tmp_path, 2, [keep]).fit(agent, make_data(max_staleness=staleness))
    assert type(agent.correction) is kind
    assert ("mismatch/weight" in keep.logged[1]) == (kind is TruncatedWeights)
    assert ("mismatch/staleness_mean" in keep.logged[1]) == (staleness > 0)


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, NoCorrection()])
def test_what_corrects_turns_of_older_weights_is_not_left_to_the_next_run(tmp_path, tiny_folder, given):
    agent = make_agent(tiny_folder, correction=given)
    for staleness in (1, 1, 0):
        make_trainer(tmp_path, 1).fit(agent, make_data(max_staleness=staleness))
        assert type(agent.correction) is (TruncatedWeights if staleness and given is None else type(given))


@pytest.mark.slow
def test_the_plan_counts_the_engines_copy_and_says_how_old_turns_are(tmp_path, tiny_folder):
    texts, plans = [], []
    for bound in (0, 1):
        plan = RunPlan(make_trainer(tmp_path, 2), make_agent(tiny_folder), make_data(max_staleness=bound))
        texts.append(plan.text())
        plans.append(plan.memory)
        plan.close()
    message = "while the previous one trains; turns at most 1 iterations old"
    assert [message in text for text in texts] == [False, True]
    weights = sum(p.nbytes for p in plan.models.actor.parameters())
    assert (plans[0].engine, plans[1].sampling) == (0, 0)
    assert plans[1].engine == plans[0].sampling + weights
