"""What two processes clone together. A module of its own, since processes import it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
import torch.distributed as dist

from lightning_agentrl.distributed import raise_once
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.rollout import RolloutDataModule
from lightning_agentrl.rollout.demonstrations import ClonedTurns, Demonstration, chosen, what_is_cloned
from lightning_agentrl.types import Sample, StopReason
from tests.types.samples import action, prompt, turn


def episode(outcome: float, turns: int = 1) -> Demonstration:
    end = {"terminated": True, "stop": StopReason.ENV_DONE, "episode_return": outcome}
    each = [turn(index=k, **(end if k == turns - 1 else {})) for k in range(turns)]
    return Demonstration(tuple(Sample((prompt(1), action(2)), (one,)) for one in each))


def told(own: list[Demonstration], least: float) -> str:
    """What a process says of its episodes and those of the others, or why it clones none."""
    try:
        with raise_once():
            kept = chosen(own, least)
    except ConfigError as error:
        return str(error)
    except SystemExit:
        return "said by another process"
    return what_is_cloned(kept, len(own), 10 / len(kept))


def run(rank: int, folder: str) -> None:
    """The work of one process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    own = [[episode(3.0, 2), episode(1.0), episode(-1.0)], [episode(2.0, 4), episode(0.0)]][rank]
    sentences = [told(own, 1.0), told(own, 9.0), told([] if rank else own, 0.0), told([], 0.0)]
    places = range(4 * rank, 4 * rank + 4)
    sizes = SimpleNamespace(turns_per_env=8, mini_batches=2, own_envs=lambda *_: places)
    data = cast(RolloutDataModule, SimpleNamespace(seed=3, groups=None, sizes=sizes))
    cloned = ClonedTurns([episode(1.0)] * (10, 90)[rank], data, 0.5)
    Path(folder, f"{rank}.json").write_text(json.dumps([*sentences, cloned.count]))
    dist.destroy_process_group()
