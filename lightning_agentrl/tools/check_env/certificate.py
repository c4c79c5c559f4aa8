"""Certificate of an environment: runs the exam in separate processes and collects its findings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

from lightning_agentrl import __version__
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.tools.check_env.findings import PARTS, RULES, SEVERITIES, Finding
from lightning_agentrl.tools.check_env.probe import ProcessorWait
from lightning_agentrl.tools.check_env.texts import shown

_START = """
import os, runpy, sys
sys.path[:] = {path!r}
from lightning_agentrl.gateway.descendants import guard_descendants
guard_descendants()
print(os.getpid(), flush=True)
runpy.run_module({module!r}, run_name="__main__")
"""
_MODULE = "lightning_agentrl.tools.check_env.exam"
HASH_SEEDS = ("1", "2")  # PYTHONHASHSEED of processes that replay; the exam has 0, like processes in training
_URLS = ("http://", "https://", "ws://", "wss://")
_IMPORT_SECONDS = 60.0  # time limit for imports, which do not count against the cap
_LOOK_SECONDS = 1.0  # interval at which a process is checked for its end
_STUCK_SECONDS = 30.0  # time without a step or reset after which a process counts as hanging


@dataclass
class Certificate:
    """Findings about an environment.

    Args:
        id: id of the environment for ``gymnasium.make``.
        kwargs: arguments of the environment.
        findings: findings as dictionaries, the worst first; see `Finding`.
        figures: measured numbers by name.
        cut: reason by part of the exam for parts that were not completed.
        seconds: durations in seconds: imports, creation and resets, everything else, and the total.
        train: results of `--train`; None without this option.
    """

    id: str
    kwargs: Mapping[str, Any]
    findings: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    cut: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    train: dict[str, Any] | None = None
    version: str = __version__
    texts: dict[str, Any] | None = field(default=None, repr=False)
    """Texts of the environment that a small model needs; not written to files."""
    ordered: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """Episodes to replay in new processes; not written to files."""

    def count(self, severity: str) -> int:
        """Return the number of findings with this severity."""
        return sum(finding["severity"] == severity for finding in self.findings)

    @property
    def counts(self) -> str:
        """Number of findings of each severity, as text."""
        return ", ".join(f"{self.count(severity)} {severity}s" for severity in SEVERITIES)

    @property
    def passed(self) -> bool:
        return self.count("error") == 0

    def plain(self) -> dict[str, Any]:
        """Return the certificate as a dictionary for JSON."""
        counts = {f"{severity}s": self.count(severity) for severity in SEVERITIES}
        written = {name: value for name, value in vars(self).items() if name not in ("texts", "ordered")}
        return {"passed": self.passed, **counts, **written}


class _Process:
    """A child process that executes an order. Its messages arrive in a queue, with None at its end."""

    def __init__(self, order: Mapping[str, Any], hash_seed: str) -> None:
        self.folder = TemporaryDirectory()
        self.said: Queue[dict[str, Any] | None] = Queue()
        file = Path(self.folder.name, "order.json")
        file.write_text(json.dumps({**order, "folder": self.folder.name}), encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START.format(path=sys.path, module=_MODULE), str(file)],
            stdin=subprocess.PIPE,  # the child's guard ends the child when this pipe closes
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",  # an environment may write any bytes to standard error
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONHASHSEED": hash_seed},
            process_group=0,
        )
        assert self._process.stdout is not None
        child = self._process.stdout.readline().strip()  # process id of the guarded child
        self._waiting, self._before = ProcessorWait(child), 0.0
        self.errors: list[str] = []
        Thread(target=self._read, daemon=True).start()
        Thread(target=self._read_errors, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                with suppress(ValueError):  # an incomplete line of a process that was ended
                    self.said.put(json.loads(line))
        self.said.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.errors = [*self.errors[-50:], line.rstrip("\n")]

    def end(self) -> int:
        """End the process with all its descendants; return the exit status."""
        self._process.terminate()  # signals the guard
        return self._process.wait()

    def hear(self, end: float) -> dict[str, Any] | None:
        """Return the process's next message; None if it has ended, even if a descendant still holds its pipe open.

        Args:
            end: time on the monotonic clock until which to wait.

        Raises:
            Empty: no message arrived until this time.
        """
        while True:
            ended = self._process.poll() is not None
            left = _LOOK_SECONDS if ended else max(end - time.monotonic(), 0.0)
            try:
                return self.said.get(timeout=min(left, _LOOK_SECONDS))
            except Empty:
                if ended:
                    return None
                if time.monotonic() >= end:
                    raise

    def status(self) -> int:
        """Return the exit status of a process that has sent its last message."""
        try:
            return self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return self.end()

    def waited(self) -> float:
        """Return the seconds for which the process has waited for a CPU since the last call."""
        before, self._before = self._before, self._waiting()
        return self._before - before

    def idle(self) -> float:
        """Return the seconds since the start of the environment's last step or reset."""
        path = Path(self.folder.name, "journal.txt")
        return time.time() - (path if path.is_file() else Path(self.folder.name)).stat().st_mtime

    def journal(self) -> tuple[int | None, list[str]]:
        """Return the seed and the actions of the process's last episode."""
        path = Path(self.folder.name, "journal.txt")
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        return (int(lines[0]), lines[1:]) if lines else (None, [])


