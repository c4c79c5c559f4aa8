"""Facts read from messages of others, where they are in prose only: config parser, allocators, torch, vLLM.

For each pattern, a test provokes the real message.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from lightning_agentrl.errors.names import (
    closest,
    dataclasses_in,
    hints_of,
    import_class,
    import_fault,
    keys_of,
    module_of,
)
from lightning_agentrl.errors.problem import Problem, one_line
from lightning_agentrl.errors.unknown import (
    ROOTS,
    TOP_KEYS,
    Usage,
    abstract_class,
    missing_arguments,
    missing_keys,
    nameless,
    no_class,
    no_value,
    unknown_argument,
    unknown_class,
    unknown_key,
    unknown_top_key,
)

OPTIONS = (*TOP_KEYS, "config", "print_config", "quiet", "dry_run", "resume_with_changes")
_NARROWER = {"trainer.precision": "'32-true', '64-true', 'bf16-mixed'"}  # Lightning takes more than a run does
_TYPES = {
    "NoneType": "",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "list": "a list",
    "dict": "names with values, as {name: value}",
}


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__


# The parser


def explain(
    message: str, error: BaseException | None = None, options: Sequence[str] = OPTIONS, usage: Usage | None = None
) -> Problem:
    """Return the problem behind a message of the parser, or the message's first line if nothing is recognised.

    The parser nests its errors: each is raised from the one about what is inside it, a union from its first member.

    Args:
        message: of the parser.
        error: the exception behind the message.
        options: what the command takes, without dashes.
        usage: what it takes without a name; None: nothing.
    """
    if usage is not None and (match := re.match(r"the following arguments are required: (.*)", message)):
        return missing_arguments(match[1].split(", "), usage)
    if usage is not None and (match := re.match(r"unrecognized arguments: (\S+)", message)):
        return unknown_argument(match[1], options, usage)
    if match := re.match(r"argument --?(\S+): expected one argument", message):
        return no_value(match[1])
    raised = list(causes(error))
    faults = [fault for fault, _ in itertools.groupby([message.strip(), *(str(cause).strip() for cause in raised)])]
    return _read(faults, options, importing=module_of(raised[-1]) if raised else "")  # an inner parser's appears twice


def _read(
    faults: Sequence[str], options: Sequence[str], key: str = "", owner: type | None = None, importing: str = ""
) -> Problem:
    """Return one problem of several messages, the outermost first.

    Args:
        faults: the messages.
        options: what the command takes.
        key: that the first message is about, empty for all keys.
        owner: the class whose key that is.
        importing: the module that raised the innermost error as it was imported; empty if none did.
    """
    union, fault = "", ""
    for fault in faults:
        if match := re.match(r'Parser key "([^"]+)":', fault):
            key, union = f"{key}.{match[1]}".lstrip("."), ""
        elif match := re.match(r"Problem with given class_path '([^']+)':", fault):
            owner = import_class(match[1])
            if owner is None:
                return unknown_class(match[1], key, _classes(union))
            key += "" if dataclasses.is_dataclass(owner) else ".init_args"
        elif match := re.match(r"Does not validate against any of the Union subtypes\nSubtypes: (.*)", fault):
            union = match[1]
            if problem := _of_several_forms(fault, _classes(union), key, options) or _no_keys(fault, union, key):
                return problem
            if inner := _of_an_item(fault):
                return _read([fault[: match.end()], *inner], options, key)
    if match := re.match(r"Option '([^']+)' is not accepted$", fault):
        if owner is not None and owner is import_class("lightning.Callback"):  # which stands for one without a name
            return nameless(match[1].partition(".")[0], key.removesuffix(".init_args"), owner)
        return unknown_key(match[1], key, owner)
    if match := re.match(r"(?:Subcommand '\w+'|Group '(\w+)') does not accept option '([^']+)'", fault):
        return _unknown_in_group(key, owner, match[1], match[2])
    if match := re.match(r"the following arguments are required: (.*)", fault):
        return missing_keys(re.sub(r"\b(?:fit|validate)\.", "", match[1]).split(", "), key, owner)
    if match := re.match(r"unrecognized arguments: (\S+)", fault):
        return unknown_argument(match[1], options)
    if match := re.match(r"(?:Expected (?:a )?dot import path string:|Import path) (\S+)", fault):
        return unknown_class(match[1], key, _classes(union))
    if match := re.match(r"Expected an instantiatable class, but (\S+) is abstract", fault):
        return abstract_class(match[1], key, _classes(union))
    if re.match(r"Expected an instantiatable class|Not a valid subclass of", fault):
        return no_class(key, _classes(union))
    if match := re.match(r'Parser key "([\w.]+)": Unable to load config "([^"]*)"', fault):
        key = key.removesuffix(f".{match[1]}") if key.endswith(f".{match[1]}.{match[1]}") else key
        return Problem(f"{key} takes keys of its own, got '{match[2]}'", key=key)
    if match := re.match(r"Expected an? (.+?)\. Got value: ?(.*)", fault, re.DOTALL):
        return _wrong_type(key, union or match[1], match[2])
    if importing and (imported := import_fault(importing)):
        return Problem(imported, key=f"{key}.class_path")
    return Problem(f"{key}: {one_line(fault)}" if key else fault.splitlines()[0], key=key)


def _of_several_forms(fault: str, forms: Sequence[type], key: str, options: Sequence[str]) -> Problem | None:
    """Describe what is wrong with a mapping that may have one of several forms, each a dataclass; None of other unions.

    The form that is meant has all keys that another form lacks; of equal ones, the one with a key of a similar name.
    """
    head = re.match(r".*\nSubtypes: \[<.*\nErrors:\n( *- )(.*)", fault)  # of the union itself, not of a list of it
    if head is None or len(forms) < 2 or not all(map(dataclasses.is_dataclass, forms)):
        return None
    if "dot import path string" in head[2]:
        shown = " or ".join(sorted(f"{{{keys_of(form)[0]}: ...}}" for form in forms))
        return Problem(f"{key} takes mappings, as {shown}", key=key)
    problems: dict[type, Problem] = {}
    for form, block in zip(forms, fault.split(f"\n{head[1]}")[1:], strict=False):
        lines = [line.strip("- ") for line in block.splitlines()]
        end = next((i for i, line in enumerate(lines) if line.startswith(("Option", "Expected", "the following"))), 0)
        lacking = re.match(r"Option '([^']+)'", lines[end])
        if not (lacking and any(lacking[1].split(".")[0] in keys_of(other) for other in forms if other is not form)):
            problems[form] = _read(lines[: end + 1], options, key)
    if forms[0] in problems and not any(problem.suggestion for problem in problems.values()):
        return None  # the complaints that follow are about the first form
    return next((problem for problem in problems.values() if problem.suggestion), next(iter(problems.values()), None))


def _no_keys(fault: str, union: str, key: str) -> Problem | None:
    """Describe a plain value where keys belong that are those of one dataclass; None of other values and unions."""
    shown = re.finditer(r"Given value type: <class '([\w.]+)'>\s+Given value: (.*)", fault)
    forms, values = _classes(union), list(shown)
    given = values[-1] if values else None  # of the union itself, after those of the unions in it
    kinds = re.sub(r"<class 'NoneType'>", "", union).count("<class")
    if (
        kinds != 1
        or not forms
        or not dataclasses.is_dataclass(forms[0])
        or given is None
        or given[1] in ("dict", "list", "jsonargparse._util.NestedArg")
    ):
        return None
    first = dataclasses.fields(forms[0])[0]
    meant = f"{{{first.name}: {given[2]}}}" if first.type == given[1] else ""
    known = tuple(field.name for field in dataclasses.fields(forms[0]))
    return Problem(f"{key} takes keys of its own, got '{given[2]}'", key=key, suggestion=meant, known=known)


def _of_an_item(fault: str) -> list[str]:
    """Return the messages about an item, where a union that takes one object or a list of them refuses a list."""
    if not fault.rpartition("Given value type: ")[2].startswith("<class 'list'>"):
        return []
    said = re.search(r"Errors:\n( *)- Not a valid subclass.*?\n\1- (.*?)\n\1- ", fault, re.DOTALL)
    lines = said[2].splitlines() if said else []
    heads = itertools.takewhile(re.compile(r" *(?:Problem with given class_path|Parser key) ").match, lines)
    outer = [line.strip() for line in heads]
    rest = textwrap.dedent("\n".join(lines[len(outer) :]))
    if union := re.search(r"Errors:\n *- (Expected .*)", rest):  # of plain types; what was given stands below them
        return [*outer, rest, f"{union[1]}. Got value: {rest.rpartition('Given value: ')[2]}"]
    return [*outer, rest] if outer or re.match("Expected a dot import path|Import path", rest) else []


def _classes(types: str) -> list[type]:
    """Return the classes that are named among types."""
    return [found for found in map(import_class, re.findall(r"[A-Za-z_][\w.]*\.\w+", types)) if found]


def _unknown_in_group(above: str, owner: type | None, group: str | None, name: str) -> Problem:
    """Describe a key that is in no group of the parser, or not in this one, which may be a dataclass of a class."""
    full = f"{group}.{name}" if group else name
    if owner is None:
        return unknown_top_key(full)
    known = [key.removeprefix(f"{group}.") for key in keys_of(owner) if key.startswith(f"{group}.")]
    forms = dataclasses_in(hints_of(owner).get(group or ""))
    known = known or [field.name for form in forms for field in dataclasses.fields(form)]
    return unknown_key(name, f"{above}.{group}", None, known, owner.__name__)


def _wrong_type(key: str, types: str, given: str) -> Problem:
    """Describe a value of another type than a key takes."""
    found = re.findall(r"typing\.Literal\[([^\]]*)\]|<class '(?:[\w.]+\.)?(\w+)'>|\b(dict)\[", types)
    words = [f"one of {_NARROWER.get(key, values)}" if values else _TYPES.get(a or b, a) for values, a, b in found]
    kinds = " or ".join(dict.fromkeys(filter(None, words))) or types
    meant = closest(given, re.findall(r"'([^']*)'", kinds))
    return Problem(f"{key} must be {kinds}, got '{given}'", key=key, value=given or None, suggestion=meant)


# Memory and disk

_NO_MEMORY = re.compile(r"can't allocate memory|CUDA out of memory|CUDA error: out of memory|_ALLOC_FAILED")
_TRIED = re.compile(r"(?:[Tt]ried|Unable) to allocate (\d+(?:\.\d+)?)\.? (\w+)")
_FREE = re.compile(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")


def out_of_memory(error: BaseException) -> tuple[str, str] | None:
    """Return the device whose memory ran out, and what the error says of the amount; None for other errors."""
    text = str(error)
    of_torch = type(error).__name__ == "OutOfMemoryError"  # by its name, since torch takes seconds to import
    worded_so = isinstance(error, RuntimeError) and _NO_MEMORY.search(text)
    if not (of_torch or worded_so or isinstance(error, MemoryError)):
        return None
    facts = []
    if tried := _TRIED.search(text):
        size = f"{int(tried[1]) / 2**30:.1f} GiB" if tried[2].startswith("byte") else f"{tried[1]} {tried[2]}"
        facts.append(f"tried to allocate {size}")
    if free := _FREE.search(text):
        facts.append(f"{free[2]} of {free[1]} were free")
    return "GPU" if of_torch or "CUDA" in text or "CUBLAS" in text else "CPU", ", ".join(facts)


def disk_full(error: BaseException) -> bool:
    """Return whether there was no space for a file. torch's archive writer says only that it could not finish."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, RuntimeError) and "inline_container.cc" in str(error)


