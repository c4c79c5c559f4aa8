"""The GeometryTasks environment: questions, answers and pictures of a data set such as Geometry3K."""

from agentrl_envs.geometry.env import PictureQuestion, PictureTask
from agentrl_envs.geometry.tasks import read_rows, read_task


class GeometryTasks(PictureQuestion):
    """Answer a question about a picture from a data set; each episode draws a row.

    Args:
        source: folder with `<split>.jsonl` or `<split>.parquet`, one such file, or id of a data set on the hub, such
            as `hiyouga/geometry3k`, for which the package `datasets` must be installed. A row has `question` (or
            `problem`), `answer`, `image` (a path below the folder) and optionally a list `choices`.
        split: split of the data set.
        first: index of the first row that is used, from 0, for example to hold out rows.
        count: number of rows that are used from `first` on; by default all rows to the end.
        checks: number of checks of an answer in an episode, 0 to 2; each check costs 0.1.
        tolerance: relative tolerance of numbers.
        max_turns: turns after which an episode is truncated.
        most_px: largest side of a picture in pixels, 64 to 4096; larger pictures are scaled down.
    """

    def __init__(
        self,
        source: str,
        split: str = "train",
        first: int = 0,
        count: int | None = None,
        checks: int = 1,
        tolerance: float = 0.01,
        max_turns: int = 3,
        most_px: int = 1024,
    ) -> None:
        if not 64 <= most_px <= 4096:
            raise ValueError(f"most_px must be 64 to 4096 pixels, not {most_px}.")
        self._rows = read_rows(source, split)
        rows = len(self._rows)
        count = rows - first if count is None else count
        if not (first >= 0 and count >= 1 and first + count <= rows):
            raise ValueError(f"{source!r} has {rows} rows in {split!r}; there are no {count} rows from row {first} on.")
        self.most_px = most_px
        self._places = range(first, first + count)
        self._name = f"of {source!r} ({split})"
        super().__init__(checks, tolerance, max_turns, most_px)
        # Read one row now, so that an error in all rows is reported before the run.
        read_task(self._rows[first], f"Row {first} {self._name}", most_px)

    def _draw_task(self) -> PictureTask:
        place = self._places[int(self.np_random.integers(len(self._places)))]
        return read_task(self._rows[place], f"Row {place} {self._name}", self.most_px)
