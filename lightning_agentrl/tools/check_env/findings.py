"""Rules of all checks (severity and fix), and the log of their findings with the first evidence of each."""

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
"""The parts of an exam in order; the certificate names those that a time limit cuts."""


@dataclass(frozen=True)
class Rule:
    """Meaning of a check.

    Args:
        severity: ``error`` if training would go wrong, ``warning`` if a user should check, ``notice`` for information.
        mend: advice for the author of the environment.
        openenv: id of the corresponding check of OpenEnv; empty if OpenEnv has no such check.
    """

    severity: Severity
    mend: str
    openenv: str = ""


_SEED = "draw all random numbers from self.np_random, which super().reset(seed=seed) seeds"
_END = "terminated: the game is over; truncated: it was cut off at a limit"

RULES: dict[str, Rule] = {
    # rules of the contract
    "contract.make": Rule("error", "gymnasium.make must work with these arguments", "runtime.startup"),
    "contract.reset": Rule("error", "reset(seed=...) returns (observation, info)", "runtime.observation_schema"),
    "contract.step": Rule("error", "step(text) returns gymnasium's five values", "runtime.observation_schema"),
    "contract.info": Rule("error", "info is a dictionary of plain values; see docs/environments.md"),
    "contract.attribute": Rule("error", "see the table of attributes in docs/environments.md"),
    "contract.values": Rule("error", "return plain values, which can be compared and shown"),
    "contract.unseeded": Rule("warning", "reset() without a seed continues with the existing generator"),
    "contract.options": Rule("notice", "reset must accept the argument `options`"),
    "contract.close": Rule("warning", "close() may be called at any time, and twice"),
    "text.type": Rule(
        "error",
        "an observation is a text, or a dictionary, see docs/environments.md",
        "runtime.observation_schema",
    ),
    "text.encoding": Rule("error", "replace characters that UTF-8 cannot encode", "runtime.observation_schema"),
    "text.markers": Rule("warning", "remove or break special strings of chat templates and tokenizers"),
    "text.control": Rule("warning", "remove escape codes and invisible characters"),
    "text.echo": Rule("warning", "do not repeat a reply unchanged; cut it and break its special strings"),
    "text.empty": Rule("warning", "describe in every observation what the policy can know"),
    "text.long": Rule("warning", "shorten the texts, or raise prompt.max_prompt_tokens"),
    "text.grows": Rule("notice", "show only what is new; the trainer's memory shows earlier turns"),
    "text.constant": Rule("warning", "describe in the observation what the action did"),
    "text.stale": Rule("warning", "create the observation after the action has been executed"),
    "text.hidden": Rule("notice", "long_term_text and short_term_text together must equal the observation"),
    "spaces.missing": Rule("notice", "set observation_space and action_space in __init__"),
    "spaces.observation": Rule(
        "notice", "gymnasium's Text space allows only letters and digits unless it has a charset"
    ),
    "spaces.action": Rule("notice", "actions are texts: use a Text space with a charset"),
    "spaces.change": Rule("warning", "set the spaces once, in __init__"),
    "actions.alias": Rule("error", "an alias must stand for an action, and not be an action itself"),
    "actions.example": Rule("warning", "an example is an observation and the name of an action"),
    "actions.alike": Rule("warning", "give every action a name that differs in more than case and blanks"),
    "actions.refused": Rule("error", "step must accept every name in `actions`"),
    "actions.executed": Rule("warning", "info['executed_action'] is the action that was executed"),
    "actions.invalid_flag": Rule("warning", "set info['invalid_action'] if a text names no action"),
    # rules of rewards and ends
    "reward.type": Rule("error", "a reward is an int or a float", "runtime.reward_well_formed"),
    "reward.finite": Rule("error", "a reward is finite", "runtime.reward_well_formed"),
    "reward.size": Rule("warning", "scale rewards; returns near 1 suit the default settings"),
    "reward.spread": Rule("warning", "let rewards differ between episodes; equal rewards give no signal"),
    "reward.success": Rule("error", "reward a success more than a failure"),
    "reward.repeated": Rule("notice", "reward the same move only once"),
    "learn.ceiling": Rule("notice", "there is nothing to learn; use harder levels", "semantic.floor_gap"),
    "learn.floor": Rule("notice", "begin with easier levels, or reward parts of the task", "semantic.floor_gap"),
    "ends.type": Rule("error", "terminated and truncated are bools", "runtime.observation_schema"),
    "ends.both": Rule("error", _END),
    "ends.limit": Rule("warning", f"report a limit of turns as truncated; {_END}"),
    "ends.declared": Rule("warning", "end the episode at the limit that max_turns (or the registration) declares"),
    "ends.early": Rule("warning", f"truncate only at the declared limit; {_END}"),
    "ends.win": Rule("warning", f"report a win as terminated; {_END}"),
    "ends.never": Rule("warning", "truncate episodes at a limit of turns"),
    "ends.restart": Rule("warning", "return the last observation of the ended episode, not the first of the next one"),
    "ends.after": Rule("notice", "raise ResetNeeded if step is called after the end"),
    "info.success": Rule("warning", "info['success'] is false until the task of this episode is solved"),
    "info.progression": Rule("warning", "info['progression'] goes from 0 to 1, which is success"),
    "info.shared": Rule("warning", "make a new info in every call"),
    "info.pickle": Rule("warning", "put plain values into info, since it is sent between processes"),
    # rules of determinism
    "seed.honoured": Rule("error", _SEED, "runtime.seed_control"),
    "seed.ignored": Rule("notice", "all seeds have equal tasks, which is fine if there is only one task"),
    "replay.twice": Rule("error", _SEED, "runtime.episode_determinism"),
    "replay.used": Rule("error", "reset everything that belongs to an episode in reset", "runtime.episode_isolation"),
    "replay.interleaved": Rule(
        "error", "keep state on the instance, not on the class or the module", "runtime.episode_isolation"
    ),
    "replay.thread": Rule(
        "error", "use no signals or thread-bound objects, or declare worker = 'process' on the class"
    ),
    "replay.process": Rule("error", "do not depend on time, paths or object identities", "runtime.episode_determinism"),
    "replay.hash": Rule("error", "sort sets before iterating over them, and do not use hash()", "runtime.seed_control"),
    "replay.render": Rule("error", "render() must not change the game or its generator", "runtime.episode_isolation"),
    "instances": Rule("warning", "allow several instances at a time; on a server, several sessions"),
    "rng.global": Rule("warning", "draw from self.np_random, not from the generators of random and numpy"),
    # rules of time limits and errors
    "raises": Rule("error", "answer any text with an observation", "runtime.observation_schema"),
    "hang": Rule("error", "bound every loop and every wait", "runtime.resource_bounds"),
    "died": Rule("error", "no reply may end the process", "runtime.resource_bounds"),
    "code": Rule("error", "never run a reply as code"),
    "render.mode": Rule("warning", "accept the argument render_mode if metadata names render_modes, or name none"),
    "render.picture": Rule("warning", "render() returns uint8 [height, width, 3]"),
    "time.step": Rule("warning", "make steps faster, or run the environment in a separate process"),
    "time.reset": Rule("warning", "make resets faster: prepare levels in advance, or make them smaller"),
    "memory": Rule("warning", "release the memory of earlier episodes"),
    "left.threads": Rule("notice", "end threads and processes in close()"),
    "left.files": Rule("notice", "write into a temporary folder, and stay in the working folder"),
    "prints": Rule("notice", "write nothing to standard output, where the trainer shows its progress"),
    # rules of the rewards that replies earn
    "gaming.empty": Rule("error", "reward only replies that solve the task", "semantic.canary_floor"),
    "gaming.hostile": Rule(
        "error", "compare the whole reply, and do not reward replies that name no action", "semantic.canary_floor"
    ),
    "gaming.constant": Rule(
        "warning", "make tasks differ so that no single reply solves them", "semantic.canary_floor"
    ),
    "gaming.copy": Rule("error", "do not reward repeating the prompt or naming every answer", "semantic.canary_floor"),
    "oracle.max": Rule("error", "the published answer must earn the full reward", "semantic.oracle_max"),
    "leak.answer": Rule("warning", "remove the answer from the text", "semantic.no_solution_leakage"),
    "solver.raises": Rule("error", "the scripted player must work in any state"),
    "solver.levels": Rule("warning", "create only levels that can be solved within the limit", "semantic.oracle_max"),
    "memory.needed": Rule(
        "notice",
        "use a memory that shows earlier turns (data.init_args.memory), unless the environment is random",
    ),
}


