"""Runs with two real vLLM servers: processes share them, and nothing is lost when one of them is killed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_agentrl.agents import PPOAgent
from lightning_agentrl.engines import VLLMServerEngine
from tests.agents import test_asynchronous as ahead
from tests.agents.harness import make_agent, make_trainer
from tests.cli import Config, changed, fit, three_iterations
from tests.engines.servers import Pair, ServerProcess, kill_while_it_samples
from tests.engines.test_vllm_runs import check_two_processes, played
from tests.rollout.scripted import story

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def afresh() -> None:
    ahead.forget()


@pytest.fixture
def training(server_config: Config, tmp_path: Path) -> Config:
    return changed(three_iterations(server_config), "trainer.default_root_dir", str(tmp_path / "run"))


def test_two_processes_share_the_servers(training: Config, tmp_path: Path) -> None:
    training["trainer"]["max_epochs"] = 2
    check_two_processes(training, tmp_path)


# While the policy trains


def test_the_next_rollout_is_collected_while_the_policy_trains(pair: Pair, served_folder: Path, tmp_path: Path) -> None:
    ahead.collects_between_steps(tmp_path, served_folder, engine_of(pair))


def test_turns_are_of_the_weights_one_iteration_before(pair: Pair, served_folder: Path, tmp_path: Path) -> None:
    """The version that each reply tells is that of the weights that were sent, whatever the policy is by then."""
    ahead.trains_on_the_weights_before(tmp_path, served_folder, engine_of(pair))


def engine_of(servers: Sequence[ServerProcess]) -> VLLMServerEngine:
    return VLLMServerEngine([server.url for server in servers])


class Kill(L.Callback):
    """After the first optimizer step, while the environments are in the first turns of the next rollout."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.steps = 0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.steps += 1
        if self.steps == 1:
            assert ahead.STEPPED.wait(60)
            self.server.kill()
            self.server.start()


def test_a_run_waits_for_its_only_server_and_loses_no_turn(pair: Pair, served_folder: Path, tmp_path: Path) -> None:
    """Killed while the policy trains, it gets the weights that the rollout was begun with, not those of the policy."""

    def run(*callbacks: L.Callback) -> tuple[ahead.Keep, PPOAgent]:
        ahead.forget()
        keep, agent = ahead.Keep(), make_agent(served_folder)
        trainer = make_trainer(tmp_path, 3, [keep, *callbacks, ahead.Meet()], precision="32-true")
        trainer.fit(agent, ahead.noted_data(engine_of(pair[:1])))
        return keep, agent

    undisturbed, _ = run()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        keep, agent = run(Kill(pair[0]))
    check_warnings(caught, pair[0])
    assert [{turn.policy_version for turn in rollout.turns} for rollout in keep.rollouts] == [{0}, {0}, {2}]
    ahead.check_weights(keep, agent)
    assert [story(rollout) for rollout in keep.rollouts] == [story(rollout) for rollout in undisturbed.rollouts]
    assert [logged["mismatch/staleness_max"] for logged in keep.logged] == [0, 1, 1]


def check_warnings(caught: Sequence[warnings.WarningMessage], server: ServerProcess) -> None:
    """That it was dropped and waited for, each said once."""
    messages = [str(warning.message) for warning in caught]
    assert sum("no vLLM server is left" in message for message in messages) == 1
    assert sum(f"{server.url} is not used" in message for message in messages) == 1


# While its replies are sampled; last, as the server is not started again


def test_a_run_goes_on_with_the_other_server_when_one_is_killed(
    training: Config, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No environment and no turn is lost, and all turns are those of a run in which nothing happened."""
    fit(training, tmp_path, monkeypatch)
    undisturbed = played(tmp_path / "run")
    asked = kill_while_it_samples(monkeypatch, pair[1], reply=6)
    second = changed(training, "trainer.default_root_dir", str(tmp_path / "second"))
    with pytest.warns(UserWarning, match=f"{pair[1].url}.*1.*2") as caught:
        fit(second, tmp_path, monkeypatch)
    assert asked[0] >= 6
    assert sum("is not used" in str(warning.message) for warning in caught) == 1
    turns = played(tmp_path / "second")
    assert len(turns) == 3 * 8
    assert turns == undisturbed
