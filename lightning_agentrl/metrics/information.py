"""What thoughts tell of the prompts that they answer: a thought that fits every prompt is a phrase."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def mutual_information(logps_NN: Tensor) -> tuple[float, float]:
    """Estimate how much N thoughts tell of their prompts (arXiv 2604.06268).

    Args:
        logps_NN: log-prob of the i-th thought after the j-th prompt, its own where i = j.

    Returns:
        The mutual information of prompt and thought in nats, ``mean_i(logp_ii - log mean_j exp(logp_ij))``, at most log
        N; and the share of thoughts that are likelier after their own prompt than after any other, 1 / N by chance.
    """
    logps_NN = logps_NN.double()
    count = len(logps_NN)
    own_N = logps_NN.diagonal()
    marginal_N = torch.logsumexp(logps_NN, 1) - math.log(count)
    others_N = logps_NN.masked_fill(torch.eye(count, dtype=torch.bool), -math.inf).amax(1)
    return float((own_N - marginal_N).mean()), float((own_N > others_N).double().mean())
