"""Minigrid's scripted player of BabyAI levels, told of every action that was really taken."""

from collections.abc import Callable, Sequence

from minigrid.envs.babyai.core.roomgrid_level import RoomGridLevel
from minigrid.utils.baby_ai_bot import BabyAIBot, DisappearedBoxError

_LEFT = 0


def scripted_player(level: RoomGridLevel, taken: Sequence[int]) -> Callable[[], int]:
    """Return a function that gives the number of the next action.

    Args:
        level: a copy of the level as the episode began; it is played along.
        taken: the numbers of the actions of the episode, which grows as it is played.
    """
    bot = BabyAIBot(level)
    advice = int(bot.replan())
    played = 0

    def next_number() -> int:
        nonlocal advice, played
        for number in taken[played:]:
            level.step(number)
            played += 1
            try:
                advice = int(bot.replan(number))
            except (DisappearedBoxError, AssertionError):  # the bot's ways to say that it cannot go on
                advice = _LEFT
        return advice

    return next_number
