"""The loss of docs/extend.md does what the page says."""

from __future__ import annotations

import pytest
import torch

from lightning_agentrl.losses import PolicyLoss
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.guides import files_of
from tests.losses.test_conformance import Case, run


@pytest.fixture
def loss_class() -> type[PolicyLoss]:
    code = files_of("extend.md")["my_loss.py"]
    names: dict[str, type[PolicyLoss]] = {}
    exec(code, names)  # type: ignore[arg-type]
    assert len(code.strip().splitlines()) <= 28
    return names["UnsureFirst"]


def test_it_is_masked_without_saying_so(loss_class):
    case, loss = Case(0), loss_class(power=0.5)
    want = -((1 - case.old.exp()) ** 0.5) * case.advantages * (case.logps - case.old).exp()
    for name in ("logps", "old", "advantages"):
        setattr(case, name, torch.where(case.mask, getattr(case, name), float("nan")))
    losses, gradient = run(loss, case)
    torch.testing.assert_close(losses, torch.where(case.mask, want, 0))
    assert gradient.isfinite().all()
    assert gradient[case.mask].all()


def test_it_trains_averaged_as_it_prefers_and_logs_its_metric(tmp_path, tiny_folder, loss_class):
    agent = make_agent(tiny_folder, policy_loss=loss_class())
    trainer = make_trainer(tmp_path, 1)
    trainer.fit(agent, make_data())
    assert agent.aggregation == "seq-mean-token-mean"
    assert 0 < trainer.logged_metrics["policy/weight"] < 1


def test_a_config_may_say_another_mean(loss_class):
    assert loss_class(power=0.5, aggregation="token-mean").aggregation == "token-mean"


def test_it_refuses_what_it_cannot_do(loss_class):
    with pytest.raises(ValueError, match="power must not be negative, got -1"):
        loss_class(power=-1)
