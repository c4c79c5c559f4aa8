"""Which node is told when processes can no longer talk. With real nodes: tests/agents/test_two_nodes.py."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from unittest import mock

import pytest

from lightning_agentrl.callbacks import node_names
from lightning_agentrl.callbacks.node_names import Node, is_there, lost_problem
from lightning_agentrl.errors.foreign_messages import LostRank
from tests.agents.processes import next_port
from tests.cli import Command, Config, changed, sentence

FIRST, SECOND = Node(1, "one", "10.0.0.2"), Node(2, "two", "10.0.0.3")


@pytest.mark.parametrize(
    ("lost", "others", "named"),
    [
        (LostRank(closed=False), {FIRST: True, SECOND: False}, [SECOND]),
        (LostRank(closed=True, address="10.0.0.2"), {FIRST: False, SECOND: False}, [FIRST, SECOND]),
        (LostRank(closed=True, address="10.0.0.2"), {FIRST: True, SECOND: True}, [FIRST]),
        (LostRank(closed=False), {FIRST: True, SECOND: True}, [FIRST, SECOND]),
        (LostRank(closed=True, address="127.0.0.1"), {}, []),
    ],
)
def test_nodes_that_are_silent_are_named_and_else_the_one_that_has_ended(
    lost: LostRank, others: dict[Node, bool], named: list[Node]
) -> None:
    problem = lost_problem(lost, 0, others)
    assert [node for node in (FIRST, SECOND) if str(node) in problem.what] == named
    assert ("does not answer" in problem.what or "do not answer" in problem.what) is not all(others.values())
    assert "--ckpt_path last" in problem.fix
    unsaved = lost_problem(lost, 0, others, saved=False)
    assert unsaved.what == problem.what
    assert "start again" in unsaved.fix
    assert "--ckpt_path" not in unsaved.fix


def test_a_machine_that_refuses_is_there_and_one_that_says_nothing_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_names, "PATIENCE", 0.2)
    assert is_there("127.0.0.1")
    with socket.socket() as deaf, socket.socket() as waiting:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        waiting.connect(deaf.getsockname())  # the one that may wait: from now on nobody else is answered
        monkeypatch.setattr(node_names, "PORT", deaf.getsockname()[1])
        assert not is_there("127.0.0.1")


@pytest.mark.slow
def test_a_node_that_waits_alone_says_where(agentrl: Command, config: Config, tmp_path: Path) -> None:
    port = str(next_port())
    limit = {"class_path": "lightning.pytorch.strategies.DDPStrategy", "init_args": {"timeout": "0:00:02"}}
    waiting = changed(changed(config, "trainer.strategy", limit), "trainer.num_nodes", 2)
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": "0", "LOCAL_RANK": "0"}
    with mock.patch.dict(os.environ, here):
        message = sentence(agentrl(config=changed(waiting, "trainer.devices", 1)))
    assert f"127.0.0.1:{port}" in message
    assert "trainer.num_nodes" in message
