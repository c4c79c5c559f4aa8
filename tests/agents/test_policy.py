"""A policy in Python reads and writes the tokens of its run, whoever steps the environment."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from lightning_agentrl import Policy
from lightning_agentrl.agents.saved_policy import find_policy
from lightning_agentrl.callbacks import TurnLog
from lightning_agentrl.commands.export import export_checkpoint
from lightning_agentrl.episodes.seeds import held_out_seeds
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.rollout import EnvConfig, FullMemory, TurnInteraction, WindowMemory, Wording
from lightning_agentrl.rollout.policy_settings import SETTINGS_FILE, PolicySettings
from lightning_agentrl.rollout.validation import WholeEpisode
from tests.agents.harness import ByLength, make_agent, make_data, make_trainer

GUESS = "agentrl_envs:GuessNumber-v0"
Ids = list[tuple[tuple[int, ...], tuple[int, ...]]]  # of the prompt and the reply of each turn
SETTINGS: dict[str, dict[str, Any]] = {
    "window": {
        "memory": WindowMemory(2),
        "env": EnvConfig(GUESS, wording=Wording(system_prompt="Find the number.", examples=[("nothing", "3")])),
        "interaction": TurnInteraction(4, parser=ByLength()),
    },
    "full": {"memory": FullMemory(), "interaction": TurnInteraction(4, ask_again=1, max_turns=6)},
}


@pytest.fixture(scope="module", params=SETTINGS)
def run(request: pytest.FixtureRequest, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run that has validated after its one iteration, with its checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    trainer = make_trainer(folder, 1, [TurnLog()], limit_val_batches=1.0)
    trainer.fit(make_agent(tiny_folder), make_data(**SETTINGS[request.param]))
    trainer.save_checkpoint(folder / "last.ckpt")
    return folder


def recorded(run: Path, place: int) -> Ids:
    turns = [json.loads(line) for log in run.rglob("held_out/*.jsonl") for line in log.open()]
    own = [turn for turn in turns if turn["env"] == place]
    read: tuple[int, ...] = ()
    found: Ids = []
    for turn in sorted(own, key=lambda turn: turn["turn"]):
        prompt = (*(read if turn["continues"] else ()), *turn["prompt_ids"])
        found.append((prompt, tuple(turn["reply_ids"])))
        read = (*prompt, *turn["reply_ids"])
    return found


def played(episode: WholeEpisode) -> Ids:
    found: Ids = []
    for sample in episode.samples:
        read: tuple[int, ...] = ()
        for segment in sample.segments:
            if segment in sample.actions:
                found.append((read, tuple(segment.ids)))
            read = (*read, *segment.ids)
    return found


@pytest.mark.parametrize("exported", [False, True])
def test_play_repeats_a_recorded_validation_episode(run: Path, tmp_path: Path, exported: bool) -> None:
    if exported:
        export_checkpoint(run / "last.ckpt", tmp_path / "model")
    policy = Policy.from_checkpoint(tmp_path / "model" if exported else run / "last.ckpt")
    for place in range(4):
        ids = played(policy.play(GUESS, held_out_seeds()[place]))
        assert len(ids) > 1
        assert ids == recorded(run, place)
    policy.close()


def test_act_reads_and_writes_what_play_does(run: Path) -> None:
    policy = Policy.from_checkpoint(run / "last.ckpt")
    seed, ids = held_out_seeds()[0], []
    env = gymnasium.make(GUESS)
    observation, info = env.reset(seed=seed)
    history, over, actions = policy.begin(env, seed), False, []
    while not over:
        try:
            act = policy.act(history, observation, info)
        except ConfigError:  # after max_turns, which the environment does not know
            break
        ids.append((act.prompt_ids, act.reply_ids))
        actions.append(act.action)
        observation, _, terminated, truncated, info = env.step(act.action)
        over = terminated or truncated
    episode = policy.play(GUESS, seed)
    assert actions == [turn.action for turn in episode.turns if not turn.asked_again]
    assert [one for one in played(episode) if one in ids] == ids
    policy.close()


class Notes(WindowMemory):
    """A memory of a user."""


def test_settings_survive_json() -> None:
    given = PolicySettings(memory=Notes(3, thoughts=1), interaction=TurnInteraction(7, parser=ByLength()), seed=5)
    plain = json.loads(json.dumps(given.to_plain()))
    again = PolicySettings.from_plain(plain, "a test")
    assert type(again.memory) is Notes
    assert again.to_plain() == given.to_plain()


@pytest.mark.parametrize(
    "change",
    [
        lambda plain: plain["memory"].update(class_path="subprocess.Popen", init_args={"args": ["touch", "hit"]}),
        lambda plain: plain["memory"].update(class_path="gone.Memory"),
        lambda plain: plain["interaction"]["init_args"].update(max_reply_tokens=0),
    ],
)
def test_other_classes_are_not_made(
    change: Callable[[dict[str, Any]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = PolicySettings().to_plain()
    change(plain)
    with pytest.raises(ConfigError, match="prompt settings in a test cannot be read"):
        PolicySettings.from_plain(plain, "a test")
    assert not (tmp_path / "hit").exists()


def test_a_model_without_prompt_settings_needs_some(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no prompt settings.*agentrl export"):
        Policy.from_checkpoint(tiny_folder)
    saved = find_policy(tiny_folder)
    assert saved.settings is None
    assert not (tiny_folder / SETTINGS_FILE).exists()
    policy = Policy(saved, replace(PolicySettings(), interaction=TurnInteraction(4)))
    assert policy.play(GUESS, 1).turns
    policy.close()
