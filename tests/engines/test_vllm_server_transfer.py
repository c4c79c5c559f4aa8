"""Two real vLLM servers that get weights over the network by gloo, the way of NCCL on machines without GPUs."""

from __future__ import annotations

import copy
import os
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_agentrl.engines import Reply, VLLMServerEngine
from lightning_agentrl.engines.vllm_server import sent_weights
from lightning_agentrl.engines.vllm_server.sent_weights import WeightSource
from lightning_agentrl.engines.vllm_server.shared_weights import SharedWeights
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.lora import LoRA
from lightning_agentrl.vllm_worker.gloo_group import GlooGroup
from tests.cli import Config, Verify, changed, fit, judged
from tests.engines.servers import (
    Pair,
    ServerProcess,
    is_running,
    kill_while_it_samples,
    places,
    wait_until,
    watched,
)
from tests.engines.test_vllm_engine import MIXED, handle_of, policy_of, serve, trained_logps
from tests.engines.test_vllm_runs import check_two_processes, played
from tests.engines.withheld import check_each_kind
from tests.moving import move

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def pair(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("servers")
    first, second = (
        ServerProcess(served_folder, folder / f"{name}.log", transfer="gloo", workers=workers)
        for name, workers in (("first", True), ("second", False))
    )
    try:
        first.start()
        second.start()
        first.wait()
        second.wait()
        yield first, second
    finally:
        first.kill()
        second.kill()


@pytest.fixture
def policy(served_folder: Path) -> LanguageModel:
    return policy_of(served_folder)


@pytest.fixture
def engine(pair: Pair, policy: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[VLLMServerEngine]:
    for server in pair:
        if server.process is None:  # a test has killed it
            server.start()
            server.wait()
    engine = VLLMServerEngine([server.url for server in pair], transfer="gloo")
    with watched(engine, handle_of(policy), monkeypatch):
        yield engine


def check(engine: VLLMServerEngine, policy: LanguageModel) -> None:
    """All replies of a policy, with its log-probs."""
    for one, reply in zip(MIXED, serve(engine, MIXED), strict=True):
        assert reply.logps == pytest.approx(trained_logps(policy, one, reply), abs=2e-4)
        assert reply.policy_version == engine.policy_version


def wait_until_all_are_used(engine: VLLMServerEngine, seconds: float = 60) -> None:
    assert engine._pool is not None
    end = time.monotonic() + seconds
    while not all(replica.used for replica in engine._pool.replicas):
        assert time.monotonic() < end
        time.sleep(0.1)


# What is sampled


def test_logps_are_the_trainers_before_and_after_updates(
    engine: VLLMServerEngine, policy: LanguageModel, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = places(monkeypatch)
    for version in range(3):
        engine.sync(version)
        check(engine, policy)
        move(policy, seed=version, share=0.1)
    assert set(asked) == {server.url for server in pair}


def test_replies_are_to_the_bit_those_of_weights_from_a_folder(
    engine: VLLMServerEngine, policy: LanguageModel, pair: Pair, tmp_path: Path
) -> None:
    """The servers keep their version, so that the engine goes on asking them."""
    folder = SharedWeights(str(tmp_path))

    def replies(name: str | None) -> list[Reply]:
        """One after the other, with the weights of the policy read from a folder in between, or none."""
        if name is not None:
            path = str(folder.write(policy.lm, name))
            for server in pair:
                server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
                server.post("/reset_prefix_cache", {})
        return [serve(engine, [one])[0] for one in MIXED]

    move(policy, seed=1, share=0.1)
    engine.sync(1)
    sent = replies(None)
    assert replies("a-1") == sent
    move(policy, seed=2, share=0.1)
    other = replies("a-2")
    assert all(a.logps != b.logps for a, b in zip(other, sent, strict=True))
    engine.sync(2)
    assert [(reply.ids, reply.logps) for reply in replies(None)] == [(reply.ids, reply.logps) for reply in other]


def test_adapters_are_sampled_with(engine: VLLMServerEngine, pair: Pair, served_folder: Path) -> None:
    engine.stop()
    policy = LanguageModel(LoRA(rank=4).adapt(policy_of(served_folder).lm, "actor"))
    engine.start(handle_of(policy))
    for version in range(2):
        move(policy, seed=version, share=0.1)
        engine.sync(version)
        check(engine, policy)


# Weights that an update leaves out


@pytest.fixture
def given(server_config: Config) -> Config:
    given = changed(server_config, "data.init_args.engine.init_args.transfer", "gloo")
    return changed(given, "data.init_args.interaction.init_args.max_reply_tokens", 24)


def test_the_servers_sample_from_what_is_trained(verify: Verify, given: Config) -> None:
    code, lines = verify(changed(given, "model.init_args.temperature", 0.8))
    assert (code, judged(lines)[2]) == (0, "ok")
    assert judged(lines)[0] < 3e-4


def test_each_kind_of_weight_that_is_withheld_is_found_out(
    verify: Verify,
    given: Config,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_each_kind(verify, given, sent_weights, monkeypatch, capsys)


# What is refused


@pytest.mark.parametrize("transfer", ["folder", "nccl"])
def test_a_server_that_was_started_for_another_transfer_is_refused(
    transfer: Any, pair: Pair, policy: LanguageModel
) -> None:
    engine = VLLMServerEngine([pair[0].url], transfer=transfer)
    message = rf"to take weights by 'gloo', .* sends them by '{transfer}'; .*--transfer {transfer}`, or set .*transfer"
    with pytest.raises(ValueError, match=message):
        engine.check()
    with pytest.raises(ValueError, match=message):
        engine.start(handle_of(policy))
    engine.stop()


# Servers and trainers that come and go


def test_an_update_that_breaks_off_leaves_nothing_behind(
    engine: VLLMServerEngine, policy: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a layer whose projections vLLM packs into one."""
    tensors, broken = WeightSource.__iter__, []

    def breaking(self: WeightSource) -> Iterator[tuple[str, Tensor]]:
        for name, weight in tensors(self):
            if not broken and "layers.1.self_attn.v_proj" in name:
                broken.append(name)
                raise RuntimeError("a fault in the middle")
            yield name, weight

    monkeypatch.setattr(WeightSource, "__iter__", breaking)
    move(policy, seed=1, share=0.1)
    start = time.monotonic()
    engine.sync(1)  # by the other server alone, if this one was not taken again meanwhile
    assert time.monotonic() - start < 30
    assert broken
    wait_until_all_are_used(engine)
    check(engine, policy)
    move(policy, seed=2, share=0.1)
    engine.sync(2)
    wait_until_all_are_used(engine, 0.0)
    check(engine, policy)


def test_a_new_trainer_is_taken_after_one_that_died_in_an_update(
    engine: VLLMServerEngine, policy: LanguageModel, pair: Pair
) -> None:
    """It has begun an update and never finished it."""
    engine.stop()
    for server in pair:
        server.post("/start_weight_update", {})
    engine.start(handle_of(policy))
    move(policy, seed=1, share=0.1)
    engine.sync(1)
    wait_until_all_are_used(engine, 0.0)
    check(engine, policy)


def test_a_server_that_was_started_again_gets_the_weights_of_the_last_update(
    engine: VLLMServerEngine, policy: LanguageModel, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are not those of the policy any more: it is trained while replies are sampled."""
    move(policy, seed=1, share=0.1)
    engine.sync(1)
    sampled = copy.deepcopy(policy)
    move(policy, seed=2, share=0.1)
    first, second = pair
    first.post("/update_weight_version", {"new_version": "default"})
    with pytest.warns(UserWarning, match=f"{first.url}.*1.*2"):
        check(engine, sampled)
    wait_until_all_are_used(engine)
    asked = places(monkeypatch)
    check(engine, sampled)
    assert set(asked) == {first.url, second.url}


@pytest.mark.long
def test_a_server_that_is_killed_while_it_takes_weights_is_dropped_and_used_when_it_is_back(
    engine: VLLMServerEngine, policy: LanguageModel, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    sent, broadcast = [0], GlooGroup.broadcast

    def killing(self: GlooGroup, weight: Tensor) -> None:
        sent[0] += 1
        if sent[0] == 20:  # in the middle of both updates
            first.kill()
        broadcast(self, weight)

    monkeypatch.setattr(GlooGroup, "broadcast", killing)
    move(policy, seed=1, share=0.1)
    start = time.monotonic()
    with pytest.warns(UserWarning, match=f"{first.url}.*2"):
        engine.sync(1)
    assert time.monotonic() - start < 30
    asked = places(monkeypatch)
    check(engine, policy)
    assert set(asked) == {second.url}
    first.start()
    wait_until_all_are_used(engine, 300)
    check(engine, policy)
    assert set(asked) == {first.url, second.url}


def test_a_server_that_is_stopped_while_it_takes_weights_is_dropped_and_used_when_it_goes_on(
    engine: VLLMServerEngine, policy: LanguageModel, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine._pool is not None
    for replica in engine._pool.replicas:
        replica.server.patience = 3.0
    first, second = pair
    sent, broadcast, core = [0], GlooGroup.broadcast, first.core

    def stopping(self: GlooGroup, weight: Tensor) -> None:
        sent[0] += 1
        if sent[0] == 20:  # in the middle of both updates
            os.kill(core, signal.SIGSTOP)
        broadcast(self, weight)

    monkeypatch.setattr(GlooGroup, "broadcast", stopping)
    move(policy, seed=1, share=0.1)
    try:
        with pytest.warns(UserWarning, match=f"{first.url}.*2"):
            engine.sync(1)
        asked = places(monkeypatch)
        check(engine, policy)
        assert set(asked) == {second.url}
        move(policy, seed=2, share=0.1)
        engine.sync(2)
    finally:
        os.kill(core, signal.SIGCONT)
    wait_until_all_are_used(engine)
    check(engine, policy)
    assert set(asked) == {first.url, second.url}


@pytest.fixture
def training(given: Config, tmp_path: Path) -> Config:
    given["seed_everything"] = 3
    given["trainer"] |= {"max_epochs": 2, "callbacks": [{"class_path": "TurnLog"}]}
    given["data"]["init_args"].setdefault("validation", {})["every"] = 0
    given["trainer"]["default_root_dir"] = str(tmp_path / "run")
    given["model"]["init_args"] |= {"optim": {"lr_actor": 1e-3, "lr_critic": 1e-2}}
    return given


@pytest.mark.long
def test_two_processes_share_the_servers(training: Config, tmp_path: Path) -> None:
    check_two_processes(training, tmp_path)


@pytest.mark.long
def test_a_run_waits_for_its_only_server_and_goes_on_when_it_is_back(
    training: Config, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turns are those of a run in which nothing happened."""
    first, _ = pair
    training["data"]["init_args"]["engine"]["init_args"]["urls"] = [first.url]
    fit(training, tmp_path, monkeypatch)
    undisturbed = played(tmp_path / "run")
    asked = kill_while_it_samples(monkeypatch, first, reply=12, then=first.start)
    second = changed(training, "trainer.default_root_dir", str(tmp_path / "second"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(second, tmp_path, monkeypatch)
    assert asked[0] > 12
    assert sum("no vLLM server is left" in str(warning.message) for warning in caught) == 1
    assert sum("is not used" in str(warning.message) for warning in caught) == 1  # the new group was made at once
    turns = played(tmp_path / "second")
    assert len(turns) == 2 * 8
    assert turns == undisturbed


# How servers end; last, as they are not started again


def test_a_core_ends_with_its_api_server_even_when_it_is_stopped(pair: Pair) -> None:
    for server, stopped in zip(pair, (False, True), strict=True):
        core = server.core
        if stopped:
            os.kill(core, signal.SIGSTOP)
        os.kill(server.api_server, signal.SIGKILL)
        wait_until(lambda core=core: not is_running(core), 10)
        server.kill()
