"""`agentrl serve-env`: training on its server is training in process, and a server that dies costs one episode."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import gymnasium
import pytest
from aiohttp import ClientSession, ClientWebSocketResponse, WSCloseCode, WSServerHandshakeError, web

from lightning_agentrl.commands.serve_env import _Played, environment_app
from lightning_agentrl.distributed import over_ranks
from lightning_agentrl.episodes.env_worker import make_worker
from lightning_agentrl.episodes.recipe import Recipe
from lightning_agentrl.episodes.session import Session
from lightning_agentrl.metrics.rollout import rollout_numbers
from lightning_agentrl.types import StopReason
from tests.cli import Command, Config, changed, fit, run_command, sentence, three_iterations
from tests.envs.servers import serving
from tests.rollout.scripted import Scripted, workplace
from tests.started import forkserver

TIMES = ("seconds", "time")  # of a turn; all else has to be equal


class Server:
    """The command in a process of its own."""

    def __init__(self, env_id: str, *options: str) -> None:
        self.command = ["serve-env", env_id, *options]
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        with TemporaryDirectory() as folder:
            said = Path(folder, "said")
            os.mkfifo(said)
            self.process = forkserver().Process(target=serve, args=(said, [*self.command, "--port", str(self.port)]))
            self.process.start()
            self.said = said.open()
        assert self.url in self.said.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.said.close()


def serve(said: Path, command: Sequence[str]) -> None:
    """Run the command, which writes to this file."""
    os.dup2(os.open(said, os.O_WRONLY), 1)
    sys.stdout = open(1, "w", buffering=1)  # noqa: SIM115 - as long as the process
    with pytest.MonkeyPatch.context() as patch:
        sys.exit(run_command(patch, *command))


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(*request.param)
    yield server
    server.kill()


GUESS = ("agentrl_envs:GuessNumber-v0", "--kwargs.highest", "6")


@pytest.mark.slow
@pytest.mark.parametrize("server", [GUESS], indirect=True)
def test_training_on_a_server_is_training_in_process(
    server: Server, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs = {
        "here": {"id": "agentrl_envs:GuessNumber-v0", "kwargs": {"highest": 6}},
        "there": {"id": "agentrl_envs:OpenEnv-v0", "kwargs": {"url": server.url}},
    }
    turns = {}
    for name, env in envs.items():
        folder = tmp_path / name
        folder.mkdir()
        given = three_iterations(changed(config, "data.init_args.env", env))
        given["trainer"]["default_root_dir"] = str(folder)
        given["data"]["init_args"] |= {"turns_per_env": 4, "memory": {"class_path": "WindowMemory"}}
        given["data"]["init_args"]["interaction"]["init_args"]["max_reply_tokens"] = 8
        fit(given, folder, monkeypatch)
        turns[name] = [without_times(line) for log in sorted(folder.rglob("turns/*.jsonl")) for line in log.open()]
    assert turns["here"] == turns["there"]
    assert len(turns["here"]) >= 3 * 4 * 4  # and those of validation


def without_times(line: str) -> dict[str, Any]:
    turn = json.loads(line)
    turn["metrics"] = {name: value for name, value in turn.get("metrics", {}).items() if name != "no_reward"}
    return {name: value for name, value in turn.items() if not name.endswith(TIMES) and name != "run_id"}


@pytest.mark.slow
@pytest.mark.parametrize("server", [GUESS], indirect=True)
def test_a_server_that_is_killed_costs_one_episode(server: Server, tiny_folder: Path) -> None:
    """Its episode ends truncated and is counted by kind; the next reset opens a socket of the server that came back."""
    steps, sockets = 0, []

    class Killing(gymnasium.Wrapper):
        def reset(self, **settings: Any) -> Any:
            answer = super().reset(**settings)
            sockets.append(self.unwrapped._connection)
            return answer

        def step(self, action: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == 2:
                server.kill()
                server.start()
            return super().step(action)

    def make() -> gymnasium.Env:
        return Killing(gymnasium.make("agentrl_envs:OpenEnv-v0", url=server.url, disable_env_checker=True))

    with workplace(tiny_folder, [Scripted()]) as place:
        old = place.sessions[0]
        place.sessions = [Session(0, place.worker(make, retries=2), old.episode_seed, place.renderer, old.memory)]
        with pytest.warns(UserWarning, match="socket .* is lost.*its episode is lost"):
            rollout = place.collect(4)
        place.sessions[0].worker.close()
    turns = rollout.turns
    assert [(turn.episode, turn.index) for turn in turns] == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert (turns[0].truncated, turns[0].terminated, turns[0].stop) == (True, False, StopReason.ENV_FAULT)
    assert [turn.lost for turn in turns] == [("LostSocketError",), (), (), ()]
    numbers = over_ranks(rollout_numbers(rollout))
    assert numbers["env/lost/LostSocketError"] == 1.0
    assert sockets[0] is not sockets[1]
    assert all(socket is sockets[1] for socket in sockets[1:])


REFUSED = {
    "id": (["agentrl_envs:Bandt-v0"], "did you mean agentrl_envs:Bandit-v0"),
    "argument": (["agentrl_envs:Bandit-v0", "--kwargs.arm", "2"], "no argument 'arm'"),
    "value": (["agentrl_envs:Bandit-v0", "--kwargs.arms", "7"], "2 to 3 arms"),
    "port": (["agentrl_envs:Bandit-v0", "--port", "70000"], "port 70000: "),
    "host": (["agentrl_envs:Bandit-v0", "--host", "999.0.0.1", "--token", "secret"], "--host"),
    "open to other machines": (["agentrl_envs:Bandit-v0", "--host", "0.0.0.0"], "--token"),
    "variable not set": (["agentrl_envs:Bandit-v0", "--token", "${NO_SUCH_TOKEN}"], "NO_SUCH_TOKEN"),
    "no text": (["CartPole-v1"], "observations must be text"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_cannot_be_served_is_told_in_one_sentence(wrong: str, agentrl: Command) -> None:
    arguments, message = REFUSED[wrong]
    assert message in sentence(agentrl(*arguments, command="serve-env"))


class Unmeasured(gymnasium.Env[str, str]):
    """Reports numbers that are none."""

    observation_space = action_space = gymnasium.spaces.Text(9)

    def reset(self, **settings: Any) -> tuple[str, dict[str, Any]]:
        return "a", {"progression": math.nan, "metrics": {"speed": math.inf, "steps": 0.0}}


gymnasium.register("Unmeasured-v0", Unmeasured)


class Twice(Unmeasured):
    """Says of its end that it is both: the game is over, and cut off, as gymnasium's wrapper does at its limit."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "over", 1.0, True, True, {}


