"""Replacement of a process group's backends: the only module that touches torch's private process-group machinery.

A :class:`torch.distributed.ProcessGroup` is a shell around one backend per device type. Everything that uses a group (DeviceMesh,
DTensor, FSDP, DDP's reducer, functional collectives, a user's own variable) holds the shell. So after an abort labkit puts new
backends into the same shells, and their users go on without noticing.

``ProcessGroup._register_backend`` keeps the first backend of each BackendType, so each new backend registers under its own
BackendType number. The numbers have 8 bits; torch itself uses those below FIRST_TYPE. A group never releases an old backend either:
each replacement leaves two idle gloo threads and no descriptors. (All replacements share the transport's thread.) The remains of
NCCL backends have not been measured.

:func:`labkit.worker.mend.self_test.groups` checks every assumption made here, with each supported torch.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pickle
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d as c10d

from labkit.worker.groups import loopback_peers

_native: Any = _distributed_c10d  # its stubs leave out some names used here

FIRST_TYPE = 32
LAST_TYPE = 255
# An abort took 0.5 s on 2 H200.
ABORT_S = 3.0

# Backends that never wait for another rank.
_ALONE = ("fake",)
_REBUILT = ("gloo", "nccl")

# Methods of a ProcessGroup with which other code reaches other ranks, by their names in torch 2.11 to 2.13.
_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "monitored_barrier", "gather", "scatter"),
    *("allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single", "send", "recv", "recv_anysource"),
)

_CUT_OFF = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Application timeout caused pair closure",
    "NCCL communicator was aborted",
    "NCCL communicator encountered error set by ProcessGroupNCCL",
    os.strerror(errno.ELOOP),  # a FileStore, see labkit.worker.steps.cut.cut_store
    "Connection was likely closed",  # a TCPStore
)


_rank_not_in_group: Callable[[Any], bool] = c10d._rank_not_in_group
# By name, together with the group itself: a later group may have the same name.
_broken: dict[str, tuple[Any, str]] = {}
_stand_ins: dict[str, Any] = {}
_next_type: dict[str, int] = {}
_registered = [0]
_counted: list[Any] = [None, []]


class NoMoreGenerationsError(RuntimeError):
    """This process has used up the backend numbers. Only a new process can form new groups."""


def groups() -> list[Any]:
    """Return the working process groups this rank is a member of, in the order they were made; the default group first."""
    members: list[Any] = list(c10d._world.pg_map)
    return [group for group in members if group is not dist.GroupMember.NON_GROUP_MEMBER and not _reason(group)]


def group_name(group: Any) -> str:
    """Return the name under which meshes and functional collectives find the group; it is equal on all its ranks."""
    return str(c10d._world.pg_names[group])


def group_ranks(group: Any) -> tuple[int, ...]:
    """Return the group's global ranks in group order."""
    return tuple(sorted(c10d._world.pg_group_ranks[group], key=c10d._world.pg_group_ranks[group].__getitem__))


def group_count() -> int:
    """Return torch's counter for the names of new groups. It must be equal on all ranks before the next new group."""
    return int(c10d._world.group_count)


def set_group_count(count: int) -> None:
    """Set torch's counter for the names of new groups."""
    c10d._world.group_count = count


def _device_backends(group: Any) -> dict[str, str]:
    """Return the backend name by device type, for example ``{"cpu": "gloo", "cuda": "nccl"}``."""
    return _parse_config(c10d._world.pg_backend_config[group])


@functools.cache
def _parse_config(config: str) -> dict[str, str]:
    return dict(c10d.BackendConfig(dist.Backend(config)).get_device_backend_map())


def obstacle(group: Any) -> str:
    """Return why :func:`replace_backends` cannot serve this group; empty if it can."""
    unknown = sorted(name for name in _device_backends(group).values() if name not in (*_REBUILT, *_ALONE))
    return f"labkit does not know its backend {unknown[0]!r}" if unknown else ""


