"""Environments that cannot be made are told with the id or argument that was meant."""

from __future__ import annotations

import pytest

from lightning_agentrl.episodes.recipe import ENV, Recipe
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
    with pytest.raises(ConfigError) as caught:
        Recipe(env_id, kwargs, ENV).make()
    assert sentence in str(caught.value)


def test_an_id_of_ours_without_its_module_is_recognised() -> None:
    with pytest.raises(ConfigError, match=r"did you mean agentrl_envs:Bandit-v0\?"):
        Recipe("Bandt-v0", {}, ENV).make()
