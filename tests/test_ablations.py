"""The ablations: an arm changes what it names only, runs are made once, and the page has the right numbers."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ablations import arms, launch, run, summary
from benchmarks.ablations.arms import ARMS, BASE_CONFIG, COMPARISONS, as_arguments, fingerprints
from benchmarks.ablations.records import Job, Record, Records
from benchmarks.ablations.report import NOTES, verdict, write_report
from benchmarks.quickstart_seeds import difference_interval
from tests.parsing import fit_parser

# The arms


@pytest.fixture(scope="module")
def parser() -> Any:
    return fit_parser()


def settings(parser: Any, arguments: Sequence[str] = ()) -> dict[str, Any]:
    parsed = parser.parse_args(["fit", "--config", str(BASE_CONFIG), *arguments]).fit.as_dict()
    return flat({key: parsed[key] for key in ("model", "data", "trainer", "seed_everything")})


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Dotted keys and what is there; lists count as one value."""
    if not isinstance(value, dict):
        return {name: value}
    return {key: x for part, below in value.items() for key, x in flat(below, f"{name}.{part}".strip(".")).items()}


def name_of(part: dict[str, Any]) -> str:
    return str(part["class_path"]).rsplit(".", 1)[-1]


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda comparison: comparison.arm)
def test_an_arm_changes_what_it_names_and_nothing_else(comparison: arms.Comparison, parser: Any) -> None:
    base, arm = settings(parser), settings(parser, as_arguments(comparison.overrides))
    changed = {key for key in base.keys() | arm.keys() if base.get(key) != arm.get(key)}
    for key, value in comparison.overrides.items():
        below = {name for name in changed if name == key or name.startswith(f"{key}.")}
        assert below, f"{key} is the same in the base run"
        changed -= below
        if isinstance(value, float | int):
            assert arm[key] == value
            assert isinstance(arm[key], float | int)  # not a text that looks like a number
    assert not changed


def test_the_choices_are_those_that_the_page_tells(parser: Any) -> None:
    base = settings(parser)
    assert base["model.init_args.critic.class_path"].endswith(".SharedCritic")
    separate = settings(parser, as_arguments(arms.overrides_of("separate_critic")))
    assert separate["model.init_args.critic.class_path"].endswith(".SeparateCritic")
    names = [name_of(callback) for callback in base["trainer.callbacks"]]
    assert names == ["CriticWarmup", "RunSummary"]
    without = settings(parser, as_arguments(arms.overrides_of("no_warmup")))
    assert [name_of(callback) for callback in without["trainer.callbacks"]] == ["RunSummary"]
    for arm in ARMS:  # an iteration is as long in every arm, and nothing writes weights
        values = settings(parser, as_arguments(arms.overrides_of(arm)))
        assert values["data.init_args.num_envs"] * values["data.init_args.turns_per_env"] == 128
        assert values["trainer.max_epochs"] == base["trainer.max_epochs"]
        assert values["trainer.enable_checkpointing"] is False


def test_arms_are_told_apart() -> None:
    assert len(ARMS) == len(set(fingerprints().values())) == 7


