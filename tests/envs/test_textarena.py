"""Games of TextArena: repeatable wherever they run, cleared of what they leave behind, and honest about their ends."""

from __future__ import annotations

import random
import re
from typing import Any

import gymnasium
import numpy as np
import pytest

pytest.importorskip("textarena", reason="of an extra")

from agentrl_envs.textarena.games import BROKEN, ONE_PLAYER, TWO_PLAYERS
from lightning_agentrl.episodes.environment import Environment
from tests.envs.hostile import REPLIES


def make(game: str, **kwargs: Any) -> gymnasium.Env:
    return gymnasium.make("agentrl_envs:TextArena-v0", game=game, disable_env_checker=True, **kwargs)


def play(env: gymnasium.Env, seed: int, other: gymnasium.Env | None = None, most: int = 60) -> list[Any]:
    """A random episode; between its turns another environment plays and the world draws random numbers."""
    draw, answers = random.Random(seed), []
    observation, info = env.reset(seed=seed)
    answers.append((observation, info, env.unwrapped.system_prompt))
    while len(answers) < most:
        if other is not None:
            if len(answers) % 8 == 1:
                other.reset(seed=len(answers))
                other.step("[1]")
            random.seed(len(answers))
            np.random.random()
        known = "\n".join(str(entry[0]) for entry in answers) + env.unwrapped.system_prompt
        words = re.findall(r"\[[^\[\]\n]{1,20}\]", known) or ["[1]"]
        answers.append(env.step(draw.choice(words[-12:])))
        if answers[-1][2] or answers[-1][3]:
            break
    return answers


QUICK = ("2048", "KuhnPoker")  # both draw in their steps
GAMES = [game if game in QUICK else pytest.param(game, marks=pytest.mark.long) for game in (*ONE_PLAYER, *TWO_PLAYERS)]


@pytest.mark.parametrize("game", GAMES)
def test_equal_seed_and_replies_are_an_equal_episode(game):
    """In a new instance, in a used one, and between the turns of another; the world's random numbers are left alone."""
    settings = {} if game in ONE_PLAYER else {"opponent": "self"}
    used, other = make(game, **settings), make(game, **settings)
    play(used, 99)
    for seed in range(2):
        before = random.getstate(), np.random.get_state()[1].tolist()
        first = play(make(game, **settings), seed)
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before
        assert play(used, seed) == first
        assert play(make(game, **settings), seed, other) == first


def test_a_new_episode_tells_nothing_of_the_last_one():
    env = make("GuessTheNumber")
    for seed in range(3):
        observation, _ = env.reset(seed=seed)
        assert "7" not in observation
        assert "[1]" not in observation
        answer = env.step("My guess is [7]")[0]
        assert "My guess" not in answer
    assert "between 1 and 20" in env.unwrapped.system_prompt


@pytest.mark.parametrize("game", ["GuessTheNumber", "TicTacToe", 2048])
def test_hostile_replies_are_played(game):
    env = make(game)
    for reply in REPLIES:
        env.reset(seed=1)
        for _ in range(3):
            observation, reward, terminated, truncated, info = env.step(reply)
            assert isinstance(observation, str)
            assert isinstance(reward, float)
            assert info["metrics"]["bad_rewards"] == 0
            if terminated or truncated:
                with pytest.raises(gymnasium.error.ResetNeeded):
                    env.step(reply)
                break


def test_wins_losses_limits_and_invalid_replies_are_told_apart():
    env = make("GuessTheNumber")
    ends = {}
    for seed in range(4):
        env.reset(seed=seed)
        number = env.unwrapped._game.state.game_state["game_number"]
        wrong = [guess for guess in range(1, 21) if guess != number]
        _, _, *_, info = env.step("I do not know")
        assert (info["invalid_action"], info["success"]) == (True, False)
        _, _, *_, info = env.step(f"[{wrong[0]}]")
        assert not info["invalid_action"]
        ends["won"] = env.step(f"[{number}]")
        env.reset(seed=seed)
        for guess in wrong:
            ends["limit"] = env.step(f"[{guess}]")
            if ends["limit"][2] or ends["limit"][3]:
                break
        env.reset(seed=seed)
        env.step("?")
        ends["invalid"] = env.step("?")
        assert ends["won"][1:4] == (1.0, True, False)
        assert ends["won"][-1]["success"]
        assert ends["limit"][2:4] == (False, True)
        assert not ends["limit"][-1]["success"]
        assert ends["invalid"][2:4] == (True, False)
        assert ends["invalid"][-1]["invalid_action"]
        assert [ends[how][-1]["progression"] for how in ("won", "limit")] == [1.0, ends["limit"][1]]
        assert 0 < ends["limit"][1] < 1  # the nearest guess is a part of the task


