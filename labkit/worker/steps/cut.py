"""Ways to free the main thread where torch offers none: from gloo, its file store, and data loaders that wait for their workers."""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import multiprocessing
import os
import socket
import stat
import sys
import termios
import time
from collections.abc import Callable, Iterable, Set
from typing import Any

# Data on the way between two ranks gets this time to arrive.
QUIET_WITHIN_S = 0.2
_QUIET_CHECK_S = 0.005


def cut_gloo(
    known: Set[tuple[int, int]], hosts: Set[str] = frozenset(), *, except_ports: Set[int] = frozenset()
) -> list[socket.socket]:
    """End every connection of gloo. This frees a thread that waits in a gloo collective, within milliseconds.

    No call that torch offers does this: abort, destroy and signals all wait for the group's time-out. Gloo's sockets are the
    connected TCP sockets of this process to addresses of the pool's machines, except those that belong to Python objects. Listening
    sockets are left alone: shutting down gloo's listener ends the process.

    Two precautions are needed because of a flaw in gloo (transport/tcp/pair.cc, signalException): when a connection fails, a thread
    that waits for the end of a started send is not notified and waits on. So nothing is cut while data is on its way, and only the
    reading side is shut down. Gloo then sees an end of file, while sends of this rank and of its peers, who may be cut later, still
    succeed. For the same reason the connections stay open.

    Args:
        known: Sockets that certainly belong to gloo, from :func:`peer_sockets` before and after a group was formed. Others (of
            groups made later) are cut after a search for Python's own sockets, which takes about 50 ms.
        hosts: Addresses of the pool's other machines.
        except_ports: The ports of the stores through which the ranks have met.

    Returns:
        The sockets that were shut down. Close them when every rank has done the same.
    """
    present = peer_sockets(hosts, except_ports=except_ports)
    owned = _python_sockets() if present - known else set()
    found = []
    for fd, inode in present:
        if (fd, inode) in known or fd not in owned:
            with contextlib.suppress(OSError):
                found.append(_duplicate(fd))
    deadline = time.monotonic() + QUIET_WITHIN_S
    while not (_quiet(found) and _quiet(found)) and time.monotonic() < deadline:
        pass
    for item in found:
        with contextlib.suppress(OSError):
            item.shutdown(socket.SHUT_RD)
    return found


def _quiet(sockets: Iterable[socket.socket]) -> bool:
    """Return whether, after a moment, everything sent has arrived and everything that arrived has been read."""
    time.sleep(_QUIET_CHECK_S)
    return not any(_queued(item, request) for item in sockets for request in (termios.TIOCOUTQ, termios.FIONREAD))


def _queued(item: socket.socket, request: int) -> int:
    answer = array.array("i", [0])
    with contextlib.suppress(OSError):
        fcntl.ioctl(item.fileno(), request, answer)
    return answer[0]


def cut_store(store: str) -> None:
    """Free a thread that waits for another rank in a store, as ``new_group`` does. Takes about 10 ms.

    A TCPStore's connection is shut down. A FileStore opens its file again and again and cannot be told to stop. It raises if
    opening fails for any other reason than that the file does not exist yet, so the file is replaced by a link to itself. The store
    cannot be used afterwards.

    Args:
        store: The file's path, or ``tcp://host:port/...``.
    """
    if store.startswith("tcp://"):
        port = store_port(store)
        for fd, _ in _sockets(lambda own, peer: peer[1] == port):
            with contextlib.suppress(OSError), _duplicate(fd) as found:
                found.shutdown(socket.SHUT_RDWR)
        return
    link = f"{store}.{os.getpid()}"
    with contextlib.suppress(OSError):
        os.symlink(os.path.basename(store), link)
        os.replace(link, store)


def store_port(store: str) -> int:
    """Return the port in ``tcp://host:port/...``; 0 for a path."""
    return int(store.removeprefix("tcp://").partition("/")[0].rpartition(":")[2]) if store.startswith("tcp://") else 0


def hurry_data_loaders(hurry: bool) -> None:
    """Make a discarded DataLoader end each busy worker within 50 ms, instead of waiting 5 s for it first.

    A DataLoader is discarded when the frames of an interrupted loop are freed, in the middle of whatever runs then.

    Args:
        hurry: False restores torch's own time.
    """
    loading = sys.modules.get("torch.utils.data._utils")
    if loading is not None:
        loading.MP_STATUS_CHECK_INTERVAL = 0.05 if hurry else 5.0  # type: ignore[attr-defined]


def collect_children() -> None:
    """Collect child processes that have ended: a DataLoader ends slow workers without waiting for them."""
    multiprocessing.active_children()


def peer_sockets(hosts: Set[str] = frozenset(), *, except_ports: Set[int] = frozenset()) -> set[tuple[int, int]]:
    """Return this process's connected TCP sockets between addresses of this machine or to ``hosts``, as (descriptor, inode)."""
    return _sockets(lambda own, peer: peer[1] not in except_ports and (peer[0] == own[0] or peer[0] in hosts))


def connected_sockets(*, except_ports: Set[int]) -> set[tuple[int, int]]:
    """Return all connected TCP sockets of this process except those to some ports, as (descriptor, inode)."""
    return _sockets(lambda own, peer: peer[1] not in except_ports)


def peer_hosts(sockets: Iterable[tuple[int, int]]) -> set[str]:
    """Return the addresses at the other end of these sockets."""
    found = set()
    for fd, _ in sockets:
        with contextlib.suppress(OSError), _duplicate(fd) as probe:
            found.add(str(probe.getpeername()[0]))
    return found


def _sockets(wanted: Callable[[Any, Any], bool]) -> set[tuple[int, int]]:
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    found = set()
    for name in os.listdir(folder):
        fd = int(name)
        with contextlib.suppress(OSError):
            status = os.fstat(fd)
            if stat.S_ISSOCK(status.st_mode) and (ends := _ends(fd)) is not None and wanted(*ends):
                found.add((fd, status.st_ino))
    return found


def _ends(fd: int) -> tuple[Any, Any] | None:
    """Return the addresses of a connected TCP socket, its own and its peer's; None for any other socket."""
    with _duplicate(fd) as probe:
        if probe.family not in (socket.AF_INET, socket.AF_INET6) or probe.type != socket.SOCK_STREAM:
            return None
        if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return None
        return probe.getsockname(), probe.getpeername()


def _duplicate(fd: int) -> socket.socket:
    return socket.socket(fileno=os.dup(fd))


def _python_sockets() -> set[int]:
    # Use type() and not isinstance(): a lazy proxy object may run its own code when asked for its class.
    return {item.fileno() for item in gc.get_objects() if issubclass(type(item), socket.socket)}
