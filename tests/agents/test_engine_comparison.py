"""Comparing an engine with the policy: wrong engines are found and their cause is named, right ones fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightning_agentrl.agents.engine_comparison import EngineComparison, other_float32_products
from lightning_agentrl.agents.scoring import Reader
from lightning_agentrl.engines import Engine, PolicyHandle, Reply, SamplingRequest, TransformersEngine
from lightning_agentrl.models.attention.tree import TREE
from lightning_agentrl.models.families import why_unshared
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm, read_images, skip_unread
from lightning_agentrl.models.lora import LoRA
from lightning_agentrl.rollout.stopping import Stopping
from lightning_agentrl.tools.engine_causes import NO_UPDATE, OLD_PREFIXES, OTHER, likely_cause
from lightning_agentrl.types import ImageChunk, ModelInput
from tests.engines.plain import PlainEngine, as_is, colder, presence_penalty, top_k, top_p
from tests.inputs import text
from tests.models.seen import picture
from tests.tiny import tiny_tokenizer, tiny_vision_folder

Make = Callable[[PreTrainedModel], Engine]
Precision = Callable[[], AbstractContextManager]


def family(name: str, **settings: Any) -> PreTrainedModel:
    """A tiny random model of any family, whose outputs depend on what it reads."""
    sizes = {
        "vocab_size": 384,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "pad_token_id": 0,
    }
    moe = {"moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    sparse = moe if "moe" in name or name == "mixtral" else {}
    return random_model(AutoConfig.for_model(name, **{**sizes, **sparse, **settings}), seed=0)


def random_model(config: Any, seed: int) -> PreTrainedModel:
    shared = not why_unshared(config)
    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, **({"attn_implementation": TREE} if shared else {})
    )
    if shared:
        skip_unread(lm)
    return lm


@contextmanager
def evaluating(policy: LanguageModel, precision: Precision = torch.no_grad) -> Iterator[None]:
    policy.eval()
    with torch.no_grad(), precision():
        yield
    policy.train()


def bf16_mixed() -> AbstractContextManager:
    return torch.autocast("cpu", torch.bfloat16)


@contextmanager
def comparing(
    engine: Engine,
    lm: PreTrainedModel,
    temperature: float = 1.0,
    window: int = 256,
    prompts: Sequence[ModelInput] = (text(*range(5, 60)),),
    precision: Precision = torch.no_grad,
    **of_handle: Any,
) -> Iterator[EngineComparison]:
    """The comparison of an engine that is started; afterwards each weight is as it was, bit for bit."""
    policy = LanguageModel(lm)
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    handle = PolicyHandle(policy, (2,), precision, max_model_len=window, **of_handle)
    engine.start(handle)
    reader = Reader(temperature, 4096, torch.device("cpu"), policy.shares_prefixes, images=policy.image_reader)
    try:
        yield EngineComparison(
            engine,
            handle,
            prompts,
            tiny_tokenizer(),
            reader,
            lambda: evaluating(policy, precision),
            seed=3,
            stopping=Stopping(),
        )
    finally:
        engine.stop()
    assert all(torch.equal(before[name], weight) for name, weight in policy.state_dict().items())


def withheld(*parts: str) -> Make:
    return lambda lm: PlainEngine(withheld=parts)


def sampling(drawn: Any, claimed: Any = None) -> Make:
    def make(lm: PreTrainedModel) -> Engine:
        engine = PlainEngine()
        engine.sampled_from, engine.claimed_from = drawn, claimed
        return engine

    return make


def old_head(lm: PreTrainedModel) -> Engine:
    """The head is tied to the embedding, and the engine has packed it once."""
    engine = PlainEngine()
    head: Any = lm.get_output_embeddings()
    engine.other_head = head.weight.detach().clone()
    return engine


def another_model(lm: PreTrainedModel) -> Engine:
    engine = PlainEngine(withheld=[""])
    engine.lm = random_model(lm.config, seed=1).requires_grad_(False).eval()
    return engine


def secretly_rounding(lm: PreTrainedModel) -> Engine:
    class Rounding(PlainEngine):
        def start(self, handle: PolicyHandle) -> None:
            super().start(handle)
            self.dtype = "auto"

    return Rounding(dtype="bfloat16")


def forgetful(lm: PreTrainedModel) -> Engine:
    """Keeps what it has read of prompts with the weights before."""

    class Forgetful(TransformersEngine):
        def sync(self, policy_version: int) -> None:
            assert self._batch is not None
            prefill: Any = self._batch.prefill
            kept = prefill._prefix, prefill._prefix_cache
            super().sync(policy_version)
            if kept[0]:
                prefill._prefix, prefill._prefix_cache = kept

    return Forgetful()


WRONG: dict[str, tuple[str, Make, str]] = {  # family, engine, what the cause says
    "embedding withheld": ("llama", withheld("embed_tokens", "lm_head"), "embed_tokens"),
    "queries withheld": ("llama", withheld("layers.1.self_attn.q_proj"), "q_proj"),
    "values withheld": ("mistral", withheld("layers.0.self_attn.v_proj"), "v_proj"),
    "attention output withheld": ("qwen3", withheld("self_attn.o_proj"), "o_proj"),
    "norm of keys withheld": ("qwen3", withheld("layers.0.self_attn.k_norm"), "k_norm"),
    "bias withheld": ("qwen2", withheld("q_proj.bias"), "q_proj.bias"),
    "mlp withheld": ("llama", withheld("layers.0.mlp.down_proj"), "down_proj"),
    "norm withheld": ("llama", withheld("layers.1.input_layernorm"), "input_layernorm"),
    "last norm withheld": ("llama", withheld("model.norm"), "model.norm"),
    "head withheld": ("llama untied", withheld("lm_head"), "lm_head"),
    "packed head of tied weights": ("llama", old_head, OTHER),
    "router withheld": ("qwen3_moe", withheld("layers.0.mlp.gate."), "mlp.gate"),
    "experts withheld": ("qwen3_moe", withheld("layers.1.mlp.experts"), "experts"),
    "swapped experts": ("qwen3_moe", lambda lm: PlainEngine(swap_experts=True), OTHER),
    "adapters withheld": ("lora", withheld("lora_B"), NO_UPDATE),  # what they were is nothing
    "one update behind": ("llama", lambda lm: PlainEngine(aged=True), "one version behind"),
    "no update taken": ("llama", withheld(""), NO_UPDATE),
    "another model of the same shape": ("llama", another_model, NO_UPDATE),
    "kept prefix cache": ("llama ahead", forgetful, OLD_PREFIXES),
    "lower precision": ("llama", secretly_rounding, OTHER),
    "temperature": ("llama", sampling(colder(0.8)), "temperature 0.8,"),
    "temperature, reported as 1": ("llama", sampling(colder(0.7), as_is), "temperature 0."),
    "top-p": ("llama", sampling(top_p(0.9)), "top-p of about 0.9"),
    "top-p, reported as off": ("llama", sampling(top_p(0.8), as_is), "top-p of about 0."),
    "top-k": ("llama", sampling(top_k(40)), "top-k of about 40"),
    "top-k, reported as off": ("llama", sampling(top_k(10), as_is), "drawn with top-k of about "),
    "penalty": ("llama", sampling(presence_penalty(1.0)), OTHER),
}


def model(name: str) -> PreTrainedModel:
    if name == "lora":
        return LoRA(rank=4).adapt(family("llama", tie_word_embeddings=True), "actor")
    kind, _, how = name.partition(" ")
    lm = family(kind, tie_word_embeddings=how != "untied")
    return lm.to({"bf16": torch.bfloat16, "f64": torch.float64}.get(how, torch.float32))


QUICK = {"mlp withheld", "top-p, reported as off", "kept prefix cache", "llama in a copy"}


def cases(names: Iterable[str]) -> list[Any]:
    """Of all but a few one in three is slow, and the rest are long."""
    others = [pytest.mark.slow, pytest.mark.long, pytest.mark.long]
    return [name if name in QUICK else pytest.param(name, marks=others[k % 3]) for k, name in enumerate(names)]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", cases(WRONG))
def test_a_wrong_engine_is_found_with_its_cause(wrong: str) -> None:
    kind, make, cause = WRONG[wrong]
    lm = model(kind)
    with comparing(make(lm), lm, trained_meanwhile=kind.endswith("ahead")) as comparison:
        comparison.engine.sync(0)  # as a run does before
        rounds = list(comparison.rounds(2, 0))  # as many as a run has
        first = next(found for found in rounds if not found.seen.fits)
        assert cause in likely_cause(comparison, rounds, first)


RIGHT: dict[str, tuple[str, Callable[[], Engine], dict[str, Any]]] = {  # model, engine, settings
    **{
        f"{kind} in {'one batch' if engine is TransformersEngine else 'a copy'}": (kind, engine, {})
        for kind in ("llama", "llama untied", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe", "olmo2", "gemma")
        for engine in (PlainEngine, TransformersEngine)
    },
    "a family that shares no prefixes": ("qwen2_moe", PlainEngine, {}),
    "adapters": ("lora", PlainEngine, {}),
    "adapters in a copy": ("lora", TransformersEngine, {"trained_meanwhile": True}),
    "rollouts ahead": ("llama", TransformersEngine, {"trained_meanwhile": True}),
    "a declared lower precision": ("llama", lambda: PlainEngine(dtype="bfloat16"), {}),
    "bfloat16 on both sides": ("llama bf16", PlainEngine, {}),
    "float64": ("gpt_neox f64", PlainEngine, {}),
    "cold": ("qwen3", PlainEngine, {"temperature": 0.3}),
    "hot": ("qwen3", PlainEngine, {"temperature": 2.0}),
    "hardly any room": ("llama", PlainEngine, {"window": 6}),
}


@pytest.mark.parametrize("right", cases(RIGHT))
def test_a_right_engine_goes_on(right: str) -> None:
    kind, make, settings = RIGHT[right]
    with comparing(make(), model(kind), **settings) as comparison:
        assert all(found.seen.fits for found in comparison.rounds(2, 0))


QUERIES = ["layers.1.self_attn.q_proj"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "weights", "parts"),
    [
        pytest.param(bf16_mixed, torch.float32, (), id="right, bf16-mixed"),
        pytest.param(bf16_mixed, torch.float32, QUERIES, id="wrong, bf16-mixed", marks=pytest.mark.long),
        pytest.param(torch.no_grad, torch.float32, (), id="right, float32"),
        pytest.param(torch.no_grad, torch.float32, QUERIES, id="wrong, float32"),
        pytest.param(torch.no_grad, torch.bfloat16, (), id="right, bf16-true"),
        pytest.param(torch.no_grad, torch.bfloat16, QUERIES, id="wrong, bf16-true"),
    ],
)
def test_a_model_whose_own_rounding_is_large_is_not_taken_for_a_wrong_engine(
    parts: Sequence[str], precision: Precision, weights: torch.dtype
) -> None:
    """With an engine in 16 bits; the log-probs of such a model there differ much from those in float32."""
    layers, spread = (6, 0.5) if weights == torch.float32 else (8, 1.0)  # where both round alike, the gap is smaller
    lm = family("llama", tie_word_embeddings=True, initializer_range=spread, num_hidden_layers=layers).to(weights)
    with comparing(PlainEngine(parts, dtype="bfloat16"), lm, precision=precision) as comparison:
        comparison.engine.sync(0)
        rounds = [found.seen for found in comparison.rounds(2, 0)]
    assert not replace(rounds[0], rounding=None).fits
    assert all(seen.fits for seen in rounds) == (not parts)


@pytest.mark.parametrize("before", ["highest", "high"])
def test_float32_is_multiplied_otherwise_for_a_while(before: str) -> None:
    usual = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(before)
    with other_float32_products():
        assert {before, torch.get_float32_matmul_precision()} == {"highest", "high"}
    assert torch.get_float32_matmul_precision() == before
    torch.set_float32_matmul_precision(usual)


class Blind(TransformersEngine):
    """Shows a black image in place of each."""

    async def generate(self, request: SamplingRequest) -> Reply:
        chunks = tuple(
            replace(chunk, digest="black", pixels=0 * chunk.pixels)
            if isinstance(chunk, ImageChunk) and chunk.pixels is not None
            else chunk
            for chunk in request.prompt.chunks
        )
        return await super().generate(replace(request, prompt=ModelInput(chunks)))


@pytest.mark.parametrize(("engine", "fits"), [(TransformersEngine, True), (Blind, False)])
def test_images_are_compared(tmp_path: Path, engine: type[Engine], fits: bool) -> None:
    folder = str(tiny_vision_folder(tmp_path, "qwen3_vl"))
    reader = read_images(folder)
    assert reader is not None
    prompts = [text(5, 6) + reader.read(picture(seed)) + text(*range(5, 30)) for seed in range(3)]
    with comparing(engine(), load_causal_lm(folder), prompts=prompts) as comparison:
        assert all(found.seen.fits for found in comparison.rounds(1, 0)) == fits
