"""Figures of this machine's GPU, in short parts that continue where the last run stopped.

    make gpu-figures                                          # all parts
    make gpu-figures GPU_FIGURES_ARGS="--minutes 9"           # what fits into nine minutes, in order of worth
    make gpu-figures GPU_FIGURES_ARGS="--only update tests"   # parts with one of these in their name

A part is skipped if `docs/results/gpu.json` has its figures for this code and this kind of GPU. Each part is a process
with a time limit. Models are random and no network is used; `make gpu-wheels` prepares missing packages. Without a GPU
every part is tried with a tiny model on the CPU, and the record is in `build/gpu_trial`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.pages import put

ROOT = Path(__file__).resolve().parents[1]
WORK, MODELS = ROOT / "build" / "gpu_figures", ROOT / "build" / "gpu_models"

Figures = dict[str, Any]
LOOK = "import torch; n = torch.cuda.device_count(); print(f'{n} × {torch.cuda.get_device_name()}' if n else '')"
SOURCES = ("lightning_agentrl/**/*.py", "benchmarks/gpu_figures.py", "benchmarks/speed/*.py", "benchmarks/engines/*.py")
TRIAL = "no GPU"
COUNTS = re.compile(r"[= ]*\d+ (passed|failed|skipped|error).* in [\d.]+s")  # of pytest
PAGE = """\
## Figures of `make gpu-figures`

