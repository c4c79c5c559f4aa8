"""Each family of models gives every row what it would get alone, in a prefix tree or beside the others."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from lightning_agentrl.engines.transformers.rows import PaddedPrefill, TreePrefill
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.models.families import FAMILIES, SHARING, STATES, check_family, why_unshared, without_dropout
from lightning_agentrl.models.kernels import checkpoint_activations
from lightning_agentrl.models.language_model import LanguageModel, vocabulary_logits
from lightning_agentrl.models.loading import load_causal_lm, read_context_length
from lightning_agentrl.models.mixers import walk
from lightning_agentrl.models.mixers.functions import read_trees
from lightning_agentrl.models.packing import pack
from lightning_agentrl.models.vision import text_decoder
from lightning_agentrl.types import Row
from tests.inputs import text, text_row
from tests.models.gradients import gradient
from tests.tiny import DELTA

WINDOW = 6  # shorter than the prefix
SIZES: dict[str, Any] = dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32)
SIZES |= dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), 64)  # by all the names that families have
SIZES |= dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_experts_per_tok"), 2)
SIZES |= dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4)
SIZES |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
SIZES |= dict.fromkeys(("head_dim", "query_pre_attn_scalar", "rotary_dim", "hidden_size_per_layer_input"), 8)
SIZES |= dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256)
SIZES |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32)
SIZES |= dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 384)
SIZES |= dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "bos_token_id"), 1)
SIZES |= {"num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 2, "initializer_range": 0.1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"head_dim": None, "num_key_value_heads": 4}  # keys wider than values
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_chunk_size": 8, "mamba_d_state": 16}
OWN: dict[str, dict[str, Any]] = {  # settings of families, and what sets them apart
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), DELTA),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "youtu", "minicpm3", "axk1"), LATENT),
    **dict.fromkeys(("lfm2", "lfm2_moe"), CONVOLUTION),
    "glm4_moe_lite": LATENT | {"head_dim": 16},
    "longcat_flash": LATENT | {"head_dim": 8},
    "kimi_linear": {**LATENT, **HYBRID, "linear_head_dim": 8, "linear_num_heads": 4, "q_lora_rank": None},
    "nemotron_h": {
        "layers_block_type": HYBRID["layer_types"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64, "lm_head_multiplier": 0.5},
    "granitemoehybrid": MAMBA | HYBRID | {"logits_scaling": 4.0},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "granite": {"logits_scaling": 4.0},
    "gemma3_text": {"final_logit_softcapping": 3.0},
    "nanochat": {"final_logit_softcapping": 3.0},
    "cohere": {"logit_scale": 0.25},
    "hyperclovax": {"logits_scaling": 0.25},
}
UNSHARED: dict[str, dict[str, Any]] = {  # with what sets them apart
    "bloom": {},  # biases by distance, which it counts along the row
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},  # windows of its own
    "mpt": {},  # biases by distance
    "qwen2_moe": {},  # windows that its attention is not told of
    "stablelm": {},  # hands nothing on to its attention
}


def ids(seed: int, count: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(3, 384), k=count))


ROWS = [
    text_row(ids(0, 12) + ids(1, 9), (4, 14, 19)),
    text_row(ids(0, 12) + ids(2, 12), (8, 15, 22)),
    text_row(ids(0, 12) + ids(3, 4), (2, 13)),
    text_row(ids(4, 7), (5,)),
]


def branching_rows(seed: int) -> list[Row]:
    """Return rows that branch off each other at random places, so that several parents have children at one depth."""
    draw = random.Random(seed)
    return rows_of_tree([(draw.random(), draw.random(), draw.choice([1, 2, 3, 7])) for _ in range(9)])


def rows_of_tree(branches: list[tuple[float, float, int]]) -> list[Row]:
    """Return rows of a tree: each branch leaves an earlier row (first share) at a place (second) with new tokens."""
    rows = [ids(0, 4)]
    for number, (which, where, new) in enumerate(branches, 1):
        stem = rows[int(which * len(rows))]
        rows.append(stem[: 1 + int(where * len(stem))] + ids(number, new))
    return [text_row(row, tuple(sorted({len(row) - 1, len(row) // 2}))) for row in dict.fromkeys(rows)]


SHARES = st.floats(0, 1, exclude_max=True)
TREES = st.lists(st.tuples(SHARES, SHARES, st.integers(1, 7)), min_size=2, max_size=9).map(rows_of_tree)


PROMPT_ENDS = 3  # tokens of each row that the engine tests take for a reply


def tiny_config(family: str, **wide: Any) -> PreTrainedConfig:
    """Two layers; windows in one of them, or in both, where the family has them. Other sizes can be given."""
    settings = SIZES | UNSHARED.get(family, {}) | OWN.get(family, {})
    config = CONFIG_MAPPING[family](**settings)
    if hasattr(config, "sliding_window") and family not in OWN:
        settings |= {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 0}
        if getattr(config, "layer_types", None):
            settings["layer_types"] = ["sliding_attention", "full_attention"]
    copies = wide.get("num_hidden_layers", 2) // 2
    settings |= {kinds: settings[kinds] * copies for kinds in ("layer_types", "layers_block_type") if kinds in settings}
    return CONFIG_MAPPING[family](**settings | wide)


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plain(family: str) -> PreTrainedModel:
    """As transformers has it, with vectors (sinks, decays, biases, norms) that are not what they are first."""
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in lm.parameters():
            if weight.ndim < 2:
                weight.add_(0.3 * torch.randn_like(weight))
    return lm


@pytest.fixture(scope="module")
def policy(plain: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tmp_path_factory.mktemp("family")
    plain.save_pretrained(folder)
    return LanguageModel(load_causal_lm(str(folder)))


def alone(plain: PreTrainedModel, row: Row) -> torch.Tensor:
    """Last hidden states of all tokens, [N, H]."""
    return plain.base_model(input_ids=torch.tensor([row.ids]), use_cache=False)[0][0]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


# Plain, with normalised queries and keys, with windows, with parallel blocks, with layer norms, with experts.
# And with sinks, keys wider than values, and each kind of state.
KINDS = {"llama", "qwen3", "mistral", "gemma3_text", "gpt_neox", "phi", "qwen3_moe", "gpt_oss", "deepseek_v3", "lfm2"}
KINDS |= {"qwen3_5_text", "nemotron_h"}
WITHOUT_CLASS = {"qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"}
EVERY = [
    pytest.param(name, marks=() if name in KINDS else pytest.mark.slow) for name in sorted(SHARING - WITHOUT_CLASS)
]
WITH_STATES = [
    pytest.param(name, marks=() if name in KINDS else pytest.mark.slow)
    for name in ("qwen3_5_text", "kimi_linear", "nemotron_h", "falcon_h1")
]


@pytest.mark.parametrize("family", EVERY, indirect=True)
def test_a_prefix_tree_changes_nothing(family, plain, policy):
    assert policy.shares_prefixes
    for rows in (ROWS, branching_rows(1), branching_rows(2)):
        assert pack(rows).tokens < sum(len(row.input_ids) for row in rows)
        check_tree(plain, policy, rows)


def check_tree(plain: PreTrainedModel, policy: LanguageModel, rows: list[Row]) -> None:
    """Compare hidden states and every gradient of a tree with single rows, with gradient checkpointing and without."""
    expected = torch.cat([alone(plain, row)[list(row.logit_positions)] for row in rows])
    expected_gradients = gradients(plain, expected)
    packed = pack(rows)
    for checkpointing in (False, True):
        policy.train()
        if checkpointing and policy.lm.supports_gradient_checkpointing:
            checkpoint_activations(policy.lm)
        found = policy.hidden(packed)
        assert error(found, expected) < 2e-6
        for name, found_gradient in gradients(policy.lm, found).items():
            assert close(found_gradient, expected_gradients[name]), name
    policy.lm.gradient_checkpointing_disable()


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(KINDS), indirect=True)
@settings(max_examples=10)
@given(rows=TREES)
def test_any_prefix_tree_changes_nothing(family, plain, policy, rows):
    """Each kind of layer, with branches shorter than its convolution."""
    check_tree(plain, policy, rows)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a gradient is the expected one, up to 1e-4 of its norm; a tiny one up to what rounding leaves of 0."""
    return float((found - expected).norm()) <= 1e-4 * float(expected.norm()) + 1e-6


