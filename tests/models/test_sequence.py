"""Ranks that read rows together give the outputs and gradients of one rank that reads them all."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_agentrl.models.families import FAMILIES, SHARING
from lightning_agentrl.models.sequence import shares_heads
from tests.models import reading_together
from tests.models.reading_together import TEXTS, Case
from tests.models.test_families import WITHOUT_CLASS, tiny_config
from tests.started import together
from tests.tiny import CONFIGS, VisionFamily, tiny_model_folder, tiny_vision_folder

TWO = [
    *(Case(family, checkpointing=again) for family in ("qwen2", "qwen3", "llama") for again in (False, True)),
    *(Case("qwen3", rows) for rows in TEXTS[1:]),
    Case("qwen3", "branches", checkpointing=True),
    Case("qwen3", owners=0),
    Case("qwen3", "one", owners=1),
    Case("mistral"),  # with a window
    Case("gpt_oss"),  # with sinks
    Case("deepseek_v3"),  # keys wider than values
    *(Case(family, "images") for family in ("qwen3_vl", "qwen2_5_vl", "smolvlm", "gemma3")),
]
FOUR = [Case("qwen3", rows) for rows in TEXTS] + [Case("mistral"), Case("gpt_oss"), Case("qwen3_vl", "images")]
BROKEN = [Case("qwen3", broken="without heads"), Case("qwen3", broken="without sum")]
OTHERS = sorted(name for name in SHARING - WITHOUT_CLASS if FAMILIES[name].engine_shares)

Reports = list[dict[str, dict[str, float]]]  # of each rank


def write_model(folder: Path, family: str) -> None:
    if family in CONFIGS:
        tiny_model_folder(folder, family, **({"sliding_window": 16} if family == "mistral" else {}))
    elif family in get_args(VisionFamily):
        tiny_vision_folder(folder, family)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            lm = AutoModelForCausalLM.from_config(tiny_config(family))
        lm.save_pretrained(folder)


def read_by(ranks: int, cases: Sequence[Case], folder: Path) -> Reports:
    for family in {case.family for case in cases} | {"qwen3"}:
        write_model(folder / family, family)
    together(ranks, reading_together.run, ranks, str(folder), cases)
    return [json.loads((folder / f"{ranks}.{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Reports]:
    cases = {2: TWO + BROKEN, 4: FOUR}
    return lru_cache(lambda ranks: read_by(ranks, cases[ranks], tmp_path_factory.mktemp("ranks")))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "case"), [*((2, case) for case in TWO), *((4, case) for case in FOUR)], ids=str)
def test_ranks_together_give_what_one_gives(reports, ranks, case):
    for report in reports(ranks):
        found = report[str(case)]
        assert found["outputs"] <= 1e-6
        assert found["gradients"] <= 1e-6
        assert found["worst"] <= 3e-6
        assert found["tokens"] < 1 / ranks + 0.05


@pytest.mark.slow
def test_what_is_kept_for_the_backward_pass_halves(reports):
    for again in (False, True):
        found = [report[str(Case("qwen3", "branches", checkpointing=again))]["kept"] for report in reports(2)]
        assert sum(found) / 2 < 0.55


@pytest.mark.slow
@pytest.mark.parametrize(("case", "least"), [*zip(BROKEN, (0.5, 0.2), strict=True)], ids=str)
def test_a_broken_exchange_shows(reports, case, least):
    assert all(report[str(case)]["gradients"] > least for report in reports(2))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_without_rows_give_gradients_of_zero(reports, ranks):
    assert all(report["no rows"] == {"outputs": 0, "gradients": 0} for report in reports(ranks))


@pytest.mark.long
def test_every_family_with_attention_alone_is_read_together(tmp_path):
    cases = [Case(family, "odd") for family in OTHERS]
    for report in read_by(2, cases, tmp_path):
        wrong = {name: x for name, x in report.items() if max(x["outputs"], x["gradients"]) > 1e-6}
        assert not wrong


@pytest.mark.parametrize(
    ("heads", "of_keys", "sizes"), [(14, 2, [1, 2, 14]), (28, 4, [1, 2, 4, 28]), (32, 8, [1, 2, 4, 8, 16, 32])]
)
def test_heads_decide_how_many_ranks_can_read_together(heads, of_keys, sizes):
    config = LlamaConfig(hidden_size=64 * heads, num_attention_heads=heads, num_key_value_heads=of_keys)
    assert [parts for parts in range(1, heads + 1) if shares_heads(config, parts)] == sizes
