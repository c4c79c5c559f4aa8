"""The process of one exam or of one replay: reads its order and says what it finds."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_agentrl.episodes.recipe import Recipe
from lightning_agentrl.errors.problem import ConfigError
from lightning_agentrl.tools.check_env.exam import Exam, run, state
from lightning_agentrl.tools.check_env.log import Log
from lightning_agentrl.tools.check_env.probe import BrokenError, Probe
from lightning_agentrl.tools.check_env.replay import play_order
from lightning_agentrl.tools.check_env.small_model import texts
from lightning_agentrl.tools.check_env.stopwatch import Clock, listen_to_alarms
from lightning_agentrl.tools.check_env.texts import shown


def main(order: Mapping[str, Any]) -> None:
    """Do what the order says, and write one line of JSON for each thing to tell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listen_to_alarms()
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    printed = Path(order["folder"], "printed.txt")
    with printed.open("wb") as sink:
        os.dup2(sink.fileno(), 1)  # what the environment prints is not for the one who reads the answers

    def tell(what: Mapping[str, Any]) -> None:
        pipe.write(json.dumps(what, default=str) + "\n")
        pipe.flush()

    recipe = Recipe(order["id"], order["kwargs"], "env")
    started = time.perf_counter()
    try:
        recipe.load()
    except ConfigError as error:
        tell({"refused": str(error)})
        return
    tell({"imported": time.perf_counter() - started})
    with Path(order["folder"], "journal.txt").open("w", encoding="utf-8") as journal:
        if order["episodes"]:
            probe = Probe(recipe, Log(), clock := Clock(order["seconds"]), order["most_tokens"], journal)
            try:
                tell({"replayed": play_order(probe, order["episodes"], clock)})
            except BrokenError as error:
                tell({"replayed": {"seed": probe.seed, "actions": probe.actions, "said": str(error)}})
            return
        exam = Exam(recipe, order["seconds"], order["most_tokens"], journal)
        try:
            run(exam, tell)
        except ConfigError as error:
            tell({"refused": str(error)})
            return
        sys.stdout.flush()
        if text := printed.read_text(encoding="utf-8", errors="replace").strip():
            exam.log.add("prints", f"it writes to standard output: {shown(text)!r}")
        named = bool(exam.first and exam.first.contract.actions)
        tell({**state(exam), "texts": texts(exam.episodes, exam.solved, named), "over": True})


if __name__ == "__main__":
    main(json.loads(Path(sys.argv.pop()).read_text(encoding="utf-8")))
    os._exit(0)  # threads that an environment has left do not hold it up