def certify(
    env_id: str, kwargs: Mapping[str, Any], seconds: float = 20.0, cap: float = 300.0, most_tokens: int = 1024
) -> Certificate:
    """Check an environment in separate processes.

    Args:
        env_id: id for ``gymnasium.make``, or the URL of an OpenEnv server.
        kwargs: arguments of the environment, of JSON types.
        seconds: time limit of the exam in seconds, without imports, creation and resets.
        cap: time limit of everything in seconds, without imports; the certificate names the missing parts.
        most_tokens: largest number of tokens of a prompt.

    Raises:
        ConfigError: the environment does not exist, or cannot be created with these arguments, or the cap ended the
            exam in its first part.
    """
    started = time.monotonic()
    remote = env_id.startswith(_URLS)
    made, given = recipe_of(env_id, kwargs)
    order = {"id": made, "kwargs": given, "seconds": seconds, "most_tokens": most_tokens, "episodes": []}
    certificate = Certificate(env_id, dict(kwargs))
    _examine(certificate, order, cap)
    if PARTS[0] in certificate.cut and not certificate.findings:
        raise ConfigError(
            f"the cap of {cap:g} s ended the exam of '{env_id}' in its first part, so there are no findings; "
            "set a larger --cap"
        )
    if certificate.ordered:
        left = max(cap - (time.monotonic() - started), 10.0)
        alone = remote or any(one["check"] == "instances" for one in certificate.findings)
        _replay(certificate, order | {"episodes": certificate.ordered}, left, together=not alone)
    certificate.findings.sort(key=lambda one: (SEVERITIES.index(one["severity"]), list(RULES).index(one["check"])))
    certificate.seconds["total"] = time.monotonic() - started
    return certificate


