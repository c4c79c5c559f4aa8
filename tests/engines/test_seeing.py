"""The transformers engine samples from prompts with images as the model's own forward pass says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from lightning_agentrl.engines.transformers.rows import PaddedPrefill, Rows, TreePrefill
from lightning_agentrl.engines.vllm.images import image_arguments
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm
from lightning_agentrl.models.packing import pack
from lightning_agentrl.types import ModelInput, Row
from tests.models.seen import OTHERS, VISION_FAMILIES, own_hidden, picture, reader_of, rows_with_images, text
from tests.tiny import VisionFamily, tiny_vision_folder

CLOSE = {"rtol": 0.0, "atol": 1e-4}  # of values to about 4; delta nets on some processors: 2.5e-5, mistakes: over 0.3
STEPS = 6


@pytest.fixture(scope="module")
def policy_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LanguageModel]:
    def load(family: VisionFamily) -> LanguageModel:
        folder = tiny_vision_folder(tmp_path_factory.mktemp(family), family)
        return LanguageModel(load_causal_lm(str(folder))).eval()

    return lru_cache(load)


def kind_of(policy: LanguageModel) -> type[TreePrefill | PaddedPrefill]:
    """As the engine reads prompts; a cache of rows in a tree holds no states."""
    return TreePrefill if policy.engine_shares else PaddedPrefill


def replies(policy: LanguageModel, count: int) -> list[list[int]]:
    """Random ids, a placeholder among those of each."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(20, 300, (count, STEPS), generator=random)
    ids[:, 2] = reader_of(policy).placeholder
    return ids.tolist()


def decoded(policy: LanguageModel, hidden: Tensor, rows: Rows, ids: Sequence[Sequence[int]]) -> Tensor:
    """Hidden states [B, 1 + STEPS, H] from the last token of each prompt on."""
    steps = [hidden, *(rows.read_on(policy, [reply[k] for reply in ids]) for k in range(STEPS))]
    return torch.stack(steps, 1)


def forced(policy: LanguageModel, prompts: Sequence[ModelInput], ids: Sequence[Sequence[int]]) -> Tensor:
    """The same as the trainer reads them."""
    rows = [
        Row(prompt + ModelInput.of_ids(reply), tuple(range(len(prompt) - 1, len(prompt) + STEPS)))
        for prompt, reply in zip(prompts, ids, strict=True)
    ]
    return policy.hidden(pack(rows, reader=policy.image_reader)).view(len(prompts), 1 + STEPS, -1)


@pytest.mark.parametrize("family", VISION_FAMILIES)
@pytest.mark.parametrize("kind", ["as the engine does", PaddedPrefill])
@torch.no_grad()
def test_cached_replies_are_what_the_trainer_reads(
    policy_of: Callable[[str], LanguageModel], family: str, kind: type[PaddedPrefill] | str
) -> None:
    """A stray placeholder in a reply is text in prefill, decoding and training."""
    policy = policy_of(family)
    prefill = kind if isinstance(kind, type) else kind_of(policy)
    prompts = [row.input for row in rows_with_images(reader_of(policy))]
    ids = replies(policy, len(prompts))
    hidden, rows = prefill(policy)(prompts)
    sampled = decoded(policy, hidden, rows, ids)
    expected = forced(policy, prompts, ids)
    torch.testing.assert_close(sampled, expected, **CLOSE)
    stray = [prompt + ModelInput.of_ids(reply) + text(1) for prompt, reply in zip(prompts, ids, strict=True)]
    hidden, _ = prefill(policy)(stray)
    again = policy.hidden(pack([Row(one, (len(one) - 1,)) for one in stray], reader=policy.image_reader))
    torch.testing.assert_close(hidden, again, **CLOSE)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@torch.no_grad()
def test_replies_that_count_tokens_instead_of_positions_show(
    policy_of: Callable[[str], LanguageModel], family: str
) -> None:
    policy = policy_of(family)
    prompts = [row.input for row in rows_with_images(reader_of(policy))]
    ids = replies(policy, len(prompts))
    hidden, rows = TreePrefill(policy)(prompts)
    lengths = torch.tensor([[len(prompt) - 1] for prompt in prompts])
    wrong = decoded(policy, hidden, replace(rows, positions=lengths), ids)
    assert (wrong - forced(policy, prompts, ids)).abs().max() > 0.3


@pytest.mark.parametrize(
    "family", ["qwen3_vl", "smolvlm", "gemma3", *(pytest.param(x, marks=pytest.mark.slow) for x in OTHERS[:4])]
)
@torch.no_grad()
def test_a_kept_prefix_knows_its_images(policy_of: Callable[[str], LanguageModel], family: str) -> None:
    policy = policy_of(family)
    reader = reader_of(policy)
    a, b = (reader.read(picture(seed)) for seed in (0, 1))

    def prompts(image: ModelInput) -> list[ModelInput]:
        return [text(1, 2) + image + text(3, 4, k) + b + text(5) for k in (6, 7)]

    prefill = TreePrefill(policy)
    for image, kept in ((a, False), (a, True), (b, False)):  # dropped for another one of equal ids
        asked, before = prompts(image), prefill._prefix_cache
        hidden, rows = prefill(asked)
        assert (prefill._prefix_cache is before) == kept
        assert prefill._prefix == asked[0].keys[: len(prefill._prefix)]
        assert set(image.keys) <= set(prefill._prefix)
        ids = replies(policy, len(asked))
        torch.testing.assert_close(decoded(policy, hidden, rows, ids), forced(policy, asked, ids), **CLOSE)
    short = [text(1, 2) + a, text(1, 2) + a + text(3)]  # which end in an image, or behind it
    hidden, rows = prefill(short)
    ids = replies(policy, 2)
    torch.testing.assert_close(decoded(policy, hidden, rows, ids), forced(policy, short, ids), **CLOSE)


@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm", "gemma3"])
@torch.no_grad()
def test_rows_with_images_join_and_leave(policy_of: Callable[[str], LanguageModel], family: str) -> None:
    policy = policy_of(family)
    prompts = [row.input for row in rows_with_images(reader_of(policy))]
    ids = replies(policy, len(prompts))
    prefill = TreePrefill(policy)
    _, first = prefill(prompts[:4])
    _, others = prefill(prompts[4:])
    left = [1, 3, 5, 8]
    rows = first.joined(others.kept((0, 1, 4))).kept([1, 3, 5, 6])  # first prompts 4, 5 and 8 join
    hidden = torch.stack([rows.read_on(policy, [ids[i][k] for i in left]) for k in range(STEPS)], 1)
    expected = forced(policy, [prompts[i] for i in left], [ids[i] for i in left])[:, 1:]
    torch.testing.assert_close(hidden, expected, **CLOSE)


@pytest.mark.parametrize("family", VISION_FAMILIES)
@torch.no_grad()
def test_prompts_are_read_as_the_model_itself_does(policy_of: Callable[[str], LanguageModel], family: str) -> None:
    policy = policy_of(family)
    rows = [Row(row.input, (len(row.input) - 1,)) for row in rows_with_images(reader_of(policy))]
    expected = torch.cat([own_hidden(policy.lm, reader_of(policy), row) for row in rows])
    hidden, _ = kind_of(policy)(policy)([row.input for row in rows])
    torch.testing.assert_close(hidden, expected, **CLOSE)


def test_vllm_is_started_for_the_text_of_gemma3_alone(policy_of: Callable[[str], LanguageModel]) -> None:
    assert image_arguments(reader_of(policy_of("gemma3")), 100) == image_arguments(None, 100)
