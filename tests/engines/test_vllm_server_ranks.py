"""Many processes of a run that share four real vLLM servers: they do not meet at one of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from torch.multiprocessing.spawn import start_processes

from tests.engines import many_ranks
from tests.engines.servers import ServerProcess

pytestmark = [pytest.mark.vllm, pytest.mark.long]
RANKS = 8


def test_requests_of_eight_ranks_spread_over_four_servers(served_folder: Path, tmp_path: Path) -> None:
    servers = [ServerProcess(served_folder, tmp_path / f"{number}.log") for number in range(4)]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait(900)
        urls = [server.url for server in servers]
        start_processes(
            many_ranks.run, args=(str(tmp_path), str(served_folder), RANKS, urls), nprocs=RANKS, start_method="spawn"
        )
    finally:
        for server in servers:
            server.kill()
    stories = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert Counter(episode[0] for of_rank in stories for episode in of_rank) == dict.fromkeys(urls, 8)
    for of_rank in stories:
        for episode in of_rank:
            assert len(episode) == many_ranks.TURNS
            assert len(set(episode)) == 1  # where its past is cached
