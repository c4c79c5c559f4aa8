"""Training the policy of agent programs that run unmodified."""

from __future__ import annotations

import base64
import io
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from PIL import Image

from lightning_agentrl.advantages import GiGPO
from lightning_agentrl.engines import Reply, SamplingRequest, TransformersEngine
from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.errors import CheckpointError, ConfigError, EnvError
from lightning_agentrl.rollout import AgentProgram, RolloutDataModule, TurnInteraction, ValidationConfig
from lightning_agentrl.types import Rollout, Sample, StopReason
from tests.agents.harness import KeepRollouts, make_agent, make_trainer
from tests.tiny import tiny_vision_folder
from tests.types.samples import action, prompt, turn

SCRIPT = Path(__file__).parents[1] / "gateway" / "agents" / "guess.py"


def program(tmp_path: Path, *arguments: str, **settings: Any) -> AgentProgram:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"hint": "It is odd."}\n{"hint": "It is even."}\n')
    settings = {"preload": ["urllib.request", "random"], **settings}
    return AgentProgram([sys.executable, str(SCRIPT), *arguments], str(tasks), **settings)


def make_data(env: AgentProgram, **settings: Any) -> RolloutDataModule:
    sizes = {} if "groups" in settings else {"turns_per_env": 6, "mini_batch_turns": 12}
    defaults: dict[str, Any] = {
        "num_envs": 4,
        **sizes,
        "interaction": TurnInteraction(max_reply_tokens=5),
        "validation": ValidationConfig(episodes=2, num_envs=2),
        "seed": 5,
    }
    return RolloutDataModule(env, **{**defaults, **settings})


def train(tmp_path: Path, folder: Path, env: AgentProgram, iterations: int = 2, **settings: Any) -> list[Rollout]:
    seen = KeepRollouts()
    torch.manual_seed(0)
    make_trainer(tmp_path, iterations, [seen]).fit(make_agent(folder), make_data(env, **settings))
    return seen.rollouts


