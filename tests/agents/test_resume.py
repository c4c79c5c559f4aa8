"""What differs between a checkpoint and the run that goes on with it: told, refused, or accepted by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_agentrl.advantages import DualDiscountGAE
from lightning_agentrl.agents import KL
from lightning_agentrl.agents.resume import check_changes, weights_checksum
from lightning_agentrl.callbacks import CriticWarmup, RunCheckpoints
from lightning_agentrl.engines import TransformersEngine
from lightning_agentrl.errors import CheckpointError
from lightning_agentrl.losses import DPPOTV, AdaptiveKL
from lightning_agentrl.rollout import (
    EnvConfig,
    FaultLimits,
    FullMemory,
    PromptFormat,
    TurnInteraction,
    ValidationConfig,
    WindowMemory,
)
from lightning_agentrl.types.plain_config import by_key, to_plain
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.tiny import tiny_model_folder


def made_of(model: Path, agent: dict[str, Any] | None = None, warm_up: bool = False, **data: Any) -> dict[str, Any]:
    """What a run says of itself, before any weights are read."""
    made, trainer = make_agent(model, **(agent or {})), make_trainer(model, 1, [CriticWarmup(1, 1, 1.0)] * warm_up)
    module = make_data(**data)
    made.trainer = trainer
    trainer._data_connector.attach_datamodule(made, datamodule=module)
    return {"settings": made.settings(), "weights": "a", "versions": {"torch": "1"}}


def changed(model: Path, agent: dict[str, Any] | None = None, warm_up: bool = False, **data: Any) -> list[str]:
    """The keys that a resumed run is refused for."""
    try:
        check_changes(made_of(model), made_of(model, agent, warm_up, **data), ())
    except CheckpointError as error:
        return error.fix.split("--resume_with_changes ")[1].split(",")
    return []


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ({"num_envs": 8}, ["data.init_args.num_envs"]),
        ({"turns_per_env": 2}, ["data.init_args.turns_per_env"]),
        ({"mini_batch_turns": 16}, ["data.init_args.mini_batch_turns"]),
        ({"update_epochs": 2}, ["data.init_args.update_epochs"]),
        ({"memory": WindowMemory(1, thoughts=0)}, ["data.init_args.memory.init_args.thoughts"]),
        ({"memory": FullMemory()}, ["data.init_args.memory"]),
        (
            {"prompt": PromptFormat(think=True, max_prompt_tokens=512)},
            ["data.init_args.prompt.think"],
        ),
        (
            {"interaction": TurnInteraction(max_reply_tokens=4, invalid_penalty=0.5)},
            ["data.init_args.interaction.init_args.invalid_penalty"],
        ),
        ({"max_staleness": 1}, ["data.init_args.max_staleness"]),
        ({"agent": {"temperature": 0.5}}, ["model.init_args.temperature"]),
        ({"agent": {"kl_reward": 0.5}}, ["model.init_args.kl.reward"]),
        ({"agent": {"kl_reward": AdaptiveKL(0.01)}}, ["model.init_args.kl.reward"]),
        ({"agent": {"policy_loss": DPPOTV()}}, ["model.init_args.policy_loss"]),
        (
            {"agent": {"advantage": DualDiscountGAE(gamma_step=0.5)}},
            ["model.init_args.advantage.init_args.gamma_step"],
        ),
        ({"agent": {"lr_actor": 1e-9, "max_tokens_per_micro_batch": 9}}, []),
        ({"validation": ValidationConfig(episodes=4, num_envs=2), "stall_seconds": 1.0}, []),
        ({"faults": FaultLimits(in_a_row=1, share=1.0)}, []),
        (
            {
                "env": EnvConfig(
                    "agentrl_envs:GuessNumber-v0", timeout_seconds=60.0, judge_timeout_seconds=9.0, retries=9
                )
            },
            [],
        ),
        ({"engine": TransformersEngine(max_batch=1)}, []),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_enters_a_rollout_or_a_loss_is_refused_and_the_rest_is_not(
    tiny_folder: Path, change: dict[str, Any], keys: list[str]
) -> None:
    assert changed(tiny_folder, **change) == keys


def test_a_warm_up_that_was_not_there_is_refused(tiny_folder: Path) -> None:
    assert changed(tiny_folder, warm_up=True) == ["trainer.callbacks.CriticWarmup"]


def test_refused_keys_are_accepted_by_their_names_or_the_beginning_of_them() -> None:
    def of(**settings: Any) -> dict[str, Any]:
        return {"settings": {f"data.{key}": value for key, value in settings.items()}, "weights": "", "versions": {}}

    one, other = of(prompt=1, prompts=1), of(prompt=2, prompts=1)
    check_changes(one, other, ["data.prompt"])
    check_changes(one, other, ["data"])
    with pytest.raises(CheckpointError, match=r"data\.prompts was 1 and is 2") as error:
        check_changes(one, of(prompt=2, prompts=2), ["data.prompt"])
    assert "data.prompt " not in str(error.value)


def test_arguments_are_plain_values_by_their_keys() -> None:
    assert by_key(to_plain(KL(reward=AdaptiveKL(0.5))), "kl") == {
        "kl.reward": "AdaptiveKL",
        "kl.reward.init_args.value": 0.5,
        "kl.reward.init_args.target": 0.1,
        "kl.reward.init_args.horizon": 10_000,
        "kl.reward.init_args.clip": 0.2,
        "kl.reward_kind": "k1",
        "kl.loss": 0.0,
        "kl.loss_kind": KL().loss_kind,
        "kl.reference": None,
        "kl.action_share": None,
    }
    assert by_key({"a": [1, None], "b": {}}, "x") == {"x.a[0]": 1, "x.a[1]": None, "x.b": {}}


@pytest.mark.slow
def test_another_model_of_the_same_shape_is_refused_and_a_moved_one_is_not(tiny_folder: Path, tmp_path: Path) -> None:
    saving = RunCheckpoints(dirpath=str(tmp_path / "saved"))
    make_trainer(tmp_path, 1, [saving], enable_checkpointing=True).fit(make_agent(tiny_folder), make_data())
    path = str(tmp_path / "saved" / "last.ckpt")
    other = tiny_model_folder(tmp_path / "other", seed=1)
    assert weights_checksum(str(other)) != weights_checksum(str(tiny_folder)) == weights_checksum(str(tiny_folder))
    with pytest.raises(CheckpointError, match=r"model\.init_args\.model was 'weights \w{8}' and is 'weights \w{8}'"):
        make_trainer(tmp_path, 2).fit(make_agent(other), make_data(), ckpt_path=path)
    moved = tmp_path / "moved"
    moved.symlink_to(tiny_folder)
    make_trainer(tmp_path, 2).fit(make_agent(moved), make_data(), ckpt_path=path)


@pytest.mark.slow
def test_a_refused_run_is_continued_once_its_changes_are_named(
    tiny_folder: Path, tmp_path: Path, log: list[str]
) -> None:
    saving = RunCheckpoints(dirpath=str(tmp_path / "saved"))
    make_trainer(tmp_path, 1, [saving], enable_checkpointing=True).fit(make_agent(tiny_folder), make_data())
    path = str(tmp_path / "saved" / "last.ckpt")
    agent = make_agent(tiny_folder, temperature=0.5)
    agent.resume_with_changes = ["data.init_args.num_envs", "model.init_args.temperature"]
    trainer = make_trainer(tmp_path, 2)
    trainer.fit(agent, make_data(num_envs=8), ckpt_path=path)
    assert trainer.global_step == 2 + 4
    for part in ("data.init_args.num_envs was 4 and is 8", "model.init_args.temperature was 1.0 and is 0.5"):
        assert part in "\n".join(log)


@pytest.mark.slow
def test_a_run_keeps_its_id_where_it_goes_on_and_another_fit_is_another_run(tmp_path: Path, tiny_folder: Path) -> None:
    """Also with the same agent."""
    agent, path = make_agent(tiny_folder), tmp_path / "checkpoints" / "iteration-00001.ckpt"

    def fit(epochs: int, ckpt_path: Path | None = None) -> str:
        trainer = make_trainer(tmp_path, epochs, [RunCheckpoints()], enable_checkpointing=True)
        trainer.fit(agent, make_data(), ckpt_path=ckpt_path)
        saved = torch.load(path.with_name("last.ckpt"), weights_only=True)
        assert saved["run_id"] == agent.run_id
        return agent.run_id

    first, second = fit(1), fit(1)
    assert fit(2, path) == second
    assert len({"", first, second, fit(1)}) == 4
