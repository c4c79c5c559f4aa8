"""Cost of a call of an agent: after 200 calls against after 10, and against a bare `generate` with a kept cache.

    python -m benchmarks.engines.calls [--vllm] [--no-update]

One conversation of the demo model in which each call adds a message and is answered. What is compared are processor
seconds (of this process, or seconds for vLLM, which samples in others), medians of some calls, all in one run.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from transformers import DynamicCache, PreTrainedModel

from lightning_agentrl.engines import Engine, PolicyHandle, SamplingRequest, TransformersEngine, VLLMEngine
from lightning_agentrl.gateway.conversation import Pending, Reply
from lightning_agentrl.gateway.server import gateway
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm
from lightning_agentrl.models.packing import pack
from lightning_agentrl.types import ModelInput, Row

NEW, REPLY = 16, 8  # tokens that a call adds to the conversation, and of its reply
FEW, MANY = 10, 200  # calls
Clock = Callable[[], float]


def tokens(count: int, seed: int) -> list[int]:
    """Return ordinary tokens of the demo model."""
    generator = random.Random(seed)
    return [generator.randrange(100, 40_000) for _ in range(count)]


def engine_seconds(engine: Engine, calls: int, measured: int, player: int, clock: Clock) -> list[float]:
    """Return what calls cost that follow a number of others.

    Args:
        engine: started.
        calls: before those that are measured; they are read as one prompt.
        measured: calls.
        player: number of the player; each has one conversation.
        clock: of seconds.
    """

    async def play() -> list[float]:
        ids, seconds = tokens(calls * (NEW + REPLY), player), []
        for call in range(measured + 1):
            ids += tokens(NEW, 1000 * player + call)
            request = SamplingRequest(ModelInput.of_ids(tuple(ids)), REPLY, 1.0, call, (player, call))
            started = clock()
            reply = await engine.generate(request)
            seconds.append(clock() - started)
            ids += reply.ids
        return seconds[1:]  # the first one reads all

    return asyncio.run(play())


def bare_seconds(lm: PreTrainedModel, calls: int, measured: int, player: int, clock: Clock) -> list[float]:
    """Return what the same calls cost with `generate` and its cache."""
    ids, seconds, cache = tokens(calls * (NEW + REPLY), player), [], DynamicCache(config=lm.config)
    for call in range(measured + 1):
        ids += tokens(NEW, 1000 * player + call)
        started = clock()
        out = lm.generate(
            torch.tensor([ids]), past_key_values=cache, do_sample=True, max_new_tokens=REPLY, min_new_tokens=REPLY
        )
        seconds.append(clock() - started)
        ids = out[0].tolist()
    return seconds[1:]


def update_seconds(policy: LanguageModel, calls: int) -> float:
    """Return the processor seconds per call of a gradient of a growing row."""
    ids, positions = [], []
    for call in range(calls):
        ids += tokens(NEW, call)
        positions += range(len(ids) - 1, len(ids) - 1 + REPLY)
        ids += tokens(REPLY, -call - 1)
    started = time.process_time()
    packed = pack([Row(ModelInput.of_ids(tuple(ids)), tuple(positions))])
    scores = policy.token_scores(policy.hidden(packed), packed.targets, 1.0)
    scores.logps.sum().backward()
    policy.zero_grad()
    return (time.process_time() - started) / calls


CLIENT = """
import http.client, json, sys
port, token, calls = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
connection = http.client.HTTPConnection("127.0.0.1", port)
messages = [{"role": "system", "content": "You are an agent. " * 20}]
for number in range(calls):
    messages.append({"role": "user", "content": f"observation {number} " * 10})
    connection.request("POST", f"/{token}/v1/chat/completions", json.dumps({"model": "policy", "messages": messages}))
    messages.append(json.loads(connection.getresponse().read())["choices"][0]["message"])
"""


def server_seconds(calls: int) -> float:
    """Return the processor seconds of the server per call of a conversation whose replies cost nothing."""
    agent = gateway().open()

    def answer() -> None:
        for number in range(calls):
            pending = agent.events.get()
            assert isinstance(pending, Pending)
            agent.answer(pending, Reply(f"action {number} of {pending.call.digest}"))

    answering = threading.Thread(target=answer)
    answering.start()
    started = time.process_time()
    subprocess.run([sys.executable, "-c", CLIENT, str(gateway().port), agent.token, str(calls)], check=True)
    answering.join()
    agent.close()
    return (time.process_time() - started) / calls


def line(name: str, few: Sequence[float], many: Sequence[float]) -> tuple[float, float]:
    """Print a line of the table; return both medians."""
    a, b = statistics.median(few), statistics.median(many)
    print(f"| {name} | {a:.3f} | {b:.3f} | {b / a:.2f} |", flush=True)
    return a, b


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", action="store_true", help="measure vLLM as well")
    parser.add_argument("--no-update", action="store_true", help="leave out gradients")
    parser.add_argument("--measured", type=int, default=8, help="calls")
    given = parser.parse_args()
    torch.set_num_threads(1)
    lm = load_causal_lm("demo").eval()
    policy = LanguageModel(lm)
    handle = PolicyHandle(policy, (), nullcontext)
    print(f"| seconds of a call | after {FEW} | after {MANY} | ratio |\n|---|---|---|---|")
    engine = TransformersEngine(admission="as_they_come")
    engine.start(handle)
    sides = [engine_seconds(engine, calls, given.measured, calls, time.process_time) for calls in (FEW, MANY)]
    ours = line("`TransformersEngine`", *sides)[1]
    engine.stop()
    plain = load_causal_lm("demo").eval()
    plain.set_attn_implementation("sdpa")
    sides = [bare_seconds(plain, calls, given.measured, calls, time.process_time) for calls in (FEW, MANY)]
    bare = line("`generate` with a kept cache", *sides)[1]
    print(f"| ours by `generate`, after {MANY} | | {ours / bare:.2f} | |", flush=True)
    if given.vllm:
        vllm = VLLMEngine()
        vllm.start(handle)
        vllm.sync(0)
        line("`VLLMEngine`", *(engine_seconds(vllm, n, given.measured, n, time.perf_counter) for n in (FEW, MANY)))
        vllm.stop()
    if not given.no_update:
        few = [update_seconds(policy, FEW) for _ in range(3)]
        line("update, a growing row, per call", few, [update_seconds(policy, MANY)])
    few, many = ([1000 * server_seconds(calls) for _ in range(3)] for calls in (FEW, MANY))
    line("server, ms, mean of the calls until then", few, many)


if __name__ == "__main__":
    main()
