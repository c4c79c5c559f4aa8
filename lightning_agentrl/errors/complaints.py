"""What the parser complains about: its indented tree of complaints becomes one problem."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from lightning_agentrl.errors.arguments import missing_top_keys, named, stray
from lightning_agentrl.errors.files import TOP_KEYS, below, unknown_top_key
from lightning_agentrl.errors.problem import COMMAND_LINE, Place, Problem, one_line
from lightning_agentrl.errors.words import (
    class_names,
    closest,
    dataclass_of,
    import_class,
    import_fault,
    keys_of,
    type_name,
)

TRAINER = "lightning.pytorch.Trainer"
OPTIONS = (*TOP_KEYS, "config", "print_config", "quiet", "dry_run")
_NARROWER = {  # what the parser would take, but the run would not
    "trainer.precision": ("'32-true'", "'64-true'", "'bf16-mixed'"),
}


@dataclasses.dataclass(frozen=True)
class _Scope:
    """One level of a nested complaint: a key, or the class that a key holds."""

    indent: int
    key: str = ""
    owner: type | None = None


@dataclasses.dataclass(frozen=True)
class _Complaint:
    rank: int  # the lowest says most
    problem: Problem


_NOISE = re.compile(
    r"Does not validate|Errors:|Given value|Subclass types expect|a class path \(str\)|a dict |Expected a path but|$"
)


class _Reader:
    """Reads the lines of one message.

    Args:
        message: what the parser says.
        options: what the command takes.
    """

    def __init__(self, message: str, options: Sequence[str]) -> None:
        self.options = options
        self.scopes: list[_Scope] = []
        self.bases: dict[str, list[type]] = {}  # of each key, the classes that it may hold
        self.found: list[_Complaint] = []
        self.expected: dict[str, list[str]] = {}
        self.given: dict[str, str] = {}
        for line in filter(str.strip, message.splitlines()):
            text = line.lstrip()
            indent = len(line) - len(text)
            while text.startswith("- "):
                text, indent = text[2:], indent + 2
            while self.scopes and self.scopes[-1].indent >= indent:
                self.scopes.pop()
            if match := re.match(r'Parser key "([^"]+)":(.*)', text):
                self.scopes.append(_Scope(indent, key=match[1]))
                text = match[2].strip()
            self._read(text, indent)
        self._add_wrong_type()

    @property
    def key(self) -> str:
        parts = []
        for scope in self.scopes:
            if scope.key:
                parts.append(scope.key)
            elif scope.owner is not None and not dataclasses.is_dataclass(scope.owner):
                parts.append("init_args")
        return ".".join(parts)

    @property
    def owner(self) -> type | None:
        return next((scope.owner for scope in reversed(self.scopes) if scope.owner), None)

    def _read(self, text: str, indent: int) -> None:
        key, bases = self.key, self.bases.get(self.key, [])
        if match := re.match(r"Problem with given class_path '([^']+)':", text):
            self.scopes.append(_Scope(indent, owner=import_class(match[1])))
            if self.scopes[-1].owner is None:
                self.found.append(_Complaint(1, _no_class(match[1], key, bases)))
        elif match := re.match(r"Subtypes: (.*)", text):
            self.bases[key] = [c for c in map(import_class, re.findall(r"[A-Za-z_][\w.]*\.\w+", match[1])) if c]
        elif match := re.match(r"Given value: (.*)", text):
            self.given[key] = match[1]
        elif match := re.match(r"Expected (?:a )?dot import path string: (\S+)", text):
            self.found.append(_Complaint(1, _no_class(match[1], key, bases)))
        elif match := re.match(r"Expected a (?:<class '([\w.]+)'>|(\S.*?))(?:\. Got value: (.*))?$", text):
            if not text.startswith("Expected a path"):
                self.expected.setdefault(key, []).append(type_name(match[1] or match[2]))
                self.given.setdefault(key, match[3] or "")
        elif match := re.match(r"unrecognized arguments: (.*)", text):
            self.found.append(_Complaint(0, _unrecognised(match[1], self.options)))
        elif complaint := _known_complaint(text, key, self.owner, bases):
            self.found.append(complaint)
        elif not _NOISE.match(text):
            self.found.append(_Complaint(4, Problem(f"{key}: {text}" if key else text, key=key)))

    def _add_wrong_type(self) -> None:
        if not self.expected:
            return
        key = max(self.expected, key=lambda key: key.count("."))
        names = [name for name in dict.fromkeys(self.expected[key]) if name != "null"]
        if key in _NARROWER:
            names = [f"one of {', '.join(_NARROWER[key])}"]
        if not names:
            return
        given = self.given.get(key, "")
        choices = re.findall(r"'([^']*)'", " ".join(names))
        problem = Problem(
            f"{key} must be {' or '.join(names)}, got '{given}'",
            key=key,
            value=given or None,
            suggestion=closest(given, choices),
        )
        self.found.append(_Complaint(5, problem))


def explain(message: str, options: Sequence[str] = OPTIONS) -> Problem:
    """The parser's message as a problem; the first line of it where nothing is recognised.

    Args:
        message: what the parser says.
        options: what the command takes, without dashes.
    """
    found = _Reader(message, options).found
    if not found:
        return Problem(one_line(message.splitlines()[0]))
    return min(found, key=lambda complaint: (complaint.rank, not complaint.problem.suggestion)).problem


def unknown_command(name: str, known: Sequence[str]) -> Problem:
    """There is no such command; perhaps it was left out."""
    if name.startswith("-"):
        return Problem("the command is missing", suggestion=f"agentrl {known[0]} {name} ...", known=tuple(known))
    return Problem(f"there is no command '{name}'", known=tuple(known), suggestion=closest(name, known))


def _known_complaint(text: str, key: str, owner: type | None, bases: Sequence[type]) -> _Complaint | None:
    if match := re.match(r"Subcommand '\w+' does not accept option '([^']+)'", text):
        return _Complaint(0, _unknown_from_top(match[1]))
    if match := re.match(r"Group '([^']+)' does not accept option '([^']+)'", text):
        group = dataclass_of(owner, match[1])
        return _Complaint(0, _unknown(match[2], f"{key}.{match[1]}", group, _name(owner)))
    if match := re.match(r"Option '([^']+)' is not accepted", text):
        others = [base for base in bases if dataclasses.is_dataclass(base) and base is not owner]
        meant = not any(match[1].split(".")[0] in keys_of(other) for other in others)  # of several forms, this one
        return _Complaint(0 if meant else 6, _unknown(match[1], key, owner, _name(owner)))
    if match := re.match(r"argument subcommand: invalid choice: '([^']*)' \(choose from (.*)\)", text):
        return _Complaint(0, unknown_command(match[1], re.findall(r"\w+", match[2])))
    if match := re.match(r'expected "subcommand" to be one of {(.*)}, but it was not provided', text):
        return _Complaint(0, unknown_command("--config", match[1].split(",")))
    if match := re.match(r"the following arguments are required: (.*)", text):
        return _Complaint(2, _missing(match[1].split(", "), key, owner))
    if re.match(r"Expected an instantiatable class|Not a valid subclass of", text):
        rank = 3 if text.startswith("Expected") else 6  # the second stands beside every other complaint about a class
        known = tuple(class_names(bases))
        if _plain(bases):
            return _Complaint(rank, Problem(f"{key} takes mappings, as {_forms(bases)}", key=key))
        return _Complaint(
            rank,
            Problem(
                f"{key} needs a class_path (and init_args for its arguments)", key=key, classless=True, known=known
            ),
        )
    if match := re.match(r"(?:Path|File) (does not exist|is not a file): '?([^']+)'?", text):
        fault = "does not exist" if match[1] == "does not exist" else "is no file"
        return _Complaint(0, Problem(f"the file '{match[2]}' {fault} (argument --{key})"))
    return None


def _missing(names: Sequence[str], key: str, owner: type | None) -> Problem:
    names = [name.removeprefix("fit.").removeprefix("validate.") for name in names]
    full = [f"{key}.{name}" if key else name for name in names]
    if set(full) <= set(TOP_KEYS):
        return missing_top_keys(full)
    whose = f" of {owner.__name__}" if owner else ""
    return Problem(f"{named(full, whose)} missing", key=full[0] if key else "", missing=True)


def _unknown_from_top(key: str) -> Problem:
    """A key that the command itself does not have."""
    head, _, rest = key.partition(".")
    if head == "trainer" and rest:
        return _unknown(rest.split(".")[0], "trainer", import_class(TRAINER))
    return unknown_top_key(head if head not in TOP_KEYS else key)


def _unrecognised(arguments: str, options: Sequence[str]) -> Problem:
    """An argument that the command does not take."""
    first = arguments.split()[0]
    name = first.lstrip("-").split("=")[0]
    head, _, rest = name.partition(".")
    if not first.startswith("-"):
        return stray(first, "config" in options)
    if head in options and rest:
        return _unknown_from_top(name)
    meant = closest(head, options) or (below(name) if set(TOP_KEYS) <= set(options) else "")
    return Problem(
        f"there is no option '--{head}'",
        place=Place(COMMAND_LINE, f"--{name}"),
        suggestion=f"--{meant}" if meant else "",
        known=tuple(f"--{option}" for option in options),
    )


def _unknown(key: str, above: str, owner: type | None, class_name: str = "") -> Problem:
    """There is no such key, and what it may have meant.

    Args:
        key: the last part of the key.
        above: what is before it.
        owner: the class that has no such key.
        class_name: the class that the key is written below, if that is not the owner.
    """
    known = keys_of(owner)
    first = key.split(".")[0]
    if instead := getattr(owner, "old_keys", {}).get(first):
        return Problem(f"there is no key '{first}' any more", key=f"{above}.{first}", owner=class_name, fix=instead)
    return Problem(
        f"there is no key '{key}' in {owner.__name__ if owner else above}",
        key=f"{above}.{key}" if above else key,
        owner=class_name,
        suggestion=closest(key, known),
        fix="rename or remove it",
        known=tuple(known),
    )


def _no_class(name: str, key: str, bases: Sequence[type]) -> Problem:
    """A class that is not there: misspelt, of another kind, or in a module that cannot be imported."""
    if _plain(bases):
        return Problem(f"{key} takes mappings, as {_forms(bases)}, not '{name}'", key=key)
    kind = next((base.__name__ for base in bases), "class")
    module, _, short = name.rpartition(".")
    return Problem(
        f"there is no {kind} '{name}'" + (f": {fault}" if (fault := import_fault(module)) else ""),
        key=f"{key}.class_path",
        value=name,
        suggestion=closest(short, class_names(bases, everywhere=True), cutoff=0.75 if module else 0.6),
        fix="a class of your own must be importable from where agentrl runs" if module else "",
        known=tuple(class_names(bases)),
    )


def _plain(bases: Sequence[type]) -> bool:
    """Return whether a key holds keys of its own in place of a class_path."""
    return bool(bases) and all(map(dataclasses.is_dataclass, bases))


def _forms(bases: Sequence[type]) -> str:
    """Return how mappings of these kinds begin."""
    return " or ".join(sorted(f"{{{keys_of(base)[0]}: ...}}" for base in bases))


def _name(owner: type | None) -> str:
    return owner.__name__ if owner else ""
