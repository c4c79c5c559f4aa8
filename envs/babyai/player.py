"""Minigrid's scripted player of BabyAI levels, which follows the actions that were actually taken."""

from collections.abc import Callable, Sequence
from typing import Any

from minigrid.envs.babyai.core.roomgrid_level import RoomGridLevel
from minigrid.utils.baby_ai_bot import BabyAIBot, DisappearedBoxError

_LEFT = 0
_MOST_SEARCHES = 500  # largest number of searches in a turn; more than a hundred searches are rare


class _Bot(BabyAIBot):
    """Minigrid's bot with a limit on the searches in a turn; without a limit the bot never stops in a few levels."""

    def replan(self, action_taken: int | None = None) -> int:
        self._searches_end = self.bfs_counter + _MOST_SEARCHES
        return int(super().replan(action_taken))

    def _breadth_first_search(self, *args: Any, **kwargs: Any) -> Any:
        if self.bfs_counter > self._searches_end:
            raise RecursionError("the player goes round in circles")
        return super()._breadth_first_search(*args, **kwargs)


def scripted_player(level: RoomGridLevel, taken: Sequence[int]) -> Callable[[], int]:
    """Return a function that returns the id of the next action; the id of "turn left" if the bot has no advice.

    Args:
        level: copy of the level at the start of the episode, in which all actions are repeated.
        taken: ids of the actions taken so far in the episode; the caller appends new ids to this list.
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
