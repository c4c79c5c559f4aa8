"""What others say in prose: every pattern is provoked by the one who says it."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from jsonargparse import ArgumentParser
from lightning import Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import MLFlowLogger
from safetensors import safe_open
from safetensors.torch import save_file

import lightning_agentrl.rollout
from lightning_agentrl.commands.fit import AgentCLI
from lightning_agentrl.errors import ConfigError, Problem, explain
from lightning_agentrl.errors.foreign_messages import (
    LostRank,
    disk_full,
    error_number,
    lost_rank,
    missing_package,
    not_plain,
    out_of_memory,
    trainer_problem,
    unknown_metric,
)
from lightning_agentrl.errors.problem import first_line
from tests.started import outcomes

MODEL: dict[str, Any] = {"class_path": "PPOAgent", "init_args": {"model": "demo"}}
DATA: dict[str, Any] = {"class_path": "RolloutDataModule", "init_args": {"env": {"id": "agentrl_envs:Bandit-v0"}}}
Parse = Callable[..., Any]


class Parsed(Exception):
    """The config was taken."""


class Parsing(AgentCLI):
    """Stops before anything is built."""

    def before_instantiate_classes(self) -> None:
        raise Parsed(self.settings.as_dict())


@pytest.fixture
def parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parse:
    """Parse a config, with changes by top key, and arguments, for `fit` or for no command; gives what came of it."""

    def parse(*arguments: str, run: bool = True, **changes: Any) -> dict[str, Any]:
        config = {"model": MODEL, "data": DATA} | changes
        (tmp_path / "given.yaml").write_text(yaml.safe_dump({k: v for k, v in config.items() if v is not None}))
        given = ["fit"] * run + ["--config", str(tmp_path / "given.yaml"), *arguments]
        monkeypatch.setattr(sys, "argv", ["agentrl", *given])
        with pytest.raises(Parsed) as end:
            Parsing(run=run)
        return end.value.args[0]

    return parse


@pytest.fixture
def refused(parse: Parse) -> Callable[..., Problem]:
    """What the parser's complaint became."""

    def refused(*arguments: str, **changes: Any) -> Problem:
        with pytest.raises(ConfigError) as error:
            parse(*arguments, **changes)
        return error.value.problem

    return refused


def data(**init_args: Any) -> dict[str, Any]:
    return {**DATA, "init_args": {**DATA["init_args"], **init_args}}


def test_a_right_config_is_taken(parse: Parse) -> None:
    assert parse()["model"]["class_path"] == "lightning_agentrl.PPOAgent"


@pytest.mark.parametrize(
    ("changes", "key", "suggestion"),
    [
        (
            {"model": {"class_path": "PPOAgent", "init_args": {"lr_actr": 1}}},
            "model.init_args.lr_actr",
            "optim.lr_actor",
        ),
        ({"model": {"class_path": "PPOAgent", "init_args": {"critc": 1}}}, "model.init_args.critc", "critic"),
        ({"data": data(num_env=1)}, "data.init_args.num_env", "num_envs"),
        ({"data": data(prompt={"thnk": True})}, "data.init_args.prompt.thnk", "think"),  # of a dataclass
        ({"data": data(max_prompt_tokens=9)}, "data.init_args.max_prompt_tokens", "prompt.max_prompt_tokens"),
        ({"trainer": {"max_epoch": 1}}, "trainer.max_epoch", "max_epochs"),
        (
            {"trainer": {"callbacks": ["StageProgress", {"class_path": "CriticWarmup", "init_args": {"rollout": 1}}]}},
            "trainer.callbacks.init_args.rollout",
            "rollouts",
        ),
    ],
)
def test_an_unknown_key(changes: dict[str, Any], key: str, suggestion: str, refused: Callable[..., Problem]) -> None:
    found = refused(**changes)
    assert (found.key, found.suggestion) == (key, suggestion)


def test_an_unknown_key_of_a_group_where_no_command_is_named(refused: Callable[..., Problem]) -> None:
    found = refused(run=False, trainer={"max_epoch": 1})
    assert (found.key, found.suggestion) == ("trainer.max_epoch", "max_epochs")


