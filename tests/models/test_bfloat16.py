"""Processors with and without bfloat16, by what they say of themselves."""

from __future__ import annotations

import pytest

from lightning_agentrl.models.kernels import lacks_bfloat16, slow_in_bfloat16


@pytest.mark.parametrize(
    ("said", "lacks"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 avx512f\n\nprocessor : 1\nflags\t\t: fpu avx2 avx512f\n", True),
        ("flags\t\t: fpu avx512f avx512_bf16 amx_bf16\n", False),
        ("Features\t: fp asimd i8mm bf16\n", False),
        ("Features\t: fp asimd\n", True),
        ("model name : one that tells nothing\n", False),
        ("", False),
    ],
)
def test_a_processor_lacks_bfloat16_only_if_it_lists_all_else(said: str, lacks: bool) -> None:
    assert lacks_bfloat16(said) is lacks


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_nothing_is_said_where_bfloat16_is_not_used(precision: str) -> None:
    assert slow_in_bfloat16(precision) is None
