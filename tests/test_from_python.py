"""Python in place of YAML: the notebook of the guide, objects of a wrong kind, checkpoints without pickle."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import lightning as L
import pytest
import torch

from lightning_agentrl import PPOAgent, RolloutDataModule, Trainer
from lightning_agentrl.advantages import GAE, AdvantageEstimator, estimated
from lightning_agentrl.agents import KL
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.losses import GroupFilter, KLCoefficient, OffPolicyCorrection, PolicyLoss, PPOClip
from lightning_agentrl.models.critic import Critic, SeparateCritic, SharedCritic
from lightning_agentrl.prompts.memory import Recollection
from lightning_agentrl.rollout import EnvConfig, TurnInteraction, WindowMemory
from lightning_agentrl.types import Rollout
from lightning_agentrl.types.plain_config import to_plain
from tests.advantages.cases import build, draw_episodes
from tests.agents.harness import make_agent, make_data, make_trainer

NOTEBOOK = Path(__file__).parents[1] / "docs" / "from_python.ipynb"
BANDIT = {"env": {"id": "agentrl_envs:Bandit-v0"}, "num_envs": 4, "turns_per_env": 2, "mini_batch_turns": 4}


@pytest.mark.slow
def test_the_notebook_runs_and_its_model_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "notebook"}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["after"] > max(names["before"], 0.9)
    assert names["again"][0]["val/success"] > 0.9  # the policy that the checkpoint gives back
    assert all(axis.lines[0].get_xdata().size == 30 for axis in names["axes"][1:])


def test_an_environment_is_given_as_to_gymnasium() -> None:
    data = RolloutDataModule(**{**BANDIT, "env": {"id": "agentrl_envs:Bandit-v0", "kwargs": {"arms": 2}}})
    assert data.pool.sources == [EnvConfig("agentrl_envs:Bandit-v0", kwargs={"arms": 2})]
    with pytest.raises(ValueError, match=r"'kwargs.api_key' looks like a secret") as refused:
        RolloutDataModule(**{**BANDIT, "env": {"id": "Vault-v0", "kwargs": {"api_key": "swordfish"}}})
    assert "swordfish" not in str(refused.value)


class NotMade(GAE):
    """To be given as a class where an object is asked for."""


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (
            RolloutDataModule,
            {"env": gymnasium.Env()},
            r"data.init_args.env takes an object of EnvConfig or AgentProgram, got .* Env; write EnvConfig\(...\)",
        ),
        (
            RolloutDataModule,
            {**BANDIT, "memory": 3},
            r"data.init_args.memory takes an object of Memory, got 3; write Memory\(",
        ),
        (
            RolloutDataModule,
            {**BANDIT, "memory": {"class_path": "WindowMemory", "init_args": {"turns": 3}}},
            r"takes an object of Memory, got .*; write WindowMemory\(\.\.\.\)$",
        ),
        (RolloutDataModule, {**BANDIT, "validation": {"episodes": 4}}, r"write ValidationConfig\(\.\.\.\)$"),
        (RolloutDataModule, {"envs": {"id": "x"}}, "data.init_args.envs takes an object of list, got {'id': 'x'}"),
        (
            RolloutDataModule,
            {"envs": [{"path": "x"}]},
            "TaskSet or EnvConfig or AgentProgram, got {'path': 'x'}",
        ),
        (RolloutDataModule, {**BANDIT, "num_envs": 4.0}, "data.init_args.num_envs must be a whole number, got 4.0"),
        (RolloutDataModule, {**BANDIT, "seed": "0"}, "data.init_args.seed must be a whole number, got '0'"),
        (RolloutDataModule, {**BANDIT, "seed": 2**70}, f"data.init_args.seed must be at most {2**32 - 1}, got {2**70}"),
        (RolloutDataModule, {**BANDIT, "seed": -1}, "data.init_args.seed must be at least 0, got -1"),
        (RolloutDataModule, {**BANDIT, "max_staleness": None}, "max_staleness must be a whole number, got None"),
        (
            PPOAgent,
            {"model": "demo", "kl": 0.1},
            r"model.init_args.kl takes an object of KL, got 0.1",
        ),
        (
            PPOAgent,
            {"model": "demo", "advantage": PPOClip()},
            "AdvantageEstimator, got an object of PPOClip",
        ),
        (PPOAgent, {"model": "demo", "advantage": NotMade}, r"got the class NotMade; write NotMade\(\.\.\.\)$"),
        (PPOAgent, {"model": SharedCritic()}, "model.init_args.model takes a hub id, .*save_pretrained"),
        (Trainer, {"gradient_clip_val": 1.0}, "model.init_args.optim.max_grad_norm_actor"),
        (Trainer, {"accumulate_grad_batches": 2}, "data.init_args.mini_batch_turns"),
        (Trainer, {"precision": "16-mixed"}, "trainer.precision '16-mixed' is not supported"),
        (Trainer, {"callbacks": ["RunSummary"]}, "trainer.callbacks takes an object of Callback, got 'RunSummary'"),
        (Trainer, {"callbacks": [{"class_path": "TurnLog"}]}, r"write TurnLog\(\.\.\.\)$"),
    ],
)
def test_an_object_of_a_wrong_kind_is_told_where_it_is_given(make: Any, given: dict[str, Any], message: str) -> None:
    """Lightning or a late line of ours would say it in its own words, or not at all."""
    with pytest.raises(ValueError, match=message):
        make(**given)


def test_models_are_named_by_paths(tiny_folder: Path) -> None:
    agent = PPOAgent(tiny_folder, SeparateCritic(tiny_folder), kl=KL(0.1, reference=tiny_folder))  # type: ignore[arg-type]
    assert agent.model == agent.reference == agent.critic.model == str(tiny_folder)  # type: ignore[union-attr]


class Idle(TurnInteraction):
    """Records nothing."""

    async def run(self, session: Any, *_: Any) -> None:
        await session.start()


@pytest.mark.slow
def test_an_interaction_that_records_nothing_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Idle has returned without .*\(key data.init_args.interaction"):
        make_trainer(tmp_path, 1).fit(make_agent(tiny_folder), make_data(interaction=Idle(4)))


class Gives(AdvantageEstimator):
    """Returns what it is told to make of the rewards."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def estimate(self, rollout: Rollout, reduce: Any = None) -> Any:
        return self.make(rollout.rewards)


