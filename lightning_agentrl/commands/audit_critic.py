"""`agentrl audit-critic`: compare a run's critic and advantage estimators with returns measured by extra episodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch.callbacks import ProgressBar

from lightning_agentrl.advantages import Forked
from lightning_agentrl.commands.ending import leave_out_noise
from lightning_agentrl.commands.files import PAGE, make_room_for
from lightning_agentrl.commands.guarded import guarded
from lightning_agentrl.commands.run_config import RunConfigCLI
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.rollout import RolloutSource
from lightning_agentrl.run_files import FACTS, one_run
from lightning_agentrl.tools.audit import Audit, AuditCritic, Audited, audit_report, worst_turns
from lightning_agentrl.tools.replay import CONFIG, checkpoint_before
from lightning_agentrl.tools.view import build_report
from lightning_agentrl.types import ForkPlan

LONGER = 1_000_000  # iterations added to the run's limit; the audit ends after the first added iteration


class AuditCLI(RunConfigCLI):
    """The config of a run, built for one rollout."""

    def __init__(self, run: Path, checkpoint: str | None, branches: int, every: int) -> None:
        self.run = run
        self.plan = ForkPlan(branches, every, gamma=1.0)  # ForkPlan refuses wrong values before anything is built
        path = Path(checkpoint) if checkpoint else checkpoint_before(run, None)[0]
        if checkpoint and not Path(checkpoint).exists():
            raise ConfigError(f"there is no checkpoint '{checkpoint}'; name an existing one (argument --checkpoint)")
        if path is None:
            raise ConfigError(
                f"the run '{run}' has no checkpoint, so there is no critic to audit; name one (--checkpoint)"
            )
        self.checkpoint = path
        super().__init__(["--config", str(run / CONFIG)])

    def before_instantiate_classes(self) -> None:
        """Set the trainer to one device, without a logger and without limits that would prevent another rollout."""
        trainer = self.settings.trainer
        trainer.devices, trainer.num_nodes, trainer.strategy = 1, 1, "auto"
        if trainer.accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
            trainer.accelerator = "cpu"  # the run may have been on another machine
        trainer.logger, trainer.default_root_dir = False, str(self.run)  # the folder may have moved
        trainer.max_epochs = LONGER if trainer.max_epochs is None else trainer.max_epochs + LONGER
        trainer.max_steps, trainer.max_time = -1, None
        super().before_instantiate_classes()

    def audit(self) -> tuple[Audit, list[dict[str, Any]]]:
        """Play a rollout and compare values with returns; return the findings and the turns as records for the page."""
        trainer = cast(Any, self.trainer)
        forked = Forked(self.plan.branches, self.plan.every, self.model.advantage.turn_discount, whiten=False)
        callback = AuditCritic(forked)
        kept = [each for each in trainer.callbacks if isinstance(each, ProgressBar | RolloutSource)]
        trainer.callbacks, trainer.loggers = [*kept, callback], []

        try:
            with guarded(self, "fit"):
                trainer.fit(self.model, self.datamodule, ckpt_path=self.checkpoint)
        except Audited:
            pass
        except ConfigError as error:
            if error.problem.key != "ckpt_path":
                raise
            what = f"{error.problem.what} (argument --checkpoint)"
            raise ConfigError(replace(error.problem, what=what, key="")) from error
        if callback.found is None:
            raise ConfigError(f"the run ended before it had played a rollout from '{self.checkpoint}'")
        return callback.found, callback.records


def audit_run(
    run: Path, checkpoint: str | None = None, branches: int = 4, every: int = 1, out: Path | None = None
) -> str:
    """Compare a critic's values and the estimators' advantages with measured returns of episodes from the same states.

    Args:
        run: folder of the run with config.yaml and checkpoints. Of several versions, the newest is used.
        checkpoint: checkpoint of the run. Default: the newest checkpoint. The audit plays the next rollout without
            training.
        branches: number of episodes to play from each state.
        every: n, to measure the state of every n-th turn and the first state of each episode.
        out: file of the page. Default: audit.html in the folder of the run.

    Returns:
        The findings as text for a terminal.
    """
    leave_out_noise()
    run = one_run(run, FACTS)
    out = run / "audit.html" if out is None else out
    make_room_for(out, PAGE, "out")
    cli = AuditCLI(run, checkpoint, branches, every)
    found, records = cli.audit()
    report = audit_report(found, f"Audit of {cli.checkpoint}", branches, every)
    shown = {(turn.env, turn.episode) for turn, *_ in worst_turns(found.rollout)}
    turns = [
        record | {"iteration": 1, "phase": "audit", "prompt_tokens": len(record.pop("prompt_ids"))}
        for record in records
        if (record["env"], record["episode"]) in shown or not shown
    ]
    page = build_report(report.title, [report], turns, cli.parser.dump(cli.config, skip_unset=False), [], out)
    return f"{report.text()}\n\nwritten to {page}"
