"""Each mistake of `tests/wrong_inputs.py` ends in one sentence with what to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.wrong_inputs import CASES, PAGE, Case, answer, prepare, taken_port

FIRST = (
    "key `lr_actr`",
    "class `SharedCritik`",
    "callback `C",
    "text for a n",
    "a key without",
    "an environment that r",
)


def marked(case: Case) -> object:
    quick = case.given.startswith(FIRST) or not case.config
    return pytest.param(case, id=case.given, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_a_mistake_gets_one_sentence(
    case: Case, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("lightning_agentrl.commands.main.keep_freed_memory", lambda: True)
    with taken_port() as port:
        code, said = answer(prepare(case, tmp_path, tiny_folder, port))
    sentences = [line for line in said.splitlines() if line.startswith("agentrl: ")]
    assert (code, len(sentences)) == (case.code, 1), said
    for part in case.says:
        assert part in said
    assert case.code == 1 or "Traceback" not in said


def test_the_page_has_every_mistake() -> None:
    """`python -m tests.wrong_inputs` writes it anew."""
    rows = [line.split(" | ")[0].removeprefix("| ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert rows == ["mistake", *(case.given for case in CASES)]
