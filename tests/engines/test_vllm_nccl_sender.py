"""Weights by NCCL with vLLM's own sender and a communicator that records: the stream that is used, and the deadline."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch

from lightning_agentrl.engines.vllm_server.sent_weights import Calls, NCCLSender, Rendezvous, WeightSource

pytestmark = pytest.mark.vllm
PATIENCE = 60.0  # more than any test takes


class Stream:
    """Of a GPU: what is put on it is done at once, or when it is aborted."""

    def __init__(self, device: Any = None) -> None:
        self.done = threading.Event()
        self.done.set()

    def synchronize(self) -> None:
        assert self.done.wait(PATIENCE)


class Streams(threading.local):
    """The current stream of each thread."""

    trainers = Stream()
    current = trainers


class Communicator:
    """Records what it is asked to send, and on which stream."""

    def __init__(self) -> None:
        self.hangs = self.aborted = False
        self.sent: list[torch.Tensor] = []
        self.streams: list[Stream] = []

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Stream) -> None:
        if self.aborted:
            return  # as vLLM's does
        self.sent.append(tensor.clone())
        self.streams.append(stream)
        if self.hangs:
            stream.done.clear()

    def destroy(self) -> None:
        self.aborted = True
        for stream in self.streams:
            stream.done.set()


class Server:
    """Takes every step at once; one that hangs answers when nobody waits any more."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.answers = threading.Event()
        self.answers.set()
        self.cancelled = False

    def init_weight_transfer_engine(self, body: dict[str, Any]) -> None:
        self.steps.append("init")

    def start_weight_update(self) -> None:
        self.steps.append("start")

    def update_weights(self, body: dict[str, Any]) -> None:
        self.steps.append(" ".join(body["names"]))
        assert self.answers.wait(PATIENCE)
        if self.cancelled:
            raise RuntimeError("cancelled")

    def finish_weight_update(self) -> None:
        self.steps.append("finish")

    def cancel(self) -> None:
        self.cancelled = True
        self.answers.set()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, streams.current = streams.current, stream
        try:
            yield
        finally:
            streams.current = before

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams.current)
    return streams


@pytest.fixture
def communicator(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> Communicator:
    from vllm.distributed.weight_transfer import nccl_engine

    made, opened = Communicator(), list[Stream]()

    def open_endpoint(info: Any) -> Communicator:
        opened.append(streams.current)  # vLLM's communicator adds up a number on it
        return made

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", open_endpoint)
    made.streams = opened
    return made


WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def sender_of(server: Server, seconds: float = PATIENCE) -> NCCLSender:
    source = WeightSource(torch.device("cpu"), WEIGHTS)
    return NCCLSender(Rendezvous("127.0.0.1", 1, seconds), cast(Calls, server), source)


def test_weights_go_on_a_stream_of_their_own(communicator: Communicator, streams: Streams) -> None:
    server = Server()
    sender = sender_of(server)
    for _ in range(2):
        sender.send_weights()
    assert server.steps == ["init", *["start", "a b", "finish"] * 2]
    for sent, weight in zip(communicator.sent, list(WEIGHTS.values()) * 2, strict=True):
        torch.testing.assert_close(sent, weight)
    assert len(set(communicator.streams)) == 1
    assert streams.trainers not in communicator.streams
    assert streams.current is streams.trainers
    assert not communicator.aborted


@pytest.mark.parametrize("who", ["the server", "NCCL"])
def test_one_that_hangs_is_left_after_the_deadline(communicator: Communicator, who: str) -> None:
    server = Server()
    sender = sender_of(server, seconds=0.3)
    communicator.hangs = True
    if who == "the server":
        server.answers.clear()
    with pytest.raises(RuntimeError, match="NCCL has not sent the weights within"):
        sender.send_weights()
    assert communicator.aborted
    assert server.cancelled
