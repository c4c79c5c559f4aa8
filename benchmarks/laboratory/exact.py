"""What a policy is worth in key and door, by dynamic programming: no episode is played, so there is no noise.

S states from which an episode goes on, A actions of :data:`ACTIONS`; a policy is a table [S, A] whose rows sum to 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from benchmarks.laboratory.key_door import ACTIONS, MOVES, Rules, State, best_actions, distances, starts

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Tables:
    """The game as arrays.

    Args:
        rules: of the game.
        states: in the order of all arrays.
        next_SAS: probability of the next state, where the episode goes on.
        reward_SA: expected reward.
        goal_SA: probability of reaching the goal.
        start_S: probability that an episode begins there.
    """

    rules: Rules
    states: tuple[State, ...]
    next_SAS: Array
    reward_SA: Array
    goal_SA: Array
    start_S: Array

    def success(self, policy_SA: Array, turns: int | None = None) -> float:
        """Return the probability of reaching the goal within so many turns; None: within the limit of an episode."""
        go_on_SS = np.einsum("sa,sat->st", policy_SA, self.next_SAS)
        reached_S = (policy_SA * self.goal_SA).sum(1)
        success, here_S = 0.0, self.start_S
        for _ in range(self.rules.max_turns if turns is None else turns):
            success += float(here_S @ reached_S)
            here_S = here_S @ go_on_SS
        return success

    def values(self, policy_SA: Array, gamma: float) -> Array:
        """Return the discounted value [S] of each state, without a limit of turns."""
        go_on_SS = np.einsum("sa,sat->st", policy_SA, self.next_SAS)
        return np.linalg.solve(np.eye(len(self.states)) - gamma * go_on_SS, (policy_SA * self.reward_SA).sum(1))

    def values_within(self, policy_SA: Array, gamma: float, turns: int) -> Array:
        """Return the discounted value [turns + 1, S] of each state with 0, 1, 2, ... turns left."""
        go_on_SS = np.einsum("sa,sat->st", policy_SA, self.next_SAS)
        values = [np.zeros(len(self.states))]
        for _ in range(turns):
            values.append((policy_SA * self.reward_SA).sum(1) + gamma * go_on_SS @ values[-1])
        return np.stack(values)

    def advantages(self, policy_SA: Array, gamma: float) -> Array:
        """Return by how much [S, A] an action is better than the policy."""
        values_S = self.values(policy_SA, gamma)
        return self.reward_SA + gamma * self.next_SAS @ values_S - values_S[:, None]

    def expert(self, noise: float) -> Array:
        """Return the policy [S, A] that takes a shortest way, or with this probability a random move."""
        policy_SA = np.zeros((len(self.states), len(ACTIONS)))
        policy_SA[:, : len(MOVES)] = noise / len(MOVES)
        for place, state in enumerate(self.states):
            best = best_actions(self.rules, state)
            policy_SA[place, [ACTIONS.index(action) for action in best]] += (1 - noise) / len(best)
        return policy_SA


@cache
def tables(rules: Rules) -> Tables:
    """Return the game as arrays."""
    states = tuple(distances(rules))
    index = {state: place for place, state in enumerate(states)}
    next_SAS = np.zeros((len(states), len(ACTIONS), len(states)))
    reward_SA, goal_SA = np.zeros((2, len(states), len(ACTIONS)))
    for s, state in enumerate(states):
        for a, action in enumerate(ACTIONS):
            for after, chance in rules.outcomes(state, action).items():
                reward_SA[s, a] += chance * rules.reward(after)
                goal_SA[s, a] += chance * rules.at_goal(after)
                if not rules.ends(after):
                    next_SAS[s, a, index[after]] += chance
    start_S = np.array([state in starts(rules) for state in states], dtype=np.float64)
    return Tables(rules, states, next_SAS, reward_SA, goal_SA, start_S / start_S.sum())
