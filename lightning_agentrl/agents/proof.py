"""Whether an engine samples from the policy: sent weights, sampled tokens, and the trainer's own log-probs of them.

What an engine holds cannot be looked at, so it is asked. Every trained weight is moved far away and sent by the
engine's own update; some hundred tokens that it then samples are compared with what the trainer, moved alike, says of
them. A weight that the update does not reach is still as it was, right or not, and shows. Then the weights are put back
bit for bit, sent and compared again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from random import Random

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_agentrl.agents.scoring import Reader, action_rows, row_distributions, row_scores
from lightning_agentrl.distributed import all_gather
from lightning_agentrl.engines import Engine, PolicyHandle, Reply, SamplingRequest, ask
from lightning_agentrl.engines.weights import moved
from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.metrics.causes import Distributions, Evidence, likely_cause
from lightning_agentrl.metrics.gap import Bounds, GapWatch, bounds_for
from lightning_agentrl.rollout.event_loop import LoopThread
from lightning_agentrl.rollout.stopping import Stopping
from lightning_agentrl.types import ModelInput, Rollout, Row

LEAST_TOKENS = 512  # of a round, over all ranks
REPLIES, TOKENS = 8, 32  # of a batch, and of a reply
MOST_BATCHES = 64  # of a round, where replies are short
PROBED_TOKENS = 8  # of a reply, between two rollouts
VARIED, FRESH = 8, 24  # ids that make prompts different, and ids of prompts that have nothing in common
READ_WHOLE = 128  # tokens whose distributions are read to find a cause
STOOD_STILL = "the last update has not reached the engine, which gives the very log-probs that it gave before"
SEED = 90210  # sets the seeds of a proof apart from those of the run


@dataclass(frozen=True)
class Sampled:
    """Requests of this rank, and their replies."""

    requests: tuple[SamplingRequest, ...] = ()
    replies: tuple[Reply, ...] = ()
    fresh: tuple[bool, ...] = ()  # of each prompt: it has no beginning in common with any that was read before

    def __add__(self, other: Sampled) -> Sampled:
        return Sampled(self.requests + other.requests, self.replies + other.replies, self.fresh + other.fresh)

    @property
    def tokens(self) -> int:
        return sum(len(reply.ids) for reply in self.replies)

    @property
    def rows(self) -> list[Row]:
        """Prompts with their replies, read before each sampled token."""
        return [
            Row(
                request.prompt + ModelInput.of_ids(reply.ids),
                tuple(range(len(request.prompt) - 1, len(request.prompt) - 1 + len(reply.ids))),
            )
            for request, reply in zip(self.requests, self.replies, strict=True)
        ]

    @property
    def logps(self) -> Tensor:
        """Log-probs [N] that the engine gave for all tokens, one reply after the other."""
        return torch.tensor([logp for reply in self.replies for logp in reply.logps], dtype=torch.float64)

    @property
    def fresh_tokens(self) -> Tensor:
        """Whether each of these tokens [N] follows a fresh prompt."""
        return torch.tensor([fresh for fresh, r in zip(self.fresh, self.replies, strict=True) for _ in r.ids])


@dataclass(frozen=True)
class Round:
    """What an engine sampled from one version of the weights."""

    number: int
    moves: bool  # the weights were moved; else they are the policy's own
    sampled: Sampled
    seen: Evidence  # of all ranks


class EngineProof:
    """A comparison of an engine with the policy, which takes nothing from the random streams of the run.

    All ranks must call each method together. A cause is told by the first of them.

    Args:
        engine: started.
        handle: of the policy that it samples from.
        prompts: of the run, at least one.
        tokenizer: of the policy.
        reader: reads rows as training does.
        evaluating: context of the trainer's precision, without gradients.
        seed: of the run; each rank has its own.
        stopping: of the run, which may leave the proof while it waits for replies.

    ``rounding`` is the precision in which the policy's own rounding shows; None: it is not measured.
    """

    def __init__(
        self,
        engine: Engine,
        handle: PolicyHandle,
        prompts: Sequence[ModelInput],
        tokenizer: PreTrainedTokenizerBase,
        reader: Reader,
        evaluating: Callable[[], AbstractContextManager],
        seed: int,
        stopping: Stopping,
    ) -> None:
        self.engine, self.handle, self.prompts, self.tokenizer = engine, handle, prompts, tokenizer
        self.reader, self.evaluating, self.seed, self.stopping = reader, evaluating, seed, stopping
        self.bounds = bounds_for(engine.dtype, str(handle.computes_in))
        self.rounding = _other_precision(engine, handle, reader.device.type)
        self.gaps = GapWatch(self.bounds)
        self._probed: Sampled | None = None

    def rounds(self, count: int, version: int) -> Iterator[Round]:
        """Yield rounds with other weights each, the last one with the policy's own, which the engine has in the end.

        Args:
            count: of rounds; 1: the policy's own weights alone.
            version: of the policy.
        """
        before = Sampled()
        for number in range(count):
            moves = number + 1 < count
            with moved(self.handle.policy, number) if moves else nullcontext():
                self.engine.sync(version)
                sampled = self._sample_round(number)
                seen = self._compare(sampled, unmoved=_same(before, sampled))
            yield Round(number, moves, sampled, seen)
            before = sampled
        self.engine.sync(version)  # drops the prefixes that were read here

    def at_start(self, version: int) -> str:
        """Return what is wrong, as a sentence, or nothing. Engines that hold no weights are compared only."""
        rounds = list(self.rounds(2 if self.engine.holds_copy else 1, version))
        if (wrong := self.first_wrong(rounds)) is not None:
            return self.sentence(wrong.seen, self.cause(wrong, sent_before=len(rounds) > 1))
        own = rounds[-1].seen
        rank_zero_info(f"{type(self.engine).__name__} samples from the policy: {own}")
        return ""

    def allowed(self, seen: Evidence) -> Bounds:
        """Return what rounding explains of a comparison."""
        return seen.widened(self.bounds)

    def first_wrong(self, rounds: Sequence[Round]) -> Round | None:
        """Return the first round that does not fit; whether updates reach the engine at all is known from all."""
        wrong = next((found for found in rounds if not found.seen.fits(self.allowed(found.seen))), None)
        if wrong is None:
            return None
        unmoved = wrong.number == 0 and any(found.seen.unmoved for found in rounds)
        return replace(wrong, seen=replace(wrong.seen, unmoved=unmoved))

    def after_update(self) -> str:
        """Compare a few tokens, with weights that were sent just now; return what is wrong, as a sentence, or nothing.

        Called where the engine may be asked: inside its ``collecting()``, or without it where the policy is trained
        meanwhile.

        Their prompts have no beginning in common with any other. So the engine keeps of prompts what it kept before,
        and the next rollout is the same to the bit.
        """
        sampled = self._ask(self._fresh(0, 0, PROBED_TOKENS), fresh=True)
        before, self._probed = self._probed, sampled
        seen = self._compare(sampled, unmoved=before is not None and torch.equal(before.logps, sampled.logps))
        if self.allowed(seen).hold(seen.mean, seen.largest):
            return ""
        own = self._few(sampled)
        cause = self._agreed_cause(replace(seen, unmoved=False), self._whole(own.rows, own.logps), {})
        return self.sentence(seen, STOOD_STILL if seen.unmoved else cause)

    def of_rollout(self, mean: float, rollout: Rollout, older: bool) -> str:
        """Return what is wrong with the mean gap of a rollout before its update, as a sentence, or nothing.

        Args:
            mean: over all ranks.
            rollout: of this rank; the policy has not changed since ``mean`` was measured.
            older: some of its turns may be sampled with older weights.
        """
        judgement = self.gaps.judge(mean, older)
        if judgement == "jump":
            rank_zero_warn(
                f"the mean gap of log-probs between {type(self.engine).__name__} and trainer has jumped to {mean:.2g}, "
                f"from a median of {self.gaps.usual:.2g} in the rollouts before (mismatch/logp_gap_mean)"
            )
        if judgement != "beyond":
            return ""
        part = rollout.select(list(range(min(len(rollout), 2 * REPLIES))))
        rows, logps = action_rows(part), part.rollout_logps[part.action_mask].double()
        seen = self._joined(rows, self._evidence(rows, logps, torch.ones_like(logps, dtype=torch.bool)))
        if mean <= self.allowed(seen).mean:
            return ""
        return self.sentence(seen, self._agreed_cause(seen, self._whole(rows, logps), {}))

    def sentence(self, seen: Evidence, cause: str) -> str:
        return (
            f"{type(self.engine).__name__} does not sample from the policy that is trained: {seen}, where rounding "
            f"explains {self.allowed(seen)}; likely {cause}. `agentrl verify-engine` repeats the comparison, and "
            "data.init_args.prove: warn goes on all the same"
        )

    def cause(self, found: Round, sent_before: bool) -> str:
        """Return the likely cause of a round that does not fit, after some passes of the trainer.

        Args:
            found: the round.
            sent_before: whether other weights were sent to the engine before.
        """
        own = self._few(found.sampled)
        with moved(self.handle.policy, found.number) if found.moves else nullcontext():
            whole = self._whole(own.rows, own.logps)
        if not sent_before:
            return self._agreed_cause(found.seen, whole, {})
        with self._older(found, lambda name: True):
            older = self._read(found.sampled.rows)[0]
        seen = replace(found.seen, older=torch.cat(all_gather(older)))
        return self._agreed_cause(seen, whole, self._by_part(found, own))

    def _agreed_cause(self, seen: Evidence, whole: Distributions, kept: dict[str, float]) -> str:
        return all_gather(likely_cause(seen, self.allowed(seen), whole, kept))[0]

    def _by_part(self, found: Round, own: Sampled) -> dict[str, float]:
        """Return the gap that is left if the trainer has the older weights of one part of the model alone."""
        names = [_short(name) for name, weight in self.handle.policy.named_parameters() if weight.requires_grad]
        left = {}
        for part, members in parts_of(names).items():
            with self._older(found, lambda name, members=members: _short(name) in members):  # type: ignore[misc]
                left[part] = float((self._read(own.rows)[0] - own.logps).abs().mean())
        return left

    @contextmanager
    def _older(self, found: Round, chosen: Callable[[str], bool]) -> Iterator[None]:
        """Give the policy the weights of a round, but those that are chosen as they were before it."""
        policy, number = self.handle.policy, found.number
        with ExitStack() as stack:
            if found.moves:
                stack.enter_context(moved(policy, number, lambda name: not chosen(name)))
            if number:
                stack.enter_context(moved(policy, number - 1, chosen))
            yield

    # Sampling

    def _sample_round(self, number: int) -> Sampled:
        """Prompts that begin alike are asked last in one round and first in the next, so that kept ones are met."""
        sampled = Sampled()
        with self.engine.collecting():
            for batch in range(MOST_BATCHES):
                alike, fresh = (self._alike(batch), False), (self._fresh(number, batch, TOKENS), True)
                for requests, is_fresh in (alike, fresh) if number % 2 else (fresh, alike):
                    sampled += self._ask(requests, is_fresh)
                if sum(all_gather(sampled.tokens)) >= LEAST_TOKENS:
                    break
        return sampled

    def _ask(self, requests: Sequence[SamplingRequest], fresh: bool) -> Sampled:
        loop = LoopThread()
        try:
            with self.stopping.apart():
                replies = loop.run(_replies(self.engine, requests), self.stopping.look)
        finally:
            loop.stop()
        return Sampled(tuple(requests), tuple(replies), (fresh,) * len(requests))

    def _alike(self, batch: int) -> list[SamplingRequest]:
        """Return requests that are the same in each round, with prompts of the run that end differently."""
        requests = []
        for k in range(batch * REPLIES, (batch + 1) * REPLIES):
            window = self.handle.window
            tokens, varied = min(TOKENS, window // 2), min(VARIED, window // 4)
            random = Random(derive_seed(SEED, self.seed, k))
            start = self.prompts[k % len(self.prompts)].head(window - tokens - varied)
            prompt = start + ModelInput.of_ids(random.choices(self._plain_ids, k=varied))
            requests.append(self._request(prompt, tokens, k))
        return requests

    def _fresh(self, number: int, batch: int, tokens: int) -> list[SamplingRequest]:
        """Return requests with prompts of random ids, other ones for each number."""
        requests = []
        for k in range(batch * REPLIES, (batch + 1) * REPLIES):
            random = Random(derive_seed(SEED, self.seed, number, k))
            prompt = random.choices(self._plain_ids, k=min(FRESH, self.handle.window // 2))
            cap = min(tokens, self.handle.window - len(prompt))
            requests.append(self._request(ModelInput.of_ids(prompt), cap, k))
        return requests

    def _request(self, prompt: ModelInput, tokens: int, k: int) -> SamplingRequest:
        seed = derive_seed(SEED, self.seed, k, 1)
        return SamplingRequest(prompt, tokens, self.reader.temperature, seed)

    @cached_property
    def _plain_ids(self) -> list[int]:
        """All ids but special and added ones."""
        added = {*self.tokenizer.all_special_ids, *self.tokenizer.get_added_vocab().values()}
        size = min(len(self.tokenizer), int(self.handle.policy.lm.config.get_text_config().vocab_size))
        return [token for token in range(size) if token not in added]

    # Comparing

    def _compare(self, sampled: Sampled, unmoved: bool = False) -> Evidence:
        rows = sampled.rows
        return self._joined(rows, self._evidence(rows, sampled.logps, sampled.fresh_tokens, unmoved))

    def _joined(self, rows: Sequence[Row], own: Evidence) -> Evidence:
        """Join what all ranks see; where it does not fit, the rounding of the policy itself is measured too."""
        seen = Evidence.together(all_gather(own))
        if seen.fits(self.bounds) or self.rounding is None:
            return seen
        otherwise, _ = self._read(rows, self.rounding)
        return replace(seen, rounding=torch.cat(all_gather((otherwise - own.trainer).abs())))

    def _evidence(self, rows: Sequence[Row], logps: Tensor, fresh: Tensor, unmoved: bool = False) -> Evidence:
        repeated = [row.input.ids[p + 1] in row.input.ids[: p + 1] for row in rows for p in row.logit_positions]
        trainer, entropy = self._read(rows)
        return Evidence(logps, trainer, entropy, fresh, torch.tensor(repeated, dtype=torch.bool), unmoved=unmoved)

    def _read(
        self, rows: Sequence[Row], precision: Callable[[], AbstractContextManager] = nullcontext
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies at the positions of the rows, in the trainer's precision or another one."""
        with self.evaluating(), precision():
            scores = row_scores(self.handle.policy, rows, self.reader)
        logps, entropy = (torch.cat(parts).double() for parts in zip(*scores, strict=True))
        return logps, entropy

    def _whole(self, rows: Sequence[Row], logps: Tensor) -> Distributions:
        with self.evaluating():
            log_pi = row_distributions(self.handle.policy, rows, self.reader)
        ids = [row.input.ids[p + 1] for row in rows for p in row.logit_positions]
        return Distributions(log_pi, torch.tensor(ids), logps, self.reader.temperature)

    def _few(self, sampled: Sampled) -> Sampled:
        """Return the first replies, with about READ_WHOLE tokens."""
        count = tokens = 0
        while count < len(sampled.replies) and tokens < READ_WHOLE:
            tokens += len(sampled.replies[count].ids)
            count += 1
        return Sampled(sampled.requests[:count], sampled.replies[:count], sampled.fresh[:count])


