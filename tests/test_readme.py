"""The README's commands, in its order and word for word, in an empty folder with the quickstart made small."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_agentrl.commands import main as commands
from tests.test_configs import made_small

ROOT = Path(__file__).parents[1]


def commands_of_the_readme() -> list[list[str]]:
    """The lines of its shell blocks without comments, `make quickstart` as what it runs."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [made_by_make(line[1]) if line[0] == "make" else line for line in lines if line]


def made_by_make(target: str) -> list[str]:
    """The last line of a target's recipe."""
    shown = subprocess.run(["make", "-n", "-C", str(ROOT), target], capture_output=True, text=True, check=True).stdout
    return shlex.split([line for line in shown.splitlines() if not line.startswith("make")][-1])


@pytest.mark.slow
def test_the_readme_works(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = made_small(yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text()), tiny_folder)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.yaml").write_text(yaml.safe_dump(small))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "keep_freed_memory", lambda: True)
    ran = []
    for command in commands_of_the_readme():
        assert Path(command[0]).name == "agentrl", command
        monkeypatch.setattr(sys, "argv", command)
        commands.main()
        ran.append(command[1])
    assert ran == ["fit", "view", "--help", "fit", "fit", "validate", "export", "new"]

    for file in ("runs/quickstart/summary.json", "runs/quickstart/view.html"):
        assert (tmp_path / file).is_file()
        assert file in (ROOT / "README.md").read_text()
    assert "one prompt: " in capsys.readouterr().out
    AutoTokenizer.from_pretrained("my_model")
    assert AutoModelForCausalLM.from_pretrained("my_model").config.model_type == "llama"