# Runs


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for each run that was started; runs only write that. `no_kl` fails while `broken` is there."""
    calls = tmp_path / "calls"
    calls.touch()
    (tmp_path / "broken").touch()

    def command(job: Job, folder: Path) -> list[str]:
        script = 'echo "$1" >> calls; touch "$2/weights.ckpt"; if [ "$1-$(ls broken 2>&-)" = "no_kl 0-broken" ]; '
        script += "then echo oh no; exit 3; fi"
        return ["sh", "-c", f"cd {tmp_path}; {script}", "sh", f"{job.arm} {job.seed}", str(folder)]

    monkeypatch.setattr(launch, "command", command)
    monkeypatch.setattr(launch, "commit", lambda: "abc")
    monkeypatch.setattr(launch, "outcome", lambda folder: results(after=0.5))
    monkeypatch.setattr(run, "POLL", 0.01)
    monkeypatch.setattr("benchmarks.ablations.report.draw", lambda pairs, path: path.touch())
    return calls


def results(after: float, curve: Sequence[Sequence[float]] = ((1, 0.0), (2, 0.1)), episodes: int = 10) -> Record:
    held_out = {"episodes": episodes, "mean_turns": 5.0, "valid_action_ratio": 0.9}
    return {
        "before": held_out | {"success": 0.3},
        "after": held_out | {"success": after},
        "minutes": 3.0,
        "curves": {"rollout/reward_per_turn": [list(point) for point in curve]},
        "versions": {"torch": "1", "python": "2"},
        "machine": {"device": "cpu", "precision": "32-true"},
    }


def ablations(folder: Path, *arguments: str) -> int:
    files = ["--records", str(folder / "results" / "ablations.json"), "--runs", str(folder / "runs")]
    return run.main([*files, *arguments])


def test_runs_are_made_once_and_again_when_changed_or_failed(
    started: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def new_calls() -> list[str]:
        lines = started.read_text().split("\n")[:-1]
        started.write_text("")
        return lines

    assert ablations(tmp_path, "--seeds", "1", "0", "--workers", "1") == 1
    calls = new_calls()
    assert calls == [f"{arm} {seed}" for seed in (0, 1) for arm in ARMS]
    assert "failed, exit code 3" in capsys.readouterr().out
    records = Records(tmp_path / "results" / "ablations.json")
    failed = records.read()[Job.of("no_kl", 0)]
    assert (failed["status"], failed["log"]) == ("failed", ["oh no"])
    page = (tmp_path / "results" / "ablations.md").read_text()
    assert "13 of 21 runs" in page
    assert "no_kl seed 0: exit code 3" in page
    assert not list(tmp_path.rglob("*.ckpt"))

    (tmp_path / "broken").unlink()
    assert ablations(tmp_path, "--seeds", "0", "1") == 0
    assert new_calls() == ["no_kl 0"]

    # Another machine: the records and nothing else.
    assert ablations(tmp_path, "--seeds", "0", "1", "--runs", str(tmp_path / "elsewhere")) == 0
    assert new_calls() == []

    changed = [replace(c, overrides={"model.init_args.kl.reward": 0.5}) if c.arm == "no_kl" else c for c in COMPARISONS]
    monkeypatch.setattr(arms, "COMPARISONS", tuple(changed))
    assert ablations(tmp_path, "--seeds", "0", "--only", "no_kl", "base") == 0
    assert new_calls() == ["no_kl 0"]
    assert len(records.read()) == 14
    assert records.read()[Job.of("no_kl", 0)]["overrides"] == {"model.init_args.kl.reward": 0.5}
    assert len(records.current()) == 13  # seed 1 of the changed arm is out of date

    other = tmp_path / "other.yaml"
    other.write_text(BASE_CONFIG.read_text().replace("max_epochs: 6", "max_epochs: 5"))
    monkeypatch.setattr(arms, "BASE_CONFIG", other)
    assert len(records.missing(ARMS, [0, 1])) == 14


def test_an_interrupt_ends_all_processes_and_leaves_no_record(
    started: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a run has started as well; here a shell and its child."""
    monkeypatch.setattr(launch, "command", lambda job, folder: ["sh", "-c", f"sleep 60 & echo $! > {folder}/pid; wait"])
    records = Records(tmp_path / "ablations.json")

    def interrupt_once_both_run(running: launch.Running) -> bool:
        pids = [path.read_text() for path in (tmp_path / "runs").glob("*/pid")]
        if len(list(filter(None, pids))) == 2:
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(launch.Running, "ended", property(interrupt_once_both_run))
    with pytest.raises(KeyboardInterrupt):
        run.run_all([Job.of(arm, 0) for arm in ARMS], records, tmp_path / "runs", workers=2)
    assert records.read() == {}
    for file in (tmp_path / "runs").glob("*/pid"):
        assert ended(int(file.read_text()))


def ended(process: int) -> bool:
    """Gone, or waiting for whoever adopts orphans to take note of it."""
    for _ in range(3000):  # a minute, for a busy machine
        try:
            os.kill(process, 0)
            if Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    return False


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    with run.alone(tmp_path / "runs"), pytest.raises(SystemExit, match="other ablations are running"):
        ablations(tmp_path)


def test_a_run_is_a_call_of_the_command(tmp_path: Path) -> None:
    command = launch.command(Job.of("first_token_1", 2), tmp_path)
    assert command[:4] == [sys.executable, "-m", "lightning_agentrl", "fit"]
    assert "--model.init_args.first_token_weight=1.0" in command
    assert "--seed_everything=2" in command
    environment = launch.environment()
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(Path(__file__).parents[1])


# The page


def records_of(
    path: Path, values: dict[str, Sequence[float]], curve: Sequence[Sequence[float]] = ((1, 0), (2, 1))
) -> Records:
    records = Records(path)
    for arm, afters in values.items():
        for seed, after in enumerate(afters):
            about = {"arm": arm, "seed": seed, "status": "done", "settings": fingerprints()[arm], "commit": "abc"}
            records.add(about | results(after, curve))
    return records


