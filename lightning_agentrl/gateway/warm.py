"""Python interpreter that has imported the modules of agents, and forks for each agent.

Importing a client takes a second of CPU time, and a fork takes a tenth of a second. The trainer runs this file as a
script with the interpreter of the agents' command. The agents' interpreter may lack this package, so the file imports
only the standard library.
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

MOST_BYTES = 1 << 20  # largest size of a request: arguments and variables, including the task
_DESCENDANTS = Path(__file__).with_name("descendants.py")


class Warm:
    """Handle of a warm interpreter in the trainer's process.

    Args:
        interpreter: Python executable of the agents' command.
        modules: modules that the interpreter imports once.
        variables: environment variables of the interpreter.
    """

    def __init__(self, interpreter: str, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", _DESCENDANTS, interpreter, __file__, str(theirs.fileno()), *modules],
            stdin=subprocess.PIPE,  # this pipe is closed when the trainer ends
            env=dict(variables),
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    def start(self, arguments: Sequence[str], variables: Mapping[str, str], written: int) -> tuple[int, int]:
        """Start an agent.

        Args:
            arguments: arguments of the interpreter: a file, or ``-m`` and a module, followed by the agent's arguments.
            variables: all environment variables of the agent.
            written: file descriptor for the agent's standard output and standard error.

        Returns:
            Two file descriptors. Closing the first descriptor ends the agent with all its descendants. The second
            descriptor yields the agent's exit code as text when the agent has ended.
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
    """Fork for each request, until the trainer closes the socket."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped automatically
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
    """Run an agent in a child process, and write its exit code to ``ended``. Never returns.

    Args:
        request: arguments, variables and folder of the agent.
        alive: pipe whose closing ends the agent.
        written: file descriptor for the agent's output.
        ended: file descriptor for the agent's exit code.
    """
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
    """Run the agent in a child of this process, while this process stays as the agent's guard."""
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
    except BaseException:  # noqa: BLE001 - report the error like an uncaught error of an interpreter
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        import threading

        for thread in threading.enumerate():  # an interpreter also joins its threads at exit
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    for _module in sys.argv[2:]:
        importlib.import_module(_module)
    _serve(socket.socket(fileno=int(sys.argv[1])))
