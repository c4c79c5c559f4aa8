"""A task set of `verifiers`: a reply is worth as many points as it has characters."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["LongWords"]


class Word(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """Scored by length, so that replies of an untrained model get different rewards."""

    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        """Return the number of characters of the last reply."""
        return float(len(trace.last_reply))


class LongWords(vf.Taskset[Word, vf.TasksetConfig]):
    """Eight tasks."""

    def load(self) -> Iterator[Word]:
        """Yield the tasks."""
        for letter in "abcdefgh":
            yield Word(vf.TaskData(prompt=f"Write a long word with {letter}."), self.config.task)
