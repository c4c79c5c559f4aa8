"""GiGPO: compare episodes from one start state, and turns in the same state."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

import torch
from torch import Tensor

from lightning_agentrl.advantages.base import check_fractions, check_positive, token_rewards
from lightning_agentrl.advantages.episodes import Episodes, GroupEstimator, GroupOfOne, Groups, turns_of
from lightning_agentrl.advantages.grpo import centred, standardised
from lightning_agentrl.advantages.layout import backward_sum, result_dtype
from lightning_agentrl.types import Rollout
from lightning_agentrl.types.rollout import Reduce


def anchor_states(texts: Sequence[str], similarity: float = 1.0) -> list[int]:
    """Return the index of each text's state; similar texts have the same state.

    Distinct texts are processed in alphabetical order. A text joins the first state whose first text is similar enough;
    otherwise the text starts a new state. The result does not depend on the order of ``texts``.

    Args:
        texts: observations.
        similarity: smallest ``difflib`` ratio of a text to the first text of its state; 1: equal texts only.
    """
    number: dict[str, int] = {}
    states: list[str] = []
    for text in sorted(set(texts)):
        alike = (i for i, state in enumerate(states) if similarity < 1 and _alike(state, text, similarity))
        number[text] = next(alike, len(states))
        if number[text] == len(states):
            states.append(text)
    return [number[text] for text in texts]


def _alike(state: str, text: str, similarity: float) -> bool:
    """Return whether the ratio of two texts is at least ``similarity``; cheap upper bounds are tried first."""
    matcher = SequenceMatcher(None, state, text, autojunk=False)  # do not ignore frequent letters
    ratios = (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)
    return all(ratio() >= similarity for ratio in ratios)


class GiGPO(GroupEstimator):
    """Group-relative advantage of the episode, plus a group-relative advantage of each turn (arXiv 2505.10978).

    The second term compares discounted rewards to go of turns with the same observation in the same group; this term is
    0 for observations that occur once. Returns are the scores of the episodes.

    Args:
        omega: weight of the advantage of turns.
        gamma: discount from turn to turn.
        divide_by_std: whether to divide by the standard deviation, as in GRPO; False: as in Dr. GRPO.
        similarity: smallest ``difflib`` ratio of two observations that count as one state; 1: equal texts only.
        eps: number added to the standard deviations.
        whiten: whether to scale advantages to mean 0 and variance 1 over all trained tokens of all ranks.
        group_of_one: advantage of an episode that is alone in its group: ``zero``, or ``raw`` for the episode's score.
    """

    def __init__(
        self,
        omega: float = 1.0,
        gamma: float = 0.95,
        divide_by_std: bool = True,
        similarity: float = 1.0,
        eps: float = 1e-6,
        whiten: bool = False,
        group_of_one: GroupOfOne = "zero",
    ) -> None:
        super().__init__(whiten, group_of_one)
        check_fractions(self, gamma=gamma, similarity=similarity)
        check_positive(self, eps=eps)
        self.omega, self.gamma, self.divide_by_std = omega, gamma, divide_by_std
        self.similarity, self.eps = similarity, eps

    @torch.no_grad()
    def estimate(self, rollout: Rollout, reduce: Reduce | None = None) -> tuple[Tensor, Tensor]:
        episodes, dtype = self.episodes(rollout), result_dtype(token_rewards(rollout))
        layout, scores_N = episodes.layout, episodes.scores_N
        turns = layout.turns(rollout.turn_ids)
        of_episode_N = self.where_alone(episodes.groups, scores_N, self._compare(scores_N, episodes.groups))
        of_turn_NJ = scores_N.new_zeros(turns.mask_NJ.shape)
        to_go_NJ = backward_sum(turns.sum(episodes.rewards_NL), self.gamma)
        of_turn_NJ[turns.mask_NJ] = self._compare(to_go_NJ[turns.mask_NJ], self._states(rollout, episodes))
        advantages_NL = turns.spread(of_episode_N[:, None] + self.omega * of_turn_NJ)
        return layout.scatter(advantages_NL.to(dtype)), layout.spread(scores_N.to(dtype))

    def _compare(self, x_M: Tensor, groups: Groups) -> Tensor:
        return standardised(x_M, groups, self.eps) if self.divide_by_std else centred(x_M, groups)

    def _states(self, rollout: Rollout, episodes: Episodes) -> Groups:
        """Return groups of the turns of all episodes, in order, by group of the episode and state of the turn."""
        # Indices and texts of turns by group, an agent's conversation, and images. Similarity compares only the texts.
        met: dict[tuple[int, tuple[str, ...]], list[tuple[int, str]]] = {}
        count, of_episodes = 0, turns_of(rollout, episodes.layout)
        for group, turns in zip(episodes.groups.index_N.tolist(), of_episodes, strict=True):
            for j, turn in enumerate(turns):
                met.setdefault((group, (turn.conversation, *turn.seen)), []).append((count + j, turn.observation))
            count += len(turns)
        labels_M2 = [(0, 0)] * count
        known = 0  # offset of state indices, so that groups share none
        for (group, _), seen in met.items():
            states = anchor_states([text for _, text in seen], self.similarity)
            for (m, _), state in zip(seen, states, strict=True):
                labels_M2[m] = (group, known + state)
            known += len(seen)
        turns_N = [len(turns) for turns in of_episodes]
        labels, counts = (episodes.labels_N.new_tensor(x, dtype=torch.int64) for x in (labels_M2, turns_N))
        return Groups(labels, episodes.rounding_N.repeat_interleave(counts))
