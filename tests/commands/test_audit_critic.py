"""`agentrl audit-critic`: what it says of estimates that are known, and of a run whose folder it leaves as it was."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_agentrl.advantages import GAE, AdvantageEstimator, BiLevelGAE, DualDiscountGAE, Forked
from lightning_agentrl.agents import KL, Needs, PPOAgent
from lightning_agentrl.commands.audit_critic import audit_run
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.tools.audit import (
    agreement,
    audit,
    audit_report,
    explained_by_exact_values,
    noise_of_means,
    worst_turns,
)
from lightning_agentrl.types import ForkPlan, Rollout, Sample, Scores
from tests.advantages.cases import build, draw_episodes
from tests.cli import Command, Config, changed, sentence, three_iterations
from tests.types.samples import action, prompt, turn


def test_agreement_by_hand():
    measured = torch.tensor([0.0, 1.0, 2.0, 5.0])
    found = agreement(torch.tensor([1.0, 2.0, 3.0, 6.0]), measured)
    assert (found.squared, found.bias, found.explained) == pytest.approx((1.0, 1.0, 1.0))
    assert found.rank == pytest.approx(1.0)
    assert agreement(torch.tensor([5.0, 2.0, 1.0, 0.0]), measured).rank == pytest.approx(-1.0)
    flat = agreement(torch.zeros(4), measured)
    assert math.isnan(flat.rank)
    assert flat.explained == pytest.approx(0.0)
    assert all(math.isnan(x) for x in vars(agreement(torch.zeros(0), torch.zeros(0))).values())
    assert noise_of_means([[1.0, 3.0], [5.0], [2.0, 2.0, 5.0]]) == pytest.approx((2 / 2 + 3 / 3) / 2)
    assert noise_of_means([[1e9, 1e9 + 1]]) == 0.25  # which float32 does not tell apart


def test_what_exact_values_explain_of_returns():
    # By hand: means 1 and 5, variances 2 within, half a square of 8 between, of which 2 / 2 by chance.
    assert explained_by_exact_values([[0.0, 2.0], [4.0, 6.0], [7.0]], [0, 1, 2]) == pytest.approx(7 / 9)
    assert explained_by_exact_values([[1.0, 1.0], [2.0, 2.0]], [0, 1]) == pytest.approx(1.0)
    for returns, starts in ([], []), ([[1.0, 2.0]], [0]), ([[3.0] * 2] * 2, [0, 1]), ([[1.0, 2.0], [3.0, 5.0]], [4, 4]):
        assert math.isnan(explained_by_exact_values(returns, starts))
    rng = torch.Generator().manual_seed(0)
    values = torch.randn(4_000, 1, dtype=torch.float64, generator=rng)
    drawn = values + 2 * torch.randn(4_000, 3, dtype=torch.float64, generator=rng)
    assert explained_by_exact_values(drawn.tolist(), range(4_000)) == pytest.approx(1 / 5, abs=0.03)


def test_states_that_have_much_in_common_do_not_lower_what_exact_values_explain():
    """A thousand audits of 12 environments with 8 states each, whose values and noise are shared by half."""
    rng, envs, states, branches = np.random.default_rng(0), 12, 8, 4
    starts = np.repeat(np.arange(envs), states)

    def shared(each: int) -> np.ndarray:
        return np.sqrt(0.5) * (rng.normal(size=(envs, each))[starts] + rng.normal(size=(len(starts), each)))

    found = [explained_by_exact_values((shared(1) + shared(branches)).tolist(), starts.tolist()) for _ in range(1000)]
    assert np.mean(found) == pytest.approx(0.5, abs=0.01)


def test_equal_numbers_have_no_variance_to_explain():
    equal, other = torch.full((7,), 0.1, dtype=torch.float64), torch.arange(7.0)
    assert float(equal.var()) > 0  # by rounding
    assert math.isnan(agreement(other, equal).explained)
    assert math.isnan(agreement(other, equal).rank)
    assert math.isnan(agreement(equal, other).rank)
    assert math.isnan(explained_by_exact_values([[0.1] * 3] * 7, range(7)))


def test_a_critic_that_knows_the_values_has_no_error_and_the_worst_turns_come_first():
    built = build(draw_episodes(3, dense=True), dtype=torch.float64)
    states = built.rollout.state_values
    assert states is not None
    known = torch.where(states.isnan(), torch.zeros_like(states), states)
    rollout = built.rollout.union(scores=replace(built.rollout.scores, values=known))
    found = audit(rollout, Forked(), DualDiscountGAE())
    assert found.values is not None
    assert (found.values.squared, found.values.rank, found.values.explained) == pytest.approx((0.0, 1.0, 1.0))
    assert "DualDiscountGAE (of the run)" in found.credit
    assert {"GRPO", "RLOO", "OptimalTokenBaseline", "ReMax"} <= set(found.credit)  # the rollout has all they need
    assert "Forked" not in found.credit

    shifted = audit(rollout.union(scores=replace(rollout.scores, values=known + 2)), Forked(), DualDiscountGAE())
    assert shifted.values is not None
    assert (shifted.values.squared, shifted.values.bias) == pytest.approx((4.0, 2.0))
    assert "squared error" in audit_report(shifted, "an audit", 4).text()
    forked = sum(bool(turn.branch_returns) for turn in rollout.turns)
    told = audit_report(shifted, "an audit", 4).text()
    assert (f"{len(rollout.turns) - forked} more states have no branches" in told) == (forked < len(rollout.turns))
    assert "no order of states" not in told

    alike = audit(rollout.union(state_values=states * 0 + 0.1), Forked(), DualDiscountGAE())
    told = audit_report(alike, "an audit", 4).text()
    assert ("no order of states" in told, "better than chance" in told) == (True, False)


@pytest.mark.parametrize("valued", [(0, 1, 2, 3), (0, 2), (0, 3), (1, 2)], ids=str)
@pytest.mark.parametrize("end", [2.0, math.nan], ids=["end valued", "end not valued"])
def test_advantages_that_are_exact_have_no_error_whichever_states_are_valued(valued: tuple[int, ...], end: float):
    """Those of GAE with lambda 0 and a critic that knows all values; a reply that is asked for again has none."""
    turns = [turn(index=k, reward=reward) for k, reward in enumerate((1.0, 0.0, 2.0, -1.0))]
    values = torch.tensor([[0.5], [0.75], [0.25], [1.0]])
    known = torch.full_like(values, math.nan)
    known[list(valued)] = values[list(valued)]
    rollout = Rollout.from_samples([Sample((prompt(1), action(2)), (one,)) for one in turns])
    rollout = rollout.union(
        scores=Scores(values=values),
        bootstrap_values=torch.tensor([0.0, 0.0, 0.0, 2.0]),
        state_values=known,
        forked_end_values=torch.tensor([0.0, 0.0, 0.0, end]),
    )
    found = audit(rollout, Forked(gamma=0.9, whiten=False), GAE(gamma=0.9, lam=0.0, whiten=False))
    assert found.credit["GAE (of the run)"].squared == pytest.approx(0, abs=1e-12)
    assert found.credit["ReinforcePlusPlus"].squared > 0.1


def test_what_single_branches_do_not_tell_is_told_as_unknown():
    """Their squared error is that of a throw of a coin, and no part of it need be the critic's."""
    built = build([replace(one, terminated=True) for one in draw_episodes(3, dense=True)], one_row=False)
    states = built.rollout.state_values
    assert states is not None
    critic = torch.where(states.isnan(), 0.5, states + 0.5)
    rollout = built.rollout.union(scores=replace(built.rollout.scores, values=critic))
    samples = [
        replace(one, turns=tuple(replace(turn, branch_returns=(1.0,)) for turn in one.turns)) for one in rollout.samples
    ]
    found = audit(replace(rollout, samples=tuple(samples)), Forked(branches=1), DualDiscountGAE())
    told = audit_report(found, "an audit", 1).text()
    assert "of which the critic's unknown" in told
    assert "--branches" in told
    assert "nan" not in told
    nothing = rollout.union(state_values=torch.full_like(states, math.nan))
    told = audit_report(audit(nothing, Forked(), DualDiscountGAE()), "an audit", 4).text()
    assert "no state was forked" in told
    assert "nan" not in told
    assert "are equal" not in told


