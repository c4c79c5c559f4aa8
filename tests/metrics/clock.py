"""A clock that stands still until a test moves it."""

from __future__ import annotations

import time

import pytest


class FakeClock:
    """Takes the place of ``time.perf_counter``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds
