"""Errors in a config, with key, file and line.

The parser's errors quote the whole config. So this module walks a config that the parser has refused, class by class
along the types of arguments, to the first key or value that the parser does not accept.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import traceback
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Union

from lightning_agentrl.errors.problem import ConfigError, Problem, closest, one_line

OWN_PACKAGES = ("lightning_agentrl", "agentrl_envs")
ROOTS = {  # the classes at the top of a config
    "trainer": "lightning.pytorch.Trainer",
    "model": "lightning_agentrl.agents.Agent",
    "data": "lightning_agentrl.rollout.RolloutDataModule",
}
TOP_KEYS = ("seed_everything", *ROOTS, "ckpt_path")
OPTIONS = (*TOP_KEYS, "config", "print_config", "quiet", "dry_run", "resume_with_changes", "help")
_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "NoneType": "null"}
_OF_COMMANDS = ("lightning_agentrl.commands.", "lightning_agentrl.tools.", "lightning_agentrl.callbacks.run_folder")
_PLAIN = (bool, int, float, str, bytes, list, tuple, dict, set, Path, types.NoneType)


# Functions for the classes of a config


def import_fault(module: str) -> str:
    """Return why a module cannot be imported, or an empty string."""
    try:
        if module:
            import_module(module)
    except Exception as error:  # noqa: BLE001 - a module may raise anything
        absent = isinstance(error, ModuleNotFoundError) and str(error.name)
        if absent and f"{module}.".startswith(f"{absent}."):
            return f"no module '{absent}'"
        # The first frame is the frame of this function; a SyntaxError has no further frame, but contains the line.
        frames = [one for one in traceback.extract_tb(error.__traceback__)[1:] if "importlib" not in one.filename]
        place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
        if absent:  # the module imports another module that is missing
            return f"importing {module} needs the module '{absent}', which is not installed{place}"
        return f"importing {module} raised {type(error).__name__}: {error}{place}"
    return ""


def class_names(bases: Sequence[type]) -> tuple[str, ...]:
    """Return the short names of the package's classes that are accepted at a key of these types."""
    found = [one for base in bases for one in _concrete(base) if one.__module__.split(".")[0] in OWN_PACKAGES]
    return tuple(sorted({one.__name__ for one in found if not one.__module__.startswith(_OF_COMMANDS)}))


def _concrete(base: type) -> Iterator[type]:
    """Yield a class and its subclasses, except abstract and private classes."""
    if not inspect.isabstract(base) and not base.__name__.startswith("_"):
        yield base
    children: list[type] = base.__subclasses__()
    for child in children:
        yield from _concrete(child)


def _class_of(name: str, bases: Sequence[type]) -> type | None:
    """Return the class with a short name or dotted path, or None if there is no such class."""
    module, _, short = name.rpartition(".")
    if not module:
        return next((one for base in bases for one in _concrete(base) if one.__name__ == name), None)
    with suppress(Exception):  # a module may raise anything; `import_fault` reports the error
        found = getattr(import_module(module), short, None)
        return found if isinstance(found, type) else None
    return None


def parameters_of(owner: type) -> dict[str, tuple[Any, Any]]:
    """Return type and default of a class's arguments by name, including arguments passed to its base class."""
    found: dict[str, tuple[Any, Any]] = {}
    for base in owner.__mro__:
        if (make := vars(base).get("__init__")) is None:
            continue
        hints: dict[str, Any] = {}
        with suppress(NameError, TypeError):  # hints that cannot be resolved
            hints = typing.get_type_hints(make)
        given = list(inspect.signature(make).parameters.values())[1:]
        for one in given:
            if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
                found.setdefault(one.name, (hints.get(one.name, Any), one.default))
        if not any(one.kind is one.VAR_KEYWORD for one in given):
            break
    return found


def check_arguments(owner: type, given: Mapping[str, Any]) -> None:
    """Check for faults that the parser accepts: a key without a value, and a callback without class_path.

    Args:
        owner: class of the object.
        given: arguments in the config.

    Raises:
        ValueError: the first fault.
    """
    if f"{owner.__module__}.{owner.__name__}" == "lightning.pytorch.callbacks.callback.Callback":
        raise ConfigError("an item of trainer.callbacks needs a class_path (and init_args for its arguments)")
    for name, (hint, default) in parameters_of(owner).items():
        needed = not {types.NoneType, Any, object}.intersection(_members(hint)) and default is not None
        if name in given and given[name] is None and needed:
            left = "" if default is inspect.Parameter.empty else f", or leave the key out for its default {default!r}"
            raise ValueError(f"{name} has no value; write one{left}")