Run `make gpu-figures` on a machine with a GPU to fill or renew this section. It runs in short parts with time limits
and continues where it stopped. {note}Models have random weights and the shapes of Qwen3. Rows have 260 prompt tokens
and 8 reply tokens; prompts share 200 tokens (*shared*) or none (*apart*). [Earlier runs](#earlier-runs) had other
parts. The goals:

* model FLOP utilization (0.6B, apart): .25 of the data sheet with 16k tokens in a micro-batch, .4 with 64k
* speed-up by sharing: .9 times the ratio of all tokens to unique tokens
* update: as fast as TRL if nothing is shared
* rollout: .9 times the speed of vLLM alone; iteration: at most 1.1 times the sum of its stages

| part | figures | seconds | measured |
|---|---|---|---|
"""


@dataclass(frozen=True)
class Part:
    """A measurement in a process of its own.

    Args:
        name: in the record.
        title: on the page.
        seconds: that it is expected to take on an H100.
        command: run in the root of the repository; the last line of JSON has its figures.
        model: random model that it needs.
        needs: packages that it needs.
    """

    name: str
    title: str
    seconds: float
    command: Sequence[str]
    model: str = ""
    needs: Sequence[str] = ()

    def missing(self) -> str:
        return ", ".join(name for name in self.needs if importlib.util.find_spec(name) is None)


def parts(gpu: bool) -> list[Part]:
    """All parts in order of worth; those that need vLLM come last."""
    small, large = ("0.6B", "4B") if gpu else ("tiny", "tiny")
    settings = [(kernels, thousands) for kernels in ("compiled", "torch") for thousands in (16, 64)]
    whole = [update(small, *setting, False, gpu) for setting in settings]
    adapters = [update(large, *setting, True, gpu) for setting in settings]
    keys = ("trl-260", "trl-260-apart", "trl-tree-260", "trl-episodes")
    against = [against_trl(key, small, gpu) for key in keys]
    of_vllm = [rollout(small, gpu), fit(small, "true", gpu), fit(small, "false", gpu), tests("gpu and vllm", gpu)]
    return [*whole, *against, tests("gpu and not vllm", gpu), *adapters, *of_vllm]


def python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def update(size: str, kernels: str, thousands: int, lora: bool, gpu: bool) -> Part:
    tokens, turns = (1024 * thousands, 15 * thousands) if gpu else (64 * thousands, thousands // 4)
    command = python(
        "benchmarks.speed.utilisation", "--model", str(MODELS / size), "--device", "cuda" if gpu else "cpu"
    )
    command += ["--kernels", kernels, "--tokens", str(tokens), "--turns", str(turns), "--repeats", "3" if gpu else "1"]
    what = f"{size} with LoRA" if lora else size  # all of 4B with its optimizer would not fit into 80 GB
    title = f"Update of {what}, {tokens} tokens in a micro-batch, `kernels: {kernels}`"
    name = f"update-{size}{'-lora' * lora}-{thousands}k-{kernels}"
    return Part(name, title, 120 + 2 * thousands if lora else 80, command + ["--lora"] * lora, size, ["peft"] * lora)


def against_trl(key: str, size: str, gpu: bool) -> Part:
    rows = 64 if gpu else 16  # the size that was the fastest for TRL on an H200
    rows = {"trl-episodes": rows // 4, "trl-tree-260": 65536}.get(key, rows)
    command = python("benchmarks.speed.compare", "--only", key, "--model", str(MODELS / size), "--out", str(WORK / key))
    on_gpu = ["--turns", "128", "--our-tokens", "65536", "--our-kernels", "compiled", "--device", "cuda"]
    command += ["--their-size", str(rows), *(on_gpu if gpu else ["--turns", "32", "--repeats", "2"])]
    needs = [] if (ROOT / ".venv-trl").exists() else ["trl"]
    return Part(key, f"Update of {size} against TRL, `{key}`", 120, command, size, needs)


def tests(marks: str, gpu: bool) -> Part:
    command = python("pytest", "-q", "-n", "0", "-p", "no:cacheprovider")
    command += ["-m", marks] if gpu else ["tests/test_tiny.py"]
    needs = ["pytest", "hypothesis", "xdist"] + ["vllm"] * (marks == "gpu and vllm")
    return Part(f"tests-{marks.replace(' ', '-')}", f"`pytest -m '{marks}'`", 150, command, "", needs)


def rollout(size: str, gpu: bool) -> Part:
    command = python("benchmarks.engines.throughput", "--model", str(MODELS / size), "--out", str(WORK / "vllm.json"))
    options = ["--envs", "64", "--reply", "128", "--repeats", "3", "--device", "cuda"]
    options += ["--engine", '{"cuda_graphs": true}', "--engine", "{}"]
    command += options if gpu else ["--envs", "4", "--turns", "2", "--reply", "8", "--repeats", "2"]
    return Part("rollout", f"Rollout of {size} against vLLM alone", 200, command, size, ["vllm"])


def fit(size: str, graphs: str, gpu: bool) -> Part:
    config, engine = "babyai_goto_qwen2.5-0.5b", f'{{"gpu_memory_utilization": 0.3, "cuda_graphs": {graphs}}}'
    data = {"num_envs": 32, "interaction.init_args.max_reply_tokens": 512}
    if not gpu:
        engine, data = '{"kv_cache_gb": 0.2}', {"num_envs": 16, "interaction.init_args.max_reply_tokens": 8}
    data |= {"engine": f'{{"class_path": "VLLMEngine", "init_args": {engine}}}', "prompt.max_prompt_tokens": 2048}
    command = python("benchmarks.engines.three_iterations", f"configs/{config}.yaml")
    command += [f"--data.init_args.{key}={value}" for key, value in data.items()]
    command += [f"--model.init_args.model={MODELS / size}", f"--trainer.accelerator={'gpu' if gpu else 'cpu'}"]
    title = f"Three iterations of `{config}` with {size}, `cuda_graphs: {graphs}`"
    return Part(f"fit-graphs-{graphs}", title, 150, command, size, ["vllm", "minigrid"])


def figures_of(log: str) -> Figures:
    """The last line of JSON, or what pytest counted."""
    lines = log.splitlines()
    if counted := next(filter(COUNTS.match, lines), None):
        failed = ", ".join(re.findall(r"^(?:FAILED|ERROR) (\S+)", log, re.M))
        return {kind: int(number) for number, kind in re.findall(r"(\d+) ([a-z]+)", counted)} | {
            "tests": failed or None
        }
    return json.loads(next(line for line in reversed(lines) if line.startswith("{")))


def shown(figures: Figures) -> str:
    texts = []
    for name, value in figures.items():
        if isinstance(value, dict):
            texts += [f"{name}: ({inner})"] if (inner := shown(value)) else []
        elif value is not None:
            texts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(texts)


def run(part: Part, folder: Path, limit: float) -> Figures:
    """Run a part and return its record; at the limit it is stopped with all of its processes."""
    folder.mkdir(parents=True, exist_ok=True)
    started, log, failed = time.monotonic(), folder / "log.txt", ""
    write = python("benchmarks.speed.random_models", part.model, str(MODELS / part.model))
    command = f"{shlex.join(write)} && {shlex.join(part.command)}" if part.model else shlex.join(part.command)
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "SPEED_LOG": "1"}
    with log.open("w") as out:
        pipes: dict[str, Any] = {"stdout": out, "stderr": out, "start_new_session": True}
        process = subprocess.Popen(["bash", "-c", command], cwd=ROOT, env=variables, **pipes)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            failed = f"stopped after {limit:.0f} s; "
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text, when = log.read_text(errors="replace"), datetime.now(UTC).isoformat(timespec="minutes")
    record: Figures = {"when": when, "seconds": round(time.monotonic() - started)}
    if not failed and (process.returncode == 0 or part.name.startswith("tests")):
        with suppress(StopIteration):
            return record | {"figures": figures_of(text)}
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*Error\b|agentrl: ", line)]
    return record | {"failed": failed + (errors or lines or ["no output"])[-1][:300]}


def page(every: Sequence[Part], records: dict[str, Figures], code: str, machine: str) -> str:
    rows = []
    for part in every:
        if (record := records.get(part.name)) is None:
            rows.append(f"| {part.title} | not run yet | about {part.seconds:.0f} | |")
            continue
        text = f"**failed**: {record['failed']}" if "failed" in record else shown(record["figures"])
        of = f"{record['when'][:10]}, {record['machine']}{'' if record['code'] == code else ', older code'}"
        rows.append(f"| {part.title} | {text.replace('|', '/')} | {record['seconds']} | {of} |")
    note = "**This is a trial with a tiny model; no figure says anything about a GPU.** " if machine == TRIAL else ""
    return PAGE.format(note=note) + "\n".join(rows) + "\n"


def measure(every: Sequence[Part], wanted: Sequence[str], machine: str, file: Path, end: float) -> None:
    """Run the wanted parts that have no figures of this code and machine, until no part fits into the time left."""
    texts = [path.read_bytes() for pattern in SOURCES for path in sorted(ROOT.glob(pattern))]
    made_of = {"code": hashlib.sha256(b"".join(texts)).hexdigest()[:12], "machine": machine}
    records: dict[str, Figures] = json.loads(file.read_text()) if file.exists() else {}
    fresh = {name for name, record in records.items() if made_of.items() <= record.items()}
    todo = [part for part in every if any(text in part.name for text in wanted)]
    for part in sorted(todo, key=lambda part: part.name in fresh):  # what failed comes after what was not tried
        left = end - time.monotonic()
        if part.name in fresh and "figures" in records[part.name]:
            print(f"{part.name}: on record", flush=True)
        elif missing := part.missing():
            print(f"{part.name}: skipped, needs {missing}", flush=True)
        elif left < part.seconds:
            print(f"{part.name}: skipped, takes about {part.seconds:.0f} s and {left:.0f} s are left", flush=True)
        else:
            limit = 900 if machine == TRIAL else 2 * part.seconds + 60
            records[part.name] = record = run(part, WORK / part.name, min(limit, left)) | made_of
            file.write_text(json.dumps(records, indent=1) + "\n")
            print(f"{part.name}: {record.get('failed') or shown(record['figures'])}", flush=True)
    put(file.with_suffix(".md"), "figures", page(every, records, **made_of))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10**6, help="that the whole run may take")
    parser.add_argument("--only", nargs="+", default=[""], help="run parts with one of these in their name")
    wanted = parser.parse_args()
    end = time.monotonic() + 60 * wanted.minutes
    looked = subprocess.run([sys.executable, "-c", LOOK], stdout=subprocess.PIPE, text=True)
    if looked.returncode:
        raise SystemExit(f"{sys.executable} cannot import torch; run `make install`, or set PYTHON_GPU to one that can")
    machine = looked.stdout.strip()
    out = ROOT / ("docs/results" if machine else "build/gpu_trial")
    out.mkdir(parents=True, exist_ok=True)
    measure(parts(bool(machine)), wanted.only, machine or TRIAL, out / "gpu.json", end)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also ends the part that runs
    main()
