"""Make a copy of torchvision importable where its library is not, beside a torch without CUDA.

    python tests/engines/torchvision_for_tests.py FOLDER

vLLM's models with images import torchvision. Its wheel is linked to CUDA, and without its library two operators are
missing whose shapes it registers as it is imported. Nothing that is tested here computes with them.
"""

from __future__ import annotations

import sys
from pathlib import Path

OPERATORS = """

if not _has_ops():
    _LIBRARY = torch.library.Library("torchvision", "DEF")
    _LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""

if __name__ == "__main__":
    extension = Path(sys.argv[1]) / "torchvision" / "extension.py"
    if "_LIBRARY" not in extension.read_text():
        extension.write_text(extension.read_text() + OPERATORS)
