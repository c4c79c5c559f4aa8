"""Replies chosen by a function instead of a model: scripted players and random actions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lightning_agentrl.engines import Engine, PolicyHandle, Reply, SamplingRequest
from lightning_agentrl.episodes.interaction import Interaction
from lightning_agentrl.episodes.recipe import EXPERT_ACTION
from lightning_agentrl.episodes.recorder import Recorder
from lightning_agentrl.episodes.session import Session
from lightning_agentrl.errors import ConfigError

Choose = Callable[[Session, int], str]  # function (session, seed of the reply) -> action


def scripted_action(session: Session, seed: int) -> str:
    """Return the action of the environment's scripted player; requires a source with ``with_expert``."""
    assert session.worker.answer is not None
    return str(session.worker.answer.info[EXPERT_ACTION])


def random_action(session: Session, seed: int) -> str:
    """Return an action of the environment at random, with equal probabilities."""
    actions = list(session.contract.actions)
    return actions[int(np.random.default_rng(seed).integers(len(actions)))]


def chosen_actions(interaction: Interaction, choose: Choose, capped: bool = True) -> Interaction:
    """Return an interaction with the same turn loop, in which a function chooses the actions instead of a model.

    Args:
        interaction: interaction with the turn loop.
        choose: function that returns the next action of a session.
        capped: whether to refuse replies that are longer than ``max_reply_tokens``.
    """
    return _ChosenActions(interaction, choose, capped)


def no_model() -> Engine:
    """Return an engine for players with :func:`chosen_actions`, which never use their engine."""
    return _ChosenReplies(random_action)


# The classes below are private, so that configs cannot name them.


class _ChosenActions(Interaction):
    """See :func:`chosen_actions`."""

    def __init__(self, interaction: Interaction, choose: Choose, capped: bool) -> None:
        self.interaction, self.choose, self.capped = interaction, choose, capped
        self.max_reply_tokens, self.parser = interaction.max_reply_tokens, interaction.parser
        self.max_turns, self.reply_budget = interaction.max_turns, interaction.reply_budget

    async def run(self, session: Session, engine: Engine, recorder: Recorder, temperature: float, seed: int) -> None:
        chosen = _ChosenReplies(self.choose, session, self.capped)
        await self.interaction.run(session, chosen, recorder, temperature, seed)


class _ChosenReplies(Engine):
    """Engine whose replies name the chosen actions of one session, and end with the chat template's turn-close token.

    Args:
        choose: function that returns the next action of the session.
        session: session that plays; None if the engine is never used.
        capped: as in :func:`chosen_actions`.
    """

    def __init__(self, choose: Choose, session: Session | None = None, capped: bool = True) -> None:
        self.choose, self.session, self.capped = choose, session, capped

    def start(self, handle: PolicyHandle) -> None:
        """Do nothing."""

    def sync(self, policy_version: int) -> None:
        """Do nothing: there are no weights."""

    def stop(self) -> None:
        """Do nothing."""

    async def generate(self, request: SamplingRequest) -> Reply:
        """Return the reply to the session's prompt, and ignore the prompt of the request.

        Raises:
            ConfigError: the action is not offered, or the reply is too long.
        """
        session = self.session
        assert session is not None
        action, contract, renderer = self.choose(session, request.seed), session.contract, session.renderer
        if contract.actions and action not in contract.actions:
            raise ConfigError(
                f"the scripted player chose {action!r}, which is not one of the offered actions: "
                f"{', '.join(contract.actions)}"
            )
        text = action if contract.free_text else renderer.writer.reply_text("", action)
        ids = (*renderer.template.encode(text), renderer.template.turn_close_id)
        if self.capped and len(ids) > request.max_tokens:
            raise ConfigError(
                f"the scripted player's reply {text!r} has {len(ids)} tokens, and {request.max_tokens} are allowed; "
                "raise data.init_args.interaction.init_args.max_reply_tokens"
            )
        return Reply(ids, (0.0,) * len(ids), closed=True, policy_version=0)
