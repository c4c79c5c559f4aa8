"""When the engine of a run is compared with the policy, and what follows if it samples from something else."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lightning_agentrl.agents.engine_watch import EngineWatch
from lightning_agentrl.agents.update import GAP
from lightning_agentrl.errors import EngineMismatchError
from lightning_agentrl.types import Rollout
from tests.agents import proving_ranks
from tests.agents.test_proof import family, proving
from tests.engines.plain import PlainEngine, colder
from tests.started import together

OTHER = "does not sample from the policy"


def test_an_engine_is_proven_once() -> None:
    engine = PlainEngine()
    with proving(engine, family("qwen3")) as proof:
        watch = EngineWatch(lambda: proof, "stop", ahead=False, bypass=False)
        watch.at_start(0)
        updates = engine.updates
        watch.at_start(1)
        assert engine.updates == updates > 0


def test_where_it_is_off_nothing_is_compared() -> None:
    engine = PlainEngine(withheld=["mlp"])
    with proving(engine, family("qwen3")) as proof:
        watch = EngineWatch(lambda: proof, "off", ahead=True, bypass=True)
        watch.at_start(0)
        watch.after_update()
        watch.of_rollout({GAP: 9.0}, Rollout.from_samples([]), 0)
        assert engine.updates == 0


def test_a_wrong_engine_stops_the_run_or_is_warned_of() -> None:
    with proving(PlainEngine(withheld=["mlp"]), family("qwen3")) as proof:
        with pytest.raises(EngineMismatchError, match=OTHER):
            EngineWatch(lambda: proof, "stop", ahead=False, bypass=False).at_start(0)
        with pytest.warns(UserWarning, match=OTHER):
            EngineWatch(lambda: proof, "warn", ahead=False, bypass=False).at_start(0)


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [{"ahead": True, "bypass": False}, {"ahead": False, "bypass": True}])
def test_an_engine_is_asked_after_an_update_only_where_the_gap_does_not_tell(hidden: dict[str, Any]) -> None:
    engine = PlainEngine()
    with proving(engine, family("qwen3")) as proof:
        asked = EngineWatch(lambda: proof, "stop", **hidden)
        trusted = EngineWatch(lambda: proof, "stop", ahead=False, bypass=False)
        for watch in (asked, trusted):
            watch.at_start(0)
        engine.sampled_from = colder(0.7)
        trusted.after_update()
        with pytest.raises(EngineMismatchError, match=OTHER):
            asked.after_update()


def test_a_gap_that_was_not_measured_is_not_judged() -> None:
    with proving(PlainEngine(), family("qwen3")) as proof:
        watch = EngineWatch(lambda: proof, "stop", ahead=False, bypass=False)
        watch.at_start(0)
        watch.of_rollout({"critic/loss": 1.0}, Rollout.from_samples([]), 0)
        assert math.isnan(proof.gaps.usual)
        watch.of_rollout({GAP: 1e-6}, Rollout.from_samples([]), 0)
        assert proof.gaps.usual == 1e-6


@pytest.mark.slow
def test_processes_go_on_or_leave_a_proof_together(tmp_path: Path) -> None:
    together(2, proving_ranks.run, str(tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert {case: [first[case], second[case]] for case in proving_ranks.CASES} == {
        "all is well": ["proven: True"] * 2,
        "the engine is gone": ["Stopped: 143", "Stopped: 0 no server"],
        "the engine fails": ["_ToldElsewhere: 2", "ValueError: broken"],
        "a signal comes": ["Stopped: 143", "Stopped: 0"],
    }