def gradients(lm: PreTrainedModel, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    gradient(lm, hidden)
    return {name: weight.grad.clone() for name, weight in lm.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("family", EVERY, indirect=True)
@torch.no_grad()
def test_logits_are_those_of_the_family(family, plain, policy):
    row = ROWS[0]
    expected = plain(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0, list(row.logit_positions)]
    assert error(vocabulary_logits(policy.lm, policy.eval().hidden(pack([row]))), expected) < 1e-5


@pytest.mark.parametrize("family", WITH_STATES, indirect=True)
def test_a_state_from_the_wrong_branch_shows(family, policy, monkeypatch):
    """And one without a gradient, so that the test above can see both."""
    rows = branching_rows(1)
    packed = pack(rows)
    right = policy.train().hidden(packed)
    right_gradients = gradients(policy.lm, right)
    whole = walk.Walk.scan

    def other_parents(self: walk.Walk, inputs: Any, scan: Any) -> Any:
        levels = [x if x.parents is None else replace(x, parents=torch.zeros_like(x.parents)) for x in self.levels]
        return whole(replace(self, levels=tuple(levels)), inputs, scan)

    def detached(self: walk.Walk, inputs: Any, scan: Any) -> Any:
        return whole(self, inputs, lambda part, state: scan(part, None if state is None else state.detach()))

    monkeypatch.setattr(walk.Walk, "scan", other_parents)
    assert error(policy.hidden(packed), right) > 1e-3
    monkeypatch.setattr(walk.Walk, "scan", detached)
    found = gradients(policy.lm, policy.hidden(packed))
    assert not all(close(found[name], expected) for name, expected in right_gradients.items())


@pytest.mark.parametrize("family", [*WITH_STATES, pytest.param("lfm2", marks=pytest.mark.slow)], indirect=True)
def test_transformers_still_names_the_functions_that_read_trees(family, policy):
    assert "causal_conv1d_fn" in read_trees(text_decoder(policy.lm))
    scans = {"delta": {"torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"}, "mamba2": {"mamba2_chunk_scan"}}
    for mixer in STATES.intersection(FAMILIES[family].mixers) - {"short_conv"}:
        assert scans[mixer].intersection(read_trees(text_decoder(policy.lm)))


@pytest.mark.parametrize("family", ["gpt_oss"], indirect=True)
@pytest.mark.parametrize("share", [True, False])
def test_a_dropped_sink_shows(family, policy, share, monkeypatch):
    packed = pack(ROWS, share=share)
    right = policy.eval().hidden(packed)
    for name, weight in policy.lm.named_parameters():
        if name.endswith("sinks"):
            monkeypatch.setattr(weight, "data", torch.full_like(weight, -30.0))
    assert error(policy.hidden(packed), right) > 1e-2


@pytest.mark.parametrize("family", ["qwen3_moe"], indirect=True)
def test_a_family_that_nobody_tried_is_looked_at(family, plain, monkeypatch, tmp_path):
    """Here one that could read a tree, were it in the table."""
    monkeypatch.delitem(FAMILIES, family)
    plain.save_pretrained(tmp_path)
    with pytest.warns(match=r"qwen3_moe.*as a prefix tree two short rows differed by \d\.\de-0[78]"):
        lm = load_causal_lm(str(tmp_path))
    assert not LanguageModel(lm).shares_prefixes


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
def test_a_family_whose_padded_rows_are_others_is_refused(family, plain, monkeypatch, tmp_path):
    monkeypatch.delitem(FAMILIES, family)
    plain.save_pretrained(tmp_path)
    forward = type(plain.base_model).forward
    monkeypatch.setattr(
        type(plain.base_model),
        "forward",
        lambda self, input_ids, **kwargs: (
            forward(self, input_ids, **kwargs | {"position_ids": None})
            if len(input_ids) == 1
            else forward(self, input_ids.roll(1, 1), **kwargs)
        ),
    )
    with pytest.raises(ConfigError, match=r"differ by .* rounding explains 1e-03 .*\(key model"):
        load_causal_lm(str(tmp_path))


def test_the_families_are_documented():
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text().split("### Families of models")[1]
    listed = page.split("<!-- families -->")[1]
    assert set(re.findall(r"`([\w-]+)`", listed)) == {*FAMILIES}


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(UNSHARED), indirect=True)
def test_other_families_are_named_and_read_rows_beside_each_other(family, plain, policy):
    assert not policy.shares_prefixes
    assert family in why_unshared(policy.lm.config)
    packed = pack(ROWS, share=False)
    expected = torch.cat([alone(plain, row)[list(row.logit_positions)] for row in ROWS])
    expected_gradient = gradient(plain, expected)
    found = policy.train().hidden(packed)
    assert error(found, expected) < 1e-5
    assert error(gradient(policy.lm, found), expected_gradient) < 1e-5


@pytest.mark.parametrize("family", [*EVERY, *sorted(UNSHARED)], indirect=True)
@torch.no_grad()
def test_the_engine_reads_prompts_of_the_family(family, plain, policy):
    """Twice, the second time with the common prefix kept; then token by token."""
    prefill = (TreePrefill if policy.engine_shares else PaddedPrefill)(policy.eval())
    expected = torch.stack([alone(plain, row)[-PROMPT_ENDS - 1 : -1] for row in ROWS])
    for _ in range(2):
        first, rows = prefill([text(*row.ids[:-PROMPT_ENDS]) for row in ROWS])
        hidden = [first, *(rows.read_on(policy, [row.ids[-k] for row in ROWS]) for k in range(PROMPT_ENDS, 1, -1))]
        assert error(torch.stack(hidden, 1), expected) < 1e-5


def test_layers_of_another_kind_are_named_in_a_family_that_shares():
    config = tiny_config("qwen2")
    assert not why_unshared(config)
    config.layer_types = ["full_attention", "chunked_attention"]
    assert why_unshared(config) == "layers of the kind chunked_attention"


def test_a_model_with_images_is_judged_by_its_text_layers():
    assert "qwen2_moe" in why_unshared(CONFIG_MAPPING["llava"](text_config=tiny_config("qwen2_moe")))
    assert not why_unshared(CONFIG_MAPPING["qwen3_5"]())


@pytest.mark.parametrize("family", ["llava"])
def test_a_model_that_is_more_than_one_of_text_is_refused(tmp_path, family):
    CONFIG_MAPPING[family]().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"{family}.*model\.init_args\.model"):
        load_causal_lm(str(tmp_path))


