"""Start and end of vLLM in the trainer's process."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from lightning_agentrl.engines.base import PlannedPolicy, PolicyHandle, SamplingRequest
from lightning_agentrl.engines.vllm.images import image_arguments
from lightning_agentrl.errors import ConfigError, one_line
from lightning_agentrl.errors.vllm_version import GET
from lightning_agentrl.models.families import text_family
from lightning_agentrl.models.lora import has_adapters
from lightning_agentrl.vllm_worker.extension import CPU_BLOCK, CPU_OPS

KEY = "data.init_args.engine.init_args"
# Families that vLLM cannot run, or computes differently from transformers (docs/results/vllm.md).
UNFIT = frozenset(("apertus", "ernie4_5_moe", "flex_olmo", "gpt_bigcode", "gpt_neox"))
UNFIT |= {"gpt_oss", "jetmoe", "minimax_m2", "persimmon", "phi"}
# Text families whose vLLM modules import torchvision.
IMPORT_TORCHVISION = frozenset(("qwen3_5_text", "qwen3_5_moe_text"))
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the ranks that vLLM supports
COLDEST, HOTTEST = 0.01, 2.0  # vLLM changes or refuses temperatures outside this range
LESS_PROMPT = "data.init_args.prompt.max_prompt_tokens or the interaction's max_reply_tokens"
QUIET = {"VLLM_CONFIGURE_LOGGING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
"""Variables while vLLM is imported: vLLM's logging configuration would close all log handlers of the process."""


@dataclass(frozen=True)
class VLLMOptions:
    """Options of vLLM; :class:`VLLMEngine` describes each option.

    Raises:
        ValueError: an option is out of range.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    max_batch: int
    gpu_memory_utilization: float
    kv_cache_gb: float
    sleep: bool
    cuda_graphs: bool

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {self.max_batch}")
        if not 0 < self.gpu_memory_utilization < 1:
            raise ValueError(f"gpu_memory_utilization must be above 0 and below 1, got {self.gpu_memory_utilization}")

    def computes_in(self, handle: PolicyHandle | PlannedPolicy) -> torch.dtype:
        """Return the dtype of the engine for a policy, or raise a ConfigError if vLLM does not support the dtype."""
        if self.dtype != "auto":
            return getattr(torch, self.dtype)
        if handle.computes_in == torch.float64:
            raise ConfigError(f"vLLM does not compute in float64; set {KEY}.dtype or trainer.precision 32-true")
        return handle.computes_in

    def sleeps(self, handle: PolicyHandle) -> bool:
        """Return whether the engine of a policy releases a GPU's memory between collections."""
        return self.sleep and handle.policy.lm.device.type == "cuda" and not handle.trained_meanwhile


def check_family(config: Any) -> None:
    """Check that vLLM can run models of a family.

    Args:
        config: transformers' config of the model.

    Raises:
        ConfigError: vLLM computes the family differently, cannot run the family, or requires torchvision, which is
            missing.
    """
    family = config.get_text_config().model_type
    if family in UNFIT:
        raise ConfigError(
            f"vLLM cannot run models of the family {family}, or computes them differently from the trainer; use "
            "TransformersEngine (key data.init_args.engine)"
        )
    if family in IMPORT_TORCHVISION and importlib.util.find_spec("torchvision") is None:
        raise ConfigError(
            f"vLLM's model of the family {family} imports torchvision, which is not installed; install the torchvision "
            "that matches your torch, or use TransformersEngine (key data.init_args.engine)"
        )


def check_request(request: SamplingRequest, max_model_len: int, limit_of: str) -> None:
    """Refuse requests that vLLM would truncate or change.

    Args:
        request: request to check.
        max_model_len: largest number of tokens of a prompt and its reply.
        limit_of: source of ``max_model_len``, as a clause after "tokens that", for the error message.

    Raises:
        ValueError: the request is too long or its temperature is out of range; the message names the key to change.
    """
    if len(request.prompt) + request.max_tokens > max_model_len:
        raise ConfigError(
            f"a prompt of {len(request.prompt)} tokens and a reply of up to {request.max_tokens} do not fit "
            f"the {max_model_len} tokens that {limit_of}; lower {LESS_PROMPT}"
        )
    temperature = request.temperature
    if temperature and not COLDEST <= temperature <= HOTTEST:
        raise ConfigError(
            f"vLLM samples at temperature 0, or {COLDEST} to {HOTTEST:g}, got {temperature}; change "
            "model.init_args.temperature or data.init_args.validation.temperature"
        )


