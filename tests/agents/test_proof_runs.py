"""A run proves its engine before its first step and at each update, and is the same to the bit for it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_agentrl.agents.proof import EngineProof
from lightning_agentrl.engines import Engine, TransformersEngine
from lightning_agentrl.errors import EngineMismatchError
from lightning_agentrl.losses import Bypass
from lightning_agentrl.metrics.gap import ROUGH
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.cli import Command, Config, changed
from tests.engines.plain import PlainEngine
from tests.tiny import tiny_model_folder

WITHHELD = {"withheld": ["mlp.down_proj"]}
SENT_FIRST = 4  # updates of an engine before its first rollout: one, a moved one, one, and one that drops prefixes


def run(path: Path, folder: Path, engine: Engine, iterations: int = 3, lr: float = 0.02, **settings: Any) -> Any:
    """The trained agent, and how many steps it took until the proof stopped it, if it did."""
    given = {name: settings.pop(name) for name in ("correction",) if name in settings}
    agent = make_agent(folder, lr_actor=lr, **given)
    trainer = make_trainer(path, iterations, precision=settings.pop("precision", "32-true"))
    try:
        trainer.fit(agent, make_data(**{"engine": engine, "prove": "stop", **settings}))
    except EngineMismatchError as error:
        return agent, trainer.global_step, str(error)
    return agent, trainer.global_step, ""


def zero(module: nn.Module) -> None:
    for weight in module.parameters():
        nn.init.zeros_(weight)


def weights(agent: Any) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in agent.state_dict().items()}


@pytest.mark.slow
def test_the_command_stops_before_a_step_and_names_what_is_missing(
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
    assert "mlp.up_proj" in printed.splitlines()[-1]
    assert "data.init_args.prove" in printed.splitlines()[-1]
    assert steps == []


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"max_staleness": 1}], ids=["in turns", "ahead"])
def test_a_right_run_is_the_same_to_the_bit(tmp_path: Path, tiny_folder: Path, settings: dict[str, Any]) -> None:
    trained = []
    for prove in ("stop", "off"):
        one_by_one = TransformersEngine(max_batch=1)  # what shares a batch would depend on the load
        agent, steps, message = run(tmp_path, tiny_folder, one_by_one, 2, prove=prove, **settings)
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
    assert "does not sample from the policy" in message
    assert taken == 2  # the first iteration


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "taken"),
    [([], 4), pytest.param(["mlp.down_proj"], 2, marks=pytest.mark.long)],
    ids=["right", "withheld"],
)
def test_a_model_that_rounds_much_by_itself_is_trained_unless_the_engine_goes_wrong(
    tmp_path: Path, parts: list[str], taken: int
) -> None:
    """The mean gap of its rollouts is beyond what 16 bits explain of other models."""
    folder = tiny_model_folder(tmp_path / "model", num_hidden_layers=6, initializer_range=0.5)
    engine = PlainEngine(withheld=parts, from_update=SENT_FIRST, dtype="bfloat16")
    agent, steps, message = run(tmp_path, folder, engine, iterations=2, precision="bf16-mixed")
    assert ("does not sample from the policy" in message, steps) == (bool(parts), taken)
    assert agent.trainer.logged_metrics["mismatch/logp_gap_mean"] > ROUGH.mean


@pytest.mark.slow
def test_aged_weights_with_steps_of_no_effect_go_on(tmp_path: Path, tiny_folder: Path) -> None:
    engine = PlainEngine(aged=True, from_update=SENT_FIRST)
    _, steps, message = run(tmp_path, tiny_folder, engine, lr=1e-9)
    assert (steps, message) == (6, "")


@pytest.mark.slow
def test_a_warning_in_place_of_a_stop(tmp_path: Path, tiny_folder: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, steps, message = run(tmp_path, tiny_folder, PlainEngine(withheld=["model.norm"]), iterations=1, prove="warn")
    assert (steps, message) == (2, "")
    said = [str(warning.message) for warning in caught]
    assert any("model.norm.weight is not taken over" in text for text in said), said


@pytest.mark.slow
def test_a_resumed_run_proves_its_engine_anew(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proven = []
    at_start = EngineProof.at_start
    monkeypatch.setattr(
        EngineProof, "at_start", lambda proof, version: proven.append(version) or at_start(proof, version)
    )
    first = make_trainer(tmp_path, 1)
    first.fit(make_agent(tiny_folder), make_data(prove="stop"))
    first.save_checkpoint(tmp_path / "one.ckpt")
    make_trainer(tmp_path, 2).fit(make_agent(tiny_folder), make_data(prove="stop"), ckpt_path=tmp_path / "one.ckpt")
    assert proven == [0, 2]


@pytest.mark.slow
def test_a_model_of_zeros_passes_the_proof(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "model")
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).apply(zero).save_pretrained(folder)
    _, steps, message = run(tmp_path, folder, TransformersEngine(), iterations=1)
    assert (steps, message) == (2, "")


def test_what_to_do_is_one_of_three() -> None:
    with pytest.raises(ValueError, match=r"data.init_args.prove must be one of stop, warn, off, got 'maybe'"):
        make_data(prove="maybe")
