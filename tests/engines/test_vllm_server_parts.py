"""What the engine with servers decides, without any server: routing, which answers count, who is refused and why."""

from __future__ import annotations

import asyncio
import copy
import errno
import json
import math
import shutil
import warnings
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from lightning_agentrl.commands.serve import server_command
from lightning_agentrl.engines import PolicyHandle, SamplingRequest, VLLMServerEngine
from lightning_agentrl.engines.vllm_server import engine as server_engine
from lightning_agentrl.engines.vllm_server.engine import check_precision
from lightning_agentrl.engines.vllm_server.pool import ServerPool
from lightning_agentrl.engines.vllm_server.server import Lost, Unusable, complaint, read_facts, read_reply
from lightning_agentrl.engines.vllm_server.shared_weights import SharedWeights
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm
from lightning_agentrl.models.lora import LoRA, merge_adapters
from lightning_agentrl.vllm_worker.extension import CPU_OPS, checksum, sizes_of
from tests.cli import Command, Config, changed, sentence
from tests.engines import updating_ranks
from tests.inputs import image, text
from tests.started import together

# Which server


def test_servers_refuse_images() -> None:
    asked = SamplingRequest(text(1) + image("cat", 3) + text(2), 4, 1.0, 0)
    with pytest.raises(ValueError, match="VLLMServerEngine reads text only, but got an image of 3 tokens"):
        asyncio.run(VLLMServerEngine(["http://127.0.0.1:1"]).generate(asked))


def chosen(pool: ServerPool, *numbers: int) -> list[int]:
    """Return the servers of requests of these environments, which all stay in flight."""
    places = []
    for number in numbers:
        request = SamplingRequest(text(1), 2, 1.0, 0, (number, 0))
        replica = asyncio.run(pool._choose(request, ()))
        replica.in_flight.add(cast(Any, object()))
        places.append(pool.replicas.index(replica))
    return places


def pool_of(servers: int) -> ServerPool:
    pool = ServerPool([cast(Any, None)] * servers, {}, 100, ())
    for replica in pool.replicas:
        replica.used = True
    return pool


def test_new_environments_spread_evenly_and_stay_where_they_are() -> None:
    pool = pool_of(3)
    assert chosen(pool, 0, 1, 2, 3, 4, 5) == [0, 1, 2, 0, 1, 2]
    assert chosen(pool, 4, 4, 4, 4) == [1, 1, 1, 1]  # however busy
    assert chosen(pool, 6) == [0]


def test_an_environment_whose_server_is_lost_moves() -> None:
    pool = pool_of(3)
    assert chosen(pool, 0, 1) == [0, 1]
    pool.replicas[1].used = False
    assert chosen(pool, 1) == [2]
    pool.replicas[1].used = True
    assert chosen(pool, 1) == [2]


