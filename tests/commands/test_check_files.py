"""Config files are looked at before the parser: what is broken in them is told with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_agentrl.commands.check_files import check_file, check_files
from lightning_agentrl.commands.places import places_of
from lightning_agentrl.errors import ConfigError
from tests.cli import Write


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "trainer:\n  max_epochs: 3\n  devices: 1\n  max_epochs: 4\n",
            ["trainer.max_epochs is given twice (a.yaml, lines 2 and 4)"],
        ),
        (
            "trainer:\n  callbacks:\n  - {a: 1, b: 2, a: 3}\n",
            ["trainer.callbacks[0].a is given twice", "lines 3 and 3"],
        ),
        ("model: {}\ndata: {}\nmodel: {}\n", ["the key model is given twice", "lines 1 and 3"]),
        ("trainer:\n\tmax_epochs: 3", ["not valid YAML", "a.yaml, line 2, column 1", "not with tabs"]),
        ("trainer:\n  a: b: c\n", ["not valid YAML", "line 2", "quote a value that contains ': '"]),
        ("model: {}\nlr_actor: 1\n", ["no key 'lr_actor'", "a.yaml, line 2", "mean model.init_args.optim.lr_actor?"]),
        ("think: true\n", ["no key 'think'", "a.yaml, line 1", "mean data.init_args.prompt.think?"]),
        ("trainer.max_epochs: 3\n", ["did you mean trainer: {max_epochs: ...}?"]),
        ("- a\n- b\n", ["holds no keys", "trainer, model, data"]),
        ("# later\ntrainer:\n", ["trainer has no keys; give it some, or leave it out (a.yaml, line 2)"]),
        ("seed_everything:\n", ["seed_everything has no value", "a.yaml, line 1"]),
        ("model: {}\ndata: !mine {}\n", ["a.yaml, line 2", "constructor for the tag '!mine'"]),
        ("trainer: {}\nmodel: {? [a] : 1}\n", ["a.yaml, line 2", "unhashable key"]),
        ("model: " + "[" * 3000 + "]" * 3000, ["a.yaml", "nested too deeply"]),
        ("trainer:\n  callbacks: &all [*all]\n", ["holds itself", "a.yaml, line 2"]),
        ("model: &one\n  <<: *one\n", ["holds itself", "a.yaml, line 1"]),
    ],
)
def test_a_broken_file_is_told_with_its_line(text: str, parts: list[str], write: Write) -> None:
    write(a=text)
    with pytest.raises(ConfigError) as error:
        check_file(Path("a.yaml"))
    shown = error.value.problem.sentence(places_of(error.value.problem, []))
    for part in parts:
        assert part in shown


def test_files_are_looked_at_before_anything_is_imported(write: Write, tmp_path: Path) -> None:
    write(a="model: {}\n")
    (tmp_path / "noise.yaml").write_bytes(b"model: {}\n# caf\xe9\n")
    check_files(["fit", "--config", "a.yaml", "--config={model: 1}", "--model", "x"])
    for given, part in (
        ("b.yaml", "'b.yaml' does not exist"),
        ("a.yaml", "the key data is missing; give a config file"),
        ("a.yaml c.yaml", r"did you mean --config c.yaml\?"),
        (".", "'.' cannot be read: Is a directory"),
        ("noise.yaml", "is not text in UTF-8: .*save it as UTF-8"),
    ):
        with pytest.raises(ConfigError, match=part):
            check_files(["--config", *given.split()])
    with pytest.raises(ConfigError, match=r"did you mean --config a.yaml\?"):
        check_files(["a.yaml"])


def test_merged_keys_and_anchors_are_not_given_twice(write: Write) -> None:
    write(a="model: &m {init_args: {a: 1}}\ndata: {<<: *m, init_args: {a: 2}}\ntrainer: *m\n")
    assert check_file(Path("a.yaml")) == {"model", "data", "trainer"}


@pytest.mark.parametrize("option", ["--config", "--data.init_args.num_envs", "--trainer.max_epochs", "--model"])
def test_an_option_without_its_value_is_named_whole(option: str, write: Write) -> None:
    write(a="model: {}\ndata: {}\n")
    for arguments in ([option], [option, "--trainer.devices", "2"]):
        with pytest.raises(ConfigError, match=f"option {option} has no value"):
            check_files(["--config", "a.yaml", *arguments])


def test_flags_and_values_with_dashes_need_no_value_behind_them(write: Write) -> None:
    write(a="model: {}\ndata: {}\n")
    check_files(
        ["--config", "a.yaml", "--dry-run", "--model.help", "--trainer.gradient_clip_val", "-1", "--trainer.x="]
    )