def test_a_loss_in_the_turn_of_the_limit_is_a_loss():
    """Down and up again at the edge of a lake, then into a hole in the last turn."""
    env = make("FrozenLake")
    env.reset(seed=1)
    state = env.unwrapped._game.state
    assert [row[:3] for row in state.game_state["grid"][:2]] == [[" ", " ", "H"]] * 2
    for turn in range(state.max_turns - 2):
        *_, terminated, truncated, _ = env.step("[down]" if turn % 2 == 0 else "[up]")
        assert not terminated
        assert not truncated
    env.step("[right]")
    *_, terminated, truncated, info = env.step("[right]")
    assert (terminated, truncated, info["success"]) == (True, False, False)


def said_nothing(texts: list[str], draw: random.Random) -> str:
    """A scripted opponent that bids for nothing."""
    return "I pass."


@pytest.mark.parametrize(
    ("kwargs", "reply", "turns"),
    [
        ({"game": "Set"}, "[1, 2, 3]", 20),  # no set: a score of 0, which is final
        ({"game": "SimpleBlindAuction", "opponent": f"{__name__}:said_nothing", "seat": 0}, "I pass.", 4),  # a draw
    ],
)
def test_a_game_that_its_rules_end_at_the_limit_is_over(kwargs, reply, turns):
    env = make(**kwargs)
    env.reset(seed=0)
    ends = [env.step(reply)[2:4] for _ in range(turns)]
    assert ends == [(False, False)] * (turns - 1) + [(True, False)]


def test_progress_without_play_is_what_the_game_itself_pays_and_no_success():
    """The guess that the rules of Mastermind show: as the docs say, it earns what the game pays for it, no more."""
    env, earned = make("Mastermind"), []
    for seed in range(60):
        env.reset(seed=seed)
        assert "[2 1 4 5]" in env.unwrapped.system_prompt
        code = env.unwrapped._game.state.game_state["secret_code"]
        for _ in range(3):  # it may be repeated once
            _, reward, terminated, _, info = env.step(env.unwrapped.system_prompt)
            if terminated:
                break
        black = sum(a == b for a, b in zip(code, (2, 1, 4, 5), strict=True))
        common = len(set(code) & {2, 1, 4, 5})
        assert (terminated, reward) == (True, (black + (common - black) / 2) / 4)
        assert info["success"] is (black == 4)
        earned.append(reward)
    assert 0.35 < sum(earned) / len(earned) < 0.5


def first_free(texts: list[str], draw: random.Random) -> str:
    """A scripted opponent: the first of the moves that are named last."""
    return re.findall(r"'(\[\d\])'", texts[-1])[0]


@pytest.mark.parametrize("opponent", ["random", f"{__name__}:first_free"])
def test_an_opponent_plays_the_other_seat(opponent):
    results = set()
    seats = set()
    for seed in range(12):
        env = make("TicTacToe", opponent=opponent)
        observation, info = env.reset(seed=seed)
        seats.add(info["side"])
        assert f"You are Player {info['side']}" in env.unwrapped.system_prompt
        assert observation.count("Current Board") == 1 + info["side"]  # who comes second also saw the first board
        over, draw = False, random.Random(seed)
        while not over:
            move = draw.choice(re.findall(r"'(\[\d\])'", observation.split("Current Board")[-1]))
            observation, reward, terminated, truncated, info = env.step(move)
            over = terminated or truncated
        assert not info["invalid_action"]
        assert info["side_rewards"][info["side"]] == reward
        assert sum(info["side_rewards"]) == 0
        assert info["success"] == (reward > 0)
        results.add(reward)
    assert seats == {0, 1}
    assert {1.0, -1.0} <= results