class Noting(TransformersEngine):
    """Notes what was read for each reply."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[tuple[float, ...], tuple[int, ...]] = {}  # by the log-probs of the reply

    async def generate(self, request: SamplingRequest) -> Reply:
        reply = await super().generate(request)
        self.read[reply.logps] = request.prompt.ids
        return reply


@pytest.mark.slow
@pytest.mark.parametrize("style", ["plain", "mixed"])
def test_a_row_holds_before_each_reply_the_very_tokens_that_were_read_for_it(
    tmp_path: Path, tiny_folder: Path, style: str
) -> None:
    engine = Noting()
    rollouts = train(tmp_path, tiny_folder, program(tmp_path, style), engine=engine)
    samples = [sample for rollout in rollouts for sample in rollout.samples]
    placed = [(sample, one) for sample in samples for one in sample.placed_turns()]
    assert len(placed) == 48
    for sample, one in placed:
        assert sample.input.ids[: one.start] == engine.read[one.action.logps]


@pytest.mark.slow
@pytest.mark.parametrize("style", ["plain", "mixed"])
def test_calls_that_go_on_share_a_row(tmp_path: Path, tiny_folder: Path, style: str) -> None:
    rollouts = train(tmp_path, tiny_folder, program(tmp_path, style))
    for rollout in rollouts:
        assert len(rollout.turns) == 24
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    rows = sum(len(rollout) for rollout in rollouts)
    assert all(turn.call for turn in turns)
    assert any(turn.terminated for turn in turns)
    if style == "plain":
        begun = {(turn.env, turn.episode) for turn in turns}
        assert rows <= len(begun) + 4 * len(rollouts)  # a row each, and one more where a rollout cuts an episode
    else:
        assert any("You advise" in turn.observation for turn in turns)
        assert rows > len({(turn.env, turn.episode) for turn in turns})


@pytest.mark.slow
def test_equal_runs_are_equal_to_the_bit(tmp_path: Path, tiny_folder: Path) -> None:
    one, other = (train(tmp_path / name, tiny_folder, program(tmp_path, "mixed")) for name in ("a", "b"))
    for first, second in zip(one, other, strict=True):
        assert [turn.reply for turn in first.turns] == [turn.reply for turn in second.turns]
        assert torch.equal(first.rollout_logps, second.rollout_logps)
        assert torch.equal(first.rewards, second.rewards)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["plain", "mixed"])
def test_a_run_goes_on_with_agents_that_were_cut_in_the_middle(tmp_path: Path, tiny_folder: Path, style: str) -> None:
    whole = train(tmp_path / "whole", tiny_folder, program(tmp_path, style), iterations=3)
    last = ModelCheckpoint(tmp_path / "part", filename="last", save_on_train_epoch_end=True)
    torch.manual_seed(0)
    make_trainer(tmp_path / "part", 1, [last], enable_checkpointing=True).fit(
        make_agent(tiny_folder), make_data(program(tmp_path, style))
    )
    seen = KeepRollouts()
    make_trainer(tmp_path / "part", 3, [seen]).fit(
        make_agent(tiny_folder), make_data(program(tmp_path, style)), ckpt_path=str(tmp_path / "part" / "last.ckpt")
    )
    for first, second in zip(whole[1:], seen.rollouts, strict=True):
        assert [(turn.call, turn.reply) for turn in first.turns] == [(turn.call, turn.reply) for turn in second.turns]
        assert torch.equal(first.rollout_logps, second.rollout_logps)
        assert torch.equal(first.rewards, second.rewards)


@pytest.mark.slow
def test_agents_that_say_no_reward_are_told(tmp_path: Path, tiny_folder: Path) -> None:
    script = tmp_path / "silent.py"
    script.write_text(
        SCRIPT.read_text()
        .replace('json.dump({"reward": float(won)}, file)', "pass")
        .replace('os.environ["AGENTRL_RESULT"]', "os.devnull")
    )
    silent = program(tmp_path)
    silent.command[1] = str(script)
    with pytest.raises(ConfigError, match="AGENTRL_RESULT"):
        train(tmp_path, tiny_folder, silent)


def test_wrong_settings_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    good = program(tmp_path)
    with pytest.raises(ValueError, match=r"env.command: there is no program 'no-such'"):
        make_data(AgentProgram(["no-such"], good.tasks))
    with pytest.raises(ValueError, match=r"env.command names the file 'gone.py'"):
        make_data(AgentProgram([sys.executable, "gone.py"], good.tasks))
    with pytest.raises(ValueError, match=r"no task file 'gone.jsonl' \(key data.init_args.env.tasks\)"):
        make_data(AgentProgram(good.command, "gone.jsonl"))
    for text, what in (("\n", "is empty"), ('{"a": 1}\n{"a"\n', "line 2 of .* not JSON"), ("[1]", "line 1 .* object")):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(ValueError, match=what):
            make_data(AgentProgram(good.command, str(tmp_path / "bad.jsonl")))
    for wrong, what in (
        ({"command": good.command, "run": "a:b"}, "give either .*env.command"),
        ({}, "give either .*env.command"),
        ({"run": "solve"}, "write module:function"),
        ({"run": "no_such_module:solve"}, "there is no module 'no_such_module'"),
        ({"command": ["bash", "-c", "true"], "preload": ["openai"]}, "preload needs a command that begins with python"),
    ):
        with pytest.raises(ValueError, match=what):
            make_data(AgentProgram(tasks=good.tasks, **wrong))


@pytest.mark.parametrize("style", ["tools", "long"])
def test_a_first_call_that_no_model_can_read_is_refused_before_weights_are_read(
    tmp_path: Path, tiny_folder: Path, style: str
) -> None:
    script = tmp_path / "agent.py"
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a " * (3000 if style == "long" else 1)}]}
    if style == "tools":
        body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    script.write_text(
        f"import os\nfrom urllib import request\nrequest.urlopen(request.Request(os.environ['OPENAI_BASE_URL']"
        f" + '/chat/completions', {json.dumps(body).encode()!r}))"
    )
    source = program(tmp_path)
    source.command[1:] = [str(script)]
    unread = tmp_path / "model"
    shutil.copytree(tiny_folder, unread, ignore=shutil.ignore_patterns("*.safetensors"))
    what = {"tools": "leaves out tools", "long": "the first call of the agent has .* tokens, over the limit of"}[style]
    with pytest.raises(ValueError, match=what):
        train(tmp_path, unread, source, iterations=1)


@pytest.mark.long
def test_every_reply_that_an_agent_got_is_one_turn_whatever_its_client_does(tmp_path: Path, tiny_folder: Path) -> None:
    """1,000 episodes; a tenth of the calls time out, are sent again, or lose their connection."""
    said = tmp_path / "said"
    said.mkdir()
    source = program(tmp_path)
    source.command[1:] = [str(SCRIPT.with_name("careless.py")), str(said)]
    rollouts = train(tmp_path, tiny_folder, source, iterations=4, num_envs=8, turns_per_env=94, mini_batch_turns=376)
    recorded: dict[int, list[str]] = {}
    ended, abandoned = set[int](), 0.0
    for t in sorted((t for rollout in rollouts for t in rollout.turns), key=lambda t: (t.env, t.episode, t.index)):
        seed = derive_seed(5, t.env, t.episode)
        assert t.episode >= 0
        assert not t.lost
        recorded.setdefault(seed, []).append(t.reply)
        if t.terminated:
            ended.add(seed)
            abandoned += t.metrics["agent/abandoned"]
    print(f"{sum(map(len, recorded.values()))} turns of {len(ended)} whole episodes, {abandoned:g} abandoned")
    assert len(ended) >= 990
    assert abandoned == 0
    for seed in ended:
        assert recorded[seed] == json.loads((said / str(seed)).read_text())


POSTING = """
import json, os
from urllib import request

