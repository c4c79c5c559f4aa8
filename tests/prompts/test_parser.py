from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_agentrl.prompts.parser import ParsedReply, RawParser, TolerantParser

BABYAI = ["turn left", "turn right", "go forward", "pick up", "drop", "toggle"]
BABYAI_ALIASES = {
    "turnleft": "turn left",
    "turn to the left": "turn left",
    "move forward": "go forward",
    "step forward": "go forward",
    "pick it up": "pick up",
    "open": "toggle",
}
SHORT = ["left", "right", "forward"]
BABA = ["idle", "up", "right", "down", "left"]
CRAFTER = ["Noop", "Move West", "Move East", "Move North", "Move South", "Do", "Sleep", "Place Stone", "Place Table"]
CRAFTER += ["Make Wood Pickaxe", "Make Stone Pickaxe"]
CRAFTER_ALIASES = {"Drink": "Do", "Drink Water": "Do", "Mine Iron": "Do", "Collect Diamond": "Do"}
CRAFTER_ALIASES |= {"Craft Table": "Place Table", "Place Crafting Table": "Place Table"}


def action_of(reply: str, actions: list[str] = BABYAI, aliases: dict[str, str] = BABYAI_ALIASES) -> str | None:
    return TolerantParser().parse(reply, actions, aliases).action


@pytest.mark.parametrize(
    ("reply", "actions", "aliases", "action"),
    [
        ("ACTION: go forward.", BABYAI, {}, "go forward"),
        ("ACTION: up.", BABA, {}, "up"),
        ("ACTION: go forward because the path is free", BABYAI, {}, "go forward"),
        ("Action: toggle", BABYAI, {}, "toggle"),
        ("ACTION: Move forward", BABYAI, BABYAI_ALIASES, "go forward"),
        ("ACTION: turn to the left", BABYAI, BABYAI_ALIASES, "turn left"),
        ("ACTION: pick it up", BABYAI, BABYAI_ALIASES, "pick up"),
        ("ACTION: open the door", BABYAI, BABYAI_ALIASES, "toggle"),
        ("ACTION: move_north", CRAFTER, {}, "Move North"),
        ("ACTION: Drink Water", CRAFTER, CRAFTER_ALIASES, "Do"),
        ("ACTION: Mine Iron", CRAFTER, CRAFTER_ALIASES, "Do"),
        ("ACTION: Collect Diamond", CRAFTER, CRAFTER_ALIASES, "Do"),
        ("ACTION: Craft Table", CRAFTER, CRAFTER_ALIASES, "Place Table"),
        ("ACTION: Place Crafting Table", CRAFTER, CRAFTER_ALIASES, "Place Table"),
        ("ACTION: Move North 4 Steps", CRAFTER, {}, "Move North"),
        ("ACTION: **Do**", CRAFTER, {}, "Do"),
        ("ACTION: Do (collect wood)", CRAFTER, {}, "Do"),
    ],
)
def test_gaps_of_the_published_parser(reply, actions, aliases, action):
    assert action_of(reply, actions, aliases) == action


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("turn left", "turn left"),
        ("TURN_LEFT", "turn left"),
        ("turn-left", "turn left"),
        ("TurnLeft", "turn left"),
        ("turn\\_left", "turn left"),
        ("| drop |", "drop"),
        ("ACTION: drop or drop or toggle", None),
        ("ACTION: drop or drop", "drop"),
        ("- turn left", "turn left"),
        ("1. **turn left**!", "turn left"),
        ("ACTION:\n\n  drop\n", "drop"),
        ("**Action:** `drop`", "drop"),
        ("**Action**: drop", "drop"),
        ("### Action\n```\ndrop\n```", "drop"),
        ("Action - drop", "drop"),
        ("Action -> drop", "drop"),
        ("Action = drop", "drop"),
        ("Action drop", "drop"),
        ("Action is drop", "drop"),
        ("My final action: drop.", "drop"),
        ("<action>pick up</action>", "pick up"),
        ('{"thought": "hm", "action": "pick up"}', "pick up"),
        ("<think>\nAction: drop? No.\n</think>\n\npick up", "pick up"),
        ("<think>\nhm\n</think>\n\nACTION: [pick up]", "pick up"),
        ("THINK: my last action: drop.\nACTION: toggle\nIt opens the door.", "toggle"),
        ("ACTION: drop\nACTION: toggle", "toggle"),
        ("ACTION: turn left, then go forward", "turn left"),
        ("ACTION: go forward / move forward", "go forward"),
        ("ACTION: “pick up” the key", "pick up"),
        ("", None),
        ("ACTION:", None),
        ("ACTION: jump", None),
        ("ACTION: dropping", None),
        ("ACTION: one of turn left, turn right", None),
        ("ACTION: turn left or turn right", None),
        ("ACTION: turn left | turn right", None),
        ("ACTION: toggle, or drop", None),
        ("I will go forward", None),
        ("THINK: I should go forward", None),
        ("Interaction: drop", None),
        ("THINK: go forward\nbecause", None),
        ("***", None),
    ],
)
def test_six_names(reply, action):
    assert action_of(reply) == action


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("left", "left"),
        (" Forward.", "forward"),
        ("right!!", "right"),
        ("left left forward", "left"),
        ("'right'", "right"),
        ("forward\nleft", "forward"),
        ("ACTION: LEFT", "left"),
        ("left/right", None),
        ("leftforward", None),
        ("<|im", None),
    ],
)
def test_one_word_names(reply, action):
    assert action_of(reply, SHORT, {}) == action