def sequence(group: Any) -> tuple[int, ...]:
    """Return the number of collectives begun on the group so far, per backend; gloo counts sends and receives as well."""
    # Ask the backends: the group itself would ask its first backend, which is the old one after a replacement.
    return tuple(backend._get_sequence_number_for_group() for backend in _rebuilt(group))


def _rebuilt(group: Any) -> list[Any]:
    """Return the group's present backends, as far as they can be rebuilt."""
    return [group._get_backend(torch.device(devices[0])) for name, devices in _backends(group) if name in _REBUILT]


def _backends(group: Any) -> list[tuple[str, list[str]]]:
    """Return each backend's name with its devices. As in torch, one backend serves all devices if they all name the same one."""
    devices = _device_backends(group)
    names = set(devices.values())
    return [(names.pop(), list(devices))] if len(names) == 1 else [(name, [device]) for device, name in devices.items()]


class BegunOperations(NamedTuple):
    """The operations begun on this rank's groups so far. Two of these are equal if nothing was begun between them.

    Attributes:
        groups: A key that identifies the present groups and their backends.
        group_count: Torch's counter for the names of new groups.
        counts: Number of collectives and messages begun on each backend.
    """

    groups: tuple[int, ...]
    group_count: int
    counts: tuple[int, ...]


def progress() -> BegunOperations:
    """Return the operations begun so far. Takes a few microseconds."""
    key = (*map(id, c10d._world.pg_map), _registered[0])
    if _counted[0] != key:
        _counted[:] = [key, [(group_name(group), backend) for group in groups() for backend in _rebuilt(group)]]
    counts = [backend._get_sequence_number_for_group() for _, backend in _counted[1]]
    return BegunOperations(key, c10d._world.group_count, tuple(counts))


def begun_since(before: BegunOperations) -> dict[str, int]:
    """Return how many collectives and messages were begun on each group since then, or in all if groups have changed."""
    now = progress()
    earlier = before.counts if before.groups == now.groups else (0,) * len(now.counts)
    begun: dict[str, int] = {}
    for (name, _), count, then in zip(_counted[1], now.counts, earlier, strict=True):
        begun[name] = begun.get(name, 0) + count - then
    return begun


def waiting() -> bool:
    """Return whether a collective that this rank began has not ended; False if torch keeps no record."""
    record = pickle.loads(_native._dump_fr_trace(True, False, True))
    return any(not entry.get("retired") and entry.get("state") != "completed" for entry in record.get("entries", ()))


def replace_backends(group: Any, store: Any, timeout: timedelta) -> None:
    """Put new backends into a group. Collective over the group's ranks. Blocks until all of them have joined.

    Args:
        group: The ProcessGroup.
        store: A store that only this replacement uses.
        timeout: The new backends' own limit for one collective.

    Raises:
        NoMoreGenerationsError: The group was replaced 224 times, or 112 times if it has two backends.
        RuntimeError: The group has a backend that labkit does not know how to make.
    """
    name = group_name(group)
    group_store = c10d.PrefixStore(f"{name}/", store)
    for backend_name, devices in _backends(group):
        if backend_name not in _ALONE:
            backend = _make_backend(group, backend_name, c10d.PrefixStore(f"{devices[0]}/", group_store), timeout)
            _register(group, devices, backend)
            if backend_name == dist.Backend.NCCL and group.bound_device_id is not None:
                # As torch does for the first backend; otherwise sends and receives would make their own communicators.
                backend.eager_connect_single_device(group.bound_device_id)
    # Set the name again, for the new backends: the flight recorder files their collectives under the group's name.
    group._set_group_name(name)
    group._set_group_desc(group.group_desc)
    c10d._world.pg_map[group] = (c10d._world.pg_map[group][0], group_store)


def _register(group: Any, devices: Iterable[str], backend: Any) -> None:
    number = _next_type.get(group_name(group), FIRST_TYPE)
    if number > LAST_TYPE:
        raise NoMoreGenerationsError("this rank's process groups were rebuilt too often; pool.restart() gives new processes")
    _next_type[group_name(group)] = number + 1
    _registered[0] += 1
    for device in devices:
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType(number), backend)


