"""Activation checkpointing, by the name that the installed transformers has for it."""

from __future__ import annotations

from transformers import PreTrainedModel


def checkpoint_activations(lm: PreTrainedModel) -> None:
    """Recompute activations in the backward pass, layer by layer, where training would keep them.

    Raises:
        ValueError: the model has no layers that can be recomputed.
    """
    kwargs, enable = {"use_reentrant": False}, getattr(lm, "activation_checkpointing_enable", None)
    if enable is None:  # an older transformers; 6.0 has the new name alone
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    else:
        enable(activation_checkpointing_kwargs=kwargs)
