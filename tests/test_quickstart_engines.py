"""The quickstart with two engines: what is compared is alike, runs are made once, the page has the right numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.engines import quickstart
from benchmarks.engines.quickstart import ENGINES, Records, config_of, main, order, outcome
from benchmarks.engines.quickstart_page import mean_interval, page, ratio_interval, stage, sync_shares
from benchmarks.intervals import Record
from tests.test_configs import made_small


def test_the_configs_differ_in_the_engine_and_the_folder_only() -> None:
    one, other = (yaml.safe_load(config_of(engine).read_text()) for engine in ENGINES)
    assert one["data"]["init_args"].pop("engine", None) is None
    assert other["data"]["init_args"].pop("engine")["class_path"] == "VLLMEngine"
    assert one["trainer"].pop("default_root_dir") != other["trainer"].pop("default_root_dir")
    assert one == other


def test_engines_take_turns_at_being_the_first() -> None:
    pairs = [("transformers", 4), ("vllm", 4), ("vllm", 7), ("transformers", 7), ("transformers", 5), ("vllm", 5)]
    assert order([4, 7, 5]) == pairs


def record(engine: str, seed: int, success: float, minutes: float, sync: float = 0.0) -> Record:
    """Two iterations of 3 minutes together, of which the first has a collection."""
    held_out = {"episodes": 100, "mean_turns": 5.0}
    return {
        "engine": engine,
        "seed": seed,
        "settings": quickstart.fingerprint(engine, []),
        "before": held_out | {"success": 0.3},
        "after": held_out | {"success": success},
        "minutes": minutes - 0.5,
        "process_minutes": minutes,
        "iterations": [
            {"iteration": 120.0, "collect": 60.0, "sync": sync, "score": 20.0, "update": 30.0, "log": 1.0},
            {"iteration": 60.0, "score": 20.0, "update": 30.0, "log": 1.0},
        ],
        "versions": {"torch": "1"},
        "machine": {"cores": 2, "device": "cpu", "precision": "bf16-mixed"},
    }


RUNS = [
    *(record("transformers", 0, 0.80, 10.0), record("vllm", 0, 0.84, 5.0, sync=6.0)),
    *(record("transformers", 1, 0.90, 8.0), record("vllm", 1, 0.88, 6.0, sync=12.0)),
]


def test_intervals_by_hand() -> None:
    """Of three values with mean 4 and standard deviation 2, and Student's 4.303."""
    assert mean_interval([2.0, 4.0, 6.0]) == pytest.approx(
        (4, 4 - 4.303 * 2 / math.sqrt(3), 4 + 4.303 * 2 / math.sqrt(3))
    )
    assert mean_interval([2.0]) is None
    half = 12.706 * math.log(2) / math.sqrt(2) / math.sqrt(2)  # the logarithms of 1 and 2
    expected = (math.sqrt(2), math.exp(math.log(2) / 2 - half), math.exp(math.log(2) / 2 + half))
    assert ratio_interval([1.0, 2.0]) == pytest.approx(expected)


def test_shares_of_the_weights_are_of_iterations_that_sent_some() -> None:
    assert sync_shares(RUNS[1]) == [6 / 120]
    assert stage(RUNS[1], "sync") / stage(RUNS[1], "iteration") == 6 / 180


def test_the_page_has_the_numbers() -> None:
    text = page(RUNS, "Nothing else ran.", [])
    assert "| 1 | `VLLMEngine` | 0.300 (0.219 to 0.396) | 0.880 (0.802 to 0.930) | 5.00 | 6.0 | 6.67 % |" in text
    assert "| `TransformersEngine` | 0.300 (0.241 to 0.367) | 0.850 (0.794 to 0.893) | 0.850 (0.215 to 1.000) |" in text
    assert "**+1.0 points**" in text
    assert "the intervals over seeds overlap" in text
    ratio = math.sqrt(5 / 10 * 6 / 8)
    row = next(line for line in text.splitlines() if line.startswith("| whole process"))
    assert row.startswith(f"| whole process | 9.00 | 5.50 | **{ratio:.2f}** (interval ")
    assert row.endswith("; seeds 0.50 to 0.75) |")
    assert "| of these `collect` | 1.00 | 1.00 | **1.00**" in text
    assert "| starting and ending | 0.50 | 0.50 |  |" in text
    assert "| held-out episodes, checkpoints | 5.50 | 2.00 |" in text
    assert "| of that the weights (`time/sync_seconds`) | 0.00 | 0.15 |  |" in text
    assert "took **5.00 %** of the time" in text
    assert "7.50 % in the median and 10.00 % at most" in text
    assert text.endswith("\n\nNothing else ran.\n")


