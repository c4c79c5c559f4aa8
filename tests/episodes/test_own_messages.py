"""Messages of an environment's own: what is taken, how templates show them, and what becomes of those they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from lightning_agentrl.episodes.environment import Environment
from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.models.critic import SharedCritic
from lightning_agentrl.models.loading import load_tokenizer, read_images
from lightning_agentrl.prompts.memory import FullMemory, OwnMessages, PastTurn, Recollection, WindowMemory
from lightning_agentrl.prompts.messages import Observation, PromptFormat, Rules
from lightning_agentrl.prompts.renderer import ChatRenderer, shown
from lightning_agentrl.prompts.template import RefusedMessagesError
from lightning_agentrl.rollout import EnvConfig
from lightning_agentrl.types import ModelInput, SegmentKind, input_of
from tests.agents.harness import Keeping, make_agent, make_data, make_trainer
from tests.published import TEMPLATES, published_tokenizer
from tests.rollout.scripted import workplace
from tests.talking_game import GREY, Saying
from tests.tiny import tiny_tokenizer, tiny_vision_folder

WORDS = PromptFormat(think=False, max_prompt_tokens=2000)
PICTURE = {"type": "image", "image": GREY}
ASKED: OwnMessages = (("user", ("before ", None, " between ", None, " behind")),)
ANSWERED: OwnMessages = (("tool", ("one",)), ("tool", (None, "two")), ("assistant", ("hm",)), ("user", ("go on",)))


def read(messages: Any) -> Any:
    return Environment(lambda: Saying(messages)).reset(seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_folder(tmp_path_factory.mktemp("sees"), "qwen3_vl")


@pytest.fixture(scope="module")
def chat(folder: Path) -> ChatRenderer:
    return ChatRenderer(load_tokenizer(str(folder)), WORDS, read_images(str(folder)))


def test_messages_are_read_with_their_images_in_order() -> None:
    answer = read(
        [
            {"role": "tool", "content": "a\ud800"},
            {"role": "user", "content": [PICTURE, *({"type": "text", "text": t} for t in "bc"), PICTURE]},
        ]
    )
    assert answer.messages == (("tool", ("a\ufffd",)), ("user", (None, "bc", None)))
    assert [image.shape for image in answer.images] == [GREY.shape] * 2
    assert answer.mended
    assert (answer.observation, answer.short_term) == ("tool: a\ufffd\n\nuser: [image]bc[image]", "")
    assert read([{"role": "user", "content": "a"}]).observation == "a"
    other = read([{"role": "tool", "content": "a\ud800"}, {"role": "user", "content": [PICTURE, PICTURE]}])
    assert answer.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages of type list"),
        ("hello", "messages of type str"),
        (["hello"], "message 0 without exactly the keys"),
        ([{"role": "user"}], "message 0 without exactly the keys"),
        ([{"role": "system", "content": "a"}], "the role 'system'.*system_prompt"),
        ([{"role": 3, "content": "a"}], "the role 3"),
        ([{"role": 10**5000, "content": "a"}], "the role a value of type int"),
        ([{"role": "assistant", "content": "a"}], "not an assistant's"),
        ([{"role": "user", "content": None}], "content of message 0 .* is None"),
        ([{"role": "user", "content": 10**5000}], "content of message 0 .* is a value of type int"),
        ([{"role": "user", "content": ["a"]}], "content of message 0"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "content of message 0"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "content of message 0"),
        ([{"role": "user", "content": [{"type": "image", "image": "x"}]}], "an image of type str"),
        ([{"role": "user", "content": [{"type": "image", "image": GREY / 2}]}], "an image of float64"),
    ],
)
def test_what_are_no_messages_is_an_error_of_the_environment(messages: Any, said: str) -> None:
    with pytest.raises(EnvError, match=said) as error:
        read(messages)
    assert error.value.kind == "contract"


def pictures(chat: ChatRenderer, *shades: int) -> tuple[ModelInput, ...]:
    return chat.see([np.full((48, 48, 3), shade, dtype=np.uint8) for shade in shades])


def test_a_prompt_shows_them_as_they_are(chat: ChatRenderer) -> None:
    """Nothing but notes, short-term text and the instruction is added, to the last one."""
    a, b, c = pictures(chat, 1, 2, 3)
    past = Recollection((PastTurn("", "", "left", images=(a, b), messages=ASKED),), note="a note")
    prompt = (
        chat.render(
            Rules("Rules.", actions={"left": ""}), Observation(short_term="soon", images=(c,), messages=ANSWERED), past
        )
        .segments[0]
        .input
    )
    image = f"<|vision_start|>[image of {a.images[0].tokens} tokens]<|vision_end|>"
    assert shown(chat.tokenizer, prompt) == (
        "<|im_start|>system\nRules.<|im_end|>\n"
        f"<|im_start|>user\nbefore {image} between {image} behind<|im_end|>\n"
        "<|im_start|>assistant\nleft<|im_end|>\n"
        f"<|im_start|>user<tool_response>\none\n</tool_response><tool_response>\n{image}two\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\nhm<|im_end|>\n"
        "<|im_start|>user\na note\nsoon\n\ngo on\n\nAnswer with one of: left<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [one.digest for one in prompt.images] == [one.digest for one in (a + b + c).images]


def test_a_growing_sample_is_the_prompt_rendered_at_once(chat: ChatRenderer) -> None:
    a, b, c = pictures(chat, 1, 2, 3)
    start = chat.render(Rules("Rules."), Observation(images=(a, b), messages=ASKED)).segments
    reply = ModelInput.of_ids([*chat.template.encode("left"), chat.template.turn_close_id])
    grown = (
        input_of((*start,))
        + reply
        + input_of(chat.continuation(Rules("Rules."), Observation(images=(c,), messages=ANSWERED)))
    )
    past = Recollection((PastTurn("", "", "left", images=(a, b), messages=ASKED),))
    assert (
        grown.keys
        == chat.render(Rules("Rules."), Observation(images=(c,), messages=ANSWERED), past).segments[0].input.keys
    )


def test_old_turns_leave_a_prompt_with_all_their_messages(chat: ChatRenderer) -> None:
    turn = PastTurn("", "", "left", images=pictures(chat, 1), messages=ANSWERED)
    whole = chat.render(Rules(), Observation(messages=(("user", ("now",)),)), Recollection((turn,) * 3))
    short = ChatRenderer(
        chat.tokenizer, PromptFormat(think=False, max_prompt_tokens=len(whole.segments[0]) - 1), chat.image_reader
    )
    cut = short.render(Rules(), Observation(messages=(("user", ("now",)),)), Recollection((turn,) * 3))
    assert cut.history_cuts == 1
    assert shown(chat.tokenizer, cut.segments[0].input).count("two") == 2


def test_no_marker_can_be_put_together_from_parts(chat: ChatRenderer) -> None:
    marks = "".join(token.content for token in chat.tokenizer.added_tokens_decoder.values())
    texts = [{"type": "text", "text": part} for part in (marks, "<|im_", "start|>", marks)]
    answer = read([{"role": "tool", "content": texts}, {"role": "user", "content": [*texts, PICTURE, *texts]}])
    (image,) = chat.see(answer.images)
    prompt = chat.render(Rules(), Observation(images=(image,), messages=answer.messages)).segments[0].input
    harmless = tuple((role, tuple(part and "x" for part in parts)) for role, parts in answer.messages)
    plain = chat.render(Rules(), Observation(images=(image,), messages=harmless)).segments[0].input
    special = set(chat.tokenizer.all_special_ids) | set(chat.tokenizer.added_tokens_decoder)
    assert [i for i in prompt.ids if i in special] == [i for i in plain.ids if i in special]
    assert len(prompt.images) == 1


ONLY_USERS = (
    "{% for m in messages %}{% if m.role == 'tool' %}TOOLS{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
    "\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("answer", ["", "{{ raise_exception('no tools') }}"], ids=["left out", "refused"])
def test_a_template_that_cannot_show_them_says_so(answer: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = ONLY_USERS.replace("TOOLS", answer)
    chat = ChatRenderer(tokenizer, WORDS)
    messages: OwnMessages = (("tool", ("one",)), ("user", ("two",)))
    assert "two" in shown(tokenizer, chat.render(Rules(), Observation(messages=messages[1:])).segments[0].input)
    for _ in range(2):
        with pytest.raises(RefusedMessagesError, match="messages of the roles tool, user"):
            chat.render(Rules(), Observation(messages=messages))
        with pytest.raises(RefusedMessagesError, match="messages of the roles tool, user"):
            chat.continuation(Rules(), Observation(messages=messages))


@pytest.mark.parametrize("name", TEMPLATES)
def test_published_templates_show_them_or_say_so(name: str) -> None:
    """Where a growing sample can be built, it is what the template renders, up to a blank before a reply."""
    chat = ChatRenderer(published_tokenizer(name), PromptFormat(think=False, instruction="", max_prompt_tokens=2000))
    first: OwnMessages = (("user", ("Where to?",)),)
    past = Recollection((PastTurn("", "", "north", messages=first),))
    for roles in (("user",), ("tool",), ("user", "user"), ("tool", "tool", "user"), ("assistant", "user")):
        own: OwnMessages = tuple((role, (f"message {number}",)) for number, role in enumerate(roles))
        try:
            text = shown(
                chat.tokenizer, chat.render(Rules("Rules."), Observation(messages=own), past).segments[0].input
            )
        except RefusedMessagesError:
            assert roles != ("user",)
            continue
        words = ["Rules.", "Where to?", "north", *(f"message {number}" for number in range(len(roles)))]
        places = [text.index(word) for word in words]
        assert places == sorted(places)
        if not chat.template.rewriting():
            parts = (
                chat.render(Rules("Rules."), Observation(messages=first)).segments,
                chat.continuation(Rules("Rules."), Observation(messages=own)),
            )
            start, then = (shown(chat.tokenizer, input_of(part)) for part in parts)
            assert f"{start}north{chat.template.turn_close}{then}" == text.replace(" north", "north")


@pytest.mark.slow
def test_a_refused_message_costs_its_episode(folder: Path, tmp_path: Path) -> None:
    """Where it comes with the first turn, the run is refused; later, the episode ends at its last sound turn."""
    chat = load_tokenizer(str(folder))
    refusing = "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endfor %}"
    chat.chat_template = f"{refusing}{chat.chat_template}"
    copy = tmp_path / "refusing"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    chat.save_pretrained(copy)
    agent = Keeping(str(copy), critic=SharedCritic())
    with pytest.warns(UserWarning, match="cannot be shown: .* refuses messages of the roles tool.*episode is lost"):
        make_trainer(tmp_path, 1).fit(agent, talking(turns=9, tools_from=2))
    turns = agent.rollouts[0].turns
    assert {turn.index for turn in turns} == {0}
    assert {turn.lost for turn in turns[:-1]} >= {("contract",)}
    env = EnvConfig("tests.talking_game:Saying-v0", {"messages": [{"role": "tool", "content": "a"}]})
    with pytest.raises((EnvError, ValueError), match="refuses messages of the roles tool"):
        make_trainer(tmp_path, 1).fit(make_agent(copy), make_data(env=env, prompt=WORDS))


def talking(turns: int = 3, tools_from: int = 1, **settings: Any) -> Any:
    env = EnvConfig("tests.talking_game:Talk-v0", {"turns": turns, "tools_from": tools_from})
    words = PromptFormat(think=False, max_prompt_tokens=900)
    return make_data(**{"env": env, "prompt": words, **settings})


@pytest.mark.slow
def test_a_policy_is_trained_on_them(folder: Path, tmp_path: Path) -> None:
    """One growing sample; what is not sampled is not trained on, also an assistant's message of the environment."""
    agent = Keeping(str(folder), critic=SharedCritic())
    make_trainer(tmp_path, 1).fit(agent, talking(memory=FullMemory(), mini_batch_turns=16))
    (rollout,) = agent.rollouts
    assert rollout.scores.old_logps is not None
    ours, engines = rollout.scores.old_logps[rollout.action_mask], rollout.rollout_logps[rollout.action_mask]
    torch.testing.assert_close(ours, engines.to(ours.dtype), atol=1e-5, rtol=0)
    longest = max(rollout.samples, key=lambda sample: len(sample.turns))
    assert len(longest.turns) == len(longest.input.images) == 3
    later = [s for s in longest.segments if s.kind is SegmentKind.OBSERVATION]
    text = shown(agent.tokenizer, later[0].input)
    assert text.count("<tool_response>") == 2
    assert "<|im_start|>user\nGo on." in text
    assert longest.turns[1].observation.startswith("tool: The last one is gone.\n\ntool: Look: [image]turn 1")


