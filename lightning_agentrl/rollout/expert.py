"""Episodes of the environments' own scripted players, in the words and tokens of the model."""

from __future__ import annotations

from functools import partial

from transformers import PreTrainedTokenizerBase

from lightning_agentrl.distributed import rank, world_size
from lightning_agentrl.engines import Engine, PolicyHandle, Reply, SamplingRequest
from lightning_agentrl.episodes.env_pool import EnvPool
from lightning_agentrl.episodes.expert import EXPERT_ACTION
from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.episodes.session import Session
from lightning_agentrl.episodes.sources import EnvConfig, Source
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.rollout.data_module import RolloutDataModule
from lightning_agentrl.rollout.demonstrations import Demonstration, Demonstrations
from lightning_agentrl.rollout.event_loop import LoopThread
from lightning_agentrl.rollout.player import Player
from lightning_agentrl.rollout.seats import play_parts
from lightning_agentrl.rollout.session_maker import SessionMaker

EPISODES = 500
_SEEDS = 0x636C6F6E  # so that its episodes are not those of training


class Expert(Demonstrations):
    """Episodes of the scripted players of the run's environments, as ``check-env`` knows them: the method ``solver``.

    Args:
        episodes: to be played, over all ranks.
    """

    def __init__(self, episodes: int = EPISODES) -> None:
        if episodes < 1:
            raise ValueError(f"Expert: episodes must be at least 1, got {episodes}")
        self.episodes = episodes

    def load(self, data: RolloutDataModule, tokenizer: PreTrainedTokenizerBase) -> list[Demonstration]:
        """Play them, each from a seed of its own that is no held-out one."""
        at_a_time = data.at_a_time
        pool = EnvPool([_with_expert(source) for source in data.pool.sources], threads=at_a_time)
        make = SessionMaker(pool, data.renderer, data.memory, data.seed)
        loop = LoopThread()
        played: dict[int, Demonstration] = {}

        async def play(number: int) -> None:
            seed, kind = derive_seed(data.seed, _SEEDS, number), pool.kind(number)
            session = make.session(kind, number, lambda _: seed)
            player = Player(data.interaction, _ScriptedReplies(session), data.memory.grows, 0.0, data.seed)
            try:
                samples, lost = await player.samples(session)
            finally:
                make.end(session, kind)
            if samples and not lost:
                played[number] = Demonstration(tuple(samples))

        try:
            parts = [partial(play, number) for number in range(rank(), self.episodes, world_size())]
            loop.run(play_parts(parts, at_a_time, _NoEngine()), data.stopping.look)
        finally:
            loop.stop()
            pool.close()
        return [played[number] for number in sorted(played)]


def _with_expert(source: Source) -> Source:
    if not isinstance(source, EnvConfig):
        raise ConfigError(
            f"the tasks of {source.key} have no scripted player; clone recorded runs, or name environments only"
        )
    return source.with_expert()


class _NoEngine(Engine):
    """What stands where nothing samples."""

    def start(self, handle: PolicyHandle) -> None:
        """Do nothing."""

    def sync(self, policy_version: int) -> None:
        """Do nothing: there are no weights."""

    async def generate(self, request: SamplingRequest) -> Reply:
        raise NotImplementedError

    def stop(self) -> None:
        """Do nothing."""


class _ScriptedReplies(_NoEngine):
    """Replies that name what the scripted player of a session would do, closed as the chat template closes them.

    Args:
        session: in an environment wrapped by `ExpertActions`.
    """

    def __init__(self, session: Session) -> None:
        self.session = session

    async def generate(self, request: SamplingRequest) -> Reply:
        """Return the reply to the session's prompt, whatever the request asks.

        Raises:
            ConfigError: the action is not offered, or the reply is too long.
        """
        session = self.session
        assert session.worker.answer is not None
        action, contract, renderer = session.worker.answer.info[EXPERT_ACTION], session.contract, session.renderer
        if contract.actions and action not in contract.actions:
            raise ConfigError(
                f"the scripted player wants {action!r}, which is not among the actions that are offered: "
                f"{', '.join(contract.actions)}"
            )
        text = action if contract.free_text else renderer.writer.reply_text("", action)
        ids = (*renderer.template.encode(text), renderer.template.turn_close_id)
        if len(ids) > request.max_tokens:
            raise ConfigError(
                f"the scripted player's reply {text!r} has {len(ids)} tokens, and {request.max_tokens} are allowed; "
                "raise data.init_args.interaction.init_args.max_reply_tokens"
            )
        return Reply(ids, (0.0,) * len(ids), closed=True, policy_version=0)
