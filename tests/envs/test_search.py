"""Search: the tool finds the pages, the pages lead to the answer, and replies of any kind are read or refused."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_envs import baselines
from agentrl_envs.search.archive import write_archive
from agentrl_envs.search.bm25 import scores
from agentrl_envs.search.env import Search

ARCHIVE = write_archive(np.random.default_rng(0))


def test_bm25_is_the_formula() -> None:
    texts = ["the red cat", "the red red dog runs far", "a bird"]
    # rarity of "red": ln(1 + 1.5 / 2.5); mean length 11 / 3; saturation as in the formula with 1.2 and 0.75
    rarity = np.log(1 + 1.5 / 2.5)
    first = rarity * 1 * 2.2 / (1 + 1.2 * (0.25 + 0.75 * 3 / (11 / 3)))
    second = rarity * 2 * 2.2 / (2 + 1.2 * (0.25 + 0.75 * 6 / (11 / 3)))
    assert scores("Red!", texts) == pytest.approx([first, second, 0.0])
    assert scores("unknown", texts) == [0.0, 0.0, 0.0]
    assert scores("", texts) == [0.0, 0.0, 0.0]
    assert scores("word", []) == []


@settings(max_examples=20)
@given(st.permutations(["captain", "of", "grey", "heron"]), st.text(max_size=30))
def test_scores_do_not_depend_on_order_and_are_never_negative(words, text) -> None:
    pages = list(ARCHIVE.pages.values())
    assert scores(" ".join(words), pages) == pytest.approx(scores("captain of grey heron", pages))
    assert min(scores(text, pages)) >= 0


@pytest.mark.parametrize("seed", [0, 1])
def test_a_name_finds_its_own_page_first(seed) -> None:
    archive = write_archive(np.random.default_rng(seed))
    names, texts = list(archive.pages), list(archive.pages.values())
    assert [names[int(np.argmax(scores(name, texts)))] for name in names] == names


@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_chains_follow_facts_and_no_question_holds_its_answer(hops) -> None:
    chains = list(ARCHIVE.chains(hops))
    assert len(chains) > 100
    for chain in chains:
        met = [chain[0].of, *(fact.to for fact in chain)]
        assert len(set(met)) == hops + 1
        for fact, following in pairwise(chain):
            assert fact.to == following.of
        for fact in chain:
            assert fact.to in ARCHIVE.pages[fact.of]


@pytest.mark.parametrize("kwargs", [{}, {"hops": 4, "pages": 1, "fixed": False}])
def test_the_scripted_player_answers_by_searching(kwargs) -> None:
    result = baselines.solver_agent("Search-v0", range(30), **kwargs)
    assert result.success == 1.0
    assert result.mean_turns <= kwargs.get("hops", 2) + 1


def test_an_episode() -> None:
    env = Search(hops=1)
    first, info = env.reset(seed=0)
    assert first == "Nothing has been searched yet."
    fact = env._chain[0]
    assert info["question"] == f"Name the {fact.relation} of {fact.of}."
    assert env.question in env.system_prompt
    text, reward, terminated, _, info = env.step(f"I look it up.\n**Search:** {fact.of}\nPages: none\nanswer: nobody")
    assert (reward, terminated, info["invalid_action"]) == (0.0, False, False)
    assert info["executed_action"] == f"search: {fact.of}"
    assert text.startswith(f"Pages found:\n1. {ARCHIVE.pages[fact.of]}\n2. ")
    assert info["metrics"] == {"pages_found": 1.0}
    text, *_, info = env.step("What is this?")
    assert info["invalid_action"]
    assert "search:" in text
    text, reward, terminated, truncated, info = env.step(f"Answer: the {fact.to.upper()}.")
    assert (text, reward, terminated, truncated) == ("The answer is right.", 1.0, True, False)
    assert info["success"]


def test_a_wrong_answer_ends_and_the_limit_truncates() -> None:
    env = Search()
    env.reset(seed=1)
    text, reward, terminated, _, info = env.step("answer: nobody")
    assert (text, reward, terminated, info["success"]) == ("The answer is wrong.", 0.0, True, False)
    env.reset(seed=1)
    ends = [env.step("search: zzz")[:4] for _ in range(6)]
    assert ends[0][0] == "No page has any of these words."
    assert [end[2:] for end in ends] == [(False, False)] * 5 + [(False, True)]


def test_facts_of_every_episode_are_its_own_where_they_are_not_fixed() -> None:
    env = Search(fixed=False)
    pages = []
    for seed in (5, 6, 5):
        env.reset(seed=seed)
        pages.append(dict(env._archive.pages))
    assert pages[0] == pages[2] != pages[1]
    env = Search()
    questions = {env.reset(seed=seed)[1]["question"] for seed in range(40)}
    assert len(questions) > 20


@given(st.text(max_size=300) | st.text("search: \n*_`answer", max_size=300))
def test_any_reply_is_read_or_refused(reply) -> None:
    env = Search()
    env.reset(seed=0)
    text, reward, _, _, info = env.step(reply)
    assert env.observation_space.contains(text)
    assert reward == 0.0
    assert info["invalid_action"] == (info["executed_action"] == "")


@pytest.mark.long
def test_a_million_hostile_replies_are_read_or_refused() -> None:
    pieces = [
        "search:",
        "Answer :",
        "answer",
        ":",
        "\n",
        " ",
        "\t",
        "**",
        "`",
        ">",
        "<think>",
        "|",
        "\0",
        "\x1b[2J",
        "é",
        "搜索",
    ]
    pieces += ["the", "Grey Heron", "{question}", "%s", "<|im_end|>", "9" * 50, "\r", "\u2028", "search: ", "answer: "]
    generator, env = np.random.default_rng(0), Search()
    env.reset(seed=0)
    for number in range(100):
        for drawn in generator.integers(len(pieces), size=(10_000, 9)):
            action, valid = env.resolve_action("".join([pieces[place] for place in drawn]))
            assert valid == bool(action)
            assert not valid or action.startswith(("search: ", "answer: "))
        answer = env.step(action)
        assert env.observation_space.contains(answer[0])
        if answer[2] or answer[3]:
            env.reset(seed=number)


def test_a_huge_reply_is_no_work() -> None:
    env = Search()
    for reply in ("\n" * 10**6, "*" * 10**6, "search:" * 10**5, "search: " + "word " * 10**6):
        env.reset(seed=0)
        assert len(env.step(reply)[4]["executed_action"]) < 300


@pytest.mark.parametrize(
    ("kwargs", "sentence"), [({"hops": 0}, "1 to 4 hops, not 0"), ({"pages": 0}, "at least 1 page, not 0")]
)
def test_wrong_arguments(kwargs, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        Search(**kwargs)


def test_free_text_has_no_random_agent() -> None:
    with pytest.raises(ValueError, match="free text"):
        baselines.random_agent("Search-v0", range(1))


def rank_of(failures: int):
    """A search that fails so often before it works."""
    calls = []

    def rank(query, texts):
        calls.append(query)
        if len(calls) <= failures:
            raise ConnectionError("gone")
        return scores(query, texts)

    return rank, calls


@pytest.mark.parametrize(("failures", "tries", "given_up"), [(0, 1, False), (2, 3, False), (3, 3, True), (1, 1, True)])
def test_a_search_that_fails_is_tried_again_and_then_told(monkeypatch, failures, tries, given_up) -> None:
    own, calls = rank_of(failures)
    monkeypatch.setitem(sys.modules, "my_search", SimpleNamespace(rank=own))
    env = Search(rank="my_search:rank", tries=tries)
    assert not env.deterministic
    env.reset(seed=0)
    search = env.solver()()
    text, reward, terminated, _, info = env.step(search)
    assert (reward, terminated, info["invalid_action"]) == (0.0, False, False)
    assert info["metrics"] == {"pages_found": 0.0 if given_up else 0.5, "failed_searches": float(given_up)}
    assert ("1. " in text) != given_up
    assert len(calls) == min(failures + 1, tries)
    if given_up:
        assert env.step(search)[4]["metrics"] == {"pages_found": 0.5, "failed_searches": 1.0}


@pytest.mark.parametrize("scored", [[1.0], [float("nan")] * len(ARCHIVE.pages), None, ["a"] * len(ARCHIVE.pages)])
def test_a_search_that_gives_nonsense_has_failed(monkeypatch, scored) -> None:
    monkeypatch.setitem(sys.modules, "my_search", SimpleNamespace(rank=lambda query, texts: scored))
    env = Search(rank="my_search:rank")
    env.reset(seed=0)
    assert env.step(env.solver()())[4]["metrics"]["failed_searches"] == 1.0


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [({"tries": 0}, "not 0 times"), ({"rank": "bm25"}, "rank must name"), ({"rank": "math:rank"}, "no function rank")],
)
def test_a_search_of_ones_own_must_be_there(kwargs, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        Search(**kwargs)