def sampling_arguments(request: SamplingRequest, stop_token_ids: Collection[int]) -> dict[str, Any]:
    """Return the arguments of vLLM's ``SamplingParams`` for a request; a server accepts the same arguments."""
    return {
        "temperature": request.temperature,
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "stop_token_ids": list(stop_token_ids),
        "ignore_eos": True,  # stop only at `stop_token_ids`, not at the stop ids in the model's folder
        "logprobs": 0,  # return the log-prob of the sampled token only
        "detokenize": False,
    }


@contextmanager
def kept_process(device: torch.device) -> Iterator[None]:
    """Restore what vLLM changes in this process: random states, threads, matmul precision, logging and variables.

    vLLM's own environment variables stay set, since vLLM reads these variables at any time. With the matmul precision
    restored, vLLM samples with the precision in which the trainer scores. Variables that the user has set for vLLM's
    logging stay in effect.

    Args:
        device: device of the policy.
    """
    variables, precision = dict(os.environ), torch.get_float32_matmul_precision()
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    states = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    quiet = not any(name.startswith(("VLLM_LOGGING_", "VLLM_CONFIGURE_LOGGING")) for name in variables)
    if quiet:
        os.environ.update(QUIET)
        if logging.getLogger("vllm").level == logging.NOTSET:
            logging.getLogger("vllm").setLevel(logging.ERROR)
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_num_threads = set_num_threads  # vLLM replaces this function on a CPU
        if devices:
            torch.set_num_threads(threads)  # with a GPU, vLLM sets one thread for the whole process
        torch.set_float32_matmul_precision(precision)
        for name in set(os.environ) | set(variables):
            if (name in QUIET or not name.startswith("VLLM_")) and os.environ.get(name) != variables.get(name):
                if name in variables:
                    os.environ[name] = variables[name]
                else:
                    del os.environ[name]


def start_vllm(options: VLLMOptions, handle: PolicyHandle, owns_processes: bool) -> Any:
    """Start vLLM's ``LLMEngine`` in this process, without weights; with adapters, the base weights are loaded.

    Args:
        options: options of the engine.
        handle: handle of the policy, for its architecture, device and limits.
        owns_processes: whether vLLM creates the only process group.

    Raises:
        ValueError: vLLM cannot run the model here; the message names the key to change.
    """
    model, device = str(handle.policy.lm.name_or_path), handle.policy.lm.device
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # run in this process, which holds the weights
    if device.type != "cpu":  # vLLM reads this variable at any time (`VllmConfig.use_v2_model_runner`)
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    with kept_process(device):
        from vllm import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        if current_platform.is_cpu() != (device.type == "cpu"):
            found = f"runs on '{current_platform.device_type}'" if current_platform.device_type else "finds no device"
            raise ConfigError(
                f"the policy is on the device '{device.type}', but the installed vLLM {found}; change "
                f"trainer.accelerator, or install the other build: {GET}"
            )
        try:
            config = EngineArgs(**engine_arguments(options, handle)).create_engine_config()
            check_own_model(config.model_config, model)
            if device.index is not None:
                config.device_config.device = device
            return LLMEngine.from_vllm_config(config, disable_log_stats=True)
        except Exception as error:
            _leave_groups(owns_processes)
            if isinstance(error, (ValueError, torch.OutOfMemoryError)):
                raise ConfigError(_sentence(error, options, model, on_cpu=device.type == "cpu")) from error
            raise


