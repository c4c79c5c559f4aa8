"""Suites of others that are not installed are named in one sentence, with what to install."""

from __future__ import annotations

import sys

import gymnasium
import pytest

SUITES = {
    "TextArena-v0": ("textarena", "textarena", {"game": "Mastermind"}),
    "ReasoningGym-v0": ("reasoning_gym", "reasoning-gym", {"dataset": "leg_counting"}),
    "TextWorld-v0": ("textworld", "textworld", {}),
    "TextWorldExpress-v0": ("textworld_express", "textworld-express", {}),
}


@pytest.mark.parametrize("env_id", SUITES)
def test_a_missing_suite_is_told(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, extra, kwargs = SUITES[env_id]
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(package), *sys.meta_path])
    with pytest.raises(ValueError, match=rf"{package} is not installed; .*lightning-agentrl\[{extra}\]"):
        gymnasium.make(f"agentrl_envs:{env_id}", disable_env_checker=True, **kwargs)


class Missing:
    """Finds no module of a package."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {self.package!r}", name=self.package)
