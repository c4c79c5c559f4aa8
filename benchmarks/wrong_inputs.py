"""What a user reads after a wrong input, and how long it takes: every case through the real command.

    python benchmarks/wrong_inputs.py            # all cases, a few minutes, and their page in docs/results
    python benchmarks/wrong_inputs.py callback   # those with a word in their name

Fails when an answer is no single sentence, ends with another exit code than 2, or lacks what it must say. Each command
runs in a process of its own, a copy of this one, so that torch and the others are imported once. Nothing is downloaded:
the model is a tiny random one, and the hub is an address that refuses.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What the imports below read; threads do not survive in a copy of a process.
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="wrong_inputs_")
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
os.environ["HF_HUB_OFFLINE"] = "0"
os.environ["NO_COLOR"] = os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from benchmarks.wrong_input_cases import CASES, CONFIG, Case
from lightning_agentrl.commands import fit  # noqa: F401 - what the command would import
from lightning_agentrl.commands import main as commands
from tests.tiny import tiny_model_folder, tiny_vision_folder

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(os.environ["HF_HOME"])
PAGE = ROOT / "docs" / "results" / "wrong_inputs.md"

NO_OVERRIDE = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]  # else the superuser may write everywhere
LIMIT = 120.0  # seconds after which a case counts as hanging
TEXT = """\
# Wrong input, and the answer

