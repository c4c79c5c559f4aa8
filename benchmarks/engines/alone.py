"""Drive vLLM alone, without environments, and measure its tokens per second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from benchmarks.engines.setting import Setting
from lightning_agentrl.engines import VLLMEngine
from lightning_agentrl.types import Sample


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
