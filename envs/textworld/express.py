"""Text adventures of textworld-express, whose simulator runs in Java."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

from agentrl_envs.extras import need
from agentrl_envs.text_env import TextEnv, normalise

_LOOK = "look around"


class TextWorldExpress(TextEnv):
    """A text adventure that the seed selects. Only currently possible actions are offered.

    The reward of a turn is the change of the score, which is 1 when the task is solved.

    Args:
        game: name of the game, such as `coin`, `mapreader` or `cookingworld`.
        params: settings of the game, such as `{numLocations: 5, includeDoors: 0}`.
        fold: split of the adventures: `train`, `dev` or `test`; each split has a thousand.
        max_turns: turns after which an episode is truncated.

    Raises:
        ValueError: textworld-express or Java is not installed, or there is no such game, setting or fold.
    """

    actions: Mapping[str, str] = {_LOOK: ""}
    default_action = _LOOK

    def __init__(
        self,
        game: str = "coin",
        params: Mapping[str, Any] | None = None,
        fold: Literal["train", "dev", "test"] = "train",
        max_turns: int = 50,
    ) -> None:
        super().__init__()
        if fold not in ("train", "dev", "test"):
            raise ValueError(f"fold is {fold!r}, but must be train, dev or test.")
        express = need("textworld_express", extra="textworld-express")
        self.fold = fold
        self.max_turns = max_turns
        try:
            self._game = express.TextWorldExpressEnv(envStepLimit=2**31)  # `max_turns` limits episodes instead
        except FileNotFoundError as error:
            raise ValueError(
                "textworld-express needs Java, and there is no command `java`; install a Java runtime"
            ) from error
        settings = ",".join(f"{name}={value}" for name, value in (params or {}).items())
        try:
            self._game.load(game, settings)
            if self._game.reset(seed=1, gameFold=fold)[0].startswith("ERROR"):
                raise ValueError(f"it takes no settings {settings!r}")
        except ValueError as error:
            self.close()
            why = " ".join(str(error).split())
            raise ValueError(
                f"{game} of textworld-express cannot be created with params {dict(params or {})}: {why}"
            ) from error
        self._seeds = {
            "train": self._game.getValidSeedsTrain,
            "dev": self._game.getValidSeedsDev,
            "test": self._game.getValidSeedsTest,
        }[fold]()
        self._now: dict[str, Any] = {}
        self._seed = 0

    @property
    def system_prompt(self) -> str:
        """Text with the task of this episode."""
        return str(self._now["taskDescription"])

    def success(self) -> bool:
        return bool(self._now["tasksuccess"])

    def progression(self) -> float:
        return min(max(float(self._now["score"]), 0.0), 1.0)

    def solver(self) -> Callable[[], str] | None:
        """Return a player that follows the game's own solution; None after the first turn."""
        if self.turn:
            return None
        self._game.reset(seed=self._seed, gameFold=self.fold, generateGoldPath=True)
        return iter(self._game.getGoldActionSequence()).__next__

    def close(self) -> None:
        """End the simulator."""
        with suppress(OSError):  # the simulator may have ended already
            self._game.close()

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self._seed = int(self._seeds[int(self.np_random.integers(len(self._seeds)))])
        self._see(self._game.reset(seed=self._seed, gameFold=self.fold)[1])

    def _act(self, action: str) -> tuple[float, bool]:
        _, reward, done, now = self._game.step(action)
        self._see(now)
        return float(reward), bool(done)

    def _observe(self) -> tuple[str, str]:
        return str(self._now["observation"]).strip(), ""

    def _see(self, now: dict[str, Any]) -> None:
        self._now = now
        possible = sorted({name for name in now["validActions"] if normalise(name)})
        self.actions = dict.fromkeys(possible, "") or {_LOOK: ""}
        self.default_action = _LOOK if _LOOK in self.actions else next(iter(self.actions))
