"""The command `agentrl verify-engine`: check samples and log-probs of the engine against the trained weights.

The command makes the same comparison as the callback ``EngineCheck``, but with more rounds and in float32, and reports
the likely cause of a mismatch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast

from lightning.pytorch.cli import ArgsType, LightningArgumentParser
from lightning.pytorch.utilities import rank_zero_only

from lightning_agentrl.agents import Agent
from lightning_agentrl.agents.engine_check import comparison_of
from lightning_agentrl.commands.guarded import guarded
from lightning_agentrl.commands.run_config import LookOnce, RunConfigCLI, validate_until_looked
from lightning_agentrl.errors.config_errors import options_of
from lightning_agentrl.metrics.mismatch import EXACT, ROUGH, Bounds
from lightning_agentrl.tools.engine_causes import likely_cause

ROUNDS = 3  # the last round uses the policy's weights, earlier rounds use changed weights


def verified(agent: Agent, largest: float | None, mean: float | None) -> bool:
    """Compare the engine of an agent with its policy, print every round, and return whether all are within the bounds.

    Args:
        agent: agent that is connected to its trainer.
        largest: largest accepted log-prob mismatch of a token; None: the largest mismatch that rounding explains.
        mean: largest accepted mean mismatch of a round; None: the largest mean mismatch that rounding explains.
    """
    trainer, comparison = cast(Any, agent.trainer), comparison_of(agent)
    usual = comparison.bounds
    comparison.widens = mean is None and largest is None
    comparison.bounds = Bounds(usual.mean if mean is None else mean, usual.largest if largest is None else largest)
    show = rank_zero_only(print)
    weights = f"{agent.model}, {trainer.ckpt_path}" if trainer.ckpt_path else agent.model
    show(f"{type(comparison.engine).__name__} with {weights}, trainer in {trainer.precision}", flush=True)
    rounds = []
    for found in comparison.rounds(ROUNDS, agent.policy_version):
        rounds.append(found)
        show(f"round {found.number + 1}: {found.seen}", flush=True)
    wrong = next((found for found in rounds if not found.seen.fits), None)
    if wrong is not None:
        only_rounded = replace(wrong.seen, bounds=usual).fits
        cause = f"rounding, which explains {usual}" if only_rounded else likely_cause(comparison, rounds, wrong)
        bounds = wrong.seen.allowed
        show(f"round {wrong.number + 1} exceeds the bounds ({bounds}) or has other samples; likely cause: {cause}")
    largest, mean = (max(getattr(found.seen, name) for found in rounds) for name in ("largest", "mean"))
    show(f"gap_max={largest:.3g} gap_mean={mean:.3g} {'ok' if wrong is None else 'FAILED'}", flush=True)
    return wrong is None


class VerifyCLI(RunConfigCLI):
    """Check that the engine of a config samples from the trained weights; exit with 1 if they differ."""

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        return super().init_parser(prog="agentrl verify-engine", **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument(
            "--bound",
            type=float | None,
            default=None,
            help=f"Largest log-prob mismatch. Default: {EXACT.largest:g}, or {ROUGH.largest:g} below float32.",
        )
        parser.add_argument(
            "--mean_bound",
            type=float | None,
            default=None,
            help=f"Largest mean mismatch of a round. Default: {EXACT.mean:g}, or {ROUGH.mean:g} below float32.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the given arguments. ``sys.argv`` is not changed, since DDP starts processes with ``sys.argv``."""
        super().parse_arguments(parser, args)
        self._compare_exactly(dict(options_of(self.given)))

    def _compare_exactly(self, given: Collection[str]) -> None:
        """Set trainer and engine to float32 unless the command line sets a dtype, since rounding hides mismatches."""
        config = self.config
        if "trainer.precision" not in given:
            config.trainer.precision = "32-true"
        engine = config.data.init_args.get("engine")
        named = any(name.endswith(("engine.dtype", "engine.init_args.dtype")) for name in given)
        if engine is not None and "dtype" in engine.get("init_args", {}) and not named:
            engine.init_args.dtype = "auto"

    def verify(self) -> bool:
        """Compare engine and trainer; return whether the log-prob mismatch is within the bounds."""
        trainer, settings = cast(Any, self.trainer), self.settings
        callback = LookOnce(lambda agent: verified(agent, settings.bound, settings.mean_bound))
        trainer.callbacks, trainer.loggers = [callback], []
        with guarded(self, "validate"):
            validate_until_looked(trainer, self.model, self.datamodule, self.start.ckpt_path)
        return bool(callback.found)


def run(args: ArgsType) -> None:
    """Run the command: compare engine and trainer, and exit with 1 if the differences exceed the bounds."""
    if not VerifyCLI(args).verify():
        raise SystemExit(1)
