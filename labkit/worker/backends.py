"""The one place that touches torch's private process-group machinery.

A :class:`torch.distributed.ProcessGroup` is a shell around one backend per device type. Everything that uses a group
(DeviceMesh, DTensor, FSDP, DDP's reducer, functional collectives, a user's own variable) holds the shell. So after an
abort labkit puts new backends into the same shells, and whatever stood on the old ones goes on without noticing.

``ProcessGroup._register_backend`` keeps the first backend of each BackendType, so each new generation registers under a
BackendType number of its own. The numbers are 8 bit; what torch itself uses lies below FIRST_TYPE.

:func:`self_test` checks every assumption made here; it runs in the test suite against each supported torch.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

FIRST_TYPE = 32
LAST_TYPE = 255


class NoMoreGenerationsError(RuntimeError):
    """This process has used up the backend numbers; only a new process can form new groups."""


def groups() -> list[Any]:
    """The process groups this rank is a member of, in the order they were made; the default group first."""
    return [group for group in c10d._world.pg_map if group is not dist.GroupMember.NON_GROUP_MEMBER]


def group_name(group: Any) -> str:
    """The name under which meshes and functional collectives find the group; equal on all its ranks."""
    return str(c10d._world.pg_names[group])


def group_ranks(group: Any) -> tuple[int, ...]:
    """The group's global ranks in group order."""
    return tuple(sorted(c10d._world.pg_group_ranks[group], key=c10d._world.pg_group_ranks[group].__getitem__))


def group_count() -> int:
    """torch's counter for the names of new groups. It must be equal on all ranks before the next new group."""
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
    group_store = dist.PrefixStore(f"{name}/", store)
    for offset, (device, backend_name) in enumerate(config.get_device_backend_map().items()):
        backend = _make_backend(group, backend_name, dist.PrefixStore(f"{device}/", group_store), timeout)
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType(number + offset), backend)
    c10d._world.pg_map[group] = (c10d._world.pg_map[group][0], group_store)


def _make_backend(group: Any, backend_name: str, store: Any, timeout: timedelta) -> Any:
    rank, size = group.rank(), group.size()
    if backend_name == dist.Backend.GLOO:
        backend = c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
        backend.options.global_ranks_in_group = list(group_ranks(group))
        backend.options.group_name = group_name(group)
    elif backend_name == dist.Backend.NCCL:
        options = c10d.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = False
        options._timeout = timeout
        options.global_ranks_in_group = list(group_ranks(group))
        options.group_name = group_name(group)
        backend = c10d.ProcessGroupNCCL(store, rank, size, options)
    else:
        raise RuntimeError(f"a process group with backend {backend_name!r} cannot be rebuilt after an interrupt")
    backend._set_sequence_number_for_group()
    if dist.get_debug_level() == dist.DebugLevel.DETAIL and c10d._GLOO_AVAILABLE:
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


def cut_gloo(keep: frozenset[int] = frozenset()) -> int:
    """Shut down the connected sockets of gloo, which frees a thread that waits in a gloo collective within milliseconds.

    No call that torch offers does this: abort, destroy and signals all wait for the group's time-out. Gloo's sockets
    are the connected TCP sockets of this process between addresses of this machine, except those that belong to Python
    objects. Listening sockets are left alone: shutting gloo's listener down ends the process.

    Args:
        keep: File descriptors to leave alone.

    Returns:
        The number of sockets shut down.
    """
    count = 0
    for fd in _tcp_sockets():
        if fd in keep:
            continue
        try:
            duplicate = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue
        with duplicate:
            try:
                if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                if duplicate.getpeername()[0] != duplicate.getsockname()[0]:
                    continue
                duplicate.shutdown(socket.SHUT_RDWR)
                count += 1
            except OSError:
                continue
    return count


def _tcp_sockets() -> Iterator[int]:
    owned = _python_sockets()
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    for name in os.listdir(folder):
        fd = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode) or fd in owned:
                continue
            probe = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue
        with probe:
            if probe.family in (socket.AF_INET, socket.AF_INET6) and probe.type == socket.SOCK_STREAM:
                yield fd


def _python_sockets() -> set[int]:
    import gc

    owned = set()
    for item in gc.get_objects():
        # type() and not isinstance(): a lazy proxy object may run code of its own when asked for its class.
        if issubclass(type(item), socket.socket):
            owned.add(item.fileno())
    return owned
