"""Check of models of untested families: padded rows must give the same hidden states as single rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from lightning_agentrl.errors import ConfigError
from lightning_agentrl.models.attention.tree import no_mask, tree_attention_forward
from lightning_agentrl.models.prefix_tree import lay_out
from lightning_agentrl.models.vision import text_decoder

PROBE = "probed_tree"  # name of the attention implementation in transformers
MOST = 1e-3  # largest relative difference that rounding can explain
SHARED, OWN = 5, (3, 7)  # lengths in tokens


@dataclass(frozen=True)
class Found:
    """Result of a probe: relative differences from the hidden states of single rows."""

    padded: float  # difference of padded rows
    packed: float | None  # difference of rows in a prefix tree; None: the forward pass raised an error
    # Counts of layers with a window in the config, and of layers that pass a window to attention.
    windows: tuple[int, int]

    def __str__(self) -> str:
        packed = "ended with an error" if self.packed is None else f"differed by {self.packed:.1e}"
        text = f"as a prefix tree two short rows {packed}"
        layers, passed = self.windows
        return text if layers == passed else f"{text}, and attention gets the window of {passed} of {layers} layers"


@torch.no_grad()
def probe(model: str, lm: PreTrainedModel, key: str) -> Found:
    """Compare two short rows, computed with padding and in a prefix tree, with the same rows computed alone.

    Short rows cannot reveal windows or other effects of length, so passing the probe does not enable prefix sharing.

    Args:
        model: hub id or folder, for the error message.
        lm: the model in evaluation mode.
        key: config key that set the model, for the error message.

    Raises:
        ConfigError: padded rows differ from single rows, so the model cannot be trained.
    """
    draw = torch.Generator().manual_seed(0)
    size = len(cast(Tensor, lm.get_input_embeddings().weight))
    ids = torch.randint(size, (SHARED + sum(OWN),), generator=draw).tolist()
    first, rest = ids[:SHARED], ids[SHARED:]
    rows = [first + rest[: OWN[0]], first + rest[OWN[0] :]]
    decoder = cast(nn.Module, text_decoder(lm))
    alone = [_states(decoder, torch.tensor([row]))[0] for row in rows]
    found = Found(_padded(decoder, rows, alone), *_packed(lm, decoder, rows, alone))
    if not found.padded <= MOST:
        raise ConfigError(
            f"hidden states of padded rows of the model '{model}' (family {lm.config.model_type}) differ by "
            f"{found.padded:.1e} from those of single rows, and rounding explains {MOST:.0e} at most, so log-probs in "
            f"training would not match those of sampling; choose another model (key {key})"
        )
    return found


def _states(decoder: nn.Module, ids: Tensor, **arguments: Any) -> Tensor:
    return cast(Tensor, decoder(input_ids=ids.to(next(decoder.parameters()).device), use_cache=False, **arguments)[0])


def _padded(decoder: nn.Module, rows: list[list[int]], alone: list[Tensor]) -> float:
    width = max(map(len, rows))
    seen = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    found = _states(decoder, ids, attention_mask=seen.to(alone[0].device))
    return _difference([x[: len(row)] for x, row in zip(found, rows, strict=True)], alone)


def _packed(
    lm: PreTrainedModel, decoder: nn.Module, rows: list[list[int]], alone: list[Tensor]
) -> tuple[float | None, tuple[int, int]]:
    """Return the relative difference of rows in a prefix tree, and ``windows`` as in :class:`Found`."""
    told = list[int | None]()
    AttentionInterface.register(PROBE, partial(_recorded, told))
    AttentionMaskInterface.register(PROBE, sdpa_mask)
    before, device = lm.config._attn_implementation, alone[0].device
    layout = lay_out([tuple(row) for row in rows], device)
    difference = None
    try:
        lm.set_attn_implementation(PROBE)
        arguments = {"position_ids": layout.tree.positions[None], "attention_mask": no_mask(device)}
        found = _states(decoder, torch.tensor([layout.keys]), tree=layout.tree, **arguments)[0]
        difference = _difference([found[layout.places(k)] for k in range(len(rows))], alone)
    except Exception:  # noqa: BLE001 - the model code of a family that cannot read a tree may raise any error
        difference = None
    finally:
        lm.set_attn_implementation(before)
    return difference, (_windows(lm.config.get_text_config()), sum(window is not None for window in told))


def _recorded(told: list[int | None], *args: Any, sliding_window: int | None = None, **kwargs: Any) -> Any:
    told.append(sliding_window)
    return tree_attention_forward(*args, sliding_window=sliding_window, **kwargs)


def _windows(config: Any) -> int:
    """Return the number of layers with a sliding window according to the config."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return sum("sliding" in kind for kind in kinds)
    has = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return int(config.num_hidden_layers) if has else 0


def _difference(found: list[Tensor], expected: list[Tensor]) -> float:
    one, other = torch.cat(found), torch.cat(expected)
    return float((one - other).norm() / other.norm())
