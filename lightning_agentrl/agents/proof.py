"""Whether an engine samples from the policy: sent weights, sampled tokens, and the trainer's own log-probs of them.

What an engine holds cannot be looked at, so it is asked. Every trained weight is moved far away and sent by the
engine's own update; some hundred tokens that it then samples are compared with what the trainer, moved alike, says of
them. A weight that the update does not reach is still as it was, right or not, and shows. Then the weights are put back
bit for bit, sent and compared again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from lightning_agentrl.agents.proof_questions import Questions, Sampled
from lightning_agentrl.agents.scoring import Reader, action_rows, row_distributions, row_scores
from lightning_agentrl.distributed import all_gather
from lightning_agentrl.engines import Engine, PolicyHandle
from lightning_agentrl.engines.weights import moved
from lightning_agentrl.metrics.causes import Distributions, Evidence, likely_cause
from lightning_agentrl.metrics.gap import Bounds, GapWatch, bounds_for
from lightning_agentrl.rollout.stopping import Stopping
from lightning_agentrl.types import ModelInput, Rollout, Row

READ_WHOLE = 128  # tokens whose distributions are read to find a cause
_PART = 16  # rows of a rollout that are looked at where its mean gap is beyond the bound
STOOD_STILL = "the last update has not reached the engine, which gives the very log-probs that it gave before"


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
        self.engine, self.handle, self.reader, self.evaluating = engine, handle, reader, evaluating
        self.questions = Questions(engine, handle, prompts, tokenizer, reader.temperature, seed, stopping)
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
                sampled = self.questions.ask_round(number)
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
        sampled = self.questions.ask_few()
        before, self._probed = self._probed, sampled
        seen = self._compare(sampled, unmoved=before is not None and torch.equal(before.logps, sampled.logps))
        if self.allowed(seen).hold(seen.mean, seen.largest):
            return ""
        own = sampled.first(READ_WHOLE)
        cause = self._agreed_cause(replace(seen, unmoved=False), self._whole(own.rows, own.logps), {})
        return self.sentence(seen, STOOD_STILL if seen.unmoved else cause)

    def of_rollout(self, mean: float, rollout: Rollout, older: bool) -> str:
        """Return what is wrong with the mean gap of a rollout before its update, as a sentence, or nothing.

        Args:
            mean: distance of the log-probs of engine and trainer, in nats, over all ranks.
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
        part = rollout.select(list(range(min(len(rollout), _PART))))
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
        own = found.sampled.first(READ_WHOLE)
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


def _other_precision(engine: Engine, handle: PolicyHandle, device: str) -> Callable[[], AbstractContextManager] | None:
    """Return what makes a trainer in 16 bits compute in float32, or one in float32 in the 16 bits of the engine.

    Where both compute in float32 on a GPU, one of them may multiply in TF32, as vLLM's attention does. None where
    nothing of this is so, and for weights of 16 bits that are sharded.
    """
    weights = list(handle.policy.parameters())
    if any(weight.dtype.itemsize < 4 for weight in weights) and not any(isinstance(w, DTensor) for w in weights):
        return partial(_in_float32, handle.policy, device)
    if any(weight.dtype != torch.float32 for weight in weights):
        return None
    if handle.computes_in.itemsize < 4:
        return partial(torch.autocast, device, enabled=False)
    if "16" in engine.dtype:
        return partial(torch.autocast, device, torch.bfloat16 if "bfloat16" in engine.dtype else torch.float16)
    return _other_products if device == "cuda" else None


@contextmanager
def _in_float32(policy: nn.Module, device: str) -> Iterator[None]:
    """Let copies of weights of 16 bits stand in their places for a while.

    The weights themselves stay as and where they are, since optimizers and hooks hold them.
    """
    held = [(module._parameters, name) for module in policy.modules() for name in module._parameters]
    places = [(of, name, weight) for of, name in held if (weight := of[name]) is not None and weight.dtype.itemsize < 4]
    copies = {weight: nn.Parameter(weight.detach().float(), requires_grad=False) for _, _, weight in places}
    try:
        for of, name, weight in places:
            of[name] = copies[weight]
        with torch.autocast(device, enabled=False):
            yield
    finally:
        for of, name, weight in places:
            of[name] = weight


@contextmanager
def _other_products() -> Iterator[None]:
    """Multiply float32 in TF32, or no longer so."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if before == "highest" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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
