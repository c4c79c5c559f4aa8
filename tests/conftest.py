"""What all tests share: one quiet, repeatable torch, no model hub, and a tiny model made once."""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs the hub is a mistake
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else two workers share the first core

import pytest
import yaml
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.cli import Command, Config, Verify
    from tests.engines.servers import Pair, ServerProcess

# torch and the package are imported in the fixtures: with `-n`, this file is also read by the process that only hands
# out the tests, before the workers start.

# Whether a property holds does not depend on how busy the machine is. Each run draws other examples, so few will do.
settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=40)
settings.load_profile("any_machine")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Do not look for garbage while modules are loaded, nor among what they loaded later: a million objects that stay.

    It would take seconds of each process.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Let all be freed as in any process where libraries of vLLM would complain about what stays."""
    if "vllm" in sys.modules:
        gc.unfreeze()


VLLM = importlib.util.find_spec("vllm") is not None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if not VLLM and item.get_closest_marker("vllm"):
        pytest.skip("vLLM is not installed")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """End the process where what is to be tidied up hangs: once a test has failed, nothing else keeps the time."""
    faulthandler.dump_traceback_later(300, exit=True, file=item.config.stash[fault_handler_stderr_fd_key])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


# A shell that starts tests in the background has them ignore Ctrl-C, and all processes that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def quiet_torch() -> None:
    import lightning  # noqa: F401 - it logs to what is standard error now; that of a test ends with it
    import torch

    torch.set_num_threads(1)  # tiny models; more threads only wait for each other
    torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.fixture(autouse=True)
def seeded(quiet_torch: None) -> None:
    """Every test starts from the same random state and type of numbers, in whatever order tests run."""
    import torch

    # Without a GPU, torch.manual_seed would keep a stack trace for the day on which there is one; that takes a
    # millisecond, some thousand times.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Every test leaves environment variables, Lightning's rank and `sys.exit` as it found them.

    Lightning sets the first two, and Weights & Biases replaces the third. The command of a later test that inherited a
    rank would wait for the processes of the other ranks.
    """
    from lightning.pytorch.utilities import rank_zero_only

    before, leave, rank = dict(os.environ), sys.exit, rank_zero_only.rank
    yield
    rank_zero_only.rank = rank
    sys.exit = leave
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What Lightning logs, a text for each message.

    Pytest's own ``caplog`` is switched off: for each test it visits all the loggers of torch, which takes milliseconds.
    """

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    texts: list[str] = []
    logger, keep = logging.getLogger("lightning.pytorch"), Keep()
    level = logger.level
    logger.addHandler(keep)
    logger.setLevel(logging.INFO)
    yield texts
    logger.setLevel(level)
    logger.removeHandler(keep)


@pytest.fixture
def no_processes_left() -> Iterator[None]:
    """FSDP2 makes a group of processes, also of one."""
    import torch.distributed as dist

    yield
    if dist.is_initialized():
        # DeepSpeed keeps groups of its own, and forgets them only when it ends them itself
        zero = getattr(sys.modules.get("deepspeed"), "comm", None)
        (zero if zero and zero.is_initialized() else dist).destroy_process_group()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Llama with its tokenizer. Do not write to it."""
    from tests.tiny import tiny_model_folder

    return tiny_model_folder(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def exact_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model that is exact in float64 (the norms of the others compute in float32). Do not write."""
    from tests.tiny import tiny_model_folder

    return tiny_model_folder(tmp_path_factory.mktemp("tiny") / "gpt_neox", family="gpt_neox")


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Llama that vLLM can run. Do not write to it."""
    from tests.tiny import tiny_model_folder

    return tiny_model_folder(tmp_path_factory.mktemp("tiny") / "served", head_dim=32)


# The command


@pytest.fixture
def config(tiny_folder: Path, tmp_path: Path) -> Config:
    """A short run of a tiny model."""
    from tests.cli import small_config

    config = small_config(tiny_folder)
    config["trainer"] |= {"default_root_dir": str(tmp_path), "enable_progress_bar": False}
    return config


@pytest.fixture
def agentrl(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command in this process; gives its exit code and what it wrote to standard error."""
    from tests.cli import run_command

    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, config: Config | None = None, command: str = "fit") -> tuple[int, str]:
        given = [command]
        if config is not None:
            (tmp_path / "given.yaml").write_text(yaml.safe_dump(config))
            given += ["--config", str(tmp_path / "given.yaml")]
        capsys.readouterr()
        code = run_command(monkeypatch, *given, *arguments)
        return code, capsys.readouterr().err

    return run


@pytest.fixture
def verify(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Verify:
    """Run `agentrl verify-engine` in this process; gives its exit code and the lines it printed."""
    from tests.cli import run_command

    monkeypatch.chdir(tmp_path)

    def run(config: Config, *arguments: str) -> tuple[int, list[str]]:
        (tmp_path / "given.yaml").write_text(yaml.safe_dump(config))
        capsys.readouterr()
        code = run_command(monkeypatch, "verify-engine", "--config", "given.yaml", *arguments)
        printed = capsys.readouterr()
        print(printed.err, file=sys.stderr)  # shown if the test fails
        return code, printed.out.splitlines()

    return run


# vLLM servers


@pytest.fixture(scope="session")
def servers(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    from tests.engines.servers import ServerProcess

    folder = tmp_path_factory.mktemp("servers")
    first, second = (
        ServerProcess(served_folder, folder / f"{name}.log", workers=False) for name in ("first", "second")
    )
    yield first, second
    first.kill()
    second.kill()


@pytest.fixture
def pair(servers: Pair) -> Pair:
    """Two vLLM servers that run; they are started when they are first needed, and after a test has killed one."""
    running(servers)
    return servers


@pytest.fixture
def one_server(servers: Pair) -> ServerProcess:
    """One of the two, which runs."""
    running(servers[:1])
    return servers[0]


def running(servers: Sequence[ServerProcess]) -> None:
    for server in servers:
        if server.process is None:
            server.start()
    for server in servers:
        server.wait()