@dataclass
class Finding:
    """Finding of one check.

    Args:
        check: name of the check in `RULES`.
        said: one sentence with the numbers.
        severity: severity of the rule, or a milder one if the environment declares the behavior.
        seed: seed of the episode that shows the finding; None if no episode is needed.
        actions: actions to send after the reset, as Python expressions.
        times: number of times that the finding occurred.
    """

    check: str
    said: str
    severity: Severity
    seed: int | None = None
    actions: list[str] = field(default_factory=list)
    times: int = 1

    def plain(self) -> dict[str, Any]:
        """Return the finding with the advice of its rule, for JSON."""
        rule = RULES[self.check]
        return {**asdict(self), "mend": rule.mend, "openenv": rule.openenv}


class Log:
    """Findings, figures, and parts that were not checked."""

    def __init__(self) -> None:
        self.findings: dict[str, Finding] = {}
        self.figures: dict[str, Any] = {}
        self.cut: dict[str, str] = {}
        """Reason by part of the exam for parts that were not completed."""
        self.milder: dict[str, Severity] = {}
        """Milder severity by check, for example since the environment declares the behavior."""

    def add(self, check: str, said: str, seed: int | None = None, actions: Sequence[str] = ()) -> None:
        """Add a finding of a check; the first evidence is stored, further evidence is only counted."""
        if check in self.findings:
            self.findings[check].times += 1
            return
        severity = self.milder.get(check, RULES[check].severity)
        self.findings[check] = Finding(check, shown(said, 600), severity, seed, [expression(one) for one in actions])

    def __contains__(self, check: str) -> bool:
        return check in self.findings
