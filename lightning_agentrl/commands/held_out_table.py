"""Table of `agentrl validate`: results of each source on held-out episodes, with intervals and standard errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

HEAD = ("source", "episodes", "success (95 %)", "progression", "return", "turns", "valid")
MEAN = "mean of the sources"


def held_out_table(numbers: Mapping[str, float], names: Sequence[str]) -> str:
    """Return a table with one line per source; with several sources, the last line is their unweighted mean.

    Args:
        numbers: metrics of a validation by their logged names.
        names: names of the sources.
    """
    several = len(names) > 1
    rows = [_row(name, numbers, f"val/source/{name}/" if several else "val/") for name in names]
    if several and "val/sources/progression" in numbers:
        rows.append([MEAN, "", "", _with_error(numbers, "val/sources/progression"), "", "", ""])
    widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
    lines = [
        f"{row[0]:<{widths[0]}}" + "".join(f"  {x:>{w}}" for x, w in zip(row[1:], widths[1:], strict=True))
        for row in (HEAD, *rows)
    ]
    return "\n".join(line.rstrip() for line in lines)


def _row(name: str, numbers: Mapping[str, float], prefix: str) -> list[str]:
    if f"{prefix}episodes" not in numbers:
        return [name, "0", "", "", "", "", ""]
    success, low, high = (100 * numbers[f"{prefix}{key}"] for key in ("success", "success_low", "success_high"))
    valid = numbers.get(f"{prefix}valid_action_ratio")
    return [
        name,
        f"{numbers[f'{prefix}episodes']:.0f}",
        f"{success:.1f} % ({low:.1f} to {high:.1f})",
        _with_error(numbers, f"{prefix}progression"),
        _with_error(numbers, f"{prefix}return"),
        f"{numbers[f'{prefix}mean_turns']:.1f}",
        "" if valid is None else f"{100 * valid:.1f} %",
    ]


def _with_error(numbers: Mapping[str, float], key: str) -> str:
    error = numbers.get(f"{key}_error")
    return f"{numbers[key]:.3f}" + ("" if error is None else f" ± {error:.3f}")
