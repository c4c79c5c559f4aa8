from __future__ import annotations

import pytest
import torch

from lightning_agentrl.advantages import compress

MASK = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 1], [0, 0, 1, 0]])
TURNS = torch.tensor([[9, 4, 4, 9], [0, 0, 0, 0], [1, 9, 9, 2], [9, 9, 0, 9]])
LABELS = torch.tensor([5, 5, 5, 2])  # the third row comes before the first in its episode


def test_rows_of_a_episode_follow_each_other_by_turn():
    layout = compress(MASK, TURNS, LABELS)
    columns = torch.arange(16).view(4, 4)
    assert layout.mask_NL.tolist() == [[True, False, False, False], [True] * 4]
    assert layout.gather(columns).tolist() == [[14, 0, 0, 0], [8, 11, 1, 2]]
    assert layout.last_row_N.tolist() == [3, 0]


def test_scatter_undoes_gather_and_leaves_zeros():
    layout = compress(MASK, TURNS, LABELS)
    numbers = torch.randn(4, 4)
    back = layout.scatter(layout.gather(torch.where(MASK.bool(), numbers, torch.nan)))
    assert torch.equal(back, torch.where(MASK.bool(), numbers, 0))


def test_scatter_does_not_read_padding():
    layout = compress(MASK, TURNS, LABELS)
    numbers = torch.where(layout.mask_NL, 1.0, torch.nan)
    assert torch.equal(layout.scatter(numbers), MASK.float())


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (3, 0), (3, 4)])
def test_without_tokens_there_are_no_episodes(shape: tuple[int, int]):
    layout = compress(torch.zeros(shape), torch.zeros(shape, dtype=torch.int64), torch.zeros(shape[:1]))
    assert layout.gather(torch.ones(shape)).shape == (0, 0)
    assert torch.equal(layout.scatter(torch.zeros(0, 0)), torch.zeros(shape))


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="episode labels"):
        compress(MASK, TURNS, LABELS[:2])
    with pytest.raises(ValueError, match="episode labels"):
        compress(MASK[:, None], TURNS[:, None], LABELS)
    with pytest.raises(ValueError, match="shape of the mask"):
        compress(MASK, TURNS, LABELS).gather(torch.zeros(4, 5))


def test_numbers_of_a_episode_are_those_of_its_rows_with_tokens():
    layout = compress(MASK, TURNS, LABELS)
    assert layout.of_episode("number", torch.tensor([3, -1, 3, 8])).tolist() == [8, 3]
    assert torch.equal(layout.spread(torch.tensor([8.0, 3.0])), MASK * torch.tensor([3.0, 0, 3, 8])[:, None])
    assert layout.mask_NL.sum(1).tolist() == [1, 4]
    with pytest.raises(ValueError, match="rows of one episode differ in their number; they must be the same"):
        layout.of_episode("number", torch.tensor([3, 3, 4, 8]))
    with pytest.raises(ValueError, match=r"expected number of shape \[4\], got \[2\]"):
        layout.of_episode("number", torch.zeros(2))


def test_turns_of_a_episode():
    """The longer one has turns 1, 2 and 4 in columns 8, 11 and (1, 2)."""
    turns = compress(MASK, TURNS, LABELS).turns(TURNS)
    numbers = torch.tensor([[14.0, 0, 0, 0], [8, 11, 1, 2]])
    assert turns.mask_NJ.tolist() == [[True, False, False], [True, True, True]]
    assert turns.sum(numbers).tolist() == [[14, 0, 0], [8, 11, 3]]
    assert turns.at_ends(numbers).tolist() == [[14, 0, 0], [8, 11, 2]]
    assert turns.spread(torch.tensor([[5.0, 0, 0], [1, 2, 3]])).tolist() == [[5, 0, 0, 0], [1, 2, 3, 3]]
    nothing = compress(torch.zeros(2, 3), TURNS[:2, :3], LABELS[:2]).turns(TURNS[:2, :3])
    assert nothing.sum(torch.zeros(0, 0)).shape == (0, 0)
