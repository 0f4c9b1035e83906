"""The one place that touches torch's private process-group machinery.

A :class:`torch.distributed.ProcessGroup` is a shell around one backend per device type. Everything that uses a group
(DeviceMesh, DTensor, FSDP, DDP's reducer, functional collectives, a user's own variable) holds the shell. So after an
abort labkit puts new backends into the same shells, and whatever stood on the old ones goes on without noticing.

``ProcessGroup._register_backend`` keeps the first backend of each BackendType, so each new generation registers under a
BackendType number of its own. The numbers are 8 bit; what torch itself uses lies below FIRST_TYPE.

:func:`self_test` checks every assumption made here; it runs in the test suite against each supported torch.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import stat
from collections.abc import Set
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

FIRST_TYPE = 32
LAST_TYPE = 255

_CUT_OFF = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Application timeout caused pair closure",
    "NCCL communicator was aborted",
    "NCCL communicator encountered error set by ProcessGroupNCCL",
)


class NoMoreGenerationsError(RuntimeError):
    """This process has used up the backend numbers; only a new process can form new groups."""


def groups() -> list[Any]:
    """The process groups this rank is a member of, in the order they were made; the default group first."""
    members: list[Any] = list(c10d._world.pg_map)
    return [group for group in members if group is not dist.GroupMember.NON_GROUP_MEMBER]


def group_name(group: Any) -> str:
    """The name under which meshes and functional collectives find the group; equal on all its ranks."""
    return str(c10d._world.pg_names[group])


def group_ranks(group: Any) -> tuple[int, ...]:
    """The group's global ranks in group order."""
    return tuple(sorted(c10d._world.pg_group_ranks[group], key=c10d._world.pg_group_ranks[group].__getitem__))


def group_count() -> int:
    """Torch's counter for the names of new groups. It must be equal on all ranks before the next new group."""
    return int(c10d._world.group_count)


def set_group_count(count: int) -> None:
    """Set torch's counter for the names of new groups."""
    c10d._world.group_count = count


def backend_devices(group: Any) -> list[str]:
    """The device types the group has a backend for, for example ``["cpu", "cuda"]``."""
    config = c10d.BackendConfig(dist.Backend(c10d._world.pg_backend_config[group]))
    return list(config.get_device_backend_map())


def replace_backends(group: Any, store: Any, generation: int, timeout: timedelta) -> None:
    """Put new backends into a group. Collective over the group's ranks; blocks until all of them are there.

    Args:
        group: The ProcessGroup.
        store: A store that only this generation uses.
        generation: 1 for the first replacement, then counting up; equal on all ranks.
        timeout: The new backends' own limit for one collective.

    Raises:
        NoMoreGenerationsError: After about 220 replacements in one process.
        RuntimeError: The group has a backend that labkit does not know how to make.
    """
    number = FIRST_TYPE + generation * 2
    if number + 1 > LAST_TYPE:
        raise NoMoreGenerationsError("this rank's process groups were rebuilt too often; pool.restart() gives new processes")
    name = group_name(group)
    config = c10d.BackendConfig(dist.Backend(c10d._world.pg_backend_config[group]))
    group_store = c10d.PrefixStore(f"{name}/", store)
    for offset, (device, backend_name) in enumerate(config.get_device_backend_map().items()):
        backend = _make_backend(group, backend_name, c10d.PrefixStore(f"{device}/", group_store), timeout)
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType(number + offset), backend)
    # Again, so that the new backends know it: the flight recorder files their collectives under the group's name.
    group._set_group_name(name)
    group._set_group_desc(group.group_desc)
    c10d._world.pg_map[group] = (c10d._world.pg_map[group][0], group_store)


def _make_backend(group: Any, backend_name: str, store: Any, timeout: timedelta) -> Any:
    rank, size = group.rank(), group.size()
    backend: Any
    if backend_name == dist.Backend.GLOO:
        backend = c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
        backend.options.global_ranks_in_group = list(group_ranks(group))
        backend.options.group_name = c10d._world.pg_names[group]
    elif backend_name == dist.Backend.NCCL:
        options = c10d.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = False
        options._timeout = timeout
        options.global_ranks_in_group = list(group_ranks(group))
        options.group_name = c10d._world.pg_names[group]
        backend = c10d.ProcessGroupNCCL(store, rank, size, options)
    else:
        raise RuntimeError(f"a process group with backend {backend_name!r} cannot be rebuilt after an interrupt")
    backend._set_sequence_number_for_group()
    if c10d.get_debug_level() == c10d.DebugLevel.DETAIL and c10d._GLOO_AVAILABLE:
        backend = c10d._create_process_group_wrapper(
            wrapped_pg=backend, store_prefix=group_name(group), store=store, rank=rank, world_size=size, timeout=timeout
        )
    return backend


def abort_nccl() -> int:
    """Abort the NCCL communicators of all groups. Safe from any thread; took 0.5 s on 2 H200 with NCCL 2.28.

    Returns:
        The number of communicators aborted.
    """
    if not (dist.is_available() and dist.is_nccl_available()):
        return 0
    backends = [backend for group in groups() if (backend := _nccl_backend(group)) is not None]
    if not backends:
        return 0
    # One NCCL group around all aborts, as torch does it: separate aborts can wait for each other.
    backends[0]._group_start()
    for backend in reversed(backends):
        backend.abort()
    backends[0]._group_end()
    return len(backends)


def _nccl_backend(group: Any) -> Any:
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return None
    return backend if isinstance(backend, c10d.ProcessGroupNCCL) else None


def is_cut_off(error: BaseException) -> bool:
    """Whether an error only says that another rank has left a collective, by dying, failing or being freed."""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return any(part in text for part in _CUT_OFF)


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
