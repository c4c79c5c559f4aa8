"""The ZoomSearch environment: a large picture shown at low resolution, a zoom tool, and an answer."""

import json
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
from gymnasium import spaces
from PIL import ImageDraw

from agentrl_envs.geometry.tasks import read_rows
from agentrl_envs.tags import Answer, CallError, read_tag, resolve_tag
from agentrl_envs.text_env import TextEnv
from agentrl_envs.wording import read_wording
from agentrl_envs.zoom_search.boxes import Box, holds, overlap, sound_box, view
from agentrl_envs.zoom_search.pictures import read_scene
from agentrl_envs.zoom_search.scene import COLOURS, Level, Scene, draw_scene

Coords = Literal["norm1000", "original_px", "shown_px"]

_WORDING = read_wording("agentrl_envs.zoom_search")
_MAX_RATIO = 100.0
_VIEW_PX = 448  # side of images of your own pictures
_SAME = 0.9  # overlap above which a part counts as shown before
_RIGHT, _FOUND, _NO_ANSWER = 1.0, 0.2, -0.2
_INVALID, _MOST_INVALID = 0.05, 4  # cost of an invalid turn, and number of turns that cost it


class ZoomSearch(TextEnv):
    """Answer a question about something small in a large picture.

    The first observation shows the whole picture, scaled down by `downscale`; a zoom shows a part of the original in
    the same number of pixels. The reply is free text; its last `<call>` or `<answer>` counts.

    A right answer pays 1, and 0.2 more if zooms have shown the whole target; a wrong answer pays 0. A turn with an
    invalid reply (no tag, no JSON, or no box of the picture) costs 0.05, at most four times, and the next observation
    gives the reason. An episode without an answer costs 0.2. A zoom does not show a part again that was shown before
    (overlap above 0.9).

    Args:
        source: data set of your own pictures: a folder with `<split>.jsonl` or `<split>.parquet`, one such file, or the
            id of a data set on the hub. A row has `question`, `answer`, `image` (a path below the folder) and
            optionally `boxes`, the regions to find, in pixels of the picture. Each episode draws a row. None means
            generated pictures; `level`, `canvas_px` and `downscale` apply only to generated pictures.
        split: split of the data set.
        level: "colour" can be answered without a zoom; "number" needs a zoom; in "two_steps" the agent must first
            search for the target in parts of the picture.
        canvas_px: side of the original in pixels, 512 to 1536.
        downscale: factor by which the whole picture is scaled down, 2 to 16; below 8, its numerals can be guessed.
        view_px: side of each image in pixels; by default and at least `canvas_px` / `downscale`. More pixels cost more
            tokens without more detail of generated pictures: 1024 pixels are 1,024 tokens with patches of 16 that are
            merged 2 by 2. For your own pictures, `view_px` is the longer side of the shown part, 448 by default.
        coords: unit of boxes: thousandths of the picture ("norm1000"), its pixels ("original_px"), or pixels of the
            first image ("shown_px", for generated pictures only).
        min_side: smallest side of a box in pixels of the original; a shorter side is enlarged.
        max_turns: turns after which an episode is truncated.
        max_images: largest number of images in an episode, including the first; None means no limit besides the turns.
        no_tag: effect of a reply without a tag: an "invalid" turn, or the "end" of the episode without an answer.
        render_mode: "rgb_array" makes `render` draw the picture with the target and the requested boxes.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 1}  # noqa: RUF012 - declared by gymnasium

    free_text = True
    actions = _WORDING.actions
    default_action = _WORDING.default_action

    def __init__(
        self,
        source: str | None = None,
        split: str = "train",
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
        if source is not None and (level, canvas_px, downscale) != ("number", 1536, 8):
            raise ValueError("level, canvas_px and downscale are for generated pictures; omit them with a source.")
        if source is not None and coords == "shown_px":
            raise ValueError('coords "shown_px" needs square pictures; take "norm1000" or "original_px" with a source.')
        if not 512 <= canvas_px <= 1536:
            raise ValueError(f"canvas_px must be 512 to 1536 pixels, not {canvas_px}.")
        if not (2 <= downscale <= 16 and canvas_px % downscale == 0):
            raise ValueError(f"downscale must be 2 to 16 and divide canvas_px ({canvas_px}), and {downscale} does not.")
        detail = canvas_px // downscale if source is None else view_px or _VIEW_PX
        if view_px is not None and not detail <= view_px <= 4096:
            raise ValueError(
                f"view_px must be at least canvas_px / downscale, {detail}, and at most 4096, not {view_px}."
            )
        if source is None and not 1 <= min_side <= canvas_px:
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
        self._rows = None if source is None else read_rows(source, split)
        self._name = f"of {source!r} ({split})"
        self._scene = self._draw(np.random.default_rng(0))  # placeholder until the first episode
        self._begin()

    def _draw(self, random: np.random.Generator) -> Scene:
        if self._rows is None:
            return draw_scene(random, self.level, self.canvas_px)
        if not len(self._rows):
            raise ValueError(f"There is no row {self._name}.")
        place = int(random.integers(len(self._rows)))
        return read_scene(self._rows[place], f"Row {place} {self._name}")

    def _begin(self) -> None:
        whole = (0, 0, *self._scene.picture.size)
        self._shown: list[Box] = [whole]
        self._new: tuple[np.ndarray, ...] = (view(self._scene.picture, whole, self._detail, self.view_px),)
        self._text = _WORDING.texts["begin"]
        self._error = ""
        self._calls = self._faults = 0
        self._right = False
        self._held: set[Box] = set()  # targets that a zoom has shown completely

    @property
    def question(self) -> str:
        """The question of the current episode."""
        if self._scene.question:
            return self._scene.question
        return _WORDING.texts[self.level].format(colours=", ".join(COLOURS), mark=self._scene.mark)

    @property
    def system_prompt(self) -> str:
        """Text that explains the two tags and the unit of boxes, and asks the question."""
        texts, (width, height) = _WORDING.texts, self._scene.picture.size
        own = "_own" if self._rows is not None and self.coords == "original_px" else ""
        sizes = {"canvas": self.canvas_px, "view": self.view_px, "width": width, "height": height}
        coords = texts[f"{self.coords}{own}"].format(**sizes)
        form = "own" if self._rows is not None else "colour" if self.level == "colour" else "number"
        form = texts[f"form_{form}"]
        return _WORDING.system_prompt.format(coords=coords, form=form, question=self.question)

    def resolve_action(self, text: str) -> tuple[str, bool]:
        """Return the last tag of a reply, and whether this tag can be used."""
        return resolve_tag(text, self._read)

    @property
    def _found(self) -> bool:
        """Whether zooms have shown all targets completely."""
        return bool(self._scene.targets) and self._held == {*self._scene.targets}

    def success(self) -> bool:
        """Return whether the answer is right."""
        return self._right

    def metrics(self) -> dict[str, float]:
        """Return the count of shown parts, the count of invalid turns, and whether a part contained the target."""
        return {
            "zooms": float(len(self._shown) - 1),
            "invalid_calls": float(self._faults),
            "target_seen": float(self._found),
        }

    def extra_info(self) -> dict[str, Any]:
        """Return the question, the number of tool calls so far, and what was wrong with the last reply."""
        return {"question": self.question, "tool_calls": self._calls, "error": self._error}

    def solver(self) -> Callable[[], str]:
        """Return a player that knows where the target is, zooms to the target in one or two steps, and answers."""

        def player() -> str:
            drawn = self._rows is None
            sides = [self.canvas_px // 2, self._detail] if drawn and self.level == "two_steps" else [self._detail]
            # Request boxes of at least `min_side`, since a smaller box would be enlarged.
            boxes = [self._around(box, max(side, self.min_side)) for box in self._scene.targets for side in sides]
            unseen = [box for box in boxes if not any(overlap(box, shown) > _SAME for shown in self._shown)]
            if not unseen or (self.max_images is not None and len(self._shown) >= self.max_images):
                return f"<answer>{self._scene.answers[0]}</answer>"
            box = [round(side / unit, 3) for side, unit in zip(unseen[0], self._units * 2, strict=True)]
            call = json.dumps({"name": "zoom", "arguments": {"box": box}})
            return f"<call>{call}</call>"

        return player

    def render(self) -> np.ndarray | None:
        """Return the picture as RGB [side, side, 3], uint8, half as large; None without `render_mode`."""
        if self.render_mode is None:
            return None
        picture = self._scene.picture.copy()
        pen = ImageDraw.Draw(picture)
        targets = [(box, "black") for box in self._scene.targets]
        for box, colour in [*targets, *((box, "yellow") for box in self._shown[1:])]:
            pen.rectangle((box[0] - 6, box[1] - 6, box[2] + 5, box[3] + 5), outline=colour, width=6)
        return np.asarray(picture.reduce(2))

    @property
    def _units(self) -> tuple[float, float]:
        """Pixels of the original picture per unit of a box coordinate, for x and y."""
        width, height = self._scene.picture.size
        if self.coords == "norm1000":
            return width / 1000, height / 1000
        unit = 1.0 if self.coords == "original_px" else width / self.view_px
        return unit, unit

    def _around(self, target: Box, side: int) -> Box:
        """Return a square around a target, cut to the picture if the picture is narrower than the square."""
        low, high = [], []
        for axis, most in enumerate(self._scene.picture.size):
            begin, end = target[axis], target[axis + 2]
            long = min(max(side, end - begin), most)
            low.append(min(max((begin + end - long) // 2, 0), most - long))
            high.append(low[-1] + long)
        return low[0], low[1], high[0], high[1]

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self._scene = self._draw(self.np_random)
        self._begin()

    def _read(self, tag: str) -> Answer | Box:
        """Parse a tag.

        Raises:
            CallError: the tag cannot be used.
        """
        call = read_tag(tag)
        if isinstance(call, Answer):
            return call
        if call.tool != "zoom":
            raise CallError(_WORDING.texts["unknown"].format(tool=json.dumps(call.tool[:20])))
        return sound_box(call.arguments.get("box"), self._units, self._scene.picture.size, self.min_side, _MAX_RATIO)

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
                self._right = meant.text.casefold().rstrip(".") in self._scene.answers
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
            self._held |= {target for target in self._scene.targets if holds(box, target)}
            self._new = (view(self._scene.picture, box, self._detail, self.view_px),)
            self._text = _WORDING.texts["zoomed"]

    def _images(self) -> tuple[np.ndarray, ...]:
        return self._new

    def _observe(self) -> tuple[str, str]:
        return self._caption()

    def _caption(self) -> tuple[str, str]:
        box = [round(side / unit) for side, unit in zip(self._shown[-1], self._units * 2, strict=True)]
        left = _WORDING.texts["left"].format(turns=max(self.max_turns - self.turn, 0))
        return self._text.format(fault=self._error, box=box, left=left), ""
