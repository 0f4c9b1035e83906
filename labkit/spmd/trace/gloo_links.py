"""Measurement of gloo's real traffic: the bytes that the kernel counts on this rank's sockets, by the rank at the other end.

Linux counts received bytes for every TCP connection (``tcpi_bytes_received`` of ``TCP_INFO``, see tcp(7)). gloo opens one
connection per pair of ranks in each process group, so these counts show how much each rank received from every other.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

_ESTABLISHED = 1
_BYTES_RECEIVED_AT = 128  # in struct tcp_info of linux/tcp.h, since Linux 4.1
_Address = tuple[str, int]


def can_measure_links() -> bool:
    """Return whether this system counts the bytes of a TCP connection; Linux does. Ranks: local."""
    return sys.platform == "linux" and hasattr(socket, "TCP_INFO")


@contextmanager
def measure_links() -> Iterator[dict[int, int]]:
    """Measure how many bytes this rank receives over gloo while the block runs.

    Returns:
        A context manager that yields a dict, which is filled when the block ends: bytes received, by sending rank. Besides the
        data, they include about 50 bytes per message, and the two barriers that begin and end the measurement. NCCL's traffic is
        not counted.

    Raises:
        OSError: The system does not count bytes; see `can_measure_links`.

    Ranks: collective, over all ranks, even if the block is not.
    Blocks: until every rank has begun and ended its block.
    """
    if not can_measure_links():
        raise OSError("only Linux counts the bytes of a connection")
    by_rank: dict[int, int] = {}
    dist.barrier()
    before = _received()
    # No rank may send before every rank has read its counts.
    dist.barrier()
    yield by_rank
    dist.barrier()
    after = _received()
    dist.barrier()
    ends: list[list[_Address]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(ends, [own for own, _ in after])
    owner = {own: rank for rank, mine in enumerate(ends) for own in mine}
    came: Counter[int] = Counter()
    for (own, other), size_bytes in after.items():
        # The other connections lead to the store and the notebook.
        if other in owner:
            came[owner[other]] += size_bytes - before.get((own, other), 0)
    by_rank.update(sorted(came.items()))


def _received() -> dict[tuple[_Address, _Address], int]:
    """Return the bytes received so far for every TCP connection of this process, by the addresses of both ends."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=int(name))
        except OSError:  # not a socket, or since closed
            continue
        try:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED_AT + 8)
                if info[0] == _ESTABLISHED:
                    ends = (connection.getsockname()[:2], connection.getpeername()[:2])
                    found[ends] = int(struct.unpack_from("Q", info, _BYTES_RECEIVED_AT)[0])
        except OSError:  # the other end has since closed
            continue
        finally:
            connection.detach()  # the descriptor belongs to other code: do not close it
    return found
