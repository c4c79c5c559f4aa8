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
        claim="With one discount per token, longer replies make a far reward worth less, so that the policy prefers a "
        "near reward of half its size. With a discount per turn it does not.",
        by=f"{VERLOG}, as the reason for its dual discount",
        refuted="no difference between the dual discount and one pair with the same numbers",
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
        claim="A policy gets worse at first if the critic's head is random. Training the critic alone first prevents "
        "this. A head of zeros does no harm.",
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
        claim="A random head needs a warm-up with cuts of 64 turns, too.",
        by=f"{VERLOG}, which uses a warm-up with every cut",
        refuted="no difference, since returns of whole episodes depend little on the critic",
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
        refuted="GRPO's area per turn no higher than GAE's, or GiGPO's no higher than GRPO's",
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
        "helps. With each further iteration of age, up to four, the cost and the gain of reweighting grow.",
        by="rollout correction (arXiv 2512.23075), and every asynchronous trainer",
        refuted="less area with stale rollouts, or no gain by the correction",
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
        by=f"{VERLOG}. A trial run showed no difference without a lure, since the best way is the same",
        refuted="no difference",
        start=Start(reply_tokens=4),
        arms={"dual .99/.95": Arm(), "one pair .99/.95": Arm(GAE, DISCOUNTS)},
        comparisons=(Comparison("dual .99/.95", "one pair .99/.95"),),
    ),
    "memory": Cell(
        title="How much of the past a prompt holds",
        claim="If a sign of four turns ago decides, a prompt has to show those four turns, and more turns only "
        "distract. One turn is enough if the prompt also shows its thought, which passes the sign on from reply to "
        "reply.",
        by="T-mazes of Bakker (2001) and Ni et al. (arXiv 2307.03864) for the length; "
        f"{VERLOG} for short histories, which shows one turn with its thought",
        refuted="four turns no better than one or two, eight no worse than four, or no gain by the thought",
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
        claim="A window forgets only the oldest turn; clearing a history can forget what is needed next. Over the ten "
        "turns of an episode, a history cleared every 8 turns holds 2.9 turns on average, a window of four 3.0. At "
        "the first junction both show the sign. At the second one the cleared history shows a single turn, without "
        "the sign. So its policy can learn one junction and has to guess at the other: its success stays below 0.5, "
        "about half of the window's success once both have learned. The last eight actions without observations do "
        "not show the sign, so *actions only* stays at chance (0.25), like one turn. The expected verdict on these "
        "two arms is *not shown*, or a difference below 0.01.",
        by=f"{VERLOG}, which keeps a short window and reports that actions alone and a history cleared every 5 turns "
        "were worse; the numbers are our predictions",
        refuted="a cleared history no worse than the window, no better than actions alone, or below 0.4 at the end; "
        "or a difference of 0.01 or more between actions alone and one turn",
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