@pytest.mark.slow
def test_a_run_that_is_resumed_was_told_what_the_whole_one_was(folder: Path, tmp_path: Path) -> None:
    settings = {"memory": WindowMemory(2), "turns_per_env": 2, "mini_batch_turns": 8}
    whole, first, again = make_agent(folder), make_agent(folder), make_agent(folder)
    make_trainer(tmp_path, 4).fit(whole, talking(**settings))
    trainer = make_trainer(tmp_path, 2)
    trainer.fit(first, talking(**settings))
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    make_trainer(tmp_path, 4).fit(again, talking(**settings), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    weights = dict(again.named_parameters())
    for name, weight in whole.named_parameters():
        assert torch.equal(weight, weights[name]), name


class Unreadable(gymnasium.Env):
    """Shows one picture more at its second step, which no model reads."""

    def __init__(self, own: bool) -> None:
        self.own = own

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.count = 0
        return self._seen(), {}

    def step(self, action: str) -> Any:
        self.count += 1
        return self._seen(), 1.0, False, False, {}

    def _seen(self) -> dict[str, Any]:
        images = [GREY, np.zeros((2, 500, 3), np.uint8)][: 1 + (self.count == 2)]
        if not self.own:
            return {"text": f"look {self.count}", "images": images}
        shown = [{"type": "image", "image": image} for image in images]
        return {"messages": [{"role": "user", "content": [*shown, {"type": "text", "text": f"look {self.count}"}]}]}


@pytest.mark.parametrize("own", [True, False])
def test_an_image_that_no_model_reads_costs_the_episode_after_its_last_sound_turn(folder: Path, own: bool) -> None:
    with workplace(str(folder), [Unreadable(own)], memory=WindowMemory(0)) as place:
        turns = place.collect(3).turns
        after = [input_of(turn.bootstrap or ()) for turn in turns if turn.lost]
        shown = [place.text(state.ids) for state in after]
    assert [turn.lost for turn in turns] == [("contract",), ("contract",), ()]
    assert ["look 1" in text and "look 2" not in text for text in shown] == [True, True]
    assert [len(state.images) for state in after] == [1, 1]
