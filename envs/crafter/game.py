"""The game of the package `crafter`, made reproducible: same seed and actions, same game, rendered or not."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl_envs.crafter.text import COLUMNS, OUTSIDE, ROWS


@contextmanager
def _without_numba() -> Iterator[None]:
    """Hide numba from `opensimplex`, which would compile its noise function with numba.

    Without numba the same code runs on all machines. The libraries that numba loads would keep vLLM from starting.
    """
    loaded = "numba" in sys.modules
    if not loaded:
        sys.modules["numba"] = None  # type: ignore[assignment]  # Python refuses to import a module whose entry is None
    try:
        yield
    finally:
        if not loaded:
            del sys.modules["numba"]


try:
    with _without_numba():
        import crafter
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'The Crafter environments need {error.name}, which is not installed: pip install "lightning-agentrl[envs]"',
        name=error.name,
    ) from error

ACTIONS: tuple[str, ...] = tuple(crafter.constants.actions)
"""Names of the actions in the package `crafter`, in the order of the action ids."""
ACHIEVEMENTS: tuple[str, ...] = tuple(crafter.constants.achievements)
_PIXELS = 288  # side of a picture of 9 by 9 cells, of which the last two rows show the inventory


class Game(crafter.Env):
    """One world with its player.

    Args:
        area: side of the square world in cells.
    """

    def __init__(self, area: int) -> None:
        super().__init__(area=(area, area), size=(_PIXELS, _PIXELS), length=None, seed=0)
        self.frames = 0
        """Frames since the game began."""

    def begin(self, seed: int) -> None:
        """Make a new world."""
        self._seed, self._episode, self.frames = seed, 0, 0
        self.reset()

    def frame(self, action: int) -> float:
        """Play one frame; return the reward: 1 for an unlocked achievement, plus a tenth of the change of health."""
        self.frames += 1
        return float(self.step(action)[1])

    @property
    def player(self) -> Any:
        """The object of the player in the package `crafter`."""
        return self._player

    @property
    def unlocked(self) -> set[str]:
        """Names of the achievements that the player has unlocked."""
        return {name for name, count in self._player.achievements.items() if count}

    @property
    def dead(self) -> bool:
        """Whether the player died."""
        return bool(self._player.health <= 0)

    @property
    def helpless(self) -> bool:
        """Whether the player sleeps and ignores all actions."""
        return bool(self._player.sleeping and self._player.inventory["energy"] < 9)

    def map(self) -> NDArray[np.integer]:
        """Return the semantic ids of the whole world, [east, south]."""
        ids: NDArray[np.integer] = self._sem_view()
        return ids

    def window(self) -> list[list[int]]:
        """Return the semantic ids around the player: rows from north to south, -1 outside the map."""
        wide, high = COLUMNS // 2, ROWS // 2
        margin = max(wide, high)
        padded = np.pad(self.map().astype(int), margin, constant_values=OUTSIDE)
        x, y = (int(place) + margin for place in self._player.pos)
        rows: list[list[int]] = padded[x - wide : x + wide + 1, y - high : y + high + 1].T.tolist()
        return rows

    # The methods below make games reproducible.

    def render(self, size: Any = None) -> NDArray[np.uint8]:
        """Draw the view, and restore the game's random state, since drawing the night uses the random generator."""
        random = self._world.random
        before = random.get_state()
        try:
            picture: NDArray[np.uint8] = super().render(size)
        finally:
            random.set_state(before)
        return picture

    def _obs(self) -> None:
        """Draw no picture after a step; `render` draws pictures on request."""

    def _balance_chunk(self, chunk: Any, objs: Any) -> None:
        """Sort the unordered set of creatures in a chunk, so that random choices are reproducible."""
        super()._balance_chunk(chunk, sorted(objs, key=lambda thing: (type(thing).__name__, *map(int, thing.pos))))
