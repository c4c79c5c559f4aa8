"""Texts of the BabyAI environments: actions and their other names, prompts, worked examples."""

from collections.abc import Sequence

SHORT_ACTIONS = ("left", "right", "forward")
FULL_ACTIONS = ("turn left", "turn right", "go forward", "pick up", "drop", "toggle")

# Names of each action, in the order of Minigrid's action ids.
SPOKEN: tuple[tuple[str, ...], ...] = (
    ("turn left", "left", "turnleft", "turn to the left", "turn to left", "rotate left", "go left"),
    ("turn right", "right", "turnright", "turn to the right", "turn to right", "rotate right", "go right"),
    (
        "go forward", "forward", "goforward", "move forward", "step forward", "walk forward", "moveforward",
        "go straight", "straight", "straight ahead", "ahead", "go ahead", "move ahead", "forwards",
    ),
    ("pick up", "pickup", "pick it up", "pick up the object", "pick", "grab", "take"),
    ("drop", "drop it", "put down", "put it down", "release"),
    ("toggle", "toggle it", "open", "open it", "open the door", "unlock", "unlock the door", "toggle the door"),
)  # fmt: skip

DESCRIPTIONS: tuple[str, ...] = (
    "turn 90 degrees to the left",
    "turn 90 degrees to the right",
    "move one step ahead if the cell there is free",
    "take the object that is 1 step forward",
    "put down what you carry, 1 step forward, if the cell there is free",
    "open, close or unlock the door, or open the box, that is 1 step forward",
)

MISSION_LINE = "Mission: {mission}"

SIGHT = {
    "text": "Each observation lists what the agent sees in front of it and at its sides, with the distance in steps.",
    "image": "Each observation shows a picture of what the agent sees: the agent is the red triangle in the middle of "
    "the bottom row and looks up; what is dark is out of sight.",
}
SIGHT["both"] = f"{SIGHT['text']} {SIGHT['image']}"

SHORT_PROMPT = "Walk to the object named in the mission until it is 1 step forward. Reply with one word: {names}."

LONG_PROMPT = """\
You control an agent in a world of rooms made of square cells. {sight}

{mission}

Choose one action in every turn:
{actions}

Hints:
{tips}"""

TIPS = """\
- An object or a door can be used only when it is directly ahead, that is 1 step forward and 0 steps to the side.
- If an action did not change what you see, do not repeat it; try another one."""

MISSION_IN_OBSERVATION = "The mission is the first line of every observation."

# (target, view, Minigrid's action id). In the views `{target}` stands for the object of the mission.
GO_TO_EXAMPLES: Sequence[tuple[str, str, int]] = (
    ("purple ball", "a wall 4 steps forward\na wall 2 steps right\na {target} 1 step left and 3 steps forward", 2),
    ("blue key", "a wall 3 steps forward\na wall 1 step right\na {target} 2 steps left", 0),
    ("green box", "a wall 1 step forward\na wall 2 steps left\na wall 3 steps right", 1),
)
