"""Tensor parallelism of vLLM: the ranks that hold one engine together, each a part of every weight."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_agentrl.distributed import all_gather
from lightning_agentrl.errors import ConfigError

KEY = "data.init_args.engine.init_args.tensor_parallel"

T = TypeVar("T")


@dataclass(frozen=True)
class RankGroup:
    """Neighbouring ranks of the trainer, and a name for the memory they share that no other run has."""

    ranks: tuple[int, ...]
    name: str

    @classmethod
    def form(cls, size: int) -> RankGroup:
        """The group of this rank, of ``size`` ranks. All ranks of the run must call it."""
        rank = dist.get_rank()
        start = rank - rank % size
        name = all_gather(uuid.uuid4().hex)[start]
        return cls(tuple(range(start, start + size)), f"{name}-{socket.gethostname()}")  # no memory between machines

    def forget_names(self) -> None:
        """Once all ranks have opened their memory; vLLM would leave it behind when they end."""
        for path in Path("/dev/shm").glob(f"{self.name}-*"):
            path.unlink(missing_ok=True)


def check_world(size: int) -> None:
    """Refuse a size of groups that the processes of the run cannot be cut into.

    Raises:
        ConfigError: with the key to change.
    """
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world % size:
        raise ConfigError(
            f"{KEY} {size} needs a multiple of {size} processes, got {world}; change it, or trainer.devices"
        )


def check_split(size: int, config: Any) -> None:
    """Refuse a model whose layers vLLM cannot cut into ``size`` equal parts.

    Args:
        size: ranks of a group.
        config: transformers configuration of the text model.

    Raises:
        ConfigError: with the numbers that have to be multiples.
    """
    heads = config.num_attention_heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "intermediate_size", None) or size
    # fewer heads of keys and values than ranks are kept several times
    if heads % size or width % size or (shared % size and size % shared):
        raise ConfigError(
            f"{KEY} {size} does not divide the model: {heads} attention heads, {shared} of keys and values, MLP of "
            f"width {width}; set another, or 1"
        )


def group_executor(group: RankGroup, device: torch.device) -> type:
    """What runs vLLM's worker in this process, as one of several ranks that a launcher has started.

    vLLM's own (`external_launcher`) reads rank and device from variables that not every launcher sets, and gives the
    memory that ranks share on a CPU one name for all runs of a machine.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class GroupExecutor(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            return f"file://{group.name}", dist.get_rank(), device.index or 0  # no file: processes have met already

    return GroupExecutor


def exchange(state: int, news: T | None) -> list[tuple[int, T | None]]:
    """What every rank of vLLM's group hands in, in the order of ranks; called by all of them, in the thread of vLLM.

    While nobody has news that is two numbers.
    """
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    own = torch.tensor([state, news is not None])
    heads = [torch.empty_like(own) for _ in group.ranks]
    dist.all_gather(heads, own, group=group.cpu_group)
    told: Sequence[Any] = [None] * len(heads)
    if any(bool(has_news) for _, has_news in heads):
        told = list(told)
        dist.all_gather_object(told, news, group=group.cpu_group)
    return [(int(head[0]), of_rank) for head, of_rank in zip(heads, told, strict=True)]
