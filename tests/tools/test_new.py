"""Without a clone: a new project, and configs by their names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_agentrl.commands.files import shipped_configs, with_shipped_configs
from lightning_agentrl.tools.new import make_project
from tests.cli import Command, run_command, sentence
from tests.disks import mounted
from tests.guides import importable

CONFIGS = Path(__file__).parents[2] / "configs"


def test_shipped_configs_are_found_by_name_and_own_files_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert {path.name for path in CONFIGS.rglob("*.yaml")} == {path.name for path in shipped_configs().values()}
    quickstart = str(shipped_configs()["quickstart"])
    assert Path(quickstart).samefile(CONFIGS / "quickstart.yaml")
    Path("a.yaml").touch()
    assert with_shipped_configs(
        ["fit", "--config", "quickstart", "--config=bandit", "--x", "bandit", "-c", "a.yaml"]
    ) == [*("fit", "--config", quickstart, f"--config={shipped_configs()['bandit']}", "--x", "bandit", "-c", "a.yaml")]
    Path("quickstart").write_text("trainer: {}")
    assert with_shipped_configs(["--config", "quickstart"]) == ["--config", "quickstart"]


def test_a_config_that_is_not_shipped_is_told_with_the_closest(agentrl: Command) -> None:
    message = sentence(agentrl("--config", "quikstart"))
    for part in ("'quikstart'", "--config quickstart?"):
        assert part in message


def test_a_new_project_is_not_written_over_anything(tmp_path: Path, agentrl: Command) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("kept")
    assert "'mine'" in sentence(agentrl("mine", command="new"))
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]


def test_a_full_disk_leaves_no_part_of_a_project(tmp_path: Path) -> None:
    """So that the same name can be given again. An empty folder that was there stays."""
    with mounted(tmp_path / "disk", "8k") as disk:  # a page of 4k for each file
        (disk / "there").mkdir()
        for folder in (disk / "there", disk / "with" / "parents"):
            with pytest.raises(OSError, match="No space left on device"):
                make_project(folder)
            assert [path.name for path in disk.rglob("*")] == ["there"]


def test_what_comes_next_is_a_line_for_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(monkeypatch, "new", "my agent") == 0
    assert "next: cd 'my agent' &&" in capsys.readouterr().out


@pytest.mark.slow
def test_a_new_project_passes_its_own_test_and_trains(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(monkeypatch, "new", "my_agent") == 0
    folder = tmp_path / "my_agent"
    assert {path.name for path in folder.iterdir()} == {"README.md", "config.yaml", "corridor.py", "test_corridor.py"}
    subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=folder, check=True, timeout=300)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["trainer"] |= {"max_epochs": 4, "precision": "32-true"}
    config["data"]["init_args"]["validation"] |= {"episodes": 2}
    (folder / "short.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(folder)
    with importable(folder):
        small = ("--config", "short.yaml", "--model.init_args.model", str(tiny_folder))
        assert run_command(monkeypatch, "fit", *small) == 0
    assert (folder / "runs").is_dir()
