"""The guessing game of `agents/guess.py` without a process or a server: the same calls, as observations."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Generator
from typing import Any

import gymnasium

from lightning_agentrl.episodes.agent_env import observation_of
from lightning_agentrl.gateway.conversation import Call, ChatMessage, Episode, Reply

HINTS = ("It is odd.", "It is even.")
Play = Generator[Call, str, bool]


def user(text: str) -> ChatMessage:
    return ChatMessage("user", (text,))


def play(seed: int, hint: str) -> Play:
    """Yield the calls of the script with the argument `mixed`, get their replies, and return whether it has won."""
    draw = random.Random(seed)
    secret, won = draw.randint(1, 9), False
    messages = [ChatMessage("system", ("Guess a number from 1 to 9.",)), user(hint)]
    for turn in range(2 + seed % 5):
        reply = yield Call(tuple(messages), max_tokens=6, model="player", calls_tools=False)
        messages.append(ChatMessage("assistant", (reply,)))
        number = sum(map(ord, reply)) % 9 + 1
        won = won or number == secret
        if won:
            break
        if turn % 2:
            asked = user(f"Too {'low' if number < secret else 'high'}?")
            advice = yield Call((ChatMessage("system", ("You advise.",)), asked), model="adviser", calls_tools=False)
            messages.append(user(f"Advice: {advice}"))
        else:
            messages.append(user("too low" if number < secret else "too high"))
        if len(messages) > 6:
            messages = [messages[0], user(f"So far: {number}.")]
    return won


class Guess(gymnasium.Env[Any, str]):
    free_text = True

    def __init__(self, worker: str | None = None) -> None:
        self.observation_space = gymnasium.spaces.Dict()
        self.action_space = gymnasium.spaces.Text(max_length=2**20, min_length=0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        assert seed is not None
        self._episode, self._counts = Episode(), Counter[str]()
        self._play = play(seed, HINTS[int(self.np_random.integers(len(HINTS)))])
        return self._observe(next(self._play)), {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        text = json.loads(action)["text"]
        self._episode.add(self._call, Reply(text))
        try:
            return self._observe(self._play.send(text)), 0.0, False, False, {}
        except StopIteration as end:
            counts = {name: self._counts[name] for name in ("continued", "earlier", "anew")}
            counts |= {"calls": self._episode.turns, "rows": counts["earlier"] + counts["anew"]}
            counts |= {"abandoned": 0, "no_reward": 0}
            metrics = {f"agent/{name}": float(count) for name, count in counts.items()}
            return "", float(end.value), True, False, {"metrics": metrics}

    def _observe(self, call: Call) -> Any:
        place = self._episode.place(call)
        last = place.follows == self._episode.turns - 1
        self._counts["anew" if place.follows is None else "continued" if last else "earlier"] += 1
        self._call = call
        return observation_of(call, place)


gymnasium.register("GuessInProcess-v0", "tests.gateway.in_process:Guess", disable_env_checker=True)