def test_a_key_of_another_command_at_the_top(refused: Callable[..., Problem]) -> None:
    for run in (True, False):
        found = refused(run=run, verbose=True)  # of `agentrl validate`, which saves it in its config
        assert (found.key, found.what) == ("verbose", "there is no key 'verbose' at the top of a config")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("WindowMemry", ["there is no Memory 'WindowMemry'", "did you mean WindowMemory?"]),
        ("SharedCritic", ["there is no Memory 'SharedCritic'", "known: ActionsOnlyMemory"]),  # of another kind
        ("lightning_agentrl.models.critic.SharedCritic", ["there is no Memory", "known: ActionsOnlyMemory"]),
        ("my_code.MyMemory", ["no module 'my_code'", "must be importable"]),
        ("lightning_agentrl.prompts.Window", ["there is no Memory 'lightning_agentrl.prompts.Window'"]),
    ],
)
def test_an_unknown_class(name: str, parts: list[str], refused: Callable[..., Problem]) -> None:
    found = refused(data=data(memory={"class_path": name}))
    assert (found.key, found.value) == ("data.init_args.memory.class_path", name)
    for part in parts:
        assert part in str(found)


def test_a_misspelt_class_of_ones_own(
    refused: Callable[..., Problem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from lightning_agentrl.prompts import WindowMemory\n\nclass MyMemory(WindowMemory): ..."
    (tmp_path / "my_own_code.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    found = refused(data=data(memory={"class_path": "my_own_code.MyMemry"}))
    assert found.suggestion == "my_own_code.MyMemory"  # its short name is not known before it is imported
    assert refused(data=data(memory={"class_path": "my_own_code.WindowMemry"})).suggestion == "WindowMemory"


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("import os\n\nclass Mine(Memory): ...", ["NameError: name 'Memory' is not defined", "line 3)"]),
        ("1 / 0", ["ZeroDivisionError: division by zero", "line 1)"]),
        ("import os.nothing", ["needs the module 'os.nothing'", "line 1)"]),
    ],
)
def test_a_module_that_cannot_be_imported(
    code: str, parts: list[str], refused: Callable[..., Problem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_broken_code.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    found = refused(data=data(memory={"class_path": "my_broken_code.Mine"}))
    assert found.key == "data.init_args.memory.class_path"
    for part in ["importing my_broken_code", "my_broken_code.py", *parts]:
        assert part in str(found)


@pytest.mark.parametrize(
    ("arguments", "changes", "key"),
    [
        ([], {"data": data(memory=3)}, "data.init_args.memory"),
        ([], {"model": {"init_args": {"model": "demo"}}}, "model"),
        ([], {"model": {"model": "demo"}}, "model"),
        ([], {"trainer": {"callbacks": [{"every": 2}]}}, "trainer.callbacks"),
    ],
)
def test_a_value_in_place_of_a_class(
    arguments: list[str], changes: dict[str, Any], key: str, refused: Callable[..., Problem]
) -> None:
    found = refused(*arguments, **changes)
    assert (found.key, found.classless) == (key, True)
    assert found.known


@pytest.mark.parametrize("keys", [None, {"every": 2}])
def test_a_callback_whose_name_is_a_key(keys: dict[str, Any] | None, refused: Callable[..., Problem]) -> None:
    found = refused(trainer={"callbacks": ["RunSummary", {"TurnLog": keys}]})
    assert (found.key, found.classless) == ("trainer.callbacks", True)
    assert found.suggestion == "{class_path: TurnLog, init_args: ...}"


def test_a_class_of_ones_own_that_leaves_something_out(
    refused: Callable[..., Problem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from lightning_agentrl.prompts import Memory\nclass Half(Memory):\n    def recall(self, past): ..."
    (tmp_path / "my_half_memory.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    found = refused(data=data(memory={"class_path": "my_half_memory.Half"}))
    assert found.key == "data.init_args.memory.class_path"
    assert "my_half_memory.Half is abstract: it does not define longest" in str(found)


@pytest.mark.parametrize(
    ("arguments", "changes", "key", "sentence"),
    [
        ([], {"data": data(prompt={"system": 3})}, "data.init_args.prompt.system", "must be str, got '3'"),
        (
            ["--data.init_args.env.timeout_seconds", "1m"],
            {},
            "data.init_args.env.timeout_seconds",
            "a number, got '1m'",
        ),
        (["--data.init_args.env.worker", "proces"], {}, "data.init_args.env.worker", "did you mean process?"),
        ([], {"data": data(env={"wording": {"tips": 1}})}, "data.init_args.env.wording.tips", "tips' in Wording"),
        ([], {"data": data(validation=32)}, "data.init_args.validation", "did you mean {episodes: 32}?"),
    ],
)
def test_a_value_inside_keys_of_their_own(
    arguments: list[str], changes: dict[str, Any], key: str, sentence: str, refused: Callable[..., Problem]
) -> None:
    found = refused(*arguments, **changes)
    assert found.key == key
    assert sentence in str(found)


@pytest.mark.parametrize(
    ("logger", "key", "sentence"),
    [
        ({"class_path": "TensorBoardLogger"}, "init_args.save_dir", "of TensorBoardLogger is missing"),
        ("TensorBoardLogger", "init_args.save_dir", "of TensorBoardLogger is missing"),
        ({"class_path": "CSVLoger"}, "class_path", "did you mean CSVLogger?"),
        (
            {"class_path": "CSVLogger", "init_args": {"save_dir": "x", "nme": "y"}},
            "init_args.nme",
            "did you mean name?",
        ),
        ({"class_path": "CSVLogger", "init_args": {"save_dir": "x", "prefix": 1}}, "init_args.prefix", "got '1'"),
        ({"class_path": "CSVLogger", "init_args": {"save_dir": "x", "version": [1]}}, "init_args.version", "got '[1]'"),
    ],
)
def test_one_of_several_loggers(logger: Any, key: str, sentence: str, refused: Callable[..., Problem]) -> None:
    first = {"class_path": "CSVLogger", "init_args": {"save_dir": "logs"}}
    found = refused(trainer={"logger": [first, logger]})
    assert found.key == f"trainer.logger.{key}"
    assert sentence in str(found)


@pytest.mark.parametrize(
    ("changes", "key", "sentence"),
    [
        ({"data": data(num_envs="many")}, "data.init_args.num_envs", "a whole number, got 'many'"),
        ({"data": data(prompt={"think": "x"})}, "data.init_args.prompt.think", "true or false, got 'x'"),
        ({"trainer": {"max_epochs": "x"}}, "trainer.max_epochs", "a whole number"),
        ({"trainer": {"precision": "fp16"}}, "trainer.precision", "one of '32-true', '64-true', 'bf16-mixed', got"),
        ({"data": data(stall_seconds=[1])}, "data.init_args.stall_seconds", "a number, got '[1]'"),
    ],
)
def test_a_value_of_another_type(
    changes: dict[str, Any], key: str, sentence: str, refused: Callable[..., Problem]
) -> None:
    found = refused(**changes)
    assert found.key == key
    assert f"{key} must be {sentence}" in str(found)


def test_a_missing_key(refused: Callable[..., Problem]) -> None:
    assert "the keys data and model are missing" in str(refused(model=None, data=None))
    found = refused(model={"class_path": "PPOAgent"})
    assert (found.key, found.missing) == ("model.init_args.model", True)


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("--max_epochs=1", "there is no option '--max_epochs' (command line); did you mean --trainer.max_epochs?"),
        ("--trainer.max_epoch=1", "there is no key 'max_epoch' in Trainer"),
        ("trainer.max_epochs=1", "the argument 'trainer.max_epochs=1' belongs to no key"),
        ("more.yaml", "did you mean --config more.yaml?"),
    ],
)
def test_an_unknown_argument(argument: str, sentence: str, refused: Callable[..., Problem]) -> None:
    found = refused(argument)
    assert sentence in found.sentence([found.place] if found.place else [])


def test_an_unknown_argument_of_a_small_command() -> None:
    class Parser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> None:  # type: ignore[override]
            raise ConfigError(explain(message, ex, ["run", "out"]))

    parser = Parser()
    parser.add_argument("run", type=str)
    parser.add_argument("--out", type=str)
    for arguments, sentence in (
        (["here", "--outt=3"], "there is no option '--outt'; known: --run, --out; did you mean --out?"),
        (["here", "a.yaml"], "the argument 'a.yaml' belongs to no key"),
        ([], "the key run is missing"),
    ):
        with pytest.raises(ConfigError) as error:
            parser.parse_args(arguments)
        assert sentence in str(error.value.problem).replace(" (command line)", "")


def test_a_complaint_that_nothing_recognises_is_shown_as_it_is() -> None:
    assert str(explain("Something new\nmore of it")) == "Something new"


# Classes that have moved

MOVED = {  # where a class was, and under which name a saved config still has it
    "lightning_agentrl.rollout.memory.WindowMemory": "lightning_agentrl.rollout.WindowMemory",
    "lightning_agentrl.rollout.memory.FullMemory": "lightning_agentrl.rollout.FullMemory",
    "lightning_agentrl.rollout.interaction.TurnInteraction": "lightning_agentrl.rollout.TurnInteraction",
    "lightning_agentrl.engines.transformers_engine.TransformersEngine": "lightning_agentrl.engines.TransformersEngine",
}


@pytest.mark.parametrize(
    "deep", [pytest.param(deep, marks=pytest.mark.slow if i else ()) for i, deep in enumerate(MOVED)]
)
def test_a_saved_config_names_classes_as_it_did_before_they_moved(
    deep: str, parse: Parse, refused: Callable[..., Problem]
) -> None:
    """The public path works, and a path into a module is answered with the name that works."""
    name = deep.rsplit(".", 1)[1]
    key = next(key for key in ("memory", "interaction", "engine") if name.lower().endswith(key))
    assert parse(data=data(**{key: {"class_path": MOVED[deep]}}))["data"]["init_args"][key]["class_path"].endswith(name)
    found = refused(data=data(**{key: {"class_path": deep}}))
    assert found.suggestion == name
    assert parse(data=data(**{key: {"class_path": name}}))


def test_what_is_saved_is_a_public_path_that_can_be_given_again(parse: Parse) -> None:
    """Modules may move as long as rooms export their classes, since a module's path is never written."""
    kinds = {"memory": "WindowMemory", "interaction": "TurnInteraction", "engine": "TransformersEngine"}
    saved = parse(data=data(**{key: {"class_path": name} for key, name in kinds.items()}))["data"]
    for path in (saved["class_path"], *(saved["init_args"][key]["class_path"] for key in kinds)):
        assert path.count(".") in (1, 2)  # package, room if it is not one of the first names, class
    assert parse(data=saved)["data"] == saved


def test_every_public_name_of_the_rollout_room_is_there() -> None:
    for name in lightning_agentrl.rollout.__all__:
        assert hasattr(lightning_agentrl.rollout, name)


# Memory and disk


def raised(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return caught.value


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        (lambda: torch.empty(2**48), "tried to allocate 1048576.0 GiB"),
        (lambda: np.empty(2**48), "tried to allocate 2.00 PiB"),
        (lambda: bytearray(2**62), ""),
    ],
)
def test_memory_that_runs_out_on_a_cpu(call: Callable[[], object], facts: str) -> None:
    assert out_of_memory(raised(call)) == ("CPU", facts)


@pytest.mark.gpu
def test_memory_that_runs_out_on_a_gpu() -> None:
    found = out_of_memory(raised(lambda: torch.empty(2**48, device="cuda")))
    assert found is not None
    device, facts = found
    assert device == "GPU"
    assert "tried to allocate 1048576.00 GiB" in facts
    assert " were free" in facts


def test_other_errors_are_not_about_memory_or_disk() -> None:
    for bug in (raised(lambda: torch.zeros(2) @ torch.zeros(3)), raised(lambda: {}["x"])):
        assert out_of_memory(bug) is None
        assert not disk_full(bug)


def test_a_full_disk_is_told_by_torch_without_a_reason() -> None:
    error = raised(lambda: torch.save(torch.zeros(100_000), "/dev/full"))
    assert disk_full(error)
    assert getattr(error, "errno", None) != errno.ENOSPC


def test_the_error_of_the_system_is_read_from_that_of_safetensors(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    error = raised(lambda: save_file({"a": torch.zeros(1)}, tmp_path / "folder"))
    assert not isinstance(error, OSError)
    assert error_number(error) == errno.EISDIR
    assert error_number(raised(lambda: safe_open(Path(__file__), "pt"))) is None  # no such file of weights


def test_what_torch_does_not_read_from_a_checkpoint_is_named(tmp_path: Path) -> None:
    torch.save({"a": np.float64(1)}, tmp_path / "saved")
    assert not_plain(raised(lambda: torch.load(tmp_path / "saved", weights_only=True))).startswith("numpy.")
    (tmp_path / "saved").write_bytes(b"no checkpoint")
    assert not_plain(raised(lambda: torch.load(tmp_path / "saved", weights_only=True))) == ""


# gloo


def reduce_with(rank: int, folder: Path, other: str) -> None:
    """Reduce on one of two processes, of which the second ends or hangs."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=2)
    )
    dist.barrier()
    if rank == 1:
        if other == "hangs":
            time.sleep(8)
        os._exit(0)
    try:
        dist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize(("other", "closed"), [("ends", True), ("hangs", False)])
def test_a_process_that_gloo_lost(tmp_path: Path, other: str, closed: bool) -> None:
    (_, output), _ = outcomes(2, reduce_with, tmp_path, other, folder=tmp_path, seconds=120)
    found = lost_rank(RuntimeError(output))
    assert found is not None, output
    assert found.closed is closed
    assert bool(found.address) is closed
    assert lost_rank(RuntimeError("something timed out")) is None
    assert lost_rank(ValueError(output)) is None


# Lightning


@pytest.mark.parametrize(
    "callback",
    [
        lambda path: EarlyStopping("val/sucess", check_on_train_epoch_end=True),
        lambda path: ModelCheckpoint(path, monitor="val/sucess"),
    ],
)
def test_a_metric_that_nothing_logs(callback: Callable[[Path], Any], tmp_path: Path) -> None:
    class Logging(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val/success", 1.0)
            return super().training_step(batch, batch_idx)

    trainer = Trainer(
        max_epochs=1,
        limit_train_batches=1,
        limit_val_batches=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback(tmp_path)],
        default_root_dir=tmp_path,
    )
    found = unknown_metric(raised(lambda: trainer.fit(Logging())))
    assert found is not None
    assert (found.value, found.suggestion) == ("val/sucess", "val/success")


def test_what_the_trainer_refuses_has_its_key() -> None:
    with pytest.raises((MisconfigurationException, ValueError)) as caught:
        Trainer(accelerator="cpuu")
    found = trainer_problem(caught.value, {})
    assert (found.key, found.value) == ("trainer.accelerator", "cpuu")
    assert str(found).startswith("trainer: ")


@pytest.mark.parametrize(
    "settings", [{"devices": "two"}, {"max_time": "soon"}, {"profiler": "simpel"}, {"limit_val_batches": 2.5}], ids=str
)
def test_what_the_trainer_refuses_has_its_key_however_it_says_so(settings: dict[str, Any]) -> None:
    with pytest.raises((MisconfigurationException, ValueError, TypeError)) as caught:
        Trainer(accelerator="cpu", logger=False, **settings)
    assert trainer_problem(caught.value, settings).key == f"trainer.{next(iter(settings))}"


def test_what_the_trainer_refuses_has_its_key_where_the_value_is_a_bare_word() -> None:
    told = MisconfigurationException("No supported gpu backend found!")  # Lightning's, for a machine without one
    assert trainer_problem(told, {"strategy": "auto", "accelerator": "gpu"}).key == "trainer.accelerator"
    assert trainer_problem(told, {"strategy": "g", "accelerator": "auto"}).key == ""


def test_a_package_that_is_not_installed() -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        MLFlowLogger()
    found = missing_package(caught.value, "MLFlowLogger", "trainer.logger")
    assert str(found).startswith("MLFlowLogger needs the package mlflow")
    assert found.fix.startswith("pip install 'mlflow")


def test_gloo_does_not_always_name_itself() -> None:
    """As where the time limit passed before the operation was waited for."""
    assert lost_rank(RuntimeError("Application timeout caused pair closure")) == LostRank(closed=False)
    assert lost_rank(RuntimeError("a timeout of something else")) is None


def test_the_first_line_of_an_error_is_one_with_words():
    """Transformers begins some sentences, such as that of a missing package, with an empty line."""
    assert first_line(ImportError("\n A package is missing.\nInstall it.")).strip() == "A package is missing."
    assert first_line(ImportError(" \n")) == "ImportError"
