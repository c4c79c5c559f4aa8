"""Minigrid's scripted player of BabyAI levels, which follows the actions that were actually taken."""

from collections.abc import Callable, Sequence
from typing import Any

from minigrid.envs.babyai.core.roomgrid_level import RoomGridLevel
from minigrid.utils.baby_ai_bot import BabyAIBot, DisappearedBoxError

_LEFT = 0
_MOST_SEARCHES = 500  # largest number in a turn; more than a hundred are rare


class _Bot(BabyAIBot):
    """Minigrid's bot with a limit of searches in a turn, since in a few levels it would search for ever."""

    def replan(self, action_taken: int | None = None) -> int:
        self._searches_end = self.bfs_counter + _MOST_SEARCHES
        return int(super().replan(action_taken))

    def _breadth_first_search(self, *args: Any, **kwargs: Any) -> Any:
        if self.bfs_counter > self._searches_end:
            raise RecursionError("the player goes round in circles")
        return super()._breadth_first_search(*args, **kwargs)


def scripted_player(level: RoomGridLevel, taken: Sequence[int]) -> Callable[[], int]:
    """Return a function that returns the number of the next action: turn left if it knows none.

    Args:
        level: copy of the level at the start of the episode, in which all actions are repeated.
        taken: numbers of the actions of the episode so far; the caller appends to it.
    """
    bot = _Bot(level)
    advice = bot.replan()
    played = 0
    lost = False

    def next_number() -> int:
        nonlocal advice, played, lost
        for number in taken[played:]:
            level.step(number)
            played += 1
            try:
                advice = _LEFT if lost else bot.replan(number)
            except (DisappearedBoxError, AssertionError):  # the bot cannot go on in this turn
                advice = _LEFT
            except RecursionError:
                advice, lost = _LEFT, True
        return advice

    return next_number
