"""Environments that cannot be made are told with the id or argument that was meant."""

from __future__ import annotations

import gymnasium
import pytest

from lightning_agentrl.episodes.make_errors import environment_problem


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
