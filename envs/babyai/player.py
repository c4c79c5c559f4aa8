"""Minigrid's scripted player of BabyAI levels, told of every action that was really taken."""

from collections.abc import Callable, Sequence
from typing import Any

from minigrid.envs.babyai.core.roomgrid_level import RoomGridLevel
from minigrid.utils.baby_ai_bot import BabyAIBot, DisappearedBoxError

_LEFT = 0
_MOST_SEARCHES = 500  # in one turn; more than a hundred are rare


class _Bot(BabyAIBot):
    """The bot, which in a few levels would look for a way for ever."""

    def replan(self, action_taken: int | None = None) -> int:
        self._searches_end = self.bfs_counter + _MOST_SEARCHES
        return int(super().replan(action_taken))

    def _breadth_first_search(self, *args: Any, **kwargs: Any) -> Any:
        if self.bfs_counter > self._searches_end:
            raise RecursionError("the player goes round in circles")
        return super()._breadth_first_search(*args, **kwargs)


def scripted_player(level: RoomGridLevel, taken: Sequence[int]) -> Callable[[], int]:
    """Return a function that gives the number of the next action; it turns left where it knows none.

    Args:
        level: a copy of the level as the episode began; it is played along.
        taken: the numbers of the actions of the episode, which grows as it is played.
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
            except (DisappearedBoxError, AssertionError):  # the bot's ways to say that it cannot go on, for now
                advice = _LEFT
            except RecursionError:
                advice, lost = _LEFT, True
        return advice

    return next_number
