"""Errors in parts: where a wrong key stands, how a fault reads on a terminal and in a log, what ends a run."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from types import ModuleType

import gymnasium
import pytest
import torch

from lightning_agentrl.errors import (
    ConfigError,
    Problem,
    Sources,
    check_files,
    check_yaml,
    environment_problem,
    explain,
    one_line_errors,
    runtime_error,
    unknown_command,
)
from lightning_agentrl.errors.frames import environment_frames

CONFIG = """\
model:
  class_path: PPOAgent
  init_args:
    lr_actor: fast
    critic: {class_path: SharedCritic, init_args: {detach: perhaps}}
trainer:
  callbacks:
    - StageProgress
    - class_path: CriticWarmup
      init_args: {rollouts: 3}
    - class_path: EarlyStopping
      init_args:
        monitor: val/sucess
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write files, given as name=text, into the working folder."""
    monkeypatch.chdir(tmp_path)

    def write(**files: str) -> None:
        for name, text in files.items():
            (tmp_path / f"{name}.yaml").write_text(text)

    return write


def where(problem: Problem, *arguments: str) -> list[str]:
    return [f"{place.where} ({place.key})" for place in Sources(arguments).places(problem)]


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (Problem("", key="model.init_args.lr_actor"), "a.yaml, line 4 (model.init_args.lr_actor)"),
        (Problem("", key="model.init_args.critic.init_args.detach"), "a.yaml, line 5"),  # flow style
        (Problem("", key="trainer.callbacks.init_args.rollouts"), "line 10 (trainer.callbacks[1].init_args.rollouts)"),
        (Problem("", key="trainer.callbacks[2].init_args.monitor"), "a.yaml, line 13 (trainer.callbacks[2]"),
        (Problem("", key="trainer.callbacks.class_path", value="CriticWarmup"), "a.yaml, line 9"),
        (Problem("", key="trainer.callbacks.class_path", value="StageProgress"), "a.yaml, line 8"),  # name alone
        (Problem("", key="trainer.callbacks.init_args", owner="EarlyStopping"), "a.yaml, line 12"),
        (Problem("", key="model.init_args.model", missing=True), "a.yaml, line 3 (model.init_args)"),
        (Problem("lower model.init_args.lr_actor, or model.init_args.lr_critic"), "a.yaml, line 4"),  # a sentence
    ],
)
def test_a_key_is_found_in_its_line(problem: Problem, expected: str, write: Callable[..., None]) -> None:
    write(a=CONFIG)
    (found,) = where(problem, "fit", "--config", "a.yaml")
    assert expected in found


@pytest.mark.parametrize(
    "problem",
    [
        Problem("", key="model.init_args.lr_critic"),  # a default
        Problem("", key="model.init_args.lr_actor", value="slow"),  # another value
        Problem("", key="trainer.callbacks.init_args"),  # of which callback?
        Problem("", key="model.init_args.critic.init_args.detach", owner="SeparateCritic"),  # another class
        Problem("something else"),
    ],
)
def test_no_place_is_better_than_a_wrong_one(problem: Problem, write: Callable[..., None]) -> None:
    write(a=CONFIG)
    assert where(problem, "--config", "a.yaml") == []


def test_a_key_that_an_anchor_brings_is_found_where_it_stands(write: Callable[..., None]) -> None:
    write(a="model: &m\n  init_args:\n    lr_actor: 1\ndata:\n  <<: *m\n  num_envs: 2\ntrainer: *m\n")
    assert where(Problem("", key="data.init_args.lr_actor"), "--config=a.yaml") == [
        "a.yaml, line 3 (data.init_args.lr_actor)"
    ]
    assert where(Problem("", key="trainer.init_args.lr_actor"), "-c", "a.yaml")[0].startswith("a.yaml, line 3")


def test_of_several_files_the_last_that_has_the_key_counts(write: Callable[..., None]) -> None:
    write(a=CONFIG, b="model:\n  init_args: {lr_actor: 1.0e-5}\n", c="data: {class_path: X}\n")
    files = ["--config", "a.yaml", "--config", "b.yaml", "--config", "c.yaml"]
    assert where(Problem("", key="model.init_args.lr_actor"), *files)[0].startswith("b.yaml, line 2")
    assert where(Problem("", key="model.init_args.lr_actor", value="fast"), *files)[0].startswith("a.yaml, line 4")


def test_arguments_without_a_class_are_looked_for_in_the_first_file(write: Callable[..., None]) -> None:
    write(a="model: {init_args: {lr_actor: 1}}\n", b=CONFIG, c="model: 3\n")
    problem = Problem("", key="model", classless=True)
    assert where(problem, "--config", "a.yaml", "--config", "b.yaml") == ["a.yaml, line 1 (model)"]
    assert where(problem, "--config", "b.yaml", "--config", "a.yaml") == []
    assert where(problem, "--config", "b.yaml", "--config", "c.yaml") == ["c.yaml, line 1 (model)"]


@pytest.mark.parametrize(
    "argument",
    [
        "--model.init_args.lr_actor=fast",
        "--model.lr_actor=fast",  # the parser takes this form, too
        "--model.init_args={lr_actor: fast}",
        "--model={class_path: PPOAgent, init_args: {lr_actor: fast}}",
    ],
)
def test_the_command_line_is_told_from_the_file(argument: str, write: Callable[..., None]) -> None:
    write(a=CONFIG)
    key = "model.init_args.lr_actor"
    for given in ([argument], argument.split("=", 1)):
        (found,) = where(Problem("", key=key, value="fast"), "--config", "a.yaml", *given)
        assert found.startswith("command line (model")
    assert where(Problem("", key=key), "--model.lr_actor=1", "--config", "a.yaml")[0].startswith("a.yaml, line 4")


def test_a_class_on_the_command_line_is_found(write: Callable[..., None]) -> None:
    problem = Problem("", key="model.class_path", value="PPOAgnt")
    assert where(problem, "--model=PPOAgnt") == ["command line (model.class_path)"]
    assert where(problem, "--model.class_path", "PPOAgnt") == ["command line (model.class_path)"]
    problem = Problem("", key="trainer.callbacks.init_args.patience", value="x")
    assert where(problem, "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.patience=x")[0].startswith(
        "command"
    )


def test_what_a_further_file_may_hold_is_not_guessed(write: Callable[..., None]) -> None:
    write(a=CONFIG, b="model: agent.yaml\n")
    problem = Problem("", key="model.init_args.lr_actor")
    assert where(problem, "--config", "a.yaml", "--config", "b.yaml") == []
    assert where(problem, "--config", "a.yaml", "--model", "agent.yaml") == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "trainer:\n  max_epochs: 3\n  devices: 1\n  max_epochs: 4\n",
            ["trainer.max_epochs is given twice (a.yaml, lines 2 and 4)"],
        ),
        (
            "trainer:\n  callbacks:\n  - {a: 1, b: 2, a: 3}\n",
            ["trainer.callbacks[0].a is given twice", "lines 3 and 3"],
        ),
        ("model: {}\ndata: {}\nmodel: {}\n", ["the key model is given twice", "lines 1 and 3"]),
        ("trainer:\n\tmax_epochs: 3", ["not valid YAML", "a.yaml, line 2, column 1", "not with tabs"]),
        ("trainer:\n  a: b: c\n", ["not valid YAML", "line 2", "quote a value that holds ': '"]),
        ("model: {}\nlr_actor: 1\n", ["no key 'lr_actor'", "a.yaml, line 2", "mean model.init_args.lr_actor?"]),
        ("trainer.max_epochs: 3\n", ["did you mean trainer: {max_epochs: ...}?"]),
        ("- a\n- b\n", ["holds no keys", "trainer, model, data"]),
    ],
)
def test_a_broken_file_is_told_with_its_line(text: str, parts: list[str], write: Callable[..., None]) -> None:
    write(a=text)
    with pytest.raises(ConfigError) as told:
        check_yaml(Path("a.yaml"))
    shown = told.value.problem.sentence(Sources([]).places(told.value.problem))
    for part in parts:
        assert part in shown


def test_files_are_looked_at_before_anything_is_imported(write: Callable[..., None], tmp_path: Path) -> None:
    write(a="model: {}\n")
    (tmp_path / "noise.yaml").write_bytes(b"\xff\xfe\x00")
    check_files(["fit", "--config", "a.yaml", "--config={model: 1}", "--model", "x"])
    for given, part in (
        ("b.yaml", "'b.yaml' does not exist"),
        ("a.yaml", "the key data is missing; give a config file"),
        ("a.yaml c.yaml", r"did you mean --config c.yaml\?"),
        (".", "'.' cannot be read: Is a directory"),
        ("noise.yaml", "is no text"),
    ):
        with pytest.raises(ConfigError, match=part):
            check_files(["--config", *given.split()])
    with pytest.raises(ConfigError, match=r"did you mean --config a.yaml\?"):
        check_files(["a.yaml"])


def test_merged_keys_and_anchors_are_not_given_twice(write: Callable[..., None]) -> None:
    write(a="model: &m {init_args: {a: 1}}\ndata: {<<: *m, init_args: {a: 2}}\ntrainer: *m\n")
    check_yaml(Path("a.yaml"))


# How it reads


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


MISSPELT = """\
Parser key "model":
  Problem with given class_path 'lightning_agentrl.agents.PPOAgent':
    Option 'lr_actr' is not accepted
