"""How long a server may take: a fixed patience, and what its work takes at the speed it has shown. No I/O."""

from __future__ import annotations

from collections import deque

SLACK = 3.0  # times the expected seconds, since other programs may use the machine too
REPLIES = 32  # last replies that show the speed
STEP_TOKENS = 8192  # most prompt tokens that an engine reads between two answers
FIRST_REPLY = 1.0  # seconds per sampled token, before the first reply
FIRST_PROMPT = 0.005  # seconds per prompt token, before the first reply
FIRST_LOAD = 20e6  # bytes of weights per second, before the first update


class Deadlines:
    """The deadlines of one server. They grow with its work, by its last replies and update.

    Args:
        patience: seconds that it may always take.
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._replies: deque[tuple[float, int]] = deque(maxlen=REPLIES)  # seconds per sampled token, replies in flight
        self._prompts: deque[float] = deque(maxlen=REPLIES)  # seconds per prompt token
        self._load: float | None = None
        self._slow_loads = 0

    def answer(self, unread: int) -> float:
        """Return the most seconds until its engine answers a question, which it does between two steps.

        Args:
            unread: prompt tokens of the requests in flight that it had not read before.
        """
        return self.patience + SLACK * min(unread, STEP_TOKENS) * self._prompt_seconds

    def reply(self, max_tokens: int, unread: int, in_flight: int) -> float:
        """Return the most seconds until a reply is complete.

        Args:
            max_tokens: most tokens of the reply.
            unread: prompt tokens of all requests in flight that it had not read before.
            in_flight: number of these requests.
        """
        slowest = max((s * max(1.0, in_flight / others) for s, others in self._replies), default=FIRST_REPLY)
        return self.patience + SLACK * (max_tokens * slowest + unread * self._prompt_seconds)

    def load(self, size: int) -> float:
        """Return the most seconds until it has loaded weights of so many bytes; doubled with each time it had not."""
        expected = size / FIRST_LOAD if self._load is None else SLACK * self._load
        return self.patience + expected * 2**self._slow_loads

    def note_reply(self, seconds: float, sampled: int, unread: int, in_flight: int) -> None:
        """Take a reply as a sign of its speed: how long it took, its tokens, and the arguments of :meth:`reply`."""
        self._replies.append((seconds / max(sampled, 1), max(in_flight, 1)))
        if unread:
            self._prompts.append(seconds / unread)

    def note_load(self, seconds: float, in_time: bool = True) -> None:
        """Take an update of its weights as a sign of its speed."""
        if in_time:
            self._load, self._slow_loads = seconds, 0
        else:
            self._slow_loads += 1

    @property
    def _prompt_seconds(self) -> float:
        """An upper bound of the seconds per prompt token: each reply took at least as long as reading its prompt."""
        return min(self._prompts, default=FIRST_PROMPT)
