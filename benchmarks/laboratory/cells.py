"""The cells: what is claimed, by whom, what would refute it, and the arms. Decided before they ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from benchmarks.laboratory.arms import WARMUP_ROUNDS, Arm
from benchmarks.laboratory.cloning import Solved, Start
from benchmarks.laboratory.recall import MazeStart
from lightning_agentrl.advantages import GAE, GRPO, RLOO, DualDiscountGAE, GiGPO

Measure = Literal["area", "area_per_turn", "dip", "end"]
VERLOG = "Verlog (2025)"
DISCOUNTS = {"gamma": 0.99, "lam": 0.95}


@dataclass(frozen=True)
class Comparison:
    """Two arms of a cell.

    Args:
        better: the arm that is claimed to be better.
        worse: the other one.
        measure: by which; more is better in all of them.
    """

    better: str
    worse: str
    measure: Measure = "area"


@dataclass(frozen=True)
class Cell:
    """A question and the runs that answer it.

    Args:
        title: of its section.
        claim: what is said, and why.
        by: who says it.
        refuted: what would refute it.
        start: the game and the policy it begins with.
        arms: what is compared, by name.
        comparisons: in the order of the page.
        iterations: of a run.
        seeds: of each arm.
    """

    title: str
    claim: str
    by: str
    refuted: str
    start: Solved
    arms: Mapping[str, Arm]
    comparisons: tuple[Comparison, ...]
    iterations: int = 24
    seeds: int = 10


LURED = Start(lure=0.5, reply_tokens=8)
GROUPS = {"group": 8, "episodes": 32}

CELLS: dict[str, Cell] = {
    "lure": Cell(
        title="Dual discount with a lure",
        claim="One discount per token makes a far reward worth less the longer replies are, so that a near one of half "
        "its size wins; a discount per turn does not.",
        by=f"{VERLOG}, as the reason for its dual discount",
        refuted="no difference between the dual discount and one pair of the same numbers",
        start=LURED,
        arms={
            "dual .99/.95": Arm(),
            "one pair .99/.95": Arm(GAE, DISCOUNTS),
            "one pair .95/.95": Arm(GAE, {"gamma": 0.95, "lam": 0.95}),
        },
        comparisons=(
            Comparison("dual .99/.95", "one pair .99/.95"),
            Comparison("dual .99/.95", "one pair .95/.95"),
            Comparison("one pair .99/.95", "one pair .95/.95"),
        ),
    ),
    "warmup": Cell(
        title="Critic warm-up, cut at 2 turns",
        claim="A policy that is trained with a critic whose head is random gets worse at first; a critic that learns "
        "alone before prevents it. A head of zeros does no harm.",
        by=f"{VERLOG}, whose critic has a fresh head and {5} to {20} rounds of warm-up",
        refuted="no difference, or no dip without warm-up",
        start=Start(),
        arms={
            "random head": Arm(turns_per_env=2, random_head=True),
            "random head, warm-up": Arm(turns_per_env=2, random_head=True, warmup=WARMUP_ROUNDS),
            "zero head": Arm(turns_per_env=2),
        },
        comparisons=(
            Comparison("random head, warm-up", "random head"),
            Comparison("random head, warm-up", "random head", "dip"),
            Comparison("zero head", "random head"),
            Comparison("zero head", "random head, warm-up"),
        ),
    ),
    "warmup_long": Cell(
        title="Critic warm-up, cut at 64 turns",
        claim="With long cuts, too, a random head needs a warm-up.",
        by=f"{VERLOG}, which warms up at every cut",
        refuted="no difference: returns of whole episodes forgive a bad critic",
        start=Start(),
        arms={
            "random head": Arm(turns_per_env=64, random_head=True),
            "random head, warm-up": Arm(turns_per_env=64, random_head=True, warmup=WARMUP_ROUNDS),
            "zero head": Arm(turns_per_env=64),
        },
        comparisons=(
            Comparison("random head, warm-up", "random head"),
            Comparison("random head, warm-up", "random head", "dip"),
            Comparison("zero head", "random head, warm-up"),
        ),
    ),
    "estimators": Cell(
        title="A critic against groups",
        claim="Groups of episodes from one start need no critic and learn faster; comparing turns that meet in the "
        "same state (GiGPO) gives better credit than comparing whole episodes (GRPO).",
        by="GRPO (arXiv 2402.03300), GiGPO (arXiv 2505.10978)",
        refuted="GRPO's area per turn no higher than that of GAE; GiGPO's no higher than GRPO's",
        start=Start(),
        arms={
            "GAE, 8 turns": Arm(),
            "GRPO": Arm(GRPO, **GROUPS),
            "RLOO": Arm(RLOO, **GROUPS),
            "GiGPO": Arm(GiGPO, {"gamma": 0.99}, **GROUPS),
        },
        comparisons=(
            Comparison("GRPO", "GAE, 8 turns", "area_per_turn"),
            Comparison("GiGPO", "GRPO", "area_per_turn"),
            Comparison("GRPO", "RLOO", "area_per_turn"),
        ),
    ),
    "staleness": Cell(
        title="Rollouts collected ahead",
        claim="Rollouts that are one iteration old cost little, and reweighting them by the change of the policy "
        "helps; with two, three and four iterations both matter more each time.",
        by="rollout correction (arXiv 2512.23075), and every asynchronous trainer",
        refuted="less area with stale rollouts; no gain by the correction",
        start=Start(),
        arms={
            "fresh": Arm(),
            "stale, corrected": Arm(max_staleness=1),
            "stale, uncorrected": Arm(max_staleness=1, corrected=False),
            "two old, corrected": Arm(waits=2),
            "two old, uncorrected": Arm(waits=2, corrected=False),
            "three old, corrected": Arm(waits=3),
            "three old, uncorrected": Arm(waits=3, corrected=False),
            "four old, corrected": Arm(waits=4),
            "four old, uncorrected": Arm(waits=4, corrected=False),
        },
        comparisons=(
            Comparison("fresh", "stale, corrected"),
            Comparison("fresh", "stale, uncorrected"),
            Comparison("stale, corrected", "stale, uncorrected"),
            Comparison("fresh", "two old, corrected"),
            Comparison("two old, corrected", "two old, uncorrected"),
            Comparison("fresh", "three old, corrected"),
            Comparison("three old, corrected", "three old, uncorrected"),
            Comparison("fresh", "four old, corrected"),
            Comparison("four old, corrected", "four old, uncorrected"),
        ),
    ),
    "no_lure": Cell(
        title="Dual discount without a lure",
        claim="A dual discount learns faster than one pair with long replies.",
        by=f"{VERLOG}; a trial said that without a lure there is no difference, since the best way is the same",
        refuted="no difference",
        start=Start(reply_tokens=4),
        arms={"dual .99/.95": Arm(), "one pair .99/.95": Arm(GAE, DISCOUNTS)},
        comparisons=(Comparison("dual .99/.95", "one pair .99/.95"),),
    ),
    "memory": Cell(
        title="How much of the past a prompt holds",
        claim="Where what was told four turns ago decides, a prompt has to show those four turns, and more of them "
        "only distract. One turn is enough where its thought is shown, too: it carries from reply to reply what is out "
        "of sight.",
        by="T-mazes of Bakker (2001) and Ni et al. (arXiv 2307.03864) for the length; "
        f"{VERLOG} for short histories, which shows one turn with its thought",
        refuted="four turns no better than one or two; eight no worse than four; a thought that adds nothing",
        start=MazeStart(),
        arms={
            "1 turn": Arm(history=1),
            "2 turns": Arm(history=2),
            "4 turns": Arm(history=4),
            "8 turns": Arm(history=8),
            "1 turn, its thought": Arm(history=1, thoughts=1),
        },
        comparisons=(
            Comparison("4 turns", "1 turn"),
            Comparison("4 turns", "2 turns"),
            Comparison("4 turns", "8 turns"),
            Comparison("1 turn, its thought", "1 turn"),
            Comparison("4 turns", "1 turn, its thought"),
        ),
    ),
    "forgetting": Cell(
        title="What of the past is forgotten, and when",
        claim="A window forgets the oldest turn only; a history that is cleared can forget what is needed next. "
        "Cleared every 8 turns it holds 2.9 turns on average over the ten of an episode, the window of four "
        "3.0. At the first junction both show the sign; at the second the cleared one shows one turn, and the "
        "sign is gone. So it can learn one junction and guesses at the other: never above 0.5, about half of "
        "the successes of the window once both have learned. The last eight actions without observations tell "
        "nothing of the sign, so they stay at chance, 0.25, as one turn does: *not shown* is what is expected "
        "of these two, or a difference below 0.01.",
        by=f"{VERLOG}, which keeps a short window and says that actions alone and a history cleared every 5 turns were "
        "worse; the numbers are predictions of our own",
        refuted="a cleared history no worse than the window, no better than actions alone, or below 0.4 at the end; "
        "actions alone that differ from one turn by 0.01 or more",
        start=MazeStart(memories="every"),
        arms={
            "4 turns": Arm(history=4),
            "1 turn": Arm(history=1),
            "actions only": Arm(history=8, memory_kind="actions"),
            "cleared every 8 turns": Arm(history=8, memory_kind="cleared"),
        },
        comparisons=(
            Comparison("4 turns", "cleared every 8 turns"),
            Comparison("cleared every 8 turns", "actions only"),
            Comparison("actions only", "1 turn"),
        ),
    ),
}
assert DualDiscountGAE is Arm().estimator
