"""The estimators of docs/extend.md do what the page says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_agentrl.advantages import AdvantageEstimator
from lightning_agentrl.advantages import __all__ as exported
from lightning_agentrl.types import Scores
from tests.advantages.cases import build, draw_episodes, simple
from tests.advantages.definitions import to_go, turn_rewards
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.guides import files_of


@pytest.fixture
def classes() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for name in ("my_estimator.py", "my_groups.py"):
        code = files_of("extend.md")[name]
        assert len(code.strip().splitlines()) <= 28
        exec(code, names)
    return names


def test_it_equals_its_definition_in_both_layouts(classes):
    for seed in range(10):
        episodes = draw_episodes(seed, dense=True)
        for one_row in (True, False):
            built = build(episodes, one_row=one_row, seed=seed, noise=float("nan"), padding=1)
            advantages, returns = (built.read(x) for x in classes["TurnReturns"](gamma=0.8).estimate(built.rollout))
            for i, episode in enumerate(episodes):
                rewards = turn_rewards(episode)
                rewards[-1:] = [reward + 0.8 * episode.end_value for reward in rewards[-1:]]
                to_go_of_turns = to_go(rewards, 0.8)
                want = [g for g, visit in zip(to_go_of_turns, episode.reached, strict=True) for _ in visit.tokens]
                assert returns[i] == pytest.approx(want)
                values = [token.value for token in episode.tokens]
                assert advantages[i] == pytest.approx([g - v for g, v in zip(want, values, strict=True)])


def test_it_trains_and_is_refused_without_a_critic(tmp_path, tiny_folder, classes):
    trainer = make_trainer(tmp_path, 1)
    trainer.fit(make_agent(tiny_folder, advantage=classes["TurnReturns"]()), make_data())
    assert trainer.logged_metrics["grad_norm/actor"] > 0
    assert trainer.global_step == 2
    bare = replace(build(simple(1.0)).rollout, scores=Scores(), bootstrap_values=None)
    with pytest.raises(ValueError, match=r"TurnReturns.*scores\.values.*bootstrap_values"):
        classes["TurnReturns"]().estimate(bare)


@pytest.mark.filterwarnings("ignore:.*hold a single episode")
def test_scores_above_the_median(classes):
    built = build([*simple(0.0, 1.0, 5.0, tokens=2), *simple(3.0, group=1)])
    advantages, returns = (built.read(x) for x in classes["AboveMedian"]().estimate(built.rollout))
    assert advantages == [[-1, -1], [0, 0], [4, 4], [0]]
    assert returns == [[0, 0], [1, 1], [5, 5], [3]]
    assert classes["AboveMedian"]().estimate(build([]).rollout)[0].shape == (0, 0)


def test_the_page_uses_what_is_exported(classes):
    assert {"backward_sum", "compress", "token_rewards", "ScoreEstimator"} <= set(exported)
    assert issubclass(classes["AboveMedian"], AdvantageEstimator)
