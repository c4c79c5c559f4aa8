"""Seeds of everything random in a rollout."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_agentrl.episodes.seeds import HELD_OUT_FROM, derive_seed, held_out_seeds


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=7))
def test_a_seed_is_the_first_word_of_numpys_sequence(parts):
    words = np.array([part % 2**32 for part in parts], dtype=np.uint32)
    first = int(np.random.SeedSequence(words).generate_state(1)[0])
    assert derive_seed(*parts) == first % HELD_OUT_FROM


def test_held_out_seeds():
    listed = held_out_seeds()
    assert len(listed) == len(set(listed)) == 512
    assert min(listed) >= HELD_OUT_FROM
    assert max(listed) < 2**31  # also a valid seed where 32 bits with sign are used
