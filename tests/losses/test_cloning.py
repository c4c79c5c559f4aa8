"""Weights of the tokens of a reply that is cloned."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_agentrl.losses.aggregation import reply_weights


@given(st.integers(1, 60), st.integers(1, 60), st.floats(0.01, 1.0))
def test_the_action_has_its_share_of_the_weight_whatever_the_length_of_the_thought(thought, action, share):
    weights = reply_weights(thought + action, thought, True, share)
    assert weights.sum().item() == pytest.approx(thought + action, rel=1e-4)
    assert weights[thought:].sum().item() == pytest.approx(share * (thought + action), rel=1e-4)
    assert weights[:thought].unique().numel() == weights[thought:].unique().numel() == 1


@pytest.mark.parametrize(("tokens", "thought"), [(3, 0), (3, 3)])
def test_without_a_thought_or_an_action_all_tokens_weigh_the_same(tokens, thought):
    assert torch.equal(reply_weights(tokens, thought, True, 0.5), torch.ones(tokens))


def test_a_reply_that_names_no_action_weighs_nothing():
    assert torch.equal(reply_weights(4, 2, False, 0.5), torch.zeros(4))
