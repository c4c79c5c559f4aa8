"""Tensor parallelism of vLLM: ranks that share one engine, each with a part of every weight."""

from __future__ import annotations

import socket
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_agentrl.distributed import all_gather, world_size
from lightning_agentrl.engines.vllm.lockstep import News
from lightning_agentrl.errors import ConfigError

KEY = "data.init_args.engine.init_args.tensor_parallel"


@dataclass(frozen=True)
class RankGroup:
    """Neighbouring ranks of the trainer, and a name, unique to the run, for their shared memory."""

    ranks: tuple[int, ...]
    name: str

    @classmethod
    def form(cls, size: int) -> RankGroup:
        """Return the group of ``size`` ranks to which this rank belongs. All ranks of the run must call it."""
        rank = dist.get_rank()
        start = rank - rank % size
        name = all_gather(uuid.uuid4().hex)[start]
        return cls(tuple(range(start, start + size)), f"{name}-{socket.gethostname()}")  # machines share no memory

    def forget_names(self) -> None:
        """Unlink the shared memory once all ranks have opened it; vLLM would leave it behind."""
        for path in Path("/dev/shm").glob(f"{self.name}-*"):
            path.unlink(missing_ok=True)


def check_world(size: int) -> None:
    """Refuse a group size that does not divide the number of processes.

    Raises:
        ConfigError: with the key to change.
    """
    world = world_size()
    if world % size:
        raise ConfigError(
            f"{KEY} {size} needs a multiple of {size} processes, got {world}; change it, or trainer.devices"
        )


def check_split(size: int, config: Any) -> None:
    """Refuse a model whose layers vLLM cannot split into ``size`` equal parts.

    Args:
        size: number of ranks of a group.
        config: transformers configuration of the text model.

    Raises:
        ConfigError: with the numbers that have to be multiples.
    """
    heads = config.num_attention_heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "intermediate_size", None) or size
    # if there are fewer heads of keys and values than ranks, they are replicated
    if heads % size or width % size or (shared % size and size % shared):
        raise ConfigError(
            f"{KEY} {size} does not divide the model: {heads} attention heads, {shared} of keys and values, MLP of "
            f"width {width}; set another, or 1"
        )


def group_executor(group: RankGroup, device: torch.device) -> type:
    """Return the class that runs vLLM's worker in this process, as one of several ranks started by a launcher.

    vLLM's own (`external_launcher`) reads rank and device from environment variables that not every launcher sets, and
    uses one name for the shared memory of all runs on a machine's CPU.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class GroupExecutor(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            return f"file://{group.name}", dist.get_rank(), device.index or 0  # no file: the processes are connected

    return GroupExecutor


def exchange(state: int, news: News | None) -> list[tuple[int, News | None]]:
    """Return the contributions of all ranks of vLLM's group, in rank order; all of them call it, in vLLM's thread.

    While there is no news, only two numbers are exchanged.
    """
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    own = torch.tensor([state, news is not None])
    heads = [torch.empty_like(own) for _ in group.ranks]
    dist.all_gather(heads, own, group=group.cpu_group)
    everything: list[Any] = [None] * len(heads)
    if any(bool(has_news) for _, has_news in heads):
        dist.all_gather_object(everything, news, group=group.cpu_group)
    return [(int(head[0]), of_rank) for head, of_rank in zip(heads, everything, strict=True)]
