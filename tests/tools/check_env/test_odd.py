"""Odd values and odd needs of an environment: what is wrong is said, and what is not is no error."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from lightning_agentrl.tools.check_env.certificate import certify
from lightning_agentrl.tools.check_env.findings import Log
from tests.tools.check_env.examined import exam_of, examined

ODD = "tests.tools.check_env.odd:Odd-v0"


def odd(what: str) -> Log:
    return examined(ODD, 10.0, what=what)


@pytest.fixture(autouse=True)
def signals_as_they_were() -> Iterator[None]:
    """One of the games ignores SIGUSR1, in this process too."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "check"),
    [
        ("huge reward", "reward.finite"),  # a float, but none that training takes
        ("endless number", "reward.finite"),
        ("arrays", "ends.type"),
        ("sealed text", "contract.values"),
        ("cannot be made", "contract.make"),
        ("signals", "replay.thread"),
        ("bound to a thread", "replay.thread"),
    ],
)
def test_an_odd_value_is_an_error_of_its_own_and_ends_no_exam(what: str, check: str) -> None:
    log = odd(what)
    assert [name for name, one in log.findings.items() if one.severity == "error"] == [check]
    assert check == "contract.make" or "what episodes have in common" not in log.cut


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        *("", "no words", "large info", "numbered info", "large number", "narrow space", "no list of modes"),
        *("exits after the end", "signals in a process"),
    ],
)
def test_what_training_can_do_with_is_no_error(what: str) -> None:
    log = odd(what)
    assert not [name for name, one in log.findings.items() if one.severity != "notice"]
    assert log.cut == {}


def test_a_win_at_the_limit_of_gymnasiums_wrapper_is_a_win() -> None:
    exam = exam_of("tests.tools.check_env.odd:OddAndShort-v0", 10.0)
    assert not [name for name, one in exam.log.findings.items() if name.startswith("ends.")]
    assert exam.limit == 3


@pytest.mark.slow
def test_a_step_after_the_end_that_hangs_is_told_in_time() -> None:
    """The step would come back after 1000 seconds, which is no finding."""
    assert "did not return" in odd("hangs after the end").findings["ends.after"].said


def test_every_instance_is_closed() -> None:
    """Else threads that `close` ends go on, and whoever ends them is told so in vain."""
    before = threading.active_count()
    odd("thread")
    assert threading.active_count() == before


@pytest.mark.slow
@pytest.mark.parametrize("what", ["helper", "helper that stays"])
def test_a_process_that_an_environment_forks_holds_nothing_up(what: str) -> None:
    """It holds the pipe of the exam open. An exam that waited for the pipe to close would be cut by the cap."""
    certificate = certify(ODD, {"what": what}, seconds=10.0, cap=60.0)
    assert certificate.passed
    assert certificate.cut == {}
    left = [one["said"] for one in certificate.findings if one["check"] == "left.threads"]
    assert bool(left) == (what == "helper that stays")


@pytest.mark.slow
def test_bytes_that_are_no_text_hold_nothing_up() -> None:
    certificate = certify(ODD, {"what": "errors in other bytes"}, seconds=10.0, cap=60.0)
    assert certificate.passed
    assert "closing" not in certificate.cut


@pytest.mark.slow
def test_an_environment_of_one_instance_is_a_warning_and_is_compared_with_fresh_processes() -> None:
    certificate = certify(ODD, {"what": "one at a time"}, seconds=10.0, cap=60.0)
    assert [one["check"] for one in certificate.findings if one["severity"] != "notice"] == ["instances"]
    assert "new processes" in certificate.cut["replays"]
    assert certificate.ordered
