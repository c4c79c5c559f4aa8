"""What listens, and where: nothing of ours is open to other machines unless an address is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_agentrl.vllm_worker.gloo_group import find_store, open_store

LISTENS = "0A"  # the state, in the kernel's table of sockets


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads the kernel's table of sockets")
def test_the_meeting_point_of_a_transfer_listens_on_its_address_only() -> None:
    store = open_store("127.0.0.1")
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    open_at = [row[1] for row in rows if row[1].endswith(f":{store.port:04X}") and row[3] == LISTENS]
    assert open_at == [f"0100007F:{store.port:04X}"]
    find_store("127.0.0.1", store.port).set("found", "yes")
    assert store.get("found") == b"yes"
