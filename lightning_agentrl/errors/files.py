"""Config files, looked at before the parser: it does not say which file is wrong, and drops keys given twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from lightning_agentrl.errors.problem import ConfigError, Place, Problem, one_line
from lightning_agentrl.errors.words import closest, import_class, keys_of

TOP_KEYS = ("seed_everything", "trainer", "model", "data", "ckpt_path")
_FURTHER_KEYS = (
    *("optimizer", "lr_scheduler", "weights_only", "fit", "validate", "subcommand", "verbose"),
    *("quiet", "dry_run"),
)
_YAML_FIXES = {
    "'\\t'": "indent with blanks, not with tabs",
    "mapping values are not allowed here": "indent all keys of a level alike, and quote a value that holds ': '",
    "found character '@'": "quote the value",
    "found character '`'": "quote the value",
}
_CLASS_KEYS = {  # a key at the top that is one of these was meant to be below
    "trainer": "lightning.pytorch.Trainer",
    "model.init_args": "lightning_agentrl.agents.PPOAgent",
    "data.init_args": "lightning_agentrl.rollout.RolloutDataModule",
}


def check_yaml(path: Path) -> None:
    """Refuse a config file that cannot be read, is no YAML, gives a key twice, or has unknown keys at the top.

    Raises:
        ConfigError: with the file and the place in it.
    """
    root = tree_of(path)
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"the config file '{path}' holds no keys; it needs {', '.join(TOP_KEYS[1:4])}")
    for key, first, second in _given_twice(root, "", set()):
        raise ConfigError(
            Problem(
                f"the key {key} is given twice",
                key=key,
                place=Place(f"{path}, lines {first} and {second}", key),
                fix="only the last would count; remove one of them",
            )
        )
    for key, _ in root.value:
        if str(key.value) not in (*TOP_KEYS, *_FURTHER_KEYS):
            raise ConfigError(unknown_top_key(str(key.value), Place(f"{path}, line {key.start_mark.line + 1}")))


def unknown_top_key(key: str, place: Place | None = None) -> Problem:
    """A key that does not exist at the top, and where it may belong."""
    return Problem(
        f"there is no key '{key}' at the top of a config",
        key=key,
        place=place,
        suggestion=closest(key, TOP_KEYS) or below(key),
        fix="rename or remove it",
        known=TOP_KEYS,
    )


def below(key: str) -> str:
    """The full name of a key that was given without what is above it; empty if there is none of that name."""
    for above, dotted in _CLASS_KEYS.items():
        if key in keys_of(import_class(dotted)):
            return f"{above}.{key}"
    head, _, rest = key.partition(".")
    return f"{head}: {{{rest}: ...}}" if rest and head in TOP_KEYS else ""


def tree_of(path: Path) -> yaml.Node | None:
    try:
        return yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"the config file '{path}' cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"the config file '{path}' is no text: {error.reason}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or one_line(str(error))
        place = Place(f"{path}, line {mark.line + 1}, column {mark.column + 1}") if mark else Place(str(path))
        fix = next((fix for sign, fix in _YAML_FIXES.items() if sign in problem), "")
        raise ConfigError(Problem(f"the config file is not valid YAML: {problem}", place=place, fix=fix)) from None


def _given_twice(node: yaml.Node, above: str, seen: set[int]) -> Iterator[tuple[str, int, int]]:
    """Keys that stand twice in one mapping, with their lines; anchored nodes are looked at once."""
    if id(node) in seen or isinstance(node, yaml.ScalarNode):
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _given_twice(item, f"{above}[{index}]", seen)
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        name, line = str(key.value), int(key.start_mark.line) + 1
        full = f"{above}.{name}" if above else name
        if name in lines and key.tag != "tag:yaml.org,2002:merge":
            yield full, lines[name], line
        lines[name] = line
        yield from _given_twice(value, full, seen)
