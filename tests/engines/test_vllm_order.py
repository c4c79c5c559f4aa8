"""The order in which a vLLM that sleeps is woken and gets weights, by an engine that records, and how it starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config

from lightning_agentrl.engines import PolicyHandle, SamplingRequest, VLLMEngine
from lightning_agentrl.engines.vllm.start import decoding_graphs, engine_arguments
from lightning_agentrl.engines.vllm.thread import Handling, VLLMThread
from lightning_agentrl.engines.weights import named_weights
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import decoder_layers, load_causal_lm
from lightning_agentrl.models.lora import LoRA
from lightning_agentrl.models.sharding import gathered, shard
from lightning_agentrl.types import ModelInput

Start = Callable[[LanguageModel], VLLMEngine]


class Recorder:
    """Takes the place of vLLM's engine."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.got: dict[str, torch.Tensor] = {}
        self.policy: LanguageModel | None = None

    def sleep(self, level: int) -> None:
        self.seen.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.seen.append(f"wake {' '.join(tags)}")

    def collective_rpc(self, method: Any, kwargs: Any = None) -> None:
        self.seen.append(method if isinstance(method, str) else method.__name__)
        if kwargs is None:
            return
        assert self.policy is not None
        of_layers = [p for layer in decoder_layers(self.policy) for p in layer.parameters()]
        for name, weight in kwargs["weights_iterator"]:
            layer = name.split(".layers.")[1].split(".")[0] if ".layers." in name else "rest"
            whole = sum(not isinstance(p, DTensor) for p in of_layers)
            if self.seen[-1] != (step := f"{layer}, {whole} whole"):
                self.seen.append(step)
            self.got[name] = weight.clone()

    def reset_prefix_cache(self) -> bool:
        self.seen.append("forget")
        return True

    def reset_encoder_cache(self) -> None:
        pass


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()

    def refuse(*given: Any) -> Any:
        raise AssertionError("nothing is sampled here")

    handling = Handling(lambda: recorder, refuse, refuse, lambda engine: None)
    monkeypatch.setattr(VLLMEngine, "check", lambda self: None)
    monkeypatch.setattr(VLLMEngine, "_start_thread", lambda self, handle: VLLMThread(handling))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: recorder.seen.append("empty"))
    return recorder


@pytest.fixture
def start(vllm: Recorder) -> Iterator[Start]:
    engine = VLLMEngine()

    def started(policy: LanguageModel) -> VLLMEngine:
        vllm.policy = policy
        engine.start(PolicyHandle(policy, (2,), torch.no_grad))
        engine._sleeps = True  # as on a GPU
        return engine

    yield started
    engine.stop()


def one_iteration(engine: VLLMEngine, version: int) -> None:
    engine.sync(version)
    with engine.collecting():
        pass


def test_weights_are_woken_and_sent_before_keys_and_values_are_woken(
    vllm: Recorder, start: Start, tiny_folder: Path
) -> None:
    engine = start(policy := LanguageModel(load_causal_lm(str(tiny_folder))))
    one_iteration(engine, 0)
    whole = sum(1 for layer in decoder_layers(policy) for _ in layer.parameters())
    sent = ["reload_weights", *(f"{part}, {whole} whole" for part in ("rest", "0", "1", "rest")), "pack_experts"]
    assert vllm.seen == [*sent, "forget", "sleep 2"]  # level 2: no copy of weights that the next update replaces
    vllm.seen.clear()
    engine.sync(1)
    assert vllm.seen == ["empty", "wake weights", *sent, "empty", "wake kv_cache", "forget"]
    assert vllm.got.keys() == dict(named_weights(policy.lm)).keys()


def test_who_asks_a_sleeping_engine_is_told_and_does_not_wait(start: Start, tiny_folder: Path) -> None:
    engine = start(LanguageModel(load_causal_lm(str(tiny_folder))))
    one_iteration(engine, 0)
    request = SamplingRequest(ModelInput.of_ids([1, 2]), 3, 1.0, 0)
    with pytest.raises(RuntimeError, match="sleeps"):
        asyncio.run(engine.generate(request))