@pytest.mark.parametrize("own", [GAE(gamma=0.9), DualDiscountGAE(gamma_token=0.9), BiLevelGAE(gamma_token=0.9)])
def test_a_discount_within_replies_is_told_since_forks_have_none(own: AdvantageEstimator):
    built = build([replace(one, terminated=True) for one in draw_episodes(3, dense=True)], one_row=False)
    told = audit_report(audit(built.rollout, Forked(), own), "an audit", 4).text()
    assert "discount from token to token" in told
    assert "0.9" in told
    without = audit_report(audit(built.rollout, Forked(), DualDiscountGAE(gamma_step=0.9)), "an audit", 4).text()
    assert "discount from token to token" not in without


def test_what_is_made_of_forks_is_not_compared_with_them():
    built = build(draw_episodes(3, dense=True), dtype=torch.float64)
    assert not any("Forked" in name for name in audit(built.rollout, Forked(), Forked(every=3)).credit)


def test_the_plan_of_an_audit_goes_before_that_of_the_run(tiny_folder: Path):
    agent = PPOAgent(str(tiny_folder), advantage=Forked(branches=3, gamma=0.5), kl=KL(reward=0.0))
    assert agent.needs.forks == ForkPlan(3, 1, 0.5)
    assert agent.advantage.turn_discount == 0.5
    agent.further_needs = Needs(forks=ForkPlan(8, 2, 0.5))
    assert agent.needs.forks == ForkPlan(8, 2, 0.5)


