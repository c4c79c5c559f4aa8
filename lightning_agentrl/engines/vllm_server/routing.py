"""Which of several servers samples a reply: the one where least is left to do, given what it has read before."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lightning_agentrl.types.model_input import ModelInput

BLOCK = 32  # tokens; servers keep what they have read in blocks too
IN_FLIGHT = 4  # blocks that a reply in flight counts for: as much as reading that many


def block_keys(prompt: ModelInput) -> list[int]:
    """One number for each whole block of a prompt, of the block and all that stands before it."""
    keys, key = [], 0
    for end in range(BLOCK, len(prompt) + 1, BLOCK):
        key = hash((key, *prompt.keys[end - BLOCK : end]))
        keys.append(key)
    return keys


def common_blocks(keys: Sequence[int], read: Collection[int]) -> int:
    """How many blocks from the beginning of a prompt are among those that were read."""
    return next((count for count, key in enumerate(keys) if key not in read), len(keys))


def choose(blocks: int, common: Sequence[int], in_flight: Sequence[int]) -> int:
    """The place of the server that has least to do for a prompt; of equal ones, the first.

    An episode whose prompts grow stays where its past was read, unless that server is much busier. Prompts that have
    only a short beginning in common spread evenly.

    Args:
        blocks: of the prompt.
        common: of those, how many each server has read.
        in_flight: replies that each server is sampling.
    """
    work = [blocks - had + IN_FLIGHT * others for had, others in zip(common, in_flight, strict=True)]
    return work.index(min(work))
