"""Random and hostile replies through everything that reads replies: no exception, and no action outside the set.

The million for each reader, in ten parts: `pytest -m long tests/test_hostile_replies.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

import gymnasium
import pytest

import agentrl_envs  # noqa: F401 - registers the ids
from agentrl_envs.search.env import Search
from agentrl_envs.text_env import TextEnv
from agentrl_envs.textarena.env import _random_reply
from lightning_agentrl.episodes.contract import Contract
from lightning_agentrl.episodes.tasks import ExactMatch, PatternMatch
from lightning_agentrl.metrics.invalid_replies import Invalid, judge
from lightning_agentrl.prompts.memory import kept_notes
from lightning_agentrl.prompts.parser import RawParser, TolerantParser, named, spellings
from lightning_agentrl.tools.check_env.texts import HOSTILE
from tests.envs.hostile import REPLIES

FEW, MANY, PARTS = 1500, 100_000, 10
Read = Callable[[str], None]

FORMAT = (
    *("THINK:", "ACTION:", "Action -", "**Action:**", "### ACTION", "<think>", "</think>", "<action>", "</action>"),
    *("actions", "Thought", "reasoning:", "search:", "answer:", "NOTE:", "Answer:", "not", "or", "and", "then"),
    *("*", "_", "`", "#", ">", "-", "1.", "2)", "(", ")", "[", "]", "{", "}", '"', "'", "’", "“", "->", "→", "：", ":"),
    *(",", "/", "|", "||"),
    *("\n", "\r\n", "\r", "\v", "\f", "\x1c", "\x85", "\u2028", "\t", " ", "\u00a0", "\u200b", "\ufeff", "\x00"),
    *("İ", "ı", "ß", "ſ", "K", "ﬁ", "²", "٣", "一", "é", "e\u0301", "🙂", "\ud800", "\udfff", "\u202e", "\U0010ffff"),
)
CHANGES: tuple[Callable[[str], str], ...] = (
    *(str.upper, str.title, str.casefold, str.swapcase),
    lambda text: text.replace(" ", "_"),
    lambda text: text.replace(" ", "-"),
    lambda text: text[1:],
    lambda text: text[:-1],
    lambda text: f"**{text}**.",
    lambda text: f"{text} ({text})",
)


def replies(words: Sequence[str], count: int, draw: random.Random) -> Iterator[str]:
    """Yield known hostile replies, and then mixtures of what formats, actions and alphabets are made of."""
    known = (*HOSTILE, *REPLIES)
    yield from known
    pieces = (*FORMAT, *words, *words)
    for _ in range(count - len(known)):
        kind = draw.random()
        if kind < 0.6:
            parts = draw.choices(pieces, k=draw.randrange(1, 9))
            reply = draw.choice((" ", " ", "", "\n")).join(parts)
        elif kind < 0.85:
            said = draw.choice(CHANGES)(draw.choice(words))
            reply = draw.choice(("", "", "ACTION: ", "Action - ", "THINK: so.\nACTION: ")) + said
        elif kind < 0.998:
            most = draw.choice((0x80, 0x250, 0x3000, 0x110000))
            reply = "".join(map(chr, draw.choices(range(most), k=draw.randrange(30))))
        else:
            reply = draw.choice(pieces) * draw.randrange(200, 2000)
        yield reply


def in_an_environment(name: str, **kwargs: object) -> tuple[Read, Sequence[str]]:
    """What the trainer's parser and the environment itself take a reply for."""
    env = gymnasium.make(f"agentrl_envs:{name}", disable_env_checker=True, **kwargs).unwrapped
    assert isinstance(env, TextEnv)
    actions, aliases, parser = list(env.actions), dict(env.aliases), TolerantParser()

    def read(reply: str) -> None:
        parsed = parser.parse(reply, actions, aliases)
        assert parsed.action is None or parsed.action in actions
        assert parsed.thought in reply
        assert 0 <= parsed.action_start <= len(reply)
        executed, valid = env.resolve_action(reply)
        assert executed in actions
        assert valid or executed == env.default_action
        if parsed.action is not None:
            assert env.resolve_action(parsed.action) == (parsed.action, True)

    return read, (*actions, *aliases)


def by_inspect() -> tuple[Read, Sequence[str]]:
    """With an alias that `agentrl inspect` suggests, it is read as that action, by itself or where it was said."""
    room = Contract(actions=dict.fromkeys(("turn left", "turn right", "go forward"), ""), aliases={"go": "go forward"})
    actions, aliases, parser, known = (
        list(room.actions),
        room.aliases,
        TolerantParser(),
        spellings(room.actions, room.aliases),
    )

    def read(reply: str) -> None:
        if parser.parse(reply, actions, aliases).action is not None:
            return
        kind, alias, meant = judge(named(reply), False, known)
        assert kind in Invalid
        assert bool(alias) == bool(meant)
        if alias:
            assert meant in [parser.parse(text, actions, {**aliases, alias: meant}).action for text in (alias, reply)]
            assert alias not in known

    return read, (*actions, *aliases, "please turn left", "trun right", "never")


