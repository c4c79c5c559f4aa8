"""Pictures of users: a gymnasium space for pictures of any size, and conversion of 16-bit pictures."""

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from PIL import Image


class PictureSpace(spaces.Space[NDArray[np.uint8]]):
    """Space of RGB pictures, uint8 [height, width, 3], whose sides have 1 to `most` pixels."""

    def __init__(self, most: int) -> None:
        super().__init__(shape=None, dtype=np.uint8)
        self.most = most

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def sample(self, mask: Any = None, probability: Any = None) -> NDArray[np.uint8]:
        """Return a small picture of noise."""
        height, width = (int(side) for side in self.np_random.integers(1, min(self.most, 64) + 1, size=2))
        return self.np_random.integers(0, 256, size=(height, width, 3), dtype=np.uint8)

    def contains(self, x: Any) -> bool:
        return (
            isinstance(x, np.ndarray)
            and x.dtype == np.uint8
            and x.ndim == 3
            and x.shape[2] == 3
            and all(1 <= side <= self.most for side in x.shape[:2])
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PictureSpace) and other.most == self.most

    def __repr__(self) -> str:
        return f"PictureSpace({self.most})"


def of_8_bits(picture: Image.Image) -> Image.Image:
    """Convert 16-bit greys to their highest 8 bits; Pillow's own conversion would make nearly all greys white."""
    if not picture.mode.startswith("I;16"):
        return picture
    return Image.fromarray((np.asarray(picture).astype(np.uint16) >> 8).astype(np.uint8))