def test_intervals_that_are_apart_are_said_to_be() -> None:
    apart = [record(engine, seed, 0.3 if engine == "vllm" else 0.9, 5.0, 1.0) for seed in (0, 1) for engine in ENGINES]
    assert "the intervals over seeds **do not overlap**" in page(apart, "", [])


def test_a_seed_without_its_partner_is_compared_with_nothing() -> None:
    text = page(RUNS[:3], "", ["--trainer.max_epochs", "3"])
    assert "| 1 | `TransformersEngine` |" in text
    assert "| whole process | 10.00 | 5.00 | **0.50** |" in text
    assert "needs two seeds" in text
    assert "Changed in both: `--trainer.max_epochs 3`." in text
    assert "No seed has been run with both engines yet." in page(RUNS[:1], "", [])


def test_runs_are_made_once_and_again_when_their_settings_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, int]] = []

    def run(engine: str, seed: int, arguments: Sequence[str], folder: Path) -> Record:
        made.append((engine, seed))
        if len(made) == 3:
            raise SystemExit("oh no")
        return record(engine, seed, 0.9, 5.0) | {"settings": quickstart.fingerprint(engine, arguments)}

    monkeypatch.setattr(quickstart, "run", run)
    out = ["--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="oh no"):
        main(["--seeds", "0", "1", *out, "--note", "By hand."])
    main(["--seeds", "0", "1", *out])
    assert made == [("transformers", 0), ("vllm", 0), ("vllm", 1), ("vllm", 1), ("transformers", 1)]
    assert [run["seed"] for run in Records(tmp_path / "quickstart_engines.json").runs] == [0, 0, 1, 1]
    text = (tmp_path / "quickstart_engines.md").read_text()
    assert text.endswith("By hand.\n")

    main(["--seeds", "0", "1", *out, "--report"])
    assert len(made) == 5
    assert (tmp_path / "quickstart_engines.md").read_text() == text

    main(["--seeds", "0", *out, "--", "--trainer.max_epochs", "3"])
    assert made[5:] == [("transformers", 0), ("vllm", 0)]
    assert "max_epochs 3" in (tmp_path / "quickstart_engines.md").read_text()


def test_a_try_does_not_replace_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--", "--trainer.max_epochs", "3"])
    assert "need another folder for their page: --out" in capsys.readouterr().err


@pytest.mark.long
def test_a_run_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"vllm seed 3 ended with 2:\n.*no_such_key"):
        quickstart.run("vllm", 3, ["--trainer.no_such_key", "1"], tmp_path / "run")


@pytest.mark.long
def test_a_run_leaves_what_the_page_needs(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tiny model; the other engine has its tests elsewhere."""
    small: Any = made_small(yaml.safe_load(config_of("transformers").read_text()), tiny_folder)
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(small))
    monkeypatch.setitem(ENGINES, "transformers", str(path))
    made = quickstart.run("transformers", 3, ["--trainer.precision", "32-true"], tmp_path / "run")
    assert (made["engine"], made["seed"], made["machine"]["precision"]) == ("transformers", 3, "32-true")
    assert len(made["iterations"]) == 3
    assert all(0 < times["sync"] < times["collect"] < times["iteration"] for times in made["iterations"])
    assert 0 < stage(made, "iteration") < made["minutes"] < made["process_minutes"]
    assert not list(tmp_path.rglob("*.ckpt"))
    assert json.loads(json.dumps(made)) == made
    assert outcome(tmp_path / "run")["iterations"] == made["iterations"]
    assert page([made, made | {"engine": "vllm"}], "", []).count("| 3 |") == 2
