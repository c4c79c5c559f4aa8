"""Estimators on rollouts as the collector builds them: rows, labels and masks come from samples, not from the test."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from lightning_agentrl.advantages import GAE, DualDiscountGAE, compress, dual_discount_gae, whiten
from lightning_agentrl.types import Rollout, Sample, Scores, Segment, SegmentKind, StopReason, Turn
from tests.inputs import text

close = partial(torch.testing.assert_close, rtol=0)
NAN = float("nan")
PROMPT = Segment(SegmentKind.PROMPT, text(1, 2, 3))
OBSERVATION = Segment(SegmentKind.OBSERVATION, text(7, 8))
GLUE = Segment(
    SegmentKind.GLUE,
    text(
        9,
    ),
)


def make_turn(env: int, episode: int, index: int, reward: float, stop: StopReason | None = None) -> Turn:
    terminated = stop is StopReason.ENV_DONE
    return Turn(
        env=env, episode=episode, index=index, observation="", reply="", thought="", action="", valid=True,
        env_reward=reward, reward=reward, episode_return=0.0, terminated=terminated,
        truncated=stop is not None and not terminated, stop=stop, success=None, hit_token_cap=False, history_cuts=0,
        policy_version=0, env_seconds=0.0, engine_seconds=0.0, bootstrap=None if terminated else (PROMPT,),
    )  # fmt: skip


# Turn, values of its tokens, bootstrap value, advantages, returns, whitened. Environment 0 ends its episode 3 after two
# turns and begins another one; the episode of environment 1 began before this rollout and goes on after it.
Row = tuple[Turn, list[float], float, list[float], float, list[float]]
GOLDEN: list[Row] = [
    (make_turn(0, 3, 4, 0.0), [0.32, 0.57], NAN, [0.667525, 0.417525], 0.987525, [1.147514, 0.634281]),
    (
        *(make_turn(0, 3, 5, 1.0, StopReason.ENV_DONE), [0.95, 0.08, 0.69], NAN, [0.05, 0.92, 0.31], 1.0),
        [-0.120222, 1.665828, 0.413540],
    ),
    (make_turn(0, 4, 0, 0.0), [-0.47], -0.32, [0.1532], -0.3168, [0.091640]),
    (
        *(make_turn(1, 0, 9, 0.0), [0.14, 0.47, 0.16], NAN, [0.073628, -0.256372, 0.053628], 0.213628),
        [-0.071716, -0.749183, -0.112775],
    ),
    (
        *(make_turn(1, 0, 10, -0.1), [0.35, 0.89, -0.39, -0.37], NAN, [-0.141278, -0.681278, 0.598722, 0.578722]),
        *(0.208722, [-0.512904, -1.621486, 1.006265, 0.965207]),
    ),
    (make_turn(1, 0, 11, 0.0), [0.97, 0.70], 0.28, [-0.6928, -0.4228], 0.2772, [-1.645139, -1.090848]),
]
WINDOWED = [[0], [1], [2], [3], [4], [5]]  # one turn per sample
GROWING = [[0, 1], [2], [3, 4, 5]]  # one sample per episode
TIME_MAJOR = [[3], [0], [4], [1], [5], [2]]
MIXED = [[5], [3, 4], [2], [1], [0]]


def columns(rows: list[list[float]]) -> Tensor:
    out = torch.zeros(len(rows), max(map(len, rows)))
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row)
    return out


def golden_rollout(layout: list[list[int]]) -> Rollout:
    """The rows of ``GOLDEN`` gathered into samples. What must not be read is NaN."""
    samples, values, bootstrap = [], [], []
    for row in layout:
        segments: list[Segment] = [PROMPT]
        for k in row:
            count = len(GOLDEN[k][1])
            segments += [Segment(SegmentKind.ACTION, text(*[5] * count), (-1.0,) * count), OBSERVATION, GLUE]
        samples.append(Sample(tuple(segments[:-2]), tuple(GOLDEN[k][0] for k in row)))
        values.append([v for k in row for v in GOLDEN[k][1]])
        bootstrap.append(GOLDEN[row[-1]][2])
    rollout = Rollout.from_samples(samples)
    values_BA = torch.where(rollout.action_mask, columns(values), NAN)
    return rollout.union(scores=Scores(values=values_BA), bootstrap_values=torch.tensor(bootstrap))


@pytest.mark.parametrize("layout", [WINDOWED, GROWING, TIME_MAJOR, MIXED])
def test_published_numbers_in_every_layout(layout: list[list[int]]):
    rollout = golden_rollout(layout)
    advantages, returns = DualDiscountGAE().estimate(rollout)
    close(advantages, columns([[x for k in row for x in GOLDEN[k][3]] for row in layout]), atol=1e-6)
    close(returns, columns([[GOLDEN[k][4] for k in row for _ in GOLDEN[k][1]] for row in layout]), atol=1e-6)
    whitened = whiten(advantages, rollout.action_mask)
    close(whitened, columns([[x for k in row for x in GOLDEN[k][5]] for row in layout]), atol=1.1e-6)


def test_layouts_agree_bit_for_bit():
    for estimator in (DualDiscountGAE(0.9, 0.8, 0.97, 0.96), GAE(0.99, 0.95)):
        outputs = []
        for layout in (WINDOWED, GROWING, TIME_MAJOR, MIXED):
            rollout = golden_rollout(layout)
            by_turn = {}
            for i, row in enumerate(layout):
                numbers = [x[i][rollout.action_mask[i]].tolist() for x in estimator.estimate(rollout)]
                start = 0
                for k in row:
                    stop = start + len(GOLDEN[k][1])
                    by_turn[k], start = [x[start:stop] for x in numbers], stop
            outputs.append(by_turn)
        assert all(output == outputs[0] for output in outputs)


def test_a_row_whose_episode_goes_on_does_not_read_its_own_bootstrap():
    rollout = golden_rollout(WINDOWED)
    want = DualDiscountGAE().estimate(rollout)
    assert rollout.bootstrap_values is not None
    assert rollout.bootstrap_values[[0, 1, 3, 4]].isnan().all()  # followed by another row, or terminated
    for changed in (2, 5):
        other = rollout.union(bootstrap_values=rollout.bootstrap_values.index_fill(0, torch.tensor(changed), 1.0))
        got = DualDiscountGAE().estimate(other)
        moved = [k for k in range(6) if not torch.equal(got[0][k], want[0][k])]
        assert moved == {2: [2], 5: [3, 4, 5]}[changed]


def test_a_row_alone_is_cut_where_it_ends():
    """The same turn with its continuation gone: now its own bootstrap value counts, behind the step discount."""
    alone = golden_rollout(WINDOWED).select([3]).union(bootstrap_values=torch.tensor([0.5]))
    _, returns = DualDiscountGAE().estimate(alone)
    close(returns, torch.full((1, 3), 0.99 * 0.5), atol=1e-6)


@pytest.mark.parametrize("stop", [StopReason.ENV_TRUNCATED, StopReason.MAX_TURNS, None])
def test_a_truncated_episode_bootstraps_and_the_next_one_does_not_leak(stop: StopReason | None):
    def run(next_value: float, next_reward: float) -> tuple[Tensor, Tensor]:
        turns = make_turn(2, 0, 6, 0.5, stop), make_turn(2, 1, 0, next_reward, StopReason.ENV_DONE)
        action = Segment(SegmentKind.ACTION, text(5, 5), (-1.0, -1.0))
        rollout = Rollout.from_samples([Sample((PROMPT, action), (turn,)) for turn in turns])
        values = torch.tensor([[0.25, 0.5], [next_value, next_value]])
        return DualDiscountGAE().estimate(
            rollout.union(scores=Scores(values=values), bootstrap_values=torch.tensor([2.0, NAN]))
        )

    (advantages, returns), others = run(0.0, 0.0), run(9.0, -7.0)
    close(returns[0], torch.tensor([0.5 + 0.99 * 2.0] * 2), atol=1e-6)
    close(advantages[0], torch.tensor([2.48 - 0.25, 2.48 - 0.5]), atol=1e-6)
    assert torch.equal(advantages[0], others[0][0])
    assert torch.equal(returns[0], others[1][0])


def test_selected_and_joined_rollouts_give_the_same_numbers():
    rollout = golden_rollout(GROWING)
    want, _ = DualDiscountGAE().estimate(rollout)
    for i in range(len(rollout)):
        alone, _ = DualDiscountGAE().estimate(rollout.select([i]))
        assert torch.equal(alone[0], want[i, : alone.shape[1]])
    joined = Rollout.concat([rollout.select([2]), rollout.select([0, 1])])
    assert torch.equal(DualDiscountGAE().estimate(joined)[0], want[[2, 0, 1]])


def test_compressed_numbers_are_zero_behind_short_episodes():
    mask = torch.tensor([[0, 1, 0], [1, 1, 0]])
    numbers = torch.where(mask.bool(), 2.0, NAN)
    layout = compress(mask, torch.zeros(2, 3, dtype=torch.int64), torch.arange(2))
    assert layout.gather(numbers).tolist() == [[2.0, 0.0], [2.0, 2.0]]


def test_a_rollout_without_samples():
    empty = Rollout.from_samples([]).union(scores=Scores(values=torch.zeros(0, 0)), bootstrap_values=torch.zeros(0))
    for result in (*GAE().estimate(empty), *DualDiscountGAE().estimate(empty)):
        assert result.shape == (0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_rows_are_bit_equal_in_any_order_and_company(dtype: torch.dtype):
    """Wide enough that vector instructions do the main part and scalar ones the rest."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        rows = int(torch.randint(1, 70, (), generator=generator))
        args = [
            *torch.randn(2, rows, 9, generator=generator, dtype=dtype),
            torch.rand(rows, 9, generator=generator) < 0.8,
            torch.arange(9).div(3, rounding_mode="floor").expand(rows, 9),
            torch.arange(rows),
            torch.rand(rows, generator=generator) < 0.5,
            torch.randn(rows, generator=generator, dtype=dtype),
        ]
        run = partial(dual_discount_gae, gamma_step=0.97, lam_step=0.93, gamma_token=0.99, lam_token=0.9)
        want, order = run(*args), torch.randperm(rows, generator=generator)
        relabelled = [*args[:4], order.argsort(), *args[5:]]
        some = order[: max(1, rows // 3)]
        for k in (0, 1):
            assert torch.equal(run(*relabelled)[k], want[k])
            assert torch.equal(run(*(x[some] for x in args))[k], want[k][some])


@pytest.mark.parametrize(
    ("estimator", "discounts"),
    [(GAE, {"gamma": 1.0, "lam": 1.0}), (DualDiscountGAE, {"gamma_step": 0, "lam_token": 1})],
)
def test_bounds_of_discounts_are_allowed(estimator: type, discounts: dict[str, float]):
    assert estimator(**discounts, whiten=False).whiten is False
    assert estimator().whiten is True


def test_missing_values_name_the_setting_to_change():
    bare = Rollout.from_samples(golden_rollout(GROWING).samples)
    with pytest.raises(ValueError, match=r"DualDiscountGAE.*model.init_args"):
        DualDiscountGAE().estimate(bare)
