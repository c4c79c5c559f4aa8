"""What nobody reads is not computed, and nothing that is read changes."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import decoder_layers, load_causal_lm
from lightning_agentrl.models.packing import Packed, pack
from lightning_agentrl.types import Row
from tests.inputs import text_row
from tests.models.gradients import gradient

ROWS = st.lists(st.lists(st.integers(3, 9), min_size=2, max_size=12), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def policy(tiny_folder):
    return LanguageModel(load_causal_lm(str(tiny_folder)).double())


def read_alone(policy: LanguageModel, row: Row) -> torch.Tensor:
    ids = torch.tensor([row.ids])
    return policy.lm.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, list(row.logit_positions)]


@pytest.mark.slow
@settings(max_examples=25)
@given(ROWS, st.integers(0, 10**6))
def test_read_positions_and_gradients_are_those_of_whole_rows(policy, ids, seed):
    """Also where rows are equal, and so are their places in the packed row."""
    draw = torch.Generator().manual_seed(seed)
    rows = [text_row(tuple(x), tuple(sorted({int(torch.randint(len(x), (), generator=draw)) for _ in x}))) for x in ids]
    expected = torch.cat([read_alone(policy, row) for row in rows])
    expected_gradient = gradient(policy, expected)
    hidden = policy.hidden(pack(rows))
    assert (hidden - expected).norm() <= 1e-6 * expected.norm()  # norms are in float32 whatever the model is in
    assert (gradient(policy, hidden) - expected_gradient).norm() <= 1e-6 * expected_gradient.norm()


def positions_computed(policy: LanguageModel, packed: Packed) -> list[int]:
    """Of the feed-forward network of each layer."""
    counts: list[int] = []
    layers = decoder_layers(policy.lm)
    handles = [
        layer.mlp.gate_proj.register_forward_pre_hook(lambda _, args: counts.append(args[0].shape[1]))
        for layer in layers
    ]
    policy.hidden(packed)
    for handle in handles:
        handle.remove()
    return counts


def test_the_last_network_computes_each_place_that_is_read_once(policy):
    rows = [text_row((1, 2, 3, 4, *own), (3, 4)) for own in ((5, 6), (7, 8), (5, 6))]
    packed = pack(rows)
    assert packed.tokens == 6  # what follows the last read-out is not read
    *before, last = positions_computed(policy, packed)
    assert set(before) == {6}
    assert last == 3  # the end of the prefix, and the token after it in either row


def test_a_copy_and_a_plain_pass_read_whole_rows_again(policy):
    """A pass that names no places computes all of them; a copy keeps its own."""
    row = text_row((1, 2, 3, 4, 5, 6), (1,))
    expected = policy.lm.base_model(input_ids=torch.tensor([row.ids]), use_cache=False).last_hidden_state
    twin = copy.deepcopy(policy)
    torch.testing.assert_close(twin.hidden(pack([row])), expected[0, [1]])
    for model in (policy, twin):
        found = model.lm.base_model(input_ids=torch.tensor([row.ids]), use_cache=False).last_hidden_state
        assert torch.equal(found, expected)
