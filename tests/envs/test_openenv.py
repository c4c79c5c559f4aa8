"""The client of OpenEnv's protocol, against real servers: sound ones, and those that lie, hang, stammer or die."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from base64 import b64encode
from contextlib import suppress
from typing import Any

import gymnasium
import numpy as np
import pytest
from aiohttp import web

from agentrl_envs.openenv.client import OpenEnv
from agentrl_envs.openenv.connection import (
    EnvironmentAtServerError,
    LostSocketError,
    ProtocolError,
    ServerError,
    ServerFullError,
    fetch_schema,
)
from agentrl_envs.openenv.fields import choose_fields
from agentrl_envs.openenv.images import read_images
from lightning_agentrl.commands.serve_env import environment_app
from lightning_agentrl.episodes.environment import Environment, png
from lightning_agentrl.episodes.recipe import Recipe
from tests.envs.servers import SCHEMA, STATE, answering, error, giving, observation, serving

TEXT = {"type": "string"}


_TOLD = ("success", "progression", "executed_action", "invalid_action", "long_term_text", "short_term_text")


def make(url: str, **kwargs: Any) -> gymnasium.Env:
    return gymnasium.make("agentrl_envs:OpenEnv-v0", url=url, disable_env_checker=True, **kwargs)


# A sound server


@pytest.mark.parametrize(
    ("env_id", "kwargs", "episodes"),
    [("GuessNumber-v0", {"highest": 6}, 20), ("BabyAIText-GoToObjS4-v0", {"max_turns": 8}, 6)],
)
def test_episodes_behind_a_url_are_those_in_process(env_id, kwargs, episodes):
    """Texts, rewards, ends, what `info` reports, and what the environment offers; also with two of them in turn."""
    source = Recipe(f"agentrl_envs:{env_id}", kwargs, "env")
    here, draw = source.make(), random.Random(0)
    with serving(environment_app(source, 2)) as url:
        there, other = make(url), make(f"{url.replace('http', 'ws')}/ws/")
        for seed in range(episodes):
            answers = [here.reset(seed=seed), there.reset(seed=seed)]
            other.reset(seed=seed + 1)
            over = False
            while not over:
                assert answers[0][:-1] == answers[1][:-1]
                infos = [answer[-1] for answer in answers]
                for name in _TOLD:
                    assert infos[0][name] == infos[1][name], name
                assert infos[0]["metrics"].items() <= infos[1]["metrics"].items()
                for name in ("actions", "aliases", "default_action", "system_prompt"):
                    assert getattr(here.unwrapped, name) == getattr(there.unwrapped, name)
                assert [tuple(pair) for pair in there.unwrapped.examples] == list(here.unwrapped.examples)
                assert (there.unwrapped.free_text, there.unwrapped.one_turn) == (False, False)
                over = len(answers[0]) == 5 and (answers[0][2] or answers[0][3])
                if not over:
                    action = draw.choice([*here.unwrapped.actions, "dance"])
                    answers = [env.step(action) for env in (here, there)]
                    other.step("1") if other.unwrapped._active else other.reset(seed=seed)
            with pytest.raises(gymnasium.error.ResetNeeded):
                there.step("1")
        there.close()
        other.close()


@pytest.mark.parametrize(
    "env_id", ["agentrl_envs:GridWorldImage-v0", "tests.seen_game:Corner-v0", "tests.talking_game:Talk-v0"]
)
def test_pictures_and_messages_behind_a_url_are_those_in_process(env_id):
    source = Recipe(env_id, {}, "env")
    here, actions = Environment(source.make), list(source.make().unwrapped.actions)
    draw = random.Random(0)
    with serving(environment_app(source, 1)) as url:
        there = Environment(lambda: make(url))
        for seed in range(3):
            answers = [env.reset(seed) for env in (here, there)]
            while not (answers[0].terminated or answers[0].truncated):
                assert answers[0].images
                assert answers[0].fingerprint == answers[1].fingerprint
                assert answers[0].messages == answers[1].messages
                assert answers[0].contract.actions == answers[1].contract.actions
                action = draw.choice(actions)
                answers = [env.step(action) for env in (here, there)]
                assert answers[0].reward == answers[1].reward
        there.close()


PIXELS = np.arange(2 * 4 * 3, dtype=np.uint8).reshape(2, 4, 3)
AS_FILE = b64encode(png((PIXELS,))).decode()
OF_ANOTHER_KIND = b64encode(b"P6 1 1 255 abc").decode()  # which Pillow would read


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (None, 0),
        ([], 0),
        (AS_FILE, 1),
        (f"data:image/png;base64,{AS_FILE}", 1),
        ([AS_FILE, AS_FILE], 2),
        (PIXELS.tolist(), 1),
        ([PIXELS.tolist(), PIXELS.tolist()], 2),
        ([PIXELS.tolist(), PIXELS[:1].tolist()], 2),
    ],
)
def test_pictures_have_several_forms(given, count):
    found = read_images(given)
    assert len(found) == count
    assert all(one.dtype == np.uint8 and np.array_equal(one, PIXELS[: len(one)]) for one in found)


@pytest.mark.parametrize(
    "given",
    [
        3,
        {},
        "?",
        "aGVsbG8=",
        OF_ANOTHER_KIND,
        [AS_FILE, 3],
        [[1, 2, 3]],
        [[[1, 2]]],
        [[[1, 2, 300]]],
        [[[0.5, 1, 2]]],
        [["a"]],
    ],
)
def test_what_are_no_pictures_ends_the_episode_in_a_sentence(given):
    async def play(connected: web.WebSocketResponse) -> None:
        async for _ in connected:
            answer = observation()
            answer["data"]["observation"]["length"] = given
            await connected.send_json(answer)

    with serving(answering(play)) as url:
        env = make(url, images="length")
        with pytest.raises(ProtocolError, match="field length must hold pictures, but"):
            env.reset(seed=0)
        env.close()
        with pytest.raises(ValueError, match=r"no field 'views' \(images\)"):
            make(url, images="views")


def test_a_server_without_place_says_so_and_places_become_free():
    with serving(environment_app(Recipe("agentrl_envs:Bandit-v0", {}, "env"), 1)) as url:
        first = make(url)
        with pytest.raises(ValueError, match=r"max_concurrent_envs.*SUPPORTS_CONCURRENT_SESSIONS"):
            make(url)
        first.close()
        second, end = None, time.monotonic() + 60
        while second is None:  # the server hears of it a moment later
            assert time.monotonic() < end
            with suppress(ValueError):
                second = make(url)
        second.reset(seed=0)
        second.close()


def test_our_server_answers_wrong_messages_with_codes_and_keeps_the_session():
    app = environment_app(Recipe("agentrl_envs:Bandit-v0", {}, "env"), 1)
    asked = {
        "{": "INVALID_JSON",
        "[1]": "UNKNOWN_TYPE",
        '{"type": "mcp"}': "UNKNOWN_TYPE",
        b'{"type": "step", "data": {"text": "hat"}}': "EXECUTION_ERROR",  # before the reset
        b"\xff": "INVALID_JSON",
        '{"type": "reset", "data": {"seed": -1}}': "VALIDATION_ERROR",
        '{"type": "reset", "data": {"seed": true}}': "VALIDATION_ERROR",
        '{"type": "reset", "data": {"level": 3}}': "VALIDATION_ERROR",
        '{"type": "reset", "data": 3}': "VALIDATION_ERROR",
        '{"type": "reset", "data": {"seed": 3, "episode_id": "mine"}}': None,
        '{"type": "step", "data": {"message": "hat"}}': "VALIDATION_ERROR",
        '{"type": "step", "data": {"text": 3}}': "VALIDATION_ERROR",
        '{"type": "step", "data": {"text": "hat \\ud800", "metadata": {}}}': None,
        '{"type": "step", "data": {"text": "hat", "other": 1}}': "VALIDATION_ERROR",
        '{"type": "step", "data": {"text": "hat "}}': "EXECUTION_ERROR",  # after the end
        '{"type": "state"}': None,
    }

    async def play(url: str) -> list[Any]:
        from aiohttp import ClientSession

        async with ClientSession() as session, session.ws_connect(f"{url}/ws") as connected:
            answers = []
            for message in asked:
                send = connected.send_bytes if isinstance(message, bytes) else connected.send_str
                await send(message)
                answers.append(await connected.receive_json(timeout=10.0))
            await connected.send_str('{"type": "close"}')
            assert (await connected.receive()).type.name in ("CLOSE", "CLOSED")
            return answers

    with serving(app) as url:
        answers = asyncio.run(play(url))
    codes = [answer["data"].get("code") for answer in answers]
    assert dict(zip(asked, codes, strict=True)) == asked
    assert answers[-1] == {"type": "state", "data": {"episode_id": "mine", "step_count": 1}}


# Servers that are not sound


async def silent(connected: web.WebSocketResponse) -> None:
    await asyncio.sleep(30)


HOSTILE: dict[str, tuple[Any, type[Exception]]] = {
    "no JSON": ("hello", ProtocolError),
    "JSON without end": ("[" * 100_000, ProtocolError),
    "another protocol": ({"jsonrpc": "2.0", "result": {}}, ProtocolError),
    "the answer of another question": ({"type": "state", "data": {}}, ProtocolError),
    "no data": ({"type": "observation", "data": None}, ProtocolError),
    "no observation": ({"type": "observation", "data": {"reward": 1.0, "done": False}}, ProtocolError),
    "no text": (observation(text=None), ProtocolError),
    "no end": (observation(done="no"), ProtocolError),
    "a reward in words": (observation(reward="much"), ProtocolError),
    "a reward that no float holds": (observation(reward=10**400), ProtocolError),
    "metrics in words": (observation(metrics="good"), ProtocolError),
    "truncated in words": (observation(truncated="no"), ProtocolError),
    "bytes": (b"bytes", LostSocketError),
    "an error": (error("EXECUTION_ERROR", "the\ngame fell over"), EnvironmentAtServerError),
    "an error without words": ({"type": "error", "data": {}}, ServerError),
    "a refusal": (error("CAPACITY_REACHED"), ServerFullError),
    "the end of the socket": (None, LostSocketError),
    "nothing": (silent, TimeoutError),
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_whatever_a_server_does_ends_the_episode_and_the_next_reset_opens_a_new_socket(hostile):
    says, raised = HOSTILE[hostile]
    sockets = 0

    async def play(connected: web.WebSocketResponse) -> None:
        nonlocal sockets
        sockets += 1
        steps = 0
        async for message in connected:
            steps += json.loads(message.data)["type"] == "step"
            if steps < 2:
                await connected.send_json(observation(f"socket {sockets}, step {steps}", reward=1))
            elif callable(says):
                await says(connected)
            elif says is None:
                return
            elif isinstance(says, bytes):
                await connected.send_bytes(says)
            else:
                await connected.send_str(says if isinstance(says, str) else json.dumps(says))

    with serving(answering(play)) as url:
        env = make(url, timeout_seconds=0.2 if raised is TimeoutError else 20.0)
        assert env.reset(seed=1)[0] == "socket 1, step 0"
        assert env.step("go")[:4] == ("socket 1, step 1", 1.0, False, False)
        with pytest.raises(raised) as error:
            env.step("go")
        assert str(error.value).count(url) == 1
        assert "\n" not in str(error.value)
        with pytest.raises(gymnasium.error.ResetNeeded):
            env.step("go")
        assert env.reset(seed=1)[0] == "socket 2, step 0"
        env.close()


def test_an_answer_that_comes_twice_is_not_taken_for_the_next_one():
    async def play(connected: web.WebSocketResponse) -> None:
        async for _ in connected:
            for _ in range(2):
                await connected.send_json(observation())

    with serving(answering(play)) as url:
        env = make(url)
        env.reset(seed=0)
        waited = env.unwrapped._connection._answers
        while waited.empty():
            time.sleep(0.001)
        with pytest.raises(ProtocolError, match="not asked for"):
            env.step("go")
        env.close()


def test_pings_are_answered_while_nobody_plays():
    """An update takes minutes, and servers close a socket that does not answer for some seconds."""
    alive = threading.Event()

    async def play(connected: web.WebSocketResponse) -> None:
        await connected.receive()
        await connected.send_json(observation())
        for _ in range(2):
            await connected.ping(b"there?")
            answer = await connected.receive()
            assert (answer.type.name, answer.data) == ("PONG", b"there?")
        alive.set()
        async for _ in connected:
            await connected.send_json(observation("still there"))

    with serving(answering(play, autoping=False)) as url:
        env = make(url)
        env.reset(seed=0)
        while not alive.is_set():
            time.sleep(0.001)
        assert env.step("go")[0] == "still there"
        env.close()


def test_missing_rewards_and_doubtful_ends_are_counted():
    async def play(connected: web.WebSocketResponse) -> None:
        steps = 0
        async for message in connected:
            steps = steps + 1 if json.loads(message.data)["type"] == "step" else 0
            await connected.send_json(observation(reward=None if steps % 2 else 0.5, done=steps == 3))

    with serving(answering(play)) as url:
        env = make(url, max_turns=3)
        env.reset(seed=0)
        answers = [env.step("go") for _ in range(2)]
        with pytest.warns(UserWarning, match="max_turns below its own limit"):
            answers.append(env.step("go"))
        assert [(reward, info["metrics"]["no_reward"]) for _, reward, *_, info in answers] == [(0, 1), (0.5, 1), (0, 2)]
        assert answers[-1][2:4] == (True, False)
        assert answers[-1][-1]["metrics"]["doubtful_end"] == 1.0
        env.close()
        env = make(url, max_turns=2)
        env.reset(seed=0)
        assert [env.step("go")[2:4] for _ in range(2)] == [(False, False), (False, True)]
        with pytest.raises(gymnasium.error.ResetNeeded):
            env.step("go")
        env.close()


@pytest.mark.parametrize("truncated", [True, False, 1, 0])
def test_a_server_may_say_how_an_episode_ended(truncated):
    async def play(connected: web.WebSocketResponse) -> None:
        async for message in connected:
            step = json.loads(message.data)["type"] == "step"
            answer = observation(done=step)
            answer["data"]["metadata"] = {"truncated": truncated}
            await connected.send_json(answer)

    with serving(answering(play)) as url:
        env = make(url)
        env.reset(seed=0)
        assert env.step("go")[2:4] == (not truncated, bool(truncated))
        assert env.unwrapped.free_text
        env.close()


def test_a_schema_may_come_in_parts():
    """As a large one does, or one behind a slow network."""

    async def parts(request: web.Request) -> web.StreamResponse:
        slow = web.StreamResponse()
        await slow.prepare(request)
        schema = json.dumps(SCHEMA).encode()
        for part in (schema[:20], schema[20:]):
            await slow.write(part)
            await asyncio.sleep(0.05)
        return slow

    app = web.Application()
    app.router.add_get("/schema", parts)
    with serving(app) as url:
        assert fetch_schema(url, 10) == SCHEMA


# Servers that go and come back


async def plays(connected: web.WebSocketResponse) -> None:
    async for _ in connected:
        await connected.send_json(observation())


def test_a_server_that_is_started_anew_is_waited_for_and_what_never_comes_back_is_waited_for_once(monkeypatch):
    with serving(answering(plays)) as url:
        env = make(url, timeout_seconds=20.0)
        env.reset(seed=0)
    with pytest.raises(LostSocketError):
        env.step("go")
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("go")
    back = threading.Event()

    def serve_again() -> None:
        time.sleep(0.6)
        with serving(answering(plays), int(url.rpartition(":")[2])):
            back.wait(20)

    thread = threading.Thread(target=serve_again)
    thread.start()
    try:
        assert env.reset(seed=1)[0] == "text"
    finally:
        back.set()
        thread.join()
    env.unwrapped.timeout_seconds = 1.0
    pauses: list[float] = []
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (pauses.append(seconds), sleep(seconds)))
    for waits in (True, False):
        pauses.clear()
        with pytest.raises(ConnectionError, match="no server answers"):
            env.reset(seed=2)
        assert bool(pauses) == waits


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_proxy_whose_server_is_started_is_no_other_protocol(status):
    async def away(request: web.Request) -> web.Response:
        return web.Response(status=status, text="<html>later</html>")

    schema, socket = web.Application(), web.Application()
    schema.router.add_get("/schema", away)
    socket.add_routes([web.get("/schema", giving(SCHEMA)), web.get("/ws", away)])
    for app in (schema, socket):
        with serving(app) as url, pytest.raises(ValueError, match=rf"no server answers at {url} \(status {status}\)"):
            make(url)


def test_a_place_that_is_given_back_late_is_waited_for_and_one_that_was_never_there_is_not():
    """A server keeps the place of a socket that is gone until the step that is under way there comes back."""
    places = 1

    async def connect(request: web.Request) -> web.WebSocketResponse:
        nonlocal places
        connected = web.WebSocketResponse()
        await connected.prepare(request)
        await connected.receive()
        free, places = places > 0, places - 1
        await connected.send_json(STATE if free else error("CAPACITY_REACHED"))
        if free:
            async for message in connected:
                if json.loads(message.data)["type"] == "step":
                    await asyncio.sleep(1.0)
                with suppress(ConnectionResetError):
                    await connected.send_json(observation())
        places += 1
        return connected

    app = web.Application()
    app.add_routes([web.get("/schema", giving(SCHEMA)), web.get("/ws", connect)])
    with serving(app) as url:
        env = make(url, timeout_seconds=20.0)
        began = time.monotonic()
        with pytest.raises(ValueError, match="max_concurrent_envs"):
            make(url, timeout_seconds=20.0)
        assert time.monotonic() - began < 10.0
        env.reset(seed=0)
        connection = env.unwrapped._connection
        connection.seconds = 0.2
        with pytest.raises(TimeoutError):
            env.step("go")
        assert env.reset(seed=1)[0] == "text"
        env.close()


# Wrong input


def test_addresses_that_are_no_environment():
    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<html>Welcome</html>")

    website, older = web.Application(), web.Application()
    website.router.add_get("/schema", page)
    older.router.add_get("/schema", giving(SCHEMA))
    for url in ("127.0.0.1:8000", "ftp://somewhere", "http://", "http://host/ws?token=1", ""):
        with pytest.raises(ValueError, match="address of a server"):
            make(url)
    with pytest.raises(ValueError, match=r"no server answers at http://127\.0\.0\.1:9 "):
        make("http://127.0.0.1:9")
    with serving(website) as url:
        for wrong in (url, f"{url}/elsewhere"):
            with pytest.raises(ValueError, match=r"no OpenEnv environment: its /schema gives status"):
                make(wrong)
    with (
        serving(older) as url,
        pytest.raises(ValueError, match=r"no web socket at /ws \(status 404\).*another version"),
    ):
        make(url)


@pytest.mark.parametrize(
    ("greeting", "message"),
    [
        (STATE, ""),
        (error("EXECUTION_ERROR", "no state before the first reset"), ""),
        (error("CAPACITY_REACHED"), "max_concurrent_envs"),
        (error("FACTORY_ERROR", "no model key"), "FACTORY_ERROR: 'no model key'"),
        ({"jsonrpc": "2.0"}, "protocol of openenv"),
    ],
)
def test_a_server_that_cannot_play_is_refused_when_the_environment_is_made(greeting, message):
    async def play(connected: web.WebSocketResponse) -> None:
        async for _ in connected:
            await connected.send_json(observation())

    with serving(answering(play, greeting)) as url:
        if message:
            with pytest.raises(ValueError, match=message):
                make(url)
        else:
            env = make(url)
            assert env.reset(seed=0)[0] == "text"
            env.close()


def test_a_socket_that_is_lost_between_two_episodes_costs_nothing():
    async def play(connected: web.WebSocketResponse) -> None:
        await connected.receive()
        await connected.send_json(observation("only one"))

    with serving(answering(play)) as url:
        env = make(url)
        connections = set()
        for seed in range(3):
            assert env.reset(seed=seed)[0] == "only one"
            connections.add(id(env.unwrapped._connection))
        with pytest.raises(LostSocketError):
            env.step("go")
        assert len(connections) > 1
        env.close()


@pytest.mark.parametrize("wrong", [{"max_turns": 0}, {"timeout_seconds": 0}, {"timeout_seconds": float("nan")}])
def test_wrong_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        OpenEnv("http://127.0.0.1:9", **wrong)


def schema(action: dict[str, Any], needed: Any, shown: dict[str, Any]) -> dict[str, Any]:
    return {"action": {"properties": action, "required": needed}, "observation": {"properties": shown}}


@pytest.mark.parametrize(
    ("given", "action", "text", "found"),
    [
        (SCHEMA, None, None, ("message", "echo")),
        (SCHEMA, "message", "echo", ("message", "echo")),
        (schema({"a": TEXT, "b": TEXT}, ["a"], {"x": TEXT}), None, None, ("a", "x")),
        (schema({"a": TEXT, "b": TEXT}, [], {"x": TEXT}), "b", None, ("b", "x")),
        (schema({}, [], {}), "a", "x", ("a", "x")),
        (schema({"a": TEXT, "b": TEXT}, [], {"x": TEXT}), None, None, r"argument action.*a \(string\), b \(string\)"),
        (schema({"a": {"type": "integer"}}, ["a"], {"x": TEXT}), None, None, r"argument action.*a \(integer\)"),
        (schema({"a": TEXT, "b": {"type": "integer"}}, ["a", "b"], {"x": TEXT}), None, None, "also needs b"),
        (schema({"a": TEXT}, ["a"], {"x": TEXT, "y": TEXT}), None, None, r"argument text.*x \(string\), y \(string\)"),
        (schema({"a": TEXT}, ["a"], {"x": TEXT}), "b", None, r"no field 'b'.*known: a \(string\)"),
        (schema({}, [], {}), None, None, "known: none"),
        (schema({"a": TEXT}, [{}, 3, "a"], {"x": TEXT}), None, None, ("a", "x")),
        (schema({"a": TEXT}, None, {"x": TEXT}), None, None, r"argument action.*a \(string\)"),
        (schema({"a": TEXT}, 3, {"x": TEXT}), None, None, r"argument action.*a \(string\)"),
        (schema({f"f{i}": TEXT for i in range(99)}, [], {"x": TEXT}), None, None, r"f19 \(string\), \.\.\.$"),
    ],
)
def test_fields_follow_from_the_schema_if_only_one_fits(given, action, text, found):
    if isinstance(found, tuple):
        assert choose_fields(given, action, text) == found
    else:
        with pytest.raises(ValueError, match=found):
            choose_fields(given, action, text)
