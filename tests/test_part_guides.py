"""Memory, parser, interaction, engine, callback and scheduler of docs/extend.md, and the conversion of a GGUF file."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_agentrl.agents.hooks import Attempt, Verdict
from lightning_agentrl.models.demo import demo_model_folder, find_gguf
from lightning_agentrl.models.loading import load_causal_lm, load_tokenizer
from lightning_agentrl.prompts.memory import PastTurn
from lightning_agentrl.types import Rollout, Sample
from tests.agents.processes import metrics
from tests.cli import Command, Config, changed
from tests.guides import importable, write_files
from tests.types.samples import action, prompt, turn


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The reader's, with the files of the page."""
    write_files("extend.md", tmp_path)
    with importable(tmp_path):
        yield tmp_path


def part(name: str) -> Any:
    return importlib.import_module(name)


def test_the_memory_keeps_the_first_turn_and_the_last(folder: Path) -> None:
    memory = part("my_memory").FirstAndLast(last=2)
    past = [PastTurn(f"room {i}", "", "go") for i in range(6)]
    shown = [[turn.observation for turn in memory.recall(past[:count]).turns] for count in range(7)]
    everything = [turn.observation for turn in past]
    assert shown == [
        everything[:count] if count < 4 else ["room 0", *everything[count - 2 : count]] for count in range(7)
    ]
    fullest = memory.recall(memory.fullest(past[0]))
    assert len(fullest.turns) == 3
    assert fullest.note
    assert "3 turns" in memory.recall(past).note
    assert not memory.recall(past[:3]).note


def test_the_parser_reads_json_and_never_raises(folder: Path) -> None:
    parser = part("my_parser").JSONParser()

    def read(reply: str) -> tuple[str, str | None]:
        parsed = parser.parse(reply, ["turn left", "go"], {"ahead": "go"})
        assert parsed.action is None or reply[parsed.action_start :].startswith('"action"')
        return parsed.thought, parsed.action

    assert read('Sure: {"thought": "a wall", "action": "Turn_left."} ok') == ("a wall", "turn left")
    assert read('{"action": "ahead"}') == ("", "go")
    hopeless = ("", "go", "{", "{}", '{"action": {}}', '["action"]', '{"action": "fly"}', "[" * 5000 + "{" * 5000 + "}")
    assert {read(reply)[1] for reply in hopeless} == {None}


def test_the_callback_stops_an_agent_that_does_the_same_again(folder: Path) -> None:
    callback = part("my_callback").Repetition(most=0.5, patience=2)
    attempt = Attempt(0, 0, {}, {}, {})
    said: list[float] = []

    class Logger:
        def log_metrics(self, numbers: dict[str, float], step: int) -> None:
            said.append(numbers["behavior/repeated"])

    class Trainer:
        loggers, global_step = (Logger(),), 0

    def play(*actions: str) -> Verdict:
        samples = [Sample((prompt(1), action(2)), (turn(index=i, action=a),)) for i, a in enumerate(actions)]
        callback.on_rollout(Trainer, None, Rollout.from_samples(samples[::-1]))
        return callback.before_step(Trainer, attempt)[0]

    verdicts = [play("a", "a", "a"), play("a", "b", "b"), play("b", "b"), play("c", "c")]
    assert said == [1.0, 0.5, 1.0, 1.0]
    assert verdicts == [Verdict.STEP, Verdict.STEP, Verdict.STEP, Verdict.STOP]


@pytest.mark.slow
def test_a_run_with_all_of_them(folder: Path, config: Config, agentrl: Command) -> None:
    """The engine's log-probs are the trainer's, or it would not be its policy; episodes that are stuck are cut."""
    data = config["data"]["init_args"]
    data |= {
        "memory": {"class_path": "my_memory.FirstAndLast"},
        "engine": {"class_path": "my_engine.PlainEngine"},
        "env": {"id": "agentrl_envs:GuessNumber-v0"},
    }
    data["interaction"] = {"class_path": "my_interaction.StopWhenStuck", "init_args": {"patience": 1}}
    data["interaction"]["init_args"] |= {"max_reply_tokens": 4, "parser": {"class_path": "my_parser.JSONParser"}}
    config = changed(config, "model.class_path", "my_rates.Decaying")
    config = changed(config, "trainer.callbacks", [{"class_path": "my_callback.Repetition"}, {"class_path": "TurnLog"}])
    config["trainer"] |= {"max_epochs": 2, "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "devices"}}}
    code, printed = agentrl(config=config)
    assert code == 0, printed
    rows = metrics(folder)
    assert [float(row["mismatch/logp_gap_max"]) < 1e-4 for row in rows if "mismatch/logp_gap_max" in row] == [True] * 2
    assert sum("behavior/repeated" in row for row in rows) == 2
    (log,) = folder.rglob("turns/rank0-*.jsonl")
    turns = [json.loads(line) for line in log.open()]
    assert {turn["turn"] for turn in turns} == {0}
    assert {turn["stop"] for turn in turns} <= {"max_turns", "env_done"}
    checkpoint = torch.load(max(folder.rglob("iteration-*.ckpt")), weights_only=True)
    assert checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(1e-6 * 0.99**2)


@pytest.mark.long
def test_a_gguf_file_becomes_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of the demo model, with the weights that the package itself reads from it."""
    pytest.importorskip("gguf")
    write_files("from_python.md", tmp_path)
    monkeypatch.setattr(sys, "argv", ["convert.py", str(find_gguf()), str(tmp_path / "model")])
    runpy.run_path(str(tmp_path / "convert.py"))
    assert "<|im_start|>" in capsys.readouterr().out
    found, expected = (load_causal_lm(str(path)) for path in (tmp_path / "model", demo_model_folder()))
    assert all(torch.equal(one, other) for one, other in zip(found.parameters(), expected.parameters(), strict=True))
    assert load_tokenizer(str(tmp_path / "model")).chat_template
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "llama"
