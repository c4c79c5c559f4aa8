"""The package against `docs/one_file.py`, which says the same algorithm without any of the package's code.

A short fit is recorded: what was played, how it was scored, and the gradients and weights of every step. The one file
gets the sampled ids and nothing else, plays the same games with them, and has to come to the same numbers.
"""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import gymnasium
import lightning as L
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl_envs import TextEnv
from docs import hooks, one_file
from lightning_agentrl.advantages import DualDiscountGAE
from lightning_agentrl.losses import PPOClip
from lightning_agentrl.models.critic import SeparateCritic
from lightning_agentrl.rollout import EnvConfig, TolerantParser, TurnInteraction, WindowMemory
from lightning_agentrl.types import Rollout, Sample
from tests.agents.harness import make_agent, make_data, make_trainer

DOCS = Path(one_file.__file__).parent
RECIPE = one_file.Recipe(
    envs=4,
    turns=5,
    max_reply_tokens=8,
    invalid_penalty=0.125,  # as all rewards here, exact in the float32 in which a rollout keeps them
    kl=0.1,
    gamma_step=0.9,
    lam_step=0.8,
    gamma_token=0.95,
    lam_token=0.7,
    mini_batch=10,
    clip=0.02,
    dual_clip=1.05,
    entropy_bonus=0.01,
    value_clip=0.05,
    lr_actor=3e-3,
    lr_critic=1e-2,
    max_grad_norm=0.5,
)


class Ladder(TextEnv):
    """Three rungs up in at most three turns. Nothing is random, so equal actions give equal episodes."""

    actions = {"climb": "one rung up", "jump": "two rungs up", "rest": "stay where you are"}
    default_action = "rest"
    max_turns = 3
    system_prompt = "Get to the top of the ladder."  # type: ignore[assignment]

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self.height = 0

    def _act(self, action: str) -> tuple[float, bool]:
        rungs = {"climb": 1, "jump": 2, "rest": 0}[action]
        self.height += rungs
        return 0.25 * rungs, self.height >= 3

    def _observe(self) -> tuple[str, str]:
        return f"You stand on rung {self.height}.", ""


gymnasium.register("Ladder-v0", Ladder)


def read_as(reply: str) -> str:
    """What a reply is taken for, by its length: a random model's replies then name every action, and sometimes none."""
    return [*Ladder.actions, "nothing"][len(reply) % 4]


class ByLength(TolerantParser):
    def parse(self, reply: str, actions: Sequence[str], aliases: Mapping[str, str]) -> Any:
        return super().parse(read_as(reply), actions, aliases)


@dataclass
class Step:
    """One optimizer step of the package. Gradients are after clipping; weights before the step."""

    rollout: Rollout
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)