def post(path, **body):
    with request.urlopen(request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode())) as answer:
        return json.load(answer)

names = [post("/chat/completions", messages=[{"role": "user", "content": f"{i}"}])["id"] for i in range(4)]
post("/reward", id=names[1], reward=0.25)
post("/reward", id=names[3], reward=0.5)
post("/reward", reward=1.0)
"""


@pytest.mark.parametrize("turns", [2, 8])  # rollouts that end in the middle of episodes, and such as hold two
def test_the_return_of_an_episode_is_the_sum_of_its_rewards_wherever_they_are_posted(
    tmp_path: Path, tiny_folder: Path, turns: int
) -> None:
    source = program(tmp_path)
    (tmp_path / "posting.py").write_text(POSTING)
    source.command[1:] = [str(tmp_path / "posting.py")]
    sizes = {"num_envs": 2, "turns_per_env": turns, "mini_batch_turns": 2 * turns}
    rollouts = train(tmp_path, tiny_folder, source, iterations=16 // turns, **sizes)
    episodes: dict[tuple[int, int], list[float]] = {}
    for one in (one for rollout in rollouts for one in rollout.turns):
        rewards = episodes.setdefault((one.env, one.episode), [])
        rewards.append(one.env_reward)
        assert one.reward == one.env_reward
        if one.done or turns == 8:
            assert one.episode_return == sum(rewards)
    # Where the rollout of the second call is over, its reward goes to the turn at which it is posted.
    assert list(episodes.values()) == [[0, 0.25, 0, 1.5] if turns == 8 else [0, 0, 0, 1.75]] * 8


FUNCTION = """
import json, os
from urllib import request

where = os.getpid(), os.getppid()

async def solve(task):
    body = json.dumps({"messages": [{"role": "user", "content": f"{task['hint']} {os.environ.get('MARK', '')}"}]})
    with request.urlopen(request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body.encode())) as answer:
        json.load(answer)
    return 0.5
