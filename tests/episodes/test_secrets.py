"""Secrets of an environment: records hold their names, the environment gets their values."""

from __future__ import annotations

import pytest

from lightning_agentrl.episodes.environment import Environment
from lightning_agentrl.episodes.secrets import check_secrets, filled, masked
from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.rollout import EnvConfig
from tests.episodes.small_envs import SECRET


@pytest.mark.parametrize(
    "name",
    ["api_key", "OPENAI_API_KEY", "apikey", "password", "db_passwd", "token", "hf_token", "secret", "Authorization"],
)
@pytest.mark.parametrize("place", ["alone", "nested", "in a list", "several"])
def test_a_secret_that_is_written_out_is_refused_without_repeating_it(name, place):
    places = {
        "alone": {name: SECRET},
        "nested": {"client": {name: SECRET}},
        "in a list": {"servers": [{"port": 1}, {name: SECRET}]},
        "several": {name: ["${FIRST}", SECRET]},
    }
    arguments = places[place]
    with pytest.raises(ValueError, match=rf"'{name}'.*\$\{{{name.upper()}\}}") as refused:
        EnvConfig("Vault-v0", arguments)
    assert SECRET not in str(refused.value)
    check_secrets({name: f"${{{name.upper()}}}"})
    check_secrets({name: ""})


@pytest.mark.parametrize(
    "name",
    ["stop_token", "key", "door_key", "key_color", "max_tokens", "stop_tokens", "secretary", "tokenizer", "author"],
)
def test_other_arguments_are_left_alone(name):
    EnvConfig("Vault-v0", {name: "red"})


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