class Record(L.Callback):
    """Keeps what passes."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.metrics: list[dict[str, float]] = []  # of each iteration

    def on_train_batch_start(self, trainer, agent, batch, batch_idx):
        self.steps.append(Step(batch.rollout, weights(agent)))

    def on_before_optimizer_step(self, trainer, agent, optimizer):
        self.steps[-1].gradients = {n: p.grad.clone() for n, p in agent.named_parameters()}

    def on_train_epoch_end(self, trainer, agent):
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_train_end(self, trainer, agent):
        self.last = weights(agent)


def weights(agent: L.LightningModule) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in agent.named_parameters()}


@pytest.fixture(scope="module")
def folder(exact_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exact model with a large embedding of the end token, so that replies end sooner or later."""
    folder = tmp_path_factory.mktemp("one_file") / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(exact_folder), AutoTokenizer.from_pretrained(exact_folder)
    model.get_input_embeddings().weight.data[tokenizer.eos_token_id] *= 4
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def record(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Two iterations of two steps each."""
    torch.manual_seed(0)
    record = Record()
    agent = make_agent(
        folder,
        SeparateCritic(),
        advantage=DualDiscountGAE(RECIPE.gamma_step, RECIPE.lam_step, RECIPE.gamma_token, RECIPE.lam_token),
        policy_loss=PPOClip(RECIPE.clip, RECIPE.clip, RECIPE.dual_clip),
        kl_reward=RECIPE.kl,
        entropy_bonus=RECIPE.entropy_bonus,
        value_clip=RECIPE.value_clip,
        first_token_weight=RECIPE.first_token_weight,
        lr_actor=RECIPE.lr_actor,
        lr_critic=RECIPE.lr_critic,
        weight_decay=RECIPE.weight_decay,
        max_grad_norm_actor=RECIPE.max_grad_norm,
        max_grad_norm_critic=RECIPE.max_grad_norm,
    )
    data = make_data(
        env=EnvConfig("Ladder-v0"),
        num_envs=RECIPE.envs,
        turns_per_env=RECIPE.turns,
        mini_batch_turns=RECIPE.mini_batch,
        memory=WindowMemory(RECIPE.history),
        interaction=TurnInteraction(RECIPE.max_reply_tokens, ByLength(), RECIPE.invalid_penalty),
    )
    make_trainer(tmp_path_factory.mktemp("fit"), 2, [record]).fit(agent, data)
    return record


Key = tuple[int, int, int]  # environment, episode and number of a turn


def key(sample: Sample) -> Key:
    (turn,) = sample.turns
    return turn.env, turn.episode, turn.index


@dataclass
class Replay:
    """What the one file makes of the sampled ids."""

    theirs: list[dict[Key, tuple[Rollout, int]]] = field(default_factory=list)  # of each iteration: mini-batch and row
    ours: list[dict[Key, one_file.Turn]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)  # of each step, as are the following
    gradients: list[list[Tensor]] = field(default_factory=list)
    weights: list[list[Tensor]] = field(default_factory=list)

    def pairs(self) -> Iterator[tuple[Rollout, int, one_file.Turn]]:
        """Each turn: where the package has it, and that of the one file."""
        for theirs, ours in zip(self.theirs, self.ours, strict=True):
            for name, (rollout, row) in theirs.items():
                yield rollout, row, ours[name]


@pytest.fixture(scope="module")
def replay(record: Record, folder: Path) -> Replay:
    """The same iterations, from the sampled ids and the order of the turns in each mini-batch."""
    actor, reference, critic, optimizer = one_file.load(str(folder), RECIPE, torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    games = [one_file.play(gymnasium.make("Ladder-v0"), actor, tokenizer, RECIPE) for _ in range(RECIPE.envs)]
    replay, parse = Replay(), one_file.parse
    for steps in (record.steps[:2], record.steps[2:]):
        theirs = {key(s): (step.rollout, row) for step in steps for row, s in enumerate(step.rollout.samples)}
        sampled = iter([rollout.samples[row].actions[0] for _, (rollout, row) in sorted(theirs.items())])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(one_file, "sample", lambda *_, sampled=sampled: (list((s := next(sampled)).ids), [*s.logps]))
            patch.setattr(one_file, "parse", lambda text, game: parse(read_as(text), game))
            rollout = [list(islice(game, RECIPE.turns)) for game in games]
        for turns in rollout:
            one_file.score(turns, actor, reference, critic)
            one_file.dual_discount_gae(turns, RECIPE)
        ours = dict(zip(sorted(theirs), chain(*rollout), strict=True))
        one_file.whiten(list(ours.values()))
        replay.theirs.append(theirs)
        replay.ours.append(ours)
        for step in steps:
            batch = [ours[key(sample)] for sample in step.rollout.samples]
            replay.losses.append(one_file.step(batch, actor, critic, optimizer, RECIPE))
            parameters = [*actor.parameters(), *critic.parameters()]
            replay.gradients.append([parameter.grad.clone() for parameter in parameters])
            replay.weights.append([parameter.detach().clone() for parameter in parameters])
    return replay


@pytest.mark.slow
def test_every_case_is_there(record: Record) -> None:
    turns = [turn for step in record.steps for turn in step.rollout.turns]
    ends = {(turn.terminated, turn.truncated, turn.bootstrap is not None) for turn in turns}
    goes_on, terminated, truncated, cut = (False,) * 3, (True, False, False), (False, True, True), (False, False, True)
    assert ends == {goes_on, terminated, truncated, cut}
    lengths = {len(sample.actions[0].ids) for step in record.steps for sample in step.rollout.samples}
    assert len(lengths) > 3
    assert {turn.valid for turn in turns} == {True, False}
    first, second = (
        {key(sample)[:2] for step in steps for sample in step.rollout.samples}
        for steps in (record.steps[:2], record.steps[2:])
    )
    assert first & second, "no episode goes on in the next iteration"
    for metrics in record.metrics:
        assert metrics["policy/clip_fraction"] > 0
        assert metrics["policy/dual_clip_fraction"] > 0
        assert metrics["grad_norm/actor"] > RECIPE.max_grad_norm
    assert abs(record.metrics[1]["kl/reference"]) > 0.1
    assert record.metrics[1]["critic/value_std"] > 0.01


@pytest.mark.slow
def test_the_same_replies_lead_to_the_same_prompts_rewards_and_ends(replay: Replay) -> None:
    for rollout, row, ours in replay.pairs():
        sample = rollout.samples[row]
        (theirs,) = sample.turns
        assert ours.prompt + ours.reply == list(sample.ids)
        assert (ours.reward, ours.terminated, ours.truncated) == (theirs.reward, theirs.terminated, theirs.truncated)
        if theirs.bootstrap is not None:
            assert ours.next_prompt == [token for segment in theirs.bootstrap for token in segment.ids]


def test_scores_advantages_and_returns(replay: Replay) -> None:
    for rollout, row, ours in replay.pairs():
        theirs = {
            "logps_K": rollout.scores.old_logps,
            "ref_logps_K": rollout.scores.ref_logps,
            "values_K": rollout.scores.values,
            "advantages_K": rollout.advantages,
            "returns_K": rollout.returns,
        }
        for name, column in theirs.items():
            assert column is not None
            assert close(getattr(ours, name), column[row][rollout.action_mask[row]]), name
        if rollout.samples[row].turns[0].bootstrap is not None:
            assert rollout.bootstrap_values is not None
            assert close(ours.next_value, rollout.bootstrap_values[row])


def test_losses(record: Record, replay: Replay) -> None:
    for iteration, metrics in enumerate(record.metrics):
        ours = torch.stack(replay.losses[2 * iteration : 2 * iteration + 2]).mean(0)
        assert close(ours, ours.new_tensor([metrics["policy/loss"], metrics["critic/loss"]]))


def test_gradients_of_every_step(record: Record, replay: Replay) -> None:
    for step, ours in zip(record.steps, replay.gradients, strict=True):
        for (name, theirs), gradient in zip(step.gradients.items(), ours, strict=True):
            assert close(gradient, theirs, of=float(theirs.abs().max())), name


def test_weights_after_every_step(record: Record, replay: Replay) -> None:
    after = [*(step.weights for step in record.steps[1:]), record.last]
    for theirs, ours in zip(after, replay.weights, strict=True):
        for (name, weight), own in zip(theirs.items(), ours, strict=True):
            assert close(own, weight), name


def close(ours: Tensor, theirs: Tensor, of: float = 1.0) -> bool:
    """Whether they differ by at most a billionth of a number."""
    assert ours.dtype == theirs.dtype == torch.float64
    return ours.shape == theirs.shape and bool((ours - theirs).abs().max() <= 1e-9 * of)


@pytest.mark.parametrize(
    "reply",
    ["3", " 3\n", "3.", "**3**", "guess 3", "Three", "ACTION: 3", "THINK: it is low\nACTION: 3", "", "perhaps", "7"],
)
def test_clear_replies_are_read_as_the_parser_reads_them(reply: str) -> None:
    game: Any = gymnasium.make("agentrl_envs:GuessNumber-v0").unwrapped
    theirs = TolerantParser().parse(reply, list(game.actions), game.aliases).action
    assert one_file.parse(reply, game) == theirs == ("3" if "3" in reply or "hree" in reply else None)


def test_replies_are_sampled_from_the_distribution_that_is_scored(folder: Path) -> None:
    actor, *_ = one_file.load(str(folder), RECIPE, torch.float64)
    prompt = list(range(3, 40))
    for _ in range(4):
        reply, logps = one_file.sample(actor, prompt, end=2, most=12)
        assert 2 not in reply[:-1]
        assert reply[-1] == 2 or len(reply) == 12
        turn = one_file.Turn(prompt, reply, logps, 0.0, False, False, [])
        assert close(torch.tensor(logps, dtype=torch.float64), one_file.logps_and_entropy(actor, turn)[0].detach())


@pytest.mark.slow
@pytest.mark.parametrize(
    "env", ["agentrl_envs:Bandit-v0", pytest.param("agentrl_envs:GuessNumber-v0", marks=pytest.mark.slow)]
)
def test_it_runs(
    tiny_folder: Path, env: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = one_file.Recipe(envs=2, turns=2, mini_batch=2)
    monkeypatch.setattr(one_file, "Recipe", lambda: small)
    monkeypatch.setattr(sys, "argv", ["one_file.py", str(tiny_folder), "--env", env, "--iterations", "2"])
    one_file.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for line in lines:
        numbers = [float(number) for number in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", line)]
        assert len(numbers) >= 3, line
        assert all(math.isfinite(number) for number in numbers)


def test_the_page_shows_the_file() -> None:
    page = hooks.filled((DOCS / "one_file.md").read_text())
    assert f"```python\n{(DOCS / 'one_file.py').read_text()}```" in page


def test_it_stands_alone() -> None:
    """No abstraction of ours, and short enough to be read in one sitting."""
    text = (DOCS / "one_file.py").read_text()
    assert len(text.splitlines()) <= 250
    imported = {
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    others = {name.partition(".")[0] for name in imported if name} - sys.stdlib_module_names
    assert others == {"gymnasium", "torch", "transformers"}
