"""The nodes of a run by name, so that one that falls silent is told from those that only wait for it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import lightning as L
import torch.distributed as dist

from lightning_agentrl.distributed import all_gather
from lightning_agentrl.errors import Problem, causes, first_line, one_line
from lightning_agentrl.errors.foreign_messages import LostRank, lost_rank, not_met
from lightning_agentrl.vllm_worker.extension import own_address

PORT = 9  # closed almost everywhere, and a machine that says so is there
PATIENCE = 3.0  # seconds for its answer


@dataclass(frozen=True)
class Node:
    """A machine of a run.

    Args:
        number: of the node.
        host: its own name for itself.
        address: under which the others reach it.
    """

    number: int
    host: str
    address: str

    def __str__(self) -> str:
        return f"node {self.number} ({self.host}, {self.address})"


class NodeNames(L.Callback):
    """Notes at the start which nodes a run has."""

    def __init__(self) -> None:
        self.own = 0
        self.others: list[Node] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not dist.is_initialized() or trainer.num_nodes == 1:
            return
        own = Node(trainer.node_rank, socket.gethostname(), own_address(os.environ["MASTER_ADDR"]))
        nodes = {node.number: node for node in all_gather(own)}
        self.own = own.number
        self.others = [nodes[number] for number in sorted(nodes) if number != own.number]


def lost_process(error: BaseException, nodes: NodeNames, saved: bool) -> Problem | None:
    """Return the sentence on processes that never met, or of which one was lost; None for other errors.

    Args:
        error: what ended this process.
        nodes: of the run.
        saved: whether there is a checkpoint to continue from.
    """
    for cause in causes(error):
        if not_met(cause) and not nodes.others:
            place = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
            return Problem(
                f"the processes of this run did not meet at {place} ({one_line(first_line(cause))})",
                fix="start the command on all nodes (trainer.num_nodes) with the address of the first, whose port they "
                "must reach",
            )
        if lost := lost_rank(cause):
            return lost_problem(lost, nodes.own, {node: is_there(node.address) for node in nodes.others}, saved)
    return None


def lost_problem(lost: LostRank, own: int, others: Mapping[Node, bool], saved: bool = True) -> Problem:
    """Return the sentence.

    Args:
        lost: what the network said.
        own: number of this node.
        others: the other nodes, and whether they answer.
        saved: whether there is a checkpoint to continue from.
    """
    go_on = "continue" if saved else "start again"
    go_on += (" on all nodes" if others else "") + (
        " with --ckpt_path last" if saved else f", as {'this node has' if others else 'there is'} no checkpoint"
    )
    silent = [str(node) for node, answers in others.items() if not answers]
    if silent:
        verb = "do" if len(silent) > 1 else "does"
        what = f"{' and '.join(silent)} {verb} not answer any more"
        return Problem(what, fix=f"look at its machine and at the network between it and node {own}, then {go_on}")
    at = next((f" on {node}" for node in others if node.address == lost.address), "")
    if lost.closed:
        what = f"another process of this run{at} has ended"
        return Problem(what, fix=f"its own output says why; then {go_on}")
    what = "another process of this run did not take part in time" + at
    if others and not at:
        what += f", and {' and '.join(map(str, others))} can be reached"
    fix = "it hangs, and its own output says where, or it is slow: then raise trainer.strategy.init_args.timeout"
    return Problem(what, fix=f"{fix}; {go_on}")


def is_there(address: str) -> bool:
    """Return whether a machine answers at all."""
    try:
        socket.create_connection((address, PORT), PATIENCE).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True