"""


@pytest.mark.slow
@pytest.mark.parametrize("preload", [[], ["json", "urllib.request"]])
def test_a_function_is_called_in_processes_of_its_own(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, preload: list[str]
) -> None:
    package = tmp_path / "of_a_user"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "mine.py").write_text(FUNCTION)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = program(tmp_path)
    source = AgentProgram(run="of_a_user.mine:solve", tasks=source.tasks, preload=preload)
    rollouts = train(tmp_path, tiny_folder, source, iterations=1)
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    assert len(turns) == 24
    assert all(turn.terminated and turn.reward == 0.5 for turn in turns)
    assert "of_a_user" not in sys.modules
    assert "mine.py" in source.files


def resumed(tmp_path: Path, folder: Path, first: AgentProgram, then: AgentProgram, *accepted: str) -> list[Rollout]:
    """Train one iteration with the first, and go on with the other."""
    last = ModelCheckpoint(tmp_path / "part", filename="last", save_on_train_epoch_end=True)
    torch.manual_seed(0)
    make_trainer(tmp_path, 1, [last], enable_checkpointing=True).fit(make_agent(folder), make_data(first))
    seen, agent = KeepRollouts(), make_agent(folder)
    agent.resume_with_changes = accepted
    path = str(tmp_path / "part" / "last.ckpt")
    make_trainer(tmp_path, 2, [seen]).fit(agent, make_data(then), ckpt_path=path)
    return seen.rollouts


@pytest.mark.slow
def test_a_run_goes_on_with_another_program_or_other_tasks_only_if_that_is_accepted(
    tmp_path: Path, tiny_folder: Path
) -> None:
    first = program(tmp_path)
    script = tmp_path / "guess.py"
    script.write_text(SCRIPT.read_text())
    first.command[1] = str(script)
    (tmp_path / "other").mkdir()
    then = program(tmp_path / "other")
    other = tmp_path / "other" / "guess.py"
    other.write_text(SCRIPT.read_text() + "# changed\n")
    then.command[1] = str(other)
    command, files = "data.init_args.env.command", "data.init_args.env.files"
    with pytest.raises(CheckpointError, match=r"files was 'guess.py \w+, tasks.jsonl \w+' and is 'guess.py \w+, tasks"):
        resumed(tmp_path, tiny_folder, first, then, command, "data.init_args.env.tasks")
    (rollout,) = resumed(tmp_path, tiny_folder, first, then, command, "data.init_args.env.tasks", files)
    assert not any(turn.lost for turn in rollout.turns)


@pytest.mark.slow
def test_an_agent_that_makes_other_calls_is_dropped_and_the_first_difference_shown(
    tmp_path: Path, tiny_folder: Path
) -> None:
    script = tmp_path / "clock.py"
    hint = 'user(json.loads(os.environ["AGENTRL_TASK"])["hint"])'
    assert hint in SCRIPT.read_text()
    script.write_text(SCRIPT.read_text().replace(hint, f'{hint}, {{**user("At " + os.urandom(8).hex())}}'))
    clocked = program(tmp_path, parallel=False)
    clocked.command[1] = str(script)
    with pytest.warns(
        UserWarning, match=r"does not repeat its calls.*call 0, content of message 2 was 'At \w+' and is"
    ):
        (rollout,) = resumed(tmp_path, tiny_folder, clocked, clocked)
    assert len(rollout.turns) == 24
    assert sum(len(turn.lost) for turn in rollout.turns) == 4  # one of each environment
    assert {kind for turn in rollout.turns for kind in turn.lost} == {"replay"}


class Metrics(Callback):
    def __init__(self) -> None:
        self.logged: dict[str, float] = {}

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.logged = {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.slow
def test_metrics_tell_calls_rows_and_the_models_that_calls_name(tmp_path: Path, tiny_folder: Path) -> None:
    seen, metrics = KeepRollouts(), Metrics()
    agent = make_agent(tiny_folder, kl_loss=0.0)
    make_trainer(tmp_path, 1, [seen, metrics]).fit(agent, make_data(program(tmp_path, "mixed"), turns_per_env=12))
    (rollout,), logged = seen.rollouts, metrics.logged
    for name in ("calls", "rows", "continued", "earlier", "anew", "abandoned", "no_reward"):
        assert logged[f"agent/{name}"] >= 0, name
    assert logged["agent/calls"] == logged["agent/continued"] + logged["agent/rows"]
    assert logged["agent/no_reward"] == logged["agent/abandoned"] == 0
    for model in ("player", "adviser"):
        own = [turn for turn in rollout.turns if turn.model == model]
        assert logged[f"agent/model/{model}/reward"] == pytest.approx(sum(turn.reward for turn in own) / len(own))
        assert 1 <= logged[f"agent/model/{model}/reply_tokens"] <= 5
        assert logged[f"agent/model/{model}/entropy"] > 0


def advantages(states: Sequence[Sequence[dict[str, str]]]) -> list[list[float]]:
    """GiGPO's, of two episodes of a group whose turns have these fields."""
    samples = []
    for env, fields in enumerate(states):
        segments = [segment for index in range(len(fields)) for segment in (prompt(1, 2 + index), action(11))]
        ends = {"terminated": True, "stop": StopReason.ENV_DONE}
        turns = [
            turn(env=env, index=index, group=0, reward=float(env + index), **one, **(ends if index else {}))
            for index, one in enumerate(fields)
        ]
        samples.append(Sample(tuple(segments), tuple(turns)))
    return GiGPO().estimate(Rollout.from_samples(samples))[0].tolist()


