"""Routing of requests to servers: to the one with the least work, given the prefixes it has cached."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lightning_agentrl.types.model_input import ModelInput

BLOCK = 32  # tokens; servers cache prefixes in blocks too
IN_FLIGHT = 4  # a reply in flight counts as much as reading this many blocks


def block_keys(prompt: ModelInput) -> list[int]:
    """Return one number per complete block of a prompt, a hash of the block and all that precedes it."""
    keys, key = [], 0
    for end in range(BLOCK, len(prompt) + 1, BLOCK):
        key = hash((key, *prompt.keys[end - BLOCK : end]))
        keys.append(key)
    return keys


def common_blocks(keys: Sequence[int], read: Collection[int]) -> int:
    """Return how many leading blocks of a prompt were read already."""
    return next((count for count, key in enumerate(keys) if key not in read), len(keys))


def preferred(rank: int, ranks: int, servers: int) -> list[int]:
    """Return the indices of servers in the order in which a rank takes them while they have the same work for it.

    A rank knows of its own requests only, so ranks that all preferred the same server would meet there. First choices
    are spread evenly over the servers, and so are the next choices of the ranks that share a first one.

    Args:
        rank: number of the rank.
        ranks: number of ranks, which all use the same servers.
        servers: number of servers.
    """
    apart = max(servers // ranks, 1)
    turned, first = divmod(rank * apart, servers)
    others = [(first + step) % servers for step in range(1, servers)]
    turned %= max(len(others), 1)
    return [first, *others[turned:], *others[:turned]]


def choose(blocks: int, common: Sequence[int], in_flight: Sequence[int]) -> int:
    """Return the index of the server with the least work for a prompt; the first one wins ties.

    An episode whose prompts grow stays on the server that read its past, unless that is much busier. Prompts with only
    a short common prefix spread evenly.

    Args:
        blocks: number of blocks of the prompt.
        common: how many of them each server has read.
        in_flight: number of replies that each server is sampling.
    """
    work = [blocks - had + IN_FLIGHT * others for had, others in zip(common, in_flight, strict=True)]
    return work.index(min(work))
