"""Which versions of other packages are allowed."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


def test_lower_bounds_are_those_that_are_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = map(Requirement, project["dependencies"] + project["optional-dependencies"]["envs"])
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    tested = {one.name.lower(): one.specifier for one in map(Requirement, (x for x in lines if not x.startswith("#")))}
    bounds = {one.name.lower(): str(one.specifier) for one in allowed}
    assert tested.keys() == bounds.keys()
    for name, specifier in tested.items():
        (version,) = (part.version for part in specifier)
        (least,) = (part for part in bounds[name].split(",") if part.startswith(">="))
        assert version in Requirement(f"{name}{bounds[name]}").specifier
        assert version.startswith(least[2:]), name
