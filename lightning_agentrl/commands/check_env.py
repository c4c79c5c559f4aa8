"""`agentrl check-env`: a certificate of one environment, on the terminal, as JSON and as a page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_agentrl.commands.files import PAGE, make_room_for, write
from lightning_agentrl.errors import EnvError
from lightning_agentrl.errors.secrets import check_secrets
from lightning_agentrl.tools.check_env.certificate import Certificate, certify, recipe_of
from lightning_agentrl.tools.check_env.page import lines, page


def check_environment(
    env: str,
    kwargs: Mapping[str, Any],
    json_file: Path | None,
    html_file: Path | None,
    train: bool,
    seconds: float,
    cap: float,
    most_tokens: int,
) -> bool:
    """Check an environment, print and write its certificate, and return whether it has no errors.

    Raises:
        ValueError: a number is out of range, a file cannot be written, or a secret is written out.
    """
    check_secrets(recipe_of(env, kwargs)[1])
    for name, value in (("seconds", seconds), ("cap", cap), ("max_prompt_tokens", most_tokens)):
        if not value > 0:
            raise ValueError(f"--{name} is {value}; give a number above 0")
    for file, begins, argument in ((json_file, b"{", "json"), (html_file, PAGE, "html")):
        if file is not None:
            make_room_for(file, begins, argument)
    if json_file is not None and html_file is not None and json_file.resolve() == html_file.resolve():
        raise ValueError(f"'{html_file}' cannot be both files; name another one (argument --html)")
    certificate = certify(env, kwargs, seconds, cap, most_tokens)
    if train:
        certificate.train = _trained(certificate, *recipe_of(env, kwargs))
    print("\n".join(lines(certificate)))
    if json_file is not None:
        write(json_file, json.dumps(certificate.plain(), indent=1) + "\n")
    if html_file is not None:
        write(html_file, page(certificate))
    return certificate.passed


def _trained(certificate: Certificate, env_id: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what training says, or why there is none: the rest of the certificate is not to be lost with it."""
    if not certificate.passed:
        return _not_tried("there are errors to mend first")
    if certificate.texts is None or not (returns := certificate.texts.pop("returns")):
        return _not_tried("the exam was cut before its end")
    from lightning_agentrl.commands.check_train import Texts
    from lightning_agentrl.commands.check_train import train as train_small

    try:
        return train_small(env_id, kwargs, Texts(**certificate.texts), returns)
    except (EnvError, ValueError) as error:
        return _not_tried(f"it ended with an error: {error}")


def _not_tried(why: str) -> dict[str, Any]:
    return {"verdict": "not tried", "said": f"not tried: {why}", "curves": [], "points": []}
