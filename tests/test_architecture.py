"""Imports go down the packages of `docs/architecture.md`, and no imports form a circle, not even for types."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_agentrl"
# The packages are listed from the top; packages of one line do not import each other.
ROOMS = (
    ("__main__", "cli"),
    ("commands",),
    ("tools",),
    ("callbacks",),
    ("agents",),
    ("rollout",),
    ("episodes",),
    ("engines", "gateway", "prompts"),
    ("models",),
    ("metrics", "advantages", "losses"),
    ("types",),
    ("distributed",),
    ("errors", "run_files", "stalls", "vllm_worker"),
)
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imports() -> dict[str, set[str]]:
    """Return the modules that each module imports, also inside functions and TYPE_CHECKING."""
    known = modules()
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        named: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path} imports relatively"
                named |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
        # `from package import module` names both; the package's own file counts only if no module below it is named
        used = {other for other in named if other in known and other not in (name, "lightning_agentrl")}
        graph[name] = {other for other in used if not any(deeper.startswith(f"{other}.") for deeper in used)}
    return graph


def room(module: str) -> str:
    return module.split(".")[1]


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected parts of more than one module (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            part = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(part) > 1:
                found.append(sorted(part))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]


def test_no_module_leads_back_to_itself():
    assert circles(imports()) == []


def test_imports_go_down():
    upwards = [
        f"{name} -> {other}"
        for name, others in imports().items()
        for other in others
        if name != "lightning_agentrl" and room(name) != room(other) and LEVEL[room(name)] >= LEVEL[room(other)]
    ]
    assert upwards == []


def test_only_commands_import_tools():
    users = {name for name, others in imports().items() for other in others if room(other) == "tools"}
    assert {room(name) for name in users} <= {"tools", "commands"}


def test_the_page_has_all_rooms_in_this_order():
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page[page.index("## Packages") : page.index("Imports go down this table")]
    listed = [
        name
        for line in table.splitlines()
        for name in re.findall(r"`(\w+)(?:/|\.py)`", line.split("|")[1:2][0] if "|" in line else "")
    ]
    assert set(listed) - {"envs"} == {name for rooms in ROOMS for name in rooms if name not in ("__main__",)} - {"cli"}
    levels = [LEVEL[name] for name in listed if name in LEVEL and name not in ROOMS[-1]]
    assert levels == sorted(levels)


def test_the_walk_of_a_step_is_short_and_names_files_that_exist():
    page = (ROOT / "docs" / "architecture.md").read_text()
    walk = page[page.index("## The walk of one training step") :].split("\n## ")[0]
    steps = re.findall(r"^\d+\. `([\w/]+\.py)`", walk, re.MULTILINE)
    assert 5 <= len(steps) <= 15
    named = {name for name in re.findall(r"`([\w/]+\.py)`", walk) if "/" in name}
    assert [name for name in named if not (PACKAGE / name).is_file()] == []
