"""What has to be computed: who reads a score that is not there is told to declare it."""

from __future__ import annotations

import pytest
import torch

from lightning_agentrl.agents.needs import naming_missing
from lightning_agentrl.types import Scores


def test_an_error_names_the_scores_that_were_not_computed() -> None:
    scores = Scores(old_logps=torch.zeros(1, 1))
    with pytest.raises(TypeError) as caught, naming_missing(scores):
        _ = scores.old_logps - scores.ref_logps  # type: ignore[operator]
    (note,) = caught.value.__notes__
    assert note.startswith("scores that were not computed: ref_logps, ")
    assert "old_logps" not in note
    assert note.endswith("declare in `needs` what is read")
