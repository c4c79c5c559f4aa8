"""Why the log-probs of an engine are not those of the trainer: from log-probs to the likely cause, as pure functions.

Suffixes: N sampled tokens, V the vocabulary, D those of the N tokens whose whole distributions were read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from lightning_agentrl.metrics.gap import ROUGH, Bounds

EXPLAINED = 0.1  # share of the gap that a cause may leave
UNLIKELY = 7.0  # standard deviations by which the sampled tokens may be more or less likely than they should
UNSEEN = 5.0  # nats; a rare token that was not sampled is about so much less likely than the average one
MOST_RANKED = 512  # candidates of top-k
OTHER_WEIGHTS = (
    "the engine samples from other weights than those that it was sent: it leaves some out, keeps a copy of them, "
    "takes them for others (experts in another order), or runs another model"
)


@dataclass(frozen=True)
class Evidence:
    """What engine and trainer say about the same sampled tokens, each [N].

    Args:
        engine: log-probs that the engine gave.
        trainer: log-probs of the trainer.
        entropy: of the trainer's distributions.
        fresh: the prompt has no beginning in common with any that was read before.
        repeated: the token stands in its prompt, or earlier in its reply.
        older: the trainer's log-probs with the weights before the last update; None where nothing was sent before.
        unmoved: the engine gave the same replies with the same log-probs before the update.
        rounding: distances of the trainer's log-probs to its own in another precision; None where that was not asked.
    """

    engine: Tensor
    trainer: Tensor
    entropy: Tensor
    fresh: Tensor
    repeated: Tensor
    older: Tensor | None = None
    unmoved: bool = False
    rounding: Tensor | None = None

    def __len__(self) -> int:
        return len(self.engine)

    @property
    def gaps(self) -> Tensor:
        """[N] distances."""
        return (self.engine.double() - self.trainer.double()).abs()

    @property
    def mean(self) -> float:
        return float(self.gaps.mean())

    @property
    def largest(self) -> float:
        return float(self.gaps.max())

    def widened(self, bounds: Bounds) -> Bounds:
        """Return the bounds that hold for this policy, whose own rounding may be larger."""
        if self.rounding is None:
            return bounds
        return bounds.widened(float(self.rounding.mean()), float(self.rounding.max()))

    def fits(self, bounds: Bounds) -> bool:
        """Return whether the engine gives the trainer's log-probs, and its tokens are drawn from them."""
        return bounds.hold(self.mean, self.largest) and abs(surprise(self)) <= UNLIKELY

    def __str__(self) -> str:
        return f"{len(self)} tokens, gap largest {self.largest:.2g}, mean {self.mean:.2g}"

    @classmethod
    def together(cls, parts: Sequence[Evidence]) -> Evidence:
        """Join the tokens of several parts."""
        joined: dict[str, Any] = {"unmoved": all(part.unmoved for part in parts)}
        for name in (f.name for f in fields(cls) if f.name != "unmoved"):
            tensors = [getattr(part, name) for part in parts]
            joined[name] = None if any(x is None for x in tensors) else torch.cat(tensors)
        return cls(**joined)


def surprise(seen: Evidence) -> float:
    """Return by how many standard deviations the sampled tokens are more likely than tokens drawn from the trainer are.

    The log-prob of a token drawn from a distribution is minus its entropy on average, so the sum of their differences
    is a martingale, whatever was drawn before. Sampling that cuts off unlikely tokens shows here even where the engine
    gives the log-probs of the whole distribution.

    The standard deviation is estimated from the sampled tokens and one more with a difference of ``UNSEEN``. Without
    it, rounding would look significant if all tokens are equally likely, and if one token is nearly certain, so would
    the lack of all others.
    """
    excess = seen.trainer.double() + seen.entropy.double()
    return float(excess.sum()) / float(excess.square().sum() + UNSEEN**2) ** 0.5


