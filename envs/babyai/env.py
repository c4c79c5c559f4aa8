"""The BabyAI environment: a level described in words and played with named actions."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from agentrl_envs.babyai import words
from agentrl_envs.babyai.levels import find_level
from agentrl_envs.babyai.player import scripted_player
from agentrl_envs.babyai.text import CARRIED, describe_view
from agentrl_envs.pictures import checked_cell_px
from agentrl_envs.text_env import Shown, TextEnv, normalise

_FORWARD = 2
_TILE = 16  # side of a cell in a picture, in pixels
# The part after the action in a text such as "turn left and go forward"
_REMARK = re.compile(r"(?:,| and\b| then\b).*")


class BabyAIEnv(TextEnv):
    """A BabyAI level with text observations.

    Args:
        level: name of a level, a key of `LEVELS`, or a Minigrid id such as "BabyAI-GoToLocalS8N7-v0".
        reward: on success "binary" gives 1 and "native" gives 1 - 0.9 * turns / max_turns; a failure gives 0.
        mission_in: place of the mission: the "system" prompt, or the first line of every "observation"; with the
            second value all episodes have the same system prompt.
        actions: names of the offered actions, or "goal" for the actions that the goal of the level can use; by default
            the three movements, as single words, for small levels, and all six actions for other levels.
        max_turns: turns after which an episode is truncated; by default the usual limit of the level, which depends on
            the mission in some Minigrid levels.
        num_dists: number of distracting objects, for the five goals GoTo, PickUp, Open, PutNext and PickUpSeqGoTo
            (default 0).
        observation: content of observations: "text", "image" (the agent's view of 7 by 7 cells) or "both".
        cell_px: side of a cell in images, in pixels, 8 to 128.
        render_mode: "rgb_array" makes `render` draw the room from above, with the agent's view highlighted.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012 - declared by gymnasium

    def __init__(
        self,
        level: str = "GoTo",
        reward: Literal["binary", "native"] = "binary",
        mission_in: Literal["system", "observation"] = "system",
        actions: Sequence[str] | Literal["goal"] | None = None,
        max_turns: int | None = None,
        num_dists: int | None = None,
        observation: Shown = "text",
        cell_px: int = 32,
        render_mode: Literal["rgb_array"] | None = None,
    ) -> None:
        super().__init__()
        if reward not in ("binary", "native"):
            raise ValueError(f'reward must be "binary" or "native", not {reward!r}.')
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f'render_mode must be "rgb_array" or None, not {render_mode!r}.')
        if mission_in not in ("system", "observation"):
            raise ValueError(f'mission_in must be "system" or "observation", not {mission_in!r}.')
        spec = find_level(level)
        kwargs = dict(spec.kwargs)
        if num_dists is not None:
            if num_dists < 0:
                raise ValueError(f"num_dists must be at least 0, not {num_dists}.")
            if "goal" not in kwargs:
                raise ValueError(f"Level {level!r} has a fixed number of objects; leave num_dists out.")
            kwargs["num_dists"] = num_dists
        limit = spec.max_turns if max_turns is None else max_turns
        self._limit_varies = limit is None
        self.level = level
        self.reward = reward
        self.mission_in = mission_in
        self.render_mode = render_mode
        self._make_level = partial(spec.build, **kwargs, **({} if limit is None else {"max_steps": limit}))
        self._level = self._make_level()
        self._level_seed = 0
        if self._limit_varies:
            self._level.reset(seed=0)
        self.max_turns = self._level.max_steps
        self.cell_px = checked_cell_px(cell_px)
        side = self._level.agent_view_size * cell_px
        self._show(observation, spaces.Box(0, 255, (side, side, 3), np.uint8))
        if actions is None:
            actions = words.SHORT_ACTIONS if spec.small else words.FULL_ACTIONS
        self._numbers = _action_numbers(spec.table if actions == "goal" else actions)
        for needed in spec.needs:
            if not any(needed in words.SPOKEN[number] for number in self._numbers.values()):
                raise ValueError(f"Level {level!r} cannot be solved without the action {needed!r}.")
        self.actions = {name: words.DESCRIPTIONS[number] for name, number in self._numbers.items()}
        self.aliases = {
            spoken: name
            for name, number in self._numbers.items()
            for spoken in words.SPOKEN[number]
            if spoken not in self._numbers
        }
        names = {number: name for name, number in self._numbers.items()}
        self.default_action = names.get(_FORWARD, next(iter(self.actions)))
        self._names = names
        self._view: list[str] = []
        self._taken: list[int] = []  # Minigrid's ids of the actions taken in this episode
        self._bumps = 0

    @property
    def mission(self) -> str:
        """The mission of the current episode, such as "go to the red ball"."""
        return str(self._level.mission)

    @property
    def tips(self) -> str:
        """Two hints, one per line."""
        return words.TIPS

    @property
    def system_prompt(self) -> str:
        """Return a short prompt if the agent can only move, and a prompt that explains every action otherwise."""
        told_here = words.MISSION_LINE.format(mission=self.mission) if self.mission_in == "system" else ""
        if max(self._numbers.values()) <= _FORWARD:
            short = words.SHORT_PROMPT.format(names=", ".join(self.actions))
            if self.observation != "text":
                short = f"{short} {words.SIGHT['image']}"
            return f"{short}\n{told_here}" if told_here else short
        listed = "\n".join(f"- {name}: {description}" for name, description in self.actions.items())
        mission = told_here or words.MISSION_IN_OBSERVATION
        return words.LONG_PROMPT.format(
            sight=words.SIGHT[self.observation], mission=mission, actions=listed, tips=self.tips
        )

    @property
    def examples(self) -> Sequence[tuple[str, str]]:
        """Worked examples for go-to levels in text; a mission in the system prompt gives the examples their target."""
        if self.observation != "text":
            return ()
        mission = re.fullmatch(r"go to (?:the|a) (\w+ \w+)", self.mission)
        if not mission:
            return ()
        own_target = mission[1]
        pairs = []
        for target, view, number in words.GO_TO_EXAMPLES:
            if number not in self._names:
                continue
            if self.mission_in == "system":
                pairs.append((view.format(target=own_target), self._names[number]))
            else:
                line = words.MISSION_LINE.format(mission=f"go to the {target}")
                pairs.append((f"{line}\n{view.format(target=target)}", self._names[number]))
        return tuple(pairs)

    def resolve_action(self, text: str) -> tuple[str, bool]:
        """Return the action that `text` names; text after "and", "then" or a comma is ignored."""
        name, valid = super().resolve_action(text)
        return (name, valid) if valid else super().resolve_action(_REMARK.sub("", normalise(text)))

    def solver(self) -> Callable[[], str]:
        """Return Minigrid's scripted player, which knows what the agent has seen so far.

        The player solves every solvable state, but may give up after a box was opened; afterwards it only turns.
        """
        level = self._make_level()
        level.reset(seed=self._level_seed)
        next_number = scripted_player(level, self._taken)
        return lambda: self._names.get(next_number(), next(iter(self.actions)))

    def render(self) -> np.ndarray | None:
        """Return the room from above as RGB [height, width, 3], uint8; None without `render_mode`."""
        return self._level.get_frame(tile_size=_TILE) if self.render_mode == "rgb_array" else None

    def metrics(self) -> dict[str, float]:
        """Return the number of steps forward that were blocked by a wall or an object."""
        return {"bumps": float(self._bumps)}

    def extra_info(self) -> dict[str, Any]:
        """Return the mission."""
        return {"mission": self.mission}

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self._level_seed = int(self.np_random.integers(2**31))
        observation, _ = self._level.reset(seed=self._level_seed)
        if self._limit_varies:
            self.max_turns = self._level.max_steps
        self._taken = []
        self._view = describe_view(observation["image"])
        self._bumps = 0

    def _act(self, action: str) -> tuple[float, bool]:
        before = tuple(self._level.agent_pos)
        observation, native, terminated, _, _ = self._level.step(self._numbers[action])
        self._taken.append(self._numbers[action])
        self._view = describe_view(observation["image"])
        self._bumps += self._numbers[action] == _FORWARD and tuple(self._level.agent_pos) == before
        return float(native if self.reward == "native" else native > 0), bool(terminated)

    def _images(self) -> tuple[np.ndarray, ...]:
        return (np.asarray(self._level.get_pov_render(self.cell_px), np.uint8),)

    def _caption(self) -> tuple[str, str]:
        return self._told([line for line in self._view if line.startswith(CARRIED)])

    def _observe(self) -> tuple[str, str]:
        return self._told(self._view)

    def _told(self, lines: list[str]) -> tuple[str, str]:
        if self.mission_in == "observation":
            lines = [words.MISSION_LINE.format(mission=self.mission), *lines]
        return "\n".join(lines), ""


def _action_numbers(names: Sequence[str]) -> dict[str, int]:
    """Return the name of each offered action -> Minigrid's id of the action."""
    known = {name: number for number, forms in enumerate(words.SPOKEN) for name in forms}
    unknown = [name for name in names if name not in known]
    if unknown:
        usual = ", ".join((*words.FULL_ACTIONS, *words.SHORT_ACTIONS))
        raise ValueError(f"Unknown actions {unknown}; the usual names are {usual}.")
    numbers = {name: known[name] for name in names}
    if len(set(numbers.values())) < len(names):
        raise ValueError(f"The actions {list(names)} name one move twice.")
    return numbers
