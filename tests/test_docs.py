"""The documentation is true of the code: what it names is there, what it shows works, and the site loads nothing."""

from __future__ import annotations

import ast
import html
import inspect
import logging
import re
import shutil
import sys
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from io import StringIO
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import gymnasium
import lightning as L
import pytest
import torch
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config

from benchmarks import counted_memory
from docs import hooks, reference
from lightning_agentrl.advantages import AdvantageEstimator
from lightning_agentrl.commands import main as commands
from lightning_agentrl.prompts.messages import Observation, Rules
from lightning_agentrl.rollout import ChatRenderer, PromptFormat
from lightning_agentrl.types import Rollout, Sample, Segment, SegmentKind, Turn
from tests.guides import importable
from tests.inputs import text
from tests.markdown import agentrl_lines, code_lines, fences, inline
from tests.parsing import fit_parser
from tests.tiny import tiny_tokenizer

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
README = ROOT / "README.md"  # what a reader meets first; the other pages take a minute
READ = [pytest.param(path, marks=() if path == README else pytest.mark.slow) for path in (*PAGES, *TEXTS)]
GROUPS = "rollout|policy|critic|kl|stop|text|env|time|val|mismatch|grad_norm|variance_proxy|guard|clone|thoughts"


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def filled(path: Path) -> str:
    return hooks.filled(path.read_text())


# The site


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a":
            self.links.append(given.get("href", ""))
        else:
            self.loaded += [given[name] for name in ("src", "href", "data", "srcset", "poster") if name in given]