def _make_backend(group: Any, backend_name: str, store: Any, timeout: timedelta) -> Any:
    rank, size = group.rank(), group.size()
    backend: Any
    if backend_name == dist.Backend.GLOO:
        options = _native.ProcessGroupGloo._Options()
        options._devices = [_gloo_device()]
        options._timeout = timeout
        options.global_ranks_in_group = list(group_ranks(group))
        options.group_name = c10d._world.pg_names[group]
        backend = c10d.ProcessGroupGloo(store, rank, size, options)
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


@functools.cache
def _gloo_device() -> Any:
    """Return one transport for all replacements. A transport has a thread and three descriptors, which are never released."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return loopback_peers.create_device(interface)


def break_group(group: Any, reason: str) -> None:
    """Make every collective on a group raise from now on, instead of waiting for ranks that do not know the group.

    Torch's functions, functional collectives and DTensors raise ``RuntimeError(reason)``. For a caller in C++ that holds the group
    itself, such as DDP's reducer, the backend raises another RuntimeError.

    Args:
        group: The ProcessGroup.
        reason: The text of the error.
    """
    options = _native.FakeProcessGroup.Options()
    options.error_on_collective = True
    _register(group, _device_backends(group), _native.FakeProcessGroup._create_internal(group.rank(), group.size(), options))
    name = group_name(group)
    group._set_group_name(name)
    _broken[name] = group, reason
    # Functional collectives and meshes find a group by its name.
    _stand_ins[name] = stand_in = _RefusingGroup(group.rank(), group.size())  # type: ignore[call-arg]
    stand_in.reason = reason
    _native._unregister_process_group(name)
    _native._register_process_group(name, stand_in)
    # Otherwise a new group with the same tag and ranks would be this one. torch's own destroy allows for its absence here.
    for tagged in c10d._world.tags_to_pg.values():
        with contextlib.suppress(ValueError):
            tagged.remove(group)
    if c10d._rank_not_in_group is not _check_group:
        c10d._rank_not_in_group = _check_group


class _RefusingGroup(dist.ProcessGroup):
    """A group that raises in every collective."""

    reason = ""


def _refuse(group: _RefusingGroup, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(group.reason)


for _collective in _COLLECTIVES:
    setattr(_RefusingGroup, _collective, _refuse)


def _check_group(group: Any) -> bool:
    """Raise for a broken group. This replaces the function that every collective of torch.distributed calls first."""
    if group is not None and group in c10d._world.pg_names and (reason := _reason(group)):
        raise RuntimeError(reason)
    return _rank_not_in_group(group)


def _reason(group: Any) -> str:
    """Return why a group is broken; empty if it is not."""
    broken, reason = _broken.get(group_name(group), (None, ""))
    return reason if broken is group else ""


def abort_nccl() -> int:
    """Abort the NCCL communicators of all groups. Safe from any thread. Took 0.5 s on 2 H200 with NCCL 2.28.

    Returns:
        The number of communicators aborted.
    """
    if not (dist.is_available() and dist.is_nccl_available()):
        return 0
    backends = [backend for group in groups() if (backend := _nccl_backend(group)) is not None]
    if not backends:
        return 0
    # Use a thread for each: the abort of an idle communicator waits until the kernel of the stuck one has ended, and it is not
    # known which is stuck. If all are aborted in one NCCL group or one after the other, the order decides whether this hangs.
    threads = [threading.Thread(target=backend.abort, name="labkit-abort", daemon=True) for backend in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ABORT_S)
    return len(backends)


def _nccl_backend(group: Any) -> Any:
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return None
    return backend if isinstance(backend, c10d.ProcessGroupNCCL) else None


def is_cut_off(error: BaseException) -> bool:
    """Return whether an error only says that another rank has left a collective, by dying, failing or being freed."""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return any(part in text for part in _CUT_OFF)