@pytest.mark.parametrize(("ranks", "servers"), [(8, 4), (6, 4), (4, 4), (2, 8), (3, 4), (1, 3), (5, 1), (32, 8)])
def test_ranks_begin_with_different_servers(ranks: int, servers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    urls, firsts = [f"http://127.0.0.1:{port}" for port in range(1, servers + 1)], Counter[str]()
    monkeypatch.setattr(server_engine, "world_size", lambda: ranks)
    for rank in range(ranks):
        monkeypatch.setattr(server_engine, "rank", lambda rank=rank: rank)
        firsts[VLLMServerEngine(urls)._servers(cast(Any, None))[0].url] += 1
    assert max(firsts.values()) - min(firsts[url] for url in urls) <= 1


# Which answers

ASKED = SamplingRequest(prompt=text(5, 6), max_tokens=3, temperature=1.0, seed=0)
CLOSE, VOCABULARY, VERSION = (9,), 300, "abc-2"


def answer(**changes: Any) -> dict[str, Any]:
    """As vLLM 0.32 gives it, of what is read."""
    ids, logps = [4, 7, 8], [-0.5, -1.25, -0.0]
    choice = {
        "finish_reason": "length",
        "token_ids": ids,
        "weight_versions": [{"version": VERSION, "start": 0, "end": 3}],
        "logprobs": {"content": [{"token_id": i, "logprob": x} for i, x in zip(ids, logps, strict=True)]},
    }
    return {"choices": [choice | changes]}


def read(given: dict[str, Any]) -> Any:
    return read_reply(given, ASKED, CLOSE, VOCABULARY, VERSION, policy_version=7)


def test_a_whole_answer_is_a_reply() -> None:
    reply = read(answer())
    assert (reply.ids, reply.logps, reply.closed, reply.policy_version) == ((4, 7, 8), (-0.5, -1.25, 0.0), False, 7)
    content = [{"token_id": 9, "logprob": -2.0}]
    closed = read(answer(finish_reason="stop", token_ids=[9], logprobs={"content": content}))
    assert (closed.ids, closed.closed) == ((9,), True)


def with_logps(*logps: Any, ids: tuple[Any, ...] = (4, 7, 8)) -> dict[str, Any]:
    return {"content": [{"token_id": i, "logprob": x} for i, x in zip(ids, logps, strict=False)]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": []}, "0 ids and log-probs of 3"),
        ({"token_ids": None}, "0 ids"),
        ({"token_ids": [4, 7]}, "2 ids and log-probs of 3"),
        ({"token_ids": 3}, "another form than vLLM"),
        *(
            ({"token_ids": [4, x, 8], "logprobs": with_logps(-1.0, -1.0, -1.0, ids=(4, x, 8))}, f"{x!r} is no id")
            for x in ("7", 7.0, True, None, -7, 300)
        ),
        ({"token_ids": [4, 7, 8, 9], "logprobs": with_logps(*[-1.0] * 4, ids=(4, 7, 8, 9))}, "after 4 of 3 tokens"),
        ({"logprobs": None}, "3 ids and log-probs of 0.*agentrl serve"),
        ({"logprobs": {"content": None}}, "3 ids and log-probs of 0"),
        ({"logprobs": {"content": [1, 2, 3]}}, "another form than vLLM"),
        ({"logprobs": with_logps(-1.0, -1.0)}, "3 ids and log-probs of 2"),
        ({"logprobs": with_logps(-1.0, -1.0, -1.0, ids=(4, 8, 7))}, "3 ids and log-probs of 3"),
        ({"logprobs": with_logps(-1.0, -1.0, -9999.0)}, "1 of 3 log-probs .*-9999"),  # vLLM's word for none
        ({"logprobs": with_logps(-1.0, math.nan, -1.0)}, "1 of 3 log-probs .*nan.*broken.*verify-engine"),
        ({"logprobs": with_logps(None, None, -1.0)}, "2 of 3 log-probs .*nan"),
        ({"logprobs": with_logps(-1.0, -math.inf, -1.0)}, "1 of 3 log-probs .*-inf"),
        ({"logprobs": with_logps(-1.0, 0.5, -1.0)}, "1 of 3 log-probs .*0.5"),
        ({"logprobs": with_logps(-1.0, "low", -1.0)}, "another form than vLLM"),
        ({"finish_reason": "repetition"}, "ended a reply with 'repetition'"),
        (
            {"token_ids": [4, 7], "logprobs": with_logps(-1.0, -1.0), "finish_reason": "length"},
            "ended a reply with 'length' after 2 of 3 tokens",
        ),
        ({"weight_versions": None}, "another form than vLLM .*which weights"),
        ({"logprobs": with_logps(-1.0, -(10**400), -1.0)}, "another form than vLLM"),
    ],
)
def test_an_answer_that_is_not_whole_is_never_a_reply(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Unusable, match=message):
        read(answer(**changes))


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        (["xyz-1"], "version xyz-1, and not abc-2.*urls"),
        ([VERSION, "x-9"], "version abc-2, x-9, and not abc-2"),
    ],
)
def test_weights_of_another_run_are_refused(versions: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(answer(weight_versions=[{"version": version} for version in versions]))


@pytest.mark.parametrize("given", [{}, {"choices": []}, {"choices": [{}]}])
def test_an_answer_without_anything_is_never_a_reply(given: dict[str, Any]) -> None:
    with pytest.raises(Unusable, match="another form than vLLM") as error:
        read(given)
    assert "another run" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"finish_reason": "abort", "token_ids": [4]},
        {"weight_versions": [{"version": "default", "start": 0, "end": 3}]},  # started again
        {"weight_versions": [{"version": "loading abc-2", "start": 0, "end": 3}]},
        {"weight_versions": [{"version": "abc-1", "start": 0, "end": 3}]},  # late: asked for before the update
        {"weight_versions": [{"version": VERSION, "start": 0, "end": 1}, {"version": "loading abc-3"}]},
    ],
)
def test_what_another_server_may_do_better_is_asked_again(changes: dict[str, Any]) -> None:
    with pytest.raises(Lost):
        read(answer(**changes))


# Which servers

