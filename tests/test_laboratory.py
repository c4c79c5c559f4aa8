"""The laboratory: exact numbers against played games, statistics by hand, and a page that is of its records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.laboratory import every_estimator, measures
from benchmarks.laboratory.arms import STEPS, Arm, ExactCurve, Waiting, agent_of, play, rollouts
from benchmarks.laboratory.cells import CELLS
from benchmarks.laboratory.cloning import PROMPT, NoisyExpert, Start, random_model
from benchmarks.laboratory.exact import tables
from benchmarks.laboratory.fits import quiet_trainer
from benchmarks.laboratory.key_door import (
    ACTIONS,
    MOVES,
    STAY,
    KeyDoor,
    Rules,
    State,
    best_actions,
    distances,
    starts,
)
from benchmarks.laboratory.memories import memory_of
from benchmarks.laboratory.policy import LastWord, PolicyReader, prompt_ids
from benchmarks.laboratory.recall import ConfusedExpert, MazeStart, prompt_of
from benchmarks.laboratory.records import as_text, key, keys_of
from benchmarks.laboratory.report import page
from benchmarks.laboratory.t_maze import FORWARD, SIDES, TMaze
from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.models.critic import SeparateCritic
from lightning_agentrl.models.loading import load_tokenizer
from lightning_agentrl.models.words import word_model
from lightning_agentrl.prompts.memory import PastTurn, WindowMemory
from lightning_agentrl.prompts.renderer import ChatRenderer
from lightning_agentrl.types import SegmentKind

RESULTS = Path(__file__).parents[1] / "docs" / "results"
SLIPPERY = Rules(7, slip=0.2, lure=0.5)


@pytest.mark.parametrize("horizon", [7, 12, 24])
def test_the_shortest_way_has_the_length_of_the_horizon(horizon):
    """From every start, with and without a lure, and the environment's own player takes it."""
    for tempting in (0.0, 0.5):
        rules = Rules(horizon, lure=tempting)
        assert {(state.key_row, state.goal_row) for state in starts(rules)} == {(k, g) for k in (0, 2) for g in (0, 2)}
        game = tables(rules)
        assert game.success(game.expert(0.0), horizon) == pytest.approx(1)
        assert game.success(game.expert(0.0), horizon - 1) == pytest.approx(0)
    env = gymnasium.make("benchmarks.laboratory.key_door:KeyDoor-v0", horizon=horizon).unwrapped
    env.reset(seed=3)
    ended = [env.step(env.solver()())[2] for _ in range(horizon)]
    assert ended == [False] * (horizon - 1) + [True]


def test_the_values_of_a_shortest_way_are_known():
    game = tables(Rules(12))
    values_S = game.values(game.expert(0.0), 0.9)
    assert values_S == pytest.approx([0.9 ** (turns - 1) for turns in distances(game.rules).values()])


def test_values_and_advantages_keep_bellmans_equation():
    """Written down once more from the rules, with slips and a lure, for a policy that also stays."""
    game, gamma = tables(SLIPPERY), 0.8
    policy_SA = np.random.default_rng(0).dirichlet(np.ones(len(ACTIONS)), len(game.states))
    value = dict(zip(game.states, game.values(policy_SA, gamma), strict=True))

    def worth(state: State, action: str) -> float:
        ways = SLIPPERY.outcomes(state, action)
        assert sum(ways.values()) == pytest.approx(1)
        return sum(chance * (SLIPPERY.reward(to) + gamma * value.get(to, 0.0)) for to, chance in ways.items())

    advantages_SA = game.advantages(policy_SA, gamma)
    for s, state in enumerate(game.states):
        worths = [worth(state, action) for action in ACTIONS]
        assert value[state] == pytest.approx(np.dot(policy_SA[s], worths))
        assert advantages_SA[s] == pytest.approx(np.array(worths) - value[state])