def _keys_of(owner: type) -> list[str]:
    """Return the arguments that the parser accepts for a class."""
    from jsonargparse import ArgumentParser  # slow to import

    added: list[str] = ArgumentParser(exit_on_error=False).add_class_arguments(owner, fail_untyped=False)
    return list(dict.fromkeys(key.split(".")[0] for key in added))


def _inner_keys(owner: type) -> dict[str, str]:
    """Return the fields of a class's dataclass arguments with their full keys, such as ``lr_actor: optim.lr_actor``."""
    return {
        field.name: f"{name}.{field.name}"
        for name, (hint, _) in parameters_of(owner).items()
        for kind in _members(hint)
        if dataclasses.is_dataclass(kind)
        for field in dataclasses.fields(kind)
    }


def _members(hint: Any) -> list[Any]:
    """Return the types of a union, or the type itself."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return [one for part in typing.get_args(hint) for one in _members(part)]
    return [hint]


# Functions that walk the config


def config_problem(tree: Mapping[str, Any], options: Sequence[str] = OPTIONS) -> Problem | None:
    """Return the first fault of a config that the parser has refused, or None if the walk finds no fault.

    Args:
        tree: config of the merged files and command-line options.
        options: accepted top-level keys.
    """
    for key in tree:
        if key not in options:
            return unknown_top_key(key, options)
    lacking = [key for key in ("data", "model") if key not in tree]
    if lacking:
        keys = f"the keys {' and '.join(lacking)} are" if len(lacking) > 1 else f"the key {lacking[0]} is"
        return Problem(f"{keys} missing", fix="pass --config with a config file that has what is missing")
    found = _fault_of_arguments(_root("trainer"), tree.get("trainer", {}), "trainer")
    return found or _fault(tree["model"], _root("model"), "model") or _fault(tree["data"], _root("data"), "data")


def unknown_top_key(key: str, options: Sequence[str]) -> Problem:
    """Describe an unknown top-level key of a config, or an unknown option."""
    suggestion = closest(key, [one for one in options if one != "help"])
    for root in ROOTS if not suggestion else ():
        owner, above = _root(root), root if root == "trainer" else f"{root}.init_args"
        inner = dict.fromkeys(parameters_of(owner), key) | _inner_keys(owner)
        suggestion = suggestion or (f"{above}.{inner[key]}" if key in inner else "")
    return Problem(f"there is no key '{key}' at the top of a config", key=key, suggestion=suggestion, known=TOP_KEYS)


def _root(key: str) -> type:
    """Return the class of a top-level key of a config."""
    module, _, name = ROOTS[key].rpartition(".")
    owner: type = getattr(import_module(module), name)
    return owner


def _fault(value: Any, hint: Any, key: str) -> Problem | None:
    """Return the first fault of a value at a key with this type hint."""
    members = _members(hint)
    if value is None or Any in members or object in members:
        return None
    classes = [one for one in members if inspect.isclass(one) and not issubclass(one, _PLAIN)]
    lists = [one for one in members if typing.get_origin(one) in (list, Sequence, Iterable)]
    if isinstance(value, list) and lists:
        items = (_fault(item, typing.get_args(lists[0])[0], f"{key}[{place}]") for place, item in enumerate(value))
        return next(filter(None, items), None)
    if isinstance(value, Mapping) and classes and not any(typing.get_origin(one) in (dict, Mapping) for one in members):
        return _fault_of_object(value, classes, key)
    if _accepted(value, hint):
        return None
    forms = [one for one in classes if dataclasses.is_dataclass(one)]
    if classes and isinstance(value, str) and not forms:
        return _fault_of_object({"class_path": value}, classes, key)
    choices = [str(one) for kind in members if typing.get_origin(kind) is Literal for one in typing.get_args(kind)]
    shown = [f"{{{next(iter(parameters_of(one)))}: ...}}" for one in forms]
    words = [f"one of {', '.join(dict.fromkeys(choices))}"] * bool(choices)
    words += [f"keys of its own, as {' or '.join(shown)}"] * bool(shown)
    others = [one for one in members if one not in forms and typing.get_origin(one) is not Literal]
    names = [getattr(typing.get_origin(one) or one, "__name__", str(one)) for one in others]
    words += [_WORDS.get(name, f"a {name}") for name in names]
    what = f"{key} must be {' or '.join(words)}, got {value!r}"
    known = class_names([one for one in classes if one not in forms])
    return Problem(what, key=key, suggestion=closest(str(value), choices), known=known)


def _accepted(value: Any, hint: Any) -> bool:
    """Return whether the parser accepts a value for a type."""
    from jsonargparse import ArgumentError, ArgumentParser  # slow to import

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    try:
        parser.parse_object({"value": value})
    except (ArgumentError, ValueError):
        return False
    return True


def _fault_of_object(value: Mapping[str, Any], classes: Sequence[type], key: str) -> Problem | None:
    """Return the first fault of a mapping at a key that accepts objects of these classes."""
    forms = [one for one in classes if dataclasses.is_dataclass(one)]
    if forms and len(forms) == len(classes):  # choose the dataclass whose fields are closest to the given keys
        best = max(forms, key=lambda one: sum(bool(closest(name, _keys_of(one))) for name in value))
        return _fault_of_arguments(best, value, key)
    names = class_names(classes)
    if "class_path" not in value:
        meant = closest(next(iter(value), ""), names)
        what = f"{key} needs a class_path (and init_args for its arguments)"
        return Problem(what, key, suggestion=f"{{class_path: {meant}, init_args: ...}}" if meant else "", known=names)
    name = str(value["class_path"])
    owner = _class_of(name, classes)
    if owner is None or not issubclass(owner, tuple(classes)):
        return _unknown_class(name, key, classes)
    if lacks := sorted(getattr(owner, "__abstractmethods__", ())):
        what = f"{name} is abstract: it does not define {' and '.join(lacks)}"
        return Problem(what, key=f"{key}.class_path", known=names)
    return _fault_of_arguments(owner, value.get("init_args") or {}, f"{key}.init_args")


def _fault_of_arguments(owner: type, given: Mapping[str, Any], key: str) -> Problem | None:
    """Return the first fault of a class's arguments."""
    names, parameters, inner = _keys_of(owner), parameters_of(owner), _inner_keys(owner)
    for name, value in given.items():
        if name not in names:
            meant = closest(name, names) or inner.get(closest(name, list(inner)), "")
            what, fix = f"there is no key '{name}' in {owner.__name__}", "rename or remove it"
            return Problem(what, key=f"{key}.{name}", suggestion=meant, fix=fix, known=tuple(names))
        if name in parameters and (found := _fault(value, parameters[name][0], f"{key}.{name}")):
            return found
    for name, (_, default) in parameters.items():
        if default is inspect.Parameter.empty and name not in given:
            return Problem(f"the key {key}.{name} of {owner.__name__} is missing", key=f"{key}.{name}", missing=True)
    return None