def test_differences_of_three_seeds(tmp_path: Path) -> None:
    """By hand: variances 0.01 of three runs each, so an error of sqrt(2 * 0.01 / 3) = 0.08165 and t(4) = 2.776."""
    records = records_of(tmp_path / "a.json", {"base": (0.5, 0.6, 0.7), "no_kl": (0.8, 0.9, 1.0)})
    both = summary.pairs_of(records.current())["no_kl"]
    assert both.seeds == [0, 1, 2]
    assert summary.pooled(both.base, "after") == (18, 30)
    assert summary.pooled(both.arm, "after") == (27, 30)
    difference = summary.success_difference(both)
    assert difference == pytest.approx((0.3, 0.3 - 0.22666, 0.3 + 0.22666), abs=1e-4)
    assert verdict("higher", difference) == "higher, as expected"
    assert verdict("lower", difference) == "higher, against what was expected"


def test_runs_that_agree_by_luck_keep_the_interval_of_their_episodes(tmp_path: Path) -> None:
    records = records_of(tmp_path / "a.json", {"base": (0.5, 0.5, 0.5), "no_kl": (0.6, 0.6, 0.6)})
    difference = summary.success_difference(summary.pairs_of(records.current())["no_kl"])
    assert difference == pytest.approx(difference_interval((18, 30), (15, 30)))
    assert verdict("lower", difference) == "no difference shown"


def test_degrees_of_freedom_are_rounded_down() -> None:
    """By hand: all variance in one arm leaves its own 2 degrees; (0, 1, 2) has variance 1, so sqrt(1 / 3) * 4.303."""
    assert summary.welch([0, 1, 2], [5, 5, 5]) == pytest.approx((-4, -4 - 2.4843, -4 + 2.4843), abs=1e-3)
    assert summary.welch([1], [2]) is None


def test_the_area_is_the_mean_height() -> None:
    """By hand: (1 * 0.05 + 2 * 0.2) / 3."""
    assert summary.area(results(0.5, [[1, 0.0], [2, 0.1], [4, 0.3]])) == pytest.approx(0.15)
    assert summary.area(results(0.5, [[2, 0.4]])) == 0.4


def test_the_page_has_the_numbers_and_keeps_the_notes(tmp_path: Path) -> None:
    records = records_of(tmp_path / "a.json", {"base": (0.5, 0.6, 0.7), "no_kl": (0.8, 0.9, 1.0), "no_warmup": (0.5,)})
    path = write_report(records)
    page = path.read_text()
    assert "**7 of 21 runs are there;**" in page
    (line,) = (line for line in page.splitlines() if line.startswith("| KL in the reward"))
    assert "| 3 | 0.300 → 0.600 | 0.300 → 0.900 | +30.0 (+7.3 to +52.7) | 0.5000 | 0.5000 |" in line
    assert line.endswith("| lower | higher, against what was expected |")
    (line,) = (line for line in page.splitlines() if line.startswith("| Critic warm-up"))
    assert "needs two seeds" in line
    assert line.endswith("| lower | not known yet |")
    assert page.count("\n| base | ") == 3
    assert path.with_suffix(".png").stat().st_size > 10_000

    assert NOTES[0] in page
    path.write_text(page.replace("None yet.", "Seen by eye: *nothing*.", 1))
    assert "Seen by eye: *nothing*." in write_report(records).read_text()


def test_the_page_of_the_repository_is_that_of_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are never written by hand."""
    monkeypatch.setattr("benchmarks.ablations.report.draw", lambda pairs, path: None)
    results = Path(__file__).parents[1] / "docs" / "results"
    for name in ("ablations.json", "ablations.md"):
        if (results / name).exists():
            (tmp_path / name).write_text((results / name).read_text())
    assert write_report(Records(tmp_path / "ablations.json")).read_text() == (results / "ablations.md").read_text()


def test_records_are_one_line_a_run(tmp_path: Path) -> None:
    records = records_of(tmp_path / "a.json", {"base": (0.5, 0.6)})
    lines = (tmp_path / "a.json").read_text().splitlines()
    assert len(lines) == 4
    assert [json.loads(line.rstrip(","))["seed"] for line in lines[1:3]] == [0, 1]
    assert not list(tmp_path.glob("*.draft"))
    assert len(records.current()) == 2
