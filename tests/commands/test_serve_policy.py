"""`agentrl serve-policy`: clients of a trained policy, from a checkpoint and from an exported folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_agentrl.commands.export import export_checkpoint
from lightning_agentrl.commands.serve_policy import serve_policy
from tests.agents.harness import make_agent, make_data, make_trainer

ASKED = {"model": "m", "messages": [{"role": "user", "content": "Where to?"}]}


@pytest.fixture(scope="module")
def checkpoint(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    saving = ModelCheckpoint(folder, filename="last", save_on_train_epoch_end=True)
    trainer = make_trainer(folder, 1, [saving], enable_checkpointing=True, precision="32-true")
    trainer.fit(make_agent(tiny_folder), make_data())
    return folder / "last.ckpt"


@contextmanager
def served(*arguments: object) -> Iterator[str]:
    """Yield the base URL of a server in a process of its own."""
    command = [sys.executable, "-m", "lightning_agentrl", "serve-policy", *map(str, arguments), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]
        assert lines[1].startswith("OPENAI_BASE_URL=http://127.0.0.1:"), lines
        yield lines[1].split()[0].partition("=")[2]
    finally:
        process.kill()
        process.wait()


def say(url: str, key: str = "none") -> str:
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    reply = client.chat.completions.create(**ASKED)  # type: ignore[call-overload]
    assert 1 <= reply.usage.completion_tokens <= 4
    return reply.choices[0].message.content


@pytest.mark.slow
def test_a_checkpoint_and_its_export_reply_alike_to_the_client_of_an_agent(checkpoint: Path, tmp_path: Path) -> None:
    export_checkpoint(checkpoint, tmp_path / "model")
    said = []
    with served(checkpoint, "--temperature", 0) as url:  # the run's own limit of tokens: 4
        said += [say(url), say(url)]
        client = openai.OpenAI(base_url=url, api_key="none")
        streamed = client.chat.completions.create(**ASKED, stream=True)  # type: ignore[call-overload]
        said.append("".join(part.choices[0].delta.content or "" for part in streamed if part.choices))
        with pytest.raises(openai.BadRequestError, match="tokens, and"):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x " * 3000}])
    with served(tmp_path / "model", "--temperature", 0, "--max_reply_tokens", 4, "--token", "secret") as url:
        said.append(say(url, "secret"))
        with pytest.raises(openai.AuthenticationError, match="token"):
            say(url)
    assert len(set(said)) == 1


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"host": "0.0.0.0"}, "--host is 0.0.0.0, where other machines.*--token"),
        ({"max_reply_tokens": 0}, "--max_reply_tokens is 0"),
        ({"checkpoint": Path("gone.ckpt")}, "no checkpoint file 'gone.ckpt'"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_sentence(settings: dict, what: str) -> None:
    given = {"checkpoint": Path("gone.ckpt"), "host": "127.0.0.1", "port": 0, "token": "", "model": None}
    with pytest.raises(ValueError, match=what):
        serve_policy(**{**given, "max_reply_tokens": None, "temperature": None, **settings})
