"""Entry point of vLLM for `agentrl serve`: the server ends when its engine ends, and the engine when the server ends.

Python imports the main module again in each process that it spawns, so this module also runs in the engine's core and
in its workers.
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

_PR_SET_PDEATHSIG = 1  # option of prctl
_GRACE_SECONDS = 20.0  # time for a server to end by itself after its engine has ended


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends, even if this process hangs or is stopped; Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # the parent ended before the call of prctl
        os._exit(1)


def end_with_child() -> None:
    """End this process some seconds after one of its child processes has failed. This function never returns.

    Without this, a server whose engine is killed while it loads weights would wait forever and keep its port.
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
    sys.argv = sys.argv[1:]  # the vLLM module to run, and its options
    import_module(sys.argv[0]).main()