def test_own_spelling_and_longest_name():
    assert action_of("action: PLACE table", CRAFTER, {}) == "Place Table"
    assert action_of("go left now", ["go", "go left"], {}) == "go left"
    assert action_of("go leftover", ["go", "go left"], {}) == "go"
    assert action_of("do not move", CRAFTER, {}) is None
    assert action_of("don't", CRAFTER, {}) is None


def test_names_made_of_marks_and_numbers():
    assert [action_of(f"ACTION: {name}", ["<", ">", "-1", "1"], {}) for name in ("<", ">", "-1", "1", "#")] == [
        "<",
        ">",
        "-1",
        "1",
        None,
    ]
    assert action_of("action 1", ["action 1", "action 2"], {}) == "action 1"
    assert action_of("ACTION: action 2", ["action 1", "action 2"], {}) == "action 2"


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("3. It is the middle.", "3"),
        ("ACTION: 3. The middle", "3"),
        ("4. 5 was too high", "4"),
        ("4) 5 was too high", "4"),
        ("3.5", None),
        ("1,5", None),
        ("1, since it is small", "1"),
        ("7. 2", "2"),  # a bullet: there is no 7
        ("3.", "3"),
    ],
)
def test_a_number_that_is_an_action_is_no_bullet(reply: str, action: str | None) -> None:
    numbers = [str(number) for number in range(1, 6)]
    assert action_of(reply, numbers, {}) == action
    assert action_of("1. left", ["left", "right"], {}) == "left"


def test_names_may_differ_in_case_alone():
    keys = ["h", "H", "j"]
    for said, meant in (("ACTION: h", "h"), ("THINK: h or H?\nACTION: H", "H"), ("H", "H"), ("J", "j"), ("*H*", None)):
        assert action_of(said, keys, {}) == meant


def test_one_spelling_of_two_actions_is_ambiguous():
    assert action_of("pick-up", ["pick up", "pick_up"], {}) is None
    assert action_of("pick_up", ["pick up", "pick_up"], {}) == "pick_up"
    assert action_of("take.", ["pick up", "drop"], {"take": "pick up", "Take": "drop"}) is None


def test_aliases_yield_to_names_and_need_an_allowed_action():
    assert action_of("drop", BABYAI, {"drop": "toggle"}) == "drop"
    assert action_of("open", ["drop"], {"open": "toggle"}) is None


