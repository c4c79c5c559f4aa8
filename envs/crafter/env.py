"""The Crafter environment: a survival game described in words and played with named actions."""

import re
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from agentrl_envs.crafter.game import ACHIEVEMENTS, ACTIONS, Game
from agentrl_envs.crafter.player import Player
from agentrl_envs.crafter.text import describe
from agentrl_envs.pictures import checked_cell_px
from agentrl_envs.text_env import Shown, TextEnv
from agentrl_envs.wording import read_wording

_WORDING = read_wording(__package__)
_GOALS = _WORDING.texts["achievements"].splitlines()  # achievements in the order of the prompt
_NUMBERS = {name: number for number, name in enumerate(_WORDING.actions)}  # actions are in the game's order
_NOOP, _SLEEP = ACTIONS.index("noop"), "Sleep"
_ASIDE = re.compile(r"\([^()]*\)?")  # the brackets in a text such as "Do (chop the tree)"


class CrafterText(TextEnv):
    """Crafter with text observations and 22 achievements, each of which is rewarded once.

    The reward of a turn is 1 for every frame that unlocks an achievement, plus a tenth of the change of health. The
    player's death terminates the episode. The episode is a success once all achievements are unlocked; the
    progression is the share of achievements that are unlocked.

    Args:
        area: side of the square world in cells; creating a world takes 1 s with side 64 and 0.25 s with side 32.
        sleep_until_awake: whether a turn of "Sleep" lasts until the player wakes up or dies, with summed rewards.
            If false, a turn of "Sleep" is one frame, and the player ignores the next actions until it wakes up.
        goals: achievements in the system prompt: only the "open" achievements, or "all" achievements in every turn.
        max_turns: turns after which an episode is truncated.
        observation: content of observations: "text", "image" (the game's own view, 9 by 9 cells with the inventory) or
            "both".
        cell_px: side of a cell in images, in pixels, 8 to 128.
        render_mode: "rgb_array" makes `render` draw the player's view and the inventory.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 8}  # noqa: RUF012 - declared by gymnasium
    actions = _WORDING.actions
    default_action = _WORDING.default_action

    def __init__(
        self,
        area: int = 64,
        sleep_until_awake: bool = True,
        goals: Literal["open", "all"] = "open",
        max_turns: int = 2000,
        observation: Shown = "text",
        cell_px: int = 32,
        render_mode: Literal["rgb_array"] | None = None,
    ) -> None:
        super().__init__()
        if not (isinstance(area, int) and 16 <= area <= 256):
            raise ValueError(f"area must be a whole number of cells from 16 to 256, not {area!r}.")
        if goals not in ("open", "all"):
            raise ValueError(f'goals must be "open" or "all", not {goals!r}.')
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f'render_mode must be "rgb_array" or None, not {render_mode!r}.')
        self.sleep_until_awake = sleep_until_awake
        self.goals = goals
        self.max_turns = max_turns
        self.render_mode = render_mode
        self.cell_px = checked_cell_px(cell_px)
        self._show(observation, spaces.Box(0, 255, (9 * cell_px, 9 * cell_px, 3), np.uint8))
        self._game = Game(area)
        self._coin = np.random.default_rng(0)
        self.aliases: Mapping[str, str] = self._draw_aliases()

    @property
    def tips(self) -> str:
        """Hints, one per line."""
        return _WORDING.texts["tips"]

    @property
    def manual(self) -> str:
        """Text with the materials and creatures on the map and their uses, one per line."""
        return _WORDING.texts["manual"]

    @property
    def achievements(self) -> str:
        """The achievements in the system prompt, one per line: the open achievements or all, see `goals`."""
        unlocked = self._game.unlocked if self.goals == "open" else set()
        names = [name for name in _GOALS if _key(name) not in unlocked]
        return "\n".join(f"- {name}" for name in names) or _WORDING.texts["all_unlocked"]

    @property
    def system_prompt(self) -> str:
        """Rules, actions and the achievements to unlock."""
        listed = "\n".join(f"- {name}: {description}" for name, description in self.actions.items())
        sight = _WORDING.texts[f"sight_{self.observation}"]
        places = {"achievements": self.achievements, "manual": self.manual, "tips": self.tips}
        return _WORDING.system_prompt.format(actions=listed, sight=sight, **places)

    def resolve_action(self, text: str) -> tuple[str, bool]:
        """Return the action that `text` names, without text in brackets; return "Sleep" while no other action works."""
        name, valid = super().resolve_action(_ASIDE.sub(" ", text))
        return (_SLEEP if self._active and self._game.helpless else name), valid

    def success(self) -> bool:
        """Return whether all achievements are unlocked."""
        return len(self._game.unlocked) == len(ACHIEVEMENTS)

    def progression(self) -> float:
        """Return the share of achievements that are unlocked."""
        return len(self._game.unlocked) / len(ACHIEVEMENTS)

    def metrics(self) -> dict[str, float]:
        """Return 1 or 0 for each achievement (1 if it is unlocked), and the number of frames."""
        unlocked = self._game.unlocked
        achievements = {f"achievement_{_key(name)}": float(_key(name) in unlocked) for name in _GOALS}
        return {**achievements, "frames": float(self._game.frames)}

    def solver(self) -> Player:
        """Return a player that sees the whole map, survives long and unlocks most achievements."""
        return Player(self._game)

    def render(self) -> np.ndarray | None:
        """Return the player's view and inventory as RGB [288, 288, 3], uint8; None without `render_mode`."""
        return self._game.render() if self.render_mode == "rgb_array" else None

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self._game.begin(int(self.np_random.integers(2**31)))
        self._coin = np.random.default_rng(int(self.np_random.integers(2**31)))
        self.aliases = self._draw_aliases()

    def _act(self, action: str) -> tuple[float, bool]:
        reward = self._game.frame(_NUMBERS[action])
        while self.sleep_until_awake and self._game.player.sleeping and not self._game.dead:
            reward += self._game.frame(_NOOP)
        self.aliases = self._draw_aliases()
        return reward, self._game.dead

    def _images(self) -> tuple[np.ndarray, ...]:
        return (np.asarray(self._game.render((9 * self.cell_px, 9 * self.cell_px))),)

    def _observe(self) -> tuple[str, str]:
        player = self._game.player
        facing = [int(step) for step in player.facing]
        return describe(self._game.window(), facing, player.inventory, player.sleeping, self._game.dead)

    def _draw_aliases(self) -> dict[str, str]:
        """Return the aliases of the next turn: a diagonal means one of its two directions, drawn again each turn."""
        names = dict.fromkeys(_WORDING.aliases.values())
        meant = {name: str(self._coin.choice(name.split(" or "))) if " or " in name else name for name in names}
        return {spoken: meant[name] for spoken, name in _WORDING.aliases.items()}


def _key(name: str) -> str:
    """Return the game's name of an achievement: "Collect Wood" is `collect_wood`."""
    return name.lower().replace(" ", "_")
