"""What is shown of a certificate is harmless, whatever an environment says."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from lightning_agentrl.tools.check_env.certificate import Certificate
from lightning_agentrl.tools.check_env.findings import RULES, Log
from lightning_agentrl.tools.check_env.page import lines, page
from lightning_agentrl.tools.check_env.texts import expression, mined, tokens

BAD = "</pre></section><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[2J\ud800 $title ${body}"


def certificate() -> Certificate:
    log = Log()
    log.add("raises", BAD, 3, [BAD, "9" * 5000])
    log.add("learn.floor", "nothing")
    trained = {
        "said": BAD,
        "verdict": "climbs",
        "curves": [[0.0, 0.5], [0.1, 0.6], [0.2, 0.4]],
        "points": [{"iteration": 1, "mean": 0.1, "low": -0.2, "high": 0.4}],
        "random": {"mean": 0.2, "low": 0.1, "high": 0.3},
    }
    found = [one.plain() for one in log.findings.values()]
    return Certificate(BAD, {"a": BAD}, found, {"earned": [{"policy": BAD, "return": 1, "episodes": 2}]}, train=trained)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_no_text_becomes_markup() -> None:
    shown = page(certificate())
    tags = Tags()
    tags.feed(shown)
    assert not tags.found & {"script", "img", "iframe"}
    assert not [name for name in tags.attributes if name.startswith("on")]
    assert "default-src 'none'" in shown
    assert shown.encode()
    assert "svg" in tags.found


def test_a_terminal_gets_no_escape_codes() -> None:
    shown = "\n".join(lines(certificate()))
    assert "\x1b" not in shown
    assert shown.encode()


def test_long_actions_are_short_expressions_that_mean_the_same() -> None:
    for text in ("9" * 5000, "ab " * 700 + "a", "left", "\ud800'\"", "x" * 61, BAD * 3):
        assert eval(expression(text)) == text
    assert len(expression("word " * 4000)) < 20


def test_replies_are_mined_from_texts() -> None:
    assert mined("Say [up] or [down].") == ["[up]", "[down]"]
    assert mined('Say "up" or `down`; don\'t wait.') == ["up", "down"]
    assert {"3", "7", "number"} <= set(mined("Guess a number, 3 to 7"))
    assert tokens("walking 123, ok") == 1 + 3 + 1 + 1


def test_every_rule_says_how_to_mend() -> None:
    assert all(rule.mend and not re.search(r"[.]$", rule.mend) for rule in RULES.values())
