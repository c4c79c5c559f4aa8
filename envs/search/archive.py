"""The archive: an invented world of names and facts, with pages about the facts and questions along chains of facts."""

import itertools
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Fact:
    """A fact: the `relation` of the thing `of` is the thing `to`. For example, the captain of a ship is a person."""

    of: str
    relation: str
    to: str


@dataclass(frozen=True)
class Archive:
    """An invented world.

    Args:
        facts: all facts.
        pages: name of a thing -> text of its page.
    """

    facts: tuple[Fact, ...]
    pages: Mapping[str, str]

    def chains(self, hops: int) -> Iterator[tuple[Fact, ...]]:
        """Yield all chains of `hops` facts in which each fact continues the previous fact and no thing occurs twice."""

        def longer(chain: tuple[Fact, ...]) -> Iterator[tuple[Fact, ...]]:
            if len(chain) == hops:
                yield chain
                return
            met = {fact.of for fact in chain}
            for fact in about[chain[-1].to]:
                if fact.to not in met:
                    yield from longer((*chain, fact))

        about: dict[str, list[Fact]] = {}
        for fact in self.facts:
            about.setdefault(fact.of, []).append(fact)
            about.setdefault(fact.to, [])
        for fact in self.facts:
            yield from longer((fact,))


def write_archive(random: np.random.Generator) -> Archive:
    """Return an archive with fixed names and random facts."""
    data = _data()
    kinds = data["kinds"]
    lines = [
        (name, kind["page"].format(name=name)) for kind in kinds.values() if "page" in kind for name in kind["names"]
    ]
    pages = {name: [line] for name, line in lines}
    facts = []
    for name, relation in data["relations"].items():
        names = kinds[relation["to"]]["names"]
        drawn = [names[int(number)] for number in random.permutation(len(names))]
        within = relation["of"] == relation["to"]  # order such things in a ring, so that none leads to itself
        ofs = [drawn[-1], *drawn[:-1]] if within else kinds[relation["of"]]["names"]
        for of, to in zip(ofs, itertools.cycle(drawn), strict=False):
            facts.append(Fact(of, name, to))
            pages[of].append(relation["says"].format(of=of, to=to))
    return Archive(tuple(facts), {name: " ".join(lines) for name, lines in pages.items()})


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads((resources.files("agentrl_envs.search") / "archive.toml").read_text(encoding="utf-8"))
