"""Text adventures that TextWorld generates and compiles on this machine."""

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentrl_envs.extras import need
from agentrl_envs.text_env import TextEnv, normalise

_LOOK = "look"


class TextWorld(TextEnv):
    """One of several generated text adventures. Only currently possible actions are offered.

    Generating a game takes seconds, so all environments with the same settings share a folder of generated games.

    Args:
        rooms: number of rooms.
        objects: number of objects.
        quest_length: number of actions of the shortest solution.
        games: number of games to generate.
        max_turns: turns after which an episode is truncated.
        folder: folder of the generated games; by default a folder in the user's cache.

    Raises:
        ValueError: TextWorld is not installed, or one of the numeric arguments is below 1.
    """

    worker = "process"  # TextWorld's interpreter is written in C
    actions: Mapping[str, str] = {_LOOK: ""}
    default_action = _LOOK

    def __init__(
        self,
        rooms: int = 3,
        objects: int = 4,
        quest_length: int = 3,
        games: int = 100,
        max_turns: int = 50,
        folder: str | None = None,
    ) -> None:
        super().__init__()
        for name, number in {"rooms": rooms, "objects": objects, "quest_length": quest_length, "games": games}.items():
            if number < 1:
                raise ValueError(f"{name} is {number}, but must be at least 1.")
        self._textworld = need("textworld", extra="textworld")
        self._form = {"nb_rooms": rooms, "nb_objects": objects, "quest_length": quest_length}
        self.games = games
        self.max_turns = max_turns
        self.folder = Path(folder or "~/.cache/agentrl/textworld").expanduser()
        self._game: Any = None
        self._now: Any = None
        self._told = ""

    @property
    def system_prompt(self) -> str:
        """Text with the task of this episode."""
        return str(self._now.objective)

    def success(self) -> bool:
        return bool(self._now.won)

    def progression(self) -> float:
        return float(self._now.score) / max(float(self._now.max_score), 1.0)

    def solver(self) -> Callable[[], str] | None:
        """Return a player that follows the shortest solution from the current state."""
        return lambda: next(iter(self._now.policy_commands), _LOOK)

    def close(self) -> None:
        """End the interpreter of the running game."""
        if self._game is not None:
            self._game.close()
            self._game = None

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self.close()
        wanted = ("admissible_commands", "objective", "won", "score", "max_score", "policy_commands", "description")
        infos = self._textworld.EnvInfos(**dict.fromkeys(wanted, True))
        self._game = self._textworld.start(str(self._made(int(self.np_random.integers(self.games)))), infos)
        self._see(self._game.reset())
        self._told = str(self._now.description).strip()

    def _act(self, action: str) -> tuple[float, bool]:
        now, reward, done = self._game.step(action)
        self._see(now)
        self._told = str(now.feedback).rpartition("\n>")[0].strip() or str(now.feedback).strip()
        return float(reward), bool(done)

    def _observe(self) -> tuple[str, str]:
        return self._told, ""

    def _see(self, now: Any) -> None:
        self._now = now
        self.actions = dict.fromkeys(sorted(name for name in now.admissible_commands if normalise(name)), "")
        self.actions = self.actions or {_LOOK: ""}
        self.default_action = _LOOK if _LOOK in self.actions else next(iter(self.actions))

    def _made(self, number: int) -> Path:
        """Return the file of a game; generate the game if no environment has done so yet."""
        kept = self.folder / "-".join(str(part) for part in (*self._form.values(), number))
        if not (kept / "game.z8").exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            unfinished = Path(tempfile.mkdtemp(dir=self.folder))
            options = self._textworld.GameOptions()
            options.seeds, options.path = number, str(unfinished / "game.z8")
            for name, value in self._form.items():
                setattr(options, name, value)
            self._textworld.make(options)
            try:
                os.rename(unfinished, kept)
            except OSError:  # another environment has already stored this game
                shutil.rmtree(unfinished)
        return kept / "game.z8"