"""


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    return Terminal()


def end(error: BaseException, *arguments: str) -> int:
    """Exit code of a command that ends with an error."""
    with pytest.raises(SystemExit) as stop, one_line_errors(arguments):
        raise error
    return int(stop.value.code or 0)


def test_a_terminal_shows_labelled_lines(terminal: Terminal, write: Callable[..., None]) -> None:
    write(my="model:\n  class_path: PPOAgent\n  init_args:\n    lr_actr: 1\n")
    with redirect_stderr(terminal):
        assert end(ConfigError(explain(MISSPELT)), "fit", "--config", "my.yaml") == 2
    lines = terminal.getvalue().splitlines()
    assert lines[:3] == [
        "agentrl: there is no key 'lr_actr' in PPOAgent",
        "  where         my.yaml, line 4 (model.init_args.lr_actr)",
        "  did you mean  lr_actor",
    ]
    assert lines[3].startswith("  fix           rename or remove it; known: model, critic, advantage,")
    assert all(line.startswith(" " * 16) for line in lines[4:])  # wrapped below the text
    assert max(map(len, lines)) <= 80


def test_a_log_gets_the_same_in_one_sentence(capsys: pytest.CaptureFixture[str], write: Callable[..., None]) -> None:
    write(my="model:\n  class_path: PPOAgent\n  init_args:\n    lr_actr: 1\n")
    assert end(ConfigError(explain(MISSPELT)), "fit", "--config", "my.yaml") == 2
    assert capsys.readouterr().err == (
        "agentrl: there is no key 'lr_actr' in PPOAgent (key model.init_args.lr_actr; my.yaml, line 4); "
        "did you mean lr_actor?\n"
    )


def test_a_terminal_has_colours_unless_they_are_unwanted(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    with redirect_stderr(terminal):
        end(ConfigError(Problem("a fault", suggestion="another")))
    assert terminal.getvalue() == (
        "\x1b[1;31magentrl:\x1b[0m\x1b[1m a fault\x1b[0m\n\x1b[2m  did you mean  \x1b[0manother\n"
    )


def test_a_sentence_of_another_module_is_split_where_it_says_what_to_do(
    terminal: Terminal, write: Callable[..., None]
) -> None:
    write(my="data: {init_args: {num_envs: 4}}\n")
    error = ConfigError("4 environments cannot be shared; change data.init_args.num_envs")
    error.add_note("on process 3")
    with redirect_stderr(terminal):
        end(error, "--config", "my.yaml")
    assert terminal.getvalue().splitlines() == [
        "agentrl: 4 environments cannot be shared",
        "  where         my.yaml, line 1 (data.init_args.num_envs)",
        "  when          on process 3",
        "  fix           change data.init_args.num_envs",
    ]


def test_parts_survive_when_others_make_a_sentence_of_them(
    capsys: pytest.CaptureFixture[str], write: Callable[..., None]
) -> None:
    write(my="model:\n  init_args:\n    lr_actr: 1\n")
    inner = ConfigError(explain(MISSPELT))
    outer = ConfigError(str(inner))
    outer.__cause__ = inner
    end(outer, "--config", "my.yaml")
    assert "my.yaml, line 3" in capsys.readouterr().err


def test_the_rest_keeps_its_own_ending(capsys: pytest.CaptureFixture[str]) -> None:
    assert end(KeyboardInterrupt("stopped after iteration 2")) == 130
    assert capsys.readouterr().err == "agentrl: stopped after iteration 2\n"
    with pytest.raises(ZeroDivisionError), one_line_errors([]):
        raise ZeroDivisionError


def test_commands_and_options_of_other_commands_are_explained() -> None:
    assert str(unknown_command("vew", ["fit", "view"])) == (
        "there is no command 'vew'; known: fit, view; did you mean view?"
    )
    assert "did you mean agentrl fit --config ...?" in str(unknown_command("--config", ["fit", "view"]))
    told = str(explain("unrecognized arguments: --outt=3", ["run", "out"]))
    assert told == "there is no option '--outt'; known: --run, --out; did you mean --out?"
    assert "trainer" not in str(explain("unrecognized arguments: a.yaml", ["run", "out"]))
    assert str(explain("the following arguments are required: run", ["run"])) == "the key run is missing"


# While the run goes on

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB of which 1.20 GiB is "
    "free. Of the allocated memory 130.00 GiB is allocated by PyTorch."
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4294967296 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error", "stage", "parts"),
    [
        (torch.OutOfMemoryError(CUDA), "update", ["the GPU in stage update", "2.00 GiB", "1.20 GiB of 139.81 GiB"]),
        (torch.OutOfMemoryError(CUDA), "update", ["max_tokens_per_micro_batch", "gradient_checkpointing", "SharedCr"]),
        (torch.OutOfMemoryError(CUDA), "score", ["model.init_args.max_tokens_per_micro_batch"]),
        (torch.OutOfMemoryError(CUDA), "collect", ["engine.init_args.max_batch", "data.init_args.num_envs"]),
        (torch.OutOfMemoryError(CUDA), "validate", ["data.init_args.validation.num_envs"]),
        (RuntimeError(CPU), None, ["out of memory on the CPU (tried to allocate 4.0 GiB)", "while playing"]),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), None, ["the GPU"]),
        (MemoryError(), "load", ["the CPU in stage load", "model.init_args.model"]),
    ],
)
def test_out_of_memory_says_which_keys_to_lower(error: Exception, stage: str | None, parts: list[str]) -> None:
    told = str(runtime_error(error, stage))
    for part in parts:
        assert part in told


def test_the_stage_is_read_from_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = in_module("lightning_agentrl.agents.agent", "def training_step(call): call()")

    def fail() -> None:
        raise MemoryError

    assert "in stage update" in str(runtime_error(caught(agent.training_step, fail), None))


def test_a_full_disk_says_which_file_and_what_to_change(tmp_path: Path) -> None:
    lightning = in_module("lightning.pytorch.trainer", "def save_checkpoint(filepath, call): call()")

    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    told = str(runtime_error(caught(lightning.save_checkpoint, str(tmp_path / "last.ckpt"), fail), None))
    for part in ("the disk is full", "GiB free", f"'{tmp_path}/last.ckpt'", "every_n_epochs", "save_top_k"):
        assert part in told
    told = str(runtime_error(OSError(errno.ENOSPC, "No space left on device", "log.txt"), None))
    assert "log.txt" in told
    assert "save_top_k" not in told


def test_bugs_are_no_runtime_errors() -> None:
    for bug in (RuntimeError("shape mismatch"), KeyError("x"), FileNotFoundError(errno.ENOENT, "No such file", "x")):
        assert runtime_error(bug, "update") is None


def test_an_environment_shows_its_own_traceback_and_what_led_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Also when it runs out of memory, since no key of ours would change that."""
    session = in_module("lightning_agentrl.episodes.session", "def _step_env(call): call()")
    wrapper = in_module("gymnasium.core", "def step(call): call()")
    for kind in (IndexError, MemoryError):

        def fail(kind: type[Exception] = kind) -> None:
            raise kind("no such room")

        error = caught(session._step_env, lambda call=fail: wrapper.step(call))
        error.add_note("environment 0, episode 3 with seed 7, in turn 2, action 'left'")
        assert [frame.name for frame in environment_frames(error)] == ["<lambda>", "fail"]
        assert end(error) == 1
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == "Traceback (most recent call last):"
        assert "training_step" not in "".join(lines)
        assert lines[-1] == (
            f"agentrl: the environment raised {kind.__name__}: no such room "
            "(environment 0, episode 3 with seed 7, in turn 2, action 'left')"
        )


