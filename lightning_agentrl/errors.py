"""Errors of configuration as one clear sentence."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print a ValueError as one line and exit with 2; everything else keeps its traceback."""
    try:
        yield
    except ValueError as error:
        print(f"agentrl: {error}", file=sys.stderr)
        sys.exit(2)