SIZES = {"model_type": "llama", "head_dim": 32, "rope_theta": 10000.0}
TOLD: dict[str, Any] = {
    "version": {"version": "0.32.0"},
    "models": {"data": [{"id": "/models/tiny", "root": "/models/tiny", "max_model_len": 100}]},
    "info": {"vllm_config": {"model_config": {"dtype": "torch.bfloat16", "logprobs_mode": "processed_logprobs"}}},
    "sizes": [{**SIZES, "hidden_size": 64}],
}


def complaint_with(part: str, **changes: Any) -> str | None:
    answers = copy.deepcopy(TOLD)
    if part == "version":
        answers["version"] |= changes
    elif part == "models":
        answers["models"]["data"][0] |= changes
    elif part == "sizes":
        answers["sizes"][0] |= changes
    else:
        answers["info"]["vllm_config"]["model_config"] |= changes
    return complaint(read_facts(**answers), SIZES, max_model_len=100)


def test_a_server_that_fits() -> None:
    facts = read_facts(**TOLD)
    assert (facts.dtype, facts.max_model_len) == ("bfloat16", 100)
    assert complaint(facts, SIZES, 100) is None
    assert complaint(facts, {**SIZES, "num_experts": 4}, 1) is None  # which the server does not tell
    assert complaint(facts, {}, 0) is None


@pytest.mark.parametrize(
    ("part", "changes", "parts"),
    [
        ("version", {"version": "0.33.1"}, ["runs vLLM 0.33.1", "0.32"]),
        ("sizes", {"head_dim": 64}, ["'/models/tiny' (head_dim 64 and not 32)", "agentrl serve", "urls"]),
        ("sizes", {"rope_theta": 1e6}, ["rope_theta 1000000.0 and not 10000.0"]),
        ("models", {"max_model_len": 99}, ["99 tokens", "--max-model-len 100", "max_prompt_tokens", "reply_tokens"]),
        ("info", {"logprobs_mode": "raw_logprobs"}, ["raw_logprobs", "--logprobs-mode processed_logprobs"]),
    ],
)
def test_one_that_does_not_is_refused_with_what_to_do(part: str, changes: dict[str, Any], parts: list[str]) -> None:
    refusal = complaint_with(part, **changes)
    assert refusal is not None
    for expected in parts:
        assert expected in refusal


@pytest.mark.slow
@pytest.mark.parametrize(
    ("urls", "message"),
    [([], "at least one"), (["http://a:1", "http://a:1/"], "different"), (["127.0.0.1:8001"], "as http://127.0.0.1")],
)
def test_impossible_addresses_are_refused(urls: list[str], message: str, config: Config, agentrl: Command) -> None:
    with pytest.raises(ValueError, match=message):
        VLLMServerEngine(urls)
    engine = {"class_path": "VLLMServerEngine", "init_args": {"urls": urls}}
    said = sentence(agentrl(config=changed(config, "data.init_args.engine", engine)))
    assert message in said
    assert "data.init_args.engine.init_args.urls" in said


@pytest.mark.parametrize("command", ["fit", "verify-engine"])
def test_no_server_ends_in_a_sentence_with_the_command_that_starts_one(
    config: Config,
    agentrl: Command,
    command: str,
) -> None:
    engine = {"class_path": "VLLMServerEngine", "init_args": {"urls": ["http://127.0.0.1:9"]}}
    said = sentence(agentrl(config=changed(config, "data.init_args.engine", engine), command=command))
    assert "no vLLM server answers (http://127.0.0.1:9: Cannot connect" in said
    assert "agentrl serve" in said
    assert "data.init_args.engine.init_args.urls" in said


def test_sizes_are_those_that_a_model_has(tiny_folder: Path) -> None:
    lm = load_causal_lm(str(tiny_folder))
    sizes = sizes_of(lm.config)
    assert {name: sizes[name] for name in ("head_dim", "num_hidden_layers", "model_type")} == {
        "head_dim": 8,
        "num_hidden_layers": 2,
        "model_type": "llama",
    }
    assert sizes["rope_theta"] == lm.config.rope_parameters["rope_theta"]
    assert "num_experts" not in sizes


def test_the_command_of_a_server() -> None:
    command = server_command("/models/tiny", 8002, "127.0.0.1", ["--dtype", "float32"], on_cpu=True)
    text = " ".join(command)
    for part in (" /models/tiny ", "--port 8002", "--host 127.0.0.1", "--enable-scale-out", "processed_logprobs"):
        assert part in text
    assert command.index("bfloat16") < command.index("float32")  # what is given wins
    assert json.loads(command[command.index("--compilation-config") + 1]) == CPU_OPS  # as `VLLMEngine` computes
    assert "--enforce-eager" not in server_command("m", 1, "h", [], on_cpu=False)