gymnasium.register("Twice-v0", Twice)


def test_an_end_that_is_also_a_cut_is_the_end_that_it_is_in_process() -> None:
    recipe = Recipe("tests.commands.test_serve_env:Twice-v0", {}, "env")

    async def last() -> dict[str, Any] | None:
        with ThreadPoolExecutor(1) as pool:
            played = _Played(make_worker(recipe, pool))
            await played.reply('{"type": "reset", "data": {"seed": 1}}')
            return await played.reply('{"type": "step", "data": {"text": "a"}}')

    answer = asyncio.run(last())
    assert answer is not None
    assert (answer["data"]["done"], answer["data"]["metadata"]["truncated"]) == (True, False)


class NeverBack(Unmeasured):
    """Takes a step that does not come back."""

    actions = {"wait": "for ever"}

    def step(self, action: str) -> Any:
        time.sleep(1000.0)


gymnasium.register("NeverBack-v0", NeverBack)


@pytest.mark.parametrize("server", [("tests.commands.test_serve_env:NeverBack-v0",)], indirect=True)
@pytest.mark.slow
def test_a_server_ends_when_told_to_although_a_step_does_not(server: Server) -> None:
    async def play() -> None:
        async with ClientSession() as session, session.ws_connect(f"{server.url}/ws") as connected:
            await connected.send_json({"type": "reset", "data": {}})
            await connected.receive_json(timeout=30.0)
            await connected.send_json({"type": "step", "data": {"text": "wait"}})
            await asyncio.sleep(0.5)
            os.kill(server.process.pid, signal.SIGINT)
            assert (await connected.receive(timeout=30.0)).type.name == "CLOSE"

    asyncio.run(play())
    server.process.join(30.0)
    assert server.process.exitcode == 0


