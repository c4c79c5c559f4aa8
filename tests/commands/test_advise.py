"""`agentrl advise`: episodes of a real policy, the files it writes, and that its config trains."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gymnasium
import pytest
import torch
import yaml
from gymnasium.spaces import Text

from lightning_agentrl import PPOAgent, RolloutDataModule
from lightning_agentrl.commands import advise
from lightning_agentrl.commands.advise import advise_agent
from lightning_agentrl.commands.advise_config import setting_config
from lightning_agentrl.metrics.advice import Setting
from lightning_agentrl.models.critic import SharedCritic
from lightning_agentrl.rollout import (
    EnvConfig,
    FullMemory,
    GroupRollout,
    PromptFormat,
    RawParser,
    SidesInteraction,
    TaskSet,
    TurnInteraction,
)
from lightning_agentrl.rollout.starts import StartedEpisode
from lightning_agentrl.types import Row
from tests.cli import Command, Config, changed, sentence
from tests.episodes.test_sides import Rounds
from tests.episodes.test_tasks import SUMS, Letters, file_of
from tests.types.samples import growing

GUESS = {"id": "agentrl_envs:GuessNumber-v0", "kwargs": {"highest": 5}}


class Endless(gymnasium.Env[str, str]):
    """A game without end, whose seed may not say all.

    Args:
        chance: random numbers come from elsewhere.
        broken: it fails at its first step.
    """

    actions = {"left": "", "right": ""}

    def __init__(self, chance: bool = False, broken: bool = False) -> None:
        self.chance = chance
        self.broken = broken
        self.observation_space = self.action_space = Text(50)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "a door", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.broken:
            raise IndexError("no such door")
        return f"door {random.random() if self.chance else self.np_random.integers(9)}", 0.0, False, False, {}


gymnasium.register("Unending-v0", Endless)
gymnasium.register("AdvisedRounds-v0", lambda: Rounds([0, 1, 0, 1], sides=2))
ENDLESS = "tests.commands.test_advise:Unending-v0"


def test_episodes_are_measured_and_the_advice_is_written(config: Config, agentrl: Command, tmp_path: Path) -> None:
    config = changed(changed(config, "data.init_args.env", GUESS), "trainer.limit_val_batches", 0)
    config |= {"ckpt_path": "gone.ckpt", "weights_only": None}  # as in the config that a run has saved
    code, errors = agentrl("--episodes", "8", "--json", "found/a.json", config=config, command="advise")
    assert code == 0, errors
    assert {path.name for path in tmp_path.iterdir()} == {"given.yaml", "advice.yaml", "found"}
    found = json.loads((tmp_path / "found" / "a.json").read_text())
    facts, advice = found["facts"], found["advice"]
    assert (facts["episodes"], facts["starts"], facts["lost"], facts["unended"]) == (8, 2, 0, 0)
    assert facts["repeats"]["value"] == 1
    assert facts["begin_alike"]["value"] == 1
    assert facts["first_values"] == 0
    assert facts["iteration_turns"] == 8
    assert facts["explained"]["value"] is None  # of two starts nothing is learnt for others
    assert advice["sure"] == "a guess"
    assert "not enough episodes: 8" in advice["notes"][0]
    text = (tmp_path / "advice.yaml").read_text()
    assert text.startswith(f"# agentrl advise: {advice['setting']} (a guess)")
    assert set(yaml.safe_load(text)) == {"model", "data"}


def test_an_agent_and_its_data_module_are_enough(tiny_folder: Path) -> None:
    """The same is measured again."""

    def found() -> Any:
        data = RolloutDataModule(
            EnvConfig(ENDLESS),
            num_envs=4,
            mini_batch_turns=16,
            interaction=TurnInteraction(max_reply_tokens=3, max_turns=6),
            seed=1,
        )
        return advise_agent(PPOAgent(str(tiny_folder)), data, episodes=6)

    facts, advice = found()
    assert (facts.horizon, facts.cut.value, facts.repeats.value, facts.unended) == ((6, 6), 1, 1, 0)
    assert advice.setting is Setting.LONG_CUTS
    assert "no setting learns" in " ".join(advice.notes)
    assert str(found()) == str((facts, advice))  # as text, since numbers that are none equal nothing


def test_tasks_and_growing_samples_are_measured(tiny_folder: Path, tmp_path: Path) -> None:
    """Among other sources, each with its own starts."""
    tasks = TaskSet(file_of(tmp_path / "sums.jsonl", SUMS), Letters())
    data = RolloutDataModule(
        envs=[EnvConfig(GUESS["id"], GUESS["kwargs"]), tasks],
        groups=GroupRollout(2, 8),
        memory=FullMemory(),
        prompt=PromptFormat(max_prompt_tokens=700),
        interaction=TurnInteraction(max_reply_tokens=3),
        seed=1,
    )
    facts, _ = advise_agent(PPOAgent(str(tiny_folder), critic=SharedCritic()), data, episodes=16)
    assert (facts.episodes, facts.starts, facts.shared_starts, facts.lost) == (16, 4, 4, 0)
    assert facts.repeats.value == 1
    assert facts.rewarded.value > 0
    assert facts.iteration_turns == round(16 * facts.mean_turns)
    assert not math.isnan(facts.explained.value)


def test_the_sides_of_a_game_are_episodes_and_need_groups(tiny_folder: Path) -> None:
    data = RolloutDataModule(
        EnvConfig("tests.commands.test_advise:AdvisedRounds-v0"),
        num_envs=4,
        groups=GroupRollout(2, 2),
        prompt=PromptFormat(think=False),
        interaction=SidesInteraction(max_reply_tokens=3, parser=RawParser()),
        seed=1,
    )
    facts, advice = advise_agent(PPOAgent(str(tiny_folder), critic=SharedCritic()), data, episodes=8)
    assert (facts.episodes, facts.starts, facts.horizon) == (16, 4, (2, 2))
    assert facts.mean_return == 10.5
    assert advice.setting is Setting.GROUPS_BY_STATE
    assert "whole games only" in " ".join(advice.notes)


def test_what_does_not_end_or_repeat_is_told(config: Config, agentrl: Command, tmp_path: Path) -> None:
    config = changed(config, "data.init_args.env", {"id": ENDLESS, "kwargs": {"chance": True}})
    given = ["--episodes", "5", "--most_turns", "4", "--json", "a.json", "--out", "b.yaml"]
    assert agentrl(*given, config=config, command="advise")[0] == 0
    found = json.loads((tmp_path / "a.json").read_text())
    assert (found["facts"]["unended"], found["facts"]["turns"], found["facts"]["repeats"]["value"]) == (5, 20, 0)
    assert found["advice"]["setting"] == "long_cuts"
    assert "5 of 5 episodes did not end" in found["advice"]["choices"][0]["why"]
    assert found["facts"]["cut"]["value"] == 0
    assert "a median episode has at least 4 turns" in found["advice"]["choices"][1]["why"]
    assert "does not repeat" in " ".join(found["advice"]["notes"])


@pytest.mark.slow
def test_wrong_input_is_told_in_a_sentence(config: Config, agentrl: Command, tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "own.yaml").write_text("trainer:\n")
    for arguments, part in (
        (["--episodes", "0"], "--episodes must be at least 1, got 0"),
        (["--most_turns", "0"], "--most_turns"),
        (["--out", "pages"], "--out"),
        (["--json", "pages"], "--json"),
        (["--out", "given.yaml/a.yaml"], "'given.yaml' cannot be made: File exists (key --out"),
        (["--json", "given.yaml/a.json"], "'given.yaml' cannot be made: File exists (key --json"),
        (["--out", "a.yaml", "--json", "./a.yaml"], "'a.yaml' cannot be both files"),
        (["--out", "given.yaml"], "'given.yaml' is the config that is read"),
        (["--out", "own.yaml"], "'own.yaml' is there already, and this command has not written it"),
        (["--json", "own.yaml"], "'own.yaml' is there already, and this command has not written it"),
    ):
        assert part in sentence(agentrl(*arguments, config=config, command="advise"))
    broken = changed(config, "data.init_args.env", {"id": ENDLESS, "kwargs": {"broken": True}, "retries": 0})
    message = sentence(agentrl("--episodes", "4", config=broken, command="advise"))
    assert "all 4 episodes were lost to faults of the environment" in message


def test_the_quick_critic_reads_the_last_token_before_each_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Row] = []

    def row_states(actor: Any, rows: Sequence[Row], reader: Any) -> torch.Tensor:
        read.extend(rows)
        return torch.zeros(4, 2)

    monkeypatch.setattr(advise, "row_states", row_states)
    agent = SimpleNamespace(models=SimpleNamespace(actor=None), reader=lambda: None, evaluation_mode=nullcontext)
    advise.read_states(cast(Any, agent), [StartedEpisode(0, growing(), "", None)], untrained=False)
    assert [row.logit_positions for row in read] == [(1, 6, 8), (0,)]
    assert [row.input for row in read] == [sample.input for sample in growing()]


def test_sizes_keep_the_turns_of_an_iteration() -> None:
    """About; and what belongs to another setting is taken back."""
    config: dict[str, Any] = {
        "model": {
            "class_path": "PPOAgent",
            "init_args": {
                "critic": {"class_path": "lightning_agentrl.models.critic.SharedCritic"},
                "optim": {"lr_actor": 5e-6, "lr_critic": 3e-4},
            },
        },
        "data": {
            "class_path": "RolloutDataModule",
            "init_args": {"num_envs": 64, "turns_per_env": 8, "mini_batch_turns": 256, "groups": None},
        },
        "trainer": {
            "callbacks": [{"class_path": "lightning_agentrl.callbacks.CriticWarmup"}, {"class_path": "TurnLog"}],
            "max_epochs": 30,
        },
    }
    long = setting_config(Setting.LONG_CUTS, config, 20.0, False)
    sizes = {"num_envs": 8, "turns_per_env": 64, "mini_batch_turns": 256, "groups": None}
    assert long["data"]["init_args"] == sizes
    assert long["model"]["init_args"]["optim"] == {"lr_critic": 5e-5}
    assert long["trainer"] == {"callbacks": [{"class_path": "TurnLog"}]}
    groups = setting_config(Setting.GROUPS_BY_STATE, config, 20.0, False)
    assert groups["data"]["init_args"]["groups"] == {"size": 8, "per_rollout": 3, "mini_batches": 2, "ahead": 0}
    assert groups["model"]["init_args"]["critic"] is None
    assert "kl" not in groups["model"]["init_args"]  # an agent that may have no such key
    for processes in (2, 8):
        of_all = setting_config(Setting.GROUPS, config, 5.0, False, processes)["data"]["init_args"]["groups"]
        assert of_all["per_rollout"] % processes == 0
        of_all = setting_config(Setting.LONG_CUTS, config, 20.0, False, processes)["data"]["init_args"]
        assert of_all["num_envs"] % processes == of_all["mini_batch_turns"] % processes == 0
    few = {"num_envs": 6, "turns_per_env": 8, "mini_batch_turns": 12, "groups": None}
    grown = setting_config(Setting.LONG_CUTS, config | {"data": config["data"] | {"init_args": few}}, 20.0, True, 3)
    assert grown["data"]["init_args"] == {
        "num_envs": 3,
        "turns_per_env": 64,
        "mini_batch_turns": 96,  # two mini-batches: four would need four environments
        "groups": None,
    }
    config["data"]["init_args"] |= {"groups": {"size": 4, "per_rollout": 8, "mini_batches": 2}}
    config["model"]["init_args"] |= {
        "group_filter": {"class_path": "KeepWidest"},
        "policy_loss": {"class_path": "PPOClip", "init_args": {"aggregation": "prompt-mean"}},
    }
    warm = setting_config(Setting.WARM_UP, config, 2.0, True)
    assert warm["data"]["init_args"] == {"num_envs": 8, "turns_per_env": 8, "mini_batch_turns": 32, "groups": None}
    assert warm["model"]["init_args"]["group_filter"] is None
    assert warm["model"]["init_args"]["policy_loss"]["init_args"] == {"aggregation": "token-mean"}
    assert [one["class_path"] for one in warm["trainer"]["callbacks"]] == ["CriticWarmup", "TurnLog"]
    assert warm["trainer"]["max_epochs"] == 40


@pytest.mark.parametrize(
    ("kl", "moved"),
    [
        (None, {"reward": 0.0, "loss": 0.001}),  # as the agent has it where the key is left out
        ({"reward": 0.01, "loss": 0.0}, {"reward": 0.0, "loss": 0.01}),
        ({"reward": 0.01, "loss": 0.5}, {"reward": 0.0, "loss": 0.5}),
        ({"reward": {"class_path": "AdaptiveKL", "init_args": {"value": 0.02}}}, {"reward": 0.0, "loss": 0.02}),
        ({"reward": 0.0, "loss": 0.0}, None),
    ],
    ids=["left out", "reward", "both", "adaptive", "none"],
)
def test_groups_have_their_kl_in_the_loss(kl: Any, moved: Any) -> None:
    """In the rewards, it alone would give advantages of full size where all episodes of a group earn the same."""
    data = {"num_envs": 8, "turns_per_env": 8, "mini_batch_turns": 32, "groups": None}
    config = {
        "model": {"class_path": "PPOAgent", "init_args": {"kl": kl}},
        "data": {"class_path": "RolloutDataModule", "init_args": data},
    }
    assert setting_config(Setting.GROUPS, config, 4.0, False)["model"]["init_args"].get("kl") == moved
    assert "kl" not in setting_config(Setting.LONG_CUTS, config, 4.0, False)["model"]["init_args"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", [pytest.param(one, marks=() if one is Setting.WARM_UP else pytest.mark.long) for one in Setting]
)
def test_the_config_of_each_setting_trains(setting: Setting, config: Config, agentrl: Command, tmp_path: Path) -> None:
    """Behind a config that has a shared critic, and behind one with groups."""
    config = changed(config, "data.init_args.env", GUESS)
    grouped = changed(config, "data.init_args.groups", {"size": 2, "per_rollout": 2, "mini_batches": 2})
    for key in ("turns_per_env", "mini_batch_turns"):
        del grouped["data"]["init_args"][key]
    for one in (config, changed(grouped, "model.init_args.advantage", {"class_path": "GRPO"})):
        given = {"num_envs": 4, "turns_per_env": 2, "mini_batch_turns": 4} | one["data"]["init_args"]
        full = one | {"data": one["data"] | {"init_args": given}}
        changes = setting_config(setting, full, 2.0, False)
        (tmp_path / "advice.yaml").write_text(yaml.safe_dump(changes))
        code, errors = agentrl("--config", "advice.yaml", "--trainer.enable_checkpointing", "false", config=one)
        assert code == 0, errors
