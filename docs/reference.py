"""Hooks of mkdocs: `configuration.md` gets its tables from the code, and pages include files of the repository.

What a config may name is found from the code: a key of a class whose type is one of our classes may hold that class or
a subclass of it. The walk starts at the three keys in :func:`roots`. Markers in a page are HTML comments:

* ``<!-- keys: data.init_args.memory -->`` becomes the sections of all classes that may stand at that key or below it,
  except for keys that have a marker of their own;
* ``<!-- include: CHANGELOG.md -->`` becomes the file without its title, and a Python file becomes a block of code.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from jsonargparse._parameter_resolvers import get_signature_parameters  # what decides which keys are accepted
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

import lightning_agentrl.callbacks
import lightning_agentrl.commands.fit  # imports every class that a config can name by its short name
from lightning_agentrl.agents import Agent
from lightning_agentrl.rollout import RolloutDataModule

REPOSITORY = Path(__file__).parents[1]
KEYS = re.compile(r"^<!-- keys: (\S+) -->$", re.MULTILINE)
INCLUDE = re.compile(r"^<!-- include: (\S+) -->$", re.MULTILINE)
BLANK = "\n\n"
EXAMPLE_WIDTH = 76
# For required arguments in examples.
SAMPLES: dict[Any, Any] = {int: 4, float: 0.5, bool: True, str: "...", list[str]: ["python", "agent.py"]}


@dataclasses.dataclass(frozen=True)
class Argument:
    """One key of a class."""

    name: str
    annotation: Any
    default: Any  # inspect.Parameter.empty where the key is required
    meaning: str

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty


@dataclasses.dataclass(frozen=True)
class Part:
    """A key and the classes that it may hold."""

    key: str  # "data.init_args.memory"
    base: type
    classes: tuple[type, ...]
    owner: type | None = None  # the class whose key it is
    many: bool = False  # whether the key holds a list

    @property
    def name(self) -> str:
        return self.key.rsplit(".", 1)[-1]

    @property
    def plain(self) -> bool:
        """Whether the keys are given without class_path and init_args."""
        return dataclasses.is_dataclass(self.base)

    @property
    def anchor(self) -> str:
        return self.key.replace(".init_args.", "-").replace(".", "-")


# What is there


def roots() -> list[Part]:
    """Where a config names classes of this package."""
    callbacks = [cls for cls in concrete(L.Callback) if cls.__name__ in lightning_agentrl.callbacks.__all__]
    return [
        Part("model", Agent, concrete(Agent)),
        Part("data", RolloutDataModule, concrete(RolloutDataModule)),
        Part("trainer.callbacks", L.Callback, tuple(callbacks), many=True),
    ]


@cache
def concrete(base: type) -> tuple[type, ...]:
    """Return the public classes of this package that can be made where ``base`` is asked for, itself included."""
    found, todo = [], [base]
    while todo:
        cls = todo.pop()
        todo += cls.__subclasses__()
        own = cls.__module__.startswith("lightning_agentrl.") and not cls.__name__.startswith("_")
        own &= cls.__module__.split(".")[1:2] not in (["commands"], ["tools"])  # what a command makes itself
        if own and not inspect.isabstract(cls) and cls not in found:
            found.append(cls)
    return tuple(sorted(found, key=lambda cls: (cls.__module__, inspect.getsourcelines(cls)[1])))


@cache
def parts() -> tuple[Part, ...]:
    """Every key that holds a class, in the order of a config."""
    found: dict[str, Part] = {}

    def walk(part: Part) -> None:
        if part.key in found:
            return
        found[part.key] = part
        for cls in part.classes:
            for argument in arguments(cls):
                if bases := own_types(argument.annotation):
                    key = f"{part.key}.{argument.name}" if part.plain else f"{part.key}.init_args.{argument.name}"
                    classes = tuple(found for base in bases for found in concrete(base))
                    walk(Part(key, bases[0], classes, cls, holds_list(argument.annotation)))

    for root in roots():
        walk(root)
    return tuple(found.values())


def own_types(annotation: Any) -> list[type]:
    """Classes of this package in a type hint, as a value of the key could be one of them."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        own = annotation.__module__.startswith("lightning_agentrl.") and not issubclass(annotation, Enum)
        return [annotation] if own else []
    return [cls for part in typing.get_args(annotation) for cls in own_types(part)]


def holds_list(annotation: Any) -> bool:
    """Whether a type hint, or a part of a union, is a list."""
    return typing.get_origin(annotation) is list or any(holds_list(part) for part in typing.get_args(annotation))


@cache
def arguments(cls: type) -> tuple[Argument, ...]:
    """Return the keys of a class, with what its docstring or that of a base says about them."""
    return tuple(
        Argument(p.name, p.annotation, _default(cls, p.name, p.default), _meaning(cls, p.name, p.doc))
        for p in get_signature_parameters(cls, logger=False)
        if p.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    )