class BackLater(NeverBack):
    """Takes steps that come back when the test says so, and notes what is called."""

    back = threading.Event()
    calls: ClassVar[list[str]] = []

    def step(self, action: str) -> Any:
        self.calls.append("step begins")
        self.back.wait(30.0)
        self.calls.append("step ends")
        return "b", 0.0, False, False, {}

    def close(self) -> None:
        self.calls.append("close")


gymnasium.register("BackLater-v0", BackLater)

Connect = Callable[[], AbstractAsyncContextManager[ClientWebSocketResponse]]
RESET: dict[str, Any] = {"type": "reset", "data": {}}
BACK_LATER = "tests.commands.test_serve_env:BackLater-v0"
STEP = {"type": "step", "data": {"text": "wait"}}


@asynccontextmanager
async def listening(name: str, sessions: int = 1, token: str = "") -> AsyncIterator[str]:
    """Serve this environment in this process; yield the address."""
    runner = web.AppRunner(environment_app(Recipe(name, {}, "env"), sessions, token), shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def places(name: str, sessions: int) -> AsyncIterator[Connect]:
    """A server of this environment in this process; gives what opens a socket."""
    async with listening(name, sessions) as url, ClientSession() as session:
        yield lambda: session.ws_connect(f"{url}/ws")


async def entered(connect: Connect) -> str:
    """Begin an episode at another socket; return why that was refused, else nothing."""
    async with connect() as connected:
        await connected.send_json(RESET)
        answer = await connected.receive_json(timeout=30.0)
        return answer["data"]["message"] if answer["type"] == "error" else ""


async def until_entered(connect: Connect) -> None:
    async with asyncio.timeout(20.0):
        while await entered(connect):
            await asyncio.sleep(0.05)


def test_a_client_that_leaves_in_a_step_without_end_leaves_its_place_where_a_process_can_be_ended() -> None:
    async def play() -> None:
        async with places("tests.episodes.small_envs:Gambling-v0", 1) as connect:
            async with connect() as connected:
                await connected.send_json(RESET)
                await connected.receive_json(timeout=30.0)
                await connected.send_json({"type": "step", "data": {"text": "hangs"}})
                assert "1 of 1" in await entered(connect)
            await until_entered(connect)

    asyncio.run(play())


@pytest.mark.parametrize("sessions", [1, 2])
def test_a_client_that_leaves_in_a_step_leaves_its_place_when_that_ends(sessions: int) -> None:
    """Its environment is closed after the step and not beside it, and plays nothing that it had asked for later."""
    BackLater.calls.clear()
    BackLater.back.clear()

    async def play() -> None:
        async with places(BACK_LATER, sessions) as connect, AsyncExitStack() as others:
            for _ in range(sessions - 1):
                await others.enter_async_context(connect())
            async with connect() as connected:
                await connected.send_json(RESET)
                await connected.receive_json(timeout=30.0)
                for _ in range(3):
                    await connected.send_json(STEP)
                while not BackLater.calls:
                    await asyncio.sleep(0.01)
            refused = [await entered(connect) for _ in range(5)][-1]
            assert re.search(rf"{sessions} of {sessions} .* 1 of them .* clients that have disconnected", refused)
            BackLater.back.set()
            await until_entered(connect)

    asyncio.run(play())
    assert BackLater.calls[:3] == ["step begins", "step ends", "close"]
    assert BackLater.calls.count("step begins") == 1


def test_what_a_client_has_asked_for_is_answered_in_order_before_its_close() -> None:
    async def play() -> list[str]:
        BackLater.back.set()
        async with places(BACK_LATER, 1) as connect, connect() as connected:
            for message in (RESET, STEP, {"type": "state"}, {"type": "nothing"}, {"type": "close"}):
                await connected.send_json(message)
            answers = [await connected.receive(timeout=30.0) for _ in range(5)]
            assert (answers[-1].type.name, answers[-1].data) == ("CLOSE", 1000)
            return [json.loads(answer.data)["type"] for answer in answers[:-1]]

    assert asyncio.run(play()) == ["observation", "observation", "state", "error"]


async def closed_after(text: str, count: int) -> int | None:
    """Send messages while a step hangs; return the code with which the server closes the socket."""
    BackLater.calls.clear()
    BackLater.back.clear()
    try:
        async with places(BACK_LATER, 1) as connect, connect() as connected:
            for message in (RESET, STEP):
                await connected.send_json(message)
            await connected.receive_json(timeout=30.0)
            with suppress(ConnectionError):
                for _ in range(count):
                    await connected.send_str(text)
            with suppress(TypeError):  # of the close
                await connected.receive_json(timeout=30.0)
            return connected.close_code
    finally:
        BackLater.back.set()


def test_a_client_that_sends_without_waiting_is_disconnected() -> None:
    assert asyncio.run(closed_after("x" * 2**20, 60)) == WSCloseCode.POLICY_VIOLATION
    assert BackLater.calls[0] == "step begins"


def test_a_message_over_the_limit_closes_the_socket() -> None:
    codes = (WSCloseCode.MESSAGE_TOO_BIG, WSCloseCode.ABNORMAL_CLOSURE)  # the second one while the client still sends
    assert asyncio.run(closed_after("x" * 20 * 2**20, 1)) in codes


async def statuses(token: str, headers: Mapping[str, str]) -> set[int]:
    """Return the answers to a request and to a handshake with these headers."""
    name = "tests.commands.test_serve_env:Unmeasured-v0"
    async with listening(name, token=token) as url, ClientSession(headers=headers) as session:
        async with session.get(f"{url}/schema") as answer:
            found = {answer.status}
        try:
            async with session.ws_connect(f"{url}/ws"):
                return found | {200}
        except WSServerHandshakeError as error:
            return found | {error.status}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:8000", "Origin": "http://localhost:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "rebound.example:8000"}, 403),
        ({"Host": "rebound.example", "Origin": "http://rebound.example"}, 403),
        ({"Origin": "https://elsewhere.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_pages_of_other_sites_are_refused(headers: dict[str, str], status: int) -> None:
    assert asyncio.run(statuses("", headers)) == {status}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer other"}, 401),
        ({"Authorization": "secret"}, 401),
        ({"Authorization": "Basic !"}, 401),
        ({"Authorization": "Bearer secret"}, 200),
        ({"Authorization": f"Basic {b64encode(b'agent:secret').decode()}"}, 200),
        ({"Authorization": "Bearer secret", "Host": "my-server:8000"}, 200),
        ({"Authorization": "Bearer secret", "Origin": "https://elsewhere.example"}, 403),
    ],
)
def test_clients_must_send_the_token(headers: dict[str, str], status: int) -> None:
    assert asyncio.run(statuses("secret", headers)) == {status}


def test_our_client_sends_its_token() -> None:
    recipe = Recipe("agentrl_envs:GuessNumber-v0", {}, "env")
    with serving(environment_app(recipe, 1, "secret")) as url:
        env = gymnasium.make("agentrl_envs:OpenEnv-v0", url=url, token="secret", disable_env_checker=True)
        env.reset(seed=0)
        env.step("1")
        env.close()
        with pytest.raises(ValueError, match="token"):
            gymnasium.make("agentrl_envs:OpenEnv-v0", url=url, disable_env_checker=True)


def test_numbers_that_json_does_not_have_are_not_sent() -> None:
    recipe = Recipe("tests.commands.test_serve_env:Unmeasured-v0", {}, "env")

    async def first() -> dict[str, Any] | None:
        with ThreadPoolExecutor(1) as pool:
            worker = make_worker(recipe, pool)
            try:
                return await _Played(worker).reply('{"type": "reset", "data": {"seed": 1}}')
            finally:
                await worker.aclose()

    answer = asyncio.run(first())
    assert answer is not None
    json.dumps(answer, allow_nan=False)
    assert answer["data"]["metadata"]["metrics"] == {"steps": 0.0}


WRONG_URLS = {
    "nobody": ("http://127.0.0.1:9", "no server answers at http://127.0.0.1:9"),
    "no address": ("127.0.0.1:9", "must be the address of a server"),
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG_URLS)
def test_a_run_with_a_wrong_url_ends_in_one_sentence(wrong: str, agentrl: Command, config: Config) -> None:
    url, message = WRONG_URLS[wrong]
    env = {"id": "agentrl_envs:OpenEnv-v0", "kwargs": {"url": url}}
    assert message in sentence(agentrl(config=changed(config, "data.init_args.env", env)))