class LossThatGives(PolicyLoss):
    """Returns what it is told to make of the log-probs."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def token_loss(self, logps_BA: torch.Tensor, *args: torch.Tensor) -> Any:
        return self.make(logps_BA)


def test_an_estimator_of_ones_own_that_changes_what_others_read_is_named() -> None:
    """Else metrics and turn logs would show rewards that nobody gave."""
    rollout = build(draw_episodes(3)).rollout
    with pytest.raises(
        TypeError, match=r"^estimate of Gives changes rewards of the rollout .*model.init_args.advantage"
    ):
        estimated(Gives(lambda x: (x.mul_(2), x)), rollout)
    estimated(Gives(lambda x: (x, x)), rollout)


def test_a_loss_of_ones_own_from_which_nothing_is_learnt_is_named() -> None:
    """A constant has no gradient; zeros are none that was forgotten, nor what is not to have one."""
    logps, constant, mask = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3), torch.ones(2, 3)
    for make in (lambda x: x.detach() - 1, lambda x: torch.ones_like(x, dtype=torch.int64)):
        loss = LossThatGives(make)
        with pytest.raises(TypeError, match=r"^token_loss of LossThatGives .* log-probs.*model.init_args.policy_loss"):
            loss(logps, constant, constant, mask)
        loss(logps.detach(), constant, constant, mask)
        with torch.no_grad():
            loss(logps, constant, constant, mask)
    assert not LossThatGives(torch.zeros_like)(logps, constant, constant, mask).any()


class TakingApart(WindowMemory):
    def recall(self, past: Any) -> Any:
        past.clear()
        return Recollection()


@pytest.mark.slow
def test_a_memory_may_take_its_history_apart(tiny_folder: Path, tmp_path: Path) -> None:
    make_trainer(tmp_path, 1).fit(make_agent(tiny_folder), make_data(memory=TakingApart(1)))


@pytest.mark.parametrize("shape", [(), (2,), (2, 1)])
def test_a_loss_that_would_be_broadcast_is_refused(shape: tuple[int, ...]) -> None:
    ones = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"token_loss .*, mask \[2, 3\]"):
        LossThatGives(lambda x: torch.ones(shape))(ones, ones, ones, ones)


@pytest.mark.parametrize("given", [None, torch.ones(1)])
def test_rewards_that_are_forgotten_or_broadcast_are_refused(given: Any) -> None:
    with pytest.raises((AttributeError, ValueError)):
        build(draw_episodes(3)).rollout.union(shaped_rewards=given)


class Bare(AdvantageEstimator):
    """Has a constructor that calls no other."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def estimate(self, rollout: Rollout, reduce: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.scale * rollout.rewards, rollout.rewards


