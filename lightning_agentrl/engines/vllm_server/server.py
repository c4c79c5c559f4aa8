"""HTTP client of one vLLM server, and the checks of its answers."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_agentrl.engines.base import Reply, SamplingRequest
from lightning_agentrl.engines.vllm.start import KEY, LESS_PROMPT, sampling_arguments
from lightning_agentrl.errors import one_line
from lightning_agentrl.errors.secrets import filled
from lightning_agentrl.errors.vllm_version import GET, SUPPORTED, is_supported
from lightning_agentrl.vllm_worker.extension import MODE, WorkerExtension

if TYPE_CHECKING:
    import aiohttp

POLICY_SIZES = WorkerExtension.policy_sizes.__name__
REPLY_TIMES = 30  # timeout of a reply, in multiples of the patience
SLOWEST = 10e6  # slowest loading of weights that is accepted, in bytes per second
MOST_BYTES = 256 * 2**20  # largest size of an answer; a reply has some hundred bytes per token
LATER = (408, 425, 429)  # HTTP status codes after which a request may be retried
NO_LOGP = -9998.0  # vLLM returns -9999 for a missing log-prob
NO_VERSION = "default"  # version of the weights with which a server starts
LOADING = "loading "  # prefix of the version that is being loaded


class Lost(Exception):
    """A server gave no answer or an incomplete answer; a retry may succeed."""


class Unusable(Lost):
    """A server did not answer in time, or its answer cannot be used; requests go to another server."""


@dataclass(frozen=True)
class ServerFacts:
    """Facts that a running server reports about itself."""

    vllm: str  # version of vLLM
    model: str
    sizes: Mapping[str, Any]  # sizes of the model, such as `vocab_size`
    max_model_len: int  # largest number of tokens of a prompt and its reply
    dtype: str
    logprobs_mode: str


def open_session(patience: float) -> aiohttp.ClientSession:
    """Open an HTTP session for any number of servers, with one connection per request.

    Connections are not reused, since servers close idle connections at any time.

    Args:
        patience: timeout for connecting, in seconds.
    """
    import aiohttp  # slow to import, and few runs have servers

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_connect=patience))


class VLLMServer:
    """Client of the server at an address, which need not be running.

    Args:
        url: address such as http://127.0.0.1:8001; ``${NAME}`` stands for an environment variable.
        session: HTTP session to use.
        patience: timeout of an answer, in seconds; a reply may take ``REPLY_TIMES`` times as long.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, patience: float) -> None:
        self.url, self.patience = url, patience
        self._session = session

    async def probe(self) -> list[Any]:
        """Return the sizes of the model from each worker. This also tests the engine, which ``/health`` does not reach.

        Raises:
            Unusable: the answer is late or cannot be read.
            Lost: the server or its engine has ended.
        """
        async with self.limit(self.patience, "answered its engine's probe"):
            return await self.call_workers(POLICY_SIZES)

    async def facts(self) -> ServerFacts:
        """Return the facts that the server reports.

        Raises:
            Lost: the server does not answer, or its answer cannot be used.
            ValueError: the server was started without the extension that loads weights.
        """
        version, models, info = [
            await self._get(path) for path in ("/version", "/v1/models", "/server_info?config_format=json")
        ]
        try:
            sizes = await self.probe()
        except Unusable:
            raise
        except Lost as error:
            await self._get("/health")  # if `/health` answers, the server runs without our worker extension
            raise ValueError(f"reports no sizes of its model ({error}); start it with `agentrl serve`") from error
        with _reading("reports its settings"):
            return read_facts(version, models, info, sizes)

    async def weight_version(self) -> str:
        """Return the version of the server's weights."""
        return str((await self._get("/weight_info")).get("weight_version"))

    def seconds_for(self, weight_bytes: int) -> float:
        """Return the timeout, in seconds, of loading or once reading weights of this size."""
        return self.patience + weight_bytes / SLOWEST

    async def load(self, folder: Path, weight_bytes: int, version: str) -> None:
        """Load weights into the server, drop its prefix cache, and check the version.

        Args:
            folder: folder with the weights, which the server reads.
            weight_bytes: size of the weights, for the timeout.
            version: version that the server reports afterwards.

        Raises:
            Unusable: the server did not load the weights in time, or an answer cannot be read.
            Lost: the server stopped answering, or has another version afterwards.
            ValueError: the server cannot load the weights.
        """
        async with self.limit(self.seconds_for(weight_bytes), "loaded the weights"):
            loading = f"{LOADING}{version}"
            await self._post("/update_weight_version", {"new_version": loading})
            await self.call_workers("reload_weights", weights_path=str(folder))
            await self.call_workers(WorkerExtension.pack_experts.__name__)
            await self._forget_prefixes()
            await self._expect(loading)  # another version means a restart, or weights of another run
            await self._post("/update_weight_version", {"new_version": version})
            await self._expect(version)

    async def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method on all workers and return their results."""
        return (await self._post("/collective_rpc", {"method": method, "kwargs": arguments})).get("results") or []

    async def checksums(self, weight_bytes: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the layout and the checksum of the weights of each worker."""
        async with self.limit(self.seconds_for(weight_bytes), "reported the checksums of its weights"):
            answers = await self.call_workers(WorkerExtension.weights_checksum.__name__)
        with _reading("reports its checksums"):
            return tuple(layout for layout, _ in answers), tuple(content for _, content in answers)

    async def generate(
        self,
        request: SamplingRequest,
        stop_token_ids: Collection[int],
        vocabulary: int,
        version: str,
        policy_version: int,
    ) -> Reply:
        """Sample one reply.

        Args:
            request: request to send.
            stop_token_ids: tokens that end a reply.
            vocabulary: number of tokens of the model.
            version: version of the weights that must sample the reply.
            policy_version: version of the policy with the same weights, for the reply.

        Raises:
            Lost: the server stopped answering or was restarted; try again.
            Unusable: the answer is late or not a complete reply; try another server.
            ValueError: the server refused the request.
        """
        params = sampling_arguments(request, stop_token_ids)
        body = {"token_ids": list(request.prompt.ids), "sampling_params": params}
        async with self.limit(REPLY_TIMES * self.patience, f"finished a reply of at most {request.max_tokens} tokens"):
            answer = await self._post("/inference/v1/generate", body)
        return read_reply(answer, request, stop_token_ids, vocabulary, version, policy_version)

    async def _forget_prefixes(self) -> None:
        end = time.monotonic() + self.patience / 2  # aborted requests may not have ended yet
        while time.monotonic() < end:
            if (await self._post("/reset_prefix_cache", {})).get("success"):
                return
            await asyncio.sleep(0.2)
        raise ValueError(
            "keeps its prefix cache, with keys and values of the old weights; something else samples from it: "
            "give each run servers of its own"
        )

    async def _expect(self, version: str) -> None:
        found = await self.weight_version()
        if found != version:
            raise Lost(f"its weights have the version {found} after an update to {version}")

    @asynccontextmanager
    async def limit(self, seconds: float, work: str) -> AsyncIterator[None]:
        """Raise Unusable if the ``with`` block takes longer than ``seconds``; ``work`` completes "it has not …"."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            raise Unusable(f"it has not {work} within {seconds:g} s") from error

    async def _get(self, path: str) -> dict[str, Any]:
        async with self.limit(self.patience, f"answered {path}"):
            return await self._call("GET", path)

    async def _post(self, path: str, body: Any) -> dict[str, Any]:
        """Return the answer to a POST; the caller sets the timeout."""
        return await self._call("POST", path, body)

    async def _call(self, method: Literal["GET", "POST"], path: str, body: Any = None) -> dict[str, Any]:
        import aiohttp

        try:
            async with self._session.request(method, filled(self.url, f"{KEY}.urls") + path, json=body) as answer:
                status, text = answer.status, await _text(answer)
        except TimeoutError:  # :meth:`limit` or the connection has raised the error
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise Lost(one_line(str(error)) or f"no answer ({type(error).__name__})") from error
        if status >= 500 or status in LATER:
            raise Lost(f"it answered {path} with {status}: {_shortened(text)}")
        if status in (401, 403):
            raise ValueError(
                f"asks for a key ({path}: {status}), and none can be given; start it without --api-key, in a network "
                "of your own"
            )
        if status == 404:
            raise ValueError(f"knows no {path}; start it with `agentrl serve`, which turns it on")
        if status >= 400:
            raise ValueError(f"refused {path} with {status}: {_shortened(text)}")
        try:
            content = json.loads(text or "{}")
        except (ValueError, RecursionError) as error:  # a number with too many digits also raises a ValueError
            raise Unusable(
                f"it answered {path} with something other than JSON ({_shortened(text)}); start it with `agentrl serve`"
            ) from error
        return content if isinstance(content, dict) else {}


async def _text(answer: aiohttp.ClientResponse) -> str:
    """Return the body as text; undecodable bytes are replaced, since a proxy may use any encoding."""
    body = bytearray()
    async for part in answer.content.iter_any():
        body += part
        if len(body) > MOST_BYTES:
            raise Unusable(f"it answered {answer.url.path} with more than {MOST_BYTES} bytes")
    return body.decode(errors="replace")


def _shortened(text: str) -> str:
    text = one_line(text)
    return text if len(text) <= 300 else f"{text[:300]} …"


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Raise Unusable if reading an answer inside the context fails.

    Args:
        what: predicate for the message, such as "reports its settings".
    """
    try:
        yield
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise Unusable(
            f"it {what} in another form than vLLM ({type(error).__name__}: {error}); start it with `agentrl serve`"
        ) from error


