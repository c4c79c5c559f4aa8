"""A vLLM server that ends with its engine, and its engine with it: `agentrl serve` runs vLLM through this module.

Python imports the main module of a program again in each process that it spawns, so this also runs in the engine's core
and in its workers.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from importlib import import_module

_PR_SET_PDEATHSIG = 1  # of prctl
_GRACE_SECONDS = 20.0  # for a server to end by itself once its engine has


def end_with_parent() -> None:
    """Let the kernel end this process when the one that has started it ends, also if this one hangs or is stopped.

    On Linux only.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it ended before the kernel was asked
        os._exit(1)


def end_with_child() -> None:
    """End this process some seconds after one that it has started has failed. Never returns.

    A server whose engine is killed while it takes weights would wait for its answer for ever, and keep its port.
    """
    known = set[multiprocessing.process.BaseProcess]()
    while not any(child.exitcode for child in known):
        known.update(multiprocessing.active_children())
        time.sleep(1.0)
    time.sleep(_GRACE_SECONDS)
    os._exit(1)


if __name__ == "__mp_main__":
    end_with_parent()
    import_module("vllm.v1.engine.core")
elif __name__ == "__main__":
    threading.Thread(target=end_with_child, daemon=True).start()
    sys.argv = sys.argv[1:]  # the module of vLLM, and its options
    import_module(sys.argv[0]).main()