def recipe_of(env_id: str, kwargs: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return id and arguments for ``gymnasium.make``; a URL becomes an argument of the OpenEnv client."""
    if env_id.startswith(_URLS):
        return "agentrl_envs:OpenEnv-v0", {"url": env_id, **kwargs}
    return env_id, dict(kwargs)


def _examine(certificate: Certificate, order: Mapping[str, Any], cap: float) -> None:
    process = _Process(order, "0")
    doing, done, over = "import", set(), False
    end = time.monotonic() + _IMPORT_SECONDS
    try:
        while True:
            try:
                said = process.hear(end)
            except Empty:
                if (waited := process.waited()) > 1.0:
                    end += waited
                    continue
                process.end()
                seed, actions = process.journal()
                certificate.cut[doing] = (
                    f"ended by the cap of {cap:g} s" if doing != "import" else "the import did not end"
                )
                if process.idle() > _STUCK_SECONDS:
                    _add(certificate, "hang", f"in the part '{doing}' the process did not go on", seed, actions)
                break
            if said is None:
                break
            if "refused" in said:
                raise ConfigError(said["refused"])
            if "imported" in said:
                certificate.seconds["import"] = said["imported"]
                end = time.monotonic() + cap
            doing = said.get("doing", doing)
            if "done" in said:
                done.add(said["done"])
            if "findings" in said:
                _take(certificate, said)
            if over := said.get("over", False):
                break  # descendants of the process may still hold the pipe open
        if not over and doing not in certificate.cut:
            status = process.status()
            seed, actions = process.journal()
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            trace = f"; {process.errors[-1]}" if process.errors else ""
            _add(certificate, "died", f"in the part '{doing}' the process ended by {how}{trace}", seed, actions)
            certificate.cut[doing] = "the process ended"
    finally:
        process.end()
    if not over:
        for part in PARTS:
            if part not in done and part not in certificate.cut:
                certificate.cut[part] = "not reached"


def _take(certificate: Certificate, said: Mapping[str, Any]) -> None:
    certificate.findings = said["findings"]
    certificate.figures, certificate.ordered, certificate.texts = said["figures"], said["ordered"], said.get("texts")
    certificate.cut = dict(said["cut"])
    resets = sum(seconds for kind, seconds in said["times"].items() if kind in ("make", "reset"))
    certificate.seconds |= {"resets": resets, "play": said["figures"]["play_seconds"]}


def _replay(certificate: Certificate, order: Mapping[str, Any], cap: float, together: bool) -> None:
    """Replay episodes in new processes with other hash seeds; if episodes differ, also with the same hash seed."""
    differing = _in_processes(certificate, order, HASH_SEEDS, cap, together)
    if not differing:
        return
    same = _in_processes(certificate, order, ("0",), cap, together)
    found = next(iter((same or differing).values()))
    check = "replay.process" if same else "replay.hash"
    how = "in a new process" if same else f"in a process with PYTHONHASHSEED={next(iter(differing))}"
    _add(certificate, check, f"{how}, {found['said']}", found["seed"], [repr(action) for action in found["actions"]])


def _in_processes(
    certificate: Certificate, order: Mapping[str, Any], hash_seeds: Sequence[str], cap: float, together: bool
) -> dict[str, dict[str, Any]]:
    """Replay episodes in one process per hash seed, and return each process's first difference by hash seed."""
    found: dict[str, dict[str, Any]] = {}
    for batch in [hash_seeds] if together else [(seed,) for seed in hash_seeds]:
        with ExitStack() as begun:  # ends all processes, even after an error
            processes = {}
            for seed in batch:
                processes[seed] = process = _Process(order, seed)
                begun.callback(process.end)
            end = time.monotonic() + cap + _IMPORT_SECONDS
            for seed, process in processes.items():
                try:
                    if (difference := _replayed(process, end)) is not None:
                        found[seed] = difference
                except Empty:
                    certificate.cut["fresh processes"] = "they did not end in time"
    return found


def _replayed(process: _Process, end: float) -> dict[str, Any] | None:
    """Return the first difference of the replay in a process; None without a difference.

    Raises:
        Empty: the replay has not finished at the time ``end`` on the monotonic clock.
    """
    said: dict[str, Any] | None = {}
    while said is not None and "replayed" not in said:
        said = process.hear(end)
    if said is None:
        return {"seed": None, "actions": [], "said": f"the process ended: {process.errors[-1:]}"}
    difference: dict[str, Any] | None = said["replayed"]
    return difference


def _add(certificate: Certificate, check: str, said: str, seed: int | None, actions: Sequence[str]) -> None:
    certificate.findings.append(Finding(check, shown(said, 600), RULES[check].severity, seed, list(actions)).plain())