def test_success_is_that_of_all_ways_to_the_goal():
    """Counted way by way, with slips, from the states two or three moves before it, within five turns."""
    game = tables(SLIPPERY)
    near_S = np.array([float(2 <= turns <= 3) for turns in distances(SLIPPERY).values()])
    game, policy_SA = replace(game, start_S=near_S / near_S.sum()), game.expert(0.3)
    chances = dict(zip(game.states, policy_SA, strict=True))

    def reached(state: State, left: int) -> float:
        if SLIPPERY.ends(state) or not left:
            return float(SLIPPERY.at_goal(state))
        return sum(
            (0.8 * taken + 0.2 / 4) * reached(SLIPPERY.moved(state, action), left - 1)
            for action, taken in zip(MOVES, chances[state][:4], strict=True)
        )

    ways = [reached(state, 5) for state, near in zip(game.states, near_S, strict=True) if near]
    assert 0.5 < game.success(policy_SA, 5) < 1
    assert game.success(policy_SA, 5) == pytest.approx(np.mean(ways))


def test_exact_success_and_return_are_those_of_played_episodes():
    """With slips and a lure: 2,000 episodes of the noisy expert, within three standard errors."""
    game, rng = tables(SLIPPERY), np.random.default_rng(0)
    policy_SA = game.expert(0.4)
    chances = dict(zip(game.states, policy_SA, strict=True))
    env, won, earned = KeyDoor(7, slip=0.2, lure=0.5), [], []
    for episode in range(2000):
        _, info = env.reset(seed=episode)
        over, reward, turns = False, 0.0, 0
        while not over:
            _, reward, terminated, truncated, info = env.step(ACTIONS[rng.choice(len(ACTIONS), p=chances[env.state])])
            over, turns = terminated or truncated, turns + 1
        won.append(info["success"])
        earned.append(0.9 ** (turns - 1) * reward)
    success = game.success(policy_SA)
    assert abs(np.mean(won) - success) < 3 * (success * (1 - success) / 2000) ** 0.5
    discounted, here_S = 0.0, game.start_S  # up to the limit, which takes a seventh of it away
    for turn in range(game.rules.max_turns):
        discounted += 0.9**turn * here_S @ (policy_SA * game.reward_SA).sum(1)
        here_S = here_S @ np.einsum("sa,sat->st", policy_SA, game.next_SAS)
    assert abs(np.mean(earned) - discounted) < 3 * np.std(earned) / 2000**0.5
    assert discounted < game.start_S @ game.values(policy_SA, 0.9)


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> tuple[Start, Path]:
    """A random model that says actions and the end token often, in replies of three words."""
    start = Start(horizon=7, reply_tokens=3)
    folder = random_model(start, tmp_path_factory.mktemp("laboratory"))
    tokenizer, lm = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        lm.lm_head.weight.mul_(20)
    lm.save_pretrained(folder)
    assert tokenizer.unk_token_id not in prompt_ids(tokenizer, tables(start.rules).states, PROMPT)
    return start, folder


def test_a_policy_is_read_as_its_replies_would_be(talking):
    """Against replies that are sampled whole and parsed, with those that end early or name no action."""
    start, folder = talking
    states = tables(start.rules).states[:2]
    reader = PolicyReader(folder, states, PROMPT, start.reply_tokens, thoughts=1000)
    read_SA = reader.table()
    tokenizer = load_tokenizer(str(folder))
    torch.manual_seed(1)
    for prompt, read_A in zip(reader.prompts_SP, read_SA, strict=True):
        ids = reader.lm.generate(
            prompt.expand(3000, -1), do_sample=True, top_k=0, max_new_tokens=3, pad_token_id=tokenizer.eos_token_id
        )[:, len(prompt) :]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        named = [LastWord().parse(text, ACTIONS, {}).action or STAY for text in texts]
        assert read_A == pytest.approx([named.count(action) / 3000 for action in ACTIONS], abs=0.04)
        assert read_A.sum() == pytest.approx(1)


@pytest.mark.slow
def test_equal_seeds_make_equal_runs_and_the_curve_begins_at_the_start(talking):
    start, folder = talking
    arm = Arm(turns_per_env=2, random_head=True, warmup=1)
    first, second = (play(start, folder, arm, 1, seed=3) for _ in range(2))
    assert first["curve"] == second["curve"]
    assert first["turns"] == [0, 3 * 512]  # those of the warm-up too
    game = tables(start.rules)
    reader = PolicyReader(folder, game.states, PROMPT, start.reply_tokens)
    assert first["curve"][0] == round(ExactCurve(reader, game.success).curve[0], 5)