def as_it_is() -> tuple[Read, Sequence[str]]:
    def read(reply: str) -> None:
        assert RawParser().parse(reply, [], {}).action == (reply.strip() or None)

    return read, ("left", " ")


def in_search() -> tuple[Read, Sequence[str]]:
    env = Search(max_turns=10**9)
    env.reset(seed=0)
    names = ("Grey Heron", "captain of Grey Heron", "birthplace", env.question)

    def read(reply: str) -> None:
        call, valid = env.resolve_action(reply)
        assert call.startswith(("search: ", "answer: ")) if valid else call == ""
        assert len(call) <= 210
        text, reward, terminated, _, _ = env.step(reply)
        assert env.observation_space.contains(text)
        assert reward in (0.0, 1.0)
        assert terminated == call.startswith("answer: ")
        if terminated:
            env.reset()

    return read, ("search: captain", "Search:", "**answer:** the", *names)


def in_notes() -> tuple[Read, Sequence[str]]:
    latest: list[str] = []

    def read(reply: str) -> None:
        latest[:] = [*latest[-3:], reply]
        notes = kept_notes(latest, 2)
        assert len(notes) <= 2
        assert all(note and len(note) <= 120 and len(note.splitlines()) == 1 for note in notes)

    return read, ("NOTE: the key is red", "note: a door", "NOTE:", "the key")


def in_scorers() -> tuple[Read, Sequence[str]]:
    scorers = (ExactMatch(), PatternMatch(r"answer:\s*(-?\d+)?"), PatternMatch(r"\d+|$"))

    def read(reply: str) -> None:
        for scorer in scorers:
            for answer in ("5", None):
                assert scorer.score("2 + 3?", reply, answer) in (0.0, 1.0)

    return read, ("5", "answer: 5", "Answer:", "-5")


def in_reasoning_gym() -> tuple[Read, Sequence[str]]:
    pytest.importorskip("reasoning_gym")
    kwargs = {"dataset": "leg_counting", "config": {"size": 10}, "answer_after": "Answer:"}
    env = gymnasium.make("agentrl_envs:ReasoningGym-v0", disable_env_checker=True, **kwargs).unwrapped
    env.reset(seed=0)

    def read(reply: str) -> None:
        _, reward, terminated, _, info = env.step(reply)
        assert math.isfinite(float(reward))
        assert 0 <= float(reward) <= 1
        assert terminated
        assert info["invalid_action"] == ("Answer:" not in reply)
        env.reset()

    return read, ("Answer: 5", "Answer:", "5")


def by_an_opponent() -> tuple[Read, Sequence[str]]:
    """The opponent of a game for two reads what the policy said."""
    draw = random.Random(0)

    def read(reply: str) -> None:
        answer = _random_reply(["[play X]", reply], draw)
        assert answer.startswith("[")
        assert answer.endswith("]")

    return read, ("[1 2]", "[play X <number>]", "[]", "[[A]]")


READERS: Mapping[str, Callable[[], tuple[Read, Sequence[str]]]] = {
    "babyai": lambda: in_an_environment("BabyAIText-GoTo-v0"),
    "babyai-small": lambda: in_an_environment("BabyAIText-GoToObjS6-v0"),
    "baba": lambda: in_an_environment("BabaIsAI-v0"),
    "crafter": lambda: in_an_environment("CrafterText-v0"),
    "frozen-lake": lambda: in_an_environment("FrozenLakeText-v0"),
    "sokoban": lambda: in_an_environment("SokobanText-v0"),
    "guess-number": lambda: in_an_environment("GuessNumber-v0", highest=9),
    "bandit": lambda: in_an_environment("Bandit-v0"),
    "discrete": lambda: in_an_environment(
        "Discrete-v0", game="CartPole-v1", describe=str, actions=["push", "push right"], aliases={"<-": "push"}
    ),
    "raw": as_it_is,
    "inspect": by_inspect,
    "search": in_search,
    "notes": in_notes,
    "scorers": in_scorers,
    "reasoning-gym": in_reasoning_gym,
    "opponent": by_an_opponent,
}


@pytest.mark.parametrize("name", READERS)
def test_whatever_a_reply_says_it_is_read(name: str) -> None:
    read_all(name, FEW, random.Random(name))


@pytest.mark.parametrize("reply", ["] Action - , trun right turn left / { 1.", "/-></action>Action -||turn right"])
def test_no_alias_is_suggested_that_the_parser_takes_for_its_key(reply: str) -> None:
    """Found by the million."""
    by_inspect()[0](reply)


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", READERS)
def test_a_million_replies_are_read(name: str, part: int) -> None:
    read_all(name, MANY, random.Random(f"{name} {part}"))


def read_all(name: str, count: int, draw: random.Random) -> None:
    """Have so many replies read, and say which one could not be."""
    read, words = READERS[name]()
    for number, reply in enumerate(replies(words, count, draw)):
        try:
            read(reply)
        except Exception as error:
            raise AssertionError(f"reply {number}: {reply[:300]!r}") from error
