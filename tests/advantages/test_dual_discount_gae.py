from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_agentrl.advantages import GAE, AdvantageEstimator, DualDiscountGAE, dual_discount_gae, whiten
from lightning_agentrl.types import Rollout, Sample, Scores, Segment, SegmentKind, StopReason, Turn
from tests.inputs import text

close = partial(torch.testing.assert_close, rtol=0)

# Golden table of the published function: env, done, turn reward, values, bootstrap, advantages, returns, whitened.
GOLDEN = [
    (0, 0, 0.0, [0.32, 0.57], None, [0.667525, 0.417525], 0.987525, [1.147514, 0.634281]),
    (0, 1, 1.0, [0.95, 0.08, 0.69], None, [0.05, 0.92, 0.31], 1.0, [-0.120222, 1.665828, 0.413540]),
    (0, 0, 0.0, [-0.47], -0.32, [0.1532], -0.3168, [0.091640]),
    (1, 0, 0.0, [0.14, 0.47, 0.16], None, [0.073628, -0.256372, 0.053628], 0.213628, [-0.071716, -0.749183, -0.112775]),
    (
        *(1, 0, -0.1, [0.35, 0.89, -0.39, -0.37], None, [-0.141278, -0.681278, 0.598722, 0.578722], 0.208722),
        [-0.512904, -1.621486, 1.006265, 0.965207],
    ),
    (1, 0, 0.0, [0.97, 0.70], 0.28, [-0.6928, -0.4228], 0.2772, [-1.645139, -1.090848]),
]
GOLDEN_TRAJECTORIES = [0, 0, 1, 2, 2, 2]  # env 0 ends its episode after turn 1


@dataclass
class Inputs:
    rewards: Tensor
    values: Tensor
    mask: Tensor
    turn_ids: Tensor
    episode: Tensor
    terminated: Tensor
    bootstrap: Tensor

    def run(self, **discounts: float) -> tuple[Tensor, Tensor]:
        return dual_discount_gae(*vars(self).values(), **discounts)

    def map(self, fn_BT, fn_B=lambda x: x) -> Inputs:
        return Inputs(**{name: fn_BT(x) if x.dim() == 2 else fn_B(x) for name, x in vars(self).items()})


def rows_to_inputs(rows: list[dict], dtype: torch.dtype = torch.float64, noise: float = 9.0) -> Inputs:
    """A row has `columns`, a list of (turn, reward, value), or None for a token that nobody sampled."""
    width = max((len(row["columns"]) for row in rows), default=0)
    size = (len(rows), width)
    x = Inputs(
        rewards=torch.full(size, noise, dtype=dtype),
        values=torch.full(size, -noise, dtype=dtype),
        mask=torch.zeros(size, dtype=torch.bool),
        turn_ids=torch.full(size, -1),
        episode=torch.tensor([row["episode"] for row in rows], dtype=torch.int64),
        terminated=torch.tensor([row["terminated"] for row in rows], dtype=torch.bool),
        bootstrap=torch.tensor([row["bootstrap"] for row in rows], dtype=dtype),
    )
    for i, row in enumerate(rows):
        for t, token in enumerate(row["columns"]):
            if token is not None:
                x.mask[i, t] = True
                x.turn_ids[i, t], x.rewards[i, t], x.values[i, t] = token
    return x


