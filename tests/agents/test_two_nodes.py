"""Two nodes and a server, started by the commands of docs/many_devices.md: equal to one process, and never stuck.

Each is a network namespace of this machine; `make test-nodes` runs them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.agents.processes import DOUBLE, assert_alike, assert_same, config_text, fit, read
from tests.engines.servers import SMALL
from tests.network import Network, why_not

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "many_devices.md"
NODES, SAMPLER = ("node0", "node1"), "sampler"
ITERATIONS = 16
CUT_AFTER = 3  # iterations
LIMIT = 20  # seconds of the process group, where the link stays cut
ENDS = 300  # seconds in which every process has ended after that

reason = why_not() if os.environ.get("PYTEST_XDIST_WORKER") is None else "one at a time: make test-nodes"
pytestmark = [pytest.mark.long, pytest.mark.skipif(reason is not None, reason=str(reason))]


def told_commands() -> dict[str, list[str]]:
    """The page's commands: torchrun, those with Lightning's variables for both nodes, the server."""
    section = PAGE.read_text().partition("\n## Several nodes\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    lines = [shlex.split(re.sub(r"\\\n\s*", "", block)) for block in blocks]
    return dict(zip(("torchrun", *NODES, SAMPLER), lines, strict=True))


def made_small(command: Sequence[str], *more: str) -> list[str]:
    """The same command with this Python, one process for each node, and another config."""
    python = [sys.executable, "-m"]
    own = {
        "torchrun": [*python, "torch.distributed.run"],
        "agentrl": [*python, "lightning_agentrl"],
        "8": ["1"],
        "configs/babyai_goto_qwen2.5-7b_2nodes.yaml": ["config.yaml"],
    }
    return ["env", *(part for word in command for part in own.get(word, [word])), *more]


class Cluster:
    """The machines, and what was started on them."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, host: str, command: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
        """Start a command on a machine; it writes to a file with the machine's name."""
        threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING"}
        with (folder / f"{host}.txt").open("wb") as log:
            process = subprocess.Popen(
                self.network.on(host, command),
                cwd=folder,
                env=os.environ | threads | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def fit(self, name: str, how: str, model: Path, *more: str, timeout: int = 120, plugins: str = DOUBLE) -> Path:
        """Start a run on both nodes; return its folder."""
        folder = self.folder / name
        folder.mkdir()
        (folder / "config.yaml").write_text(config_text(folder, model, "SharedCritic", plugins))
        given = settings(timeout, nodes=2) + list(more)
        for node in NODES:
            self.start(node, made_small(told_commands()["torchrun" if how == "torchrun" else node], *given), folder)
        return folder

    def ends(self, seconds: float) -> list[int]:
        """Wait for the two processes that were started last; return how they ended."""
        end = time.monotonic() + seconds
        return [process.wait(max(1.0, end - time.monotonic())) for process in self.started[-2:]]

    def stop(self) -> None:
        for process in self.started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def settings(timeout: int, nodes: int) -> list[str]:
    """Of a run on so many nodes, whose process group waits so many seconds."""
    limit = {"timeout": f"0:{timeout // 60:02}:{timeout % 60:02}"}
    given = {"class_path": "lightning.pytorch.strategies.DDPStrategy", "init_args": limit}
    return [
        *("--trainer.num_nodes", str(nodes), "--trainer.devices", "1", "--trainer.strategy", json.dumps(given)),
        *("--trainer.max_epochs", str(ITERATIONS), "--data.init_args.validation.every", str(ITERATIONS)),
        *("--trainer.enable_progress_bar", "true"),
    ]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Network(*NODES, SAMPLER) as network:
        made = Cluster(network, tmp_path)
        try:
            yield made
        finally:
            made.stop()


@pytest.fixture(scope="module")
def one(exact_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The checkpoint of one process on this machine."""
    folder = tmp_path_factory.mktemp("one")
    last = ("--trainer.max_epochs", str(ITERATIONS), "--data.init_args.validation.every", str(ITERATIONS))
    return read(fit(folder, exact_folder, "SharedCritic", 1, *last))


def iterations(folder: Path) -> int:
    """How many the first node has ended."""
    return len(set(re.findall(rf"iteration (\d+)/{ITERATIONS}", (folder / "node0.txt").read_text(errors="replace"))))


def wait_for_iterations(folder: Path, cluster: Cluster) -> None:
    end = time.monotonic() + 400
    while iterations(folder) < CUT_AFTER:
        for process in cluster.started[-2:]:
            assert process.poll() is None, logs(folder)
        assert time.monotonic() < end, logs(folder)
        time.sleep(0.02)


def logs(folder: Path) -> str:
    return "\n".join(f"{file.name}: {file.read_text(errors='replace')[-3000:]}" for file in folder.glob("*.txt"))


def cut_for_ten_seconds(folder: Path, cluster: Cluster, host: str) -> None:
    """In the middle of the run, which stands still meanwhile."""
    wait_for_iterations(folder, cluster)
    cluster.network.cut(host)
    time.sleep(2)  # what was under way
    before = iterations(folder)
    time.sleep(8)
    during = iterations(folder)
    cluster.network.mend(host)
    assert CUT_AFTER <= before == during < ITERATIONS, logs(folder)


@pytest.mark.parametrize("how", ["torchrun", "variables"])
def test_two_nodes_whose_link_is_cut_for_ten_seconds_give_the_weights_of_one_process(
    cluster: Cluster, exact_folder: Path, one: dict[str, Any], how: str
) -> None:
    folder = cluster.fit("two", how, exact_folder)
    cut_for_ten_seconds(folder, cluster, "node1")
    assert cluster.ends(300) == [0, 0], logs(folder)
    assert_same(one, read(folder / "last.ckpt"))


@pytest.mark.parametrize("how", ["torchrun", "variables"])
def test_nodes_whose_link_stays_cut_end_and_say_why(cluster: Cluster, exact_folder: Path, how: str) -> None:
    folder = cluster.fit("two", how, exact_folder, timeout=LIMIT)
    wait_for_iterations(folder, cluster)
    cluster.network.cut("node1")
    began = time.monotonic()
    codes = cluster.ends(LIMIT + ENDS)
    print(f"\n{how}: ended with {codes} after {time.monotonic() - began:.0f} s")
    assert all(codes), logs(folder)
    for own in NODES:
        output = " ".join((folder / f"{own}.txt").read_text(errors="replace").split())
        assert "agentrl: another process of this run" in output, logs(folder)
        assert "--ckpt_path last" in output, logs(folder)


def test_a_node_that_never_comes_is_told(cluster: Cluster, exact_folder: Path) -> None:
    folder = cluster.folder / "alone"
    folder.mkdir()
    (folder / "config.yaml").write_text(config_text(folder, exact_folder, "SharedCritic"))
    given = settings(LIMIT, nodes=2)
    alone = cluster.start("node0", made_small(told_commands()["node0"], *given), folder)
    assert alone.wait(LIMIT + ENDS) != 0
    output = " ".join((folder / "node0.txt").read_text().split())
    assert "did not meet at node0:29500" in output, logs(folder)
    assert "trainer.num_nodes" in output


@pytest.mark.vllm
def test_two_nodes_with_a_server_on_a_third_machine_give_the_weights_of_one_process(
    cluster: Cluster, served_folder: Path
) -> None:
    """Also where the second node reaches neither the first nor the server for ten seconds."""
    serve = ["env", sys.executable, "-m", "lightning_agentrl", *told_commands()[SAMPLER][1:]]
    serve[serve.index("Qwen/Qwen2.5-7B-Instruct")] = str(served_folder)
    server = cluster.start(SAMPLER, [*serve, "--", *SMALL], cluster.folder)
    look = "import urllib.request as u; u.urlopen('http://sampler:8001/health', timeout=5)"
    end = time.monotonic() + 400
    while subprocess.run(cluster.network.on("node0", [sys.executable, "-c", look]), capture_output=True).returncode:
        assert server.poll() is None, logs(cluster.folder)
        assert time.monotonic() < end, logs(cluster.folder)
        time.sleep(1)
    (option,) = re.findall(r"^--data\.init_args\.engine='(.*)'$", PAGE.read_text(), re.M)
    engine = f"--data.init_args.engine={option}"

    single = cluster.folder / "one"
    single.mkdir()
    (single / "config.yaml").write_text(config_text(single, served_folder, "SharedCritic"))
    command = made_small(told_commands()["node0"], *settings(120, nodes=1), engine)
    assert cluster.start("node0", command, single).wait(300) == 0, logs(single)

    double = cluster.fit("two", "variables", served_folder, engine)
    cut_for_ten_seconds(double, cluster, "node1")
    assert cluster.ends(300) == [0, 0], logs(double)
    a, b = read(single / "last.ckpt"), read(double / "last.ckpt")
    assert_alike(a["RolloutDataModule"]["sessions"], b["RolloutDataModule"]["sessions"])
    for name, weight in a["state_dict"].items():
        assert torch.allclose(weight, b["state_dict"][name], rtol=0, atol=1e-5), name