def _unknown_class(name: str, key: str, bases: Sequence[type]) -> Problem:
    """Describe a class that does not exist, has the wrong base class, or is in a module that cannot be imported."""
    module, _, short = name.rpartition(".")
    fault = import_fault(module)
    every = [one.__name__ for base in bases for one in _concrete(base)]
    return Problem(
        f"there is no {bases[0].__name__} '{name}'" + (f": {fault}" if fault else ""),
        key=f"{key}.class_path",
        suggestion=closest(short, every, cutoff=0.75 if module else 0.6),
        fix="your own class must be importable in the folder from which agentrl runs" if module else "",
        known=class_names(bases),
    )


# Functions for given keys and their places


def options_of(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the options of a command line as pairs of name, without dashes, and value."""
    for argument, following in pairwise((*arguments, "")):
        if argument.startswith("--") or argument == "-c":
            name, equals, value = argument.lstrip("-").partition("=")
            yield name, value if equals else ("" if following.startswith("--") else following)


class Given:
    """Config files and options of a command line, merged, with the place of each key.

    Args:
        arguments: arguments of the command.

    Raises:
        ConfigError: a file cannot be read, is not YAML, or gives a key twice.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.tree: dict[str, Any] = {}
        self._places: dict[str, str] = {}
        for name, value in options_of(arguments):
            if name in ("c", "config"):
                self._read(Path(value))
            elif name.split(".")[0] in TOP_KEYS or "." not in name:
                self._set(name, value)

    def places(self, problem: Problem) -> list[str]:
        """Return where the keys of a problem were given; for a missing key, return the place of the section above."""
        found = {}
        for key in problem.keys:
            whole = _bare(key)
            while whole and whole not in self._places and problem.missing:
                whole = re.sub(r"(\.|^)[^.]*$", "", whole)
            if whole in self._places:
                found[key] = self._places[whole]
        return list(found.values()) if len(found) < 2 else [f"{key}: {place}" for key, place in found.items()]

    def _read(self, file: Path) -> None:
        import yaml  # import here, since environment processes do not need yaml

        try:
            text = file.read_text()
            root = yaml.compose(text, Loader=yaml.SafeLoader)
            values = yaml.safe_load(text)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the config file '{file}' cannot be read: {error}") from None
        except yaml.YAMLError as error:
            mark, why = getattr(error, "problem_mark", None), getattr(error, "problem", None) or one_line(str(error))
            place = f"{file}, line {mark.line + 1}" if mark else str(file)
            raise ConfigError(Problem(f"the config file is not valid YAML: {why}", place=place)) from None
        if not isinstance(values, dict):
            raise ConfigError(f"the config file '{file}' has no keys; it needs {', '.join(ROOTS)}")
        self._places |= dict(_lines(root, "", str(file)))
        self.tree = _merged(self.tree, values)

    def _set(self, name: str, value: str) -> None:
        """Set the key of a command-line option, in which `init_args` may be left out."""
        import yaml

        self._places[_bare(name)] = "command line"
        try:
            item = yaml.safe_load(value)
        except yaml.YAMLError:
            item = value
        node, parts = self.tree, name.rstrip("+").split(".")
        for part in parts[:-1]:
            if "class_path" in node and part not in ("class_path", "init_args"):
                node = node.setdefault("init_args", {})
            if not isinstance(node.get(part), dict):
                node[part] = {"class_path": node[part]} if isinstance(node.get(part), str) else {}
            node = node[part]
        if "class_path" in node and parts[-1] not in ("class_path", "init_args"):
            node = node.setdefault("init_args", {})
        node[parts[-1]] = item


def _bare(key: str) -> str:
    return key.replace(".init_args", "").rstrip("+")


def _lines(node: Any, key: str, file: str) -> Iterator[tuple[str, str]]:
    """Yield each key below a node of a YAML file with its file and line."""
    if node.id == "sequence":
        for place, item in enumerate(node.value):
            yield _bare(f"{key}[{place}]"), f"{file}, line {item.start_mark.line + 1}"
            yield from _lines(item, f"{key}[{place}]", file)
    elif node.id == "mapping":
        seen = set()
        for name, value in node.value:
            full = f"{key}.{name.value}".lstrip(".")
            line = f"{file}, line {name.start_mark.line + 1}"
            if full in seen and name.value != "<<":
                raise ConfigError(Problem(f"the key {full} is given twice; remove one of them", key=full, place=line))
            seen.add(full)
            yield _bare(full), line
            yield from _lines(value, full, file)


def _merged(below: Any, above: Any) -> Any:
    """Merge two configs; values of ``above`` take precedence. A new class_path drops the old class's arguments."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    if "class_path" in above and above["class_path"] != below.get("class_path"):
        return above
    return below | {key: _merged(below.get(key), value) for key, value in above.items()}


# Functions for errors of constructors


def constructor_problem(owner: type, error: Exception, settings: Mapping[str, Any]) -> Problem:
    """Describe an error raised by the constructor of a class, with the key of its arguments.

    Args:
        owner: class whose constructor failed.
        error: error that the constructor raised.
        settings: parsed config, in which the class is looked up.
    """
    if isinstance(error, ConfigError):
        return error.problem
    keys = list(_keys_with(owner, settings, ""))
    text = one_line(str(error)) or f"{type(error).__name__} without a message"
    if isinstance(error, ImportError):
        text = f"{owner.__name__} needs a package: {text}"
    if owner.__module__.split(".")[0] not in (*OWN_PACKAGES, "lightning"):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text += f" (raised in {Path(frame.filename).name}, line {frame.lineno})"
    if len(keys) != 1 or "init_args" in text:
        return Problem(text)
    named = [name for name in parameters_of(owner) if re.search(rf"\b{name}\b", text)]
    return Problem(text, key=keys[0] + (f".{named[0]}" if len(named) == 1 else ""))


def _keys_with(owner: type, node: Any, key: str) -> Iterator[str]:
    """Yield the keys that hold the arguments of a class: its init_args, or the key itself for a dataclass."""
    if isinstance(node, list):
        for place, item in enumerate(node):
            yield from _keys_with(owner, item, f"{key}[{place}]")
    elif isinstance(node, Mapping):
        if str(node.get("class_path", "")).rsplit(".", 1)[-1] == owner.__name__:
            yield f"{key}.init_args"
        elif dataclasses.is_dataclass(owner) and set(node) == {field.name for field in dataclasses.fields(owner)}:
            yield key
        for part, value in node.items():
            yield from _keys_with(owner, value, f"{key}.{part}" if key else part)
