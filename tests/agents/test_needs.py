"""What has to be computed: who reads a score that is not there is told to declare it."""

from __future__ import annotations

import pytest
import torch

from lightning_agentrl.advantages import GRPO, OptimalTokenBaseline
from lightning_agentrl.agents import KL, PPOAgent
from lightning_agentrl.agents.scoring import naming_missing
from lightning_agentrl.losses import ClipCov, FixedKL, NoCorrection, TruncatedWeights
from lightning_agentrl.types import Scores


def test_an_error_names_the_scores_that_were_not_computed() -> None:
    scores = Scores(old_logps=torch.zeros(1, 1))
    with pytest.raises(TypeError) as caught, naming_missing(scores):
        _ = scores.old_logps - scores.ref_logps  # type: ignore[operator]
    (note,) = caught.value.__notes__
    assert note.startswith("scores that were not computed: ref_logps, ")
    assert "old_logps" not in note
    assert note.endswith("declare in `needs` what is read")


@pytest.mark.parametrize(
    ("kl", "reads"),
    [
        (KL(reward=0.0), False),
        (KL(reward=FixedKL(0.0)), False),
        (KL(reward=0.1), True),
        (KL(reward=0.0, loss=0.1), True),
        (None, True),
    ],
)
def test_a_reference_is_read_only_for_a_kl_that_counts(tiny_folder, kl, reads) -> None:
    needs = PPOAgent(str(tiny_folder), critic=None, advantage=GRPO(), kl=kl).needs
    assert (needs.ref_logps, needs.old_logps) == (reads, reads)


def test_parts_say_what_is_computed_for_them_and_nothing_else_is(tiny_folder) -> None:
    def needs(**parts):
        return PPOAgent(str(tiny_folder), **{"critic": None, "advantage": GRPO(), "kl": KL(reward=0.0)} | parts).needs

    plain = needs()
    for name in ("old_logps", "ref_logps", "values", "sum_pi_squared", "mini_batch_logps", "greedy_baseline"):
        assert not getattr(plain, name)
    assert needs(correction=TruncatedWeights()).old_logps
    assert not needs(correction=NoCorrection()).old_logps
    assert needs(policy_loss=ClipCov()).mini_batch_logps
    assert needs(advantage=OptimalTokenBaseline()).sum_pi_squared
    assert needs(variance_proxy=True).sum_pi_squared