def test_the_turns_that_are_furthest_off_come_first():
    built = build([replace(one, terminated=True) for one in draw_episodes(5)], one_row=False)
    samples = [
        replace(sample, turns=tuple(replace(turn, branch_returns=(1.0, 3.0)) for turn in sample.turns))
        for sample in built.rollout.samples
    ]
    worst = worst_turns(replace(built.rollout, samples=tuple(samples)))
    gaps = [abs(value - measured) for _, value, measured in worst]
    assert {measured for *_, measured in worst} == {2.0}
    assert gaps == sorted(gaps, reverse=True)


@pytest.mark.slow
def test_a_run_is_audited_and_stays_as_it_was(agentrl: Command, config: Config):
    code, printed = agentrl(config=changed(three_iterations(config), "trainer.default_root_dir", "run"))
    assert code == 0, printed
    (saved,) = Path("run").rglob("config.yaml")
    assert "accelerator: cpu" in saved.read_text()
    saved.write_text(saved.read_text().replace("accelerator: cpu", "accelerator: gpu"))  # trained on another machine

    def sums() -> dict[str, str]:
        files = [path for path in sorted(Path("run").rglob("*")) if path.is_file() and path.suffix != ".html"]
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    before = sums()
    code, printed = agentrl("run", "--branches", "2", command="audit-critic")
    assert (code, sums()) == (0, before), printed
    page = Path("run/audit.html").read_text()
    assert "8 of 8 turns, 2 branches each" in page
    assert "DualDiscountGAE (of the run)" in page
    for arguments, part in (
        (["--branches", "0"], "at least 1"),
        (["--checkpoint", "none.ckpt"], "argument --checkpoint"),
        (["--checkpoint", str(saved)], "(argument --checkpoint)"),
    ):
        assert part in sentence(agentrl("run", *arguments, command="audit-critic"))


@pytest.mark.slow
def test_a_run_with_a_warm_up_and_checkpoints_of_its_own_is_audited_in_the_middle_of_both(
    agentrl: Command, config: Config, monkeypatch: pytest.MonkeyPatch
):
    config = changed(three_iterations(config), "trainer.default_root_dir", "run")
    config["trainer"]["logger"] = True
    config["trainer"]["callbacks"] = [
        {"class_path": "CriticWarmup", "init_args": {"rollouts": 2, "rounds": 2, "fraction": 0.5}},
        {"class_path": "RunCheckpoints", "init_args": {"keep": 3}},
        {"class_path": "RunSummary"},
    ]
    code, printed = agentrl(config=config)
    assert code == 0, printed
    code, printed = agentrl(config=config, command="validate")
    assert code == 0, printed  # the newest version below the folder is now that of a validation
    saved = {path.stem: path for path in Path("run").rglob("iteration-*.ckpt")}
    assert len(saved) == 3
    for name, path in saved.items():  # of the first two, the warm-up would go on with turns that it has
        page = f"{name}.html"
        code, printed = agentrl(
            "run", "--branches", "2", "--checkpoint", str(path), "--out", page, command="audit-critic"
        )
        assert code == 0, printed
        assert "8 of 8 turns, 2 branches each" in Path(page).read_text()
    code, printed = agentrl("--ckpt_path", "last", config=changed(config, "trainer.max_epochs", 4))
    assert code == 0, printed
    Path("elsewhere").mkdir()
    Path("run").rename("elsewhere/run")
    monkeypatch.chdir("elsewhere")  # where the config's `ckpt_path: last` finds nothing
    code, printed = agentrl("run", "--branches", "2", "--out", "newest.html", command="audit-critic")
    assert code == 0, printed
    assert "Audit of run/lightning_logs/version_2" in Path("newest.html").read_text()
    assert {path.name for path in Path().iterdir()} == {"run", "newest.html"}


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = tmp_path / "run.json"
    facts.touch()
    with pytest.raises(ConfigError, match=r"is a folder.*--out"):
        audit_run(tmp_path, None, 4, 1, tmp_path)
    with pytest.raises(ConfigError, match=r"run\.json' cannot be created.*--out"):
        audit_run(tmp_path, None, 4, 1, facts / "audit.html")
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(ConfigError, match=r"audit\.html' cannot be written.*--out"):
        audit_run(tmp_path, None, 4, 1, None)
