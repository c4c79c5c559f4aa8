"""Choice of the field of an OpenEnv action that takes the reply, and of the observation's text field."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

from agentrl_envs.openenv.images import FIELD

_MOST_SHOWN = 20  # largest number of fields that an error message lists
_OF_EVERY_ANSWER = ("done", "reward", "metadata")


def choose_fields(schema: Mapping[str, Any], action: str | None, text: str | None) -> tuple[str, str]:
    """Return the names of the action field and the text field: the given names, else the only fields that fit.

    Args:
        schema: the server's answer to `/schema`.
        action: field of an action, as given by the user.
        text: field of an observation, as given by the user.

    Raises:
        ValueError: a given field does not exist, or not exactly one field fits; the message lists the fields.
    """
    takes, gives = _fields(schema["action"]), _fields(schema["observation"])
    required = schema["action"].get("required")
    needed = [name for name in takes if name in required] if isinstance(required, list) else []
    chosen = _chosen("action", action, takes, [name for name in needed if takes[name] == "string"])
    if unfilled := [name for name in needed if name != chosen]:
        raise ValueError(
            f"an action of this server also needs {', '.join(unfilled)}, which a text cannot fill; its fields are "
            f"{_listed(takes)}"
        )
    return chosen, _chosen("text", text, gives, [name for name, kind in gives.items() if kind == "string"])


def choose_images(schema: Mapping[str, Any], images: str | None) -> str | None:
    """Return the name of the field with pictures; None if no field has pictures.

    Raises:
        ValueError: an observation has no such field.
    """
    gives = _fields(schema["observation"])
    if images is None:
        return FIELD if gives.get(FIELD) in ("array", "any") else None
    return _chosen("images", images, gives, [])


def _chosen(argument: str, given: str | None, fields: Mapping[str, str], fitting: list[str]) -> str:
    whose = "actions" if argument == "action" else "observations"
    if given is not None:
        if fields and given not in fields:
            raise ValueError(f"{whose} of this server have no field {given!r} ({argument}); known: {_listed(fields)}")
        return given
    if len(fitting) != 1:
        found = "several texts" if fitting else "no text"
        raise ValueError(
            f"the schema of this server has {found} for {whose}, so name the field with the argument {argument}; "
            f"known: {_listed(fields) or 'none'}"
        )
    return fitting[0]


def _fields(schema: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> type of all fields except the fields that the protocol defines."""
    properties = schema.get("properties")
    listed = properties if isinstance(properties, Mapping) else {}
    return {
        name: str(field.get("type", "any")) if isinstance(field, Mapping) else "any"
        for name, field in listed.items()
        if name not in _OF_EVERY_ANSWER
    }


def _listed(fields: Mapping[str, str]) -> str:
    shown = [f"{name} ({kind})"[:80] for name, kind in islice(fields.items(), _MOST_SHOWN)]
    return ", ".join([*shown, "..."] if len(fields) > _MOST_SHOWN else shown)
