"""Environments that cannot be made are told with the id or argument that was meant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import pytest

from lightning_agentrl.episodes.argument_types import argument_problem
from lightning_agentrl.episodes.make_errors import environment_problem
from lightning_agentrl.episodes.recipe import Recipe
from lightning_agentrl.errors import ConfigError


@pytest.mark.parametrize(
    ("env_id", "kwargs", "sentence"),
    [
        ("agentrl_envs:Bandt-v0", {}, "did you mean agentrl_envs:Bandit-v0?"),
        ("agentrl_envs:Bandit-v7", {}, "did you mean agentrl_envs:Bandit-v0?"),
        ("Chess-v0", {}, "there is no environment 'Chess-v0' (key data.init_args.env.id)"),
        ("my_gmes:Chess-v0", {}, "no module 'my_gmes'"),
        (
            "agentrl_envs:Bandit-v0",
            {"arm": 2},
            "has no argument 'arm' (key data.init_args.env.kwargs.arm); known: arms; ",
        ),
        ("agentrl_envs:Bandit-v0", {"arms": 9}, "Bandit has 2 to 3 arms, not 9. (key data.init_args.env.kwargs)"),
    ],
)
def test_an_environment_that_cannot_be_made(env_id: str, kwargs: dict[str, int], sentence: str) -> None:
    with pytest.raises((gymnasium.error.Error, ModuleNotFoundError, TypeError, ValueError)) as caught:
        gymnasium.make(env_id, **kwargs).close()
    assert sentence in str(environment_problem(env_id, kwargs, caught.value))


def test_an_id_of_ours_without_its_module_is_recognised() -> None:
    error = gymnasium.error.NameNotFound("Environment `Bandit` doesn't exist.")  # as long as nobody imported ours
    assert "did you mean agentrl_envs:Bandit-v0?" in str(environment_problem("Bandit-v0", {}, error))


class Base:
    def __init__(self, size: int = 4, share: float = 0.5, name: str = "x") -> None: ...


class Game(Base):
    def __init__(
        self,
        limit: int | None = None,
        kinds: Sequence[str] | None = None,
        words: Mapping[str, str] | None = None,
        fixed: bool = True,
        mode: Literal["a", "b"] | None = None,
        rank: str | Callable[[str], float] = "",
        sloppy: list[int] = 0,  # type: ignore[assignment]
        open: Any = None,
        untold=None,
        **kwargs: Any,
    ) -> None: ...


class Unresolved:
    def __init__(self, size: Nowhere = 3) -> None: ...  # type: ignore[name-defined] # noqa: F821


@pytest.mark.parametrize(
    ("given", "needed"),
    [
        ({"limit": "5"}, "limit of the environment 'Game-v0' must be a whole number or null, got '5'"),
        ({"limit": 2.0}, "a whole number or null"),
        ({"limit": [5]}, "a whole number or null"),
        ({"size": 2.5}, "size of the environment 'Game-v0' must be a whole number, got 2.5"),
        ({"share": "0.5"}, "must be a number"),
        ({"name": 3}, "must be a text"),
        ({"fixed": "yes"}, "must be true or false"),
        ({"fixed": 2}, "must be true or false"),
        ({"kinds": 3}, "must be a list or null"),
        ({"words": "x"}, "must be names and values or null"),
        ({"mode": 3}, "must be 'a' or 'b' or null"),
        ({"limit": 10**5000, "size": "9" * 5000}, "got '9999"),
    ],
)
def test_an_argument_of_a_type_that_its_author_does_not_take_is_told(given: dict[str, Any], needed: str) -> None:
    problem = argument_problem("Game-v0", given, Game, "data.init_args.env")
    assert needed in str(problem)
    assert len(str(problem)) < 300
    assert problem is not None
    assert problem.key == f"data.init_args.env.kwargs.{list(given)[-1]}"


@pytest.mark.parametrize(
    "given",
    [
        *({"limit": value} for value in (None, 5, True, np.int64(5))),
        *(
            {"size": None},
            {"share": 1},
            {"share": np.float32(1)},
            {"name": Path("x")},
            {"fixed": 0},
            {"fixed": np.bool_(1)},
        ),
        *({"kinds": ["x"]}, {"kinds": ()}, {"kinds": "x"}, {"words": {}}, {"mode": "c"}, {"rank": 3}, {"rank": len}),
        *({"sloppy": 3}, {"open": object()}, {"untold": 3}, {"unknown": 3}),
    ],
)
def test_an_argument_that_may_fit_is_left_to_the_environment(given: dict[str, Any]) -> None:
    assert argument_problem("Game-v0", given, Game, "env") is None


def test_types_that_cannot_be_read_refuse_nothing() -> None:
    for maker in (Unresolved, None, len, dict, gymnasium.Env):
        assert argument_problem("Game-v0", {"size": "x"}, maker, "env") is None


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [
        ("agentrl_envs:FrozenLakeText-v0", {"render_mode": 3}),  # in gymnasium
        ("agentrl_envs:FrozenLakeText-v0", {"min_way": "2"}),  # in its first reset
        ("agentrl_envs:OpenEnv-v0", {"url": 8000}),
        ("agentrl_envs:OpenEnv-v0", {"url": "http://127.0.0.1:9", "max_turns": 2.5}),  # never
    ],
)
def test_wrong_types_are_refused_before_an_environment_is_made(env_id: str, kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"{list(kwargs)[-1]} of the environment '{env_id}' must be"):
        Recipe(env_id, kwargs, "data.init_args.env").make()
