"""A packed row gives each of its rows what it would get alone: numbers and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_agentrl.models import language_model
from lightning_agentrl.models.critic import SharedCritic
from lightning_agentrl.models.kernels import checkpoint_activations
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm
from lightning_agentrl.models.packing import pack, plan_micro_batches
from lightning_agentrl.types import Row
from tests.inputs import image, random_ids, text, text_row
from tests.tiny import CONFIGS, tiny_model_folder

TEMPERATURE = 0.7
EXACT = {"rtol": 1e-10, "atol": 1e-10}


P, A, B, C = random_ids(0, 9), random_ids(1, 5), random_ids(2, 1), random_ids(3, 7)
CASES = {
    "shared prefix": [text_row(P + A, (8, 10, 12)), text_row(P + B + A, (9, 13)), text_row(P + C, (10,))],
    "reads in the prefix": [text_row(P + A, (2, 5, 11)), text_row(P + C, (0, 8))],
    "identical": [text_row(P + A, (8, 12)), text_row(P + A, (8, 12)), text_row(P + A, (3,))],
    "one is a prefix of another": [text_row(P, (7, 8)), text_row(P + A, (8, 11)), text_row(P + A + C, (8, 9, 18))],
    "nothing in common": [text_row(A, (1, 3)), text_row(C, (0, 5)), text_row(B + A, (2,))],
    "alone": [text_row(P, (4, 6))],
    "ends at the last read": [text_row(P + A, (13,)), text_row(P + C, (15,))],
    "unordered reads": [text_row(P + A, (11, 8)), text_row(P + C, (12, 2, 9))],
}


@pytest.fixture(params=sorted(CONFIGS), scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp(request.param), family=request.param)


@pytest.fixture(scope="module")
def policy(folder: Path) -> LanguageModel:
    return LanguageModel(load_causal_lm(str(folder)).double())


@pytest.fixture(scope="module")
def critic() -> SharedCritic:
    critic = SharedCritic()
    critic.build(32, lambda _: pytest.fail("a shared critic loads no model"))
    torch.manual_seed(1)
    for parameter in critic.double().parameters():
        torch.nn.init.normal_(parameter)
    return critic


def alone(policy: LanguageModel, critic: SharedCritic, rows: list[Row]) -> tuple[Tensor, ...]:
    """Log-probs, entropy, sum of squares and values of each row by itself, by the plain forward of transformers."""
    parts = []
    for row in rows:
        output = policy.lm(torch.tensor([row.ids]), output_hidden_states=True, use_cache=False)
        reads = list(row.logit_positions)
        log_pi = (output.logits[0, reads] / TEMPERATURE).log_softmax(-1)
        pi = log_pi.exp()
        following = torch.tensor([row.ids[r + 1] if r + 1 < len(row.ids) else 0 for r in reads])
        values = critic.head.linear(output.hidden_states[-1][0, reads])[:, 0]
        parts.append((log_pi[range(len(reads)), following], -(pi * log_pi).sum(-1), (pi * pi).sum(-1), values))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def packed(policy: LanguageModel, critic: SharedCritic, rows: list[Row]) -> tuple[Tensor, ...]:
    row = pack(rows)
    hidden = policy.hidden(row)
    scores = policy.token_scores(hidden, row.targets, TEMPERATURE, sum_pi_squared=True)
    return scores.logps, scores.entropy, scores.sum_pi_squared, critic(row, hidden)


def gradients(policy: LanguageModel, numbers: tuple[Tensor, ...], rows: list[Row]) -> dict[str, Tensor]:
    """Of a sum in which every number has another weight. The log-prob after the end of a row means nothing."""
    policy.zero_grad()
    inside = torch.tensor([r + 1 < len(row.ids) for row in rows for r in row.logit_positions])
    weights = [torch.linspace(0.5 + k, 2.0 - k, len(x), dtype=torch.float64) for k, x in enumerate(numbers)]
    weights[0] = weights[0] * inside
    sum((x * w).sum() for x, w in zip(numbers, weights, strict=True)).backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def gradient_tolerance(policy: LanguageModel, gradient: Tensor) -> float:
    """Llama and its relatives compute norms in float32 whatever the weights are."""
    relative = 1e-10 if policy.lm.config.model_type == "gpt_neox" else 1e-6
    return relative * max(1.0, float(gradient.abs().max()))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_packed_equals_alone(policy, critic, case, checkpointing):
    rows = CASES[case]
    policy.eval()
    expected = alone(policy, critic, rows)
    expected_gradients = gradients(policy, expected, rows)
    if checkpointing:
        policy.train()  # transformers checkpoints in training mode only
        checkpoint_activations(policy.lm)
    try:
        found = packed(policy, critic, rows)
        found_gradients = gradients(policy, found, rows)
    finally:
        policy.lm.gradient_checkpointing_disable()
    targets = pack(rows).targets
    assert (targets < 0).sum() == (2 if case == "ends at the last read" else case == "one is a prefix of another")
    torch.testing.assert_close(found[0][targets >= 0], expected[0][targets >= 0], **EXACT)
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)
    assert found_gradients.keys() == expected_gradients.keys()
    assert len(found_gradients) == len(list(policy.lm.parameters()))
    for name, gradient in found_gradients.items():
        torch.testing.assert_close(
            gradient, expected_gradients[name], rtol=0, atol=gradient_tolerance(policy, gradient)
        )


def test_checkpointing_recomputes(policy):
    """The cases above would be empty if nothing was checkpointed."""
    calls = []
    layer = policy.lm.base_model.layers[0]
    handle = layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    policy.train()
    checkpoint_activations(policy.lm)
    try:
        policy.hidden(pack(CASES["shared prefix"])).sum().backward()
    finally:
        policy.lm.gradient_checkpointing_disable()
        handle.remove()
    assert len(calls) == 2


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_head_sees_read_positions_only(policy, critic, monkeypatch, chunk):
    monkeypatch.setattr(language_model, "LOGITS_PER_CHUNK", chunk)
    seen: list[int] = []
    handle = policy.lm.get_output_embeddings().register_forward_hook(lambda _m, x, _y: seen.append(x[0].shape[0]))
    rows = CASES["shared prefix"]
    reads = sum(len(row.logit_positions) for row in rows)
    try:
        with torch.no_grad():
            whole = packed(policy, critic, rows)
    finally:
        handle.remove()
    assert sum(seen) == reads == 6
    assert max(seen) == min(chunk, reads)
    expected = alone(policy, critic, rows)
    for ours, theirs in zip(whole, expected, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), **EXACT)


def test_packed_row_by_hand():
    row = pack([text_row((5, 6, 7, 8), (1, 2)), text_row((5, 6, 9), (1, 2))])
    assert row.ids.tolist() == [[5, 6, 7, 9]]  # 8 is only predicted
    assert row.positions.tolist() == [[0, 1, 2, 2]]
    assert row.tree.mask().int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    assert row.logit_positions.tolist() == [1, 2, 1, 3]
    assert row.targets.tolist() == [7, 8, 9, -1]
    assert (row.tokens, row.padding) == (4, None)


row_lists = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=12).map(lambda x: text_row(tuple(x), (len(x) - 1,))), max_size=14
)


def cost(rows: list[Row]) -> int:
    return pack(rows).ids.shape[1]


@settings(max_examples=25)
@given(row_lists, st.integers(1, 40))
def test_plan_is_a_partition_within_budget(rows, budget):
    plan = plan_micro_batches(rows, budget)
    assert sorted(i for group in plan for i in group) == list(range(len(rows)))
    assert all(plan)
    assert all(cost([rows[i] for i in group]) <= budget or len(group) == 1 for group in plan)


@settings(max_examples=15)
@given(row_lists.filter(lambda rows: len(rows) > 1), st.integers(8, 40))
def test_plan_is_the_balanced_one(rows, budget):
    """No way to cut the sorted rows needs fewer parts, or has a smaller largest part in as many."""
    order = sorted(range(len(rows)), key=lambda i: rows[i].ids)
    plan = plan_micro_batches(rows, budget)

    def largest(parts: int) -> float:  # over all ways to cut; a row that is over the budget alone does not count
        best: dict[tuple[int, int], float] = {(0, 0): 0.0}
        for end in range(1, len(order) + 1):
            for k in range(1, parts + 1):
                options = []
                for start in range(end):
                    group = [rows[i] for i in order[start:end]]
                    size = 0.0 if len(group) == 1 and cost(group) > budget else cost(group)
                    options.append(max(best.get((start, k - 1), float("inf")), size))
                best[end, k] = min(options)
        return best[len(order), parts]

    sizes = [cost([rows[i] for i in group]) for group in plan]
    assert max([size for size in sizes if size <= budget], default=0) <= largest(len(plan)) <= budget
    if len(plan) > 1:
        assert largest(len(plan) - 1) > budget


def test_plan_by_hand():
    rows = [text_row(random_ids(k, 10), (9,)) for k in range(6)]
    assert [len(group) for group in plan_micro_batches(rows, 59)] == [3, 3]  # not five and one
    assert [len(group) for group in plan_micro_batches(rows, 60)] == [6]
    shared = [text_row(random_ids(0, 90) + random_ids(k, 10), (99,)) for k in range(6)]
    assert [len(group) for group in plan_micro_batches(shared, 150)] == [6]  # 90 + 6 * 10
    assert plan_micro_batches([], 10) == []


def test_a_long_row_goes_alone():
    rows = [
        text_row(random_ids(0, 5), (4,)),
        text_row(random_ids(1, 500), (499,)),
        text_row(random_ids(2, 5), (4,)),
        text_row(random_ids(3, 5), (4,)),
    ]
    plan = plan_micro_batches(rows, 16)
    assert [1] in plan
    assert sorted(i for group in plan for i in group) == [0, 1, 2, 3]


@settings(max_examples=25)
@given(row_lists.filter(bool), st.integers(1, 40))
def test_plan_of_rows_that_do_not_share(rows, budget):
    plan = plan_micro_batches(rows, budget, share=False)
    assert sorted(i for group in plan for i in group) == list(range(len(rows)))
    packs = [pack([rows[i] for i in group], share=False) for group in plan]
    assert all(x.tokens <= budget or len(group) == 1 for x, group in zip(packs, plan, strict=True))
    for x, group in zip(packs, plan, strict=True):
        assert x.ids.flatten()[x.logit_positions].tolist() == [
            rows[i].ids[r] for i in group for r in rows[i].logit_positions
        ]
        assert x.padding.sum() == sum(len(rows[i].input_ids) for i in group)


@pytest.mark.parametrize("case", CASES)
def test_rows_beside_each_other_equal_alone(policy, critic, case):
    rows = CASES[case]
    policy.eval()
    row = pack(rows, share=False)
    scores = policy.token_scores(policy.hidden(row), row.targets, TEMPERATURE)
    assert scores.sum_pi_squared is None  # nobody asked for it
    with torch.no_grad():
        expected = alone(policy, critic, rows)
    torch.testing.assert_close(scores.entropy, expected[1], **EXACT)


def test_what_is_only_predicted_costs_nothing():
    rows = [text_row(random_ids(k, 10), (4,)) for k in range(2)]
    assert [row.input_ids for row in rows] == [row.ids[:5] for row in rows]
    assert len(plan_micro_batches(rows, 10)) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 30.0}, "caps its attention scores .attn_logit_softcapping"),
    ],
)
def test_models_that_would_come_out_wrong_are_refused(tmp_path, tiny_folder, changes, message):
    config = AutoConfig.from_pretrained(tiny_folder)
    for name, value in changes.items():
        setattr(config, name, value)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        load_causal_lm(str(tmp_path))
    assert "model.init_args.model" in str(error.value)


def test_folder_names(tmp_path, tiny_folder, monkeypatch):
    with pytest.raises(ValueError, match=r"'.*nowhere'.*model.init_args.model"):
        load_causal_lm(str(tmp_path / "nowhere"))
    monkeypatch.setenv("HOME", str(tiny_folder.parent))
    loaded = load_causal_lm(f"~/{tiny_folder.name}")
    reference = AutoModelForCausalLM.from_pretrained(tiny_folder)
    assert torch.equal(loaded.get_input_embeddings().weight, reference.get_input_embeddings().weight)


def test_a_plan_counts_different_images_of_equal_length_apart():
    rows = [
        Row(text(1, 2, 3) + image(name, 20) + text(own, own), (24,))
        for name, own in (("cat", 5), ("dog", 5), ("cat", 6), ("dog", 6))
    ]
    together = 3 + 20 + 2 + 2  # two rows with the same image
    assert sorted(map(sorted, plan_micro_batches(rows, together))) == [[0, 2], [1, 3]]
    assert len(plan_micro_batches(rows, 2 * together - 3)) == 1
    assert len(plan_micro_batches(rows, 2 * together - 4)) == 2


@pytest.mark.parametrize("share", [True, False])
def test_images_are_refused_where_a_model_would_need_their_pixels(share):
    with pytest.raises(ValueError, match="reads text only, but got an image of 20 tokens"):
        pack([text_row((1, 2), (1,)), Row(text(1) + image("cat", 20) + text(2), (21,))], share=share)