def test_an_estimator_of_ones_own_is_whitened_unless_it_says_otherwise(tiny_folder: Path, tmp_path: Path) -> None:
    assert Bare().whiten
    assert not GAE(whiten=False).whiten
    make_trainer(tmp_path, 1).fit(make_agent(tiny_folder, advantage=Bare()), make_data())


def concrete(base: type) -> list[type]:
    found = [base] if not getattr(base, "__abstractmethods__", ()) else []
    return found + [each for child in base.__subclasses__() for each in concrete(child)]


BASES = (AdvantageEstimator, Critic, OffPolicyCorrection, GroupFilter, PolicyLoss, KLCoefficient)


def test_every_part_of_an_agent_has_a_plain_form_that_makes_it_again() -> None:
    for kind in {kind for base in BASES for kind in concrete(base)}:
        if kind.__module__.startswith("lightning_agentrl."):
            needed = [p for p in inspect.signature(kind).parameters.values() if p.default is p.empty]
            part = kind(**{p.name: 0.5 for p in needed if p.kind is not p.VAR_KEYWORD})
            plain = to_plain(part)
            assert to_plain(kind(**plain["init_args"])) == plain


class Opaque(GAE):
    """Does not keep its argument under its name."""

    def __init__(self, secret: float = 0.5) -> None:
        super().__init__(gamma=secret)


class OpaqueClip(PPOClip):
    """Does not keep its argument under its name either."""

    def __init__(self, secret: float = 0.5) -> None:
        super().__init__(clip_low=secret)


@pytest.mark.parametrize(
    "opaque",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"advantage": Opaque(0.9)},
        pytest.param({"policy_loss": OpaqueClip(0.1)}, marks=pytest.mark.slow),
    ],
)
def test_an_agent_comes_back_from_its_checkpoint_without_pickle(
    opaque: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    agent = make_agent(tiny_folder, SharedCritic(popart=0.1), **{"advantage": GAE(gamma=0.9), **opaque})
    trainer = make_trainer(tmp_path, 1)
    trainer.fit(agent, make_data())
    trainer.save_checkpoint(tmp_path / "here.ckpt")
    for name in opaque:
        with pytest.raises(ConfigError, match=name):
            PPOAgent.load_from_checkpoint(tmp_path / "here.ckpt", weights_only=True)
    loaded = PPOAgent.load_from_checkpoint(tmp_path / "here.ckpt", weights_only=True, **opaque)
    assert isinstance(loaded.critic, SharedCritic)
    assert loaded.critic.popart == 0.1
    assert loaded.advantage.gamma == 0.9  # type: ignore[attr-defined]
    assert (loaded.optim, loaded.kl) == (agent.optim, agent.kl)
    for name, weight in agent.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight.to(loaded.state_dict()[name].dtype)), name
    held_out = make_trainer(tmp_path, 1, limit_val_batches=1.0)
    assert held_out.validate(loaded, make_data(), verbose=False)[0]["val/episodes"] == 8


def test_the_trainer_has_what_the_command_adds(tmp_path: Path) -> None:
    trainer = Trainer(max_epochs=7, accelerator="cpu", default_root_dir=tmp_path)
    names = [type(callback).__name__ for callback in trainer.callbacks]  # type: ignore[attr-defined]
    assert {"StageProgress", "RolloutReport", "RunCheckpoints", "StopOnSignals"} <= set(names)
    assert names[0] == "StopOnSignals"
    assert trainer.num_sanity_val_steps == 0
    assert isinstance(trainer, L.Trainer)
    quiet = Trainer(max_epochs=2, enable_progress_bar=False, enable_checkpointing=False)
    assert not {"StageProgress", "RunCheckpoints"} & {type(callback).__name__ for callback in quiet.callbacks}  # type: ignore[attr-defined]
