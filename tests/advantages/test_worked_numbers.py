"""Numbers worked out on paper, one estimator after the other."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_agentrl.advantages import (
    GAE,
    GDPO,
    GPG,
    GRPO,
    OPO,
    RLOO,
    BiLevelGAE,
    DrGRPO,
    DualDiscountGAE,
    Forked,
    GiGPO,
    Groups,
    MaxRL,
    OptimalTokenBaseline,
    PassAtK,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
    TurnLeaveOneOut,
    anchor_states,
    backward_sum,
    best_minus_second,
    bilevel_gae,
    centred,
    dual_discount_gae,
    gdpo_advantages,
    gpg_advantages,
    maxrl_advantages,
    minus_length_weighted,
    minus_others,
    optimal_token_baseline,
    rewards_to_go,
    standardised,
    token_energy,
    variance_proxies,
    whiten,
)
from lightning_agentrl.agents.selection import corrected
from lightning_agentrl.losses import RatioRejection, RejectOnly, TruncatedWeights
from tests.advantages.cases import Episode, Token, Visit, build, simple
from tests.same_defaults import assert_same_defaults

close = partial(torch.testing.assert_close, rtol=0, atol=1e-4)
NAN = float("nan")


def floats(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


SCORES, ONE_GROUP = floats(1, 0, 0, 1), Groups(torch.zeros(4))


def test_a_kl_alone_counts_as_much_as_a_reward_where_scores_are_divided_by_their_spread():
    kl = 0.001 * floats(0.3, 0.1, 0.1, 0.3)  # nats of an episode, times the coefficient; no episode has a reward
    close(standardised(-kl, ONE_GROUP), -standardised(SCORES, ONE_GROUP), atol=0.02)
    close(centred(-kl, ONE_GROUP), 1e-4 * floats(-1, 1, 1, -1), atol=1e-9)


def test_scores_of_one_group():
    signs = floats(1, -1, -1, 1)
    close(standardised(SCORES, ONE_GROUP), 0.8660 * signs)
    close(minus_others(SCORES, ONE_GROUP), 0.6667 * signs)
    close(centred(SCORES, ONE_GROUP), 0.5 * signs)
    close(maxrl_advantages(SCORES, ONE_GROUP), signs)


def test_groups_do_not_touch_each_other():
    groups = Groups(torch.tensor([7, -2, 7, -2, 5]))
    scores = floats(1, 10, 0, 30, 4)
    close(centred(scores, groups), floats(0.5, -10, -0.5, 10, 0))
    close(minus_others(scores, groups), floats(1, -20, -1, 20, 0))
    assert groups.single_N.tolist() == [False] * 4 + [True]


def test_a_baseline_weighted_by_length():
    """Baseline (3 * 1 + 1 * 0) / 4."""
    close(minus_length_weighted(floats(1, 0), torch.tensor([3, 1]), Groups(torch.zeros(2))), floats(0.25, -0.75))


def test_group_policy_gradient_makes_up_for_equal_groups():
    """Six episodes, two of them in a group that teaches something: alpha 3, also over ranks."""
    groups = Groups(torch.tensor([0, 0, 1, 1, 2, 2]))
    scores = floats(1, 0, 1, 1, 0, 0)
    close(gpg_advantages(scores, groups), floats(1.5, -1.5, 0, 0, 0, 0))
    elsewhere = floats(4, 0)  # four more episodes on another rank, all equal: alpha 5
    close(gpg_advantages(scores, groups, lambda x: x + elsewhere), floats(2.5, -2.5, 0, 0, 0, 0))
    close(gpg_advantages(floats(1, 1), Groups(torch.zeros(2))), floats(0, 0))


def test_only_the_best_of_a_group():
    close(best_minus_second(floats(0.2, 1, 0.7), Groups(torch.zeros(3))), floats(0, 0.3, 0))
    close(best_minus_second(floats(1, 1, 0), Groups(torch.zeros(3))), floats(0, 0, 0))  # a tie
    close(best_minus_second(floats(3, 1), Groups(torch.tensor([0, 1]))), floats(0, 0))


def test_dimensions_of_a_reward_are_normalised_before_they_are_added():
    """The format varies by 100, the reward by 1, and both count alike: (1, -1) / sqrt 2 and (-1, 1) / sqrt 2."""
    episodes = [
        Episode(
            0, (Visit(0, (Token(),), metrics={"format": -50.0}), Visit(1, (Token(reward=s),), metrics={"format": f}))
        )
        for s, f in ((1.0, 0.0), (0.0, 100.0), (0.0, 0.0))
    ]
    built = build(episodes)
    estimator = GDPO({"reward": 1.0, "format": 1.0})
    advantages, returns = estimator.estimate(built.rollout)
    root = math.sqrt(3)  # each dimension: 2 / root for the one, -1 / root for the others
    assert built.read(advantages)[0] == pytest.approx([1 / root] * 2, abs=1e-5)
    assert built.read(advantages)[2] == pytest.approx([-2 / root] * 2, abs=1e-5)
    assert built.read(returns)[1] == [100.0] * 2  # of the last turn, not the sum of both
    assert estimator.whiten
    whitened = built.read(whiten(advantages, built.rollout.action_mask))
    spread = math.sqrt(2 * (1 + 1 + 4) / 3 / 5)  # of six tokens around 0, unbiased
    assert whitened[0] == pytest.approx([1 / root / spread] * 2, abs=1e-5)


def test_a_dimension_that_is_not_reported_is_named():
    with pytest.raises(ValueError, match=r"'speed'.*0.*model\.i"):
        GDPO({"speed": 1.0}).estimate(build(simple(1.0, 0.0)).rollout)
    two_turns = Episode(0, tuple(Visit(k, (Token(),)) for k in (0, 1)))
    with pytest.raises(ValueError, match="'speed' up to its last turn 1, only reward"):
        GDPO({"speed": 1.0}).estimate(build([two_turns, *simple(0.0)]).rollout)


def test_negative_scores_are_refused_where_they_have_no_meaning():
    with pytest.raises(ValueError, match=r"MaxRL.*0.*-0\.1.*data\.init_args\.inter"):
        MaxRL().estimate(build(simple(1.0, -0.1)).rollout)
    with pytest.raises(ValueError, match=r"MaxRL.*got -0\.5"):  # whatever the scores of others
        maxrl_advantages(floats(1e6, 0, -0.5, 1), Groups(torch.tensor([0, 0, 1, 1])))


def test_rewards_that_add_up_to_zero_may_miss_it_by_rounding():
    """In float32 the first episode earns -2e-8."""
    progress = Episode(0, tuple(Visit(k, (Token(reward=r),)) for k, r in enumerate((0.1, 0.7, -0.8))))
    built = build([progress, *simple(1.0)])
    advantages, _ = MaxRL().estimate(built.rollout)
    assert built.read(advantages)[0] == pytest.approx([-1.0] * 3, abs=1e-5)


def test_scores_that_rounding_took_below_zero_count_as_zero():
    """Three members in four that lie a hair below 0 would turn the sign of the mean by which all are divided."""
    groups, hair = Groups(torch.zeros(4), torch.full((4,), 1e-5, dtype=torch.float64)), floats(-1, -1, -1, 2.1) * 1e-5
    assert hair.mean() + 1e-6 < 0
    close(maxrl_advantages(hair, groups), maxrl_advantages(hair.clamp_min(0), groups), atol=1e-12)
    close(maxrl_advantages(hair, groups)[3:], floats(1.575 / 0.625))


def test_a_dimension_may_be_reported_before_the_last_turn():
    """A reply that is asked for again ends an episode where the budget of tokens is used up, and reports nothing."""
    early = Episode(0, (Visit(0, (Token(),), metrics={"format": 3.0}), Visit(1, (Token(),), metrics={})))
    built = build([early, *simple(0.0)])
    _, returns = GDPO({"format": 1.0}).estimate(built.rollout)
    assert built.read(returns) == [[3.0, 3.0], [1.0]]


@pytest.mark.parametrize("none", [math.nan, math.inf])
def test_a_number_of_a_dimension_that_is_not_finite_stands_for_none(none: float):
    """As in the metrics. Where an episode has no other, nothing can be said of its group."""
    visits = [Visit(k, (Token(),), metrics={"format": f}) for k, f in enumerate((3.0, none))]
    advantages, returns = GDPO({"format": 1.0}).estimate(
        (built := build([Episode(0, tuple(visits)), *simple(0.0)])).rollout
    )
    assert built.read(returns) == [[3.0, 3.0], [1.0]]
    assert built.read(advantages)[1] == pytest.approx([-math.sqrt(0.5)], abs=1e-5)
    lost = build([Episode(0, tuple(visits[1:])), *simple(0.0), *simple(1.0, 0.0, group=1)])
    advantages, _ = GDPO({"format": 1.0, "reward": 1.0}).estimate(lost.rollout)
    assert [math.isnan(numbers[0]) for numbers in lost.read(advantages)] == [True, True, False, False]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_recursion_leaves_its_argument_as_it_is(rows: int):
    x = torch.ones(rows, 4)
    assert backward_sum(x).tolist() == [[4.0, 3.0, 2.0, 1.0]] * rows
    assert x.eq(1).all()


def test_reward_to_go_skips_observations():
    mask, turns = torch.tensor([[1, 0, 1]]), torch.tensor([[0, -1, 1]])
    got = rewards_to_go(floats(0, NAN, 1)[None], mask, turns, torch.tensor([0]), 0.5)
    close(got, floats(0.5, 0, 1)[None])


def test_greedy_score_as_baseline():
    token = Token(reward=0.5)
    built = build([Episode(0, (Visit(0, (token,)), Visit(1, (token,))), greedy=0.75)])
    advantages, returns = ReMax().estimate(built.rollout)
    assert built.read(advantages) == [[0.25, -0.25]]
    assert built.read(returns) == [[1.0, 0.5]]


def test_a_baseline_that_a_turn_does_not_move():
    """Rewards to go 3, 2 and 1, 4; a third episode stops after its first turn with 5."""
    rows = [[1.0, 2.0], [-3.0, 4.0], [5.0]]
    built = build([Episode(0, tuple(Visit(j, (Token(reward=r),)) for j, r in enumerate(row))) for row in rows])
    advantages, returns = TurnLeaveOneOut().estimate(built.rollout)
    assert built.read(advantages) == [[3 - 3, 2 - 4], [1 - 4, 4 - 2], [5 - 2]]
    assert built.read(returns) == [[3, 2], [1, 4], [5]]


def test_turn_baselines_leave_the_expected_gradient_as_it_is():
    """A policy of one parameter chooses whether to play a second turn. Summed over all outcomes of two episodes, the
    gradient with the baseline is the one without; that of rewards centred turn by turn is not.
    """
    p, first, second = 0.3, 1.0, -2.0  # chance to go on; rewards of the turns

    def episode(goes_on: bool) -> Episode:
        visits = [Visit(0, (Token(reward=first),)), Visit(1, (Token(reward=second),))]
        return Episode(0, tuple(visits[: 1 + goes_on]))

    def gradient(estimator: Any) -> float:
        """Of the choice in the first turn only: d log pi / dp is 1 / p or -1 / (1 - p)."""
        total = 0.0
        for a in (True, False):
            for b in (True, False):
                chance = (p if a else 1 - p) * (p if b else 1 - p)
                built = build([episode(a), episode(b)])
                advantages = built.read(estimator(built))
                total += chance * sum(
                    x[0] * (1 / p if on else -1 / (1 - p)) for x, on in zip(advantages, (a, b), strict=True)
                )
        return total / 2

    def centred_by_turn(built: Any) -> Tensor:
        rewards, mask = built.rollout.rewards, built.rollout.action_mask
        means = rewards.sum(0) / mask.sum(0).clamp_min(1)
        return (rewards - means).masked_fill(~mask, 0).flip(1).cumsum(1).flip(1) * mask

    exact = second  # d/dp of first + p second
    assert gradient(lambda built: TurnLeaveOneOut().estimate(built.rollout)[0]) == pytest.approx(exact)
    assert abs(gradient(centred_by_turn) - exact) > 0.5


def test_anchor_states():
    texts = ["a red key", "nothing", "a red kez", "a red key"]
    assert anchor_states(texts) == [0, 2, 1, 0]
    assert anchor_states(texts, 0.85) == [0, 1, 0, 0]
    assert anchor_states(["abcd", "abce"], 0.75) == [0, 0]  # 2 * 3 common letters of 8: just similar enough
    assert anchor_states(["abcd", "abce"], 0.76) == [0, 1]
    assert anchor_states([]) == []


def test_letters_that_are_common_in_a_long_observation_count_for_its_likeness():
    wall, door = "a" * 300 + "b", "a" * 300 + "c"
    assert anchor_states([wall, door], 0.99) == [0, 0]


def test_turns_that_met_the_same_state():
    """Two episodes with scores 1 and 0 that both pass a door; gamma 0.5. At the door: 0.5 * 1 and 0."""
    won = Episode(0, (Visit(0, (Token(),), "a door"), Visit(1, (Token(reward=1.0),), "a hall")))
    lost = Episode(0, (Visit(0, (Token(),), "a wall"), Visit(1, (Token(),), "a door")))
    built = build([won, lost])
    advantages, returns = GiGPO(omega=2.0, gamma=0.5, divide_by_std=False).estimate(built.rollout)
    assert built.read(advantages) == [[0.5 + 2 * 0.25, 0.5], [-0.5, -0.5 - 2 * 0.25]]
    assert built.read(returns) == [[1, 1], [0, 0]]


def test_a_state_met_twice_in_one_episode_is_two_members():
    twice = Episode(0, (Visit(0, (Token(reward=1.0),), "a door"), Visit(1, (Token(),), "a door")))
    other = Episode(0, (Visit(0, (Token(reward=1.0),), "a wall"),))
    built = build([twice, other])
    advantages, _ = GiGPO(divide_by_std=False).estimate(built.rollout)
    assert built.read(advantages) == [[0.5, -0.5], [0]]


def test_states_are_told_apart_by_their_images():
    """The same text beside another image is another state, and so is another text beside the same image."""
    visits = ("hall", "cat", 1.0), ("door", "dog", 0.0), ("wall", "dog", 2.0)
    a, b, c = (Visit(k, (Token(reward=r),), text, seen=(seen,)) for k, (text, seen, r) in enumerate(visits))
    other = Episode(0, (Visit(0, (Token(reward=0.5),), "door", seen=("cat",)),))
    for more, mean in (([], 1.5), ([other], 3.5 / 3)):
        built = build([Episode(0, (a, b)), Episode(0, (c,)), *more])
        advantages, _ = GiGPO(divide_by_std=False, gamma=1.0).estimate(built.rollout)
        want = [1 - mean, 1 - mean, 2 - mean, 0.5 - mean][: 3 + len(more)]  # of the scores: no state was met twice
        assert [x for of_episode in built.read(advantages) for x in of_episode] == pytest.approx(want)
    built = build([Episode(0, (a, b)), Episode(0, (c,)), Episode(0, (replace(a, number=1),))])
    advantages, _ = GiGPO(divide_by_std=False, gamma=1.0).estimate(built.rollout)
    assert [x[0] for x in built.read(advantages)] == pytest.approx([1 - 4 / 3, 2 - 4 / 3, 1 - 4 / 3])


MASK = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
ENERGY = torch.tensor([[0.2, 0.4, NAN], [0.1, 0.1, 0.5]], dtype=torch.float64)
TO_GO = torch.tensor([[1, 1, NAN], [0, 0, 0]], dtype=torch.float64)


def test_optimal_token_baseline():
    baseline = optimal_token_baseline(TO_GO, ENERGY, MASK, Groups(torch.zeros(2)))
    close(torch.where(MASK, baseline, 0), torch.tensor([[0.6667, 0.75, 0], [0.6667, 0.75, 0]], dtype=torch.float64))
    alone = optimal_token_baseline(TO_GO, ENERGY, MASK, Groups(torch.arange(2)), zero_tail=False)
    assert not torch.where(MASK, alone, 0).any()
    others = optimal_token_baseline(TO_GO, ENERGY, MASK, Groups(torch.zeros(2)), leave_one_out=True)
    close(torch.where(MASK, others, 0), torch.tensor([[0, 0, 0], [1, 1, 0]], dtype=torch.float64))


def test_optimal_token_baseline_of_rows_with_observations():
    """The same numbers from log-probs: w = 1 - 2 pi + sum pi^2 with pi = 0.5 is the sum of squares."""
    half = math.log(0.5)
    rows = [((0.2, 0.0), (0.4, 1.0)), ((0.1, 0.0), (0.1, 0.0), (0.5, 0.0))]
    episodes = [
        Episode(0, tuple(Visit(j, (Token(r, logp=half, sum_pi_squared=w),)) for j, (w, r) in enumerate(row)))
        for row in rows
    ]
    for one_row in (True, False):
        built = build(episodes, one_row=one_row, seed=1, noise=NAN)
        advantages, returns = OptimalTokenBaseline().estimate(built.rollout)
        assert built.read(advantages)[0] == pytest.approx([0.3333, 0.25], abs=1e-4)
        assert built.read(advantages)[1] == pytest.approx([-0.6667, -0.75, 0], abs=1e-4)
        assert built.read(returns) == [[1, 1], [0, 0, 0]]


REJECTED = {
    "none": (None, [[0.1667, 0.1429], [-0.8333, -0.8571, 0], [0.1667, 0.1429]]),
    "weights": (TruncatedWeights(cap=2.0), [[0.0667, 0.0625], [-0.9333, -0.9375, 0], [0.0667, 0.0625]]),
    "rejection": (RejectOnly(), [[0.3333, 0.25], [-0.6667, -0.75, 0], [0, 0]]),
    "both": (TruncatedWeights(cap=2.0, rejections=[RatioRejection()]), [[0.3333, 0.25], [-0.6667, -0.75, 0], [0, 0]]),
}


@pytest.mark.parametrize(("correction", "want"), REJECTED.values(), ids=REJECTED)
def test_a_rejected_episode_leaves_the_optimal_token_baseline(correction: Any, want: list[list[float]]):
    """A third episode with score 1 and energies .3, .3, whose tokens the trainer finds twice as likely as the engine.

    All three: B = .5 / .6 and 1.2 / 1.4. With weights its energies count four times: 1.4 / 1.5 and 3 / 3.2. Rejected by
    its geometric mean of 2 it leaves the numbers of the others alone, and has no advantage.
    """
    half = math.log(0.5)
    rows = [((0.2, 0.0), (0.4, 1.0)), ((0.1, 0.0), (0.1, 0.0), (0.5, 0.0)), ((0.3, 0.0), (0.3, 1.0))]
    built = build(
        [
            Episode(0, tuple(Visit(j, (Token(r, logp=half, sum_pi_squared=w),)) for j, (w, r) in enumerate(row)))
            for row in rows
        ]
    )
    engine = torch.full_like(built.rollout.rewards, half)
    engine[2] = math.log(0.25)
    rollout = corrected(built.rollout.union(rollout_logps=engine), correction, lambda x: x)
    advantages = built.read(OptimalTokenBaseline().estimate(rollout)[0])
    for got, of_episode in zip(advantages, want, strict=True):
        assert got == pytest.approx(of_episode, abs=1e-4)


def test_rejected_tokens_count_neither_as_energy_nor_as_length():
    """The first token of an episode with score 1 and energies .2, .4 beside one with score 0 and .1, .1, .5.

    What is left of its energies is 0 and .4, so B = 0 / .1, .4 / .6 and 0; its length is 1 beside 3, so OPO's is 1 / 4.
    """
    half = math.log(0.5)
    rows = [((0.2, 0.0), (0.4, 1.0)), ((0.1, 0.0), (0.1, 0.0), (0.5, 0.0))]
    built = build(
        [
            Episode(0, tuple(Visit(j, (Token(r, logp=half, sum_pi_squared=w),)) for j, (w, r) in enumerate(row)))
            for row in rows
        ]
    )
    kept = built.rollout.action_mask.clone()
    kept[0, 0] = False
    rollout = built.rollout.union(loss_mask=kept)
    advantages = built.read(OptimalTokenBaseline().estimate(rollout)[0])
    assert advantages == [pytest.approx([1, 0.3333], abs=1e-4), pytest.approx([0, -0.6667, 0], abs=1e-4)]
    assert [numbers[-1] for numbers in built.read(OPO().estimate(rollout)[0])] == [0.75, -0.25]


def test_old_log_probs_are_asked_for_too():
    rollout = build(simple(1.0, 0.0)).rollout
    rollout.scores.__dict__["old_logps"] = None
    with pytest.raises(ValueError, match=r"OptimalTokenBaseline.*scores\.old_logps"):
        OptimalTokenBaseline().estimate(rollout)


def test_energy_is_the_squared_norm_of_the_gradient_in_the_logits():
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    log_pi = logits.log_softmax(-1)
    logps = log_pi[torch.arange(5), torch.arange(5)]
    (gradient,) = torch.autograd.grad(logps.sum(), logits)
    energy = token_energy(logps.detach(), log_pi.detach().exp().square().sum(-1))
    torch.testing.assert_close(energy, gradient.square().sum(-1))
    twice = token_energy(logps.detach(), log_pi.detach().exp().square().sum(-1), torch.full((5,), 2.0))
    torch.testing.assert_close(twice, 4 * energy)
    assert token_energy(floats(0.0), floats(1 - 1e-9)).item() == 0.0  # rounding below 0


def test_turns_and_tokens_of_bilevel_gae():
    """Turn ends: 1 - .1 = .9 and 0 + .95 * .1 - .2 + .95 * .9 = .75; before them .2 - .5 + .75 and .1 - .4 + .9."""
    got, returns = bilevel_gae(
        floats(0, 0, NAN, 0, 1)[None],
        floats(0.5, 0.2, NAN, 0.4, 0.1)[None],
        torch.tensor([[1, 1, 0, 1, 1]]),
        torch.tensor([[0, 0, -1, 1, 1]]),
        torch.tensor([0]),
        torch.tensor([True]),
        floats(50.0),
    )
    close(got, floats(0.45, 0.75, 0, 0.6, 0.9)[None])
    close(returns, floats(0.95, 0.95, 0, 1.0, 1.0)[None])


def test_bilevel_gae_of_a_cut_episode():
    args = [torch.tensor([[1]]), torch.tensor([[4]]), torch.tensor([0]), torch.tensor([False]), floats(0.3)]
    got, _ = bilevel_gae(floats(0.5)[None], floats(0.2)[None], *args)
    close(got, floats(0.5 + 0.95 * 0.3 - 0.2)[None])


def test_variance_proxies():
    """Two rows: W (1, .5), A (1, -1) with mean 0 in the second; ||g||^2 = .25."""
    advantages = torch.tensor([[1.0, 1.0, NAN], [2.0, -2.0, NAN], [NAN, NAN, NAN]])
    energy = torch.tensor([[0.4, 0.6, NAN], [0.25, 0.25, NAN], [NAN, NAN, NAN]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 0]])
    got = variance_proxies(advantages, energy, mask, 0.5)
    assert got.proxy1_signal_strength == pytest.approx(0.25)
    assert got.proxy2_total_power == pytest.approx(0.5)
    assert got.proxy3_pure_noise == got.proxy3_pure_noise_raw == pytest.approx(0.25)
    assert got.token_total_power == pytest.approx((1.0 + 2.0) / 2)
    loud = variance_proxies(advantages, energy, mask, 2.0)
    assert loud.proxy3_pure_noise_raw == pytest.approx(0.5 - 4.0)
    assert loud.proxy3_pure_noise == 0.0
    one = variance_proxies(advantages[:1], energy[:1], mask[:1], 0.5)
    assert math.isnan(one.proxy3_pure_noise)
    assert math.isnan(one.proxy3_pure_noise_raw)
    assert one.proxy2_total_power == pytest.approx(1.0)
    both = variance_proxies(advantages[:1], energy[:1], mask[:1], 0.5, lambda x: x + floats(1, 0, 2))
    assert both == got
    assert math.isnan(variance_proxies(advantages[2:], energy[2:], mask[2:], 0.5).token_total_power)
    short = variance_proxies(advantages[1:2], energy[1:2], torch.tensor([[1, 0, 0]]), 0.5)
    assert short.proxy2_total_power == pytest.approx(0.25 * 2.0**2)  # the mean of one token is its own
    with pytest.raises(ValueError, match="of one shape"):
        variance_proxies(advantages[:1], energy, mask, 0.5)


def test_which_families_are_whitened():
    for cls in (GRPO, DrGRPO, RLOO, OPO, GPG, PassAtK, MaxRL, GiGPO, ReMax, TurnLeaveOneOut, OptimalTokenBaseline):
        assert cls().whiten is False
        assert cls(whiten=True).whiten is True
    for cls in (GAE, DualDiscountGAE, BiLevelGAE, Forked, ReinforcePlusPlus, ReinforcePlusPlusBaseline, GDPO):
        assert cls().whiten is True
        assert cls(whiten=False).whiten is False


@pytest.mark.parametrize(
    ("function", "cls"),
    [
        (dual_discount_gae, DualDiscountGAE),
        (bilevel_gae, BiLevelGAE),
        (standardised, GRPO),
        (gdpo_advantages, GDPO),
        (maxrl_advantages, MaxRL),
        (rewards_to_go, ReinforcePlusPlus),
        (optimal_token_baseline, OptimalTokenBaseline),
        (anchor_states, GiGPO),
    ],
)
def test_a_function_has_the_defaults_of_its_class(function: Any, cls: type):
    assert_same_defaults(function, cls)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GRPO(eps=0), "GRPO: eps must be above 0, got 0"),
        (lambda: MaxRL(eps=0), "MaxRL: eps must be above 0, got 0"),
        (lambda: GDPO(eps=0), "GDPO: eps must be above 0, got 0"),
        (lambda: GDPO({}), "GDPO needs at least one dimension of the reward"),
        (lambda: GiGPO(similarity=1.5), "GiGPO: similarity must lie between 0 and 1, got 1.5"),
        (lambda: ReinforcePlusPlus(gamma=2.0), "ReinforcePlusPlus: gamma must lie between 0 and 1, got 2.0"),
    ],
)
def test_wrong_arguments_are_refused(make: Any, message: str):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()