def test_demonstrations_are_those_of_the_expert(talking):
    """Of 4,000 turns, as many moves lead along a shortest way as its noise leaves, and a word in ten names nothing."""
    folder = talking[1]
    start = Start(horizon=7, reply_tokens=3, invalid=0.1)
    game, tokenizer = tables(start.rules), load_tokenizer(str(folder))
    states = dict(zip(map(tuple, prompt_ids(tokenizer, game.states, PROMPT).tolist()), game.states, strict=True))
    right, wanted, named = 0, 0.0, 0
    for demonstration in NoisyExpert(start, 4000).load(None, tokenizer):
        (sample,) = demonstration.samples
        (turn,) = sample.turns
        assert tokenizer.decode(sample.actions[0].ids).split() == turn.reply.split()
        assert turn.thought_tokens == 2
        if turn.action in MOVES:
            best = best_actions(start.rules, states[sample.segments[0].ids])
            named, right = named + 1, right + (turn.action in best)
            wanted += 1 - start.noise + start.noise * len(best) / 4
    assert abs(right - wanted) < 3 * (4000 / 4) ** 0.5
    assert abs(named - 3600) < 3 * (4000 * 0.09) ** 0.5


@pytest.fixture(scope="module")
def turning(tmp_path_factory: pytest.TempPathFactory) -> tuple[MazeStart, Path]:
    """A random model that likes to say sides, and which one depends on all that it reads."""
    start = MazeStart(delay=1, memories="every")
    folder = random_model(start, tmp_path_factory.mktemp("maze"))
    tokenizer, lm = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    left, right = tokenizer.convert_tokens_to_ids(list(SIDES))
    with torch.no_grad():
        for name, x in lm.named_parameters():
            x.mul_(10 if "layers" in name and x.ndim > 1 else 1)
        lm.lm_head.weight[left] *= 40
        lm.lm_head.weight[right] = -lm.lm_head.weight[left]
    lm.save_pretrained(folder)
    return start, folder


def test_the_sign_is_all_there_is_to_know_in_a_t_maze():
    """Its own player passes, whatever one does in a corridor is told as the same, and a wrong side ends it."""
    env = TMaze(delay=3, count=2)
    (text, _), over, texts, paid = env.reset(seed=0), False, [], 0.0
    while not over:
        texts.append(text)
        assert (len(env.actions) == 3) == (text == "place4")
        text, reward, over, truncated, info = env.step(env.solver()())
        paid += reward
    assert texts == [f"place0 {env.signs[0]}", *(f"place{n}" for n in range(1, 5))] * 2 or env.signs[0] != env.signs[1]
    assert (len(texts), paid, info["success"], truncated) == (10, 1.0, True, False)
    env.reset(seed=0)
    assert [env.step(side)[-1]["executed_action"] for side in (*SIDES, *SIDES)] == [FORWARD] * 4
    wrong = next(side for side in SIDES if side != env.signs[0])
    _, reward, over, _, info = env.step(wrong)
    assert (reward, over, info["success"]) == (0, True, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "memory",
    [WindowMemory(1, 1), WindowMemory(2, 0), memory_of("actions", 8), memory_of("cleared", 4)],
    ids=["thought", "turns", "actions", "cleared"],
)
def test_a_policy_that_reads_its_past_is_worth_what_its_episodes_are(turning, memory):
    """Against 3,000 episodes that are played turn by turn, with replies that are sampled whole and parsed."""
    start, folder = turning
    reader, renderer, episodes = start.reader(folder, memory), ChatRenderer(load_tokenizer(str(folder)), PROMPT), 3000
    envs = [TMaze(start.delay, start.corridors) for _ in range(episodes)]
    texts = [str(env.reset(seed=seed)[0]) for seed, env in enumerate(envs)]
    pasts: list[list[PastTurn]] = [[] for _ in envs]
    running, won = set(range(episodes)), 0
    torch.manual_seed(0)
    while running:
        by_prompt: dict[tuple[int, ...], list[int]] = {}
        for k in sorted(running):
            by_prompt.setdefault(prompt_of(renderer, memory, pasts[k], texts[k]), []).append(k)
        for prompt, those in by_prompt.items():
            ids = reader.lm.generate(
                torch.tensor([prompt]).expand(len(those), -1), do_sample=True, top_k=0, max_new_tokens=2
            )
            for k, reply in zip(those, ids[:, len(prompt) :].tolist(), strict=True):
                parsed = LastWord().parse(renderer.decode(reply), list(envs[k].actions), {})
                text, _, over, _, info = envs[k].step(parsed.action or FORWARD)
                pasts[k].append(PastTurn(texts[k], parsed.thought, info["executed_action"]))
                texts[k], won = str(text), won + info["success"]
                running -= {k} if over else set()
    success = start.success(reader.table())
    assert 0.05 < success < 0.9
    assert abs(won / episodes - success) < 3 * (success * (1 - success) / episodes) ** 0.5