def _default(cls: type, name: str, default: Any) -> Any:
    """Return the value itself where a dataclass makes it anew for each object."""
    fields = {field.name: field for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    factory = fields[name].default_factory if name in fields else dataclasses.MISSING
    return default if factory is dataclasses.MISSING else factory()


def _meaning(cls: type, name: str, doc: str | None) -> str:
    """Return the text of a docstring as Markdown; ``see :class:`Base` `` is followed."""
    text = " ".join((doc or "").split())
    if match := re.fullmatch(r"see :class:`(\w+)`\.?", text):
        bases = [base for base in cls.__mro__ if base.__name__ == match[1]]
        meanings = {argument.name: argument.meaning for base in bases for argument in arguments(base)}
        return meanings.get(name, text)
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    return re.sub(r"\bNone\b", "null", text).rstrip(".")


# How it is written


def sections(key: str, marked: Sequence[str]) -> str:
    """Markdown of the classes at a key and below it, leaving out keys below that are marked themselves."""
    chosen = [part for part in parts() if _below(part.key, key)]
    others = [other for other in marked if other != key and _below(other, key)]
    chosen = [part for part in chosen if not any(_below(part.key, other) for other in others)]
    if not chosen:
        raise ValueError(f"the marker '{key}' of the configuration page names no key of a config")
    return BLANK.join(_section(part) for part in chosen)


def _below(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.")


def _section(part: Part) -> str:
    root = part in roots()
    lines = [] if root else [f"### `{part.name}` {{#{part.anchor}}}", _where(part)]
    for cls in part.classes:
        if part.plain:
            lines.append(f"`{cls.__name__}`. {_about(cls)}")
        else:
            lines += [f"{'###' if root else '####'} {cls.__name__} {{#{cls.__name__.lower()}}}", _about(cls)]
        lines.append(_table(part, cls))
        if part.key not in ("model", "data"):
            lines.append(f"```yaml\n{_example(part, cls)}```")
    return BLANK.join(lines)


def _where(part: Part) -> str:
    if part.plain:
        each = " of each item" if part.many else ""
        return f"At `{part.key}`, the keys{each} directly below it."
    base = "" if part.classes == (part.base,) else f" {_about(part.base).split(BLANK)[0]}"
    return f"At `{part.key}`, a `class_path` with `init_args`.{base}"


def _about(cls: type) -> str:
    """Return the first paragraphs of a docstring, up to its first section, as Markdown."""
    text = inspect.cleandoc(cls.__doc__ or "")
    text = re.split(r"\n\s*(?:Args|Raises|Attributes|Returns):\n", f"\n{text}")[0].strip()
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`").replace(" -> ", " → ")


def _table(part: Part, cls: type) -> str:
    if not arguments(cls):
        return "No keys."
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for argument in arguments(cls):
        default = "required" if argument.required else f"`{_yaml(argument.default)}`"
        meaning = argument.meaning.replace("|", "\\|")
        rows.append(f"| `{argument.name}` | {_kind(argument.annotation, part, argument)} | {default} | {meaning} |")
    return "\n".join(rows)


def _kind(annotation: Any, part: Part, argument: Argument) -> str:
    """Describe the type of a key, our classes linked to their section; null only where the default does not say it."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{_yaml(value)}`" for value in inner)
    if origin in (list, tuple, set) or (isinstance(origin, type) and issubclass(origin, Sequence)):
        of = [_kind(x, part, argument) for x in inner if x is not Ellipsis]
        return f"list of {' or '.join(of)}"
    if isinstance(origin, type) and issubclass(origin, typing.Mapping):
        return "mapping"
    if inner:  # a union
        shown = [x for x in inner if x is not type(None) or argument.default is not None]
        return " or ".join(dict.fromkeys(_kind(x, part, argument) for x in shown))
    if annotation is type(None):
        return "`null`"
    if annotation is dict:
        return "mapping"
    name = getattr(annotation, "__name__", str(annotation))
    if own_types(annotation):
        way = f"{part.key}.{argument.name}" if part.plain else f"{part.key}.init_args.{argument.name}"
        return f"[{name}](#{Part(way, annotation, ()).anchor})"
    return name


def _yaml(value: Any) -> str:
    if dataclasses.is_dataclass(value):  # what differs from its own defaults
        value = {
            f.name: x
            for f in dataclasses.fields(value)
            if (x := getattr(value, f.name)) != getattr(type(value)(), f.name)
        }
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


def _example(part: Part, cls: type) -> str:
    """How the class is written in a config: as in a shipped one, else with its defaults."""
    value = next(_shipped(part, cls), None) or _made(part, cls)
    if part.plain and not part.many and cls is not part.classes[0]:  # else it would be taken for the first one
        value = {"class_path": cls.__name__, "init_args": value}
    *way, last = part.key.split(".")
    lines = [f"{'  ' * i}{name}:" for i, name in enumerate(way)]
    above = next((other for other in parts() if part.key == f"{other.key}.init_args.{last}"), None)
    shared = above and all(last in {argument.name for argument in arguments(other)} for other in above.classes)
    if part.owner and (part.key.count("init_args") > 1 or (above and not shared)):  # the class in between
        lines.insert(-1, f"{'  ' * (len(way) - 1)}class_path: {part.owner.__name__}")
    indent, many = "  " * len(way), part.many
    holder = next((other for other in parts() if other.key == ".".join(way)), None)
    if holder and not holder.many and part.owner in holder.classes[1:]:
        lines += [f"{indent}class_path: {part.owner.__name__}", f"{indent}init_args:"]
        indent += "  "
    if dataclasses.is_dataclass(part.owner):  # what has to stand beside it
        beside = [argument for argument in arguments(part.owner) if argument.required and argument.name != last]
        inside = [f"{indent}{argument.name}: {_yaml(SAMPLES.get(argument.annotation, '...'))}" for argument in beside]
        if any(other.many and other.key == ".".join(way) for other in parts()):  # of an item of a list
            inside[0], indent = f"{indent}- {inside[0].lstrip()}", f"{indent}  "
        lines += inside
    short = f"{indent}  - {_yaml(value)}" if many else f"{indent}{last}: {_yaml(value)}"
    if len(short) <= EXAMPLE_WIDTH:
        return "\n".join([*lines, f"{indent}{last}:", short] if many else [*lines, short]) + "\n"
    inside = [f"{name}: {_yaml(x)}" for name, x in value.items()]
    first = f"{indent}  - " if many else f"{indent}  "
    rest = [f"{first}{inside[0]}", *(f"{indent}  {'  ' * many}{line}" for line in inside[1:])]
    return "\n".join([*lines, f"{indent}{last}:", *rest]) + "\n"


def _made(part: Part, cls: type) -> dict[str, Any]:
    shown = {
        argument.name: SAMPLES.get(argument.annotation, "...") if argument.required else argument.default
        for argument in arguments(cls)
        if argument.required or isinstance(argument.default, int | float | str)
    }
    if part.plain:
        return shown
    return {"class_path": cls.__name__} | ({"init_args": shown} if shown else {})


def _shipped(part: Part, cls: type) -> Iterator[dict[str, Any]]:
    """Yield what the shipped configs have at a key, where it is of this class."""
    for config in _configs():
        value: Any = config
        for name in part.key.split("."):
            value = value.get(name, {}) if isinstance(value, dict) else {}
        for item in value if isinstance(value, list) else [value]:
            names = {argument.name for argument in arguments(cls)}
            if isinstance(item, dict) and item and (item.get("class_path") == cls.__name__ or names.issuperset(item)):
                yield item


@cache
def _configs() -> list[Any]:
    """Return the shipped configs, first the quickstart."""
    paths = sorted((REPOSITORY / "configs").glob("*.yaml"), key=lambda path: path.stem != "quickstart")
    return [yaml.safe_load(path.read_text()) for path in paths]


# Hooks


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of a folder where the navigation names the folder."""
    for entry in config.nav or []:
        for title, target in entry.items():
            if isinstance(target, str) and target.endswith("/"):
                pages = sorted(Path(config.docs_dir, target).glob("*.md"))
                entry[title] = [str(page.relative_to(config.docs_dir)) for page in pages]
    return config


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in the markers of a page."""
    return filled(markdown)


def filled(markdown: str) -> str:
    """Return a page with its markers replaced by what they stand for."""
    marked = KEYS.findall(markdown)
    markdown = KEYS.sub(lambda match: sections(match[1], marked), markdown)
    return INCLUDE.sub(lambda match: _included(match[1]), markdown)


def _included(name: str) -> str:
    text = (REPOSITORY / name).read_text()
    if name.endswith(".py"):
        return f"```python\n{text}```"
    return text.split("\n", 1)[1].strip().replace("](docs/", "](")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show roles of docstrings as the names they hold, and pictures of our own as part of the page."""
    html = re.sub(r":(?:class|meth|func|attr|mod):<code>~?([^<]+)</code>", r"<code>\1</code>", html)
    return re.sub(r'<img alt="([^"]*)" src="(\w+\.svg)"[^>]*>', lambda match: _inlined(match[2], config), html)


def _inlined(name: str, config: MkDocsConfig) -> str:
    """Return the text of a picture, which then follows the colours of the page."""
    return f'<div class="scrolled">{Path(config.docs_dir, name).read_text()}</div>'