def test_the_cause_of_an_environments_error_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    session = in_module("lightning_agentrl.episodes.session", "def _step_env(call): call()")

    def fail() -> None:
        raise IndexError("no such room") from KeyError("door")

    error = caught(session._step_env, fail)
    end(error)
    told = capsys.readouterr().err
    assert told.index("KeyError: 'door'") < told.index("direct cause") < told.index("IndexError: no such room")
    error.__cause__ = ExceptionGroup("unhandled errors in a TaskGroup", [error])
    end(error)
    assert "TaskGroup" not in capsys.readouterr().err


def test_an_answer_that_is_none_of_an_environment_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    session = in_module("lightning_agentrl.episodes.session", "def _step_env(answer):\n    a, b, c, d, e = answer")
    error = caught(session._step_env, ("text", 0.0, True, {}))
    error.add_note("environment 0")
    assert end(error) == 2
    told = capsys.readouterr().err
    assert "step gives (observation, reward, terminated, truncated, info)" in told
    assert told.endswith("(environment 0)\n")


def in_module(name: str, code: str) -> ModuleType:
    """Functions that a traceback shows as those of a module."""
    module = ModuleType(name)
    exec(code, module.__dict__)
    return module


def caught(call: Callable[..., None], *arguments: object) -> Exception:
    with pytest.raises(Exception) as info:  # noqa: PT011
        call(*arguments)
    return info.value