def test_servers_that_compute_otherwise_than_the_trainer_are_named(tiny_folder: Path) -> None:
    facts, policy = read_facts(**TOLD), LanguageModel(load_causal_lm(str(tiny_folder)))
    message = (
        r"computes in bfloat16 and the trainer in float32, .* `agentrl serve MODEL -- --dtype float32`, or .*precision"
    )
    with pytest.warns(UserWarning, match=message):
        check_precision([facts], PolicyHandle(policy, (), nullcontext))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_precision([facts], PolicyHandle(policy, (), lambda: torch.autocast("cpu", torch.bfloat16)))


# The weights


def test_weights_are_written_whole_and_the_newest_only(tiny_folder: Path, tmp_path: Path) -> None:
    lm = load_causal_lm(str(tiny_folder))
    shared = SharedWeights(str(tmp_path / "made"))
    first = shared.write(lm, "a-1")
    written = load_file(first / "model.safetensors")
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} < set(written)
    for name, weight in lm.named_parameters(remove_duplicate=False):
        assert torch.equal(written[name], weight)
    with torch.no_grad():
        lm.get_input_embeddings().weight.add_(1.0)
    second = shared.write(lm, "a-2")
    assert [path.name for path in shared.folder.iterdir()] == ["a-2"]
    again = load_file(second / "model.safetensors")
    assert torch.equal(again["lm_head.weight"], written["lm_head.weight"] + 1.0)
    shared.remove()
    assert list((tmp_path / "made").iterdir()) == []


def test_older_weights_that_cannot_be_removed_go_later(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    lm, shared = load_causal_lm(str(tiny_folder)), SharedWeights(None)
    with monkeypatch.context() as here:
        here.setattr(shutil, "rmtree", busy)
        names = [shared.write(lm, f"a-{number}").name for number in range(3)]
    assert names == ["a-0", "a-1", "a-2"]
    shared.write(lm, "a-3")
    assert [path.name for path in shared.folder.iterdir()] == ["a-3"]
    shared.remove()


def test_adapters_are_written_as_part_of_the_weights(tiny_folder: Path) -> None:
    lm = LoRA(rank=2).adapt(load_causal_lm(str(tiny_folder)), "actor")
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    shared = SharedWeights(None)
    try:
        written = load_file(shared.write(lm, "a-1") / "model.safetensors")
    finally:
        shared.remove()
    expected = dict(merge_adapters(lm).named_parameters(remove_duplicate=False))
    assert set(written) == set(expected)
    assert all(torch.equal(written[name], expected[name]) for name in written)
    base = load_causal_lm(str(tiny_folder)).state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(written[name], base[name])


def test_a_folder_that_cannot_be_written_is_told_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"engine\.init_args\.weights_folder"):
        SharedWeights(str(tmp_path / "file" / "below"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_a_checksum_tells_each_bit_rows_in_another_order_and_layouts_apart(dtype: torch.dtype) -> None:
    random_ = torch.Generator().manual_seed(0)
    weights = {"a": torch.randn(4, 3, 5, generator=random_).to(dtype), "b": torch.randn(7, generator=random_).to(dtype)}
    layout, content = checksum(weights.items(), "cpu")
    assert checksum({name: weight.clone() for name, weight in weights.items()}.items(), "cpu") == (layout, content)
    flipped = weights["b"].clone()
    flipped.view(torch.uint8)[0] ^= 1
    swapped = weights["a"][[1, 0, 2, 3]]
    for other in ({**weights, "b": flipped}, {**weights, "a": swapped}):
        assert checksum(other.items(), "cpu")[0] == layout
        assert checksum(other.items(), "cpu")[1] != content
    transposed = {**weights, "a": weights["a"].transpose(0, 1).contiguous()}
    assert checksum(transposed.items(), "cpu")[0] != layout != checksum(weights.items(), "cuda")[0]


@pytest.mark.slow
def test_an_update_that_fails_on_one_process_fails_on_all(tmp_path: Path) -> None:
    together(2, updating_ranks.run, str(tmp_path))
    outputs = [(tmp_path / f"{failing}-{rank}.txt").read_text() for failing in range(2) for rank in range(2)]
    assert outputs == ["the server has another model"] * 4
