"""`agentrl inspect`: episodes of the policy as it is, and one page that says what training would begin with."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser
from transformers import PreTrainedTokenizerBase

from lightning_agentrl.agents import Agent
from lightning_agentrl.callbacks.turn_record import turn_records
from lightning_agentrl.commands.fit import AgentCLI
from lightning_agentrl.commands.inspect_report import make_report
from lightning_agentrl.episodes.seeds import held_out_seeds
from lightning_agentrl.episodes.unread import said, spellings
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.metrics.looks import SeenEpisode, SeenTurn, look_at
from lightning_agentrl.prompts.shown import shown
from lightning_agentrl.rollout import RolloutDataModule
from lightning_agentrl.rollout.validation import WholeEpisode
from lightning_agentrl.types import Rollout, Segment, input_of
from lightning_agentrl.view import Report, build_report

EPISODES = 32


class Inspected(Exception):
    """The end of an inspection, raised once everything was played so that nothing else is done."""


@dataclass(frozen=True)
class Inspection:
    """What was played, in reports by source and turn by turn."""

    reports: Sequence[Report]
    turns: Sequence[dict[str, Any]]  # as a page shows them
    lost: int  # episodes without a turn, which no page can show


class Inspect(L.Callback):
    """Whole episodes of a connected agent, played when a validation begins, which is then ended.

    Args:
        episodes: how many, on the first held-out seeds.
    """

    def __init__(self, episodes: int) -> None:
        self.episodes = episodes
        self.found: Inspection | None = None

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        agent = cast(Agent, pl_module)
        data = agent.datamodule
        seeds = held_out_seeds()[: self.episodes]
        played = data.play_whole(seeds, lambda episode: episode, agent.temperature, pictures=len(seeds))
        self.found = inspect_episodes(played, data, agent.tokenizer)
        raise Inspected


class InspectCLI(AgentCLI):
    """`agentrl inspect`, which builds models and engine of a run's config and trains nothing."""

    def __init__(self, args: ArgsType = None) -> None:
        super().__init__(args, run=False)

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        return super().init_parser(prog="agentrl inspect", **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument("--episodes", type=int, default=EPISODES, help="Episodes to play, over all sources.")
        parser.add_argument(
            "--out",
            type=str | None,
            default=None,
            help="File of the page; inspect.html in trainer.default_root_dir when not given.",
        )
        parser.add_argument(
            "--ckpt_path",
            type=str | None,
            default=None,
            help="Checkpoint of the policy; the untrained one if not given.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the given arguments, and play on one device whatever the config says."""
        super().parse_arguments(parser, args)
        config = cast(Any, self.config)
        config.trainer.devices, config.trainer.num_nodes, config.trainer.strategy = 1, 1, "auto"
        most = len(held_out_seeds())
        if not 1 <= config.episodes <= most:
            raise ConfigError(f"--episodes must be from 1 to {most}, got {config.episodes}")
        if config.out is not None and Path(config.out).is_dir():
            raise ConfigError(f"'{config.out}' is a folder; name the file to write (argument --out)")

    def inspect(self) -> None:
        """Play, print the summary and write the page."""
        trainer, data = cast(Any, self.trainer), cast(RolloutDataModule, self.datamodule)
        callback = Inspect(self.settings.episodes)
        bars = [each for each in trainer.callbacks if isinstance(each, ProgressBar)]
        trainer.callbacks, trainer.loggers = [*bars, callback], []

        def run() -> None:
            warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`")  # those of the run write
            try:
                trainer.validate(self.model, data, ckpt_path=self.start.ckpt_path, verbose=False)
            except Inspected:
                data.teardown("validate")

        self._guarded("validate", run)
        found = callback.found
        if found is None:  # a signal ended it
            return
        for report in found.reports:
            print(report.text(), end="\n\n", flush=True)
        out = Path(self.settings.out or Path(trainer.default_root_dir) / "inspect.html")
        policy = self.start.ckpt_path or f"{cast(Agent, self.model).model}, untrained"
        notes = [f"{found.lost} episodes were lost before their first turn and cannot be shown."] if found.lost else []
        if not found.turns:
            raise ConfigError("every episode was lost before its first turn, so there is no page to write")
        config = self.parser.dump(self.config, skip_none=False)
        print(f"written to {build_report(f'Inspection of {policy}', found.reports, found.turns, config, notes, out)}")


def inspect_episodes(
    played: Sequence[WholeEpisode], data: RolloutDataModule, tokenizer: PreTrainedTokenizerBase
) -> Inspection:
    """Look at episodes, for each source by itself."""
    reports, records = [], []
    texts: dict[int, str] = {}
    for kind, source in enumerate(data.pool.sources):
        own = [episode for episode in played if episode.source == kind]
        if not own:
            continue
        look = look_at([_seen(episode, tokenizer) for episode in own])
        limits = data.prompt.max_prompt_tokens, data.interaction.max_reply_tokens
        reports.append(make_report(source.label, look, source.key, *limits))
        for episode in own:
            rollout = Rollout.from_samples(episode.samples)
            for record in turn_records(rollout, tokenizer, texts):
                prompt_tokens = len(record.pop("prompt_ids"))
                head = {"iteration": 1, "phase": "inspect", "env": episode.place, "episode": 0}
                records.append(record | head | {"prompt_tokens": prompt_tokens})
    return Inspection(reports, records, sum(not episode.samples for episode in played))


def _seen(episode: WholeEpisode, tokenizer: PreTrainedTokenizerBase) -> SeenEpisode:
    return SeenEpisode(tuple(_turns(episode, tokenizer)), spellings(episode.contract), bool(episode.lost))


def _turns(episode: WholeEpisode, tokenizer: PreTrainedTokenizerBase) -> Iterator[SeenTurn]:
    for sample in episode.samples:
        turns, before = iter(sample.turns), list[Segment]()
        for segment in sample.segments:
            if segment.is_action:
                turn, prompt = next(turns), input_of(before)
                yield SeenTurn(turn, shown(tokenizer, prompt), said(turn.reply), len(prompt), len(segment))
            before.append(segment)


def inspect(args: ArgsType = None) -> None:
    """Play episodes of a config's policy and write a page about them."""
    InspectCLI(args if args is not None else sys.argv[1:]).inspect()
