"""Description of Crafter views in words, from semantic ids and amounts; the package `crafter` is not needed."""

from collections.abc import Mapping, Sequence, Sized

from agentrl_envs.wording import read_wording

MATERIALS = ("water", "grass", "stone", "path", "sand", "tree", "lava", "coal", "iron", "diamond", "table", "furnace")
NAMES = ("", *MATERIALS, "player", "cow", "zombie", "skeleton", "arrow", "plant")
"""Names of cell contents by semantic id; id 0 means that the cell has no content."""
COLUMNS, ROWS = 9, 7
"""Width and height of the window in cells."""
OUTSIDE = -1
"""Id of a cell of the window that is outside the map."""

_VITALS = ("health", "food", "drink", "energy")
_TEXTS = read_wording(__package__).texts


def describe(
    window: Sequence[Sequence[int]],
    facing: Sequence[int] | int,
    inventory: Mapping[str, int],
    sleeping: bool = False,
    dead: bool = False,
) -> tuple[str, str]:
    """Return the long-term text about the player's surroundings and the short-term text about the player's state.

    Args:
        window: semantic ids of the cells around the player, who is in the middle: 7 rows from north to south of 9 cells
            from west to east; -1 outside the map.
        facing: direction of the player as steps to the east and to the south, such as (0, 1), or the semantic id of the
            cell ahead.
        inventory: amount of each item, including health, food, drink and energy.
        sleeping: whether the player sleeps.
        dead: whether the player died.

    Raises:
        ValueError: the window does not have 7 rows of 9 cells, or an id in the window is unknown.
    """
    if [len(row) for row in window] != [COLUMNS] * ROWS:
        raise ValueError(f"A Crafter window has {ROWS} rows of {COLUMNS} cells, not {[len(row) for row in window]}.")
    if isinstance(facing, Sized):
        east, south = facing
        facing = int(window[ROWS // 2 + south][COLUMNS // 2 + east])
    state = _TEXTS["died"] if dead else _TEXTS["asleep"] if sleeping else ""
    parts = [state, _surroundings(window), _TEXTS["facing"].format(name=_name(facing) or _TEXTS["nothing"])]
    return "\n\n".join(part for part in parts if part), _status(inventory)


def _surroundings(window: Sequence[Sequence[int]]) -> str:
    """Describe the nearest cell of each type; a scan of the window by columns gives the order of the types."""
    nearest: dict[str, tuple[int, int]] = {}
    for east in range(-(COLUMNS // 2), COLUMNS // 2 + 1):
        for south in range(-(ROWS // 2), ROWS // 2 + 1):
            name = _name(window[ROWS // 2 + south][COLUMNS // 2 + east])
            if not name or not (east or south):
                continue
            best = nearest.setdefault(name, (east, south))
            if abs(east) + abs(south) < abs(best[0]) + abs(best[1]):
                nearest[name] = (east, south)
    if not nearest:
        return _TEXTS["nothing_around"]
    return "\n".join([_TEXTS["around"], *(f"- {name} {_where(*place)}" for name, place in nearest.items())])


def _where(east: int, south: int) -> str:
    count = abs(east) + abs(south)
    sides = ("south" if south > 0 else "north" if south else "", "east" if east > 0 else "west" if east else "")
    return f"{count} {'step' if count == 1 else 'steps'} to your {'-'.join(side for side in sides if side)}"


def _status(inventory: Mapping[str, int]) -> str:
    vitals = [f"- {name}: {inventory[name]}/9" for name in _VITALS]
    items = [f"- {name}: {amount}" for name, amount in inventory.items() if amount and name not in _VITALS]
    held = [_TEXTS["inventory"], *items] if items else [_TEXTS["empty"]]
    return "\n".join([_TEXTS["status"], *vitals, "", *held])


def _name(code: int) -> str:
    if not OUTSIDE <= code < len(NAMES):
        raise ValueError(f"{code} is not a semantic id of Crafter; the ids are {OUTSIDE} to {len(NAMES) - 1}.")
    return "" if code == OUTSIDE else NAMES[code]