def read_facts(
    version: Mapping[str, Any], models: Mapping[str, Any], info: Mapping[str, Any], sizes: Sequence[Mapping[str, Any]]
) -> ServerFacts:
    """Read the facts from ``/version``, ``/v1/models``, ``/server_info`` and the reports of the workers."""
    (model, *_) = models["data"]
    config = info["vllm_config"]["model_config"]
    return ServerFacts(
        vllm=str(version["version"]),
        model=str(model["root"]),
        sizes=dict(sizes[0]),
        max_model_len=int(model["max_model_len"]),
        dtype=str(config["dtype"]).removeprefix("torch."),
        logprobs_mode=str(config["logprobs_mode"]),
    )


def complaint(facts: ServerFacts, sizes: Mapping[str, Any], max_model_len: int) -> str | None:
    """Return why a server cannot be used, with the remedy; None if the server can be used.

    The weights with which a server was started do not matter, since the server gets the weights of the policy.

    Args:
        facts: facts of the server.
        sizes: sizes of the policy; sizes that the server does not report are not compared.
        max_model_len: largest number of tokens of a prompt and its reply.
    """
    if not is_supported(facts.vllm):
        return f"runs vLLM {facts.vllm}, but version {SUPPORTED} is needed there; get it with {GET}"
    if facts.logprobs_mode != MODE:
        return (
            f"gives log-probs in the mode '{facts.logprobs_mode}', which are not those of the sampled distribution; "
            f"start it with `agentrl serve`, or with --logprobs-mode {MODE}"
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
    """Return the reply in an answer of ``/inference/v1/generate``, after checking that the reply is complete.

    Args:
        answer: decoded JSON.
        request: request that was sent.
        stop_token_ids: tokens that end a reply.
        vocabulary: number of tokens of the model.
        version: version of the weights that must have sampled the reply.
        policy_version: version of the policy with the same weights, for the reply.

    Raises:
        Lost: the server aborted the reply, was restarted with its initial weights, or has older weights of this run.
        Unusable: ids or log-probs are missing, incomplete or invalid.
        ValueError: the reply was sampled with weights of another run.
    """
    with _reading("answered"):
        (choice,) = answer.get("choices") or [{}]
        reason, ids = choice.get("finish_reason"), tuple(choice.get("token_ids") or ())
        content = [
            (at.get("token_id"), at.get("logprob")) for at in (choice.get("logprobs") or {}).get("content") or ()
        ]
        logps = tuple(math.nan if logp is None else float(logp) for _, logp in content)  # JSON has null for NaN
        versions = {str(span.get("version")) for span in choice.get("weight_versions") or ()}
    if reason == "abort":
        raise Lost(f"it aborted a reply after {len(ids)} tokens")
    if versions and all(found == NO_VERSION or found.startswith(LOADING) for found in versions):
        raise Lost("it was restarted and has its initial weights")
    if versions - {version} and all(_of_run(found, version) for found in versions):
        raise Lost("it sampled with older weights")
    if not versions:
        raise Unusable(
            "it answered in another form than vLLM (it does not report which weights have sampled a reply); start it "
            "with `agentrl serve`"
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
        raise Unusable(f"it answered with ids of which {wrong_ids[0]!r} is no id of the model's {vocabulary}")
    if wrong := [logp for logp in logps if not NO_LOGP < logp <= 1e-4]:  # the condition also finds NaN
        raise Unusable(
            f"it answered with {len(wrong)} of {len(logps)} log-probs that are not numbers up to 0 (the first is "
            f"{wrong[0]:g}): the weights that it has, or what it computes from them, are broken; start it again, with "
            "`-- --dtype float32` where it computes in float16, and compare it with the trainer by `agentrl "
            "verify-engine`"
        )
    closed = ids[-1] in stop_token_ids
    whole = len(ids) == request.max_tokens or (closed and len(ids) < request.max_tokens)
    if reason not in ("stop", "length") or not whole:
        raise Unusable(
            f"it ended a reply with '{reason}' after {len(ids)} of {request.max_tokens} tokens, none of which closes "
            "it; start it with `agentrl serve`, and without options that end replies"
        )
    return Reply(ids, logps, closed, policy_version)


def _of_run(found: str, version: str) -> bool:
    """Return whether the version ``found`` is of the same run as ``version``, or a server's initial version."""
    run = version.rpartition("-")[0] + "-"
    return found == NO_VERSION or found.removeprefix(LOADING).startswith(run)
