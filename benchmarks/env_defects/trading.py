"""A tiny market: buy and sell one kind of goods for six days."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from agentrl_envs import TextEnv
from env_defects.catalogue import defect, sound


@sound
class Trading(TextEnv):
    """The ship leaves after six days; the reward of the last one is the gain, as a share of the worth at the start."""

    actions = {"wait": "do nothing", "buy": "buy one sack", "sell": "sell one sack"}  # noqa: RUF012
    default_action = "wait"
    max_turns = 7  # never reached: the game ends by itself
    days = 6

    @property
    def system_prompt(self) -> str:
        return (
            f"You trade sacks of salt for {self.days} days; prices lie between 2 and 8 coins. Be richer at the end. "
            "Reply with one word: wait, buy or sell."
        )

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self.prices = [int(price) for price in self.np_random.integers(2, 9, size=self.days + 1)]
        self.day, self.coins, self.sacks = 0, 12, 2
        self.worth_before = self.worth()

    @property
    def price(self) -> int:
        return self.prices[self.day]

    def worth(self) -> int:
        """The coins, and the sacks at the middle price, which does not depend on luck."""
        return self.coins + 5 * self.sacks

    def gain(self) -> float:
        return (self.worth() - self.worth_before) / self.worth_before

    def trade(self, action: str) -> None:
        if action == "buy" and self.coins >= self.price:
            self.coins -= self.price
            self.sacks += 1
        elif action == "sell" and self.sacks:
            self.coins += self.price
            self.sacks -= 1

    def _act(self, action: str) -> tuple[float, bool]:
        self.trade(action)
        self.day += 1
        over = self.day >= self.days
        return self.gain() if over else 0.0, over

    def _observe(self) -> tuple[str, str]:
        today = f"Day {self.day + 1} of {self.days}." if self.day < self.days else "The ship leaves."
        return f"{today} You hold {self.coins} coins and {self.sacks} sacks. A sack costs {self.price} coins.", ""

    def solver(self) -> Callable[[], str]:
        return lambda: "buy" if self.price < 5 else "sell" if self.price > 5 else "wait"


@defect(
    "late-unseeded",
    "error",
    "the price of the first day comes from the seed, those of the others do not",
    r"replay|seed|determin|repeat|instance|differ",
)
class LateUnseeded(Trading):
    def _start(self, seed, options):
        super()._start(seed, options)
        self.prices[1:] = [int(price) for price in np.random.default_rng().integers(2, 9, size=self.days)]


@defect("text-reward", "error", "the reward is a rounded number in a text", r"reward")
class TextReward(Trading):
    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, f"{reward:.2f}", terminated, truncated, info


@defect(
    "growing",
    "notice",
    "every day adds a long paragraph to all earlier ones, and the last day is far away",
    r"grow|longer|length",
)
class Growing(Trading):
    days = 60
    max_turns = 61

    def _start(self, seed, options):
        super()._start(seed, options)
        self.ledger: list[str] = []

    def _act(self, action):
        self.ledger.append(
            f"Ledger of day {self.day + 1}: you decided to {action}. The price was {self.price} coins for a sack, "
            f"the purse held {self.coins} coins, the store held {self.sacks} sacks, the sea was calm, the harbour was "
            "open, and the clerk wrote all of it into the book with his best pen."
        )
        return super()._act(action)

    def _observe(self):
        today, _ = super()._observe()
        return "\n".join([*self.ledger, today]), ""


@defect(
    "endless-sacks",
    "warning",
    "a sale brings coins and leaves the sack, so selling every day wins",
    r"gam|constant|always|same action|earn",
)
class EndlessSacks(Trading):
    def trade(self, action):
        sacks = self.sacks
        super().trade(action)
        self.sacks = max(self.sacks, sacks)


@defect(
    "bad-info",
    "error",
    "info has texts in place of values: success is 'no' (which is true) and progression 'none'",
    r"\binfo\b|success|progress",
)
class BadInfo(Trading):
    def extra_info(self):
        return {"success": "yes" if self.success() else "no", "progression": "none"}


@defect(
    "late-end",
    "warning",
    "turns are counted from -1: max_turns is 5, but episodes have 6 turns",
    r"\blate\b|limit|max_turns|turns",
)
class LateEnd(Trading):
    max_turns = 5

    def _start(self, seed, options):
        super()._start(seed, options)
        self.turn = -1


@defect(
    "clipped-wrong",
    "warning",
    "max in place of min in the clip makes every end worth 1, whatever was done",
    r"spread|differ|same reward|constant|gam|earn|empty",
)
class ClippedWrong(Trading):
    def gain(self):
        return max(1.0, super().gain())


@defect(
    "no-trades-nan",
    "error",
    "the reward is the mean gain per trade, which is NaN for an episode without trades",
    r"\bnan\b|finite",
)
class NoTradesNan(Trading):
    def _start(self, seed, options):
        super()._start(seed, options)
        self.gains: list[float] = []

    def trade(self, action):
        before = self.worth()
        super().trade(action)
        if action != "wait":
            self.gains.append((self.worth() - before) / self.worth_before)

    def gain(self):
        return float(np.float64(sum(self.gains)) / np.float64(len(self.gains)))
