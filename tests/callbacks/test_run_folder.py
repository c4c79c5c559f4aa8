"""The folder of a run belongs to one run at a time."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from lightning_agentrl.callbacks import run_folder
from lightning_agentrl.errors import ConfigError


def test_a_claim_ends_with_its_run_though_a_process_that_was_forked_lives_on(tmp_path: Path) -> None:
    """As those of an environment in a thread may, after the run was killed."""
    opened, (end, beginning) = run_folder.claim(tmp_path), os.pipe()
    forked = os.fork()
    if not forked:
        try:
            os.write(beginning, b".")
            time.sleep(60)
        finally:
            os._exit(0)
    try:
        os.read(end, 1)
        with pytest.raises(ConfigError, match="another run is writing"):
            run_folder.claim(tmp_path)
        run_folder._claims.discard(opened)
        os.close(opened)  # as the system does
        run_folder.release(run_folder.claim(tmp_path))
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)
        os.close(end)
        os.close(beginning)
