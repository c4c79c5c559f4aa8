"""`agentrl advise`: some episodes of a config's policy, and the setting of the recipe that they speak for."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
import yaml
from lightning.pytorch.cli import ArgsType, LightningArgumentParser

from lightning_agentrl.agents import Agent
from lightning_agentrl.agents.scoring import row_states, score_values
from lightning_agentrl.commands.advise_config import BEGINS, config_text, iteration_turns, setting_config
from lightning_agentrl.commands.advise_report import advice_text, facts_table
from lightning_agentrl.commands.looking import LookCLI, LookOnce, validate_until_looked
from lightning_agentrl.commands.room_to_write import write
from lightning_agentrl.episodes.sides import SidesInteraction
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.metrics.advice import PLAYED, Advice, advise
from lightning_agentrl.metrics.facts import Facts, Measured, MeasuredEpisode, measure
from lightning_agentrl.metrics.quick_critic import explained_variance
from lightning_agentrl.rollout import GroupRollout, RolloutDataModule
from lightning_agentrl.rollout.starts import StartedEpisode
from lightning_agentrl.types import Rollout, Row

EPISODES = 50
REPLAYS = 8  # episodes that are played again
MOST_TURNS = 200  # of an episode
MOST_STATES = 1000  # that the quick critic reads
DISCOUNT = 0.99  # of the returns that it explains


def measure_connected(
    agent: Agent, episodes: int = EPISODES, most_turns: int = MOST_TURNS, untrained: bool = True
) -> Facts:
    """Play episodes of an agent that is connected to its data module, and return what was measured.

    Raises:
        ConfigError: every episode was lost to a fault of the environment.
    """
    data = agent.datamodule
    groups = GroupRollout(PLAYED, math.ceil(episodes / PLAYED), mini_batches=1)
    played = data.play_starts(groups, episodes, most_turns, REPLAYS)
    sound = [one for one in played if not one.lost and one.samples]
    if not sound:
        kinds = ", ".join(sorted({one.lost for one in played}))
        raise ConfigError(
            f"all {len(played)} episodes were lost to faults of the environment ({kinds}), so there is nothing to "
            "measure; check the environment (agentrl check-env)"
        )
    measured = [one for each in sound for one in measured_episodes(each)]
    mean_turns = sum(len(one.turns) for one in measured) / len(measured)
    sizes = {"num_envs": data.sizes.num_envs, "turns_per_env": data.sizes.turns_per_env}
    groups_of_run = None if data.groups is None else asdict(data.groups)
    explained, first_values = read_states(agent, sound, untrained)
    return measure(
        measured,
        iteration_turns=iteration_turns({**sizes, "groups": groups_of_run}, mean_turns),
        lost=sum(bool(one.lost) for one in played),
        repeats=[one.repeats for one in played if one.repeats is not None],
        explained=explained,
        first_values=first_values,
        whole_games=isinstance(data.interaction, SidesInteraction),
    )


def measured_episodes(played: StartedEpisode) -> Iterator[MeasuredEpisode]:
    """Yield the episode of a session, or those of each side of a game."""
    turns, tokens = defaultdict(list), defaultdict(list)
    for sample in played.samples:
        for turn, action in zip(sample.turns, sample.actions, strict=True):
            turns[turn.episode].append(turn)
            tokens[turn.episode].append(len(action))
    for number, of_episode in turns.items():
        yield MeasuredEpisode((played.group, number), tuple(of_episode), tuple(tokens[number]))


def read_states(agent: Agent, played: Sequence[StartedEpisode], untrained: bool) -> tuple[Measured, float]:
    """Return what a quick critic explains of the returns, and the largest value of the untrained critic."""
    returns = [(one, returns_of(one)) for one in played]
    every = max(math.ceil(sum(map(len, (found for _, found in returns))) / MOST_STATES), 1)
    rows: list[Row] = []
    followed: list[float] = []
    starts: list[int] = []
    number = 0
    for one, found in returns:
        place = 0
        for sample in one.samples:
            positions = []
            for turn in sample.placed_turns():
                if number % every == 0:
                    positions.append(turn.start - 1)  # whose hidden state carries the value of the state
                    followed.append(found[place])
                    starts.append(one.group)
                number, place = number + 1, place + 1
            if positions:
                rows.append(Row(sample.input, tuple(positions)))
    with agent.evaluation_mode():
        states = row_states(agent.models.actor, rows, agent.reader())
        first_values = 0.0
        if untrained and agent.models.critic is not None:
            few = Rollout.from_samples([sample for one in played[:2] for sample in one.samples])
            values_BA, _ = score_values(agent.models.actor, agent.models.critic, few, agent.reader())
            first_values = float(values_BA[few.action_mask].abs().max())
    return explained_variance(states, torch.tensor(followed), starts), first_values


def returns_of(played: StartedEpisode) -> list[float]:
    """Return the discounted rewards from each turn on, in the order of the turns in the samples."""
    to_go = {
        (turn.episode, turn.index): value
        for one in measured_episodes(played)
        for turn, value in zip(one.turns, one.returns_to_go(DISCOUNT), strict=True)
    }
    return [to_go[turn.episode, turn.index] for sample in played.samples for turn in sample.turns]


def advise_agent(
    agent: Agent, data: RolloutDataModule, episodes: int = EPISODES, trainer: L.Trainer | None = None
) -> tuple[Facts, Advice]:
    """Measure a task with a policy and return what was measured and the advice; nothing is trained.

    Args:
        agent: has the policy.
        data: has the environment.
        episodes: to play.
        trainer: for its precision and device; on the CPU, or the first GPU, when not given.
    """
    check_episodes(episodes)
    callback = LookOnce(lambda connected: measure_connected(connected, episodes))
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = trainer or L.Trainer(devices=1, enable_model_summary=False, **quiet)
    cast(Any, trainer).callbacks.append(callback)
    try:
        validate_until_looked(trainer, agent, data)
    finally:
        cast(Any, trainer).callbacks.remove(callback)
    if callback.found is None:
        raise ConfigError("the trainer played no episode; set trainer.limit_val_batches to 1.0")
    return callback.found, advise(callback.found)


def check_episodes(episodes: int) -> int:
    """Refuse a number of episodes of which nothing can be measured.

    Raises:
        ConfigError: with the key to change.
    """
    if episodes < 1:
        raise ConfigError(f"--episodes must be at least 1, got {episodes}")
    return episodes


class AdviseCLI(LookCLI):
    """`agentrl advise`, which builds models and engine of a run's config and trains nothing."""

    prog = "agentrl advise"
    episodes = EPISODES
    episodes_help = "Episodes to play, four from each start."
    file = "advice.yaml"
    file_help = "File for the advice as a config"
    begins = BEGINS

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument(
            "--most_turns", type=int, default=MOST_TURNS, help="Turns of an episode after which it is left."
        )
        parser.add_argument("--json", type=str | None, default=None, help="File for what was measured and advised.")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        super().parse_arguments(parser, args)
        config = self.config
        check_episodes(config.episodes)
        if config.most_turns < 1:
            raise ConfigError(f"--most_turns must be at least 1, got {config.most_turns}")
        self.check_file("json", b"{")
        if config.json and config.out and Path(config.json).resolve() == Path(config.out).resolve():
            raise ConfigError(f"'{config.out}' cannot be both files; name another one (argument --json)")

    def advise(self) -> None:
        """Play, print what was measured and the advice, and write the files."""
        data, settings, untrained = self.datamodule, self.settings, self.start.ckpt_path is None
        facts = self.look(lambda agent: measure_connected(agent, settings.episodes, settings.most_turns, untrained))
        if facts is None:
            return
        advice = advise(facts)
        print(facts_table(facts, f"{data.pool.label} with {self.policy}").text(), end="\n\n")
        print(advice_text(advice), end="\n\n", flush=True)
        config = yaml.safe_load(self.parser.dump(self.config, skip_unset=False))
        changes = setting_config(advice.setting, config, facts.mean_turns, data.memory.grows, self.processes)
        write(self.out, config_text(advice, changes))
        if settings.json:
            write(Path(settings.json), as_json(facts, advice))
        print(f"written to {self.out}: agentrl fit --config YOURS --config {self.out}")


def as_json(facts: Facts, advice: Advice) -> str:
    """Return everything that was measured and advised; what is not known is null."""
    return json.dumps({"facts": _known(asdict(facts)), "advice": asdict(advice)}, indent=2) + "\n"


def _known(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _known(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_known(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def run(args: ArgsType) -> None:
    """Play episodes of a config's policy and say which setting they speak for."""
    AdviseCLI(args).advise()
