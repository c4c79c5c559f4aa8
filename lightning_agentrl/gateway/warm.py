"""A Python interpreter that has imported what agents import, and forks for each of them.

Importing a client takes a second of processor time, a fork a tenth of that. The trainer runs this file as a script with
the interpreter of the agents' command, which need not have this package; so it imports the standard library only.
"""

from __future__ import annotations

import array
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

MOST_BYTES = 1 << 20  # of a request: arguments and variables, the task among them
_DESCENDANTS = Path(__file__).with_name("descendants.py")


class Warm:
    """A warm interpreter, seen from the trainer.

    Args:
        interpreter: of the agents' command.
        modules: that it imports once.
        variables: of its environment.
    """

    def __init__(self, interpreter: str, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", _DESCENDANTS, interpreter, __file__, str(theirs.fileno()), *modules],
            stdin=subprocess.PIPE,  # closed when the trainer ends
            env=dict(variables),
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    def start(self, arguments: Sequence[str], variables: Mapping[str, str], written: int) -> tuple[int, int]:
        """Start an agent.

        Args:
            arguments: of the interpreter: a file, or ``-m`` and a module, and what they get.
            variables: its whole environment.
            written: file descriptor for what it writes.

        Returns:
            File descriptors: closing the first ends the agent with all its descendants; the second gives its exit code
            as text when it has ended.
        """
        alive, end = os.pipe()
        status, ended = os.pipe()
        request = json.dumps({"arguments": list(arguments), "variables": dict(variables), "folder": os.getcwd()})
        given = array.array("i", [alive, written, ended])
        self._socket.sendmsg([request.encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, given)])
        os.close(alive)
        os.close(ended)
        return end, status


def _serve(requests: socket.socket) -> None:
    """Fork for each request; what is asked for last is what the children are, so nothing is kept."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for here
    while True:
        text, handed, _, _ = requests.recvmsg(MOST_BYTES, socket.CMSG_LEN(3 * 4))
        if not text:
            return
        descriptors = array.array("i", handed[0][2])
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _tell(json.loads(text), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _tell(request: dict, alive: int, written: int, ended: int) -> None:
    """Run an agent in a child, and write its exit code. Never returns."""
    guard = os.fork()
    if guard == 0:
        os.close(ended)
        os.setsid()
        os.dup2(alive, 0)
        os.dup2(written, 1)
        os.dup2(written, 2)
        for descriptor in (alive, written):
            os.close(descriptor)
        _run(request)
    for descriptor in (alive, written):
        os.close(descriptor)
    _, status = os.waitpid(guard, 0)
    with suppress(OSError):  # the trainer is gone
        os.write(ended, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _run(request: dict) -> None:
    """Become the agent: the guard stays behind as the parent of the process that goes on here."""
    runpy.run_path(str(_DESCENDANTS))["guard_descendants"]()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    arguments = request["arguments"]
    code = 0
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path.insert(0, "")
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).parent.resolve()))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - as an interpreter does at its end
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        import threading

        for thread in threading.enumerate():  # as at the end of an interpreter
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    for _module in sys.argv[2:]:
        importlib.import_module(_module)
    _serve(socket.socket(fileno=int(sys.argv[1])))
