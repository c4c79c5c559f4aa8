"""A game of TextArena for one player, against a scripted player, or with the policy as every player."""

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from io import StringIO
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from agentrl_envs.extras import need
from agentrl_envs.text_env import PRINTABLE
from agentrl_envs.textarena.games import LIMIT_IS_THE_END, LOST, ONE_PLAYER, game_id, name_of

Opponent = Callable[[Sequence[str], random.Random], str]
"""Function from all texts that the opponent received, oldest first, and a random generator to the opponent's reply."""

SELF = "self"
_BEGIN = "The game begins."
_BRACKETS = re.compile(r"\[[^\[\]\n]{1,40}\]")
_PLACEHOLDER = re.compile(r"\b[A-Z]\b|<[^<>]*>")  # placeholder in the rules, such as X in [play X]
_MOST_CHARS = 2**16
_STARTS = 20  # largest number of games that an opponent may end before the policy's first turn
_MOST_REPLIES = 1000  # largest number of replies of an opponent between two turns of the policy


class TextArena(gymnasium.Env[str, str]):
    """A game of TextArena.

    The system prompt of a seat (a player's place in the game) has the rules that the game sends to this seat first; an
    observation is the text since the last turn of the seat. The whole reply goes to the game, which takes the first
    words in brackets as the move. Rewards come at the end of a game.

    Args:
        game: id in TextArena, such as `Mastermind-v0-hard`; a name alone means version `-v0`. A number is accepted,
            since a config reads the name `2048` as a number.
        opponent: player of the other seat in a game for two. `random` replies with a bracketed word from the last text
            that it received, which suits games that list their moves; `module:function` names your own `Opponent`;
            `self` gives both seats to the policy, and `info["side"]` is the seat whose turn it is and that receives
            the observation.
        seat: seat of the policy, 0 or 1; by default each episode draws the seat.
        max_chars: number of characters after which a reply is cut; some games fail on very long numbers.

    Raises:
        ValueError: TextArena is not installed, or has no such game for one or two players, or the game is broken.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - declared by gymnasium
    worker = "process"  # the games use the global random generators, which threads would share
    free_text = True

    def __init__(
        self,
        game: str | int,
        opponent: str = "random",
        seat: int | None = None,
        max_chars: int = 4000,
    ) -> None:
        self._textarena = need("textarena", extra="textarena")
        self.game = game_id(str(game), need("textarena.envs.registration", extra="textarena").ENV_REGISTRY)
        self.players = 1 if name_of(self.game) in ONE_PLAYER else 2
        if seat is not None and (opponent == SELF or not 0 <= seat < self.players):
            raise ValueError(f"seat is {seat}, but must be from 0 to {self.players - 1}, and None if opponent is self.")
        if not 1 <= max_chars <= 4000:
            raise ValueError(f"max_chars is {max_chars}, but must be from 1 to 4000.")
        self.opponent = opponent
        self.seat = seat
        self.max_chars = max_chars
        self._opponent = None if opponent == SELF else _opponent(opponent)
        self.observation_space = spaces.Text(_MOST_CHARS, min_length=0, charset=PRINTABLE)
        self.action_space = spaces.Text(max_chars, min_length=0, charset=PRINTABLE)
        self._game: Any = None
        # Generators that replace the global generators during the game; forks find the generators here and reseed them.
        self._python, self._numpy = random.Random(0), np.random.RandomState(0)
        self._side = 0
        self._rules: dict[int, str] = {}
        self._told: dict[int, list[str]] = {}
        self._turns: list[int] = []
        self._bad_rewards = 0
        self._draw = random.Random(0)

    @property
    def system_prompt(self) -> str:
        """The first text of the game to the seat whose turn it is."""
        return self._rules.get(self._side, "")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode with a new instance of the game, since a used instance contains text of earlier episodes."""
        super().reset(seed=seed)
        self._draw = random.Random(int(self.np_random.integers(2**31)))
        seat = int(self.np_random.integers(self.players)) if self.seat is None else self.seat
        for _ in range(_STARTS):
            self._side = seat
            self._rules, self._told = {}, {seat: [] for seat in range(self.players)}
            self._turns, self._bad_rewards = [0] * self.players, 0
            start = int(self.np_random.integers(2**31))
            with self._own_random(start):
                self._game = self._textarena.make(self.game)
                self._game.reset(num_players=self.players, seed=start)
            if not self._others_play():
                return self._hear(self._side) or _BEGIN, self._info(invalid=False)
        raise RuntimeError(
            f"the opponent ended {_STARTS} games of {self.game} before the first turn of seat {seat}; give seat 0, or "
            "an opponent that knows the game"
        )

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Send a reply to the game, and let the other seats play until it is the policy's turn again."""
        if self._game is None:
            raise gymnasium.error.ResetNeeded("The episode is over or has not begun: call reset() before step().")
        mover, game = self._side, self._game
        over = self._play(action)
        invalid = getattr(game.state, "error_count", 0) > 0
        over = over or self._others_play()
        rewards = self._rewards() if over else {}
        observation = self._hear(self._side)
        info = self._info(invalid or bool(over and _ended_invalid(game.state, mover)))
        reward = rewards.get(mover, 0.0)
        truncated = over and self.opponent != SELF and self._cut_off(rewards)
        if over:
            self._game = None
            best = max(rewards.values(), default=0.0)
            info["success"] = reward >= 1.0 if self.players == 1 else 0 < reward == best
            if self.players == 1:
                info["progression"] = min(max(reward, 0.0), 1.0)
            info["side_rewards"] = [rewards.get(seat, 0.0) for seat in range(self.players)]
        return observation, reward, over and not truncated, truncated, info

    def _info(self, invalid: bool) -> dict[str, Any]:
        return {
            "success": False,
            "invalid_action": invalid,
            "side": self._side,
            "side_turns": list(self._turns),
            "metrics": {"bad_rewards": float(self._bad_rewards)},
        }

    def _play(self, reply: str) -> bool:
        """Send a reply for the seat whose turn it is; return whether the game is over."""
        self._turns[self._game.state.current_player_id] += 1
        with self._own_random():
            over, _ = self._game.step(reply[: self.max_chars])
        return bool(over or self._game.state.done)

    def _others_play(self) -> bool:
        """Let the other seat play until it is the policy's turn; return whether the game ended."""
        state = self._game.state
        if self._opponent is None:
            self._side = state.current_player_id
            return False
        for _ in range(_MOST_REPLIES):
            seat = state.current_player_id
            if seat == self._side:
                return False
            self._hear(seat)
            if self._play(self._opponent([self._rules.get(seat, ""), *self._told[seat]], self._draw)):
                return True
        raise RuntimeError(f"the opponent had {_MOST_REPLIES} turns in a row in {self.game}")

    def _hear(self, seat: int) -> str:
        """Return the text that a seat received since its last turn, without the seat's own replies."""
        kinds, state = self._textarena.ObservationType, self._game.state
        if seat == state.current_player_id and not state.done:
            with self._own_random():
                _, new = self._game.get_observation()  # some games add text in this call
        else:
            new, state.observations[seat] = state.observations[seat], []
        rules = [text for _, text, kind in new if kind is kinds.PROMPT]
        if rules:
            self._rules[seat] = "\n".join(rules).strip()
        parts = []
        for sender, text, kind in new:
            if kind is kinds.PROMPT or (kind is kinds.PLAYER_ACTION and sender == seat):
                continue
            spoken = kind is kinds.PLAYER_ACTION
            parts.append(f"{state.role_mapping.get(sender, f'Player {sender}')}: {text}" if spoken else str(text))
        heard = "\n".join(parts).strip()
        if heard:
            self._told[seat].append(heard)
        return heard

    def _rewards(self) -> dict[int, float]:
        """Return the reward of each seat. Replace rewards that are not finite by 0, and count them."""
        given, _ = self._game.close()
        rewards = {}
        for seat, reward in (given or {}).items():
            number = float(reward) if isinstance(reward, int | float | np.number) else math.nan
            self._bad_rewards += not math.isfinite(number)
            rewards[int(seat)] = number if math.isfinite(number) else 0.0
        return rewards

    def _cut_off(self, rewards: Mapping[int, float]) -> bool:
        """Return whether the game ended at its turn limit, without a winner or loser."""
        state, name = self._game.state, name_of(self.game)
        limited = state.max_turns is not None and name not in LIMIT_IS_THE_END
        if not limited or state.turn < state.max_turns or max(rewards.values(), default=0.0) >= 1.0:
            return False
        if name in LOST and str(state.game_info[0].get("reason")).startswith(LOST[name]):
            return False
        return not any(_ended_invalid(state, seat) for seat in range(self.players))

    @contextmanager
    def _own_random(self, seed: int | None = None) -> Iterator[None]:
        """Replace the global random generators by the game's generators in a block, and discard the game's output."""
        if seed is not None:
            self._python.seed(seed)
            self._numpy.seed(seed)
        world = random.getstate(), np.random.get_state()
        try:
            random.setstate(self._python.getstate())
            np.random.set_state(self._numpy.get_state())
            with redirect_stdout(StringIO()):
                yield
        finally:
            self._python.setstate(random.getstate())
            self._numpy.set_state(np.random.get_state())
            random.setstate(world[0])
            np.random.set_state(world[1])


def _ended_invalid(state: Any, seat: int) -> bool:
    return bool(state.game_info.get(seat, {}).get("invalid_move"))


def _random_reply(texts: Sequence[str], draw: random.Random) -> str:
    """Return a bracketed word of the last text that has one, with a random number in place of each placeholder."""
    for text in reversed(texts):
        if words := _BRACKETS.findall(text):
            return _PLACEHOLDER.sub(lambda _: str(draw.randint(1, 3)), draw.choice(words))
    return ""


def _opponent(name: str) -> Opponent:
    """Return the opponent of this name.

    Raises:
        ValueError: there is no opponent of this name.
    """
    if name == "random":
        return _random_reply
    module, _, function = name.partition(":")
    try:
        found = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"opponent is {name!r}, but must be random, self or module:function ({error}).") from error
    if not callable(found):
        raise ValueError(f"opponent is {name!r}, which is not a function.")
    return found
