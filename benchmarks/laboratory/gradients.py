"""Variance and bias of the policy gradients that estimators make of the same rollouts, against the exact gradient.

    python -m benchmarks.laboratory.gradients            # replies of 1 and 8 words; writes docs/results/gradients.md

The policy is the one that a cell of the laboratory starts from; a critic is fitted to it first, then nothing moves. A
piece of rollouts that is there is not made again, so this can be stopped at any time.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor

from benchmarks.laboratory.arms import Arm, agent_of, rollouts
from benchmarks.laboratory.cloning import PROMPT, Start, cloned
from benchmarks.laboratory.exact import Tables, tables
from benchmarks.laboratory.fits import quiet, quiet_trainer
from benchmarks.laboratory.noise import bootstrap, cosine, mean_product, relative_variance, variance_ratio
from benchmarks.laboratory.policy import PolicyReader
from benchmarks.laboratory.records import save, save_tensors
from lightning_agentrl.advantages import (
    GAE,
    GRPO,
    RLOO,
    AdvantageEstimator,
    DualDiscountGAE,
    GiGPO,
    OptimalTokenBaseline,
    ReinforcePlusPlus,
    TurnLeaveOneOut,
    whiten,
)
from lightning_agentrl.agents import PPOAgent
from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.agents.scoring import action_rows, to_columns
from lightning_agentrl.models.critic import SeparateCritic
from lightning_agentrl.types import Rollout

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "results" / "gradients.json"
LENGTHS = (1, 8)  # words of a reply
DISCOUNTS = {"gamma_step": 0.99, "lam_step": 0.95}
ROLLOUTS, PIECE = 120, 20  # in all, and between two saves
FITTING = 30  # iterations that the critic learns
REFERENCE = "RLOO"
NAMES: dict[str, AdvantageEstimator] = {
    "rewards to go, no baseline": ReinforcePlusPlus(whiten=False),
    "RLOO": RLOO(),
    "GRPO": GRPO(),
    "GiGPO": GiGPO(),
    "leave-one-out by turn": TurnLeaveOneOut(),
    "optimal token baseline": OptimalTokenBaseline(),
    "optimal token baseline, leave-one-out": OptimalTokenBaseline(leave_one_out=True),
    "GAE .99/.95": GAE(gamma=0.99, lam=0.95),
    "dual GAE .99/.95": DualDiscountGAE(**DISCOUNTS),
}


class WithAll(DualDiscountGAE):
    """So that the agent computes what any of the estimators needs, and its critic learns the values of dual GAE."""

    needs_groups: ClassVar[bool] = True
    needs_sum_pi_squared: ClassVar[bool] = True


PLAYED = Arm(WithAll, DISCOUNTS, group=8)
TEXT = """\
# Variance and bias of gradients

What estimators make of the same rollouts in the game of [the laboratory](laboratory.md) (horizon 12, at most 24 turns),
under fixed weights: the policy that its cells start from, and a critic that was fitted to it for {fitting} iterations,
to the returns of dual GAE .99/.95 (1/1 within a turn). Written by `python -m benchmarks.laboratory.gradients`.

{count} independent rollouts, each of 4 groups of 8 episodes. The gradient of a rollout is that of the sum over tokens
of advantage times log-prob, per episode; GAE is whitened, as by default. *Relative variance* is the trace of the
covariance over the squared norm of the mean, *against RLOO* the quotient of two of them on the same rollouts, *cosine*
that of the mean gradients; all with the 95 % interval of a bootstrap over rollouts. Products of means are taken over
pairs of different rollouts, so that noise does not count as signal; being estimates, cosines can lie above 1. The
*exact gradient* is that of the probability of success, by dynamic programming through the model; with thoughts before
the action there is none, and RLOO, which is unbiased, stands for it.
{sections}{rooms}"""
SECTION = """
## Replies of {words}

Success of the policy {success:.2f}.

{reading}

{table}
"""
# Of rollouts whose records are kept in the history only, so the numbers stand here.
ROOMS = """
## Earlier, in two rooms

