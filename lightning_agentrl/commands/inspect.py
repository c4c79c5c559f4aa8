"""The command `agentrl inspect`: play episodes before training, and write a page about obstacles to training."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser
from transformers import PreTrainedTokenizerBase

from lightning_agentrl.agents import Agent
from lightning_agentrl.callbacks.turn_log import turn_records
from lightning_agentrl.commands.files import PAGE, make_room_for
from lightning_agentrl.commands.guarded import guarded
from lightning_agentrl.commands.run_config import LookOnce, RunConfigCLI, validate_until_looked
from lightning_agentrl.episodes.seeds import held_out_seeds
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.prompts.parser import named, spellings
from lightning_agentrl.prompts.renderer import shown
from lightning_agentrl.rollout import RolloutDataModule
from lightning_agentrl.rollout.validation import WholeEpisode
from lightning_agentrl.tools.inspect import SeenEpisode, SeenTurn, look_at, make_report
from lightning_agentrl.tools.view import Report, build_report
from lightning_agentrl.types import Rollout, Segment, input_of


@dataclass(frozen=True)
class Inspection:
    """Results of played episodes."""

    reports: Sequence[Report]  # one report per source
    turns: Sequence[dict[str, Any]]  # records of the turns for the page
    lost: int  # number of episodes that were lost before their first turn


class InspectCLI(RunConfigCLI):
    """Play episodes with the policy of a config, without training, and report what could stop training."""

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        return super().init_parser(prog="agentrl inspect", **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument("--episodes", type=int, default=32, help="Episodes to play, over all sources.")
        where = "File of the page. Default: inspect.html in trainer.default_root_dir."
        parser.add_argument("--out", type=str | None, default=None, help=where)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the given arguments, and set the trainer to one device."""
        super().parse_arguments(parser, args)
        trainer, most = self.config.trainer, len(held_out_seeds())
        trainer.devices, trainer.num_nodes, trainer.strategy = 1, 1, "auto"
        trainer.limit_val_batches = None  # the config's value could skip the validation
        if not 1 <= self.config.episodes <= most:
            raise ConfigError(f"--episodes must be from 1 to {most}, got {self.config.episodes}")
        if self.config.out is not None:
            make_room_for(Path(self.config.out), PAGE, "out")

    def inspect(self) -> None:
        """Play, print the summary and write the page, unless a signal ends the command earlier."""
        trainer = cast(Any, self.trainer)
        out = Path(self.settings.out or Path(trainer.default_root_dir) / "inspect.html")
        make_room_for(out, PAGE, "out")
        callback = LookOnce(lambda agent: played_by(agent, self.settings.episodes))
        bars = [each for each in trainer.callbacks if isinstance(each, ProgressBar)]
        trainer.callbacks, trainer.loggers = [*bars, callback], []
        with guarded(self, "validate"):
            validate_until_looked(trainer, self.model, self.datamodule, self.start.ckpt_path)
        if (found := callback.found) is None:
            return
        for report in found.reports:
            print(report.text(), end="\n\n", flush=True)
        notes = [f"{found.lost} episodes were lost before their first turn and cannot be shown."] if found.lost else []
        if not found.turns:
            raise ConfigError("every episode was lost before its first turn, so there is no page to write")
        title = f"Inspection of {self.start.ckpt_path or f'{self.model.model}, untrained'}"
        config = self.parser.dump(self.config, skip_unset=False)
        print(f"written to {build_report(title, found.reports, found.turns, config, notes, out)}")


def played_by(agent: Agent, episodes: int) -> Inspection:
    """Play whole episodes on the first held-out seeds with a connected agent, and inspect the episodes."""
    data, seeds = agent.datamodule, held_out_seeds()[:episodes]
    config = replace(data.validation, temperature=agent.temperature)
    _, played = data.collector.play_held_out(seeds, config, watched=len(seeds))
    return inspect_episodes(played, data, agent.tokenizer)


def inspect_episodes(
    played: Sequence[WholeEpisode], data: RolloutDataModule, tokenizer: PreTrainedTokenizerBase
) -> Inspection:
    """Return a report for each source, and the records of all turns."""
    reports, records = [], []
    texts: dict[int, str] = {}
    for kind, source in enumerate(data.pool.sources):
        own = [episode for episode in played if episode.source == kind]
        if not own:
            continue
        look = look_at([seen for episode in own for seen in _seen(episode, tokenizer)])
        limits = data.prompt.max_prompt_tokens, data.interaction.max_reply_tokens
        reports.append(make_report(source.label, look, source.key, *limits))
        for episode in own:
            rollout = Rollout.from_samples(episode.samples)
            for record in turn_records(rollout, tokenizer, texts):
                prompt_tokens = len(record.pop("prompt_ids"))
                head = {"iteration": 1, "phase": "inspect", "env": episode.place}
                records.append(record | head | {"prompt_tokens": prompt_tokens})
    return Inspection(reports, records, sum(not episode.samples for episode in played))


def _seen(episode: WholeEpisode, tokenizer: PreTrainedTokenizerBase) -> list[SeenEpisode]:
    """Return the observations of an episode for the report; in a game, one sequence for each side."""
    names, sides = spellings(episode.contract.actions, episode.contract.aliases), dict[int, list[SeenTurn]]()
    for one in _turns(episode, names, tokenizer):
        sides.setdefault(one.turn.episode, []).append(one)
    return [SeenEpisode(tuple(turns), names, bool(episode.lost)) for turns in sides.values() or [[]]]


def _turns(episode: WholeEpisode, names: Collection[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[SeenTurn]:
    for sample in episode.samples:
        before: list[Segment] = []
        for turn, read, action, start, _ in sample.placed_turns():
            before += read
            yield SeenTurn(turn, shown(tokenizer, input_of(before)), named(turn.reply, names), start, len(action))
            before.append(action)


def run(args: ArgsType) -> None:
    """Run the command: play episodes with a config's policy and write a page about these episodes."""
    InspectCLI(args).inspect()