def check_own_model(model: Any, name: str) -> None:
    """Refuse families that vLLM runs with transformers' class, since it modifies that class and so the trainer's model.

    Args:
        model: vLLM's model config.
        name: name or path of the model.

    Raises:
        ConfigError: vLLM has no class for the family.
    """
    from vllm.model_executor.model_loader.utils import get_model_architecture

    if ".models.transformers" in get_model_architecture(model)[0].__module__:
        raise ConfigError(
            f"vLLM has no model class for the family {model.hf_text_config.model_type} ('{name}'), and its fallback to "
            "transformers cannot run in the trainer's process; use VLLMServerEngine or TransformersEngine (key "
            "data.init_args.engine)"
        )


def engine_arguments(options: VLLMOptions, handle: PolicyHandle) -> dict[str, Any]:
    """Return the arguments of vLLM's engine for a policy.

    Raises:
        ConfigError: vLLM cannot run the model with these options.
    """
    lm = handle.policy.lm
    arguments: dict[str, Any] = {
        "model": str(lm.name_or_path),
        "generation_config": "vllm",  # ignore top-p, top-k and penalties in the model's folder
        "load_format": "auto" if has_adapters(lm) else "dummy",
        "use_tqdm_on_load": False,
        "dtype": str(options.computes_in(handle)).removeprefix("torch."),
        "max_model_len": handle.window,
        "max_num_seqs": options.max_batch,
        "logprobs_mode": "processed_logprobs",  # log-probs of the sampling distribution, after temperature
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "enable_sleep_mode": options.sleeps(handle),
        **image_arguments(handle.policy.image_reader, handle.window),
    }
    if lm.device.type == "cpu":
        arguments |= {"kv_cache_memory_bytes": int(options.kv_cache_gb * 2**30), "block_size": CPU_BLOCK}
        arguments["enforce_eager"] = True  # on a CPU, compilation takes minutes without a gain
        arguments["compilation_config"] = CPU_OPS
        # Chunked prefill has to rewind a request's random generator, which vLLM cannot do on a CPU. Without chunked
        # prefill vLLM caches no recurrent states, so families with recurrent states cannot use the prefix cache.
        arguments["enable_chunked_prefill"] = False
        family = text_family(lm.config)
        arguments["enable_prefix_caching"] = family is None or family.engine_shares
    else:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
        arguments["enforce_eager"] = not options.cuda_graphs
        if options.cuda_graphs:
            arguments["compilation_config"] = decoding_graphs(options.max_batch)
        arguments["async_scheduling"] = False  # vLLM's default is True, except on a CPU
    if has_adapters(lm):
        (adapters,) = vars(lm)["peft_config"].values()
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _room_for(adapters.r)}
    return arguments


def decoding_graphs(max_batch: int) -> dict[str, Any]:
    """Return a ``compilation_config`` of vLLM that only records decoding steps as CUDA graphs, without compiling."""
    return {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "max_cudagraph_capture_size": max_batch}


def close_vllm(engine: Any, owns_processes: bool) -> None:
    """Release vLLM's memory, and its process group if vLLM created the group (``owns_processes``)."""
    client = engine.engine_core
    client._finalizer.detach()  # the finalizer would always destroy the process group
    client.engine_core.model_executor.shutdown()
    client.engine_core.scheduler.shutdown()
    _leave_groups(owns_processes)


def _leave_groups(owns_processes: bool) -> None:
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    if owns_processes:
        parallel_state.destroy_distributed_environment()
    elif parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _room_for(rank: int) -> int:
    room = next((room for room in LORA_RANKS if room >= rank), None)
    if room is None:
        raise ConfigError(
            f"vLLM takes adapters up to rank {LORA_RANKS[-1]}, got {rank}; lower model.init_args.lora.init_args.rank "
            "or use TransformersEngine (key data.init_args.engine)"
        )
    return room


def _sentence(error: Exception, options: VLLMOptions, model: str, on_cpu: bool) -> str:
    name = "kv_cache_gb" if on_cpu else "gpu_memory_utilization"
    share = f"{KEY}.{name} (now {getattr(options, name):g})"
    why = one_line(str(error)) or type(error).__name__
    return (
        f"vLLM cannot be started with the model '{model}': {why}; if memory is short, change {share} or lower "
        f"{LESS_PROMPT}; if vLLM does not support the model, use TransformersEngine (key data.init_args.engine)"
    )
