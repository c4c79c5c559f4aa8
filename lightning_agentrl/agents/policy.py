"""Trained policies in Python: act in an environment that the caller steps, or play whole episodes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import gymnasium
import torch

from lightning_agentrl.agents.saved_policy import SavedPolicy, find_policy
from lightning_agentrl.engines import Engine, PolicyHandle, Reply, SamplingRequest, TransformersEngine
from lightning_agentrl.episodes.env_pool import EnvPool
from lightning_agentrl.episodes.env_worker import EnvWorker, Start
from lightning_agentrl.episodes.environment import Answer, Environment
from lightning_agentrl.episodes.recorder import Recorder
from lightning_agentrl.episodes.sources import EnvConfig
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.rollout.event_loop import LoopThread
from lightning_agentrl.rollout.player import Player
from lightning_agentrl.rollout.policy_settings import PolicySettings
from lightning_agentrl.rollout.validation import WholeEpisode, play_episodes
from lightning_agentrl.types import Turn


@dataclass(frozen=True)
class Act:
    """Next action of a policy, with its reply.

    Args:
        action: action to pass to ``step`` of the environment.
        reply: text of the model's reply.
        prompt_ids: token ids of the prompt.
        reply_ids: sampled token ids.
    """

    action: str
    reply: str
    prompt_ids: tuple[int, ...]
    reply_ids: tuple[int, ...]


class Policy:
    """A trained policy that plays with the prompts, memory, interaction and parser of its training.

    Args:
        saved: the saved policy, from :func:`find_policy`.
        settings: prompt settings; by default those of the policy's training.
        engine: engine that samples replies; ``TransformersEngine`` by default.

    Raises:
        ConfigError: no settings were given, and none were saved.
    """

    def __init__(
        self, saved: SavedPolicy, settings: PolicySettings | None = None, engine: Engine | None = None
    ) -> None:
        given = settings or saved.settings
        if given is None:
            raise ConfigError(
                f"'{saved.source}' has no prompt settings; export the checkpoint of its run with this version "
                "(agentrl export), or pass settings=PolicySettings(...)"
            )
        self.saved, self.settings = saved, given
        self.tokenizer = saved.tokenizer
        self.engine = engine or TransformersEngine()
        self.model: LanguageModel = saved.load().eval()
        if torch.cuda.is_available():
            self.model.to("cuda")
        renderer = self.player(EnvPool([])).renderer
        handle = PolicyHandle(self.model, renderer.stop_token_ids, nullcontext, decode=renderer.decode)
        self.engine.start(handle)
        self.engine.sync(0)
        self._loop = LoopThread()

    @classmethod
    def from_checkpoint(cls, path: str | Path, model: str | None = None) -> Self:
        """Load the policy of a checkpoint, or of a folder that ``agentrl export`` or ``PolicyFolder`` wrote.

        Args:
            path: checkpoint or folder.
            model: hub id or folder of the base model, if it was moved after the run.

        Raises:
            ValueError: the policy does not exist, cannot be read, or was saved without prompt settings.
        """
        return cls(find_policy(path, model))

    def player(self, pool: EnvPool) -> Player:
        """Return a player of this policy for the environments of a pool."""
        saved = self.saved
        return self.settings.player(pool, saved.tokenizer, saved.image_reader, saved.context_length, self.engine)

    def play(self, env: str | EnvConfig, seed: int, temperature: float | None = None) -> WholeEpisode:
        """Play one whole episode, as in validation.

        Args:
            env: id of the environment, or its configuration.
            seed: seed of the episode.
            temperature: sampling temperature; by default the temperature of training.

        Returns:
            The episode with its turns, and with samples that contain the ids of prompts and replies.
        """
        pool = EnvPool([self.settings.worded(EnvConfig(env) if isinstance(env, str) else env)])
        try:
            playing = play_episodes([seed], self._heated(pool, temperature), 1, lambda: None, watched=sys.maxsize)
            _, (episode,) = self._loop.run(playing)
            return episode
        finally:
            pool.close()

    def begin(self, env: gymnasium.Env, seed: int = 0, temperature: float | None = None) -> History:
        """Begin the history of an episode in an environment that the caller resets and steps.

        Args:
            env: environment whose optional attributes are read, such as ``actions``; it is never stepped here.
            seed: seed of the sampled replies.
            temperature: sampling temperature; by default the temperature of training.
        """
        source = self.settings.worded(EnvConfig(env.spec.id if env.spec else type(env).__name__))
        worker = _CallersEnv(env, source)
        return History(self._heated(EnvPool([source]), temperature), worker, seed)

    def act(self, history: History, observation: Any, info: Mapping[str, Any] | None = None) -> Act:
        """Return the next action. The action's turn is added to the history when the next observation is passed.

        Prompts are those of training, since the same turn loop runs; only the environment is stepped by the caller.

        Args:
            history: history from :meth:`begin`.
            observation: observation that ``reset`` or ``step`` of the environment returned last.
            info: info returned with the observation; required if the environment reports texts or the executed action
                in it.

        Raises:
            ConfigError: the interaction has ended the episode, for example after ``max_turns``.
        """
        answer = history.worker.hosted.answer(observation, dict(info or {}))
        return self._loop.run(history.advance(answer))

    def close(self) -> None:
        """Stop the engine."""
        self.engine.stop()
        self._loop.stop()

    def _heated(self, pool: EnvPool, temperature: float | None) -> Player:
        player = self.player(pool)
        return player if temperature is None else replace(player, temperature=temperature)


class History:
    """An unfinished episode whose environment the caller steps; created by :meth:`Policy.begin`.

    Args:
        player: player of the policy.
        worker: worker of the environment.
        seed: seed of the sampled replies.
    """

    def __init__(self, player: Player, worker: _CallersEnv, seed: int) -> None:
        self.worker = worker
        self._player, self._heard = player, _Heard(player.engine)
        player.pool.give_back(0, worker)
        self._session = player.session(0, seed, lambda _: seed)
        self._recorder = Recorder(None, player.memory.grows)
        self._task: asyncio.Task[None] | None = None

    @property
    def turns(self) -> list[Turn]:
        """Turns whose environment step was taken."""
        return [turn for sample in self._recorder.samples() for turn in sample.turns]

    async def advance(self, answer: Answer) -> Act:
        """Pass an answer of the environment to the turn loop, and return its next action."""
        player, worker = self._player, self.worker
        if self._task is None:
            run = player.interaction.run(self._session, self._heard, self._recorder, player.temperature, player.seed)
            self._task = asyncio.create_task(run)
        worker.answers.put_nowait(answer)
        asked = asyncio.create_task(worker.asked.get())
        await asyncio.wait({self._task, asked}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            self._task.result()  # raises the turn loop's exception, if any
            stop = self.turns[-1].stop
            why = f" ({stop.value})" if stop else ""
            raise ConfigError(f"the episode has ended after {len(self.turns)} turns{why}; begin another history")
        request, reply = self._heard.last
        text = self._session.renderer.decode(reply.ids)
        return Act(asked.result(), text, request.prompt.ids, reply.ids)


class _CallersEnv(EnvWorker):
    """Worker of an environment that the caller steps: it passes actions to the caller and waits for the answers.

    Args:
        env: the caller's environment, which is never closed here.
        source: configuration with the texts and the wording of the environment.
    """

    def __init__(self, env: gymnasium.Env, source: EnvConfig) -> None:
        self.hosted = Environment(lambda: env, texts=source.texts)
        super().__init__(lambda: self.hosted, wording=source.wording, name=source.id)
        self.answers: asyncio.Queue[Answer] = asyncio.Queue()
        self.asked: asyncio.Queue[str] = asyncio.Queue()

    async def reset(self, start: Start, actions: list[str] | None = None) -> Answer:
        self._begin(start, [] if actions is None else actions)
        return self._see(await self.answers.get())

    async def step(self, action: str) -> Answer:
        self.asked.put_nowait(action)
        answer = self._see(await self.answers.get())
        self.actions.append(action)
        return answer


class _Heard(Engine):
    """Wrapper of an engine that stores its last request and reply."""

    last: tuple[SamplingRequest, Reply]

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def start(self, handle: PolicyHandle) -> None:
        """Do nothing: the policy has started the engine."""

    def sync(self, policy_version: int) -> None:
        """Do nothing: the weights do not change."""

    def stop(self) -> None:
        """Do nothing: the policy stops the engine."""

    async def generate(self, request: SamplingRequest) -> Reply:
        self.last = request, await self.engine.generate(request)
        return self.last[1]
