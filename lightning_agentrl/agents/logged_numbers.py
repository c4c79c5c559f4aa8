"""What Lightning does at each number that is logged, without the advice and the copies that agents have no use for."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

_metric: Any = None  # Lightning's wrapper of a logged number, where it has the one known here
with suppress(ImportError):
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric as _metric
_move = getattr(_metric, "to", None)


def leave_out_hints() -> None:
    """Filter Lightning's advice to average what is logged over ranks: numbers of agents are of all ranks already."""
    warnings.filterwarnings("ignore", message=r".*It is recommended to use `self\.log.*sync_dist=True.*")


def leave_out_moves() -> None:
    """Let numbers that are where they are logged from stay as they are.

    Lightning moves them there at each call, and copies their names and settings on the way: 0.2 ms a number, which is
    three fifths of what logging takes, and a tenth of an iteration of the smallest models. What is logged stays the
    same to the bit.
    """
    if _move is not None:
        _metric.to = _move_from_elsewhere


def _move_from_elsewhere(metric: Any, *args: Any, **kwargs: Any) -> Any:
    there = metric.is_tensor and not kwargs and args == (metric.value.device,)
    return metric if there else _move(metric, *args, **kwargs)  # type: ignore[misc]
