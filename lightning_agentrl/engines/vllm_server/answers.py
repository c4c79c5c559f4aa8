"""Answers of a vLLM server: whether it fits the policy, and the reply in an answer. Nothing here does I/O."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning_agentrl.engines.base import Reply, SamplingRequest
from lightning_agentrl.engines.vllm.start import KEY, LESS_PROMPT
from lightning_agentrl.errors.vllm_version import GET, SUPPORTED, is_supported
from lightning_agentrl.vllm_worker.extension import MODE, Transfer

NO_LOGP = -9998.0  # vLLM returns -9999 if there is none
NO_VERSION = "default"  # version of the weights that a server started with
LOADING = "loading "  # prefix of the version that is being loaded


class Lost(Exception):
    """A server did not answer, or not completely; another attempt may succeed."""


class Unusable(Lost):
    """A server did not answer in time, or its answer cannot be used; requests go to another one."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise Unusable if an answer cannot be read inside.

    Args:
        what: what the server did, such as "reports its settings".
    """
    try:
        yield
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise Unusable(
            f"it {what} in another form than vLLM ({type(error).__name__}: {error}); start it with `agentrl serve`"
        ) from error


@dataclass(frozen=True)
class ServerFacts:
    """What a running server reports about itself."""

    vllm: str  # its version
    model: str
    sizes: Mapping[str, Any]  # of the model
    max_model_len: int  # tokens of a prompt and its reply
    dtype: str
    logprobs_mode: str
    transfer: str | None  # the network transfer it was started for


def read_facts(
    version: Mapping[str, Any], models: Mapping[str, Any], info: Mapping[str, Any], sizes: Mapping[str, Any]
) -> ServerFacts:
    """Read the facts from ``/version``, ``/v1/models``, ``/server_info`` and the report of the first worker."""
    (model, *_) = models["data"]
    config = info["vllm_config"]["model_config"]
    transfer = info["vllm_config"].get("weight_transfer_config") or {}
    return ServerFacts(
        vllm=str(version["version"]),
        model=str(model["root"]),
        sizes=dict(sizes["results"][0]),
        max_model_len=int(model["max_model_len"]),
        dtype=str(config["dtype"]).removeprefix("torch."),
        logprobs_mode=str(config["logprobs_mode"]),
        transfer=transfer.get("backend"),
    )


def complaint(
    facts: ServerFacts, sizes: Mapping[str, Any], max_model_len: int, transfer: Transfer = "folder"
) -> str | None:
    """Return why a server cannot be used, and the remedy; None if it can.

    The weights that a server was started with do not matter, since it gets those of the policy.

    Args:
        facts: facts of the server.
        sizes: sizes of the policy; those that both report are compared.
        max_model_len: most tokens of a prompt with its reply.
        transfer: how weights are to be transferred to it.
    """
    if not is_supported(facts.vllm):
        return f"runs vLLM {facts.vllm}, but version {SUPPORTED} is needed there; get it with {GET}"
    if facts.logprobs_mode != MODE:
        return (
            f"gives log-probs in the mode '{facts.logprobs_mode}', which are not those of the sampled distribution; "
            f"start it with `agentrl serve`, or with --logprobs-mode {MODE}"
        )
    if (found := facts.transfer or "folder") != transfer:
        return (
            f"was started to take weights by '{found}', but the run sends them by '{transfer}'; start it with "
            f"`agentrl serve MODEL --transfer {transfer}`, or set {KEY}.transfer to {found}"
        )
    if other := [name for name in sizes if facts.sizes.get(name, sizes[name]) != sizes[name]]:
        differs = ", ".join(f"{name} {facts.sizes[name]} and not {sizes[name]}" for name in other)
        return (
            f"serves another model than the policy, '{facts.model}' ({differs}); start it with `agentrl serve` and "
            f"the model of the run, or change {KEY}.urls"
        )
    if max_model_len > facts.max_model_len:
        return (
            f"takes {facts.max_model_len} tokens of a prompt and its reply, and up to {max_model_len} are needed; "
            f"start it with --max-model-len {max_model_len}, or lower {LESS_PROMPT}"
        )
    return None


def read_reply(
    answer: Mapping[str, Any],
    request: SamplingRequest,
    stop_token_ids: Collection[int],
    vocabulary: int,
    version: str,
    policy_version: int,
) -> Reply:
    """Return the reply in an answer of ``/inference/v1/generate``; an incomplete one must not be trained on.

    Args:
        answer: decoded JSON.
        request: the request.
        stop_token_ids: tokens that end a reply.
        vocabulary: how many tokens the model has.
        version: of the weights that must have sampled it.
        policy_version: version of the same weights, for the reply.

    Raises:
        Lost: the server aborted the reply, was restarted and has its initial weights, or has older ones of this run.
        Unusable: ids or log-probs are missing, too many or no such numbers.
        ValueError: the reply is from weights of another run.
    """
    with reading("answered"):
        (choice,) = answer.get("choices") or [{}]
        reason, ids = choice.get("finish_reason"), tuple(choice.get("token_ids") or ())
        content = [
            (at.get("token_id"), at.get("logprob")) for at in (choice.get("logprobs") or {}).get("content") or ()
        ]
        logps = tuple(math.nan if logp is None else float(logp) for _, logp in content)  # NaN comes as null
        versions = {str(span.get("version")) for span in choice.get("weight_versions") or ()}
    if reason == "abort":
        raise Lost(f"it aborted a reply after {len(ids)} tokens")
    if versions and all(found == NO_VERSION or found.startswith(LOADING) for found in versions):
        raise Lost("it was restarted and has its initial weights")
    if versions - {version} and all(_of_run(found, version) for found in versions):
        raise Lost("it sampled with older weights")
    if not versions:
        raise Unusable(
            "it answered in another form than vLLM (it does not say which weights have sampled a reply); start it with "
            "`agentrl serve`"
        )
    if versions != {version}:
        raise ValueError(
            f"sampled with weights of the version {', '.join(sorted(versions))}, and not {version}; another run sends "
            f"it weights too: give each run servers of its own ({KEY}.urls)"
        )
    if not ids or tuple(token for token, _ in content) != ids:
        raise Unusable(
            f"it answered with {len(ids)} ids and log-probs of {len(content)}; start it with `agentrl serve`, which "
            "turns both on"
        )
    if wrong_ids := [token for token in ids if type(token) is not int or not 0 <= token < vocabulary]:
        raise Unusable(
            f"it answered in another form than vLLM ({wrong_ids[0]!r} is no id of the model's {vocabulary} tokens); "
            "start it with `agentrl serve`"
        )
    if len(ids) > request.max_tokens:
        raise Unusable(
            f"it answered in another form than vLLM ({len(ids)} tokens, of at most {request.max_tokens}); start it "
            "with `agentrl serve`"
        )
    if wrong := [logp for logp in logps if not NO_LOGP < logp <= 1e-4]:  # NaN too
        raise Unusable(
            f"it answered with {len(wrong)} of {len(logps)} log-probs that are not numbers up to 0 (the first is "
            f"{wrong[0]:g}): the weights that it has, or what it computes from them, are broken; start it again, with "
            "`-- --dtype float32` where it computes in float16, and compare it with the trainer by `agentrl "
            "verify-engine`"
        )
    closed = ids[-1] in stop_token_ids
    if reason not in ("stop", "length") or (not closed and len(ids) != request.max_tokens):
        raise Unusable(
            f"it ended a reply with '{reason}' after {len(ids)} of {request.max_tokens} tokens, none of which closes "
            "it; start it with `agentrl serve`, and without options that end replies"
        )
    return Reply(ids, logps, closed, policy_version)


def _of_run(found: str, version: str) -> bool:
    """Return whether weights are of the run that has sent a version, or those that a server starts with."""
    run = version.rpartition("-")[0] + "-"
    return found == NO_VERSION or found.removeprefix(LOADING).startswith(run)
