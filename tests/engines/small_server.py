"""A small HTTP server that answers as vLLM's does, and hangs, breaks off or lies when it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from lightning_agentrl.engines import SamplingRequest
from lightning_agentrl.vllm_worker.extension import MODE
from tests.inputs import text

ENGINE = ("/collective_rpc", "/inference/v1/generate", "/reset_prefix_cache")  # routes that the engine answers
SAMPLE = "/inference/v1/generate"


class SmallServer:
    """Its weights are the number that it was told to load last; a reply tells them and the seed of the request."""

    def __init__(self) -> None:
        self.url = ""
        self.version, self.weights, self.other_weights = "default", "0", ""
        self.running, self.engine_running = asyncio.Event(), asyncio.Event()  # cleared: stopped
        self.never: set[str] = set()  # what it never answers: a path, or a method of its workers
        self.wrong: dict[str, Any] = {}  # answers given in place of the right ones, by path or method
        self.seconds = 0.01  # of a reply
        self.answer: Callable[[dict[str, Any]], web.StreamResponse] = web.json_response  # how a reply is given
        self.breaks_off = False  # in the middle of the next reply
        self.when_asked: Callable[[], None] = lambda: None  # for a reply
        self.asked: list[str] = []  # paths and methods, as they come
        self.begun: list[int] = []  # seeds of replies
        self.running.set()
        self.engine_running.set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.text() or "{}")
        method = str(body.get("method", request.path))
        self.asked.append(method)
        if request.path == SAMPLE:
            self.begun.append(body["sampling_params"]["seed"])
            self.when_asked()
        await self.running.wait()
        if request.path in ENGINE:
            await self.engine_running.wait()
        if {request.path, method} & self.never:
            await asyncio.Event().wait()
        if request.path == SAMPLE:
            await asyncio.sleep(self.seconds)
            await self.engine_running.wait()
            await self.running.wait()
        if request.path == SAMPLE and self.breaks_off:
            self.breaks_off = False
            return await _half(request)
        if method in self.wrong:
            return web.json_response(self.wrong[method])
        return self._answer(request.path, method, body)

    def _answer(self, path: str, method: str, body: dict[str, Any]) -> web.StreamResponse:
        if path == SAMPLE:
            return self.answer(self._reply(body))
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if method == "reload_weights":
            self.weights = body["kwargs"]["weights_path"]
        model = {"dtype": "float32", "logprobs_mode": MODE}
        answers: dict[str, Any] = {
            "/version": {"version": "0.32.0"},
            "/v1/models": {"data": [{"root": "small", "max_model_len": 1000}]},
            "/server_info": {"vllm_config": {"model_config": model}},
            "/weight_info": {"weight_version": self.version},
            "/reset_prefix_cache": {"success": True},
            "/collective_rpc": {"results": [["all", self.weights] if method == "weights_checksum" else {}]},
        }
        return web.json_response(answers.get(path, {}))

    def _reply(self, body: dict[str, Any]) -> dict[str, Any]:
        params = body["sampling_params"]
        ids = [*[params["seed"]] * (params["max_tokens"] - 1), int(self.weights)]
        choice = {
            "finish_reason": "length",
            "token_ids": ids,
            "weight_versions": [{"version": self.other_weights or self.version}],
            "logprobs": {"content": [{"token_id": token, "logprob": -1.0} for token in ids]},
        }
        return {"choices": [choice]}


async def _half(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Length": "1000"})
    await answer.prepare(request)
    await answer.write(b'{"choices": [')
    assert request.transport is not None
    request.transport.close()
    return answer


@asynccontextmanager
async def small_servers(count: int) -> AsyncIterator[list[SmallServer]]:
    """Servers on this event loop, on free ports."""
    servers, runners = [SmallServer() for _ in range(count)], list[web.AppRunner]()
    for server in servers:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", server.handle)
        runners.append(web.AppRunner(app, shutdown_timeout=0.01))
        await runners[-1].setup()
        site = web.TCPSite(runners[-1], "127.0.0.1", 0)
        await site.start()
        host, port = runners[-1].addresses[0][:2]
        server.url = f"http://{host}:{port}"
    try:
        yield servers
    finally:
        for runner in runners:
            await runner.cleanup()


def asking(seed: int, max_tokens: int = 2) -> SamplingRequest:
    return SamplingRequest(text(*range(40)), max_tokens, 1.0, seed)