def test_both_seats_may_be_left_to_the_policy():
    env = make("TicTacToe", opponent="self")
    observation, info = env.reset(seed=0)
    for turn, cell in enumerate([0, 3, 1, 4, 2]):
        assert info["side"] == turn % 2
        assert info["side_turns"] == [(turn + 1) // 2, turn // 2]
        assert f"You are Player {turn % 2}" in env.unwrapped.system_prompt
        assert observation.rsplit("Current Board", 1)[1].count("X") == turn // 2
        observation, reward, terminated, truncated, info = env.step(f"[{cell}]")
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["side_rewards"] == [1.0, -1.0]
    assert info["success"]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"game": "Mastermint"}, "no game 'Mastermint'"),
        ({"game": "Mastermind-v0-harder"}, "known: .*Mastermind-v0-hard"),
        ({"game": "Taboo"}, "for one or two"),
        ({"game": "TicTacToe", "opponent": "nobody"}, "opponent is 'nobody'"),
        ({"game": "TicTacToe", "opponent": "agentrl_envs:nobody"}, "opponent is 'agentrl_envs:nobody'"),
        ({"game": "TicTacToe", "seat": 2}, "seat is 2"),
        ({"game": "TicTacToe", "seat": 0, "opponent": "self"}, "seat is 0"),
        ({"game": "TicTacToe", "max_chars": 5000}, "max_chars is 5000"),
        *(({"game": f"{game}-v0"}, f"{game} of TextArena .*not supported") for game in BROKEN),
    ],
)
def test_games_that_cannot_be_played_are_refused_by_name(kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(**kwargs)


@pytest.mark.slow
def test_a_policy_plays_both_seats_in_a_process(tiny_folder):
    from lightning_agentrl.rollout import EnvConfig, RawParser, Session, SidesInteraction
    from tests.rollout.scripted import Scripted, workplace

    sides = SidesInteraction(max_reply_tokens=4, parser=RawParser(), invalid_penalty=0.0)
    config = EnvConfig("agentrl_envs:TextArena-v0", {"game": "TicTacToe", "opponent": "self"})
    with workplace(tiny_folder, [Scripted()], interaction=sides) as place:
        worker = config.make_worker(place.executor)
        old = place.sessions[0]
        turns = place.episode(Session(0, worker, old.episode_seed, place.renderer, old.memory))
        worker.close()
    first = [turn for turn in turns if turn.episode == 0]
    assert [turn.index for turn in first] == list(range(len(first)))
    assert "Current Board" in turns[0].observation
    assert turns[-1].terminated
    assert turns[-1].reward == -1.0  # an untrained policy names no cell, twice
    assert not turns[-1].valid


@pytest.mark.slow
def test_a_game_may_be_served_from_its_process():
    from lightning_agentrl.commands.serve_env import environment_app
    from lightning_agentrl.episodes.recipe import Recipe
    from tests.envs.servers import serving

    local, episodes = make("2048"), []
    with serving(environment_app(Recipe("agentrl_envs:TextArena-v0", {"game": "2048"}, "env"), 1)) as url:
        there = gymnasium.make("agentrl_envs:OpenEnv-v0", url=url, disable_env_checker=True)
        for env in (local, there):
            observation, _ = env.reset(seed=4)
            turns = [(observation, env.unwrapped.system_prompt, env.unwrapped.free_text)]
            for reply in ("[up]", "[left]", "[down]", "[right]"):
                turns.append(env.step(reply)[:4])
                if turns[-1][2]:
                    break
            episodes.append(turns)
        there.close()
    assert episodes[0] == episodes[1]


def test_a_fork_draws_other_random_numbers_in_the_game():
    env = Environment(lambda: make("2048"), alone=True)
    futures = set()
    for seed in range(4):
        env.reset(3)
        env.step("[up]")
        env.renew(seed)
        futures.add(tuple(env.step(f"[{move}]").observation for move in ("left", "down", "right")))
        assert env.drew()
    assert len(futures) > 1
