"""What is compared with what, and the goals."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.speed.layouts import Case

SHORT = Case(prompt=85, shared=75)
LONG = Case(prompt=260, shared=200)
LONG_APART = Case(prompt=260, shared=0)
ROW = Case(prompt=252, shared=200)  # with the reply, rows of 200 shared and 60 own tokens
ROW_APART = Case(prompt=252, shared=0)

# Sizes of a micro-batch: ours, that of the quickstart when most lines were measured or of the configs for GPUs; those
# tried for the others, in tokens, rows, rows and tokens
OUR_TOKENS = {"cpu": 2048, "cuda": 16384}
SIZES = {
    "cpu": {
        "plain": (512, 1024, 2048, 4096), "trl_tree": (1024, 2048, 4096),
        "trl_grpo": (4, 8, 16), "episodes": (2, 4, 8, 16),
    },
    "cuda": {
        "plain": (4096, 8192, 16384, 32768), "trl_tree": (8192, 16384, 65536),
        "trl_grpo": (8, 16, 32, 64), "episodes": (4, 8, 16),
    },
}  # fmt: skip


@dataclass(frozen=True)
class Side:
    """A contender and how it is set up."""

    name: str
    module: str
    variant: str = ""
    episodes: bool = False


OURS = Side("lightning-agentrl", "ours")
OURS_COMPILED = Side("lightning-agentrl, kernels: compiled", "ours", "compiled")
PLAIN = Side("plain transformers", "plain")
TRL = Side("TRL GRPO", "trl_grpo", "shipped")
TRL_SCORED = Side("TRL GRPO, projecting scored positions only", "trl_grpo", "scored")
TRL_TREE = Side("TRL's prefix tree", "trl_tree")
TRL_EPISODES = Side("TRL GRPO, a row per episode", "trl_grpo", "shipped", episodes=True)
TRL_EPISODES_SCORED = Side("TRL GRPO, a row per episode, projecting scored positions only", "trl_grpo", "scored", True)


@dataclass(frozen=True)
class Comparison:
    """Our update against another one of the same turns; the ratio is theirs in seconds over ours."""

    key: str  # for --only
    case: Case
    theirs: Side
    goal: float | None
    precision: str = "bf16"
    ours: Side = OURS

    @property
    def setting(self) -> str:
        shared = f"{self.case.shared} of them shared" if self.case.shared else "none of them shared"
        kernels = "" if self.ours == OURS else f", our `kernels: {self.ours.variant}`"
        return f"prompts of {self.case.prompt} tokens, {shared}, {self.precision}{kernels}"


COMPARISONS = (
    Comparison("trl-85", SHORT, TRL, 4.0),
    Comparison("trl-260", LONG, TRL, 4.0),
    Comparison("trl-260-apart", LONG_APART, TRL, 1.5),
    Comparison("trl-scored-85", SHORT, TRL_SCORED, 2.5),
    Comparison("trl-scored-260", LONG, TRL_SCORED, 2.5),
    Comparison("trl-scored-260-apart", LONG_APART, TRL_SCORED, 1.1),
    Comparison("trl-scored-260-apart-compiled", LONG_APART, TRL_SCORED, 1.1, ours=OURS_COMPILED),
    Comparison("trl-tree-260", LONG, TRL_TREE, None),
    Comparison("trl-episodes", SHORT, TRL_EPISODES, 1.2),
    Comparison("trl-episodes-scored", SHORT, TRL_EPISODES_SCORED, None),
    Comparison("plain-bf16", ROW, PLAIN, 2.0),
    Comparison("plain-float32", ROW, PLAIN, 3.0, "float32"),
    Comparison("plain-apart-bf16", ROW_APART, PLAIN, 0.97),
    Comparison("plain-apart-float32", ROW_APART, PLAIN, 0.97, "float32"),
)