Every row is one wrong input, given to the command in a folder of its own with a tiny model, the answer it gave, and the
seconds until it came. Written by `benchmarks/wrong_inputs.py`, which fails when an answer is not one sentence with exit
code 2 (an environment's own error: its frames, that sentence, exit code 1).

The seconds were taken on 2 cores with two cases at a time beside other jobs. The imports of torch, lightning and
transformers are not in them (but for the two rows about permissions); they take some 4 seconds more where the command
line and the config files alone do not tell what is wrong. Rows that end in "stopped" or name a file of the package are
inputs that are right after all, and a warning.

{table}
"""


@dataclass(frozen=True)
class Answer:
    """What the command said."""

    code: int
    text: str
    seconds: float

    @property
    def told(self) -> list[str]:
        """The sentences."""
        lines = self.text.splitlines()
        return [line.removeprefix("agentrl: ") for line in lines if line.startswith("agentrl: ")]

    def message(self, case: Case) -> str:
        """The sentence, or the line that says what is expected, or the last one."""
        lines = self.text.strip().splitlines()
        expected = [line for line in lines if case.says and case.says[0] in line]
        return (self.told or expected or lines or [""])[-1]


def prepare(folder: Path) -> None:
    """Tiny models, environments that misbehave, and a checkpoint."""
    for family in ("llama", "qwen2"):
        tiny_model_folder(folder / family, family=family)  # type: ignore[arg-type]
    bare = folder / "no_template"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "llama" / name, bare / name)
    tiny_vision_folder(folder / "sees", "qwen3_vl")
    shutil.copytree(folder / "sees", folder / "sees_without_template")
    shutil.copy(folder / "llama" / "chat_template.jinja", folder / "sees_without_template")
    shutil.copytree(folder / "llama", folder / "no_tools")
    template = folder / "no_tools" / "chat_template.jinja"
    template.write_text(template.read_text().replace("in messages", "in messages if message['role'] != 'tool'"))
    shutil.copy(ROOT / "benchmarks" / "misbehaving_environments.py", folder / "my_games.py")
    (folder / "notes.txt").write_text("no checkpoint, only text\n")
    (folder / "locked").mkdir(mode=0o500)
    (folder / "secret.yaml").touch(mode=0o000)
    answer = ask(Case("a checkpoint", {"trainer.callbacks": [_CHECKPOINT]}), folder)
    if not (folder / "here.ckpt").is_file():
        raise SystemExit(f"the run that makes the checkpoint failed:\n{answer.text}")


_CHECKPOINT = {
    "class_path": "ModelCheckpoint",
    "init_args": {"dirpath": "{folder}", "filename": "here", "save_on_train_epoch_end": True},
}


def ask(case: Case, folder: Path) -> Answer:
    """Run the command in a working folder of its own."""
    work = Path(tempfile.mkdtemp(dir=folder))

    def filled(text: str) -> str:
        return text.replace("{folder}", str(folder))

    config = copy.deepcopy(CONFIG)
    for key, value in case.changes.items():
        change(config, key, value)
    for name, text in {"given.yaml": yaml.safe_dump(config, sort_keys=False), **case.files}.items():
        (work / name).write_text(filled(textwrap.dedent(text)))
    arguments = [filled(argument) for argument in case.arguments]
    if case.configs:
        arguments = [part for name in case.configs for part in ("--config", filled(name))] + arguments
    environ = {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}
    environ |= {name: filled(value) for name, value in case.environ.items()}
    command = [*case.command.split(), *arguments]
    started = time.perf_counter()
    code, text = (_without_rights if case.unprivileged and os.geteuid() == 0 else _copied)(command, work, environ)
    return Answer(code, text.replace(str(folder), "FOLDER").replace(f"{ROOT}/", ""), time.perf_counter() - started)


def _copied(command: Sequence[str], work: Path, environ: dict[str, str]) -> tuple[int, str]:
    """Run the command in a copy of this process; its exit code and standard error."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(command, work, environ))
    process.start()
    process.join(LIMIT)
    late = process.is_alive()
    if late:
        process.kill()
        process.join()
    text = (work / "stderr").read_text()
    return (-1, f"{text}\nstill running") if late else (process.exitcode or 0, text)


def _run(command: Sequence[str], work: Path, environ: dict[str, str]) -> None:
    """Be the command."""
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        stream.flush()
        with (work / name).open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    os.chdir(work)
    os.environ |= environ
    sys.path[:0] = environ["PYTHONPATH"].split(os.pathsep)
    sys.argv = [str(Path(sys.executable).with_name("agentrl")), *command]
    code = 0
    try:
        commands.main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:  # noqa: BLE001 - as the interpreter would
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what comes after, in a copy made by a thread, is not that of a process of its own


def _without_rights(command: Sequence[str], work: Path, environ: dict[str, str]) -> tuple[int, str]:
    """Run the command without the rights of the superuser."""
    program = [*NO_OVERRIDE, str(Path(sys.executable).with_name("agentrl")), *command]
    done = subprocess.run(program, cwd=work, env=os.environ | environ, capture_output=True, text=True, timeout=LIMIT)
    return done.returncode, done.stderr


def change(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key; None removes it."""
    *way, last = key.split(".")
    node = config
    for part in way:
        node = node.setdefault(part, {})
    if value is None:
        node.pop(last, None)
    else:
        node[last] = value


def faults(case: Case, answer: Answer) -> list[str]:
    """Why an answer is not as it should be."""
    found = [f"does not say '{part}'" for part in case.says if part not in answer.text]
    if answer.code != case.code:
        found.append(f"exit code {answer.code} instead of {case.code}")
    if case.ends == "sentence":
        if "Traceback" in answer.text:
            found.append("a traceback")
        if len(answer.told) != 1:
            found.append(f"{len(answer.told)} sentences")
    return found


def table(cases: Sequence[Case], answers: Sequence[Answer]) -> str:
    lines = ["| given | message | seconds |", "|---|---|---|"]
    for case, answer in zip(cases, answers, strict=True):
        message = answer.message(case).replace("|", "\\|")
        lines.append(f"| {case.given} | {message} | {answer.seconds:.1f} |")
    return "\n".join(lines)


def main() -> None:
    words = sys.argv[1:]
    cases = [case for case in CASES if not words or any(word in case.given for word in words)]
    try:
        prepare(FOLDER)
        with ThreadPoolExecutor(2) as executor:
            answers = list(executor.map(lambda case: ask(case, FOLDER), cases))
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)
    print(table(cases, answers))
    failed = False
    for case, answer in zip(cases, answers, strict=True):
        if found := faults(case, answer):
            failed = True
            text = textwrap.indent(answer.text.strip(), "    ")
            print(f"\n{case.given}: {', '.join(found)}\n{text}", file=sys.stderr)
    if failed:
        raise SystemExit(1)
    if not words:
        PAGE.write_text(TEXT.format(table=table(cases, answers)))


if __name__ == "__main__":
    main()