def test_two_calls_with_equal_last_words_are_two_states_to_gigpo() -> None:
    calls = [[{"observation": "ok", "call": f"{digest}#0"} for digest in own] for own in ("ab", "ac")]
    texts = [[{"observation": text} for text in own] for own in ("ab", "ac")]
    assert advantages(calls) == advantages(texts)
    again = [[{"observation": "ok", "call": f"a#{index}"} for index in range(2)] for _ in range(2)]
    assert advantages(again) == advantages([[{"observation": "a"}] * 2] * 2) != advantages(calls)


LOOKER = """
import json, os
from urllib import request

task = json.loads(os.environ["AGENTRL_TASK"])
def ask(messages):
    body = json.dumps({"messages": messages}).encode()
    with request.urlopen(request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)) as answer:
        return json.load(answer)["choices"][0]["message"]
parts = [{"type": "text", "text": "Where is it?"}, {"type": "image_url", "image_url": {"url": task["image"]}}]
messages = [{"role": "user", "content": parts}]
for text in ("sure?", "really?"):
    messages += [ask(messages), {"role": "user", "content": text}]
with open(os.environ["AGENTRL_RESULT"], "w") as file:
    json.dump({"reward": 1.0}, file)
"""


def picture(value: int) -> str:
    """An image of 32 x 48 pixels as the URL of a message."""
    file = io.BytesIO()
    Image.fromarray(np.full((48, 32, 3), value, np.uint8)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def looking(tmp_path: Path, url: str) -> AgentProgram:
    (tmp_path / "looker.py").write_text(LOOKER)
    (tmp_path / "pictures.jsonl").write_text(json.dumps({"image": url}) + "\n")
    command = [sys.executable, str(tmp_path / "looker.py")]
    return AgentProgram(command, str(tmp_path / "pictures.jsonl"), preload=["urllib.request"])


@pytest.mark.slow
def test_a_model_that_reads_images_sees_those_of_a_call(tmp_path: Path) -> None:
    folder = tiny_vision_folder(tmp_path / "vision", "qwen3_vl")
    engine = Noting()
    source = looking(tmp_path, picture(200))
    (rollout,) = train(tmp_path, folder, source, iterations=1, engine=engine, num_envs=2)
    assert len(rollout.turns) == 12
    assert any(turn.terminated and turn.reward == 1.0 for turn in rollout.turns)
    for sample in rollout.samples:
        (image,) = sample.input.images
        assert image.pixels is not None
        assert set(np.asarray(image.pixels).ravel()) == {200}
        for one in sample.placed_turns():
            assert sample.input.ids[: one.start] == engine.read[one.action.logps]
    first = [turn.call for turn in rollout.turns if turn.index == 0]
    assert len(set(first)) == 1


@pytest.mark.slow
def test_images_are_refused_by_a_model_without_eyes_and_from_the_net(tmp_path: Path, tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="reads text only"):
        train(tmp_path, tiny_folder, looking(tmp_path, picture(3)), iterations=1)
    with pytest.raises(EnvError, match="a call was refused: an image must be a URL data:"):
        train(tmp_path, tiny_folder, looking(tmp_path, "http://127.0.0.1/x.png"), iterations=1)


class SamplesOn(TransformersEngine):
    """Does not end where a call says, as vLLM does not."""

    async def generate(self, request: SamplingRequest) -> Reply:
        return await super().generate(replace(request, stop=()))


@pytest.mark.slow
def test_stop_ends_a_reply_with_any_engine_at_the_token_that_completes_it(tmp_path: Path, tiny_folder: Path) -> None:
    stopping = tmp_path / "stopping.py"
    stopping.write_text(
        SCRIPT.read_text().replace('"messages": messages,', '"messages": messages, "stop": ["e", " "],')
    )
    source = program(tmp_path)
    source.command[1] = str(stopping)
    rows = []
    for engine in (TransformersEngine(), SamplesOn()):
        settings = {"engine": engine, "interaction": TurnInteraction(max_reply_tokens=24)}
        (rollout,) = train(tmp_path, tiny_folder, source, iterations=1, **settings)
        rows.append([(sample.ids, [one.logps for one in sample.actions]) for sample in rollout.samples])
        ended = [turn for turn in rollout.turns if any(stop in turn.reply for stop in ("e", " "))]
        assert ended
        assert all(turn.reply.count("e") <= 1 for turn in ended)
    assert [ids for ids, _ in rows[0]] == [ids for ids, _ in rows[1]]