@dataclass(frozen=True)
class Distributions:
    """Whole distributions of the trainer at some sampled tokens.

    Args:
        log_pi: [D, V] log-probs of the trainer, after temperature.
        tokens: [D] the sampled ids.
        engine: [D] log-probs that the engine gave for them.
        temperature: of the trainer.
    """

    log_pi: Tensor
    tokens: Tensor
    engine: Tensor
    temperature: float

    def taken(self, log_pi_DV: Tensor) -> Tensor:
        """Return the log-probs [D] of the sampled tokens."""
        return log_pi_DV.gather(-1, self.tokens[:, None])[:, 0].double()

    def at_temperature(self, log_factor: float) -> Tensor:
        """Return the same [D] at a multiple of the temperature, given its logarithm."""
        return self.taken((self.log_pi / math.exp(log_factor)).log_softmax(-1))

    def distance(self, predicted_D: Tensor) -> float:
        """Return the mean distance of the engine's log-probs to others [D]; those of impossible tokens count much."""
        return float((self.engine.double() - predicted_D.clamp_min(-100.0)).abs().mean())


@dataclass(frozen=True)
class Explanation:
    """A cause in words, and the mean gap that it leaves."""

    cause: str
    left: float


def likely_cause(
    seen: Evidence,
    bounds: Bounds,
    whole: Distributions,
    kept: Mapping[str, float],
) -> str:
    """Return the likely cause of a gap, or of tokens that are not drawn from their distributions, as a clause.

    Args:
        seen: the comparison that does not fit.
        bounds: what rounding explains.
        whole: distributions at some of its tokens.
        kept: the mean gap that is left if the trainer reads with the older weights of one kind alone, by its name.
    """
    enough = max(bounds.mean, EXPLAINED * seen.mean)
    if not bool(torch.isfinite(seen.engine).all()):
        return "the engine gives log-probs that are not finite"
    if not bool(torch.isfinite(seen.trainer).all()):
        return "the trainer's log-probs are not finite: its weights or its precision are at fault, not the engine"
    if bounds.hold(seen.mean, seen.largest):
        return drawn_otherwise(whole)
    if seen.unmoved:
        return (
            "no update of the weights reaches the engine, which gives the same replies before and after: it runs a "
            "model of its own"
        )
    if seen.older is not None and float((seen.engine - seen.older).abs().double().mean()) <= enough:
        return "the engine is one version behind: it samples from the weights before the last update"
    if kept_prefix(seen, bounds):
        return (
            "the engine keeps the prefix cache of older weights: only replies to prompts that begin like earlier ones "
            "are off"
        )
    explanations = [fitted_temperature(whole), fitted_top_p(whole), fitted_top_k(whole)]
    explanations += [Explanation(f"{name} is not taken over, the other weights are", gap) for name, gap in kept.items()]
    best = min(explanations, key=lambda explanation: explanation.left)
    if best.left <= enough:
        return best.cause
    if penalised(seen, bounds):
        return "the engine samples with a penalty on tokens that were there before (repetition, presence or frequency)"
    if looks_like_rounding(seen):
        return "engine and trainer compute at different precisions (dtype of the engine, trainer.precision)"
    return OTHER_WEIGHTS


def kept_prefix(seen: Evidence, bounds: Bounds) -> bool:
    """Return whether replies to fresh prompts fit, and the others do not."""
    fresh, others = seen.gaps[seen.fresh], seen.gaps[~seen.fresh]
    if not len(fresh) or not len(others):
        return False
    return bounds.hold(float(fresh.mean()), float(fresh.max())) and float(others.mean()) > bounds.mean


def penalised(seen: Evidence, bounds: Bounds) -> bool:
    """Return whether repeated tokens are less likely for the engine, and new ones more likely."""
    excess = (seen.engine - seen.trainer).double()
    again, new = excess[seen.repeated], excess[~seen.repeated]
    if not len(again) or not len(new):
        return False
    return (
        float(again.mean()) < -bounds.mean
        and float(new.mean()) > 0
        and float((new > -bounds.largest).double().mean()) > 0.9
    )


def looks_like_rounding(seen: Evidence) -> bool:
    """Return whether gaps are as small as those of 16 bits, and go both ways alike."""
    signed = (seen.engine - seen.trainer).double()
    lean = abs(float(signed.mean())) / max(float(seen.gaps.mean()), 1e-12)
    return ROUGH.hold(seen.mean / 2, seen.largest) and lean < 0.5


