"""The address under which others reach this machine; here, since workers of vLLM ask for it and load nothing else."""

from __future__ import annotations

import socket

PORT = 9  # any will do: nothing is sent


def own_address(towards: str) -> str:
    """Return the address of this machine on the way to another one, as that one sees it; no packet is sent.

    Args:
        towards: name or address of the other machine.
    """
    family, kind, protocol, _, there = socket.getaddrinfo(towards, PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as way:
        way.connect(there)
        return str(way.getsockname()[0])