@pytest.mark.parametrize("family", ["granite"], indirect=True)
def test_logits_of_a_family_that_nobody_tried_must_be_a_projection(family, plain, monkeypatch, tmp_path):
    monkeypatch.delitem(FAMILIES, family)
    plain.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"granite.*not just the vocabulary projection"):
        load_causal_lm(str(tmp_path))


def test_quantized_weights_are_refused():
    config = tiny_config("gpt_oss")
    config.quantization_config = {"quant_method": "mxfp4"}
    with pytest.raises(ValueError, match=r"quantized.*dequantize it.*model\.init_args\.model"):
        check_family("some model", config)


@pytest.mark.parametrize("family", ["bloom", "mamba"])
def test_a_config_that_names_no_context_length_is_refused(family, tmp_path):
    config = CONFIG_MAPPING[family]()
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"does not state its context length.*max_position_embeddings.*\(key model"):
        read_context_length(str(tmp_path))
    config.max_position_embeddings = 512
    config.save_pretrained(tmp_path)
    assert read_context_length(str(tmp_path)) == 512


@pytest.mark.parametrize("named", ["rope_parameters", "rope_scaling"])
def test_no_row_is_so_long_that_it_turns_the_others_by_other_frequencies(named, tmp_path):
    """LongRoPE has other frequencies for a pass with a row that is longer than its first rows in pretraining."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    config = CONFIG_MAPPING["phi3"](**SIZES | {"original_max_position_embeddings": 32}, rope_parameters=rope)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    if named == "rope_scaling":  # as published, before transformers 5
        written = json.loads((tmp_path / "config.json").read_text())
        del written["rope_parameters"]
        written |= {"rope_scaling": {"type": "longrope", **{k: rope[k] for k in ("short_factor", "long_factor")}}}
        (tmp_path / "config.json").write_text(json.dumps(written | {"rope_theta": 1e4}))
    policy = LanguageModel(load_causal_lm(str(tmp_path))).eval()
    assert policy.context_length == read_context_length(str(tmp_path)) == 32

    def states_beside(count: int) -> torch.Tensor:
        with torch.no_grad():
            return policy.hidden(pack([ROWS[0], text_row(ids(5, count), (count - 1,))]))[:-1]

    alone = policy.hidden(pack(ROWS[:1]))
    assert torch.allclose(states_beside(policy.context_length), alone, atol=1e-6)
    assert not torch.allclose(states_beside(policy.context_length + 1), alone, atol=1e-3)


@pytest.mark.parametrize("family", ["gpt2"], indirect=True)
def test_no_policy_has_dropout(family, plain, policy):
    """A policy is trained as it sampled."""
    assert plain.config.attn_pdrop == plain.config.embd_pdrop == 0.1  # a family that has it by default
    packed = pack(ROWS)
    assert torch.equal(policy.train().hidden(packed), policy.eval().hidden(packed))


@pytest.mark.parametrize("family", ["mixtral", "minimax_m2"])
def test_a_pass_in_training_has_no_noise(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    config.router_jitter_noise = 0.1
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    lm = load_causal_lm(str(tmp_path))
    packed = pack(ROWS)
    sampled = LanguageModel(lm).eval().hidden(packed)
    lm.train()
    assert all(torch.equal(LanguageModel(lm).hidden(packed), sampled) for _ in range(2))


def test_noise_in_parts_of_a_config_is_turned_off() -> None:
    config = CONFIG_MAPPING["dbrx"](ffn_config={"moe_jitter_eps": 0.1}, attn_config={"attn_pdrop": 0.1})
    without_dropout(config)
    assert config.ffn_config.moe_jitter_eps == config.attn_config.attn_pdrop == 0.0


def test_a_family_that_routes_at_random_in_training_is_refused() -> None:
    with pytest.raises(ValueError, match=r"phimoe.*model\.init_args\.model"):
        check_family("some model", CONFIG_MAPPING["phimoe"]())