@pytest.mark.parametrize(
    ("memory", "tells"),
    [
        (WindowMemory(1, 0), False),
        (WindowMemory(2, 0), True),
        (WindowMemory(1, 1), True),
        (memory_of("actions", 8), False),
        (memory_of("cleared", 2), False),
        (memory_of("cleared", 3), True),
    ],
    ids=["short", "long", "thought", "actions", "cleared before", "cleared later"],
)
def test_without_thoughts_only_a_prompt_with_the_turn_of_the_sign_tells_anything_of_it(turning, memory, tells):
    """At the first junction; so half of the episodes end there at least, whatever the weights are."""
    start, folder = replace(turning[0], corridors=1), turning[1]
    table_TA = start.reader(folder, memory).table()
    assert table_TA.sum(1) == pytest.approx(1)
    of_left_A, of_right_A = table_TA.reshape(2, start.rules.turns, -1)[:, -1]
    assert (of_left_A != pytest.approx(of_right_A)) == tells
    if not tells:
        assert start.success(table_TA) == pytest.approx(of_left_A[:2].sum() / 2)


def test_a_history_that_is_cleared_before_the_second_junction_leaves_it_to_chance(turning):
    """As long on average as a window of the delay and one, and never above one half, whatever the weights are."""
    start, folder = turning
    cell = CELLS["forgetting"]
    past = [PastTurn("", "", "")] * 9
    window, cleared = (cell.arms[arm].memory for arm in ("4 turns", "cleared every 8 turns"))
    assert sum(len(window.recall(past[:turn]).turns) for turn in range(10)) == 30
    assert sum(len(cleared.recall(past[:turn]).turns) for turn in range(10)) == 29
    assert [len(memory.recall(past).turns) for memory in (window, cleared)] == [4, 1]
    table_PTA = start.reader(folder, memory_of("cleared", 4)).table().reshape(4, start.rules.turns, -1)
    assert table_PTA[0, 2] != pytest.approx(table_PTA[2, 2])  # the first sign is another one
    assert table_PTA[0, 5] == pytest.approx(table_PTA[1, 5])  # the second one
    passed = [table_PTA[0, 2, 0], table_PTA[2, 2, 1]]
    assert start.success(table_PTA) == pytest.approx(np.mean(passed) * table_PTA[0, 5, :2].sum() / 2)


def test_the_words_of_every_memory_are_in_the_vocabulary(tmp_path):
    start = CELLS["forgetting"].start
    tokenizer = load_tokenizer(str(word_model(start.words, tmp_path)))
    renderer, rules = ChatRenderer(tokenizer, PROMPT), start.rules
    past = [PastTurn(rules.words(turn, SIDES), SIDES[0], rules.right(turn, SIDES)) for turn in range(rules.turns)]
    for arm in CELLS["forgetting"].arms.values():
        for turn in range(rules.turns):
            ids = prompt_of(renderer, arm.memory, past[:turn], past[turn].observation)
            assert tokenizer.unk_token_id not in ids


