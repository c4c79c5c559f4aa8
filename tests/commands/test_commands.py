"""The command `agentrl`: its help, its own commands, and quiet runs."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from lightning_agentrl import __version__, cli
from lightning_agentrl.commands import main as commands
from lightning_agentrl.commands.files import with_game
from lightning_agentrl.commands.fit import AgentCLI
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.run_files import read_turns
from tests.cli import Config, changed, fit, run_command
from tests.disks import mounted
from tests.tools.view.logs import random_turns, write_run


@pytest.fixture
def agentrl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process; gives exit code, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        return run_command(monkeypatch, *arguments), *capsys.readouterr()

    return run


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_names_every_command(agentrl: Callable[..., tuple[int, str, str]], arguments: tuple[str, ...]) -> None:
    code, shown, _ = agentrl(*arguments)
    assert code == 0
    assert set(AgentCLI.subcommands()) < set(commands.OF_A_RUN)
    for command in [*commands.OF_A_RUN, *commands.OWN]:
        assert f"\n  {command} " in shown


def test_a_script_that_has_read_its_input_may_run_a_command() -> None:
    script = "import sys; from lightning_agentrl.commands.main import main; sys.stdin.readline(); main()"
    command = [sys.executable, "-c", script, "--version"]
    done = subprocess.run(command, input="a\nb\n", capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, f"agentrl {__version__}\n"), done.stderr


@pytest.mark.parametrize("command", sorted(commands.OWN))
def test_own_commands_explain_themselves(agentrl: Callable[..., tuple[int, str, str]], command: str) -> None:
    code, shown, _ = agentrl(command, "--help")
    assert code == 0
    assert f"usage: agentrl {command}" in shown


def test_a_file_that_cannot_be_used_is_told_in_words(
    agentrl: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    code, _, told = agentrl("new", str(tmp_path / "file" / "agent"))
    assert (code, told) == (2, f"agentrl: '{tmp_path}/file/agent' cannot be used: Not a directory\n")
    run = write_run(tmp_path / "run", random_turns(20))
    with mounted(tmp_path / "disk", "16k") as disk:
        code, _, told = agentrl("view", str(run), "--out", str(disk / "page.html"))
        assert list(disk.iterdir()) == []
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for page in (disk / "page.html", disk / "new" / "page.html"):
            code, _, of_reading = agentrl("view", str(run), "--out", str(page))
            assert code == 2
            assert str(page.parent if page.parent != disk else page) in of_reading
        assert "--out" in agentrl("view", str(run), "--out", str(disk / "page.html"))[2]
    assert code == 2
    assert f"'{disk}/page.html' cannot be used: No space left on device" in told
    assert "trainer" not in told


def test_runs_are_listed_and_two_are_compared(
    agentrl: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (write_run(tmp_path / name, random_turns(20)) for name in ("one", "other"))
    code, shown, _ = agentrl("view", str(tmp_path))
    assert code == 0
    for name in ("one", "other"):
        assert f"{name}/lightning_logs/version_0" in shown
    assert not list(tmp_path.rglob("*.html"))
    code, shown, _ = agentrl("view", str(one), str(other))
    assert (code, shown) == (0, f"written to {one / 'compare.html'}\n")
    for wrong in (("--serve", "--out", "x.html"), ("--port", "8000"), ("--serve", "--port", "70000")):
        code, _, printed = agentrl("view", str(one), *wrong)
        assert code == 2
        assert wrong[-2] in printed
    for runs in ([tmp_path], [one, tmp_path]):
        code, _, printed = agentrl("view", *map(str, runs), "--serve", "--port", "0")
        assert code == 2
        assert "choose one: one/lightning_logs, other/lightning_logs" in printed
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr("lightning_agentrl.commands.view.PORT", taken.getsockname()[1])
        code, _, printed = agentrl("view", str(one), "--serve")
        assert f"port {taken.getsockname()[1]} is in use" in printed
    assert code == 2
    assert "--port" in printed


@pytest.mark.slow
def test_a_page_of_the_last_iterations(
    agentrl: Callable[..., tuple[int, str, str]],
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    longer = changed(config, "trainer.max_epochs", 3)
    longer["trainer"]["callbacks"] = [{"class_path": "TurnLog"}]
    fit(longer, tmp_path, monkeypatch)
    turns, notes = read_turns(tmp_path.glob("turns/*.jsonl"), last=2)
    assert {turn["iteration"] for turn in turns} == {2, 3}
    assert len(turns) == 16
    assert notes == ["Only the last 2 iterations of the log are shown."]
    assert agentrl("view", str(tmp_path), "--last", "2")[0] == 0
    code, _, printed = agentrl("view", str(tmp_path), "--last", "0")
    assert code == 2
    assert "--last must be at least 1" in printed


def test_a_dry_run_belongs_to_fit(
    agentrl: Callable[..., tuple[int, str, str]],
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    code, _, printed = agentrl("validate", "--config", "given.yaml", "--dry-run")
    assert code == 2
    assert "use it with fit" in printed


@pytest.mark.slow
@pytest.mark.parametrize("quiet", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_quiet_run_shows_results_only(
    quiet: bool,
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    told = changed(config, "trainer.callbacks", [{"class_path": "StageProgress"}, {"class_path": "RunSummary"}])
    told["trainer"] |= {"enable_progress_bar": True, "enable_model_summary": True}
    fit(told, tmp_path, monkeypatch, *(["--quiet"] if quiet else []))
    shown = capfd.readouterr().out
    assert '"before"' in shown  # the result
    assert ("iteration 1/1 train" in shown) is not quiet
    assert ("LanguageModel" in shown) is not quiet
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["quiet"] is quiet


def test_a_game_is_trained_without_a_config(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The options stand for keys behind the shipped config, whose other keys may be given too."""
    monkeypatch.chdir(tmp_path)
    game = ("--env", "agentrl_envs:Bandit-v0", f"--policy={tiny_folder}")
    plan = ("--dry-run", "--data.init_args.prompt.max_prompt_tokens", "600")
    assert run_command(monkeypatch, "fit", *game, *plan) == 0
    shown = capsys.readouterr().out
    assert str(tiny_folder) in shown
    assert re.search(r"one prompt: .*hat", shown, re.DOTALL)
    assert "at most 600" in shown
    assert not list(tmp_path.iterdir())
    assert with_game(["fit", "--config", "quickstart", "--env=a:B-v0"]) == [
        *("fit", "--config", "quickstart"),
        "--data.init_args.env.id=a:B-v0",
    ]


def test_every_command_runs_from_python(
    tiny_folder: Path,
    config: Config,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(config))
    made = cli.run(["fit", "--config", "small.yaml", "--dry-run"])
    assert "one prompt" in capsys.readouterr().out
    assert made.model.model == config["model"]["init_args"]["model"]
    assert "agentrl fit" in cli.run(["new", "mine"])
    assert (tmp_path / "mine" / "config.yaml").exists()
    cli.run(["inspect", "--config", "small.yaml", "--episodes", "2", "--out", "seen.html"])
    assert (tmp_path / "seen.html").exists()
    with pytest.raises(ConfigError, match=r"no command 'fitt'.*fit"):
        cli.run(["fitt"])
