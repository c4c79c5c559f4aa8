"""`agentrl play`: a person reads exactly what the model would read, and the same turn loop takes the replies."""

from __future__ import annotations

import asyncio
import io
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import pytest
import yaml
from PIL import Image

from agentrl_envs import TextEnv
from lightning_agentrl.engines import Engine, PolicyHandle, Reply, SamplingRequest
from lightning_agentrl.episodes.env_pool import EnvPool
from lightning_agentrl.models.loading import load_tokenizer
from lightning_agentrl.prompts.messages import PromptFormat
from lightning_agentrl.prompts.renderer import ChatRenderer
from lightning_agentrl.rollout import EnvConfig, Session, TurnInteraction, WindowMemory
from lightning_agentrl.rollout.player import Player
from tests.cli import Config, changed, run_command
from tests.tiny import tiny_vision_folder

GUESS = "agentrl_envs:GuessNumber-v0"
Play = Callable[..., tuple[int, str, str]]


@pytest.fixture
def play(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Play:
    """Play with some typed lines; gives exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(
        typed: str | None, *arguments: str, config: Config | None = None, model: Path = tiny_folder
    ) -> tuple[int, str, str]:
        given = ["--model", str(model)] if config is None else ["--config", "given.yaml"]
        if config is not None:
            (tmp_path / "given.yaml").write_text(yaml.safe_dump(config))
        monkeypatch.setattr(sys, "stdin", None if typed is None else io.StringIO(typed))
        capsys.readouterr()
        code = run_command(monkeypatch, "play", *arguments, *given)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


class Twos(Engine):
    """Replies "2" to whatever it reads, as a model would, and keeps what it read."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self.reply = (*renderer.tokenizer.encode("2", add_special_tokens=False), renderer.template.turn_close_id)
        self.read: list[tuple[int, ...]] = []

    async def generate(self, request: SamplingRequest) -> Reply:
        self.read.append(request.prompt.ids)
        return Reply(self.reply, (0.0,) * len(self.reply), closed=True, policy_version=0)

    def start(self, handle: PolicyHandle) -> None: ...

    def sync(self, policy_version: int) -> None: ...

    def stop(self) -> None: ...


def test_a_person_reads_what_a_model_reads_with_its_tokens(play: Play, tiny_folder: Path, config: Config) -> None:
    data = config["data"]["init_args"]
    data |= {"prompt": {"think": False, "max_prompt_tokens": 900}, "env": {"id": GUESS, "kwargs": {"highest": 9}}}
    data["memory"]["init_args"]["turns"] = 2
    code, out, _ = play("2\n" * 20, GUESS, "--seed", "5", config=config)
    assert code == 0
    tokenizer, words = load_tokenizer(str(tiny_folder)), PromptFormat(think=False, max_prompt_tokens=900)
    renderer = ChatRenderer(tokenizer, words)
    engine, worker = Twos(renderer), EnvConfig(GUESS, {"highest": 9}).make_worker()
    session = Session(0, worker, lambda episode: 5, renderer, WindowMemory(2))
    player = Player(EnvPool([]), renderer, WindowMemory(2), TurnInteraction(4), engine, seed=0)
    asyncio.run(player.play_episode(session))
    session.worker.close()
    assert len(engine.read) > 1
    first = out[: out.index("=== episode 1")]
    assert [int(count) for count in re.findall(r"a prompt of (\d+) tokens", first)] == list(map(len, engine.read))
    texts = [tokenizer.decode(list(ids), clean_up_tokenization_spaces=False) for ids in engine.read]
    assert re.findall(r" ---\n(<.*?)\n--- your reply", first, re.S) == texts


def test_episodes_follow_each_other_until_the_input_ends(play: Play) -> None:
    code, out, err = play(
        "1\n2\n3\n\nTHINK: what\\\nACTION: three\n", GUESS, "--seed", "3", "--kwargs", "{max_turns: 3}"
    )
    assert (code, err) == (0, "")
    assert re.findall(r"=== episode (\d), seed (\d) ===", out)[:2] == [("0", "3"), ("1", "4")]
    assert "'1', the default action" in out  # of the empty reply
    assert "action: '3'; reward" in out  # of the reply of two lines
    assert out.rstrip().splitlines()[-1].startswith("episodes played to the end: ")


class PaysNothingKnown(TextEnv):
    """A reward that is no number."""

    actions: ClassVar = {"go": "go on"}
    default_action = "go"
    system_prompt = "Go."
    max_turns = 2

    def _start(self, seed: int | None, options: Any) -> None: ...

    def _act(self, action: str) -> tuple[float, bool]:
        return math.nan, False

    def _observe(self) -> tuple[str, str]:
        return "Go on.", ""


def test_episodes_that_are_lost_to_faults_are_not_played_to_the_end(play: Play) -> None:
    gymnasium.register(id="PaysNothingKnown-v0", entry_point=PaysNothingKnown)
    _, out, _ = play("go\ngo\n", "PaysNothingKnown-v0")
    assert out.splitlines()[-1] == "episodes played to the end: 0, solved: 0, lost to faults: 2"


def test_a_closed_input_is_one_that_ends_at_once(play: Play) -> None:
    code, out, _ = play(None, GUESS)
    assert (code, out.splitlines()[-1]) == (0, "episodes played to the end: 0, solved: 0")


def test_a_growing_conversation_shows_what_is_new(play: Play, config: Config) -> None:
    config = changed(config, "data.init_args.memory", {"class_path": "FullMemory"})
    config = changed(config, "data.init_args.prompt", {"think": False, "max_prompt_tokens": 900})
    config |= {"ckpt_path": "last", "weights_only": None, "verbose": True}  # as runs and validations save them
    code, out, _ = play("1\n2, because it is neither one nor three\n", GUESS, config=config)
    assert code == 0
    (new, before) = re.findall(r"turn 1: (\d+) new tokens after the (\d+) of the last turn", out)[0]
    (first,) = re.findall(r"turn 0: a prompt of (\d+) tokens", out)
    assert int(before) == int(first) + 2  # the reply and the token that closes it
    assert int(new) > 0
    assert out.count("<|im_start|>system") == 1
    assert "cut after 4 of" in out  # max_reply_tokens of the config


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["agentrl_envs:GuesNumber-v0"], "GuessNumber"),
        ([GUESS, "--kwargs", "{highst: 3}"], "highest"),
        ([GUESS, "--kwargs", "3"], "kwargs"),
        ([GUESS, "--seed", "-1"], "--seed"),
        ([GUESS, "--config", "missing.yaml"], "missing.yaml"),
        ([], "id"),
    ],
)
def test_wrong_input_is_told_in_a_sentence(arguments: list[str], part: str, play: Play) -> None:
    code, out, err = play("1\n", *arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert part in err


def test_a_missing_model_is_told_with_what_named_it(play: Play, config: Config) -> None:
    assert "argument --model" in play("1\n", GUESS, model=Path("/nowhere"))[2]
    config = changed(config, "model.init_args.model", "/nowhere")
    message = play("1\n", GUESS, config=config)[2]
    assert "key model.init_args.model" in message
    assert "--model" not in message


def test_what_is_to_be_seen_is_written_to_a_file(play: Play, tmp_path: Path) -> None:
    model = tiny_vision_folder(tmp_path, "qwen3_vl")
    code, out, err = play("lower left\n", "tests.seen_game:Corner-v0", model=model)
    assert (code, err) == (0, "")
    assert "[image of 9 tokens]" in out
    pictures = re.findall(r"image of the observation: (\S+)", out)
    assert len(pictures) == 2
    with Image.open(pictures[0]) as picture:
        assert picture.size == (48, 48)


@pytest.mark.slow
def test_bytes_that_are_no_text_and_a_terminal_of_few_characters_end_no_game(tiny_folder: Path) -> None:
    command = [sys.executable, "-m", "lightning_agentrl", "play", "agentrl_envs:Bandit-v0", "--model", str(tiny_folder)]
    few = os.environ | {"PYTHONIOENCODING": "ascii"}
    played = subprocess.run(command, input=b"\xff\xfe\n", capture_output=True, env=few, timeout=120, check=False)
    assert (played.returncode, played.stderr) == (0, b"")
    assert b"your reply named none" in played.stdout
