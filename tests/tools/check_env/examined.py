"""An exam of an environment in the process of the test."""

from __future__ import annotations

import signal
from typing import Any

from lightning_agentrl.episodes.recipe import Recipe
from lightning_agentrl.tools.check_env.exam import Exam, run
from lightning_agentrl.tools.check_env.findings import Log
from lightning_agentrl.tools.check_env.probe import listen_to_alarms


def exam_of(env_id: str, seconds: float = 8.0, **kwargs: Any) -> Exam:
    """Examine, and return the exam; the handler of alarms is then what it was before."""
    before = signal.getsignal(signal.SIGALRM)
    listen_to_alarms()
    exam = Exam(Recipe(env_id, kwargs, "env"), seconds, 1024)
    try:
        run(exam, lambda said: None)
    finally:
        signal.signal(signal.SIGALRM, before)
    return exam


def examined(env_id: str, seconds: float = 8.0, **kwargs: Any) -> Log:
    """Return what was found."""
    return exam_of(env_id, seconds, **kwargs).log
