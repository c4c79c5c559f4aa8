"""Description of worlds in words: the active rules, then the objects and their places relative to the YOU object."""

from agentrl_envs.baba.elements import Element
from agentrl_envs.baba.world import World


def active_rules(world: World) -> list[str]:
    """Return the rules with a property, such as "wall is stop", in the order of the text."""
    return [str(rule) for rule in world.rules.told]


def describe(world: World) -> str:
    """Describe rules and map in words, without baba, the border and elements that lie below others."""
    lines = ["Active rules:", *active_rules(world), "", "Objects on the map:"]
    viewpoint = world.viewpoint
    if viewpoint is None:
        return "\n".join([*lines, "none of them is you"])
    x, y = world.place(viewpoint)
    for cell, stack in enumerate(world.cells):
        if stack and (name := _name(stack[-1])):
            column, row = world.place(cell)
            lines.append(f"{name} {_where(column - x, row - y)}")
    return "\n".join(lines)


def _name(element: Element) -> str:
    if element.is_text:
        return f"rule `{element.name}`"
    return "" if element.name in ("", "baba") else element.name


def _where(dx: int, dy: int) -> str:
    parts = []
    if dx:
        parts.append(f"{_steps(dx)} to the {'right' if dx > 0 else 'left'}")
    if dy:
        parts.append(f"{_steps(dy)} {'down' if dy > 0 else 'up'}")
    return " and ".join(parts) or "here"


def _steps(count: int) -> str:
    return "1 step" if abs(count) == 1 else f"{abs(count)} steps"
