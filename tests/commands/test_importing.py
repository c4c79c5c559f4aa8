"""A command looks for no garbage while it imports, nor in what it has imported."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lightning_agentrl.commands.importing import without_collecting
from tests.cli import run_command


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """As a process begins; the tests' own is frozen."""
    gc.unfreeze()
    yield
    gc.enable()
    gc.freeze()


def test_what_is_there_at_the_end_is_not_looked_through_again() -> None:
    with without_collecting():
        assert not gc.isenabled()
        kept: list[object] = []
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    assert not any(one is kept for one in gc.get_objects())
    gc.unfreeze()
    assert any(one is kept for one in gc.get_objects())


def test_an_import_that_fails_leaves_it_as_it_was() -> None:
    with pytest.raises(ImportError), without_collecting():
        raise ImportError("no module")
    assert gc.isenabled()


def test_a_process_that_decides_by_itself_is_left_alone() -> None:
    gc.disable()
    with without_collecting():
        pass
    assert (gc.isenabled(), gc.get_freeze_count()) == (False, 0)
    gc.enable()
    gc.freeze()
    frozen = gc.get_freeze_count()
    with without_collecting():
        kept: list[object] = []
    assert gc.get_freeze_count() == frozen
    assert any(one is kept for one in gc.get_objects())


FULL = """
import gc, sys
full = []
gc.callbacks.append(lambda phase, told: full.append(phase) if told["generation"] == 2 and phase == "start" else None)
from lightning_agentrl.commands import main
sys.argv = ["agentrl", *sys.argv[1:]]
try:
    main.main()
finally:
    print(len(full), gc.get_freeze_count(), "torch" in sys.modules)
"""


COMMANDS = pytest.mark.parametrize(
    "arguments", [["fit", "--print_config"], ["export", "no.ckpt", "folder"]], ids=lambda arguments: arguments[0]
)


@COMMANDS
def test_commands_do_so(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run_command(monkeypatch, *arguments)
    assert gc.get_freeze_count() > 100_000


@pytest.mark.long
@COMMANDS
def test_commands_that_begin_look_nothing_through_as_a_whole(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", FULL, *arguments], capture_output=True, text=True)
    full, frozen, imported = done.stdout.splitlines()[-1].split()
    assert imported == "True"
    assert int(full) == 0
    assert int(frozen) > 100_000
