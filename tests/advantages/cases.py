"""Episodes as plain lists, and rollouts made of them in every way that must not matter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_agentrl.types import Rollout, Sample, Scores, Segment, SegmentKind, Turn
from tests.inputs import text

NAN = float("nan")
OBSERVATIONS = ("a door", "a wall", "a red key lies here", "a red key lies there", "nothing")


@dataclass(frozen=True)
class Token:
    reward: float = 0.0
    value: float = 0.0
    logp: float = -1.0
    sum_pi_squared: float = 0.5
    weight: float = 1.0


@dataclass(frozen=True)
class Visit:
    """A turn of an episode; it may have no action tokens."""

    number: int
    tokens: tuple[Token, ...]
    observation: str = "a door"
    metrics: dict[str, float] = field(default_factory=dict)
    seen: tuple[str, ...] = ()  # images

    @property
    def forked(self) -> float:
        """Value of the state before it, NaN for about a third of all turns."""
        return NAN if self.tokens[0].logp < -2 else self.tokens[0].value


@dataclass(frozen=True)
class Episode:
    group: int
    visits: tuple[Visit, ...]
    greedy: float = 0.0
    terminated: bool = True
    bootstrap: float = 0.0

    @property
    def tokens(self) -> list[Token]:
        return [token for visit in self.visits for token in visit.tokens]

    @property
    def end_value(self) -> float:
        """Of the state after its last turn."""
        return 0.0 if self.terminated else self.bootstrap

    @property
    def reached(self) -> list[Visit]:
        """Turns with action tokens."""
        return [visit for visit in self.visits if visit.tokens]


def simple(*scores: float, group: int = 0, tokens: int = 1) -> list[Episode]:
    """Episodes of one turn, rewarded at its last token."""
    return [
        Episode(group, (Visit(0, (Token(),) * (tokens - 1) + (Token(reward=score),), metrics={"format": 1.0}),))
        for score in scores
    ]


def draw_episodes(seed: int, dense: bool = False, least: float = -0.5) -> list[Episode]:
    """Up to four groups of one to five episodes with one to four turns of 0 to 4 tokens.

    Rewards are at least ``least``; where they are not dense they are few and often equal.
    """
    draw = random.Random(seed)
    episodes = []
    for group in draw.sample(range(-3, 90), draw.randint(1, 4)):
        greedy = draw.choice([0.0, 0.5, 1.0])
        for _ in range(draw.randint(1, 5)):
            number, visits = draw.randint(0, 1), []
            for _ in range(draw.randint(1, 4)):
                count = draw.randint(0, 4)
                rewards = [draw.uniform(least, 1) if dense else 0.0 for _ in range(count)]
                if count and not dense:
                    rewards[-1] = draw.choice([0.0, 0.0, 1.0, max(-0.1, least)])
                tokens = tuple(
                    Token(x, draw.gauss(0, 1), -draw.random() * 3, draw.random(), draw.random() * 2) for x in rewards
                )
                metrics = {"format": float(draw.randint(0, 2)), "progression": draw.random()}
                visits.append(Visit(number, tokens, draw.choice(OBSERVATIONS), metrics))
                number += draw.choice([1, 1, 2])
            episodes.append(Episode(group, tuple(visits), greedy, draw.random() < 0.5, draw.gauss(0, 1)))
    return episodes


@dataclass
class Built:
    """A rollout, and in which row and column each action token of each episode is."""

    rollout: Rollout
    places: list[list[tuple[int, int]]]

    def read(self, x_BA: Tensor) -> list[list[float]]:
        """The numbers of each episode in the order of its tokens; everywhere else there must be exactly 0."""
        assert x_BA.shape == self.rollout.action_mask.shape
        assert not x_BA.requires_grad
        off = x_BA[~self.rollout.action_mask]
        assert torch.equal(off, torch.zeros_like(off))
        return [[float(x_BA[row, column]) for row, column in places] for places in self.places]


def build(
    episodes: Sequence[Episode],
    *,
    one_row: bool = True,
    seed: int | None = None,
    noise: float = 0.0,
    padding: int = 0,
    empty_rows: int = 0,
    relabel: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Built:
    """A rollout of these episodes.

    Args:
        episodes: in their order.
        one_row: all turns of an episode in one row; else a row for each.
        seed: of observation columns among the action tokens and of the order of rows; None: neither.
        noise: number off the mask.
        padding: columns behind the longest row.
        empty_rows: rows without action tokens, in the groups of the first episodes.
        relabel: other labels of episodes and groups, in another order.
        dtype: of everything that is no label.
    """
    draw = random.Random(seed)
    rows: list[tuple[int, list[Visit]]] = []
    for i, episode in enumerate(episodes):
        visits = list(episode.visits)
        rows += [(i, visits)] if one_row else [(i, [visit]) for visit in visits]
    rows += [(-1 - k, [Visit(0, ())]) for k in range(empty_rows)]
    if seed is not None:
        draw.shuffle(rows)

    laid: list[list[tuple[int, int, Token] | None]] = []  # episode, turn, token; None: nobody sampled it
    for i, visits in rows:
        columns: list[tuple[int, int, Token] | None] = []
        for visit in visits:
            for token in visit.tokens:
                columns += [None] * (draw.randint(0, 2) if seed is not None else 0)
                columns.append((i, visit.number, token))
        laid.append(columns)
    width = max((len(columns) for columns in laid), default=0) + padding
    size = (len(rows), width)
    mask, turn_ids = torch.zeros(size, dtype=torch.bool), torch.full(size, -1)
    names = ("reward", "value", "logp", "sum_pi_squared", "weight")
    numbers = {name: torch.full(size, noise, dtype=dtype) for name in names}
    state_values = torch.full(size, NAN, dtype=dtype)
    visits_of = {(i, visit.number): visit for i, episode in enumerate(episodes) for visit in episode.visits}
    places: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for row, columns in enumerate(laid):
        for column, entry in enumerate(columns):
            if entry is None:
                continue
            i, turn, token = entry
            mask[row, column], turn_ids[row, column] = True, turn
            for name in names:
                numbers[name][row, column] = getattr(token, name)
            if (i, turn) not in places:
                state_values[row, column] = visits_of[i, turn].forked
            places.setdefault((i, turn), []).append((row, column))

    of_row = [episodes[i] if i >= 0 else episodes[(-1 - i) % len(episodes)] for i, _ in rows]
    label = (lambda x: 1000 - 7 * x) if relabel else (lambda x: x)
    rollout = Rollout(
        samples=tuple(_sample(visits) for _, visits in rows),
        action_mask=mask,
        turn_ids=turn_ids,
        rewards=numbers["reward"],
        rollout_logps=torch.zeros(size, dtype=dtype),
        episode=torch.tensor([label(i) for i, _ in rows], dtype=torch.int64),
        terminated=torch.tensor([episode.terminated for episode in of_row], dtype=torch.bool),
        scores=Scores(old_logps=numbers["logp"], values=numbers["value"], sum_pi_squared=numbers["sum_pi_squared"]),
        bootstrap_values=torch.tensor([episode.bootstrap for episode in of_row], dtype=dtype),
        groups=torch.tensor([label(episode.group) for episode in of_row], dtype=torch.int64),
        greedy_scores=torch.tensor([episode.greedy for episode in of_row], dtype=dtype),
        weights=numbers["weight"],
        state_values=state_values,
        forked_end_values=torch.tensor([episode.end_value for episode in of_row], dtype=dtype),
    )
    ordered = [
        [place for visit in episode.visits for place in places.get((i, visit.number), [])]
        for i, episode in enumerate(episodes)
    ]
    return Built(rollout, ordered)


def only(episodes: Sequence[Episode], groups: set[int]) -> list[Episode]:
    return [episode for episode in episodes if episode.group in groups]


def with_scores(episodes: Sequence[Episode], score: float) -> list[Episode]:
    """The same episodes with one reward, at the last token, so that all scores are equal."""
    changed = []
    for episode in episodes:
        left = len(episode.tokens)
        visits = []
        for visit in episode.visits:
            tokens = []
            for token in visit.tokens:
                left -= 1
                tokens.append(replace(token, reward=score if left == 0 else 0.0))
            visits.append(replace(visit, tokens=tuple(tokens), metrics={"format": 1.0, "progression": 0.5}))
        changed.append(replace(episode, visits=tuple(visits)))
    return changed


def _sample(visits: Sequence[Visit]) -> Sample:
    segments = [Segment(SegmentKind.PROMPT, text(1))]
    for visit in visits:
        segments.append(
            Segment(SegmentKind.ACTION, text(*[5] * max(1, len(visit.tokens))), (-1.0,) * max(1, len(visit.tokens)))
        )
    return Sample(tuple(segments), tuple(_turn(visit) for visit in visits))


def _turn(visit: Visit) -> Turn:
    return Turn(
        env=0, episode=0, index=visit.number, observation=visit.observation, reply="", thought="", action="",
        valid=True, env_reward=0.0, reward=0.0, episode_return=0.0, terminated=False, truncated=False, stop=None,
        success=None, hit_token_cap=False, history_cuts=0, policy_version=0, env_seconds=0.0, engine_seconds=0.0,
        metrics=visit.metrics, seen=visit.seen,
    )  # fmt: skip