@pytest.mark.slow
def test_rollouts_that_wait_are_trained_on_so_many_iterations_later(talking, tmp_path):
    """The first ones are all collected at once, by the policy of the start."""
    start, folder = talking
    arm = Arm(waits=2)
    ages: list[set[int]] = []

    class Ages(RolloutCallback):
        def on_rollout(self, trainer, agent, rollout):
            ages.append({agent.policy_version - turn.policy_version for turn in rollout.turns})

    agent = agent_of(folder, arm, SeparateCritic())
    quiet_trainer(tmp_path, 4, [Ages(), Waiting(arm.waits)]).fit(agent, rollouts(start, arm, 0))
    assert ages == [{0}, {STEPS}, {2 * STEPS}, {2 * STEPS}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arm", "many"),
    [
        (Arm(history=1, thoughts=1), 20),
        (Arm(history=8, memory_kind="actions"), 8),
        (Arm(history=4, memory_kind="cleared"), 10),
    ],
    ids=["thought", "actions", "cleared"],
)
def test_prompts_of_a_run_are_those_that_are_gone_through(turning, tmp_path, arm, many):
    start, folder = turning
    seen: set[tuple[int, ...]] = set()

    class Prompts(RolloutCallback):
        def on_rollout(self, trainer, agent, rollout):
            segments = [segment for sample in rollout.samples for segment in sample.segments]
            seen.update(segment.ids for segment in segments if segment.kind is SegmentKind.PROMPT)

    quiet_trainer(tmp_path, 1, [Prompts()]).fit(agent_of(folder, arm, SeparateCritic()), rollouts(start, arm, 0))
    assert len(seen) > many
    assert seen <= {tuple(ids) for group in start.reader(folder, arm.memory).prompts for ids in group.tolist()}


def test_the_expert_of_the_t_maze_is_confused_and_noisy(turning):
    """At junctions whose sign is in the prompt, it is right as often as its settings say."""
    start, tokenizer = turning[0], load_tokenizer(str(turning[1]))
    right = []
    for demonstration in ConfusedExpert(start, 6000).load(None, tokenizer):
        (sample,) = demonstration.samples
        words = tokenizer.decode(sample.segments[0].ids).split()
        beginnings = [k for k, word in enumerate(words) if word == "place0"]
        if words[-3] == "place2" and beginnings:
            right.append(sample.turns[0].action == words[beginnings[-1] + 1])
    share = start.expert_success ** (1 / start.corridors)
    assert len(right) > 500
    assert abs(np.mean(right) - share) < 3 * (share * (1 - share) / len(right)) ** 0.5


def runs(*ends: float) -> list[dict]:
    return [{"curve": [0.2, 0.1, x], "turns": [0, 100, 200]} for x in ends]


def test_numbers_of_a_run_by_hand():
    run = {"curve": [0.4, 0.2, 0.8, 0.9], "turns": [0, 100, 200, 400]}
    assert measures.area(run) == pytest.approx(1.9 / 3)
    assert measures.dip(run) == pytest.approx(-0.2)
    assert measures.first_at_goal(run) == 3
    assert measures.area_per_turn(run, 300) == pytest.approx((30 + 50 + 82.5) / 300)
    assert measures.first_at_goal(runs(0.5)[0]) is None


def test_the_middle_half_and_its_interval():
    assert measures.quartile_mean(np.array([9.0, 1, 2, 3])) == 2.5
    clear = measures.estimate([0.1, 0.12, 0.11, 0.09, 0.13])
    assert clear.low > 0
    assert measures.verdict(clear) == "confirmed"
    assert measures.verdict(measures.estimate([-0.1, -0.12, -0.11])) == "refuted: the opposite"
    assert measures.verdict(measures.estimate([0.3, -0.2, 0.1, -0.3])).startswith("not shown")


def test_the_interval_holds_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(1)
    held = [(x := measures.estimate(rng.normal(0, 1, 10))).low < 0 < x.high for _ in range(200)]
    assert np.mean(held) > 0.92


def test_a_run_is_known_by_all_that_it_was_made_of():
    others = [key(cell, arm, 0) for cell in CELLS.values() for arm in cell.arms]
    settings = {repr((c.start, a, c.iterations)) for c in CELLS.values() for a in c.arms.values()}
    assert len(set(others)) == len(settings) < len(others)  # equal arms of two cells are one run
    kept = json.loads((RESULTS / "laboratory.json").read_text())
    assert set(kept) <= keys_of(CELLS.values())


def test_the_page_of_the_repository_is_that_of_its_records():
    records, learned = (
        json.loads((RESULTS / f"{name}.json").read_text()) for name in ("laboratory", "every_estimator")
    )
    assert page(records, learned) == (RESULTS / "laboratory.md").read_text()
    assert as_text(records) == (RESULTS / "laboratory.json").read_text()
    assert as_text(learned) == (RESULTS / "every_estimator.json").read_text()
    assert learned.keys() <= every_estimator.planned().keys()
