"""Wrappers that make the scans and convolutions of transformers' layers follow a prefix tree.

transformers passes the keywords of a layer's forward pass on to module-level functions. The functions named here are
wrapped once per module, so that they receive the keyword ``tree`` whichever kernel they call; without a tree they
behave as before. Activation checkpointing passes the same tree again when a layer is recomputed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import __version__
from transformers.activations import ACT2FN

from lightning_agentrl.errors import ConfigError
from lightning_agentrl.models.prefix_tree import PrefixTree

Function = Callable[..., Any]


def convolution(original: Function) -> Function:
    """Wrap a causal depthwise convolution so that the first tokens of a branch read the last tokens of its parent.

    The layers of LFM2 pass on no keyword but ``seq_idx``, so the tree may be given as ``seq_idx``.
    """

    def over_tree(
        x_1CN: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        tree: PrefixTree | None = None,
        seq_idx: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        tree = seq_idx if isinstance(seq_idx, PrefixTree) else tree
        if tree is None:
            return original(x_1CN, weight, bias, activation=activation, seq_idx=seq_idx, **kwargs)
        padded = F.pad(x_1CN.to(weight.dtype), (0, 1))
        before = tree.walk.before(weight.shape[-1])
        taps = [padded[..., places] * weight[:, -1 - k, None] for k, places in enumerate(before)]
        out = torch.stack(taps).sum(0)
        out = out if bias is None else out + bias[:, None]
        return (out if activation is None else ACT2FN[activation](out)).to(x_1CN.dtype)

    return over_tree


def delta_rule(original: Function) -> Function:
    """Wrap a gated delta rule. Padding with zeros (g, beta and keys) leaves the recurrent state unchanged."""

    def over_tree(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *args: Any,
        tree: PrefixTree | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if tree is None:
            return original(query, key, value, *args, g=g, beta=beta, **kwargs)
        kwargs |= {"output_final_state": True, "cu_seqlens": None}

        def scan(part: dict[str, Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
            q, k, v, g, beta = part.values()
            return original(q, k, v, *args, g=g, beta=beta, **kwargs | {"initial_state": state})

        with torch.autocast(query.device.type, enabled=False):
            inputs = {"query": query, "key": key, "value": value, "g": g, "beta": beta}
            exact = {name: x.float() for name, x in inputs.items()}
            return tree.walk.scan(exact, scan).to(query.dtype), None

    return over_tree


def mamba2(original: Function) -> Function:
    """Wrap the scan of Mamba2. Step sizes are computed before padding, so that padding has a step size of 0."""

    def over_tree(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *args: Any,
        tree: PrefixTree | None = None,
        **kwargs: Any,
    ) -> Any:
        if tree is None:
            return original(x, dt, A, B, C, *args, **kwargs)
        kwargs |= {"return_final_states": True, "seq_idx": None}
        with torch.autocast(x.device.type, enabled=False):
            steps, bias = dt.float(), kwargs.pop("dt_bias", None)
            steps = steps if bias is None else steps + bias.float()
            steps = F.softplus(steps) if kwargs.pop("dt_softplus", False) else steps
            steps = steps.clamp(*kwargs.pop("dt_limit", (0.0, float("inf"))))

            def scan(part: dict[str, Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
                inputs = part["x"], part["dt"], A.float(), part["B"], part["C"]
                return original(*inputs, *args, **kwargs | {"initial_states": state})

            exact = {"x": x.float(), "dt": steps, "B": B.float(), "C": C.float()}
            return tree.walk.scan(exact, scan).to(x.dtype)

    return over_tree


def fused_mamba2(original: Function) -> Function:
    """Wrap the fused kernel, which cannot read trees: with a tree, make the layer call convolution and scan instead."""

    def without_tree(*args: Any, tree: PrefixTree | None = None, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if tree is None else None

    return without_tree


FUNCTIONS: dict[str, Callable[[Function], Function]] = {
    "causal_conv1d_fn": convolution,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": mamba2,
    "mamba2_split_conv1d_scan_combined": fused_mamba2,
}


def read_trees(decoder: nn.Module) -> list[str]:
    """Make the recurrent and convolution layers of a decoder accept ``tree``; return the names of wrapped functions.

    Raises:
        ConfigError: the modules of the layers have none of the expected functions in this version of transformers.
    """
    modules = {sys.modules[type(layer).__module__] for layer in decoder.modules()}
    found = []
    for module in modules:
        for name, wrap in FUNCTIONS.items():
            function = vars(module).get(name)
            if function is not None:
                found.append(name)
            if function is not None and not hasattr(function, "reads_trees"):
                wrapped = torch.compiler.disable(wraps(function)(wrap(function)))
                wrapped.reads_trees = True
                setattr(module, name, wrapped)
    if not found:
        raise ConfigError(
            f"the layers of {type(decoder).__name__} cannot read prefix trees with transformers {__version__}; install "
            "a version that pyproject.toml allows"
        )
    return sorted(set(found))
