"""The ZoomSearch environment: a large picture that is shown small, a zoom tool, an answer."""

import json
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
from gymnasium import spaces
from PIL import ImageDraw

from agentrl_envs.tags import Answer, CallError, read_tag, resolve_tag
from agentrl_envs.text_env import TextEnv
from agentrl_envs.wording import read_wording
from agentrl_envs.zoom_search.boxes import Box, holds, overlap, sound_box, view
from agentrl_envs.zoom_search.scene import COLOURS, Level, draw_scene

Coords = Literal["norm1000", "original_px", "shown_px"]

_WORDING = read_wording("agentrl_envs.zoom_search")
_MAX_RATIO = 100.0
_SAME = 0.9  # overlap from which on a part has been seen
_RIGHT, _FOUND, _NO_ANSWER = 1.0, 0.2, -0.2
_INVALID, _MOST_INVALID = 0.05, 4  # the cost of an invalid turn, and how many of them cost it


class ZoomSearch(TextEnv):
    """Answer a question about something small in a large picture.

    The first observation shows the whole picture, made smaller by `downscale`; a zoom shows a part of the original in
    as many pixels. The reply is free text; its last `<call>` or `<answer>` counts.

    A right answer pays 1, and 0.2 more if a zoom has shown all of the target; a wrong one pays 0. A turn that cannot be
    used (no tag, no JSON, no box of the picture) is answered by an observation that says why and costs 0.05, four times
    at most. An episode without an answer costs 0.2. A part that has been shown already (overlap above 0.9) is not shown
    again.

    Args:
        level: "colour" can be told without a zoom; "number" needs one; for "two_steps" the target must be looked for in
            parts of the picture first.
        canvas_px: side of the original in pixels, 512 to 1536.
        downscale: how many times smaller the whole picture is shown, 2 to 16; below 8 numerals can be guessed from it.
        view_px: side of each image in pixels; by default `canvas_px` / `downscale`, and not less. More pixels cost more
            tokens and tell no more: 1024 are 1,024 tokens with patches of 16 that are merged by 2.
        coords: what boxes are given in: thousandths of the picture, its pixels, or those of the first image.
        min_side: pixels of the original; a shorter side of a box is made so long.
        max_turns: turns after which an episode is truncated.
        max_images: images of an episode, the first one with them; None: as many as there are turns.
        no_tag: what a reply without a tag is: an "invalid" turn, or the "end" of the episode without an answer.
        render_mode: "rgb_array" makes `render` draw the picture with the target and the boxes that were asked for.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 1}  # noqa: RUF012 - declared by gymnasium

    free_text = True
    actions = _WORDING.actions
    default_action = _WORDING.default_action

    def __init__(
        self,
        level: Level = "number",
        canvas_px: int = 1536,
        downscale: int = 8,
        view_px: int | None = None,
        coords: Coords = "norm1000",
        min_side: int = 32,
        max_turns: int = 6,
        max_images: int | None = None,
        no_tag: Literal["invalid", "end"] = "invalid",
        render_mode: Literal["rgb_array"] | None = None,
    ) -> None:
        super().__init__()
        for name, value, known in (
            ("level", level, get_args(Level)),
            ("coords", coords, get_args(Coords)),
            ("no_tag", no_tag, ("invalid", "end")),
            ("render_mode", render_mode, (None, "rgb_array")),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, not {value!r}.")
        if not 512 <= canvas_px <= 1536:
            raise ValueError(f"canvas_px must be 512 to 1536 pixels, not {canvas_px}.")
        if not (2 <= downscale <= 16 and canvas_px % downscale == 0):
            raise ValueError(f"downscale must be 2 to 16 and divide canvas_px ({canvas_px}), and {downscale} does not.")
        detail = canvas_px // downscale
        if view_px is not None and not detail <= view_px <= 4096:
            raise ValueError(
                f"view_px must be at least canvas_px / downscale, {detail}, and at most 4096, not {view_px}."
            )
        if not 1 <= min_side <= canvas_px:
            raise ValueError(f"min_side must be 1 to canvas_px ({canvas_px}), not {min_side}.")
        if max_images is not None and max_images < 1:
            raise ValueError(f"max_images must be at least 1, since the first image shows the whole, not {max_images}.")
        self.level: Level = level
        self.canvas_px = canvas_px
        self.view_px = detail if view_px is None else view_px
        self.coords = coords
        self.min_side = min_side
        self.max_turns = max_turns
        self.max_images = max_images
        self.no_tag = no_tag
        self.render_mode = render_mode
        self._detail = detail
        self._show("image", spaces.Box(0, 255, (self.view_px, self.view_px, 3), np.uint8))
        self._scene = draw_scene(np.random.default_rng(0), level, canvas_px)  # until the first episode
        self._begin()

    def _begin(self) -> None:
        whole = (0, 0, self.canvas_px, self.canvas_px)
        self._shown: list[Box] = [whole]
        self._new: tuple[np.ndarray, ...] = (view(self._scene.picture, whole, self._detail, self.view_px),)
        self._text = _WORDING.texts["begin"]
        self._error = ""
        self._calls = self._faults = 0
        self._found = self._right = False

    @property
    def question(self) -> str:
        """The question of the current episode."""
        return _WORDING.texts[self.level].format(colours=", ".join(COLOURS), mark=self._scene.mark)

    @property
    def system_prompt(self) -> str:
        """The two tags, what boxes are given in, and the question."""
        texts = _WORDING.texts
        coords = texts[self.coords].format(canvas=self.canvas_px, view=self.view_px)
        form = texts["form_colour" if self.level == "colour" else "form_number"]
        return _WORDING.system_prompt.format(coords=coords, form=form, question=self.question)

    def resolve_action(self, text: str) -> tuple[str, bool]:
        """Return the last tag of a reply, and whether it can be used."""
        return resolve_tag(text, self._read)

    def success(self) -> bool:
        """Return whether the answer is right."""
        return self._right

    def metrics(self) -> dict[str, float]:
        """Return how many parts were shown, how many turns were invalid, and whether a part held the target."""
        return {
            "zooms": float(len(self._shown) - 1),
            "invalid_calls": float(self._faults),
            "target_seen": float(self._found),
        }

    def extra_info(self) -> dict[str, Any]:
        """Return the question, the number of tool calls so far, and what was wrong with the last reply."""
        return {"question": self.question, "tool_calls": self._calls, "error": self._error}

    def solver(self) -> Callable[[], str]:
        """Return a player that knows where the target is: it zooms onto it, in one or two steps, and answers."""

        def player() -> str:
            sides = [self.canvas_px // 2, self._detail] if self.level == "two_steps" else [self._detail]
            boxes = [self._around(max(side, self.min_side)) for side in sides]  # what a smaller box would become
            unseen = [box for box in boxes if not any(overlap(box, shown) > _SAME for shown in self._shown)]
            if not unseen or (self.max_images is not None and len(self._shown) >= self.max_images):
                return f"<answer>{self._scene.answer}</answer>"
            box = [round(side / self._scale, 3) for side in unseen[0]]
            call = json.dumps({"name": "zoom", "arguments": {"box": box}})
            return f"<call>{call}</call>"

        return player

    def render(self) -> np.ndarray | None:
        """Return the picture as RGB [side, side, 3], uint8, half as large; None without `render_mode`."""
        if self.render_mode is None:
            return None
        picture = self._scene.picture.copy()
        pen = ImageDraw.Draw(picture)
        for box, colour in [(self._scene.target, "black"), *((box, "yellow") for box in self._shown[1:])]:
            pen.rectangle((box[0] - 6, box[1] - 6, box[2] + 5, box[3] + 5), outline=colour, width=6)
        return np.asarray(picture.reduce(2))

    @property
    def _scale(self) -> float:
        """Pixels of the original for each unit of a box."""
        return self.canvas_px / {"norm1000": 1000, "original_px": self.canvas_px, "shown_px": self.view_px}[self.coords]

    def _around(self, side: int) -> Box:
        """Return a square round the target, within the picture."""
        left, top, right, bottom = self._scene.target
        x, y = (
            min(max((low + high - side) // 2, 0), self.canvas_px - side) for low, high in ((left, right), (top, bottom))
        )
        return x, y, x + side, y + side

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self._scene = draw_scene(self.np_random, self.level, self.canvas_px)
        self._begin()

    def _read(self, tag: str) -> Answer | Box:
        """Return what a tag means.

        Raises:
            CallError: it cannot be used.
        """
        call = read_tag(tag)
        if isinstance(call, Answer):
            return call
        if call.tool != "zoom":
            raise CallError(_WORDING.texts["unknown"].format(tool=json.dumps(call.tool[:20])))
        return sound_box(
            call.arguments.get("box"), self._scale, (self.canvas_px, self.canvas_px), self.min_side, _MAX_RATIO
        )

    def _act(self, action: str) -> tuple[float, bool]:
        self._new, self._error = (), ""
        self._calls += action.startswith(("<call>", "<tool_call>"))
        reward, ended = 0.0, False
        try:
            meant = self._read(action)
        except CallError as error:
            self._faults += 1
            self._error, self._text = str(error), _WORDING.texts["fault"]
            reward, ended = -_INVALID * (self._faults <= _MOST_INVALID), self.no_tag == "end" and not action
        else:
            if isinstance(meant, Answer):
                self._right = meant.text.casefold().rstrip(".") == self._scene.answer
                self._text = _WORDING.texts["right" if self._right else "wrong"]
                return (_RIGHT + _FOUND * self._found) * self._right, True
            self._zoom(meant)
        if ended or self.turn + 1 >= self.max_turns:
            reward += _NO_ANSWER
        return reward, ended

    def _zoom(self, box: Box) -> None:
        if any(overlap(box, shown) > _SAME for shown in self._shown):
            self._text = _WORDING.texts["seen"]
        elif self.max_images is not None and len(self._shown) >= self.max_images:
            self._text = _WORDING.texts["too_many"]
        else:
            self._shown.append(box)
            self._found |= holds(box, self._scene.target)
            self._new = (view(self._scene.picture, box, self._detail, self.view_px),)
            self._text = _WORDING.texts["zoomed"]

    def _images(self) -> tuple[np.ndarray, ...]:
        return self._new

    def _observe(self) -> tuple[str, str]:
        return self._caption()

    def _caption(self) -> tuple[str, str]:
        box = [round(side / self._scale) for side in self._shown[-1]]
        left = _WORDING.texts["left"].format(turns=max(self.max_turns - self.turn, 0))
        return self._text.format(fault=self._error, box=box, left=left), ""
