"""Mini-batches: random, of exact size, and the same however environments are spread over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_agentrl.episodes.seeds import HELD_OUT_FROM
from lightning_agentrl.rollout import Prepared
from lightning_agentrl.rollout.collector import Collector
from lightning_agentrl.rollout.sizes import RolloutSizes
from lightning_agentrl.rollout.stream import RolloutStream, split, spread
from lightning_agentrl.types import Rollout, Sample
from tests.types.samples import action, prompt, turn

seeds = st.integers(0, HELD_OUT_FROM - 1)


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 7), seeds)
def test_split_is_a_partition(envs, count, seed):
    places = spread(envs, 6, seed)
    assert ((places >= 0) & (places < 1)).all()
    parts = split(places, count)
    assert len(parts) == count
    assert sorted(row for part in parts for row in part) == list(range(len(envs)))


@given(st.data(), st.integers(1, 6), st.integers(1, 8), seeds)
def test_parts_have_their_exact_share(data, num_envs, turns, seed):
    rows = num_envs * turns
    count = data.draw(st.sampled_from([n for n in range(1, rows + 1) if rows % n == 0]))
    envs = [env for env in range(num_envs) for _ in range(turns)]
    parts = split(spread(envs, num_envs, seed), count)
    assert [len(part) for part in parts] == [rows // count] * count
    for part in parts:  # and of every environment nearly the same number
        per_env = np.bincount([envs[row] for row in part], minlength=num_envs)
        assert per_env.max() - per_env.min() <= 1


@given(st.data(), st.lists(st.integers(1, 5), min_size=4, max_size=4), st.integers(1, 4), seeds)
def test_ranks_do_not_change_mini_batches(data, turns, count, seed):
    """Rows are named by environment and order in time; any spread over ranks and any order of environments."""
    envs = [env for env in range(4) for _ in range(turns[env])]

    def named(rank_envs: list[int]) -> dict[tuple[int, int], int]:
        rows = [env for env in rank_envs for _ in range(turns[env])]
        time = {env: iter(range(turns[env])) for env in rank_envs}
        names = [(env, next(time[env])) for env in rows]
        parts = split(spread(rows, 4, seed), count)
        return {names[row]: k for k, part in enumerate(parts) for row in part}

    one = named([0, 1, 2, 3])
    assert len(one) == len(envs)
    order = data.draw(st.permutations(range(4)))
    cut = data.draw(st.integers(0, 4))
    assert named(order[:cut]) | named(order[cut:]) == one


@given(seeds, st.sampled_from([0.125, 0.25, 0.5]))
def test_a_sample_is_cut_from_the_same_places(seed, fraction):
    envs = [env for env in range(4) for _ in range(16)]
    places = spread(envs, 4, seed)
    parts = split(places, 2, upto=fraction)
    assert [len(part) for part in parts] == [64 * fraction / 2] * 2
    assert sorted(parts[0] + parts[1]) == np.flatnonzero(places < fraction).tolist()
    assert np.bincount([envs[row] for part in parts for row in part]).tolist() == [16 * fraction] * 4


def test_order_is_random_in_time_and_over_environments():
    envs = [env for env in range(4) for _ in range(8)]
    chosen = np.array([np.isin(np.arange(32), split(spread(envs, 4, seed), 4)[0]) for seed in range(400)])
    frequency = chosen.mean(0)  # each row is in a given quarter with probability 1/4, standard error 0.022
    assert abs(frequency - 0.25).max() < 0.1
    assert len({tuple(row) for row in chosen.tolist()}) > 390


class Order:
    """A collector that notes when a rollout is collected and prepared."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.iteration = 0

    @contextmanager
    def prepare_update(self) -> Iterator[None]:
        yield
        self.iteration += 1

    def begin_next(self) -> None: ...

    def collect(self) -> Rollout:
        self.events.append("collect")
        samples = [
            Sample((prompt(1), action(10 * env + index)), (turn(env=env, index=index),))
            for env in range(4)
            for index in range(1, 3)
        ]
        return Rollout.from_samples(samples)

    def prepare(self, rollout: Rollout) -> Prepared:
        self.events.append("prepare")
        return Prepared(rollout, {"told": 1.0})


def make_stream(learner: Order, seed: int = 0, update_epochs: int = 2) -> RolloutStream:
    sizes = RolloutSizes(num_envs=4, turns_per_env=2, mini_batch_turns=2, update_epochs=update_epochs)
    return RolloutStream(cast(Collector, learner), learner.prepare, sizes, seed)


def test_stream_has_constant_length_and_shows_every_turn_once_per_pass():
    learner = Order()
    stream = make_stream(learner)
    iterator = iter(stream)
    assert learner.events == []  # nothing is collected before it is asked for
    batches, inside, metrics = [], [], []
    for batch in iterator:
        learner.events.append("train")
        metrics.append(batch.metrics)
        batches.append(batch.rollout.turns)
        inside.append(stream.inside_iteration)
    assert len(batches) == len(stream) == 8
    assert learner.events == ["collect", "prepare"] + ["train"] * 8
    assert inside == [True] * 7 + [False]
    assert metrics == [{"told": 1.0}] + [{}] * 7  # numbers of the iteration come with its first step
    for one_pass in (batches[:4], batches[4:]):
        assert [len(turns) for turns in one_pass] == [2] * 4
        assert len({(t.env, t.index) for turns in one_pass for t in turns}) == 8
    assert batches[:4] != batches[4:]
    assert learner.iteration == 1


def test_stream_shuffles_anew_in_every_iteration_and_alike_in_every_run():
    def orders(seed: int) -> list[list]:
        stream = make_stream(Order(), seed, update_epochs=1)
        return [[[(t.env, t.index) for t in batch.rollout.turns] for batch in stream] for _ in range(3)]

    assert orders(0) == orders(0)
    assert len({str(order) for order in [*orders(0), *orders(1)]}) == 6
    resumed = make_stream(order := Order(), update_epochs=1)
    order.iteration = 2
    assert [[(t.env, t.index) for t in batch.rollout.turns] for batch in resumed] == orders(0)[2]
