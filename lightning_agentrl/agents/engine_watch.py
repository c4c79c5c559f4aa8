"""When the engine of a run is compared with the policy, and what follows if it samples from something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

from lightning.pytorch.utilities import rank_zero_warn
from transformers import PreTrainedTokenizerBase

from lightning_agentrl.agents.proof import EngineProof
from lightning_agentrl.agents.scoring import Reader
from lightning_agentrl.agents.update import GAP
from lightning_agentrl.distributed import max_over_ranks, raise_once, rank
from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.errors import EngineMismatchError
from lightning_agentrl.rollout.data_module import Prove, RolloutDataModule
from lightning_agentrl.types import Rollout


class EngineWatch:
    """A watch over the engine of a run: proven before the first rollout, then judged by the gap of each rollout.

    Where that gap does not tell, because the policy has moved on or its log-probs are not computed, a few tokens are
    compared after each update of the engine. All ranks must call each method together. Each of them raises an
    ``EngineMismatchError``, or warns.

    Args:
        make_proof: called once, when the engine has taken over the weights.
        prove: whether to stop or to warn; ``off``: nothing is compared.
        ahead: whether turns may be trained on after the weights that sampled them have changed.
        bypass: whether the engine's log-probs are taken as the old ones.
    """

    def __init__(self, make_proof: Callable[[], EngineProof], prove: Prove, ahead: bool, bypass: bool) -> None:
        self.make_proof, self.prove, self.ahead, self.bypass = make_proof, prove, ahead, bypass
        self._proof: EngineProof | None = None  # once the engine was proven

    def at_start(self, version: int) -> None:
        """Compare many tokens, with weights moved, unless this was done before."""
        if self._proof is None and self.prove != "off":
            self._proof = self.make_proof()
            self._object(self._proof.at_start(version))

    def after_update(self) -> None:
        """Compare a few tokens where the gap of the rollout will not tell; called where the engine may be asked."""
        if self._proof is not None and (self.ahead or self.bypass):
            self._object(self._proof.after_update())

    def of_rollout(self, numbers: Mapping[str, float], rollout: Rollout, version: int) -> None:
        """Compare the rollout's gap between engine and trainer, if it was measured, with what it may be.

        Args:
            numbers: of the rollout or of its only mini-batch, over all ranks.
            rollout: of this rank.
            version: of the policy that has measured them.
        """
        if self._proof is None or GAP not in numbers:
            return
        older = self.ahead  # where nothing may be, what an engine says of its version does not count
        if older:
            older = max_over_ranks(int(any(turn.policy_version != version for turn in rollout.turns))) > 0
        self._object(self._proof.of_rollout(numbers[GAP], rollout, older))

    def _object(self, objection: str) -> None:
        """Stop, or warn, if there is something to tell. Every rank must call it with the same."""
        if objection and self.prove == "stop":
            with raise_once():
                raise EngineMismatchError(objection)
        if objection:
            rank_zero_warn(objection)


def proof_of(
    data: RolloutDataModule,
    tokenizer: PreTrainedTokenizerBase,
    reader: Reader,
    evaluating: Callable[[], AbstractContextManager],
) -> EngineProof:
    """Return what compares the engine of a run with its policy. It counts no progress, and may be left as a rollout is.

    Args:
        data: connected.
        tokenizer: of the policy.
        reader: of the run.
        evaluating: context of the trainer's precision, without gradients.
    """
    return EngineProof(
        data.engine,
        data.policy_handle,
        data.first_inputs,
        tokenizer,
        replace(reader, advance=lambda count: None),
        evaluating,
        derive_seed(data.seed, rank()),
        data.stopping,
    )
