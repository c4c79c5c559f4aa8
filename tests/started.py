"""Processes that have imported all already: they come from one that each worker of the tests starts once."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from contextlib import chdir
from multiprocessing import forkserver as server
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Whoever starts the one process decides what it imports, so this is what anybody needs: without it, each rank imports
# torch, transformers and Lightning anew, in six seconds.
IMPORTED = ["lightning_agentrl.commands.fit", "tests.agents.processes"]


def forkserver() -> ForkServerContext:
    """What starts such processes. It imports without threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with chdir(ROOT):  # it looks for modules in the folder where it begins, and says nothing of those it does not find
        server.ensure_running()
    return context


def together(count: int, work: Callable[..., object], *arguments: Any) -> None:
    """Do some work in so many processes, each told its rank first; an error of one is raised here."""
    from torch.multiprocessing.spawn import start_processes

    forkserver()
    start_processes(work, args=arguments, nprocs=count, start_method="forkserver")


def outcomes(
    count: int, work: Callable[..., object], *arguments: Any, folder: Path, seconds: float = 540
) -> list[tuple[int | None, str]]:
    """Do some work in so many processes, each told its rank first; exit code and what was written, of each.

    Once one has failed, the others have ten seconds, as they may wait for it.
    """
    context, logs = forkserver(), [folder / f"rank{rank}.log" for rank in range(count)]
    ranks = [context.Process(target=_logged, args=(logs[r], work, r, *arguments)) for r in range(count)]
    for process in ranks:
        process.start()
    until = time.monotonic() + seconds
    while any(process.exitcode is None for process in ranks) and time.monotonic() < until:
        if any(process.exitcode for process in ranks):
            until = min(until, time.monotonic() + 10)
        time.sleep(0.05)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    return [(code, log.read_text()) for code, log in zip(codes, logs, strict=True)]


def _logged(path: Path, work: Callable[..., object], rank: int, *arguments: Any) -> None:
    import torch

    torch.set_num_threads(1)
    log = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    work(rank, *arguments)
