"""Wrong input as one sentence: what was given, what is known, which key to change."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import sys
import traceback
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

OWN_PACKAGES = ("lightning_agentrl", "agentrl_envs")
TOP_KEYS = ("seed_everything", "trainer", "model", "data", "ckpt_path")


class ConfigError(ValueError):
    """Input that cannot be run; its text is one sentence for the user."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Wrong input ends with its sentence and exit code 2, Ctrl-C with one line and 130; bugs keep their traceback."""
    try:
        yield
    except ConfigError as error:
        print(f"agentrl: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        print(f"agentrl: {str(stop) or 'stopped'}", file=sys.stderr)
        sys.exit(130)


# Errors that were raised by code


def raised_in(error: BaseException) -> str:
    """Name of the module that raised an error."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return str(frames[-1][0].f_globals.get("__name__", "")) if frames else ""


def from_package(error: BaseException, *packages: str) -> bool:
    return raised_in(error).split(".")[0] in packages


def constructor_error(error: Exception, config: dict[str, Any]) -> ConfigError | None:
    """The sentence of a ValueError that a constructor raised and the parser wrapped; None for any other error."""
    cause: BaseException = error
    while from_package(cause, "jsonargparse") and cause.__cause__ is not None:
        cause = cause.__cause__
    if not isinstance(cause, ValueError):
        return None
    text = one_line(str(cause))
    if from_package(cause, "lightning"):
        return ConfigError(f"trainer: {text}")
    if not from_package(cause, *OWN_PACKAGES):
        frame = traceback.extract_tb(cause.__traceback__)[-1]
        text += f" (raised in {Path(frame.filename).name}, line {frame.lineno})"
    if "init_args" not in text:
        frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
        constructors = [frame for frame in frames if frame.f_code.co_name in ("__init__", "__post_init__")]
        owner = constructors[-1].f_locals.get("self") if constructors else None
        if key := _key_of(type(owner).__name__, config):
            text += f" (key {key})"
    return ConfigError(text)


def _key_of(class_name: str, config: Any) -> str:
    """The key below which a config names a class; empty if it does not, or names it twice."""
    found = []

    def walk(node: Any, key: str) -> None:
        if isinstance(node, list):
            for item in node:
                walk(item, key)
        elif isinstance(node, dict):
            if str(node.get("class_path", "")).rsplit(".", 1)[-1] == class_name:
                found.append(f"{key}.init_args")
            for name, value in node.items():
                walk(value, f"{key}.{name}" if key else name)

    walk(config, "")
    return found[0] if len(found) == 1 else ""


def one_line(text: str) -> str:
    return " ".join(text.split())


# Files


def check_yaml(path: Path) -> None:
    """Refuse a config file that is no YAML, or whose keys at the top are unknown (the parser ignores empty ones).

    Raises:
        ConfigError: with the file and the place in it.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or one_line(str(error))
        raise ConfigError(f"the config file '{path}' is not valid YAML{place}: {problem}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"the config file '{path}' holds no keys; it needs {_listed(TOP_KEYS[1:4])}")
    known = (
        *TOP_KEYS,
        "optimizer",
        "lr_scheduler",
        "weights_only",
        "fit",
        "validate",
        "subcommand",
        "verbose",
        "quiet",
        "dry_run",
    )
    for key in content:
        if key not in known:
            raise ConfigError(f"the config file '{path}': {_unknown(str(key), '', None, TOP_KEYS)}")


# Complaints of the parser


@dataclasses.dataclass(frozen=True)
class _Scope:
    """One level of a nested complaint: a key, or the class that a key holds."""

    indent: int
    key: str = ""
    owner: type | None = None


@dataclasses.dataclass(frozen=True)
class _Complaint:
    rank: int  # the lowest says most
    sentence: str


_NOISE = re.compile(
    r"Does not validate|Errors:|Given value|Subclass types expect|a class path \(str\)|a dict |Expected a path but|$"
)


def explain(message: str) -> str:
    """The parser's indented tree of complaints as one sentence; the first line of it where nothing is recognised."""
    scopes: list[_Scope] = []
    bases: dict[str, list[type]] = {}  # of each key, the classes that it may hold
    found: list[_Complaint] = []
    expected: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    for line in filter(str.strip, message.splitlines()):
        text = line.lstrip()
        indent = len(line) - len(text)
        while text.startswith("- "):
            text, indent = text[2:], indent + 2
        while scopes and scopes[-1].indent >= indent:
            scopes.pop()
        key, owner = _path(scopes), next((s.owner for s in reversed(scopes) if s.owner), None)
        if match := re.match(r'Parser key "([^"]+)":(.*)', text):
            scopes.append(_Scope(indent, key=match[1]))
            text = match[2].strip()
            key = _path(scopes)
        if match := re.match(r"Problem with given class_path '([^']+)':", text):
            scopes.append(_Scope(indent, owner=_import(match[1])))
            if scopes[-1].owner is None:
                found.append(_Complaint(1, _no_class(match[1], key, bases.get(key, []))))
        elif match := re.match(r"Subtypes: (.*)", text):
            bases[key] = [c for c in map(_import, re.findall(r"[A-Za-z_][\w.]*\.\w+", match[1])) if c]
        elif match := re.match(r"Given value: (.*)", text):
            given[key] = match[1]
        elif match := re.match(r"Expected a dot import path string: (\S+)", text):
            found.append(_Complaint(1, _no_class(match[1], key, bases.get(key, []))))
        elif match := re.match(r"Expected a (?:<class '([\w.]+)'>|(\S.*?))(?:\. Got value: (.*))?$", text):
            if not text.startswith("Expected a path"):
                expected.setdefault(key, []).append(_type_name(match[1] or match[2]))
                given.setdefault(key, match[3] or "")
        elif complaint := _known_complaint(text, key, owner, bases.get(key, [])):
            found.append(complaint)
        elif not _NOISE.match(text):
            found.append(_Complaint(4, f"{key}: {text}" if key else text))
    if expected:
        key = max(expected, key=lambda key: key.count("."))
        names = [name for name in dict.fromkeys(expected[key]) if name != "null"]
        if names:
            found.append(_Complaint(5, f"{key} must be {' or '.join(names)}, got '{given.get(key, '')}'"))
    if not found:
        return one_line(message.splitlines()[0])
    return min(found, key=lambda complaint: complaint.rank).sentence


def _known_complaint(text: str, key: str, owner: type | None, bases: Sequence[type]) -> _Complaint | None:
    if match := re.match(r"Subcommand '\w+' does not accept option '([^']+)'", text):
        head, _, rest = match[1].partition(".")
        if head == "trainer" and rest:
            trainer = _import("lightning.pytorch.Trainer")
            return _Complaint(0, _unknown(rest.split(".")[0], "trainer", trainer, _keys(trainer)))
        return _Complaint(0, _unknown(head, "", None, TOP_KEYS))
    if match := re.match(r"Group '([^']+)' does not accept option '([^']+)'", text):
        group = _argument_type(owner, match[1])
        return _Complaint(0, _unknown(match[2], f"{key}.{match[1]}", group, _keys(group)))
    if match := re.match(r"Option '([^']+)' is not accepted", text):
        return _Complaint(0, _unknown(match[1], key, owner, _keys(owner)))
    if match := re.match(r"unrecognized arguments: (.*)", text):
        return _Complaint(0, _unrecognised(match[1]))
    if match := re.match(r"argument subcommand: invalid choice: '([^']*)' \(choose from (.*)\)", text):
        names = re.findall(r"\w+", match[2])
        return _Complaint(0, f"there is no command '{match[1]}'; known: {_listed(names)}{_hint(match[1], names)}")
    if match := re.match(r"the following arguments are required: (.*)", text):
        missing = [name.removeprefix("fit.").removeprefix("validate.") for name in match[1].split(", ")]
        names = [f"{key}.{name}" if key else name for name in missing]
        whose = f" of {owner.__name__}" if owner else ""
        fix = "" if owner else "; give a config file with --config"
        many = len(names) > 1
        return _Complaint(2, f"the key{'s' * many} {' and '.join(names)}{whose} {'are' if many else 'is'} missing{fix}")
    if re.match(r"Expected an instantiatable class|Not a valid subclass of", text):
        known = f"; known: {_listed(_names(bases))}" if _names(bases) else ""
        rank = 3 if text.startswith("Expected") else 6  # the second stands beside every other complaint about a class
        return _Complaint(rank, f"{key} needs a class_path (and init_args for its arguments){known}")
    if match := re.match(r"File does not exist: '?([^']+)'?", text):
        return _Complaint(0, f"the file '{match[1]}' does not exist (argument --{key})")
    return None


def _unrecognised(arguments: str) -> str:
    first = arguments.split()[0]
    if first.startswith("-"):
        name = first.lstrip("-").split("=")[0]
        head, _, rest = name.partition(".")
        if head == "trainer" and rest:
            trainer = _import("lightning.pytorch.Trainer")
            return _unknown(rest.split(".")[0], "trainer", trainer, _keys(trainer))
        return _unknown(head, "", None, (*TOP_KEYS, "config"))
    hint = f"; did you mean --config {first}?" if first.endswith((".yaml", ".yml")) else ""
    return f"the argument '{first}' belongs to no key{hint}"


def _unknown(key: str, where: str, owner: type | None, known: Sequence[str]) -> str:
    """There is no such key, and what it may have meant."""
    name = f"{where}.{key}" if where else key
    whose = f"a key of {owner.__name__}" if owner else "a known key"
    if hint := _hint(key, known):
        return f"{name} is not {whose}{hint}"
    if not 0 < len(known) <= 20:
        return f"{name} is not {whose}; remove or rename it"
    return f"{name} is not {whose}; {'its keys are' if owner else 'use'} {_listed(known)}"


def _no_class(name: str, key: str, bases: Sequence[type]) -> str:
    kind = next((base.__name__ for base in bases), "class")
    known = _names(bases)
    short = name.rsplit(".", 1)[-1]
    listed = f"; known: {_listed(known)}" if known else ""
    if "." in name:
        listed += "; a class of your own must be importable from where agentrl runs"
    return f"there is no {kind} '{name}' (key {key}.class_path){listed}{_hint(short, _names(bases, everywhere=True))}"


def _hint(word: str, known: Sequence[str]) -> str:
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f"; did you mean {by_lower[close[0]]}?" if close else ""


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


def _path(scopes: Sequence[_Scope]) -> str:
    parts = []
    for scope in scopes:
        if scope.key:
            parts.append(scope.key)
        elif scope.owner is not None and not dataclasses.is_dataclass(scope.owner):
            parts.append("init_args")
    return ".".join(parts)


def _import(dotted: str) -> type | None:
    """The class of a dotted path, None if there is none."""
    module, _, name = dotted.rpartition(".")
    try:
        found = getattr(import_module(module), name, None) if module else None
    except ImportError:
        return None
    return found if isinstance(found, type) else None


def _keys(owner: type | None) -> list[str]:
    """Names of the arguments of a class."""
    if owner is None:
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in inspect.signature(owner).parameters.values() if p.kind not in kinds]


def _argument_type(owner: type | None, name: str) -> type | None:
    """The dataclass that an argument of a class expects."""
    if owner is None:
        return None
    hint = typing.get_type_hints(owner.__init__).get(name)  # type: ignore[misc]
    options = [hint, *typing.get_args(hint)]
    return next((option for option in options if isinstance(option, type) and dataclasses.is_dataclass(option)), None)


def _names(bases: Sequence[type], everywhere: bool = False) -> list[str]:
    """Short names of the concrete classes of a kind: ours, or all that are imported."""
    names, todo = set(), list(bases)
    while todo:
        cls = todo.pop()
        todo += cls.__subclasses__()
        own = cls.__module__.startswith("lightning_agentrl")
        if (own or everywhere) and not inspect.isabstract(cls) and not cls.__name__.startswith("_"):
            names.add(cls.__name__)
    return sorted(names)


def _type_name(name: str) -> str:
    if name.startswith("typing.Literal["):
        return f"one of {name.removeprefix('typing.Literal[').rstrip(']')}"
    short = name.rsplit(".", 1)[-1]
    return {"NoneType": "null", "bool": "true or false", "int": "a whole number", "float": "a number"}.get(short, short)
