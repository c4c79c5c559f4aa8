"""The Search environment: a question, a search tool, an answer."""

import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from agentrl_envs.search.archive import Archive, Fact, write_archive
from agentrl_envs.search.bm25 import scores, words
from agentrl_envs.text_env import TextEnv
from agentrl_envs.tools import ToolError, find_function, tried
from agentrl_envs.wording import read_wording

_WORDING = read_wording("agentrl_envs.search")
_CALL = re.compile(r"^[ \t>*_`\"'#-]{0,8}(search|answer)[ *_`]{0,4}:(.*)", re.IGNORECASE | re.MULTILINE)
_SAID_CHARS = 200
_ARTICLES = {"a", "an", "the"}


class Search(TextEnv):
    """Answer a question with pages of an archive that `search: words` finds; a right answer pays 1, a wrong answer 0.

    The whole reply is the action. Only the first line that begins with `search:` or `answer:` counts, so that results
    that a model invents after its own search are ignored. A reply without such a line is an invalid action, which the
    next observation reports. All facts in the archive are invented.

    Args:
        hops: number of facts from the question to the answer, 1 to 4, each on its own page.
        pages: largest number of pages that a search shows.
        fixed: whether all episodes have the same facts. False draws new facts per episode, to prevent memorizing.
        max_turns: turns after which an episode is truncated, by default 2 * hops + 2.
        rank: search function in place of BM25, as `module:function`: takes the query and the texts of all pages, and
            returns a score for each text, 0 for a text that does not match. With `rank`, the environment declares that
            its episodes cannot be repeated.
        tries: number of attempts for a search that raises an error, 1 or more; then the agent learns that it failed.
    """

    free_text = True
    actions = _WORDING.actions
    default_action = _WORDING.default_action

    def __init__(
        self,
        hops: int = 2,
        pages: int = 2,
        fixed: bool = True,
        max_turns: int | None = None,
        rank: str | None = None,
        tries: int = 3,
    ) -> None:
        super().__init__()
        if not 1 <= hops <= 4:
            raise ValueError(f"A question needs 1 to 4 hops, not {hops}.")
        if pages < 1:
            raise ValueError(f"A search shows at least 1 page, not {pages}.")
        if tries < 1:
            raise ValueError(f"A search is tried at least once, not {tries} times.")
        self._rank: Callable[[str, Sequence[str]], Sequence[float]] = (
            scores if rank is None else find_function(rank, "rank")
        )
        self.deterministic = rank is None
        self.tries = tries
        self._failed = 0
        self.hops = hops
        self.pages = pages
        self.fixed = fixed
        self.max_turns = 2 * hops + 2 if max_turns is None else max_turns
        self._archive: Archive
        self._chain: tuple[Fact, ...] = ()
        self._shown: set[str] = set()
        self._text = ""

    @property
    def question(self) -> str:
        """The question of the current episode, such as "Name the birthplace of the captain of Grey Heron."."""
        thing = self._chain[0].of
        for fact in self._chain:
            thing = _WORDING.texts["step"].format(relation=fact.relation, thing=thing)
        return _WORDING.texts["question"].format(thing=thing)

    @property
    def system_prompt(self) -> str:
        """Text with the two tools and the question."""
        return _WORDING.system_prompt.format(question=self.question)

    def resolve_action(self, text: str) -> tuple[str, bool]:
        """Return the first call in a reply as `search: words` or `answer: name`, and whether the reply has a call."""
        for call in _CALL.finditer(text):
            said = call[2].strip(" \t*_`")[:_SAID_CHARS]
            if words(said):
                return f"{call[1].lower()}: {said}", True
        return "", False

    def metrics(self) -> dict[str, float]:
        """Return the share of needed pages that were found, and the number of failed searches of `rank`."""
        found = {"pages_found": len(self._needed & self._shown) / self.hops}
        return found if self.deterministic else {**found, "failed_searches": float(self._failed)}

    def extra_info(self) -> dict[str, Any]:
        """Return the question."""
        return {"question": self.question}

    def solver(self) -> Callable[[], str]:
        """Return a player that searches for each page of the chain that it has not seen, then answers."""

        def player() -> str:
            unseen = [fact.of for fact in self._chain if fact.of not in self._shown]
            return f"search: {unseen[0]}" if unseen else f"answer: {self._chain[-1].to}"

        return player

    @property
    def _needed(self) -> set[str]:
        return {fact.of for fact in self._chain}

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self._archive = _fixed_archive() if self.fixed else write_archive(self.np_random)
        chains = list(self._archive.chains(self.hops))
        self._chain = chains[int(self.np_random.integers(len(chains)))]
        self._shown = set()
        self._failed = 0
        self._text = _WORDING.texts["begin"]

    def _act(self, action: str) -> tuple[float, bool]:
        tool, _, said = action.partition(": ")
        if tool == "answer":
            right = _plain(said) == _plain(self._chain[-1].to)
            self._text = _WORDING.texts["right" if right else "wrong"]
            return float(right), True
        self._text = self._found(said) if tool == "search" else _WORDING.texts["unreadable"]
        return 0.0, False

    def _found(self, query: str) -> str:
        names, texts = list(self._archive.pages), list(self._archive.pages.values())
        try:
            fits = tried(lambda: self._fits(query, texts), self.tries)
        except ToolError:
            self._failed += 1
            return _WORDING.texts["failed"]
        best = sorted((place for place, fit in enumerate(fits) if fit > 0), key=lambda place: (-fits[place], place))
        shown = [names[place] for place in best[: self.pages]]
        self._shown |= set(shown)
        if not shown:
            return _WORDING.texts["no_results"]
        pages = "\n".join(f"{number}. {self._archive.pages[name]}" for number, name in enumerate(shown, start=1))
        return _WORDING.texts["results"].format(pages=pages)

    def _fits(self, query: str, texts: list[str]) -> list[float]:
        fits = [float(fit) for fit in self._rank(query, texts)]
        if len(fits) != len(texts) or not all(map(math.isfinite, fits)):
            raise ValueError(f"a search must give a finite score for each of {len(texts)} pages")
        return fits

    def _observe(self) -> tuple[str, str]:
        return self._text, ""


@cache
def _fixed_archive() -> Archive:
    return write_archive(np.random.default_rng(0))


def _plain(name: str) -> list[str]:
    return [word for word in words(name) if word not in _ARTICLES]
