"""The DrawnGeometry environment: questions about figures that are drawn for each episode."""

import math
from collections.abc import Sequence

from agentrl_envs.geometry.env import PictureQuestion, PictureTask
from agentrl_envs.geometry.figures import KINDS, draw_figure


class DrawnGeometry(PictureQuestion):
    """Answer a question about a drawn figure with a number; the given numbers are shown only in the picture.

    Args:
        kinds: names of questions, keys of `figures.KINDS`; all questions by default.
        side_px: side of the picture in pixels, 128 to 1024.
        checks: number of checks of an answer in an episode, 0 to 2; each check costs 0.1.
        tolerance: relative tolerance of answers.
        max_turns: turns after which an episode is truncated.
    """

    def __init__(
        self,
        kinds: Sequence[str] | None = None,
        side_px: int = 256,
        checks: int = 0,
        tolerance: float = 0.01,
        max_turns: int = 3,
    ) -> None:
        unknown = [kind for kind in kinds or () if kind not in KINDS]
        if unknown or (kinds is not None and not kinds):
            raise ValueError(f"kinds must name some of {', '.join(KINDS)}, not {unknown or kinds}.")
        if not 128 <= side_px <= 1024:
            raise ValueError(f"side_px must be 128 to 1024 pixels, not {side_px}.")
        self.kinds = tuple(KINDS if kinds is None else kinds)
        self.side_px = side_px
        super().__init__(checks, tolerance, max_turns, side_px)

    def _draw_task(self) -> PictureTask:
        figure = KINDS[self.kinds[int(self.np_random.integers(len(self.kinds)))]](self.np_random)
        picture = draw_figure(figure, float(self.np_random.uniform(0, 2 * math.pi)), self.side_px)
        return PictureTask(figure.question, f"{figure.answer:.6g}", picture)
