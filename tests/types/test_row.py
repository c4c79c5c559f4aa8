"""A row: where a model is asked, and what it must read for that."""

from __future__ import annotations

from lightning_agentrl.types import Row
from tests.inputs import image, text


def test_what_stands_behind_the_last_position_is_not_read():
    row = Row(text(5, 6, 7, 8), (2, 0))
    assert (row.ids, row.input_ids, row.input_keys) == ((5, 6, 7, 8), (5, 6, 7), (5, 6, 7))
    assert Row(text(5, 6), ()).input_ids == (5,)


def test_the_images_of_a_row_are_those_that_are_read_whole():
    cat, dog = image("cat", 2), image("dog", 2)
    shown = text(1) + cat + text(2) + dog
    assert Row(shown, (2,)).images == Row(shown, (3,)).images == list(cat.images)
    assert Row(shown, (0,)).images == []
    assert Row(shown, (1, 5)).images == [*cat.images, *dog.images]
