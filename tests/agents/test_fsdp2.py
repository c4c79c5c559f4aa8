"""Two FSDP2 processes on the CPU give the weights of one, through the command that a user types."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from lightning_agentrl.agents.checkpoint import METADATA
from lightning_agentrl.commands.export import export_checkpoint
from tests.agents.processes import POPART, assert_same, config_text, fit, metrics, read

FSDP2 = (
    "{class_path: lightning.pytorch.strategies.ModelParallelStrategy, "
    "init_args: {data_parallel_size: 2, tensor_parallel_size: 1, save_distributed_checkpoint: false}}"
)
FOLDERS = FSDP2.replace("false", "true")  # checkpoints of which every process writes its share


@pytest.mark.slow  # two processes
def test_two_sharded_processes_give_the_weights_of_one(tmp_path, exact_folder):
    """Five iterations, the first two of them warm-up; what is logged is equal too. With a head that is rescaled."""
    # so that the processes have more and less of them
    small = ("--model.init_args.compute.max_tokens_per_micro_batch", "200", *POPART)
    one = fit(tmp_path / "one", exact_folder, "SeparateCritic", 1, *small)
    two = fit(tmp_path / "two", exact_folder, "SeparateCritic", 2, *small, strategy=FSDP2)
    assert_same(read(one), read(two))
    logged = [metrics(tmp_path / name) for name in ("one", "two")]
    assert len(logged[0]) == len(logged[1]) > 4
    for a, b in zip(*logged, strict=True):
        assert a == pytest.approx(b, rel=1e-6, abs=1e-8, nan_ok=True)


@pytest.mark.long
@pytest.mark.parametrize("critic", ["SharedCritic", "LeastSquaresCritic"])
def test_a_shared_critic_is_sharded_too(tmp_path, exact_folder, critic):
    """One by least squares has nothing to shard."""
    one = fit(tmp_path / "one", exact_folder, critic, 1)
    two = fit(tmp_path / "two", exact_folder, critic, 2, strategy=FSDP2)
    assert_same(read(one), read(two))


@pytest.mark.long
@pytest.mark.parametrize(
    ("epochs", "first", "then"),
    [
        (1, (2, FSDP2), (2, FSDP2)),  # inside the warm-up
        (1, (2, FOLDERS), (2, FSDP2)),
        (1, (2, FSDP2), (1, None)),
        (3, (1, None), (2, FSDP2)),
    ],
    ids=["file", "folder", "to one process", "from one process"],
)
def test_a_checkpoint_is_continued_on_any_number_of_processes(tmp_path, exact_folder, epochs, first, then):
    def run(name, processes, *arguments):
        devices, strategy = processes
        return fit(tmp_path / name, exact_folder, "SeparateCritic", devices, *arguments, strategy=strategy)

    one = run("one", (1, None))
    stopped = run("stopped", first, "--trainer.max_epochs", str(epochs))
    assert stopped.is_dir() == (first[1] == FOLDERS)
    resumed = run("resumed", then, "--ckpt_path", str(stopped))
    assert_same(read(one), read(resumed))
    begun = torch.load(stopped / METADATA if stopped.is_dir() else stopped, weights_only=True)
    assert begun["run_id"] == read(resumed)["run_id"] != read(one)["run_id"]


@pytest.mark.long
def test_mixed_precision_keeps_float32_weights(tmp_path, tiny_folder):
    arguments = ("--trainer.precision", "bf16-mixed", "--model.init_args.compute.gradient_checkpointing", "true")
    two = read(fit(tmp_path / "two", tiny_folder, "SeparateCritic", 2, *arguments, strategy=FSDP2, plugins="null"))
    one = read(fit(tmp_path / "one", tiny_folder, "SeparateCritic", 1, "--trainer.max_epochs", "1", plugins="null"))
    for name, weight in two["state_dict"].items():
        assert weight.dtype == torch.float32
        assert weight.isfinite().all()
        if name.startswith("actor."):  # has moved from where one process still is in its warm-up
            assert not torch.equal(weight, one["state_dict"][name])


@pytest.mark.long
def test_a_folder_is_exported_like_a_file(tmp_path, exact_folder):
    one = fit(tmp_path / "one", exact_folder, "SharedCritic", 1)
    two = fit(tmp_path / "two", exact_folder, "SharedCritic", 2, strategy=FOLDERS)
    for checkpoint in (one, two):
        export_checkpoint(checkpoint, checkpoint.parent / "exported")
    whole, shares = (load_file(path.parent / "exported" / "model.safetensors") for path in (one, two))
    assert whole.keys() == shares.keys()
    for name, weight in whole.items():
        torch.testing.assert_close(weight, shares[name], rtol=0, atol=1e-8)


@pytest.mark.long
def test_two_nodes_started_by_torchrun_give_the_weights_of_one_process(tmp_path, exact_folder):
    """Both on this machine, with a process each."""
    one = fit(tmp_path / "one", exact_folder, "SharedCritic", 1)
    nodes = tmp_path / "nodes"
    nodes.mkdir()
    (nodes / "config.yaml").write_text(config_text(nodes, exact_folder, "SharedCritic"))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{port}", "--rdzv_id", "agentrl"]
    command += ["-m", "lightning_agentrl", "fit", "--config", "config.yaml", "--trainer.devices", "1"]
    command += ["--trainer.num_nodes", "2", "--trainer.strategy", FSDP2]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = [subprocess.Popen(command, cwd=nodes, env=environment) for _ in range(2)]
    assert [process.wait(240) for process in started] == [0, 0]
    assert_same(read(one), read(nodes / "last.ckpt"))


@pytest.mark.gpu
@pytest.mark.usefixtures("no_processes_left")
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("strategy", ["ddp", FSDP2], ids=["ddp", "fsdp2"])
def test_gpus_give_the_weights_of_one_process_on_one_gpu(tmp_path, exact_folder, strategy, devices):
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} GPUs")
    on_gpu = ("--trainer.accelerator", "gpu")
    one = fit(tmp_path / "one", exact_folder, "SeparateCritic", 1, *on_gpu)
    sized = strategy.replace("data_parallel_size: 2", f"data_parallel_size: {devices}")
    several = fit(tmp_path / "several", exact_folder, "SeparateCritic", devices, *on_gpu, strategy=sized, typed=True)
    assert_same(read(one), read(several))
