"""Secrets of a run: records hold their names, environments and requests to servers get their values."""

from __future__ import annotations

import asyncio

import pytest

from lightning_agentrl.engines import VLLMServerEngine
from lightning_agentrl.engines.vllm_server.server import Lost, VLLMServer
from lightning_agentrl.episodes.environment import Environment
from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.errors.secrets import check_secrets, filled, masked
from lightning_agentrl.rollout import EnvConfig
from lightning_agentrl.types.plain_config import by_key, to_plain
from tests.episodes.small_envs import SECRET

NAMES = ["api_key", "OPENAI_API_KEY", "apikey", "password", "db_passwd", "token", "hf_token", "secret", "Authorization"]
NAMES += ["github_token", "githubToken", "openai_key", "my_anthropic_key", "bot_token", "wandb_keys"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["alone", "nested", "in a list", "several", "by name"])
def test_a_secret_that_is_written_out_is_refused_without_repeating_it(name, place):
    places = {
        "alone": {name: SECRET},
        "nested": {"client": {name: SECRET}},
        "in a list": {"servers": [{"port": 1}, {name: SECRET}]},
        "several": {name: ["${FIRST}", SECRET]},
        "by name": {name: {"alice": SECRET}},
    }
    arguments = places[place]
    with pytest.raises(ValueError, match=rf"{name}.*\$\{{{name.upper()}\}}") as refused:
        EnvConfig("Vault-v0", arguments)
    assert SECRET not in str(refused.value)
    check_secrets({name: f"${{{name.upper()}}}"})
    check_secrets({name: ""})


def test_a_number_is_refused_under_the_name_of_a_secret():
    with pytest.raises(ValueError, match="api_key") as refused:
        EnvConfig("Vault-v0", {"api_key": 12345})
    assert "12345" not in str(refused.value)
    EnvConfig("Vault-v0", {"token": True, "session_tokens": 512, "password": None})


@pytest.mark.parametrize("given", [f"https://user:{SECRET}@host/x", f"postgresql://:{SECRET}@host:5432/${{NAME}}"])
def test_a_url_with_a_password_is_refused(given):
    for kwargs in ({"url": given}, {"proxies": {"http": given}}, {"servers": ["http://host", given]}):
        with pytest.raises(ValueError, match=r"\$\{PASSWORD\}") as refused:
            EnvConfig("Vault-v0", kwargs)
        assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["https://user:${PW}@host/x", "http://host:80/a@b", "http://h:8000?to=a@b", "ssh://git@host", "9:30 a@b"]
)
def test_a_url_without_a_written_password_is_left_alone(url):
    EnvConfig("Vault-v0", {"url": url})


@pytest.mark.parametrize(
    "name",
    [
        *("stop_token", "key", "keys", "door_key", "key_color", "key_door", "max_tokens", "stop_tokens", "secretary"),
        *("tokenizer", "author", "max_reply_tokens", "eos_token", "pad_token", "bos_token", "tokens_per_second"),
        *("reward_per_token", "red_token", "api_key_variable", "keyboard", "monkey", "turkey"),
    ],
)
@pytest.mark.parametrize("value", ["red", 3])
def test_other_arguments_are_left_alone(name, value):
    EnvConfig("Vault-v0", {name: value})


def test_records_leave_out_a_secret_that_an_object_read_itself():
    class Client:
        def __init__(self, api_key: str = "", url: str = "", port: int = 0) -> None:
            self.api_key, self.url, self.port = api_key or SECRET, f"http://me:{SECRET}@host", port

    assert by_key(to_plain(Client(port=1), strict=False), "client") == {"client": "Client", "client.init_args.port": 1}


def test_servers_take_a_password_from_the_environment(monkeypatch):
    with pytest.raises(ValueError, match=r"urls\[0\].*\$\{PASSWORD\}"):
        VLLMServerEngine([f"http://me:{SECRET}@127.0.0.1:9"])
    asked = []

    class Session:
        def request(self, method, url, json):
            asked.append(url)
            raise OSError("nobody there")

    monkeypatch.setenv("PW", SECRET)
    server = VLLMServer("http://me:${PW}@127.0.0.1:9", Session(), 1.0)
    with pytest.raises(Lost):
        asyncio.run(server.probe())
    assert asked == [f"http://me:{SECRET}@127.0.0.1:9/collective_rpc"]
    assert SECRET not in server.url


def test_references_are_filled_where_the_environment_is_made(monkeypatch):
    monkeypatch.setenv("MY_KEY", SECRET)
    config = EnvConfig("Vault-v0", {"api_key": "${MY_KEY}", "nested": {"urls": ["https://x?k=${MY_KEY}&a=1"]}})
    env = config.make().unwrapped
    assert env.nested == {"urls": [f"https://x?k={SECRET}&a=1"]}
    assert SECRET not in f"{config} {config.label}"


@pytest.mark.parametrize("worker", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_errors_of_the_environment_do_not_tell_a_secret(monkeypatch, worker):
    monkeypatch.setenv("MY_KEY", SECRET)
    made = EnvConfig("tests.episodes.small_envs:Vault-v0", {"api_key": "${MY_KEY}"}, worker=worker).make_worker()
    with pytest.raises(EnvError, match=r"key=\$\{MY_KEY\} timed out") as raised:
        made._environment.reset(0)
    assert SECRET not in f"{raised.value} {raised.value.trace}"
    made.close()


def test_a_rejected_secret_is_not_told_either(monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-wrong")
    with pytest.raises(EnvError, match=r"401: '\$\{MY_KEY\}' is not a valid key"):
        Environment(EnvConfig("Vault-v0", {"api_key": "${MY_KEY}"}).make)


@pytest.mark.parametrize("value", [None, ""])
def test_a_variable_that_is_not_set_is_told_with_its_key(monkeypatch, value):
    monkeypatch.delenv("MY_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("MY_KEY", value)
    with pytest.raises(ValueError, match=r"data.init_args.env.kwargs.client.api_key .* MY_KEY, which is not set"):
        EnvConfig("Vault-v0", {"client": {"api_key": "${MY_KEY}"}}).make()


def test_texts_without_secrets_are_the_same():
    assert filled({"a": [1, "$b", "${}", ("x",)]}, "k") == {"a": [1, "$b", "${}", ("x",)]}
    assert masked("nothing here") == "nothing here"
