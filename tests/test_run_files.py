"""Which run the name of a folder means."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_agentrl.run_files import one_run


def runs_in(root: Path, *names: str) -> None:
    for name in names:
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "config.yaml").touch()


def test_a_run_is_meant_by_itself_and_the_newest_of_its_versions_by_what_is_above_them(tmp_path: Path) -> None:
    versions = [f"lightning_logs/version_{number}" for number in (2, 9, 10)]
    runs_in(tmp_path, *versions)
    for folder in (tmp_path, tmp_path / "lightning_logs", tmp_path / versions[-1]):
        assert one_run(folder, "config.yaml") == tmp_path / versions[-1]
    assert one_run(tmp_path / versions[0], "config.yaml") == tmp_path / versions[0]
    runs_in(tmp_path, ".")  # without a logger a run lies in the root itself
    assert one_run(tmp_path, "config.yaml") == tmp_path


@pytest.mark.parametrize("names", [("one", "other"), ("one/version_0", "other/version_1"), ("version_0", "mine")])
def test_runs_that_are_more_than_versions_are_told_to_choose_from(tmp_path: Path, names: tuple[str, str]) -> None:
    runs_in(tmp_path, *names)
    with pytest.raises(ValueError, match=f"name the folder of one: {', '.join(sorted(names))}"):
        one_run(tmp_path, "config.yaml")


def test_a_folder_without_a_run_and_one_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no chain is in or below .*name the folder of a run that wrote one"):
        one_run(tmp_path, "chain")
    with pytest.raises(ValueError, match="does not exist"):
        one_run(tmp_path / "gone", "chain")
