"""One rollout written out by hand, with numbers small enough to compute everything that is logged on paper.

Eight turns in six samples of three environments; three episodes end, each in another way. 20 reply tokens, of which 11
are thought and 9 name the action. Environment 2 has one growing sample, the others have one sample per turn.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_agentrl.types import Rollout, Sample, Scores, Segment, SegmentKind, StopReason, Turn
from tests.inputs import text
from tests.types.samples import glue, observation, prompt, turn

OFF_MASK = 99.0  # stands in the padding, where nothing may read


@dataclass(frozen=True)
class Written:
    """A turn, and one number of each kind per token of its reply."""

    turn: Turn
    engine: Sequence[int]  # log-probs of the engine that sampled
    old: Sequence[int]  # of the actor before the update
    ref: Sequence[int]  # of the reference
    entropy: Sequence[int]
    values: Sequence[int]
    returns: Sequence[int]

    @property
    def reply(self) -> Segment:
        ids = range(10, 10 + len(self.engine))
        return Segment(SegmentKind.ACTION, text(*ids), tuple(float(logp) for logp in self.engine))


# Environment 0: the end of episode 2, which thinks the same twice and is not solved, though its return is above 0; then
# an episode that begins with an invalid reply and no thought.
A = Written(
    turn(
        env=0,
        episode=2,
        index=3,
        reply="Think: red door. Action: open",
        thought="red door",
        thought_tokens=2,
        env_reward=1.0,
        reward=1.0,
        episode_return=3.0,
        metrics={"achievement/wood": 0.5},  # not at the end of an episode, so it does not count
        history_cuts=2,
        env_errors=("TimeoutError",),
        env_seconds=0.5,
        engine_seconds=1.0,
    ),
    engine=[-1, -2, -1],
    old=[-1, -1, -2],
    ref=[-2, -3, -2],
    entropy=[2, 1, 0],
    values=[1, 2, 1],
    returns=[2, 2, 4],
)
B = Written(
    turn(
        env=0,
        episode=2,
        index=4,
        reply="Think: red door. Action: open",
        thought="red door",
        thought_tokens=1,
        env_reward=2.0,
        reward=2.0,
        episode_return=5.0,
        terminated=True,
        stop=StopReason.ENV_DONE,
        success=False,
        metrics={"achievement/wood": 1.0, "progression": 0.75},
        env_seconds=0.25,
        engine_seconds=2.0,
    ),
    engine=[-2, -3],
    old=[-1, -3],
    ref=[-2, -2],
    entropy=[3, 1],
    values=[3, 1],
    returns=[4, 0],
)
C = Written(
    turn(
        env=0,
        episode=3,
        index=0,
        reply="go go go go",
        valid=False,
        invented=True,
        reward=-1.0,
        env_seconds=0.25,
        engine_seconds=1.0,
        bootstrap=(prompt(1, 2),),
    ),
    engine=[-2],
    old=[-2],
    ref=[-5],
    entropy=[2],
    values=[0],
    returns=[-1],
)

# Environment 1: the end of episode 0 at the environment's limit, solved by its return; then a whole episode of one turn
# that our own limit ends, not solved since its return is 0.
D = Written(
    turn(
        env=1,
        episode=0,
        index=5,
        reply="Think: a key, a KEY! Action: take",
        thought="a key, a KEY!",
        thought_tokens=3,
        env_reward=3.0,
        reward=3.0,
        episode_return=4.0,
        truncated=True,
        stop=StopReason.ENV_TRUNCATED,
        bootstrap=(prompt(1, 2),),
        metrics={"achievement/wood": 0.0, "progression": 0.25},
        history_cuts=3,
        env_seconds=1.0,
        engine_seconds=3.0,
    ),
    engine=[-1, -1, -1, -1, -1],
    old=[-1, -1, -2, -1, -3],
    ref=[-1, -2, -2, -3, -4],
    entropy=[1, 1, 2, 0, 1],
    values=[1, 2, 2, 4, 1],
    returns=[3, 1, 2, 5, 1],
)
E = Written(
    turn(
        env=1,
        episode=1,
        index=0,
        reply="Think: a red door. Action: go",
        thought="a red door",
        thought_tokens=1,
        truncated=True,
        stop=StopReason.MAX_TURNS,
        bootstrap=(prompt(1, 2),),
        metrics={"achievement/wood": 1.0},
        env_seconds=0.5,
        engine_seconds=1.0,
    ),
    engine=[-2, -2],
    old=[-2, -1],
    ref=[-3, -1],
    entropy=[4, 0],
    values=[0, 2],
    returns=[0, 0],
)

# Environment 2: three turns of one episode in one growing sample. The last reply is cut by the token cap inside its
# thought, so it names no action.
F = Written(
    turn(
        env=2,
        index=0,
        reply="Think: walk. Action: north",
        thought="walk",
        thought_tokens=1,
        env_reward=1.0,
        reward=1.0,
        episode_return=1.0,
        metrics={"steps": 7.0},  # of no ended episode, so it is not named at all
        env_seconds=0.5,
        engine_seconds=2.0,
    ),
    engine=[-1, -1],
    old=[-1, -2],
    ref=[-2, -4],
    entropy=[1, 2],
    values=[2, 1],
    returns=[1, 3],
)
G = Written(
    turn(
        env=2,
        index=1,
        reply="Think: walk north. Action: north",
        thought="walk north",
        thought_tokens=1,
        episode_return=1.0,
        env_errors=("TimeoutError", "OSError"),
        lost=("died", "died"),
        env_seconds=0.75,
        engine_seconds=1.0,
    ),
    engine=[-1, -2, -1],
    old=[-1, -2, -1],
    ref=[-1, -3, -3],
    entropy=[1, 3, 0],
    values=[1, 3, 2],
    returns=[1, 2, 4],
)
H = Written(
    turn(
        env=2,
        index=2,
        reply="Think: a red cow, a red cow",
        thought="a red cow, a red cow",
        thought_tokens=2,
        valid=False,
        reward=-1.0,
        episode_return=1.0,
        hit_token_cap=True,
        env_seconds=0.25,
        engine_seconds=5.0,
        bootstrap=(prompt(1, 2),),
    ),
    engine=[-2, -2],
    old=[-3, -1],
    ref=[-1, -2],
    entropy=[2, 3],
    values=[0, 1],
    returns=[-1, 1],
)

ROWS = [[A], [B], [C], [D], [E], [F, G, H]]
ENV_OF_ROW = [0, 0, 0, 1, 1, 2]


def by_hand(without_thoughts_of: Collection[int] = ()) -> Rollout:
    """The rollout, scored, with returns. Scores are float64 and not 0 in the padding.

    Args:
        without_thoughts_of: environments whose replies name an action only.
    """
    rows = [[_without_thought(w) if w.turn.env in without_thoughts_of else w for w in row] for row in ROWS]
    rollout = Rollout.from_samples(
        [
            _sample(rows[0], prompt(1, 2, 3, 4)),
            _sample(rows[1], prompt(1, 2, 3, 4, 5)),
            _sample(rows[2], prompt(1, 2)),
            _sample(rows[3], prompt(1, 2, 3, 4, 5, 6)),
            _sample(rows[4], prompt(1, 2, 3)),
            _growing(rows[5]),
        ]
    )
    scores = Scores(
        old_logps=_columns([[n for w in row for n in w.old] for row in rows]),
        ref_logps=_columns([[n for w in row for n in w.ref] for row in rows]),
        values=_columns([[n for w in row for n in w.values] for row in rows]),
        entropy=_columns([[n for w in row for n in w.entropy] for row in rows]),
    )
    return rollout.union(scores=scores, returns=_columns([[n for w in row for n in w.returns] for row in rows]))


def of_envs(rollout: Rollout, envs: Collection[int]) -> Rollout:
    """The rows of some environments, as one process of several has them."""
    return rollout.select([row for row, env in enumerate(ENV_OF_ROW) if env in envs])


def _sample(row: Sequence[Written], read: Segment) -> Sample:
    (written,) = row
    return Sample((read, written.reply), (written.turn,))


def _growing(row: Sequence[Written]) -> Sample:
    f, g, h = row
    segments = (prompt(1, 2, 3), f.reply, glue(7), observation(8, 8), g.reply, observation(9), h.reply)
    return Sample(segments, (f.turn, g.turn, h.turn))


def _without_thought(written: Written) -> Written:
    return replace(written, turn=replace(written.turn, thought="", thought_tokens=0))


def _columns(rows: Sequence[Sequence[int]]) -> Tensor:
    """[B, A] float64."""
    columns = torch.full((len(rows), max(map(len, rows))), OFF_MASK, dtype=torch.float64)
    for i, row in enumerate(rows):
        columns[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return columns
