"""Frees the main thread where torch offers no way out: gloo, its file store, data loaders that wait for their workers."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import stat
import sys
from collections.abc import Set


def cut_gloo(known: Set[tuple[int, int]]) -> int:
    """Shut down the connected sockets of gloo, which frees a thread that waits in a gloo collective within milliseconds.

    No call that torch offers does this: abort, destroy and signals all wait for the group's time-out. Gloo's sockets
    are the connected TCP sockets of this process between addresses of this machine, except those that belong to Python
    objects. Listening sockets are left alone: shutting gloo's listener down ends the process.

    Args:
        known: Sockets that are gloo's without doubt, from :func:`peer_sockets` around the forming of a group. Others
            (of groups made later) are cut after a search for Python's own sockets, which takes some 50 ms.

    Returns:
        The number of sockets shut down.
    """
    present = peer_sockets()
    doubtful = present - known
    owned = _python_sockets() if doubtful else set()
    count = 0
    for fd, inode in present:
        if (fd, inode) in doubtful and fd in owned:
            continue
        with contextlib.suppress(OSError), _duplicate(fd) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def cut_store(path: str) -> None:
    """Free a thread that waits in a FileStore for another rank, as ``new_group`` does, within some 10 ms.

    Torch looks at the file again and again and cannot be told to stop. It raises when the file cannot be opened for
    another reason than that it is not there yet, and a link to itself cannot. The store is of no use afterwards.

    Args:
        path: The file.
    """
    link = f"{path}.{os.getpid()}"
    with contextlib.suppress(OSError):
        os.symlink(os.path.basename(path), link)
        os.replace(link, path)


def hurry_data_loaders(hurry: bool) -> None:
    """Let a DataLoader that is thrown away end its busy workers within 50 ms each, and not wait 5 s for them first.

    It happens when the frames of an interrupted loop go, in the middle of whatever runs then.

    Args:
        hurry: False restores torch's own patience.
    """
    loading = sys.modules.get("torch.utils.data._utils")
    if loading is not None:
        loading.MP_STATUS_CHECK_INTERVAL = 0.05 if hurry else 5.0  # type: ignore[attr-defined]


def peer_sockets() -> set[tuple[int, int]]:
    """Connected TCP sockets of this process between addresses of this machine, as (descriptor, inode)."""
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    found = set()
    for name in os.listdir(folder):
        fd = int(name)
        with contextlib.suppress(OSError):
            status = os.fstat(fd)
            if stat.S_ISSOCK(status.st_mode) and _is_peer(fd):
                found.add((fd, status.st_ino))
    return found


def _is_peer(fd: int) -> bool:
    with _duplicate(fd) as probe:
        if probe.family not in (socket.AF_INET, socket.AF_INET6) or probe.type != socket.SOCK_STREAM:
            return False
        if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        return bool(probe.getpeername()[0] == probe.getsockname()[0])


def _duplicate(fd: int) -> socket.socket:
    return socket.socket(fileno=os.dup(fd))


def _python_sockets() -> set[int]:
    # type() and not isinstance(): a lazy proxy object may run code of its own when asked for its class.
    return {item.fileno() for item in gc.get_objects() if issubclass(type(item), socket.socket)}