def test_a_sharded_policy_is_sent_layer_by_layer(
    vllm: Recorder, start: Start, tiny_folder: Path, tmp_path: Path
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        policy = LanguageModel(load_causal_lm(str(tiny_folder)))
        shard(policy, init_device_mesh("cpu", (1,)), torch.bfloat16)
        with gathered(policy):
            expected = {name: weight.clone() for name, weight in named_weights(policy.lm)}
        engine = start(policy)
        one_iteration(engine, 0)
        assert vllm.seen[:4] == ["reload_weights", "0, 0 whole", "1, 0 whole", "rest, 0 whole"]
        assert vllm.got.keys() == expected.keys()
        for name, weight in expected.items():
            assert weight.dtype == torch.bfloat16
            assert torch.equal(vllm.got[name], weight), name
        assert all(isinstance(p, DTensor) for p in policy.parameters())
        engine.stop()
    finally:
        dist.destroy_process_group()


def test_the_base_below_adapters_is_kept_since_it_is_not_sent_again(
    vllm: Recorder, start: Start, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VLLMEngine, "_send_adapters", lambda self, engine: engine.seen.append("adapters"))
    engine = start(LanguageModel(LoRA(rank=2).adapt(load_causal_lm(str(tiny_folder)), "actor")))
    one_iteration(engine, 0)
    assert vllm.seen == ["adapters", "forget", "sleep 1"]
    vllm.seen.clear()
    engine.sync(1)
    assert vllm.seen == ["empty", "wake weights", "adapters", "empty", "wake kv_cache", "forget"]


def handle_on(device: str) -> PolicyHandle:
    """As much of one as is read, since no model can be put on a GPU that is not there."""
    lm = SimpleNamespace(name_or_path="model", device=torch.device(device), config=Qwen3Config())
    settings = {"window": 100, "computes_in": torch.bfloat16, "trained_meanwhile": False}
    return cast(PolicyHandle, SimpleNamespace(policy=SimpleNamespace(lm=lm, image_reader=None), **settings))


def test_a_gpu_begins_with_what_can_go_wrong_least_and_one_key_switches_each_on() -> None:
    def arguments(device: str = "cuda", **keys: bool) -> dict[str, Any]:
        return engine_arguments(VLLMEngine(**keys).options, handle_on(device))

    plain = arguments()
    assert (plain["enforce_eager"], plain["async_scheduling"], plain["enable_sleep_mode"]) == (True, False, True)
    assert (plain["dtype"], plain["max_model_len"], plain["load_format"]) == ("bfloat16", 100, "dummy")
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "max_cudagraph_capture_size": 256}
    assert arguments(cuda_graphs=True) == plain | {"enforce_eager": False, "compilation_config": graphs}
    assert arguments(sleep=False) == plain | {"enable_sleep_mode": False}
    assert "async_scheduling" not in arguments("cpu")  # vLLM's default


# With vLLM


@pytest.mark.vllm
def test_recorded_graphs_mean_to_vllm_what_they_mean_here() -> None:
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode

    config = CompilationConfig(**decoding_graphs(max_batch=8))
    assert (config.mode, config.cudagraph_mode) == (CompilationMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY)


@pytest.mark.vllm
def test_levels_and_tags_mean_to_vllm_what_they_mean_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Level 2 keeps no weights; keys and values are never kept; both can be woken by themselves."""
    import vllm.device_allocator as allocators
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend
    from vllm.v1.executor.abstract import SLEEP_TAGS

    class Allocator:
        kept: tuple[str, ...] = ()

        def sleep(self, offload_tags: tuple[str, ...]) -> None:
            self.kept = offload_tags

    allocator = Allocator()
    monkeypatch.setattr(allocators, "get_mem_allocator_instance", lambda: allocator)
    for level, kept in ((1, True), (2, False)):
        CuMemBackend().suspend(level)
        assert ("weights" in allocator.kept) is kept
        assert "kv_cache" not in allocator.kept
    assert set(SLEEP_TAGS) == {"weights", "kv_cache"}
