"""The page of a run that trains, offered to browsers of this machine and made anew when its files have changed."""

from __future__ import annotations

import html
import os
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from lightning_agentrl.tools.view.build import check_last, page_of

_HOST = "127.0.0.1"
_SHOWN = ("*.jsonl", "*.csv", "*.json", "config.yaml", "events.out.tfevents.*")
_WAIT_SECONDS = 3


class PageServer(ThreadingHTTPServer):
    """A server of one page, on the loopback only.

    Args:
        run: a run folder, in which training may not have begun.
        other: a second run.
        last: number of iterations to show, the last ones; all when not given.
        port: to listen on; 0 for any that is free.

    Raises:
        OSError: the port is taken.
        ValueError: ``last`` is below 1.
    """

    daemon_threads = True

    def __init__(self, run: Path, other: Path | None = None, last: int | None = None, port: int = 0) -> None:
        self.run = run
        self.other = other
        self.last = last
        self._made = ("", "")  # the newest page, and the stamp of what it shows
        self._lock = Lock()
        check_last(last)
        super().__init__((_HOST, port), _Handler)
        self.address = f"http://{_HOST}:{self.server_address[1]}"

    def stamp(self) -> str:
        """Return a text that changes with the files that a page shows."""
        return f"{_changes([self.run] if self.other is None else [self.run, self.other]):x}"

    def page(self) -> str:
        """Return the page of what there is now; as long as there is nothing, one that says so and asks again."""
        with self._lock:
            stamp = self.stamp()
            if stamp != self._made[1]:
                try:
                    text = page_of(self.run, self.last, self.other, stamp)
                except (ValueError, OSError) as error:  # also of a file that went while it was read
                    return _waiting(str(error))
                self._made = text, stamp
            return self._made[0]

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a browser may leave before it has its answer
            super().handle_error(request, client_address)


def _changes(runs: Sequence[Path]) -> int:
    known = []
    for run in runs:
        for path in sorted(_files(run)):
            try:
                state = os.stat(path)
            except OSError:  # rotated away
                continue
            known.append((path, state.st_size, state.st_mtime_ns))
    return hash(tuple(known)) & (2**64 - 1)


def _files(run: Path) -> Iterator[str]:
    for folder, _, names in os.walk(run):  # passes over folders that go meanwhile, as those of checkpoints do
        yield from (os.path.join(folder, name) for name in names if any(fnmatch(name, shape) for shape in _SHOWN))


def _waiting(why: str) -> str:
    return (
        f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="{_WAIT_SECONDS}">'
        f"<title>waiting</title><p>Nothing to show yet: {html.escape(why)}"
    )


class _Handler(BaseHTTPRequestHandler):
    """Answers with the page and with its stamp; whatever else is asked for is not there."""

    server: PageServer

    def do_GET(self) -> None:
        if self.headers.get("Host", "").partition(":")[0] not in (_HOST, "localhost"):  # a page of elsewhere asks
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path == "/stamp":
            self._answer("text/plain", self.server.stamp())
        elif self.path == "/":
            self._answer("text/html", self.server.page())
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, kind: str, text: str) -> None:
        body = text.encode("utf-8", "backslashreplace")  # names of files may be any bytes
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass  # a request every few seconds is no news
