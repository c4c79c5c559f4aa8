"""Likely causes of a mismatch between engine and trainer, for `agentrl verify-engine`.

Shape suffixes: V is the size of the vocabulary, D the number of sampled tokens whose distributions are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import pairwise

import torch
from torch import Tensor

from lightning_agentrl.agents.engine_comparison import EngineComparison, Round, logps_of
from lightning_agentrl.agents.scoring import row_distributions
from lightning_agentrl.distributed import all_gather
from lightning_agentrl.engines.weights import moved

READ_WHOLE = 16  # number of replies whose distributions are computed
EXPLAINED = 0.1  # largest share of the mismatch that a cause may leave unexplained
IMPOSSIBLE = -100.0  # log-prob of a token that a sampling rule excludes
MOST_RANKED = 512  # largest k that is tried for top-k
NO_UPDATE = "no update of the weights reaches the engine, which gives the same replies before and after"
OLD_PREFIXES = "the engine keeps the prefix cache of older weights: replies to prompts without a cached prefix fit"
OTHER = (
    "none of those that can be computed (temperature, top-p, top-k, older weights): the engine may compute in another "
    "precision, apply a penalty to repeated tokens, or have other weights (a copy that no update reaches, experts in "
    "another order, another model)"
)


def likely_cause(comparison: EngineComparison, rounds: Sequence[Round], wrong: Round) -> str:
    """Return the likely cause of a failed round, as a clause. All ranks must call this function together.

    Each candidate cause predicts the engine's log-probs. The candidate that leaves the smallest mismatch is the likely
    cause if it explains most of the mismatch. If the reported log-probs match, but the tokens are not drawn from them,
    the likely cause is the candidate that makes the tokens most likely.

    Args:
        comparison: comparison of engine and trainer.
        rounds: all rounds so far.
        wrong: first round that failed.
    """
    seen, policy = wrong.seen, comparison.handle.policy
    if not seen.engine.isfinite().all():
        return "the engine's log-probs are not finite"
    if not seen.trainer.isfinite().all():
        return "the trainer's log-probs are not finite: its weights or its precision are at fault, not the engine"
    samples = wrong.samples[:READ_WHOLE]
    rows, engine_D = [each.row for each in samples], logps_of(samples)
    tokens_D = torch.tensor([token for each in samples for token in each.reply.ids])
    with moved(policy, wrong.number) if wrong.moves else nullcontext(), comparison.evaluating():
        log_pi_DV = row_distributions(policy, rows, comparison.reader).double()
    trainer_D = log_pi_DV.gather(-1, tokens_D[:, None])[:, 0]
    temperature = comparison.reader.temperature
    if seen.logps_fit:
        _, rule = best_rule(log_pi_DV, tokens_D, temperature, lambda predicted_D: -float(predicted_D.mean()))
        return f"the engine reports the trainer's log-probs, but its tokens look as if drawn with {rule}"

    def left(predicted_D: Tensor) -> float:
        return float((engine_D - predicted_D).abs().mean())

    causes = {}
    for names, cause in older_parts([name for name, weight in policy.named_parameters() if weight.requires_grad]):
        with _older_weights(comparison, wrong, names):
            causes[cause] = left(comparison.read(rows)[0])
    mismatch, rule = best_rule(log_pi_DV, tokens_D, temperature, left)
    causes[f"the engine samples with {rule}"] = mismatch
    best = min(causes, key=causes.__getitem__)
    allowed = seen.allowed.mean
    fresh_D = torch.tensor([each.fresh for each in samples for _ in each.reply.ids])
    if wrong.number == 0 and any(_unmoved(before, after) for before, after in pairwise(rounds)):
        best = NO_UPDATE
    elif causes[best] > max(allowed, EXPLAINED * seen.mean):
        only_old = float((engine_D - trainer_D)[fresh_D].abs().mean()) <= allowed
        best = OLD_PREFIXES if only_old else OTHER
    return all_gather(best)[0]


def best_rule(
    log_pi_DV: Tensor, tokens_D: Tensor, temperature: float, cost: Callable[[Tensor], float]
) -> tuple[float, str]:
    """Return the sampling rule (temperature, top-p or top-k) with the lowest cost, and the cost.

    Args:
        log_pi_DV: log-probs of the trainer [D, V].
        tokens_D: sampled tokens [D].
        temperature: temperature of the trainer.
        cost: function of the log-probs [D] that a rule predicts for the sampled tokens.
    """
    own_D = log_pi_DV.gather(-1, tokens_D[:, None])[:, 0]

    def at(log_factor: float) -> Tensor:
        return (log_pi_DV / torch.tensor(log_factor).exp()).log_softmax(-1).gather(-1, tokens_D[:, None])[:, 0]

    centre, width = 0.0, 2.5
    for _ in range(4):  # each grid is ten times finer than the previous grid
        centre = min((centre + width * torch.linspace(-1, 1, 21)).tolist(), key=lambda x: cost(at(x)))
        width /= 10
    other = temperature * float(torch.tensor(centre).exp())
    found = [(cost(at(centre)), f"temperature {other:.3g}, the trainer's is {temperature:g}")]
    sorted_DV = log_pi_DV.exp().sort(-1, descending=True).values
    upto_DV = sorted_DV.cumsum(-1)
    # Probability mass of likelier tokens.
    above_D = (sorted_DV * (sorted_DV > own_D.exp()[:, None] * (1 + 1e-9))).sum(-1)
    for percent in range(10, 100):
        last_D = (upto_DV - sorted_DV < percent / 100).sum(-1) - 1  # top-p keeps the token that reaches the share
        kept_D = own_D - upto_DV.gather(-1, last_D[:, None])[:, 0].log()
        predicted_D = kept_D.masked_fill(above_D >= percent / 100, IMPOSSIBLE)
        found.append((cost(predicted_D), f"top-p of about {percent / 100:g}"))
    for k in range(1, min(MOST_RANKED, log_pi_DV.shape[-1]) + 1):
        cut_D = own_D.exp() < sorted_DV[:, k - 1] * (1 - 1e-9)
        predicted_D = (own_D - upto_DV[:, k - 1].log()).masked_fill(cut_D, IMPOSSIBLE)
        found.append((cost(predicted_D), f"top-k of about {k}"))
    return min(found)


def older_parts(names: Sequence[str]) -> Iterator[tuple[frozenset[str], str]]:
    """Yield sets of weights that an update may have missed, with the cause: all, one kind in all layers, one tensor."""
    yield frozenset(names), "the engine is one version behind: it samples from the weights before the last update"
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(".".join("*" if part.isdigit() else part for part in name.split(".")), []).append(name)
    for label, members in (kinds | {name: [name] for name in names}).items():
        if len(names) > 1:  # with a single weight, the set would repeat the first set
            yield frozenset(members), f"{label.removeprefix('lm.')} is not updated, the other weights are"


@contextmanager
def _older_weights(comparison: EngineComparison, found: Round, names: frozenset[str]) -> Iterator[None]:
    """Set the policy's weights to those of a round, except the named weights, which stay as in the round before."""
    policy = comparison.handle.policy
    with ExitStack() as stack:
        if found.moves:
            stack.enter_context(moved(policy, found.number, lambda name: name not in names))
        if found.number:
            stack.enter_context(moved(policy, found.number - 1, names.__contains__))
        yield


def _unmoved(before: Round, after: Round) -> bool:
    """Return whether most requests had the same reply in both rounds."""
    earlier = {each.request: each.reply.ids for each in before.samples}
    same = [earlier[each.request] == each.reply.ids for each in after.samples if each.request in earlier]
    return sum(same) > len(same) / 2
