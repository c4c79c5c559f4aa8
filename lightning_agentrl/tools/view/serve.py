"""Server of a training run's page, for browsers of this machine. The server rebuilds the page when files change."""

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
    """Server of one page, on the loopback interface.

    Args:
        run: run folder; training need not have begun.
        other: folder of a second run.
        last: number of last iterations to show. Default: all.
        port: port to listen on; 0 selects a free port.

    Raises:
        OSError: the port is in use.
        ValueError: ``last`` is below 1.
    """

    daemon_threads = True

    def __init__(self, run: Path, other: Path | None = None, last: int | None = None, port: int = 0) -> None:
        self.run = run
        self.other = other
        self.last = last
        self._made = ("", "")  # the last page and its stamp
        self._lock = Lock()
        check_last(last)
        super().__init__((_HOST, port), _Handler)
        self.address = f"http://{_HOST}:{self.server_address[1]}"

    def stamp(self) -> str:
        """Return a text that changes with the files of the page."""
        return f"{_changes([self.run] if self.other is None else [self.run, self.other]):x}"

    def page(self) -> str:
        """Return the current page; if it cannot be built yet, a page with the reason that reloads itself."""
        with self._lock:
            stamp = self.stamp()
            if stamp != self._made[1]:
                try:
                    text = page_of(self.run, self.last, self.other, stamp)
                except (ValueError, OSError) as error:  # files may be removed while the page is built
                    return _waiting(str(error))
                self._made = text, stamp
            return self._made[0]

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a browser may disconnect early
            super().handle_error(request, client_address)


def _changes(runs: Sequence[Path]) -> int:
    known = []
    for run in runs:
        for path in sorted(_files(run)):
            try:
                state = os.stat(path)
            except OSError:  # the file may have been rotated
                continue
            known.append((path, state.st_size, state.st_mtime_ns))
    return hash(tuple(known)) & (2**64 - 1)


def _files(run: Path) -> Iterator[str]:
    for folder, _, names in os.walk(run):  # `os.walk` skips folders that are removed meanwhile
        yield from (os.path.join(folder, name) for name in names if any(fnmatch(name, shape) for shape in _SHOWN))


def _waiting(why: str) -> str:
    return (
        f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="{_WAIT_SECONDS}">'
        f"<title>waiting</title><p>Nothing to show yet: {html.escape(why)}"
    )


class _Handler(BaseHTTPRequestHandler):
    """Request handler for the page and its stamp; other paths are not found."""

    server: PageServer

    def do_GET(self) -> None:
        # Refuse requests that another site's page has sent.
        if self.headers.get("Host", "").partition(":")[0] not in (_HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path == "/stamp":
            self._answer("text/plain", self.server.stamp())
        elif self.path == "/":
            self._answer("text/html", self.server.page())
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, kind: str, text: str) -> None:
        body = text.encode("utf-8", "backslashreplace")  # replaces lone surrogates of file names
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass  # log no requests, since the page polls every few seconds
