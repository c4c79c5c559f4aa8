"""The checks, and what they have found so far: how bad it is, how to mend it, and the first evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lightning_agentrl.tools.check_env.texts import expression, shown

Severity = Literal["error", "warning", "notice"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "notice")
PARTS = (
    "contract",
    "seeds",
    "random play",
    "scripted player",
    "replays",
    "hostile replies",
    "what replies earn",
    "published answer",
    "what episodes have in common",
    "closing",
)
"""The parts of an exam in their order; what a limit on time cuts is named by them."""


@dataclass(frozen=True)
class Rule:
    """Meaning of a check.

    Args:
        severity: error: training on it goes wrong; warning: look at it; notice: good to know.
        mend: what the author of the environment can do.
        openenv: id of OpenEnv's check for it; empty without one.
    """

    severity: Severity
    mend: str
    openenv: str = ""


_SEED = "draw everything from self.np_random, which super().reset(seed=seed) seeds"
_END = "terminated: the game is over; truncated: it was cut off at a limit"

RULES: dict[str, Rule] = {
    # contract
    "contract.make": Rule("error", "an environment is made by gymnasium.make with its arguments", "runtime.startup"),
    "contract.reset": Rule("error", "reset(seed=...) returns (observation, info)", "runtime.observation_schema"),
    "contract.step": Rule(
        "error", "step(text) returns five values, as gymnasium has them", "runtime.observation_schema"
    ),
    "contract.info": Rule("error", "info is a dictionary of plain values; see docs/environments.md"),
    "contract.attribute": Rule("error", "see the table of attributes in docs/environments.md"),
    "contract.values": Rule("error", "give plain values, which can be compared and shown"),
    "contract.unseeded": Rule("warning", "reset() without a seed goes on with the generator that there is"),
    "contract.options": Rule("notice", "reset takes `options`, too"),
    "contract.close": Rule("warning", "close() may be called at any time, and twice"),
    "text.type": Rule(
        "error",
        "an observation is a text, or a dictionary, see docs/environments.md",
        "runtime.observation_schema",
    ),
    "text.encoding": Rule("error", "replace what UTF-8 cannot encode", "runtime.observation_schema"),
    "text.markers": Rule("warning", "leave out or break what a chat template or tokenizer reads as its own marker"),
    "text.control": Rule("warning", "leave out escape codes and characters that cannot be seen"),
    "text.echo": Rule("warning", "do not show a reply again as it came; cut it and break its markers"),
    "text.empty": Rule("warning", "say in every observation what the policy can know"),
    "text.long": Rule("warning", "shorten the texts, or raise prompt.max_prompt_tokens"),
    "text.grows": Rule("notice", "show what is new; the trainer's memory shows earlier turns again"),
    "text.constant": Rule("warning", "say in the observation what the action did"),
    "text.stale": Rule("warning", "make the observation after the action has been executed"),
    "text.hidden": Rule("notice", "long_term_text and short_term_text say together what the observation says"),
    "spaces.missing": Rule("notice", "set observation_space and action_space in __init__"),
    "spaces.observation": Rule(
        "notice", "gymnasium's Text space has letters and figures only unless it is given a charset"
    ),
    "spaces.action": Rule("notice", "actions are texts: give a Text space with a charset"),
    "spaces.change": Rule("warning", "set the spaces once, in __init__"),
    "actions.alias": Rule("error", "an alias names an action, and is none itself"),
    "actions.example": Rule("warning", "an example is an observation and the name of an action"),
    "actions.alike": Rule("warning", "give every action a name that differs in more than case and blanks"),
    "actions.refused": Rule("error", "step must know every name that `actions` offers"),
    "actions.executed": Rule("warning", "info['executed_action'] is the action that was executed"),
    "actions.invalid_flag": Rule("warning", "set info['invalid_action'] where a text names no action"),
    # reward and ends
    "reward.type": Rule("error", "a reward is an int or a float", "runtime.reward_well_formed"),
    "reward.finite": Rule("error", "a reward is finite", "runtime.reward_well_formed"),
    "reward.size": Rule("warning", "scale rewards; returns near 1 suit the default settings"),
    "reward.spread": Rule("warning", "rewards that never differ teach nothing"),
    "reward.success": Rule("error", "a success pays more than a failure"),
    "reward.repeated": Rule("notice", "pay once for what is reached, not again and again"),
    "learn.ceiling": Rule("notice", "there is nothing to learn here; take harder levels", "semantic.floor_gap"),
    "learn.floor": Rule("notice", "begin with easier levels, or pay for a part of the task", "semantic.floor_gap"),
    "ends.type": Rule("error", "terminated and truncated are bools", "runtime.observation_schema"),
    "ends.both": Rule("error", _END),
    "ends.limit": Rule("warning", f"report a limit of turns as truncated; {_END}"),
    "ends.declared": Rule("warning", "end the episode at the limit that max_turns (or the registration) declares"),
    "ends.early": Rule("warning", f"truncate at the declared limit only; {_END}"),
    "ends.win": Rule("warning", f"report a win as terminated; {_END}"),
    "ends.never": Rule("warning", "truncate episodes at a limit of turns"),
    "ends.restart": Rule("warning", "the last observation is that of the episode that ends, not of the next one"),
    "ends.after": Rule("notice", "raise ResetNeeded when step is called after the end"),
    "info.success": Rule("warning", "info['success'] is false until the task of this episode is solved"),
    "info.progression": Rule("warning", "info['progression'] goes from 0 to 1, which is success"),
    "info.shared": Rule("warning", "make a new info in every call"),
    "info.pickle": Rule("warning", "put plain values into info, since it is sent between processes"),
    # the same again
    "seed.honoured": Rule("error", _SEED, "runtime.seed_control"),
    "seed.ignored": Rule("notice", "equal tasks for all seeds: fine if there is only one task"),
    "replay.twice": Rule("error", _SEED, "runtime.episode_determinism"),
    "replay.used": Rule("error", "reset everything that belongs to an episode in reset", "runtime.episode_isolation"),
    "replay.interleaved": Rule(
        "error", "keep state on the instance, not on the class or the module", "runtime.episode_isolation"
    ),
    "replay.thread": Rule(
        "error", "use no signals and nothing that is bound to a thread, or declare worker = 'process' on the class"
    ),
    "replay.process": Rule("error", "do not depend on time, paths or object identities", "runtime.episode_determinism"),
    "replay.hash": Rule("error", "sort sets before you use their order, and never use hash()", "runtime.seed_control"),
    "replay.render": Rule("error", "render() must not change the game or its generator", "runtime.episode_isolation"),
    "instances": Rule("warning", "allow several instances at a time; on a server, several sessions"),
    "rng.global": Rule("warning", "draw from self.np_random, not from the generators of random and numpy"),
    # time
    "raises": Rule("error", "answer any text with an observation", "runtime.observation_schema"),
    "hang": Rule("error", "bound every loop and every wait", "runtime.resource_bounds"),
    "died": Rule("error", "no reply may end the process", "runtime.resource_bounds"),
    "code": Rule("error", "never run a reply as code"),
    "render.mode": Rule("warning", "take render_mode as an argument where metadata names render_modes, or name none"),
    "render.picture": Rule("warning", "render() returns uint8 of [height, width, 3]"),
    "time.step": Rule("warning", "make steps faster, or give the environment a process of its own"),
    "time.reset": Rule("warning", "make resets faster: prepare levels ahead, or make them smaller"),
    "memory": Rule("warning", "let go of what earlier episodes held"),
    "left.threads": Rule("notice", "end threads and processes in close()"),
    "left.files": Rule("notice", "write into a temporary folder, and stay in the working folder"),
    "prints": Rule("notice", "write nothing to standard output; the trainer draws its progress there"),
    # what replies earn
    "gaming.empty": Rule("error", "pay only for what solves the task", "semantic.canary_floor"),
    "gaming.hostile": Rule(
        "error", "compare the reply as a whole, and pay nothing for what names no action", "semantic.canary_floor"
    ),
    "gaming.constant": Rule(
        "warning", "make tasks differ so that no single reply solves them", "semantic.canary_floor"
    ),
    "gaming.copy": Rule(
        "error", "pay nothing for repeating the prompt or for naming every answer", "semantic.canary_floor"
    ),
    "oracle.max": Rule("error", "the published answer must earn the full reward", "semantic.oracle_max"),
    "leak.answer": Rule("warning", "keep the answer out of what the policy reads", "semantic.no_solution_leakage"),
    "solver.raises": Rule("error", "the scripted player goes on from whatever state it finds"),
    "solver.levels": Rule("warning", "make only levels that can be solved within the limit", "semantic.oracle_max"),
    "memory.needed": Rule(
        "notice",
        "give the prompt a memory of earlier turns (data.init_args.memory), unless what follows is left to chance",
    ),
}


@dataclass
class Finding:
    """Finding of one check.

    Args:
        check: its name in `RULES`.
        said: one sentence with the numbers.
        severity: of the rule, unless the environment declares it.
        seed: of the episode that shows it; None if no episode is needed.
        actions: what to send after the reset, as Python expressions.
        times: how often it was seen.
    """

    check: str
    said: str
    severity: Severity
    seed: int | None = None
    actions: list[str] = field(default_factory=list)
    times: int = 1

    def plain(self) -> dict[str, Any]:
        """Return it with what its rule says, for JSON."""
        rule = RULES[self.check]
        return {**asdict(self), "mend": rule.mend, "openenv": rule.openenv}


class Log:
    """Findings, figures, and what was not looked at."""

    def __init__(self) -> None:
        self.findings: dict[str, Finding] = {}
        self.figures: dict[str, Any] = {}
        self.cut: dict[str, str] = {}
        """Check -> why it was not made, or not whole."""
        self.milder: dict[str, Severity] = {}
        """Check -> severity in place of its rule's, since the environment declares that it is so."""

    def add(self, check: str, said: str, seed: int | None = None, actions: Sequence[str] = ()) -> None:
        """Note what a check found; only its first evidence is kept."""
        if check in self.findings:
            self.findings[check].times += 1
            return
        severity = self.milder.get(check, RULES[check].severity)
        self.findings[check] = Finding(check, shown(said, 600), severity, seed, [expression(one) for one in actions])

    def __contains__(self, check: str) -> bool:
        return check in self.findings
