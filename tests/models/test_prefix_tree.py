"""The layout of prefix trees, from the definition: every token of every row sees the tokens of its row before it."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_agentrl.models.prefix_tree import Branch, common_prefix_length, lay_out
from tests.inputs import image, text

rows_of_few_tokens = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), min_size=1, max_size=12
)  # few different tokens, so that rows begin alike, repeat, and are prefixes of each other


@settings(max_examples=60)
@given(rows_of_few_tokens)
def test_each_token_sees_its_own_row_only(rows):
    layout = lay_out(rows)
    mask = layout.tree.mask()
    for k, row in enumerate(rows):
        places = layout.find(k, range(len(row)))
        assert [layout.keys[place] for place in places] == list(row)
        assert layout.tree.positions[places].tolist() == list(range(len(row)))
        for position, place in enumerate(places):
            assert mask[place].nonzero().flatten().tolist() == sorted(places[: position + 1])


@settings(max_examples=60)
@given(rows_of_few_tokens)
def test_nothing_is_laid_out_twice(rows):
    assert len(lay_out(rows).keys) == len({row[: k + 1] for row in rows for k in range(len(row))})


@settings(max_examples=60)
@given(rows_of_few_tokens)
def test_segments_follow_each_other_and_nest(rows):
    tree = lay_out(rows).tree
    place = 0
    for branch in tree.branches:
        assert branch.start == place
        length = branch.stop - branch.start
        assert length > 0
        place = branch.start + branch.copies * length
        if branch.copies > 1:
            assert branch.end == place
        assert place <= branch.end <= len(tree.ends)
        above = [s for s in tree.branches if s.copies == 1 and s.start < branch.start < s.end]
        assert branch.root == (not above)
        assert all(branch.end <= s.end for s in above)
    assert place == len(tree.ends)


def test_by_hand():
    system = (1, 1, 1)
    rows = [(*system, 2, 2, 3), (*system, 2, 2, 4), (*system, 5), (*system, 6), (*system, 6), system, (9, 9)]
    layout = lay_out(rows)
    assert layout.keys == [1, 1, 1, 2, 2, 3, 4, 6, 5, 9, 9]
    assert layout.tree.positions.tolist() == [0, 1, 2, 3, 4, 5, 5, 3, 3, 0, 1]
    assert layout.tree.branches == (
        Branch(0, 3, 9, root=True),
        Branch(3, 5, 7, root=False),
        Branch(5, 6, 7, root=False, copies=2),
        Branch(7, 8, 8, root=False),
        Branch(8, 9, 9, root=False),
        Branch(9, 11, 11, root=True),
    )
    assert layout.tree.ends.tolist() == [9, 9, 9, 7, 7, 6, 7, 8, 9, 11, 11]
    assert [layout.find(k, [len(row) - 1])[0] for k, row in enumerate(rows)] == [5, 6, 8, 7, 7, 2, 10]


def test_a_history_of_hundreds_of_turns():
    """Each row goes on where another has branched off: as deep as it is long."""
    history = tuple(random.Random(0).choices(range(1000), k=3000))
    rows = [(*history[: 5 * k], -k) for k in range(1, 601)]
    layout = lay_out(rows)
    assert len(layout.keys) == 3000 + 600
    assert layout.find(599, [2999])[0] == layout.keys.index(-600) - 1
    assert layout.tree.depth == 3001


def test_window_counts_positions_within_rows():
    layout = lay_out([(1, 2, 3, 4), (1, 2, 3, 5)])
    assert layout.tree.mask(window=2).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 0, 1],
    ]


@given(rows_of_few_tokens)
def test_common_prefix(rows):
    length = common_prefix_length(rows)
    assert len({row[:length] for row in rows}) == 1
    assert any(len(row) == length for row in rows) or len({row[: length + 1] for row in rows}) > 1


def test_different_images_of_equal_length_are_laid_out_apart():
    cats, dog = [text(1, 2) + image("cat") + text(own) for own in (3, 4)], text(1, 2) + image("dog") + text(3)
    assert len(lay_out([cat.keys for cat in cats]).keys) == 2 + 4 + 1 + 1  # the same image once
    layout = lay_out([cats[0].keys, dog.keys])
    assert len(layout.keys) == 2 + 2 * (4 + 1)
    assert layout.places(0)[:2] == layout.places(1)[:2]
    assert not set(layout.places(0)[2:]) & set(layout.places(1)[2:])
