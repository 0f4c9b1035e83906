"""Measure what gloo really sends: the bytes that the kernel has counted on this rank's sockets, by the rank at the other end.

Linux keeps a count of received bytes with every TCP connection (``tcpi_bytes_received`` of ``TCP_INFO``, see tcp(7)). gloo opens
one connection for each pair of ranks in each process group, so these counts say which rank's bytes came to which.
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
    """Whether this system says how much a TCP connection has carried; Linux does. Ranks: local."""
    return sys.platform == "linux" and hasattr(socket, "TCP_INFO")


@contextmanager
def measure_links() -> Iterator[dict[int, int]]:
    """Measure what comes to this rank over gloo while the block runs.

    Returns:
        A context manager that gives a dict. When the block has ended it holds, by sending rank, the bytes that have come from it:
        the data, about 50 bytes for each message, and the two barriers with which the measurement begins and ends. What NCCL sends
        is not in it.

    Raises:
        OSError: The system does not count; see `can_measure_links`.

    Ranks: collective, over all ranks, also where the block is not.
    Blocks: until every rank has begun and ended its block.
    """
    if not can_measure_links():
        raise OSError("only Linux says how many bytes a connection has carried")
    by_rank: dict[int, int] = {}
    dist.barrier()
    before = _received()
    # Nobody sends before all have looked.
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
        # The store and the notebook are at the end of other connections.
        if other in owner:
            came[owner[other]] += size_bytes - before.get((own, other), 0)
    by_rank.update(sorted(came.items()))


def _received() -> dict[tuple[_Address, _Address], int]:
    """Bytes received so far, by the addresses of both ends, for every TCP connection of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=int(name))
        except OSError:  # no socket, or closed meanwhile
            continue
        try:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED_AT + 8)
                if info[0] == _ESTABLISHED:
                    ends = (connection.getsockname()[:2], connection.getpeername()[:2])
                    found[ends] = int(struct.unpack_from("Q", info, _BYTES_RECEIVED_AT)[0])
        except OSError:  # the other end has gone meanwhile
            continue
        finally:
            connection.detach()  # it is not ours to close
    return found
