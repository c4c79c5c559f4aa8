"""Addresses at which something else answers than a vLLM server for this run: one sentence before training starts."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from lightning_agentrl.engines import VLLMServerEngine
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.vllm_worker.extension import MODE

Answer = tuple[int, str]
UNAUTHORIZED = (401, json.dumps({"error": "Unauthorized"}))


class Stranger(BaseHTTPRequestHandler):
    """Answers each path alike, but for those of ``paths``."""

    answer: Answer = (200, "")
    paths: dict[str, Answer] = {}

    def do_GET(self) -> None:
        status, text = self.paths.get(self.path, self.answer)
        if not status:  # no HTTP
            self.wfile.write(text.encode())
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    do_POST = do_GET

    def log_message(self, *given: object) -> None:
        pass


@pytest.fixture
def refusal() -> Iterator[Callable[..., str]]:
    servers = list[ThreadingHTTPServer]()

    def ask(answer: Answer, **paths: Answer) -> str:
        """Return what the engine says of a server."""
        kind = type("", (Stranger,), {"answer": answer, "paths": {f"/{at}": found for at, found in paths.items()}})
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), kind))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        url = f"http://127.0.0.1:{servers[-1].server_port}"
        with pytest.raises(ConfigError) as refused:
            VLLMServerEngine([url], hang_seconds=5).check()
        said = str(refused.value)
        assert url in said
        assert "agentrl serve" in said or "--api-key" in said  # what to do
        assert "\n" not in said
        return said

    yield ask
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        ((200, "<html>a page</html>"), "other than JSON"),
        ((200, "{}"), "another form than vLLM"),
        ((200, "[1, 2]"), "another form than vLLM"),
        ((404, "not found"), "knows no /version"),
        ((500, "broken"), "no vLLM server answers"),
        ((0, "SSH-2.0-OpenSSH_9.6\r\n"), "no vLLM server answers"),
        (UNAUTHORIZED, "asks for a key"),
        ((403, ""), "asks for a key"),
    ],
)
def test_an_address_that_is_no_server_for_us_is_refused(refusal: Callable[..., str], answer: Answer, part: str) -> None:
    assert part in refusal(answer)


def test_a_server_that_asks_for_a_key_is_refused_though_it_tells_its_version(refusal: Callable[..., str]) -> None:
    assert "/v1/models: 401" in refusal(UNAUTHORIZED, version=(200, json.dumps({"version": "0.32.0"})))


FITS = {
    "version": {"version": "0.32.0"},
    "v1/models": {"data": [{"root": "small", "max_model_len": 100}]},
    "server_info?config_format=json": {"vllm_config": {"model_config": {"dtype": "float32", "logprobs_mode": MODE}}},
    "collective_rpc": {"results": [{}]},
}


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("collective_rpc", {}),
        ("collective_rpc", {"results": []}),
        ("collective_rpc", {"results": [None]}),
        ("v1/models", {"data": []}),
        ("v1/models", {"data": [{"root": "small", "max_model_len": math.inf}]}),
        ("server_info?config_format=json", {"vllm_config": []}),
    ],
)
def test_a_server_whose_answers_have_another_form_is_refused(
    refusal: Callable[..., str], path: str, answer: Any
) -> None:
    paths = {at: (200, json.dumps(given)) for at, given in (FITS | {path: answer}).items()}
    assert "its settings in another form than vLLM" in refusal((404, ""), **paths)
