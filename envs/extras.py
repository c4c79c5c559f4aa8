"""Import of the optional packages of other environment suites."""

from importlib import import_module
from typing import Any


def need(module: str, extra: str) -> Any:
    """Import a module of an extra and return it.

    Raises:
        ValueError: the module is not installed; the message names the package to install.
    """
    package = module.split(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        sentence = f"{package} is not installed; install it with pip install 'lightning-agentrl[{extra}]'"
        raise ValueError(sentence) from None
