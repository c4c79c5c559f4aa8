"""Weights over the network, without any server: what is copied, what a group sends, and what is refused."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_agentrl.commands.serve import server_command
from lightning_agentrl.engines import VLLMServerEngine
from lightning_agentrl.engines.vllm_server.sent_weights import WeightForm, WeightSource, copied_weights
from lightning_agentrl.engines.vllm_server.server import complaint, read_facts
from lightning_agentrl.models.loading import load_causal_lm
from lightning_agentrl.models.lora import LoRA, merge_adapters
from lightning_agentrl.vllm_worker.extension import own_address
from lightning_agentrl.vllm_worker.gloo_group import GlooGroup, find_store, open_store
from tests.engines.test_vllm_server_parts import TOLD

CPU = torch.device("cpu")


def test_a_group_sends_every_type_and_shape_to_the_bit() -> None:
    """To two workers, as of a server with tensor parallelism."""
    sent = [
        torch.randn(3, 5),
        torch.randn(4, 6).bfloat16(),
        torch.randn(6, 4).T,  # which does not lie in memory in its order
        torch.tensor(7, dtype=torch.int64),
    ]
    store = open_store("127.0.0.1")
    received: dict[int, list[torch.Tensor]] = {1: [], 2: []}

    def work(rank: int) -> None:
        group = GlooGroup(find_store("127.0.0.1", store.port), rank, 3, "127.0.0.1")
        for weight in sent:
            own = torch.empty(weight.shape, dtype=weight.dtype)
            group.broadcast(own)
            received[rank].append(own)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in received]
    for thread in threads:
        thread.start()
    group = GlooGroup(store, 0, 3, "127.0.0.1")
    for weight in sent:
        group.broadcast(weight)
    for thread in threads:
        thread.join(timeout=60)
    for own in received.values():
        assert all(torch.equal(a, b) for a, b in zip(own, sent, strict=True))


def test_a_member_that_is_gone_is_an_error_at_once() -> None:
    store = open_store("127.0.0.1")
    here, gone = threading.Event(), threading.Event()

    def leave() -> None:
        group = GlooGroup(find_store("127.0.0.1", store.port), 1, 2, "127.0.0.1")
        here.set()
        del group
        gone.set()

    thread = threading.Thread(target=leave)
    thread.start()
    group = GlooGroup(store, 0, 2, "127.0.0.1")
    assert here.wait(60)
    assert gone.wait(60)
    thread.join()
    with pytest.raises(RuntimeError, match=r"[Cc]losed|reset"):
        group.broadcast(torch.zeros(10_000_000))


def test_the_own_address_is_the_one_on_the_way() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"


def test_what_is_sent_is_a_copy_and_has_every_name(tiny_folder: Path) -> None:
    lm = load_causal_lm(str(tiny_folder))
    weights = copied_weights(lm)
    before = {name: weight.detach().clone() for name, weight in lm.named_parameters(remove_duplicate=False)}
    with torch.no_grad():
        for weight in lm.parameters():
            weight.add_(1.0)
    assert weights.keys() == before.keys()
    assert all(torch.equal(weights[name], before[name]) for name in before)
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]  # tied: two names, copied once


def test_adapters_are_sent_as_part_of_the_weights(tiny_folder: Path) -> None:
    lm = LoRA(rank=2).adapt(load_causal_lm(str(tiny_folder)), "actor")
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    weights = copied_weights(lm)
    expected = dict(merge_adapters(lm).named_parameters(remove_duplicate=False))
    assert set(weights) == set(expected)
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(weights[name], load_causal_lm(str(tiny_folder)).state_dict()[name])


def test_what_is_announced_is_what_is_sent() -> None:
    source = WeightSource(CPU, {"a": torch.zeros(2, 3), "b": torch.ones(4).bfloat16()})
    assert source.metadata() == [WeightForm("a", torch.float32, (2, 3)), WeightForm("b", torch.bfloat16, (4,))]
    assert [(name, weight.dtype, tuple(weight.shape)) for name, weight in source] == [
        (form.name, form.dtype, form.shape) for form in source.metadata()
    ]


@pytest.mark.parametrize("started", [None, "gloo", "nccl"])
@pytest.mark.parametrize("transfer", ["folder", "gloo", "nccl"])
def test_a_server_takes_weights_the_way_it_was_started_for(started: str | None, transfer: Any) -> None:
    config = {**TOLD["info"]["vllm_config"], "weight_transfer_config": started and {"backend": started}}
    refusal = complaint(read_facts(**{**TOLD, "info": {"vllm_config": config}}), {}, 1, transfer)
    if (started or "folder") == transfer:
        assert refusal is None
    else:
        assert refusal is not None
        assert f"weights by '{started or 'folder'}', but the run sends them by '{transfer}'" in refusal
        assert f"`agentrl serve MODEL --transfer {transfer}`, or set data.init_args.engine" in refusal


def test_the_command_of_a_server_says_how_weights_come() -> None:
    command = server_command("m", 1, "h", [], on_cpu=True, transfer="gloo")
    assert json.loads(command[command.index("--weight-transfer-config") + 1]) == {"backend": "gloo"}
    assert command[command.index("--worker-extension-cls") + 1].endswith("receiver.ReceivesWeights")
    folder = server_command("m", 1, "h", [], on_cpu=True)
    assert "--weight-transfer-config" not in folder
    assert folder[folder.index("--worker-extension-cls") + 1].endswith("extension.WorkerExtension")


def test_impossible_arguments_are_refused() -> None:
    urls = ["http://127.0.0.1:9"]
    with pytest.raises(ValueError, match=r"weights_folder.*'folder'.*'gloo'"):
        VLLMServerEngine(urls, weights_folder="/shared", transfer="gloo")
