"""What is said of keys, classes, arguments and commands that are not known, or not there."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_agentrl.errors.names import class_names, closest, import_class, import_fault, inside, keys_of
from lightning_agentrl.errors.problem import COMMAND_LINE, Place, Problem

TOP_KEYS = ("seed_everything", "trainer", "model", "data", "ckpt_path")
_CLASSES = {  # a key that is given at the top may belong to one of these
    "trainer": "lightning.pytorch.Trainer",
    "model.init_args": "lightning_agentrl.agents.PPOAgent",
    "data.init_args": "lightning_agentrl.rollout.RolloutDataModule",
}


def unknown_key(key: str, above: str, owner: type | None, known: Sequence[str] = (), class_name: str = "") -> Problem:
    """Describe a key that does not exist.

    Args:
        key: the last part of it.
        above: what is before it.
        owner: the class that has no such key.
        known: keys that it has, where they are not those of the class.
        class_name: the class that the key is written below, if that is not the owner.
    """
    known = known or keys_of(owner)
    return Problem(
        f"there is no key '{key}' in {owner.__name__ if owner else above}",
        key=f"{above}.{key}" if above else key,
        owner=class_name or (owner.__name__ if owner else ""),
        suggestion=inside(owner, key) or closest(key, known),
        fix="rename or remove it",
        known=tuple(known),
    )


def unknown_top_key(key: str, place: Place | None = None) -> Problem:
    """Describe a key that the command itself does not have, and where it may belong."""
    head, _, rest = key.partition(".")
    if head == "trainer" and rest and place is None:
        return unknown_key(rest.split(".")[0], head, import_class(_CLASSES[head]))
    return Problem(
        f"there is no key '{key}' at the top of a config",
        key=key,
        place=place,
        suggestion=closest(key, TOP_KEYS) or below(key),
        fix="rename or remove it",
        known=TOP_KEYS,
    )


def below(key: str) -> str:
    """Return the full name of a key that was given without what is above it; empty if there is none of that name."""
    for above, dotted in _CLASSES.items():
        owner = import_class(dotted)
        if name := key if key in keys_of(owner) else inside(owner, key):
            return f"{above}.{name}"
    head, _, rest = key.partition(".")
    return f"{head}: {{{rest}: ...}}" if rest and head in TOP_KEYS else ""


def missing_keys(names: Sequence[str], above: str = "", owner: type | None = None) -> Problem:
    """Describe keys that have to be given; without those at the top there is no run."""
    full = [f"{above}.{name}" if above else name for name in names]
    many, whose = len(full) > 1, f" of {owner.__name__}" if owner else ""
    what = f"the key{'s' * many} {' and '.join(full)}{whose} {'are' if many else 'is'} missing"
    if set(full) <= set(TOP_KEYS):
        return Problem(what, fix="give a config file with --config that has what is missing")
    return Problem(what, key=full[0] if above else "", missing=True)


def unknown_class(name: str, key: str, bases: Sequence[type]) -> Problem:
    """Describe a class that is not there: misspelt, moved, of another kind, or in a module that cannot be imported."""
    kind = next((base.__name__ for base in bases), "class")
    module, _, short = name.rpartition(".")
    fault = import_fault(module)
    return Problem(
        f"there is no {kind} '{name}'" + (f": {fault}" if fault else ""),
        key=f"{key}.class_path",
        value=name,
        suggestion=closest(short, class_names(bases, everywhere=True), cutoff=0.75 if module else 0.6),
        fix="a class of your own must be importable from where agentrl runs" if module else "",
        known=tuple(class_names(bases)),
    )


def no_class(key: str, bases: Sequence[type]) -> Problem:
    """Describe a value in place of a class."""
    what = f"{key} needs a class_path (and init_args for its arguments)"
    return Problem(what, key=key, classless=True, known=tuple(class_names(bases)))


def unknown_argument(argument: str, options: Sequence[str]) -> Problem:
    """Describe an argument that a command does not take.

    Args:
        argument: as it was given.
        options: what the command takes, without dashes.
    """
    name = argument.lstrip("-").split("=")[0]
    head, _, rest = name.partition(".")
    if not argument.startswith("-"):
        is_config = "config" in options and argument.endswith((".yaml", ".yml"))
        meant = f"--config {argument}" if is_config else f"--{argument}" if "=" in argument else ""
        return Problem(
            f"the argument '{argument}' belongs to no key", place=Place(COMMAND_LINE, argument), suggestion=meant
        )
    if head in options and rest:
        return unknown_top_key(name)
    known = tuple(f"--{option}" for option in options)
    close = closest(head, options) or (below(name) if set(TOP_KEYS) <= set(options) else "")
    meant = f"--{close}" if close else ""
    return Problem(
        f"there is no option '--{head}'", place=Place(COMMAND_LINE, f"--{name}"), suggestion=meant, known=known
    )


def unknown_command(name: str, known: Sequence[str]) -> Problem:
    """Describe a command that does not exist; perhaps it was left out."""
    if name.startswith("-"):
        return Problem("the command is missing", suggestion=f"agentrl {known[0]} {name} ...", known=tuple(known))
    return Problem(f"there is no command '{name}'", known=tuple(known), suggestion=closest(name, known))