@pytest.mark.parametrize(
    ("env_id", "kwargs", "sentence"),
    [
        ("agentrl_envs:Bandt-v0", {}, "did you mean agentrl_envs:Bandit-v0?"),
        ("agentrl_envs:Bandit-v7", {}, "did you mean agentrl_envs:Bandit-v0?"),
        ("Chess-v0", {}, "there is no environment 'Chess-v0' (key data.init_args.env.id)"),
        ("my_gmes:Chess-v0", {}, "no module 'my_gmes'"),
        (
            "agentrl_envs:Bandit-v0",
            {"arm": 2},
            "has no argument 'arm' (key data.init_args.env.kwargs.arm); known: arms; ",
        ),
        ("agentrl_envs:Bandit-v0", {"arms": 9}, "Bandit has 2 to 3 arms, not 9. (key data.init_args.env.kwargs)"),
    ],
)
def test_an_environment_that_cannot_be_made(env_id: str, kwargs: dict[str, int], sentence: str) -> None:
    error = caught(lambda: gymnasium.make(env_id, **kwargs).close())
    assert sentence in str(environment_problem(env_id, kwargs, error))


def test_an_id_of_ours_without_its_module_is_recognised() -> None:
    error = gymnasium.error.NameNotFound("Environment `Bandit` doesn't exist.")  # as long as nobody imported ours
    assert "did you mean agentrl_envs:Bandit-v0?" in str(environment_problem("Bandit-v0", {}, error))