def test_tolerant_parser_needs_names():
    with pytest.raises(ValueError, match="RawParser"):
        TolerantParser().parse("drop", [], {})


def test_raw_parser():
    assert RawParser().parse("  look at\nthe map \n", [], {}) == ParsedReply("", "look at\nthe map")
    assert RawParser().parse(" \n", [], {}) == ParsedReply("", None)


@pytest.mark.parametrize(
    ("reply", "thought"),
    [
        ("THINK: the door is left.\nACTION: turn left", "the door is left."),
        ("**Think:** the door\nis left.\n\n**Action:** turn left", "the door\nis left."),
        ("1. THINK: go (4 steps)\n2. ACTION: turn left", "go (4 steps)"),
        ("thought: so left. ACTION: turn left", "so left."),
        ("## Thoughts\nso left\n## Action\nturn left", "so left"),
        ("<think>so left</think>\nACTION: turn left", "so left"),
        ("THINK: cut by the ca", "cut by the ca"),
        ("ACTION: turn left\nTHINK: too late", ""),
        ("I think: left\nACTION: turn left", ""),
        ("turn left", ""),
    ],
)
def test_thought(reply, thought):
    assert TolerantParser().parse(reply, BABYAI, {}).thought == thought


@pytest.mark.parametrize(
    ("reply", "thought_part"),
    [
        ("THINK: so left\nACTION: turn left", "THINK: so left\n"),
        ("<think>so left</think>\nACTION: turn left", "<think>so left</think>"),
        ("<think>so left</think> turn left", "<think>so left</think>"),
        ("THINK: cut by the ca", "THINK: cut by the ca"),
        ("ACTION: turn left\nTHINK: too late", ""),
        ("turn left", ""),
    ],
)
def test_where_the_naming_of_the_action_begins(reply, thought_part):
    assert TolerantParser().parse(reply, BABYAI, {}).action_start == len(thought_part)


WRAPS = ["{}", "**{}**", "`{}`", '"{}"', "'{}'", "[{}]", "({})", "<{}>", "- {}", "* {}", "2. {}", "_{}_", "“{}”"]
KEYS = ["{}", "ACTION: {}", "action:{}", "**Action:** {}", "Action - {}", "### ACTION\n{}", "__Action__: {}"]
CASES = [str.lower, str.upper, str.title, lambda name: name.replace(" ", "_"), lambda name: name.replace(" ", "-")]


@settings(max_examples=80)
@given(
    name=st.sampled_from(BABYAI),
    wrap=st.sampled_from(WRAPS),
    key=st.sampled_from(KEYS),
    case=st.sampled_from(CASES),
    end=st.sampled_from(["", ".", "!", "...", ";", " ", "\n", ".\n\nbecause of the wall", " because of the wall"]),
)
def test_a_decorated_action_is_found(name, wrap, key, case, end):
    assert action_of(key.format(wrap.format(case(name)) + end)) == name


@settings(max_examples=60)
@given(
    said=st.lists(st.sampled_from([*BABYAI, "wait,", "the action", "Then", "*", "(2)", "no!", "\n"]), max_size=12),
    name=st.sampled_from(BABYAI),
)
def test_thoughts_about_other_actions_do_not_confuse(said, name):
    parsed = TolerantParser().parse(f"THINK: {' '.join(said)}\nACTION: {name}", BABYAI, BABYAI_ALIASES)
    assert parsed.action == name
    assert "ACTION" not in parsed.thought
    assert all(word in parsed.thought for word in said if word.isalpha())


@settings(max_examples=60)
@given(st.text(max_size=80))
def test_any_text_is_read_without_an_error(reply):
    assert action_of(reply) in [None, *BABYAI]


@pytest.mark.parametrize("filler", ["*", " ", "\n", "-", "action", "think\n", "1. ", "turn left or "])
def test_long_replies_are_read_in_time(filler):
    """A pattern that tries all ways to split a reply would run into the time limit of every test."""
    action_of("THINK: " + filler * 4000)
    action_of("ACTION: " + filler * 4000)
