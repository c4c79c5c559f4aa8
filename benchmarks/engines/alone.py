"""vLLM driven by a loop of its own, without environments: its tokens per second, and the seconds of its steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.engines.setting import Setting
from benchmarks.engines.simulation import StepSeconds
from lightning_agentrl.engines import VLLMEngine
from lightning_agentrl.types import Sample

Ids = tuple[int, ...]


def tokens_and_seconds(made: Setting, samples: Sequence[Sample], in_turns: bool = False) -> tuple[int, float]:
    """The prompts of a rollout with replies of the same lengths.

    Args:
        made: with the engine.
        samples: of a rollout.
        in_turns: give a prompt when the reply before it in its environment has ended, as a rollout has to; else all
            at once.
    """

    def run(vllm: Any) -> tuple[int, float]:
        vllm.reset_prefix_cache()
        rows: dict[int, deque[Sample]] = {}
        for number, sample in enumerate(samples):
            rows.setdefault(sample.turns[0].env if in_turns else number, deque()).append(sample)

        def add_next(row: int) -> None:
            if rows[row]:
                prompt, action = rows[row].popleft().segments
                _add(vllm, f"{row} {len(rows[row])}", prompt.ids, len(action.ids))

        for row in rows:
            add_next(row)
        tokens, started = 0, time.perf_counter()
        while vllm.has_unfinished_requests():
            for output in vllm.step():
                if output.finished:
                    tokens += len(output.outputs[0].token_ids)
                    add_next(int(output.request_id.split()[0]))
        return tokens, time.perf_counter() - started

    return _call(made, run)


def measured_step_seconds(made: Setting, prompts: Sequence[Ids], tokens: int = 8, repeats: int = 3) -> StepSeconds:
    """What a step takes by its rows, from medians of steps with 1, 2, 4, ... rows, and what a new prompt adds to it.

    The prompts' common beginning is in the cache, as in a collection that goes on.
    """
    counts = sorted({1 << k for k in range((len(prompts) - 1).bit_length())} | {len(prompts)})
    decoding: dict[int, list[float]] = {count: [] for count in counts}
    reading: dict[int, list[float]] = {count: [] for count in counts}

    def run(vllm: Any) -> None:
        for repeat in range(repeats + 1):  # the first warms up
            for count in counts:
                vllm.reset_prefix_cache()
                _add(vllm, f"first {repeat} {count}", prompts[0], 1)
                vllm.step()
                for number, prompt in enumerate(prompts[:count]):
                    _add(vllm, f"step {repeat} {count} {number}", prompt, tokens)
                seconds = []
                while vllm.has_unfinished_requests():
                    started = time.perf_counter()
                    vllm.step()
                    seconds.append(time.perf_counter() - started)
                if repeat:
                    reading[count].append(seconds[0])
                    decoding[count] += seconds[1:]

    _call(made, run)
    rows = {count: median(decoding[count]) for count in counts}
    extra = {count: max(0.0, median(reading[count]) - rows[count]) for count in counts}
    return lambda all_rows, new: interpolated(rows, all_rows) + (interpolated(extra, new) if new else 0.0)


def interpolated(table: dict[int, float], at: int) -> float:
    """Between the neighbours in a table whose keys reach ``at`` on both sides."""
    if at in table:
        return table[at]
    low, high = max(key for key in table if key < at), min(key for key in table if key > at)
    share = (at - low) / (high - low)
    return table[low] * (1 - share) + table[high] * share


def _call(made: Setting, run: Any) -> Any:
    """In the thread of vLLM."""
    engine = made.engine
    assert isinstance(engine, VLLMEngine)
    return engine._started()[0].call(run)


def _add(vllm: Any, name: str, prompt: Sequence[int], tokens: int) -> None:
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    params = SamplingParams(seed=len(name), max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
    vllm.add_request(name, tokens_input(list(prompt)), params)
