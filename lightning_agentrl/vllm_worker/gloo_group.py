"""A group of the trainer and one server's workers, in which the trainer sends tensors over the network by gloo."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:  # not in every build of torch
    from torch._C._distributed_c10d import Store, TCPStore

MEET_TIME = timedelta(seconds=60)
WAIT_TIME = timedelta(seconds=300)  # for one tensor, and for the other side to finish the previous one


class GlooGroup:
    """A group apart from that of ``torch.distributed``; the trainer has rank 0. It ends with its last reference.

    Args:
        store: store through which members find each other.
        rank: rank of this process.
        size: number of members.
        address: address of this machine that the others can reach.
        wait_time: for one tensor.

    Raises:
        RuntimeError: the others did not join in time.
    """

    def __init__(self, store: Store, rank: int, size: int, address: str, wait_time: timedelta = WAIT_TIME) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # as torch.distributed itself makes one
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = wait_time
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, options)
        self._rank = rank

    def broadcast(self, weight: Tensor) -> None:
        """Send a tensor in main memory from the trainer, or receive into one of equal shape and dtype elsewhere.

        Raises:
            RuntimeError: another member is gone, or did not make this call in time.
        """
        data = weight.reshape(-1).view(torch.uint8) if self._rank == 0 else weight.view(-1).view(torch.uint8)
        self._group.broadcast(data, 0).wait()


def open_store(address: str) -> TCPStore:
    """Open the store of a new group in this process, on a free port of this address only (torch would take all)."""
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((address, 0), family=family) as door:
        port, fd = door.getsockname()[1], door.detach()  # from now on the store's
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, None, True, timeout=MEET_TIME, wait_for_workers=False, master_listen_fd=fd
    )


def find_store(address: str, port: int) -> TCPStore:
    """Connect to the store that another process has opened."""
    return dist.TCPStore(address, port, timeout=MEET_TIME)  # type: ignore[attr-defined]
