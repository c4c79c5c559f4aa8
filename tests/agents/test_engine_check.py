"""EngineCheck: a run with a wrong engine stops before a step, and a right run keeps all its numbers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_agentrl.agents.engine_comparison import EngineComparison
from lightning_agentrl.callbacks import EngineCheck
from lightning_agentrl.engines import Engine, TransformersEngine
from lightning_agentrl.errors import EngineMismatchError
from lightning_agentrl.losses import Bypass
from lightning_agentrl.metrics.mismatch import ROUGH
from lightning_agentrl.types import Rollout, Scores
from tests.agents import comparing_ranks
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.agents.test_engine_comparison import comparing, family
from tests.cli import Command, Config, changed
from tests.engines.plain import PlainEngine, colder
from tests.metrics.rollouts import by_hand
from tests.started import together
from tests.tiny import tiny_model_folder

OTHER = "does not sample from the policy"
WITHHELD = {"withheld": ["mlp.down_proj"]}
TRAINER: Any = None  # which the callback does not use
SENT_FIRST = 4  # updates of an engine before its first rollout: one, a moved one, one, and one that drops prefixes


def run(
    path: Path,
    folder: Path,
    engine: Engine,
    iterations: int = 3,
    lr: float = 0.02,
    action: Any = "stop",
    **settings: Any,
) -> Any:
    """Return the agent, the number of its steps, and the message of EngineCheck if it has stopped the run."""
    given = {name: settings.pop(name) for name in ("correction",) if name in settings}
    agent = make_agent(folder, lr_actor=lr, **given)
    precision = settings.pop("precision", "32-true")
    trainer = make_trainer(path, iterations, [EngineCheck(action)], precision=precision)
    try:
        trainer.fit(agent, make_data(engine=engine, **settings))
    except EngineMismatchError as error:
        return agent, trainer.global_step, str(error)
    return agent, trainer.global_step, ""


def zero(module: nn.Module) -> None:
    for weight in module.parameters():
        nn.init.zeros_(weight)


def weights(agent: Any) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in agent.state_dict().items()}


@pytest.mark.parametrize(
    "fault", [{"withheld": ["layers.1.input_layernorm"]}, {"aged": True}], ids=["one tensor", "one version behind"]
)
def test_a_trainer_without_callbacks_takes_no_step_with_a_wrong_engine(
    tmp_path: Path, tiny_folder: Path, fault: dict[str, Any]
) -> None:
    trainer = L.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    with pytest.raises(EngineMismatchError, match=OTHER):
        trainer.fit(make_agent(tiny_folder), make_data(engine=PlainEngine(**fault)))
    assert trainer.global_step == 0


@pytest.mark.slow
def test_the_command_stops_before_a_step_and_names_what_to_do(
    agentrl: Command,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = []
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_, **__: steps.append(1))
    engine = {"class_path": "tests.engines.plain.PlainEngine", "init_args": {"withheld": ["mlp.up_proj"]}}
    code, printed = agentrl(config=changed(config, "data.init_args.engine", engine))
    assert code == 1
    assert "Traceback" not in printed
    last = printed.splitlines()[-1]
    assert "agentrl verify-engine" in last
    assert "trainer.callbacks" in last
    assert steps == []


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"max_staleness": 1}], ids=["in turns", "ahead"])
def test_a_right_run_is_the_same_to_the_bit(tmp_path: Path, tiny_folder: Path, settings: dict[str, Any]) -> None:
    trained = []
    for action in ("stop", "off"):
        one_by_one = TransformersEngine(max_batch=1)  # what shares a batch would depend on the load
        agent, steps, message = run(tmp_path, tiny_folder, one_by_one, 2, action=action, **settings)
        assert (steps, message) == (4, "")
        trained.append(weights(agent))
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "settings"),
    [
        pytest.param(WITHHELD, {}, id="withheld, in turns"),
        pytest.param(WITHHELD, {"correction": Bypass()}, id="withheld, bypass"),
        pytest.param({"aged": True}, {"max_staleness": 1}, id="aged, ahead"),
        pytest.param(WITHHELD, {"max_staleness": 1}, id="withheld, ahead", marks=pytest.mark.long),
        pytest.param({"aged": True}, {}, id="aged, in turns", marks=pytest.mark.long),
        pytest.param({"aged": True}, {"correction": Bypass()}, id="aged, bypass", marks=pytest.mark.long),
    ],
)
def test_an_engine_that_goes_wrong_later_is_found_before_a_step_on_what_it_samples(
    tmp_path: Path, tiny_folder: Path, fault: dict[str, Any], settings: dict[str, Any]
) -> None:
    """With rollouts ahead the second update is the first that changes anything, and the engine is asked there."""
    from_update = SENT_FIRST + ("max_staleness" in settings)
    engine = PlainEngine(**fault, from_update=from_update)
    _, taken, message = run(tmp_path, tiny_folder, engine, **settings)
    assert OTHER in message
    assert taken == 2  # the first iteration


@pytest.mark.slow
def test_an_engine_that_goes_wrong_is_found_if_nothing_else_needs_the_log_probs(
    tmp_path: Path, tiny_folder: Path
) -> None:
    engine = PlainEngine(**WITHHELD, from_update=SENT_FIRST)
    _, taken, message = run(tmp_path, tiny_folder, engine, mini_batch_turns=16)  # one step per iteration
    assert OTHER in message
    assert taken == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "taken"),
    [([], 4), pytest.param(["mlp.down_proj"], 2, marks=pytest.mark.long)],
    ids=["right", "withheld"],
)
def test_a_model_that_rounds_much_by_itself_is_trained_unless_the_engine_goes_wrong(
    tmp_path: Path, parts: list[str], taken: int
) -> None:
    """The mean mismatch of its rollouts is beyond what 16 bits explain of other models."""
    folder = tiny_model_folder(tmp_path / "model", num_hidden_layers=6, initializer_range=0.5)
    engine = PlainEngine(withheld=parts, from_update=SENT_FIRST, dtype="bfloat16")
    agent, steps, message = run(tmp_path, folder, engine, iterations=2, precision="bf16-mixed")
    assert (OTHER in message, steps) == (bool(parts), taken)
    assert agent.trainer.logged_metrics["mismatch/logp_gap_mean"] > ROUGH.mean


@pytest.mark.slow
def test_aged_weights_with_steps_of_no_effect_go_on(tmp_path: Path, tiny_folder: Path) -> None:
    engine = PlainEngine(aged=True, from_update=SENT_FIRST)
    _, steps, message = run(tmp_path, tiny_folder, engine, lr=1e-9)
    assert (steps, message) == (6, "")


@pytest.mark.slow
def test_the_action_warn_goes_on(tmp_path: Path, tiny_folder: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = PlainEngine(withheld=["model.norm"])
        _, steps, message = run(tmp_path, tiny_folder, engine, iterations=1, action="warn")
    assert (steps, message) == (2, "")
    assert any(OTHER in str(warning.message) for warning in caught)


@pytest.mark.slow
def test_a_resumed_run_compares_its_engine_again(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = []
    rounds = EngineComparison.rounds

    def counted(comparison: EngineComparison, count: int, version: int) -> Any:
        versions.append(version)
        return rounds(comparison, count, version)

    monkeypatch.setattr(EngineComparison, "rounds", counted)
    first = make_trainer(tmp_path, 1, [EngineCheck()])
    first.fit(make_agent(tiny_folder), make_data())
    first.save_checkpoint(tmp_path / "one.ckpt")
    second = make_trainer(tmp_path, 2, [EngineCheck()])
    second.fit(make_agent(tiny_folder), make_data(), ckpt_path=tmp_path / "one.ckpt")
    assert versions == [0, 2]


@pytest.mark.slow
def test_a_model_of_zeros_passes(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "model")
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).apply(zero).save_pretrained(folder)
    _, steps, message = run(tmp_path, folder, TransformersEngine(), iterations=1)
    assert (steps, message) == (2, "")


def test_the_action_is_one_of_three() -> None:
    with pytest.raises(ValueError, match=r"action must be one of stop, warn, off, got 'maybe'"):
        EngineCheck("maybe")  # type: ignore[arg-type]


def agent_of(max_staleness: int = 0) -> Any:
    data = SimpleNamespace(max_staleness=max_staleness, groups=None)
    return SimpleNamespace(datamodule=data, policy_version=0)


def check_of(comparison: EngineComparison, action: Any = "stop") -> EngineCheck:
    """Return the callback after its first comparison."""
    check = EngineCheck(action)
    check._comparison = comparison
    return check


def test_off_compares_nothing() -> None:
    engine = PlainEngine(withheld=["mlp"])
    with comparing(engine, family("qwen3")):
        check = EngineCheck("off")
        check.on_engine_sync(TRAINER, agent_of(max_staleness=1))
        check.on_rollout(TRAINER, agent_of(), Rollout.from_samples([]))
        assert engine.updates == 0


@pytest.mark.slow
def test_an_engine_is_asked_after_an_update_only_with_rollouts_ahead() -> None:
    engine = PlainEngine()
    with comparing(engine, family("qwen3")) as comparison:
        engine.sync(0)
        engine.sampled_from = colder(0.7)
        check = check_of(comparison)
        check.on_engine_sync(TRAINER, agent_of())
        with pytest.raises(EngineMismatchError, match=OTHER):
            check.on_engine_sync(TRAINER, agent_of(max_staleness=1))


def test_a_jump_of_the_mismatch_causes_a_warning() -> None:
    """Its bound is a tenth of what rounding explains, and five times the median of the rollouts before."""
    rollout = by_hand()

    def see(check: EngineCheck, mean: float) -> None:
        scores = Scores(old_logps=rollout.rollout_logps + mean)
        check.on_rollout(TRAINER, agent_of(), rollout.union(scores=scores))

    with comparing(PlainEngine(), family("qwen3")) as comparison, warnings.catch_warnings():
        warnings.simplefilter("error")
        check = check_of(comparison)
        for mean in [2e-6] * 3 + [float("nan"), 9e-6]:
            see(check, mean)
        with pytest.warns(UserWarning, match=r"has jumped to 5e-05, from a median of (2|1\.9|2\.1)e-06"):
            see(check, 5e-5)


@pytest.mark.slow
def test_processes_go_on_or_leave_a_comparison_together(tmp_path: Path) -> None:
    together(2, comparing_ranks.run, str(tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert {case: [first[case], second[case]] for case in comparing_ranks.CASES} == {
        "all is well": ["fits: True"] * 2,
        "the engine is gone": ["Stopped: 143", "Stopped: 0 no server"],
        "the engine fails": ["_ToldElsewhere: 2", "ValueError: broken"],
        "a signal comes": ["Stopped: 143", "Stopped: 0"],
    }
