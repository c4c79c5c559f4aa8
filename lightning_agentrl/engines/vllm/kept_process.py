"""A process that stays as it was though vLLM is imported and started in it."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

QUIET = {"VLLM_CONFIGURE_LOGGING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
"""While vLLM is imported. Its own configuration closes all handlers of the process, and may set levels of others."""


@contextmanager
def kept_process(device: torch.device) -> Iterator[None]:
    """Undo what vLLM changes: random states, threads, precision of products, logging, variables.

    Variables of vLLM's own stay, as it reads them at any time. It samples with the trainer's precision of products in
    float32, as the trainer scores. Variables of the user about vLLM's logging are followed.
    """
    variables, precision = dict(os.environ), torch.get_float32_matmul_precision()
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    states = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    quiet = not any(name.startswith(("VLLM_LOGGING_", "VLLM_CONFIGURE_LOGGING")) for name in variables)
    if quiet:
        os.environ.update(QUIET)
        if logging.getLogger("vllm").level == logging.NOTSET:
            logging.getLogger("vllm").setLevel(logging.ERROR)
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_num_threads = set_num_threads  # vLLM replaces this function on a CPU
        if devices:
            torch.set_num_threads(threads)  # beside a GPU it sets one thread for the whole process
        torch.set_float32_matmul_precision(precision)
        for name in set(os.environ) | set(variables):
            if (name in QUIET or not name.startswith("VLLM_")) and os.environ.get(name) != variables.get(name):
                if name in variables:
                    os.environ[name] = variables[name]
                else:
                    del os.environ[name]