The same was measured before in a smaller game, [two rooms](laboratory.md#every-estimator-learns): 120 rollouts of 16
groups of 4 episodes, which take 1 to 12 turns, with replies of 1 to 4 tokens, a policy that was trained half-way (mean
reward 0.56) and a critic that was fitted to it for 30 iterations. There the optimal token baseline did not have the
lower variance that it was made for: its relative variance was 1.23 (1.02 to 1.52) of that of RLOO, and 1.03 (0.86 to
1.22) with an episode left out of its own baseline. Groups of four tell little about each place in an episode, and where
only the longest one is left it has no baseline. GAE with lambda .95 and no discount had 0.35 (0.25 to 0.47), and its
gradient pointed elsewhere: a cosine to RLOO of 0.90 (0.80 to 0.98). Rewards to go without a baseline had 2.49 (1.46 to
4.65). The whole table: `git show 47539c3bbd60:docs/results/estimators.md`.
"""


def policy_gradients(agent: PPOAgent, rollout: Rollout, advantages: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return gradients [D] of ``sum over tokens of advantage * log-prob / episodes``, one for each kind of advantages
    [B, A].

    All of one pass, since they differ in the factors of the log-probs only.
    """
    parameters = list(agent.actor.lm.parameters())
    totals = {name: [torch.zeros_like(p) for p in parameters] for name in advantages}
    episodes = len(rollout.episode.unique())
    rows, reader = action_rows(rollout), agent.reader()
    with agent.evaluation_mode(), torch.enable_grad():
        for index in reader.micro_batches(rows):
            packed = reader.pack([rows[i] for i in index])
            scores = agent.actor.token_scores(agent.actor.hidden(packed), packed.targets, reader.temperature)
            micro = rollout.select(index)
            logps_BA = to_columns(scores.logps, micro.action_mask)
            for name, advantages_BA in advantages.items():
                factors_BA = advantages_BA[index, : logps_BA.shape[1]].to(logps_BA.dtype) / episodes
                parts = torch.autograd.grad(logps_BA, parameters, factors_BA, retain_graph=True)
                for total, part in zip(totals[name], parts, strict=True):
                    total += part
    return {name: torch.cat([total.flatten() for total in of_name]) for name, of_name in totals.items()}


class KeepGradients(RolloutCallback):
    """One gradient per estimator of each rollout."""

    def __init__(self) -> None:
        self.gradients: dict[str, list[Tensor]] = {name: [] for name in NAMES}
        self.successes: list[bool] = []

    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        advantages = {}
        for name, estimator in NAMES.items():
            advantages[name], _ = estimator.estimate(rollout)
            if estimator.whiten:  # as agents do
                advantages[name] = whiten(advantages[name], rollout.action_mask)
        for name, gradient in policy_gradients(agent, rollout, advantages).items():
            self.gradients[name].append(gradient)
        self.successes += [bool(turn.success) for turn in rollout.turns if turn.done]


def exact_gradient(reader: PolicyReader, game: Tables, parameters: Sequence[Tensor]) -> Tensor:
    """Return the gradient [D] of the probability of success within the limit of turns, for replies of one word.

    Args:
        reader: of the policy.
        game: whose success is meant.
        parameters: of the reader's model, in the order of the gradient.
    """
    if reader.reply_tokens != 1:
        raise ValueError(f"the exact gradient is that of replies of one word, got {reader.reply_tokens} words")
    next_SAS, goal_SA, start_S = (torch.from_numpy(x) for x in (game.next_SAS, game.goal_SA, game.start_S))
    said_SW = reader.lm(reader.prompts_SP).logits[:, -1].double().softmax(-1)
    moves_SA = said_SW[:, reader.moves]
    policy_SA = torch.cat([moves_SA, 1 - moves_SA.sum(1, keepdim=True)], 1)
    go_on_SS = torch.einsum("sa,sat->st", policy_SA, next_SAS)
    reached_S, here_S = (policy_SA * goal_SA).sum(1), start_S
    success = torch.zeros((), dtype=torch.float64)
    for _ in range(game.rules.max_turns):
        success = success + here_S @ reached_S
        here_S = here_S @ go_on_SS
    return torch.cat([g.flatten() for g in torch.autograd.grad(success, list(parameters))])


def critic_of(start: Start, model: Path, folder: Path) -> Path:
    """Train a critic while the policy stays as it is; return the file of its weights."""
    path = folder / "critic.pt"
    if not path.exists():
        agent = resting(model, lr_critic=5e-4)
        L.seed_everything(0, verbose=False)
        quiet_trainer(folder, FITTING, []).fit(agent, rollouts(start, PLAYED, 1))
        assert agent.critic is not None
        save_tensors(path, agent.critic.state_dict())
    return path


def resting(model: Path, lr_critic: float = 0.0) -> PPOAgent:
    """Return an agent whose policy does not move."""
    agent = agent_of(model, PLAYED, SeparateCritic())
    agent.optim = replace(agent.optim, lr_actor=0.0, lr_critic=lr_critic)
    return agent


def measure(start: Start, model: Path, critic: Path, folder: Path, piece: int) -> Path:
    """Return the file of the gradients of some rollouts."""
    path = folder / f"gradients{piece}.pt"
    if not path.exists():
        agent = resting(model)
        agent.configure_model()
        assert agent.critic is not None
        agent.critic.load_state_dict(torch.load(critic, weights_only=True))
        keep = KeepGradients()
        L.seed_everything(0, verbose=False)
        quiet_trainer(folder, PIECE, [keep]).fit(agent, rollouts(start, PLAYED, 100 + piece))
        names = [name for name, _ in agent.actor.lm.named_parameters()]
        told = {"successes": keep.successes, "names": names}
        save_tensors(path, told | {name: torch.stack(of_name) for name, of_name in keep.gradients.items()})
    return path


def numbers(files: Sequence[Path], exact: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """Return what the table shows.

    Args:
        files: of all pieces.
        exact: gradient by the name of its parameter; None: there is none.
    """
    pieces = [torch.load(file, weights_only=True) for file in files]
    gradients = {name: torch.cat([piece[name] for piece in pieces]).double() for name in NAMES}
    products = {name: g_MD @ g_MD.T for name, g_MD in gradients.items()}
    other, count = products[REFERENCE], len(products[REFERENCE])
    rows = {}
    for name, own in products.items():
        both = gradients[name] @ gradients[REFERENCE].T
        rows[name] = {
            "variance": asdict(bootstrap(partial(relative_variance, own), count)),
            "ratio": asdict(bootstrap(partial(variance_ratio, own, other), count)),
            "cosine": asdict(bootstrap(partial(cosine, own, other, both), count)),
        }
        if exact is not None:
            exact_D = torch.cat([exact[each].flatten() for each in pieces[0]["names"]]).double()
            along_M = gradients[name] @ exact_D / exact_D.square().sum()
            rows[name]["along"] = asdict(bootstrap(partial(_mean, along_M), count))
            rows[name]["exact"] = asdict(bootstrap(partial(_cosine_to, own, along_M, exact_D.norm()), count))
    successes = [success for piece in pieces for success in piece["successes"]]
    return {"rollouts": count, "success": sum(successes) / len(successes), "rows": rows}


def _mean(numbers_M: Tensor, counts_M: Tensor) -> Tensor:
    return counts_M @ numbers_M / counts_M.sum()


def _cosine_to(products_MM: Tensor, along_M: Tensor, length: Tensor, counts_M: Tensor) -> Tensor:
    """Cosine of the mean of gradients to a vector of a length, from their parts along it in units of it."""
    return _mean(along_M, counts_M) * length / mean_product(products_MM, counts_M).clamp_min(1e-300).sqrt()


def run(words: int, folder: Path) -> dict[str, Any]:
    """Return the numbers of one length of replies."""
    start = Start(reply_tokens=words)
    model, kept = cloned(start, folder), folder / f"gradients-{words}-dual"
    kept.mkdir(parents=True, exist_ok=True)
    critic = critic_of(start, model, kept)
    files = []
    for piece in range(ROLLOUTS // PIECE):
        files.append(measure(start, model, critic, kept, piece))
        print(f"{words} words: gradients of {(piece + 1) * PIECE} of {ROLLOUTS} rollouts", flush=True)
    if words > 1:
        return numbers(files, None)
    reader = PolicyReader(model, tables(start.rules).states, PROMPT, words)
    named = dict(reader.lm.named_parameters())
    gradient_D = exact_gradient(reader, tables(start.rules), list(named.values()))
    parts = gradient_D.split([each.numel() for each in named.values()])
    return numbers(files, dict(zip(named, parts, strict=True)))


def reading(rows: Mapping[str, Any]) -> str:
    """Return what intervals tell of the variances and of the bias."""
    lower = [name for name, row in rows.items() if row["ratio"]["high"] < 1]
    higher = [name for name, row in rows.items() if row["ratio"]["low"] > 1]
    have = "have" if len(lower) > 1 else "has"
    told = [
        f"As far as intervals tell, {_listed(lower)} {have} a lower relative variance than RLOO, "
        f"and {_listed(higher)} a higher one."
    ]
    if "exact" in rows[REFERENCE]:
        off = [name for name, row in rows.items() if row["exact"]["high"] < 1]
        told.append(f"Away from the exact direction {'points' if len(off) < 2 else 'point'} {_listed(off)}.")
    return textwrap.fill(" ".join(told), 120)


def _listed(names: Sequence[str]) -> str:
    marked = [f"*{name}*" for name in names]
    return " and ".join([", ".join(marked[:-1]), marked[-1]] if len(marked) > 1 else marked) or "nothing"


def interval(x: Mapping[str, float]) -> str:
    return f"{x['value']:.2f} ({x['low']:.2f} to {x['high']:.2f})"


def table(rows: Mapping[str, Any]) -> str:
    columns = {"variance": "relative variance", "ratio": "against RLOO", "cosine": "cosine to RLOO"}
    if "exact" in rows[REFERENCE]:
        columns |= {"exact": "cosine to the exact gradient", "along": "length along it"}
    lines = [f"| estimator | {' | '.join(columns.values())} |", "|---" * (1 + len(columns)) + "|"]
    for name, row in sorted(rows.items(), key=lambda item: item[1]["variance"]["value"]):
        lines.append(f"| {name} | {' | '.join(interval(row[each]) for each in columns)} |")
    return "\n".join(lines)


def page(records: Mapping[str, Any]) -> str:
    sections = [
        SECTION.format(
            words="one word" if words == "1" else f"{words} words",
            success=found["success"],
            reading=reading(found["rows"]),
            table=table(found["rows"]),
        )
        for words, found in records.items()
    ]
    counts = {found["rollouts"] for found in records.values()}
    return TEXT.format(
        fitting=FITTING, count=" or ".join(map(str, sorted(counts))), sections="".join(sections), rooms=ROOMS
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "laboratory", help="folder of rollouts and models")
    given = parser.parse_args()
    quiet()
    records = {str(words): run(words, given.runs) for words in LENGTHS}
    save(RECORD, json.dumps(records, indent=1) + "\n")
    save(RECORD.with_suffix(".md"), page(records))


if __name__ == "__main__":
    main()
