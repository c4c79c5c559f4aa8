"""Guard process that ends a process together with all its descendants. Imports only the standard library."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import select
import signal
from contextlib import suppress
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # options of prctl


def guard_descendants() -> None:
    """Fork and return in the child; the parent stays as a guard that ends the child with all its descendants.

    Call this function first in a new process whose standard input is a pipe that only its creator holds open. The guard
    waits until the child ends, the creator closes the pipe or ends, or SIGTERM arrives. Then the guard kills the child
    and its descendants, and exits with the child's exit status. Orphans become children of the guard and not of the
    system's first process, so the guard also finds descendants in other sessions. A hanging child cannot stop the
    guard. The child's standard input is empty. If the child calls exec, the new program stays guarded.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if the signal is ignored, waiting for children fails
    waking = {signal.SIGCHLD, signal.SIGIO, signal.SIGTERM}
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, waking)
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # kill the child when the guard dies
        os.setpgid(0, 0)  # signals that the child sends to its group do not reach the guard
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)  # send SIGIO when the pipe is closed
    status = None
    if not select.select([0], [], [], 0)[0]:  # a readable pipe was closed before SIGIO was enabled
        while status is None and signal.sigwait(waking) == signal.SIGCHLD:
            status = _reap(child)
    refused = set[int]()
    while children := _children() - refused:
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except PermissionError:  # the process runs as another user
                refused.add(pid)
                continue
            code = os.waitpid(pid, 0)[1]
            status = code if pid == child else status
    _end_as(os.waitstatus_to_exitcode(status or 0))


def _reap(child: int) -> int | None:
    """Reap all children that have ended; return the status of ``child``, or None if ``child`` is running."""
    status = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == child else status
    return status


def _children() -> set[int]:
    """Return the children of this process, from ``/proc``, since not every kernel lists children directly."""
    found = set[int]()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
            if int(stat.read().rpartition(b")")[2].split()[1]) == os.getpid():
                found.add(int(name))
    return found


def _end_as(code: int) -> NoReturn:
    """End this process with an exit code; a negative code ends the process by the signal of that number."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has already written a core dump
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":  # run as a script, with the command to guard as arguments
    import sys

    guard_descendants()
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error.strerror}")