def _other_precision(engine: Engine, handle: PolicyHandle, device: str) -> Callable[[], AbstractContextManager] | None:
    """Return what makes a trainer in 16 bits compute in float32, or one in float32 in the 16 bits of the engine.

    Where both compute in float32 on a GPU, one of them may multiply in TF32, as vLLM's attention does. None where
    nothing of this is so, and for weights that have 16 bits themselves.
    """
    if any(weight.dtype != torch.float32 for weight in handle.policy.parameters()):
        return None
    if handle.computes_in.itemsize < 4:
        return partial(torch.autocast, device, enabled=False)
    if "16" in engine.dtype:
        return partial(torch.autocast, device, torch.bfloat16 if "bfloat16" in engine.dtype else torch.float16)
    return _other_products if device == "cuda" else None


@contextmanager
def _other_products() -> Iterator[None]:
    """Multiply float32 in TF32, or no longer so."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if before == "highest" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


async def _replies(engine: Engine, requests: Sequence[SamplingRequest]) -> list[Reply]:
    return list(await asyncio.gather(*(ask(engine, request) for request in requests)))


def _same(before: Sampled, after: Sampled) -> bool:
    """Return whether most requests that were made before were answered alike."""
    earlier = {request: reply.ids for request, reply in zip(before.requests, before.replies, strict=True)}
    pairs = [(earlier.get(request), reply.ids) for request, reply in zip(after.requests, after.replies, strict=True)]
    known = [(old, new) for old, new in pairs if old is not None]
    return bool(known) and sum(old == new for old, new in known) > len(known) / 2


def _short(name: str) -> str:
    """Return the name of a weight as the model's files have it."""
    return name.removeprefix("lm.")


def parts_of(names: Sequence[str]) -> dict[str, frozenset[str]]:
    """Return the parts of a model that an update may leave out: a tensor, one kind of them in all layers, a module.

    Args:
        names: of its weights.

    Returns:
        Names of the weights of each part, different ones for each.
    """
    labels = dict[str, None]()
    for name in names:
        pieces = name.split(".")
        labels[_kind(name)] = labels[name] = None
        labels |= dict.fromkeys(".".join(pieces[:n]) for n in range(len(pieces) - 1, 2, -1))
    parts = dict[frozenset[str], str]()
    for label in labels:
        members = frozenset(name for name in names if label in (name, _kind(name)) or name.startswith(f"{label}."))
        parts.setdefault(members, label)
    return {label: members for members, label in parts.items()}


def _kind(name: str) -> str:
    """Return the name of a weight with a star for the number of its layer."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
