"""RolloutDataModule: refused configurations, held-out episodes, repeatability, state."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import gymnasium
import lightning as L
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_agentrl.advantages import GRPO
from lightning_agentrl.agents import PPOAgent
from lightning_agentrl.commands.plan import first_prompts
from lightning_agentrl.episodes.seeds import HELD_OUT_FROM, held_out_seeds
from lightning_agentrl.models.loading import load_tokenizer, read_context_length
from lightning_agentrl.rollout import (
    EnvConfig,
    FullMemory,
    GroupRollout,
    NotebookMemory,
    PromptFormat,
    RawParser,
    RolloutDataModule,
    TurnInteraction,
    ValidationConfig,
    WindowMemory,
)
from lightning_agentrl.types import Rollout
from tests.agents.harness import KeepRollouts, make_agent, make_data, make_trainer
from tests.published import published_tokenizer
from tests.rollout.scripted import Learner, Scripted, play_held_out, story

BANDIT = EnvConfig("agentrl_envs:Bandit-v0")
GUESS = EnvConfig("agentrl_envs:GuessNumber-v0")
BABYAI = EnvConfig("agentrl_envs:BabyAIText-GoToObjS4-v0")
LOG: list[tuple[str, int | None]] = []


class Watched(Scripted):
    """Notes seeds and steps of all its instances."""

    def reset(self, *, seed=None, options=None):
        LOG.append(("reset", seed))
        return super().reset(seed=seed, options=options)


gymnasium.register("Watched-v0", Watched)
WATCHED = EnvConfig("Watched-v0", {"length": 3})


def data_module(**settings) -> RolloutDataModule:
    defaults = {
        "env": GUESS,
        "num_envs": 4,
        "turns_per_env": 2,
        "mini_batch_turns": 4,
        "prompt": PromptFormat(max_prompt_tokens=1000),
        "interaction": TurnInteraction(4),
        "validation": ValidationConfig(episodes=6, num_envs=2),
        "seed": 3,
    }
    return RolloutDataModule(**(defaults | settings))


def check(data: RolloutDataModule, folder: Any) -> None:
    """As an agent does in its setup: no weights are there."""
    data.check(load_tokenizer(str(folder)), read_context_length(str(folder)))


@pytest.fixture
def connected(tiny_folder):
    """Connects data modules to a learner, and takes them down afterwards."""
    modules: list[RolloutDataModule] = []

    def connect(data: RolloutDataModule, learner: Learner | None = None) -> RolloutDataModule:
        modules.append(data)
        data.setup("fit")
        (learner or Learner(tiny_folder)).connect(data)
        return data

    yield connect
    for data in modules:
        data.teardown("fit")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"num_envs": 0}, "data.init_args.num_envs"),
        ({"turns_per_env": 0}, "data.init_args.turns_per_env"),
        ({"mini_batch_turns": 0}, "data.init_args.mini_batch_turns"),
        ({"update_epochs": 0}, "data.init_args.update_epochs"),
        ({"mini_batch_turns": 3}, "data.init_args.mini_batch_turns"),
        ({"num_envs": 10**30}, "data.init_args.num_envs must be at most"),
        ({"num_envs": 10**9, "mini_batch_turns": 10**9}, "data.init_args.num_envs must be at most"),
        ({"turns_per_env": 10**30}, "data.init_args.turns_per_env must be at most"),
        ({"update_epochs": 10**30}, "data.init_args.update_epochs must be at most"),
        ({"num_envs": 2**15, "update_epochs": 2**30}, "data.init_args.update_epochs must be at most"),
        ({"memory": FullMemory(), "num_envs": 2, "mini_batch_turns": 1}, "data.init_args.num_envs"),
    ],
)
def test_sizes_that_do_not_fit(settings, key):
    with pytest.raises(ValueError, match=key):
        data_module(**settings)


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: ValidationConfig(episodes=513), "data.init_args.validation.episodes"),
        (lambda: ValidationConfig(episodes=-1), "data.init_args.validation.episodes"),
        (lambda: ValidationConfig(num_envs=0), "validation.num_envs"),
    ],
)
def test_validation_that_does_not_fit(make, key):
    with pytest.raises(ValueError, match=key):
        make()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"prompt": PromptFormat(max_prompt_tokens=2045)},
            r"up to 2045 tokens and replies of up to 4 .* context of 2048 .* data.init_args.prompt.max_prompt_tokens",
        ),
        ({"env": WATCHED}, r"names no actions .* RawParser \(key data.init_args.interaction\)"),
        (
            {"env": WATCHED, "interaction": TurnInteraction(4, RawParser())},
            r"must not contain a thought; set data.init_args.prompt.think to false",
        ),
        ({"interaction": TurnInteraction(4, RawParser())}, r"data.init_args.prompt.think to false"),
        ({"prompt": PromptFormat(max_prompt_tokens=20)}, r"over the limit of 20; .* raise max_prompt_tokens"),
        (
            {"memory": WindowMemory(30), "prompt": PromptFormat(max_prompt_tokens=400)},
            r"WindowMemory shows up to 30 turns, of which only \d+ fit .* \(key data.init_args.memory\) .* "
            r"data.init_args.prompt.max_prompt_tokens",
        ),
        (
            {"memory": WindowMemory(10**30)},
            r"WindowMemory shows up to 10+ turns, .* \(key data.init_args.memory\)",
        ),
        (
            {"memory": NotebookMemory(30, turns=0), "prompt": PromptFormat(max_prompt_tokens=400)},
            r"over the limit of 400; .* notes, .* raise max_prompt_tokens",
        ),
        (
            {"prompt": PromptFormat(system="You must {mission}.", max_prompt_tokens=1000)},
            r"\{mission\}.*attribute `mission`.*data.init_args.prompt.system",
        ),
    ],
)
def test_prompts_that_cannot_work(tiny_folder, settings, message):
    data = data_module(**settings)
    for _ in range(2):  # a second attempt is refused too
        with pytest.raises(ValueError, match=message):
            check(data, tiny_folder)
    data.teardown("fit")


def test_a_template_without_a_system_role_is_told_once(log):
    data = data_module(env=BABYAI, prompt=PromptFormat(system="You must {mission}.\n{tips}\n{actions}"))
    data.check(published_tokenizer("llama3"), 2048)
    assert "system role" not in "\n".join(log)
    data.check(published_tokenizer("gemma2"), 2048)
    assert "\n".join(log).count("'models/gemma2' has no system role") == 1
    data.teardown("fit")


def test_a_growing_sample_needs_a_template_that_only_appends(tiny_folder):
    learner = Learner(tiny_folder)
    template = learner.tokenizer.chat_template
    mark = "{% if loop.last and message['role'] == 'assistant' %}(last) {% endif %}"
    learner.tokenizer.chat_template = template.replace("{{ message['content'] }}", mark + "{{ message['content'] }}")
    data_module().check(learner.tokenizer, 2048)  # windows do not mind
    with pytest.raises(ValueError, match=r"FullMemory.*data.init_args.memory"):
        data_module(memory=FullMemory(), mini_batch_turns=8).check(learner.tokenizer, 2048)


class WithTools(Scripted):
    actions = {"go": "go on"}
    default_action = "go"
    tool_schemas = ({"name": "search"},)
    observation_role = "tool"


gymnasium.register("WithTools-v0", WithTools)


@pytest.mark.parametrize("end", ["", "<|im_start|>system\nWrite a call.<|im_end|>\n"])
def test_a_growing_sample_is_tried_with_the_tools_of_the_environment(tiny_folder, end):
    tokenizer = load_tokenizer(str(tiny_folder))
    plain = tokenizer.chat_template
    tools = "<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n" + plain.replace("{% if add", end + "{% if add")
    tokenizer.chat_template = {"default": plain, "tool_use": tools}
    env = EnvConfig("WithTools-v0", {"length": 3})
    data_module(env=env).check(tokenizer, 2048)
    growing = data_module(env=env, memory=FullMemory(), mini_batch_turns=8)
    with pytest.raises(ValueError, match=r"FullMemory.*data.init_args.memory") if end else nullcontext():
        growing.check(tokenizer, 2048)


MADE: Counter[str] = Counter()  # instances by the name of their source


class Counting(Scripted):
    """Notes all that were made, and refuses to be played once it is closed."""

    actions = {"go": "go on"}
    default_action = "go"

    def __init__(self, name: str) -> None:
        super().__init__(2)
        MADE[name] += 1
        self.closed = False

    def reset(self, **kwargs):
        assert not self.closed
        return super().reset(**kwargs)

    def close(self) -> None:
        self.closed = True


gymnasium.register("Counting-v0", Counting)


@pytest.mark.parametrize("sizes", [{}, {"groups": GroupRollout(2, 2, 1), "turns_per_env": 8, "mini_batch_turns": 128}])
def test_every_environment_is_made_once_for_training_and_once_for_validation(connected, tiny_folder, sizes):
    """The one that was made to be looked at is the first to be played, and plans and checks take it too."""
    MADE.clear()
    sources = [EnvConfig("Counting-v0", {"name": name}) for name in ("first", "second")]
    data = data_module(env=None, envs=sources, **sizes)
    data.setup("fit")
    assert MADE == {"first": 1, "second": 1}
    check(data, tiny_folder)
    Learner(tiny_folder).connect(data)
    first_prompts(data)
    assert MADE == {"first": 1, "second": 1}
    for _ in range(2):
        data.stream.collect()
    trained = MADE.copy()
    assert trained.total() == 4  # as many as play at a time
    play_held_out(data, data.val_dataloader().seeds)
    assert (MADE - trained).total() <= 2 * 2  # of each source at most as many as play at a time
    data.teardown("fit")


def test_what_cannot_work_is_refused_by_python_too_before_weights_are_read(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(PPOAgent, "configure_model", lambda self: pytest.fail("weights were asked for"))
    for settings, message in (
        ({"prompt": PromptFormat(max_prompt_tokens=2045)}, "data.init_args.prompt.max_prompt_tokens"),
        ({"env": WATCHED, "interaction": TurnInteraction(4)}, "names no actions"),
        ({"env": EnvConfig("agentrl_envs:NoSuch-v0")}, "data.init_args.env.id"),
    ):
        with pytest.raises(ValueError, match=message):
            make_trainer(tmp_path, 1).fit(make_agent(tiny_folder), make_data(**settings))
    with pytest.raises(ValueError, match="GRPO needs several episodes"):
        make_trainer(tmp_path, 1).fit(make_agent(tiny_folder, advantage=GRPO()), make_data())
    with pytest.raises(ValueError, match=r"trainer\.max_steps 3 would stop inside an iteration"):
        make_trainer(tmp_path, 1, max_steps=3).fit(make_agent(tiny_folder), make_data())


def test_before_connect():
    data = data_module()
    for call in (data.train_dataloader, lambda: data.collector):
        with pytest.raises(RuntimeError, match=r"call connect\(agent\) first"):
            call()
    data.teardown("fit")  # harmless


@pytest.mark.parametrize("memory", [WindowMemory(), FullMemory()])
@pytest.mark.parametrize("env", [GUESS, *(pytest.param(env, marks=pytest.mark.slow) for env in (BABYAI, BANDIT))])
def test_same_seed_same_rollouts(connected, env, memory):
    settings = {"env": env, "memory": memory, "mini_batch_turns": 8}
    settings["prompt"] = PromptFormat(think=False, examples=False, max_prompt_tokens=1500)
    one, two, other = (connected(data_module(**settings, seed=seed)) for seed in (3, 3, 4))
    first = [story(one.stream.collect()) for _ in range(2)]
    assert first == [story(two.stream.collect()) for _ in range(2)]
    assert first[0] != story(other.stream.collect())
    assert [len(turns) for turns in first] == [8, 8]


def test_validation_plays_each_seed_once_and_leaves_training_alone(connected):
    settings = {"env": WATCHED, "interaction": TurnInteraction(4, RawParser()), "prompt": PromptFormat(think=False)}
    data, twin = (connected(data_module(**settings)) for _ in range(2))
    assert story(data.stream.collect()) == story(twin.stream.collect())
    before = data.state_dict()
    (batch,) = list(data.val_dataloader())
    assert batch.seeds == list(held_out_seeds()[:6])
    LOG.clear()
    results = play_held_out(data, batch.seeds)
    resets = [seed for kind, seed in LOG if kind == "reset"]
    assert set(resets) == set(batch.seeds)
    assert [(r.turns, r.total_reward, r.success) for r in results] == [(3, 6.0, True)] * 6
    assert data.state_dict() == before
    assert story(data.stream.collect()) == story(twin.stream.collect())
    assert play_held_out(data, batch.seeds) == results
    assert play_held_out(data, []) == []


def test_validation_results_are_in_the_order_of_seeds(connected):
    """A random model names no number, so 1 is guessed: an episode takes one turn or all of them."""
    data = connected(data_module(env=EnvConfig("agentrl_envs:GuessNumber-v0", {"highest": 2, "max_turns": 5})))
    seeds = held_out_seeds()[:6]
    results = play_held_out(data, seeds)
    assert {result.turns for result in results} == {1, 5}
    assert [result.success for result in results] == [result.turns == 1 for result in results]
    assert play_held_out(data, seeds[::-1]) == results[::-1]
    assert [play_held_out(data, [seed])[0] for seed in seeds] == results


def test_training_never_sees_a_held_out_seed(connected):
    LOG.clear()
    data = connected(
        data_module(env=WATCHED, interaction=TurnInteraction(4, RawParser()), prompt=PromptFormat(think=False))
    )
    for _ in range(4):
        data.stream.collect()
    seen = [seed for _, seed in LOG]
    assert len(set(seen) - {0}) > 8
    assert max(seen) < HELD_OUT_FROM
    assert not set(seen) & set(held_out_seeds())


@given(st.integers(0, 40), st.integers(1, 6))
def test_ranks_share_the_held_out_seeds(episodes, world):
    class Rank:
        world_size, fast_dev_run = world, False

        def __init__(self, rank: int) -> None:
            self.global_rank = rank

    played: list[int] = []
    for rank in range(world):
        data = data_module(validation=ValidationConfig(episodes=episodes))
        data.trainer = Rank(rank)
        played += data.val_dataloader().seeds
    assert sorted(played) == sorted(held_out_seeds()[:episodes])


def test_environments_are_shared_evenly():
    data = data_module(env=GUESS, num_envs=4)
    data.trainer = type("World", (), {"world_size": 3, "global_rank": 0})()
    with pytest.raises(ValueError, match=r"4.*3.*data.init_args.num_envs"):
        data.setup("fit")


def test_state_goes_to_a_new_data_module(connected, tmp_path):
    data, new = data_module(), data_module()
    connected(data).stream.collect()
    torch.save(data.state_dict(), tmp_path / "data.pt")
    expected = story(data.stream.collect())
    new.load_state_dict(torch.load(tmp_path / "data.pt", weights_only=True))  # before the agent is there
    assert story(connected(new).stream.collect()) == expected


def test_a_second_fit_goes_on_with_its_agent_and_starts_afresh_with_another(connected, tiny_folder):
    learner = Learner(tiny_folder)
    one, two, three = (connected(data_module(), learner) for _ in range(3))
    first = story(one.stream.collect())
    for data in (two, three):
        data.stream.collect()
    for data in (two, three):
        data.teardown("fit")
        data.teardown("fit")  # harmless
    learner.connect(two)
    stream = two.train_dataloader()
    learner.connect(two)  # harmless
    assert two.train_dataloader() is stream
    assert story(two.stream.collect()) == story(one.stream.collect())
    Learner(tiny_folder).connect(three)
    assert story(three.stream.collect()) == first


class Fails(L.Callback):
    """Raises after the first mini-batch."""

    def on_train_batch_end(self, *args: Any) -> None:
        raise RuntimeError("as it should")


@pytest.mark.slow
def test_another_agent_starts_afresh_where_a_run_failed_in_its_update(tiny_folder, tmp_path):
    """Lightning takes nothing down after an error."""

    def played_first(data: RolloutDataModule) -> list[Any]:
        make_trainer(tmp_path, 1, callbacks=[record := KeepRollouts()]).fit(make_agent(tiny_folder), data)
        return story(record.rollouts[0])

    data = make_data()
    with pytest.raises(RuntimeError, match="as it should"):
        make_trainer(tmp_path, 1, callbacks=[Fails()]).fit(make_agent(tiny_folder), data)
    data.collector.lost = [True] * 100
    assert played_first(data) == played_first(make_data())
    assert not any(data.state_dict()["lost"])


def test_a_checkpoint_can_be_saved_while_the_run_after_a_failed_one_collects(connected):
    data = connected(data_module())
    batches = iter(data.train_dataloader())
    next(batches)
    with pytest.raises(RuntimeError, match="inside an iteration"):
        data.state_dict()
    saved: list[dict[str, Any]] = []
    data.stopping.begin(lambda: saved.append(data.state_dict()))
    data.stopping.saves = 1
    next(iter(data.train_dataloader()))
    assert saved[0]["iteration"] == 1


def test_printing_plays_nothing(connected):
    data = data_module()
    assert str(data) == "RolloutDataModule(agentrl_envs:GuessNumber-v0 with {}, seed 3, 4 environments at a time)"
    connected(data)
    assert "GuessNumber" in f"{data}"
    assert data.stream is not None
    assert data.collector.iteration == data.state_dict()["collected"] == 0


def test_stream_cuts_what_is_collected(connected):
    data = connected(data_module(update_epochs=2))
    batches = [batch.rollout for batch in data.train_dataloader()]
    assert [len(batch) for batch in batches] == [4] * 4
    names = [{(t.env, t.episode, t.index) for t in batch.turns} for batch in batches]
    assert names[0] | names[1] == names[2] | names[3]
    assert len(names[0] | names[1]) == 8
    assert isinstance(batches[0], Rollout)
