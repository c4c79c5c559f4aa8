"""What was seen of an environment: one answer, and one episode as it was played."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_agentrl.episodes.contract import Contract
from lightning_agentrl.episodes.observation import INFO_TEXTS
from lightning_agentrl.tools.check_env.texts import mined

_OFFERED = ("available_actions", "admissible_commands", "valid_actions", "legal_actions", "actions")  # lists in info


@dataclass(frozen=True)
class Seen:
    """What an environment showed after a reset or a step."""

    text: str
    contract: Contract
    info: Mapping[str, Any]
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    state: str = ""
    """What tells observations apart: the text, and hashes of images, which would fill the memory."""
    raw: Any = None
    """The observation as it came, a text or a dictionary; only of the first call of an instance."""

    @property
    def prompt(self) -> str:
        """What a policy reads."""
        return f"{self.contract.system_prompt}\n{self.text}"

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated

    @property
    def success(self) -> bool | None:
        value = self.info.get("success")
        return None if value is None else bool(value)

    @property
    def invalid(self) -> bool | None:
        """Whether the environment says that the action text named no action; None where it says nothing."""
        value = self.info.get("invalid_action")
        return None if value is None else bool(value)

    def legal(self) -> list[str]:
        """Return replies that a policy may give: named actions, else those in info, else what the text offers."""
        if self.contract.actions:
            return list(self.contract.actions)
        for name in _OFFERED:
            offered = self.info.get(name)
            if isinstance(offered, list | tuple) and offered and all(isinstance(one, str) for one in offered):
                return list(offered)
        return mined(self.prompt)

    def same(self) -> tuple[Any, ...]:
        """Return what must be equal when an episode is played again."""
        texts = tuple(self.info.get(name) for name in INFO_TEXTS[:2])
        offered = self.contract.system_prompt, tuple(self.contract.actions), self.contract.examples
        return self.state, self.reward, self.terminated, self.truncated, *offered, *texts


@dataclass
class Play:
    """One episode as it was played."""

    seed: int
    policy: str
    actions: list[str] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    broken: bool = False

    @property
    def over(self) -> bool:
        return bool(self.seen) and self.seen[-1].over

    @property
    def total(self) -> float:
        return sum(one.reward for one in self.seen)

    @property
    def progression(self) -> float:
        """How much of the task the environment calls done at the end; 1 where it says nothing."""
        value = self.seen[-1].info.get("progression") if self.seen else None
        return float(value) if isinstance(value, int | float | np.number) else 1.0