def fitted_temperature(whole: Distributions) -> Explanation:
    """Return the temperature at which the trainer's distributions come closest to the engine's log-probs."""

    def left(log_factor: float) -> float:
        return whole.distance(whole.at_temperature(log_factor))

    factor = math.exp(_minimised(left))
    found, own = whole.temperature * factor, whole.temperature
    sentence = f"the engine's log-probs are those of temperature {found:.3g}, the trainer's of {own:g}"
    return Explanation(sentence, left(math.log(factor)))


def fitted_top_p(whole: Distributions) -> Explanation:
    """Return the share of top-p with which the trainer's distributions come closest to the engine's log-probs."""
    sorted_DV = whole.log_pi.double().exp().sort(-1, descending=True).values
    upto_DV = sorted_DV.cumsum(-1)
    before_DV = upto_DV - sorted_DV
    tokens_D = whole.taken(whole.log_pi)
    best = Explanation("", math.inf)
    for percent in range(10, 100):
        last_D = (before_DV < percent / 100).sum(-1) - 1  # the token that reaches the share is the last one kept
        mass_D = upto_DV.gather(-1, last_D[:, None])[:, 0]
        left = whole.distance(tokens_D - mass_D.log())
        if left < best.left:
            best = Explanation(f"the engine samples with top-p of about {percent / 100:g}", left)
    return best


def fitted_top_k(whole: Distributions) -> Explanation:
    """Return the k of top-k with which the trainer's distributions come closest to the engine's log-probs."""
    most = min(MOST_RANKED, whole.log_pi.shape[-1])
    mass_DK = whole.log_pi.double().exp().topk(most).values.cumsum(-1)
    predicted_DK = whole.taken(whole.log_pi)[:, None] - mass_DK.log()
    left_K = (whole.engine.double()[:, None] - predicted_DK.clamp_min(-100.0)).abs().mean(0)
    k = int(left_K.argmin())
    return Explanation(f"the engine samples with top-k of about {k + 1}", float(left_K[k]))


def drawn_otherwise(whole: Distributions) -> str:
    """Return how tokens were drawn whose log-probs are the trainer's: what makes them most likely.

    A share or rank that no token goes beyond is all that is known of a cut, so the most likely cut is just there.
    """
    pi_DV = whole.log_pi.double().exp()
    own_D = whole.taken(whole.log_pi)
    above_DV = pi_DV > own_D.exp()[:, None] * (1 + 1e-9)
    share, rank = float((pi_DV * above_DV).sum(-1).max()), int(above_DV.sum(-1).max()) + 1
    sorted_DV = pi_DV.sort(-1, descending=True).values
    upto_DV = sorted_DV.cumsum(-1)
    in_share_D = (sorted_DV * (upto_DV - sorted_DV <= share)).sum(-1)

    def unlikely(log_factor: float) -> float:
        return -float(whole.at_temperature(log_factor).mean())

    log_factor = _minimised(unlikely)
    found, own = whole.temperature * math.exp(log_factor), whole.temperature
    likelihoods = {
        f"temperature {found:.2g}, the trainer's is {own:g}": -unlikely(log_factor),
        f"top-p of about {share:.2g}": float((own_D - in_share_D.log()).mean()),
        f"top-k of about {rank}": float((own_D - upto_DV[:, rank - 1].log()).mean()),
    }
    most_likely = max(likelihoods, key=likelihoods.__getitem__)
    return f"the engine gives the trainer's log-probs but does not sample from them: its tokens look like {most_likely}"


def _minimised(left: Callable[[float], float]) -> float:
    """Return the logarithm where a function is smallest: the best of a grid, then thirds of the space around it."""
    grid = torch.linspace(-2.5, 2.5, 41).tolist()
    at = min(range(len(grid)), key=lambda i: left(grid[i]))
    low, high = grid[max(at - 1, 0)], grid[min(at + 1, len(grid) - 1)]
    for _ in range(30):
        third = (high - low) / 3
        if left(low + third) <= left(high - third):
            high -= third
        else:
            low += third
    return (low + high) / 2
