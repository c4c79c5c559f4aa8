"""Whether a processor multiplies bfloat16 itself; without that a run is several times as slow as in float32."""

from __future__ import annotations

from pathlib import Path

NATIVE = {"avx512_bf16", "amx_bf16", "bf16"}  # as x86 and ARM call it
CPUINFO = Path("/proc/cpuinfo")


def lacks_bfloat16(cpuinfo: str) -> bool:
    """Return whether no processor in a text like that of ``/proc/cpuinfo`` says that it multiplies bfloat16."""
    lists = [line.partition(":")[2].split() for line in cpuinfo.splitlines() if line.startswith(("flags", "Features"))]
    return bool(lists) and not any(NATIVE.intersection(flags) for flags in lists)


def slow_in_bfloat16(precision: str) -> str | None:
    """Return a sentence where a precision makes a run on this machine's CPU slower than float32; None elsewhere."""
    if not precision.startswith("bf16") or not CPUINFO.exists() or not lacks_bfloat16(CPUINFO.read_text()):
        return None
    return (
        f"this processor does not multiply bfloat16 itself, so trainer.precision {precision} is several times as slow "
        "here as 32-true"
    )
