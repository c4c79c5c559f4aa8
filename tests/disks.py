"""Disks that are soon full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A disk of a size such as ``16k``, in memory, mounted at a new folder; without the right to do so, skip."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a disk")
    try:
        yield folder
    finally:  # lazily, since torch's writer does not close what it could not write
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