def error_number(error: BaseException) -> int | None:
    """Return the number of the system's error that kept safetensors from writing; None if there was none."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


# Checkpoints


def not_plain(error: BaseException) -> str:
    """Return what makes the object in a checkpoint that torch does not read, a class or a function; empty if none."""
    found = re.search(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)", str(error))
    return found[1] if found else ""


# Other processes

_LOST = re.compile(
    r"gloo.*(?:(?P<closed>Connection (?:closed|reset) by peer|Broken pipe)|[Tt]imed out|timeout|No route|unreachable)"
    r"|Application timeout caused pair closure",
    re.DOTALL,
)
_PEER = re.compile(r"\[([\d.]+|[\da-fA-F:]+:[\da-fA-F:]+)\]:\d+")


@dataclasses.dataclass(frozen=True)
class LostRank:
    """What the network says of a process that this one cannot talk to any more.

    Args:
        closed: it has closed the connection, as a process does that ends; else it is silent.
        address: of its machine, where that is told.
    """

    closed: bool
    address: str = ""


def lost_rank(error: BaseException) -> LostRank | None:
    """Return what is said of another process that is lost, by gloo; None for other errors."""
    text = str(error)
    if not isinstance(error, RuntimeError) or not (found := _LOST.search(text)):
        return None
    address = _PEER.search(text)
    return LostRank(found["closed"] is not None, address[1] if address else "")


def not_met(error: BaseException) -> bool:
    """Return whether the processes of a run did not find each other at its start."""
    return type(error).__name__ in ("DistStoreError", "DistNetworkError")  # by name: torch takes seconds to import


# vLLM


def vllm_refusal(error: BaseException) -> tuple[str, Literal["cache", "memory", ""]]:
    """Return the first sentence of why vLLM does not start, and what there is too little of, as far as it says so."""
    text = one_line(str(error)) or type(error).__name__
    text = re.sub(r"^\d+ validation errors? for \w+ (Value error, )?", "", text)  # what a validator puts before it
    why = re.split(r" \[type=|\. ", text)[0].rstrip(".")
    if re.search(r"is larger than the available KV|No available memory for the cache", why):
        return why, "cache"
    return why, "memory" if re.search(r"Available memory on node|Free memory on device|out of memory", why) else ""


# Lightning

_NO_METRIC = (
    re.compile(r"conditioned on metric `([^`]*)` which is not available.*following: (.*)", re.DOTALL),
    re.compile(r"monitor='([^']*)'\)`? could not find the monitored key in the returned metrics: \[(.*?)\]", re.DOTALL),
)


def unknown_metric(error: BaseException) -> Problem | None:
    """Describe a metric that a callback watches and nothing logs."""
    match = next(filter(None, (pattern.search(str(error)) for pattern in _NO_METRIC)), None)
    if match is None:
        return None
    name, known = match[1], tuple(re.findall(r"[`']([^`']+)[`']", match[2]))
    key = "trainer.callbacks.init_args.monitor"
    return Problem(f"no metric '{name}' is logged", key=key, value=name, suggestion=closest(name, known), known=known)


def trainer_problem(error: BaseException, settings: Mapping[str, Any]) -> Problem:
    """Describe what Lightning's Trainer refuses, with its key.

    Args:
        error: its text shows an argument and the value, names an argument, or shows a value.
        settings: the Trainer's arguments, as the config has them.
    """
    text, known = f"trainer: {in_tried_versions(one_line(str(error)))}", keys_of(import_class(ROOTS["trainer"]))
    given: list[tuple[str, str | None]] = re.findall(r"(\w+)='?([\w.-]*)", text)
    given = [(name, value) for name, value in given if name in known]
    if not given:  # a word such as `model` may be meant otherwise, so a name is in backticks or of several words
        words = [quoted or word for quoted, word in re.findall(r"`(\w+)`|(\w+_\w+)", text)]
        texts = [(key, value) for key, value in settings.items() if value and isinstance(value, str)]
        shown = [key for key, value in texts if repr(value) in text]
        rare = [(key, value) for key, value in texts if key in ("accelerator", "strategy") and value != "auto"]
        shown += [key for key, value in rare if re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", text)]
        given = [(name, None) for name in (*words, *shown) if name in known]
    return Problem(text, key=f"trainer.{given[0][0]}", value=given[0][1]) if given else Problem(text)


TRIED = ("deepspeed", "wandb")  # packages that Lightning needs, and of which an extra of that name has tried versions


def how_to_install(requirement: str) -> str:
    """Return the command that installs a package; by the extra if there is one, since it has the versions tried."""
    name = re.split(r"[^\w.-]", requirement)[0]
    return f'pip install "lightning-agentrl[{name}]"' if name in TRIED else f"pip install '{requirement}'"


def in_tried_versions(text: str) -> str:
    """Replace Lightning's commands that install the newest version of a package."""
    return re.sub(r"pip install -U '?([\w.-]+)[^'`]*'?", lambda found: how_to_install(found[1]), text)


def missing_package(error: ImportError, user: str, key: str) -> Problem:
    """Describe a class that needs a package which is not installed."""
    required = re.search(r"Requirement '([^']+)' not met", str(error))
    if required is None:
        return Problem(f"{user} needs a package: {in_tried_versions(one_line(str(error)))}", key=key)
    what = f"{user} needs the package {required[1]}, which is not installed"
    return Problem(what, key=key, fix=how_to_install(required[1]))


def logger_refusal(error: BaseException) -> Problem | None:
    """Describe why Weights & Biases does not start, as without a login; None for other errors."""
    if not any(kind.__module__.startswith("wandb.") for kind in type(error).__mro__):
        return None
    fix = "run wandb login, or set the environment variable WANDB_MODE to offline"
    return Problem(
        f"Weights & Biases does not start: {one_line(str(error)).rstrip('.')}", key="trainer.logger", fix=fix
    )