def by_definition(x: Inputs, step: tuple[float, float], token: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """A_k as the sum over all later TD errors of their decays, token by token, without a recursion."""
    advantages, returns = torch.zeros_like(x.values), torch.zeros_like(x.values)
    for label in set(x.episode.tolist()):
        tokens = []
        for i in range(len(x.episode)):
            if x.episode[i] == label:
                tokens += [(int(x.turn_ids[i, t]), i, t) for t in range(x.mask.shape[1]) if x.mask[i, t]]
        tokens.sort()
        for k, (_, i, t) in enumerate(tokens):
            total, weight = 0.0, 1.0
            for j in range(k, len(tokens)):
                turn, row, column = tokens[j]
                last = j + 1 == len(tokens)
                gamma, lam = step if last or tokens[j + 1][0] != turn else token
                if last:
                    following = 0.0 if x.terminated[row] else float(x.bootstrap[row])
                else:
                    following = float(x.values[tokens[j + 1][1], tokens[j + 1][2]])
                total += weight * (float(x.rewards[row, column]) + gamma * following - float(x.values[row, column]))
                weight *= gamma * lam
            advantages[i, t] = total
            returns[i, t] = total + float(x.values[i, t])
    return advantages, returns


@st.composite
def ragged(draw: st.DrawFn) -> Inputs:
    """Trajectories of turns of 0 to 4 tokens, cut into rows anywhere, with observations and empty rows inside."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    number = lambda: torch.randn((), generator=generator, dtype=torch.float64).item()  # noqa: E731
    rows = []
    for label in draw(st.lists(st.integers(-3, 2**40), max_size=4, unique=True)):
        turn, terminated = draw(st.integers(0, 5)), draw(st.booleans())
        turns = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
        parts: list[list] = [[]]
        for length in turns:
            if draw(st.booleans()):
                parts.append([])
            parts[-1] += [None] * draw(st.integers(0, 2))
            parts[-1] += [(turn, number(), number()) for _ in range(length)]
            turn += draw(st.integers(1, 3))
        parts[-1] += [None] * draw(st.integers(0, 2))
        rows += [{"columns": part, "episode": label, "terminated": terminated, "bootstrap": number()} for part in parts]
    return rows_to_inputs(draw(st.permutations(rows)))


FRACTION = st.sampled_from([0.0, 0.5, 0.9, 0.95, 0.99, 1.0])
PAIRS = st.tuples(FRACTION, FRACTION, FRACTION, FRACTION)


def as_discounts(pairs: tuple[float, float, float, float]) -> dict[str, float]:
    return dict(zip(("gamma_step", "lam_step", "gamma_token", "lam_token"), pairs, strict=True))


def golden_inputs(one_row_per_episode: bool, dtype: torch.dtype) -> tuple[Inputs, dict[str, list[list[float]]]]:
    """The golden table in one of the two layouts, and what is expected in each row, by turn in that row."""
    rows: list[dict] = []
    expected: dict[str, list[list[float]]] = {"advantages": [], "returns": [], "whitened": []}
    for turn, (label, (_, done, reward, values, boot, advantages, returns, whitened)) in enumerate(
        zip(GOLDEN_TRAJECTORIES, GOLDEN, strict=True)
    ):
        columns = [(turn, 0.0, v) for v in values]
        columns[-1] = (turn, reward, values[-1])
        result = {"advantages": advantages, "returns": [returns] * len(values), "whitened": whitened}
        boot = 77.0 if boot is None else boot  # must not be read
        if one_row_per_episode and rows and rows[-1]["episode"] == label:
            rows[-1]["columns"] += [None, None, *columns]
            rows[-1] |= {"terminated": bool(done), "bootstrap": boot}
            for name, numbers in result.items():
                expected[name][-1] += [0.0, 0.0, *numbers]
        else:
            rows.append({"columns": columns, "episode": label, "terminated": bool(done), "bootstrap": boot})
            for name, numbers in result.items():
                expected[name].append(list(numbers))
    return rows_to_inputs(rows, dtype), expected


@pytest.mark.parametrize("one_row_per_episode", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_published_numbers(one_row_per_episode: bool, dtype: torch.dtype):
    x, expected = golden_inputs(one_row_per_episode, dtype)
    advantages, returns = x.run()
    whitened = whiten(advantages, x.mask)
    for name, got in (("advantages", advantages), ("returns", returns), ("whitened", whitened)):
        assert got.dtype == dtype
        want = torch.zeros_like(got)
        for i, numbers in enumerate(expected[name]):
            want[i, : len(numbers)] = torch.tensor(numbers, dtype=dtype)
        close(got, want, atol=1.1e-6)  # the table is rounded to six digits


WORKED = {
    "mask": [1, 1, 0, 0, 1, 1],
    "turns": [0, 0, -1, -1, 1, 1],
    "values": [0.5, 0.2, 9.0, 9.0, 0.4, 0.1],
}


def worked(reward: float, terminated: bool, bootstrap: float) -> tuple[Tensor, Tensor]:
    one = torch.tensor
    return dual_discount_gae(
        one([[0, 0, 0, 0, 0, reward]]),
        one([WORKED["values"]]),
        one([WORKED["mask"]]),
        one([WORKED["turns"]]),
        one([4]),
        one([terminated]),
        one([bootstrap]),
    )


def test_worked_example_terminated():
    advantages, returns = worked(1.0, True, 50.0)
    close(advantages, torch.tensor([[0.4603, 0.7603, 0, 0, 0.6, 0.9]]), atol=1e-6)
    close(returns, torch.tensor([[0.9603, 0.9603, 0, 0, 1, 1]]), atol=1e-6)


def test_worked_example_truncated():
    advantages, _ = worked(0.0, False, 0.3)
    close(advantages, torch.tensor([[-0.2008715, 0.0991285, 0, 0, -0.103, 0.197]]), atol=1e-6)


@given(st.floats(-2, 2), st.floats(-2, 2), st.floats(-2, 2), FRACTION, FRACTION)
def test_one_terminal_reward_has_a_closed_form(reward, value, last_value, gamma, lam):
    columns = [[(0, 0.0, value), (0, 0.0, value)], [(1, 0.0, last_value), (1, reward, 0.3)]]
    x = rows_to_inputs([{"columns": c, "episode": 1, "terminated": True, "bootstrap": 5.0} for c in columns])
    advantages, _ = x.run(gamma_step=gamma, lam_step=lam)
    expected = gamma * (lam * reward + (1 - lam) * last_value) - value
    close(advantages[0], torch.full((2,), expected, dtype=torch.float64), atol=1e-12)


@settings(max_examples=60)
@given(ragged(), PAIRS)
def test_equals_the_definition(x: Inputs, pairs):
    advantages, returns = x.run(**as_discounts(pairs))
    want_advantages, want_returns = by_definition(x, pairs[:2], pairs[2:])
    close(advantages, want_advantages, atol=1e-10)
    close(returns, want_returns, atol=1e-10)
    assert torch.equal(advantages[~x.mask], torch.zeros_like(advantages[~x.mask]))
    assert torch.equal(returns[~x.mask], torch.zeros_like(returns[~x.mask]))


@settings(max_examples=25)
@given(ragged())
def test_all_ones_is_reward_to_go_minus_value(x: Inputs):
    x.terminated[:] = True
    advantages, returns = x.run(gamma_step=1.0, lam_step=1.0)
    for label in x.episode.unique():
        mine = x.episode == label
        tokens = sorted((int(x.turn_ids[i, t]), int(i), int(t)) for i, t in (x.mask & mine[:, None]).nonzero())
        to_go = 0.0
        for _, i, t in reversed(tokens):
            to_go += float(x.rewards[i, t])
            assert float(returns[i, t]) == pytest.approx(to_go, abs=1e-10)
            assert float(advantages[i, t]) == pytest.approx(to_go - float(x.values[i, t]), abs=1e-10)


# Invariances: bit for bit


@settings(max_examples=30)
@given(ragged(), PAIRS, st.integers(0, 2**31))
def test_numbers_off_the_mask_are_not_read(x: Inputs, pairs, seed):
    generator = torch.Generator().manual_seed(seed)
    want = x.run(**as_discounts(pairs))
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30], dtype=torch.float64)
    for tensor in (x.rewards, x.values):
        tensor[~x.mask] = odd[torch.randint(4, (int((~x.mask).sum()),), generator=generator)]
    x.turn_ids[~x.mask] = torch.randint(-9, 99, (int((~x.mask).sum()),), generator=generator)
    # Flags and values behind rows that are terminated or followed by another row of their episode play no part.
    x.bootstrap[x.terminated] = float("nan")
    x.bootstrap[~x.mask.any(1)] = float("nan")
    got = x.run(**as_discounts(pairs))
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@settings(max_examples=30)
@given(ragged(), PAIRS, st.data())
def test_observation_columns_and_padding_change_nothing(x: Inputs, pairs, data):
    want = x.run(**as_discounts(pairs))
    width = x.mask.shape[1]
    keep = torch.tensor(sorted(data.draw(st.permutations(range(width + 5)))[:width]), dtype=torch.int64)

    def widen(tensor: Tensor) -> Tensor:
        filler = {torch.bool: False, torch.int64: 3}.get(tensor.dtype, float("nan"))
        out = torch.full((len(tensor), width + 5), filler, dtype=tensor.dtype)
        out[:, keep] = tensor
        return out

    got = x.map(widen).run(**as_discounts(pairs))
    for wide, narrow in zip(got, want, strict=True):
        assert torch.equal(wide[:, keep], narrow)
        assert int((wide != 0).sum()) == int((narrow != 0).sum())


@settings(max_examples=30)
@given(ragged(), PAIRS, st.data())
def test_order_of_rows_and_labels_change_nothing(x: Inputs, pairs, data):
    want = x.run(**as_discounts(pairs))
    order = torch.tensor(data.draw(st.permutations(range(len(x.mask)))), dtype=torch.int64)
    moved = x.map(lambda t: t[order], lambda t: t[order])
    moved.episode = -7 * moved.episode + 1
    got = moved.run(**as_discounts(pairs))
    assert torch.equal(got[0], want[0][order])
    assert torch.equal(got[1], want[1][order])


@settings(max_examples=25)
@given(ragged(), PAIRS)
def test_one_episode_does_not_touch_another(x: Inputs, pairs):
    want, _ = x.run(**as_discounts(pairs))
    for label in x.episode.unique():
        mine = x.episode == label
        alone, _ = x.map(lambda t, m=mine: t[m], lambda t, m=mine: t[m]).run(**as_discounts(pairs))
        assert torch.equal(alone, want[mine])


# Edges


def test_truncated_row_inside_a_stream_uses_its_own_value():
    stream = [
        {"columns": [(7, 0.5, 0.2)], "episode": 0, "terminated": False, "bootstrap": 2.0},
        {"columns": [(0, 3.0, 0.4)], "episode": 1, "terminated": True, "bootstrap": 0.0},
    ]
    advantages, _ = rows_to_inputs(stream).run()
    close(advantages[:, 0], torch.tensor([0.5 + 0.99 * 2.0 - 0.2, 3.0 - 0.4], dtype=torch.float64), atol=1e-12)


def test_empty_turn_applies_the_step_pair_once():
    tokens = [(0, 0.0, 0.1)], [], [(2, 1.0, 0.2)]
    rows = [{"columns": c, "episode": 0, "terminated": True, "bootstrap": 9.0} for c in tokens]
    advantages, _ = rows_to_inputs(rows).run(gamma_step=0.5, lam_step=1.0)
    close(advantages[:, 0], torch.tensor([0.5 * 1.0 - 0.1, 0.0, 0.8], dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (2, 0), (2, 3)])
def test_nothing_sampled_gives_zeros(shape: tuple[int, int]):
    x = rows_to_inputs([{"columns": [None] * shape[1], "episode": 0, "terminated": False, "bootstrap": 1.0}])
    x = x.map(lambda t: t[:1].expand(shape), lambda t: t[:1].expand(shape[0]))
    for result in x.run():
        assert torch.equal(result, torch.zeros(shape, dtype=torch.float64))


def test_one_token():
    x = rows_to_inputs([{"columns": [(3, 1.0, 0.25)], "episode": 5, "terminated": False, "bootstrap": 2.0}])
    advantages, returns = x.run()
    assert advantages.item() == pytest.approx(1.0 + 0.99 * 2.0 - 0.25, abs=1e-12)
    assert returns.item() == pytest.approx(1.0 + 0.99 * 2.0, abs=1e-12)


def test_bf16_is_computed_in_float32_and_without_gradient():
    x, _ = golden_inputs(True, torch.bfloat16)
    x.values.requires_grad_(True)
    got = x.run()
    x.rewards, x.values, x.bootstrap = x.rewards.float(), x.values.detach().float(), x.bootstrap.float()
    for result, want in zip(got, x.run(), strict=True):
        assert result.dtype == torch.float32
        assert not result.requires_grad
        assert torch.equal(result, want)


@pytest.mark.parametrize("turns", [([0], [0]), ([0, 2], [1]), ([1, 0], [5])])
def test_turns_without_an_order_are_refused(turns: tuple[list[int], list[int]]):
    rows = [
        {"columns": [(t, 0.0, 0.0) for t in row], "episode": 8, "terminated": True, "bootstrap": 0.0} for row in turns
    ]
    with pytest.raises(ValueError, match="episode 8 have no clear order"):
        rows_to_inputs(rows).run()


@pytest.mark.parametrize("name", ["rewards", "values", "turn_ids", "episode", "terminated", "bootstrap"])
def test_wrong_shapes_are_refused(name: str):
    x, _ = golden_inputs(True, torch.float64)
    setattr(x, name, getattr(x, name)[:1])
    with pytest.raises(ValueError, match="expected"):
        x.run()


# Strategy objects


def make_turn(index: int, reward: float, stop: StopReason | None = None) -> Turn:
    truncated = stop is StopReason.ENV_TRUNCATED
    return Turn(
        env=0, episode=0, index=index, observation="", reply="", thought="", action="", valid=True,
        env_reward=reward, reward=reward, episode_return=reward, terminated=stop is StopReason.ENV_DONE,
        truncated=truncated, stop=stop, success=None, hit_token_cap=False, history_cuts=0, policy_version=0,
        env_seconds=0.0, engine_seconds=0.0,
    )  # fmt: skip


@pytest.fixture
def rollout() -> Rollout:
    """The worked example, one sample per turn."""
    action = Segment(SegmentKind.ACTION, text(5, 6), (-1.0, -2.0))
    prompt = Segment(SegmentKind.PROMPT, text(1, 2, 3))
    turns = make_turn(1, 1.0, StopReason.ENV_DONE), make_turn(0, 0.0)
    scored = Rollout.from_samples([Sample((prompt, action), (turn,)) for turn in turns])
    return scored.union(
        scores=Scores(values=torch.tensor([[0.4, 0.1], [0.5, 0.2]])), bootstrap_values=torch.tensor([0.0, 0.0])
    )


def test_dual_discount_strategy(rollout: Rollout):
    advantages, returns = DualDiscountGAE().estimate(rollout)
    close(advantages, torch.tensor([[0.6, 0.9], [0.4603, 0.7603]]), atol=1e-6)
    close(returns, torch.tensor([[1.0, 1.0], [0.9603, 0.9603]]), atol=1e-6)


def test_each_argument_of_the_strategy_reaches_the_recursion(rollout: Rollout):
    discounts = {"gamma_step": 0.9, "lam_step": 0.8, "gamma_token": 0.7, "lam_token": 0.6}
    want = dual_discount_gae(
        rollout.rewards, rollout.scores.values, rollout.action_mask, rollout.turn_ids, rollout.episode,
        rollout.terminated, rollout.bootstrap_values, **discounts,
    )  # fmt: skip
    got = DualDiscountGAE(**discounts).estimate(rollout)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_shaped_rewards_are_preferred(rollout: Rollout):
    shaped = rollout.union(shaped_rewards=2 * rollout.rewards)
    _, returns = GAE().estimate(shaped)
    close(returns, torch.full((2, 2), 2.0), atol=1e-6)


@given(st.floats(0, 1), st.floats(0, 1))
def test_equal_pairs_are_gae(gamma: float, lam: float):
    """Textbook GAE over the four tokens of the worked example, by hand."""
    values, rewards = [0.5, 0.2, 0.4, 0.1], [0.0, 0.0, 0.0, 1.0]
    want, carried, following = [0.0] * 4, 0.0, 0.0
    for k in reversed(range(4)):
        carried = rewards[k] + gamma * following - values[k] + gamma * lam * carried
        want[k], following = carried, values[k]
    x = rows_to_inputs(
        [{"columns": [(k // 2, rewards[k], values[k]) for k in range(4)], "episode": 0, "terminated": True,
          "bootstrap": 9.0}]
    )  # fmt: skip
    advantages, _ = x.run(**as_discounts((gamma, lam, gamma, lam)))
    close(advantages[0], torch.tensor(want, dtype=torch.float64), atol=1e-12)


def test_gae_strategy_has_one_pair(rollout: Rollout):
    got, want = GAE(0.9, 0.8).estimate(rollout), DualDiscountGAE(0.9, 0.8, 0.9, 0.8).estimate(rollout)
    assert torch.equal(got[0], want[0])
    assert not torch.equal(got[0], DualDiscountGAE(0.9, 0.8).estimate(rollout)[0])


def test_missing_scores_are_named(rollout: Rollout):
    bare = Rollout.from_samples(rollout.samples)
    with pytest.raises(ValueError, match=r"GAE.*scores.values.*bootstrap_values"):
        GAE().estimate(bare)
    with pytest.raises(ValueError, match=r"DualDiscountGAE.*bootstrap_values"):
        DualDiscountGAE().estimate(bare.union(scores=rollout.scores))


def test_other_estimators_can_declare_what_they_need(rollout: Rollout):
    class NeedsSquares(AdvantageEstimator):
        needs_sum_pi_squared = True

        def estimate(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
            self.check(rollout)
            return rollout.rewards, rollout.rewards

    with pytest.raises(ValueError, match=r"NeedsSquares.*scores.sum_pi_squared"):
        NeedsSquares().estimate(rollout)
    squares = Scores(sum_pi_squared=torch.ones(2, 2))
    assert NeedsSquares().estimate(rollout.union(scores=squares))[0] is rollout.rewards
    needs = [name for name in vars(AdvantageEstimator) if name.startswith("needs_")]
    assert sorted(needs) == [
        *("needs_forks", "needs_greedy_baseline", "needs_groups", "needs_nonnegative_scores", "needs_sum_pi_squared"),
        "needs_values",
    ]
    assert not any(getattr(AdvantageEstimator, name) for name in needs)
    assert GAE.needs_values
    assert DualDiscountGAE.needs_values


@pytest.mark.parametrize("name", ["gamma_step", "lam_step", "gamma_token", "lam_token"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_discounts_outside_their_range_are_refused(name: str, value: float):
    with pytest.raises(ValueError, match=f"DualDiscountGAE.*{name}.*0.*1.*{value}"):
        DualDiscountGAE(**{name: value})


@pytest.mark.parametrize("name", ["gamma", "lam"])
def test_gae_names_its_own_arguments(name: str):
    with pytest.raises(ValueError, match=f"GAE.*{name}"):
        GAE(**{name: 2.0})
