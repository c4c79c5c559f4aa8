"""Problems of keys, classes, arguments and commands that are unknown or missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_agentrl.errors.names import (
    OWN_PACKAGES,
    class_names,
    closest,
    import_class,
    import_fault,
    keys_inside,
    keys_of,
)
from lightning_agentrl.errors.problem import COMMAND_LINE, Place, Problem

TOP_KEYS = ("seed_everything", "trainer", "model", "data", "ckpt_path")
ROOTS = {  # the classes at the top of a config
    "trainer": "lightning.pytorch.Trainer",
    "model": "lightning_agentrl.agents.PPOAgent",
    "data": "lightning_agentrl.rollout.RolloutDataModule",
}

_INSTEAD = {  # options of Lightning's own command
    "optimizer": "learning rates, weight decay and clips are keys of model.init_args.optim; another optimizer is "
    "returned by configure_optimizers of an agent of your own",
    "lr_scheduler": "a schedule is a key of the agent, model.init_args.optim.schedule: {actor: {shape: cosine, "
    "warmup_steps: 10}, critic: ...}; another one is returned by configure_optimizers of an agent of your own",
}


def unknown_key(key: str, above: str, owner: type | None, known: Sequence[str] = (), class_name: str = "") -> Problem:
    """Describe a key that does not exist.

    Args:
        key: the last part of it.
        above: the part before it.
        owner: the class that has no such key.
        known: the keys that are allowed, if they are not those of the class.
        class_name: the class below which the key is written, if that is not the owner.
    """
    known = known or keys_of(owner)
    where = f"in {owner.__name__ if owner else above}" if owner or above else "at the top of a config"
    return Problem(
        f"there is no key '{key}' {where}",
        key=f"{above}.{key}" if above else key,
        owner=class_name or (owner.__name__ if owner else ""),
        suggestion=_meant(key, owner, known),
        fix="rename or remove it",
        known=tuple(known),
    )


def _meant(key: str, owner: type | None, known: Sequence[str]) -> str:
    """Return the key that one may have been meant for, perhaps inside of another; empty if there is none."""
    inside = keys_inside(owner)
    close = "" if key in inside else closest(key, known)
    return close or inside.get(closest(key, list(inside)), "")


def unknown_top_key(key: str, place: Place | None = None) -> Problem:
    """Describe an unknown key at the top of a config, and where it may belong."""
    head, _, rest = key.partition(".")
    if head == "trainer" and rest and place is None:
        return unknown_key(rest.split(".")[0], head, import_class(ROOTS[head]))
    if head in _INSTEAD:
        return Problem(f"there is no key '{head}' at the top of a config", key=head, place=place, fix=_INSTEAD[head])
    return Problem(
        f"there is no key '{key}' at the top of a config",
        key=key,
        place=place,
        suggestion=closest(key, TOP_KEYS) or below(key),
        fix="rename or remove it",
        known=TOP_KEYS,
    )


def below(key: str) -> str:
    """Return the full name of a key that was given without the part above it; empty if there is none of that name."""
    for root, dotted in ROOTS.items():
        owner, above = import_class(dotted), root if root == "trainer" else f"{root}.init_args"
        if key in keys_of(owner) or key in keys_inside(owner):
            return f"{above}.{keys_inside(owner).get(key, key)}"
    head, _, rest = key.partition(".")
    return f"{head}: {{{rest}: ...}}" if rest and head in TOP_KEYS else ""


def missing_keys(names: Sequence[str], above: str = "", owner: type | None = None) -> Problem:
    """Describe required keys that were not given."""
    full = [f"{above}.{name}" if above else name for name in names]
    many, whose = len(full) > 1, f" of {owner.__name__}" if owner else ""
    what = f"the key{'s' * many} {' and '.join(full)}{whose} {'are' if many else 'is'} missing"
    if set(full) <= set(TOP_KEYS):
        return Problem(what, fix="give a config file with --config that has what is missing")
    return Problem(what, key=full[0] if above else "", missing=True)


def unknown_class(name: str, key: str, bases: Sequence[type]) -> Problem:
    """Describe a class that is not found: misspelt, moved, of another kind, or in a module that cannot be imported."""
    kind = next((base.__name__ for base in bases), "class")
    module, _, short = name.rpartition(".")
    fault = import_fault(module)
    meant = closest(short, class_names(bases, everywhere=True), cutoff=0.75 if module else 0.6)
    there = meant and meant not in class_names(bases) and import_class(f"{module}.{meant}")
    return Problem(
        f"there is no {kind} '{name}'" + (f": {fault}" if fault else ""),
        key=f"{key}.class_path",
        value=name,
        suggestion=f"{module}.{meant}" if there else meant,
        fix="a class of your own must be importable from where agentrl runs" if module else "",
        known=tuple(class_names(bases)),
    )


def abstract_class(name: str, key: str, bases: Sequence[type]) -> Problem:
    """Describe a class that does not define all that the class above it asks for."""
    lacks = " and ".join(sorted(getattr(found := import_class(name), "__abstractmethods__", ())))
    if not lacks or found in bases or name.split(".")[0] in OWN_PACKAGES:  # none that somebody has written
        return no_class(key, bases)
    what = f"{name} is abstract: it does not define {lacks}"
    return Problem(what, key=f"{key}.class_path", value=name, fix=f"define {lacks} in it")


def no_class(key: str, bases: Sequence[type]) -> Problem:
    """Describe a value in place of a class."""
    what = f"{key} needs a class_path (and init_args for its arguments)"
    return Problem(what, key=key, classless=True, known=tuple(class_names(bases)))


def nameless(name: str, key: str, base: type) -> Problem:
    """Describe a mapping that begins with something else than a class_path, such as the name of the class."""
    problem = no_class(key, [base])
    meant = closest(name, class_names([base], everywhere=True))
    return replace(problem, suggestion=f"{{class_path: {meant}, init_args: ...}}" if meant else "")


@dataclass(frozen=True)
class Usage:
    """What a command takes without a name.

    Args:
        alone: the names that such arguments have in its help.
        text: how it is written with them.
    """

    alone: tuple[str, ...]
    text: str


def missing_arguments(names: Sequence[str], usage: Usage) -> Problem:
    """Describe required arguments without a name that were not given."""
    many = len(names) > 1
    what = f"the argument{'s' * many} {' and '.join(names)} {'are' if many else 'is'} missing"
    return Problem(what, fix=f"write {usage.text}")


def no_value(option: str) -> Problem:
    """Describe an option, without its dashes, behind which its value is missing."""
    place, fix = Place(COMMAND_LINE, f"--{option}"), f"give one behind it, as in --{option} VALUE"
    return Problem(f"the option --{option} has no value", place=place, fix=fix)


def empty_argument(name: str, usage: Usage) -> Problem:
    """Describe an argument that was given as an empty text."""
    if name in usage.alone:
        return Problem(f"the argument {name} is empty", place=Place(COMMAND_LINE, name), fix=f"write {usage.text}")
    place = Place(COMMAND_LINE, f"--{name}")
    return Problem(f"the option --{name} is empty", place=place, fix="give it a value, or leave it out")


def unknown_argument(argument: str, options: Sequence[str], usage: Usage | None = None) -> Problem:
    """Describe an argument that a command does not take.

    Args:
        argument: as it was given.
        options: what the command takes, without dashes.
        usage: what it takes without a name; None: nothing.
    """
    name = argument.lstrip("-").split("=")[0]
    dashes, (head, _, rest) = argument[: len(argument) - len(argument.lstrip("-"))], name.partition(".")
    if usage is not None and not argument.startswith("-"):
        place = Place(COMMAND_LINE, argument)
        return Problem(f"the argument '{argument}' is one too many", place=place, fix=f"write {usage.text}")
    if usage is not None and head in usage.alone:
        place = Place(COMMAND_LINE, f"{dashes}{name}")
        return Problem(f"there is no option '{dashes}{head}'; it stands alone", place=place, fix=f"write {usage.text}")
    if not argument.startswith("-"):
        is_config = "config" in options and argument.endswith((".yaml", ".yml"))
        meant = f"--config {argument}" if is_config else f"--{argument}" if "=" in argument else ""
        return Problem(
            f"the argument '{argument}' belongs to no key", place=Place(COMMAND_LINE, argument), suggestion=meant
        )
    if head in _INSTEAD and head not in options:
        place = Place(COMMAND_LINE, f"{dashes}{name}")
        return Problem(f"there is no option '{dashes}{head}'", place=place, fix=_INSTEAD[head])
    if head in options and rest:
        return unknown_top_key(name)
    known = tuple(f"--{option}" for option in options)
    close = closest(head, options) or (below(name) if set(TOP_KEYS) <= set(options) else "")
    meant = f"--{close}" if close else ""
    return Problem(
        f"there is no option '{dashes}{head}'",
        place=Place(COMMAND_LINE, f"{dashes}{name}"),
        suggestion=meant,
        known=known,
    )


def unknown_command(name: str, known: Sequence[str]) -> Problem:
    """Describe a command that does not exist or was left out."""
    if name.startswith("-"):
        return Problem("the command is missing", suggestion=f"agentrl {known[0]} {name} ...", known=tuple(known))
    return Problem(f"there is no command '{name}'", known=tuple(known), suggestion=closest(name, known))