@dataclass
class Site:
    folder: Path
    warnings: list[str] = field(default_factory=list)
    pages: dict[Path, Tags] = field(default_factory=dict)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The site as `make docs` builds it."""
    made = Site(tmp_path_factory.mktemp("docs") / "site")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: made.warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mkdocs").addHandler(handler)
    try:
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(made.folder))  # not strict, so that all are told
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
    finally:
        logging.getLogger("mkdocs").removeHandler(handler)
    for path in made.folder.rglob("*.html"):
        made.pages[path] = Tags()
        made.pages[path].feed(path.read_text())
    return made


@pytest.mark.slow
def test_the_site_is_built_without_warnings(site: Site) -> None:
    assert site.warnings == []
    assert {"index.html", "configuration.html", "api/agents.html", "results/quickstart.html"} <= {
        str(path.relative_to(site.folder)) for path in site.pages
    }


@pytest.mark.slow
def test_the_site_loads_nothing_from_a_network(site: Site) -> None:
    loaded = {address for tags in site.pages.values() for address in tags.loaded}
    assert not [address for address in loaded if re.match(r"(https?:)?//", address)]
    for path in site.folder.rglob("*.css"):
        assert not re.search(r"""(url\(|@import)\s*["']?(https?:)?//""", path.read_text()), path


@pytest.mark.slow
def test_every_link_of_the_site_leads_somewhere(site: Site) -> None:
    broken = []
    for page, tags in site.pages.items():
        for link in tags.links:
            target, anchor = urldefrag(unquote(link))
            if re.match(r"\w+:|//", target) or page.name == "404.html":
                continue
            file = (page.parent / target).resolve() if target else page
            file = file / "index.html" if file.is_dir() else file
            ids = site.pages[file].ids if file in site.pages else set()
            if not file.exists() or (anchor and anchor not in ids and not anchor.startswith("__")):
                broken.append(f"{page.relative_to(site.folder)}: {link}")
    assert not broken


@pytest.mark.parametrize("path", TEXTS, ids=named)
def test_relative_links_of_the_repository_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        target, anchor = urldefrag(link)
        if not re.match(r"\w+:", target):
            file = (path.parent / target) if target else path
            assert file.exists(), link
            titles = re.findall(r"^#+ (.+)$", file.read_text(), re.M) if anchor else []
            slugs = {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}
            assert not anchor or anchor in slugs, link


CUT = """() => {
  const wide = document.documentElement.scrollWidth > document.documentElement.clientWidth ? ["the page"] : [];
  const long = [...document.querySelectorAll(".md-content pre > code")].filter(e => e.scrollWidth > e.clientWidth + 1);
  const hidden = long.filter(e => {
    const style = getComputedStyle(e);
    return !["auto", "scroll"].includes(style.overflowX) || style.scrollbarColor.startsWith("rgba(0, 0, 0, 0)");
  });
  return {long: long.length, cut: [...wide, ...hidden.map(e => e.textContent.slice(0, 80))]};
}"""


@pytest.mark.browser
def test_the_site_in_a_browser(site: Site) -> None:
    """Every page from the file system, as wide as a screen and as a phone.

    No request leaves it, there is no error, no page is cut, code that is too long shows a bar, and the search finds.
    """
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    assert chromium, "install chromium (make chromium)"
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        seen: list[str] = []
        page.on("request", lambda request: seen.append(request.url))
        page.on("console", lambda message: seen.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: seen.append(str(error)))
        long = 0
        for path in site.pages:
            if path.name == "404.html":  # its addresses are those of a server
                continue
            page.set_viewport_size({"width": 1280, "height": 900})
            page.goto(path.as_uri())
            if not path.name.startswith("inspect_"):  # pages of the package, not of the documentation
                found = page.evaluate(CUT)
                assert not found["cut"], (path.name, found["cut"])
                long += found["long"]
            page.set_viewport_size({"width": 390, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
        assert long  # there is code that has to scroll
        page.set_viewport_size({"width": 1300, "height": 900})
        page.goto((site.folder / "index.html").as_uri())
        page.click(".md-search__input")
        page.keyboard.type("explained_variance")
        page.wait_for_selector(".md-search-result__item")
        browser.close()
    assert [text for text in seen if not re.match(r"file:|data:|about:|blob:", text)] == []


# The reference


def test_reference_pages_are_those_that_the_code_gives() -> None:
    for name, content in reference.pages().items():
        assert (reference.API / name).read_text() == content, f"docs/api/{name} is old: run `make reference`"


def test_every_argument_has_a_meaning() -> None:
    missing = {
        cls.__name__: [argument.name for argument in reference.arguments(cls) if not argument.meaning]
        for part in reference.parts()
        for cls in part.classes
    }
    assert not {name: names for name, names in missing.items() if names}, "nothing about them in the section Args"


# What the command understands


@pytest.fixture(scope="module")
def parser() -> Any:
    return fit_parser()


NEEDED = [  # keys without a default; a larger config would take several times as long to read, some 200 times
    *("--model=PPOAgent", "--model.init_args.model=demo"),
    *("--data=RolloutDataModule", "--data.init_args.env={id: 'agentrl_envs:Bandit-v0'}"),
    *("--data.init_args.num_envs=4", "--data.init_args.turns_per_env=4", "--data.init_args.mini_batch_turns=8"),
]


def as_config(block: Any) -> dict[str, Any] | None:
    """A block as a part of a config, with the keys above it; None where it is something else."""
    if not isinstance(block, dict):
        return None
    if set(block) <= {"seed_everything", "trainer", "model", "data", "ckpt_path"}:
        return block
    for part in reference.roots()[:2]:
        if all(set(block) <= {argument.name for argument in reference.arguments(cls)} for cls in part.classes):
            return {part.key: {"init_args": block}}
    return None


@pytest.mark.parametrize("path", READ, ids=named)
def test_yaml_blocks_are_understood(path: Path, parser: Any, tmp_path: Path) -> None:
    text = filled(path)
    modules = {match[1] for match in re.finditer(r"\b(my_\w+)\.[A-Z]", text)}  # the classes of the page itself
    for module in modules:
        (tmp_path / f"{module}.py").write_text(
            "\n".join(code for language, code in fences(text) if language == "python" and "class " in code)
        )
    with importable(tmp_path):
        for code in (code for language, code in fences(text) if language == "yaml"):
            config = as_config(yaml.safe_load(code))
            assert config is not None, f"not a part of a config:\n{code}"
            (tmp_path / "block.yaml").write_text(yaml.safe_dump(config))
            parser.parse_args(["fit", *NEEDED, "--config", str(tmp_path / "block.yaml")])


@cache
def answer(*arguments: str) -> str:
    """What the command prints; nothing where it refuses."""
    out = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), suppress(SystemExit):
        patch.setattr(sys, "argv", ["agentrl", *arguments])
        patch.setattr(commands, "keep_freed_memory", lambda: True)
        commands.main()
    return out.getvalue()


@cache
def options(command: str) -> set[str]:
    """Options that a command tells in its help, with underscores in their names; the general help tells some too."""
    known = re.findall(r"(?<![\w-])--?[a-zA-Z][\w.-]*", answer("--help") + answer(command, "--help"))
    return {option.replace("-", "_") for option in known}


def test_every_command_is_on_the_configuration_page() -> None:
    listed = set(re.findall(r"^  ([a-z][a-z-]*) {2,}\w", commands.HELP, re.M))
    assert {"new", "fit", "serve-env"} < listed
    named_here = {line[0] for line in agentrl_lines(filled(DOCS / "configuration.md")) if line}
    assert listed <= named_here


@pytest.mark.slow
@pytest.mark.parametrize("path", [*PAGES, *TEXTS], ids=named)
def test_commands_are_known(path: Path, parser: Any) -> None:
    for arguments in agentrl_lines(filled(path)):
        if not arguments or arguments[0].startswith("-"):
            assert not arguments or arguments[0].replace("-", "_") in options("fit")
            continue
        command, *rest = arguments
        rest = rest[: rest.index("--")] if "--" in rest else rest  # what follows is for another program
        assert answer(command, "--help"), f"there is no command '{command}': {arguments}"
        keys = []
        for name, following in zip_longest(rest, rest[1:], fillvalue=""):
            option, _, value = name.partition("=")
            if re.match(r"--\w+\.", option) and not option.endswith(".help"):
                keys.append(f"{option}={value or following}")
            elif option.startswith("-") and not option.endswith(".help"):
                assert option.replace("-", "_") in options(command), f"{option} of {arguments}"
        if keys:  # of a config, as a rule a shipped one
            parser.parse_args(["fit", "--config", str(ROOT / "configs" / "quickstart.yaml"), *keys])


@pytest.mark.parametrize("path", READ, ids=named)
def test_make_targets_are_there(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named_here = {m[1] for line in code_lines(filled(path)) if (m := re.match(r"(?:\w+=\S+ )*make ([a-z-]+)", line))}
    assert named_here <= targets


@pytest.mark.parametrize("path", READ, ids=named)
def test_key_paths_exist(path: Path) -> None:
    found = [re.match(r"((?:model|data|trainer)(?:\.\w+)+)(?::|$)", code) for code in inline(filled(path))]
    assert not [match[1] for match in found if match and not is_key(match[1])]


def is_key(path: str) -> bool:
    root, *names = path.split(".")
    if root == "trainer":
        return names[0] in inspect.signature(L.Trainer).parameters
    classes = next(part.classes for part in reference.roots() if part.key == root)
    for name in names:
        if name in ("init_args", "class_path"):
            continue
        found = [a for cls in classes for a in reference.arguments(cls) if a.name == name]
        if not found:
            return False
        bases = [base for argument in found for base in reference.own_types(argument.annotation)]
        classes = tuple(cls for base in bases for cls in reference.concrete(base))
    return True


# What pages quote


@cache
def strings_of_the_code() -> tuple[str, ...]:
    """Every text in the package, with … where a value is filled in."""

    def text_of(node: ast.JoinedStr) -> str:
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)

    found = []
    for path in (ROOT / "lightning_agentrl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append(text_of(node))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def test_messages_are_those_of_the_code() -> None:
    quoted = [code for language, code in fences(filled(DOCS / "troubleshooting.md")) if language == "text"]
    assert len(quoted) > 10
    for message in quoted:
        for piece in re.split(r"…", message):
            piece = piece.strip(" ,;:'\n")
            assert any(piece in text for text in strings_of_the_code()), piece


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in PAGES if path.name != "metrics.md"], ids=named)
def test_metrics_are_those_of_the_code(path: Path) -> None:
    logged = [re.escape(text).replace("…", ".+") for text in strings_of_the_code() if re.match(rf"({GROUPS})/", text)]
    named_here = [code for code in inline(filled(path)) if re.fullmatch(rf"({GROUPS})/[a-z_]+", code)]
    unknown = [name for name in named_here if not any(re.fullmatch(pattern, name) for pattern in logged)]
    assert not unknown


def test_tests_that_pages_name_exist() -> None:
    known = {m[1] for path in (ROOT / "tests").rglob("*.py") for m in re.finditer(r"def (test_\w+)", path.read_text())}
    named_here = {code for path in PAGES for code in inline(path.read_text()) if re.fullmatch(r"test_\w+", code)}
    assert named_here <= known
    files = {code for path in PAGES for code in inline(path.read_text()) if re.fullmatch(r"tests/[\w/]+\.py", code)}
    assert files
    assert all((ROOT / name).exists() for name in files)


def test_numbers_of_the_home_page_are_those_of_the_results() -> None:
    results = (DOCS / "results" / "quickstart.md").read_text()
    home = " ".join((DOCS / "index.md").read_text().split())
    before, after = (re.search(rf"\| success {when} \| ([\d.]+) \|", results) for when in ("before", "after"))
    chance = re.search(r"\| random agent \| ([\d.]+) \|", results)
    assert before
    assert after
    assert chance
    assert f"went from {float(before[1]):.2f} to {float(after[1]):.2f}" in home
    assert f"a random agent reaches {float(chance[1]):.2f}" in home


# Examples


def test_the_table_of_what_fits_where_is_the_plans() -> None:
    assert "\n".join(counted_memory.table()) in (ROOT / "docs" / "many_devices.md").read_text()


def test_the_example_of_the_concepts_is_rendered_like_that() -> None:
    page = html.unescape((DOCS / "concepts.md").read_text())
    env: Any = gymnasium.make("agentrl_envs:GuessNumber-v0", highest=5).unwrapped
    renderer = ChatRenderer(tiny_tokenizer(), PromptFormat(think=False, instruction=""))
    observation, _ = env.reset(seed=4)
    segments = list(renderer.render(Rules(env.system_prompt, actions=env.actions), Observation(observation)).segments)
    observation, reward, *_ = env.step("3")
    assert (observation, reward) == ("3 is too low.", 0.0)
    segments += renderer.continuation(Rules(env.system_prompt, actions=env.actions), Observation(observation))
    _, reward, terminated, *_ = env.step("4")
    assert reward == 1.0
    assert terminated
    for segment in segments:
        text = "".join(renderer.tokenizer.decode(list(segment.ids))).replace("\n", "⏎\n")
        assert f'<span class="seg-{segment.kind}">{text}</span>' in page


def test_the_example_estimator_works() -> None:
    blocks = [code for language, code in fences((DOCS / "api" / "index.md").read_text()) if language == "python"]
    (code,) = (code for code in blocks if "AdvantageEstimator" in code)
    names: dict[str, Any] = {}
    exec(code, names)
    estimator = names["TurnReward"]
    assert issubclass(estimator, AdvantageEstimator)
    rollout = Rollout.from_samples([_sample(tokens=2, reward=1.0), _sample(tokens=1, reward=-0.5)])
    advantages, returns = estimator().estimate(rollout.union(shaped_rewards=rollout.rewards))
    assert torch.equal(advantages, torch.tensor([[1.0, 1.0], [-0.5, 0.0]]))
    assert torch.equal(advantages, returns)


def _sample(tokens: int, reward: float) -> Sample:
    given = {p.name: p.default for p in inspect.signature(Turn).parameters.values() if p.default is not p.empty}
    hints = inspect.get_annotations(Turn, eval_str=True)
    needed = {name: hint() for name, hint in hints.items() if name not in given and hint in (int, str, bool, float)}
    turn = Turn(**{**needed, "stop": None, "success": None, "reward": reward})
    action = Segment(SegmentKind.ACTION, text(*[5] * tokens), (-1.0,) * tokens)
    return Sample((Segment(SegmentKind.PROMPT, text(1, 2)), action), (turn,))
