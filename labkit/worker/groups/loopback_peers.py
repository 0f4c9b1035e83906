"""Keeps other users of this machine out of the connections of gloo. Linux only; elsewhere gloo stays as torch makes it.

A gloo device listens on a port and asks nobody who connects for a key. A neighbour finds the port in ``/proc/net/tcp``, and who
sends a rank's number first is that rank. Two things are done about it, around the making of each gloo backend:

- **Look.** A backend is of use when it is connected with each of its peers. Before anything is sent, the kernel is asked who holds
  the other end of each connection that was made meanwhile. Another user's ends the making with a StrangerError, when the other
  ranks have made their connections too. One that nobody holds any more is cut: gloo says so when the group is used. An end
  on another machine is not known: the network is trusted.
- **Close the door.** Nobody has any business at the listener of a group that is complete. A filter that drops every packet is
  attached to it, so that strangers take up no descriptor. A connection has the filter that its listener had when it was made, so
  those of the group have none. Where torch makes another group on the same device (a split, labkit's rebuilding of groups),
  the door is open meanwhile.

Which listener is gloo's: labkit makes the device itself, as torch would, and compares this process's descriptors before and after.
It is the listening socket on a new descriptor that stands in an epoll on a new descriptor, under another value than its own
number: gloo has a pointer there, Python's ``select.epoll`` and ``asyncio`` have the number. What another thread opens then
is so told apart, unless it is native code that does as gloo does (a gRPC server); then the device is made again, three times at
most, and if there are always two such listeners that group stays as torch makes it. A store's listener is in no device's epoll.
The connections of a group are those in the same epoll that have not been looked at before.

Where this ends: devices that the reader's code makes itself and passes to ``ProcessGroupGloo`` are left alone, and so are groups
with ``enable_reconfigure=True`` (torch 2.14 and newer), which connect later. Who is let in by a
program of the reader's that connects for anybody (``ssh -D``) has the reader's uid. While a group is being made a neighbour
can still end it, and a rank with it: he can send gloo nonsense, or take up all descriptors. The limit of open files is not
raised against this: all that a cell starts inherits it, programs that use ``select()`` or close every possible descriptor
among them, the neighbour may have as many, and a rank should have the limits that it has under torchrun. TORCH_GLOO_LAZY_INIT
has no effect here: gloo would connect when something is sent, and nobody could look before.

In a user namespace that has no number for this user, the kernel calls him and every stranger the same (``socket_ends.is_ours``).
Then a peer is this user's when a process that he may look into holds its end; where ``/proc`` shows no such process, as with
processes of another PID namespace, it is taken for a stranger's, and the group is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d as c10d

from labkit.errors import StrangerError
from labkit.worker.groups import socket_ends

_native: Any = _distributed_c10d  # its stubs leave out what is used here
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # the socket module has no names for these
_RETURN_0 = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0), 8)
_DROP_ALL = struct.pack("HP", 1, ctypes.addressof(_RETURN_0))

# A connection that has arrived belongs to nobody until gloo's thread takes it; on a busy machine that thread has to wait.
TAKEN_WITHIN_S = 20.0
_ARRIVING = (1, 3)  # established, and the moment before
_LOOK_AGAIN_S = 0.002
_LOOKS_FOR_AN_END = 5  # a table that changes while it is read may come with a line missing
_TRIES = 3  # another thread may close a descriptor in the moment in which a device is made, and the device get it


class _Loop(NamedTuple):
    """A gloo device as the kernel shows it: the descriptors of its epoll and its listening socket, and that socket's number."""

    epoll: int
    listener: int
    inode: int


_making = threading.Lock()
_closed: dict[_Loop, set[int]] = {}  # of groups that are complete, and what in their epolls has been looked at
_shared: dict[int, tuple[Any, list[_Loop]]] = {}
_native_init: Any = None


def install() -> None:
    """Look at the peers of each gloo backend that is made in this process from now on."""
    global _native_init
    if sys.platform != "linux" or not c10d.is_gloo_available() or _native_init is not None:
        return
    factory: Any = c10d.ProcessGroupGloo
    _native_init = factory.__init__
    factory.__init__ = _init
    for name in ("split_group", "merge_remote_group"):
        setattr(c10d.ProcessGroup, name, _on_known_devices(getattr(c10d.ProcessGroup, name)))


def create_device(interface: str = "") -> Any:
    """Make a gloo device that several backends may share; it is kept for the life of the process."""
    device, loops = _create_device(interface)
    _shared[id(device)] = device, loops
    return device


def _init(backend: Any, store: Any, rank: int, size: int, *args: Any, **more: Any) -> None:
    """Stand in for ``ProcessGroupGloo.__init__``, which takes options, or a time-out and since 2.14 ``enable_reconfigure``."""
    given = more.get("options", more.get("timeout", args[0] if args else None))
    if more.get("enable_reconfigure") or any(args[1:]):  # such a backend connects later, when it is told its peers
        _native_init(backend, store, rank, size, *args, **more)
        return
    if isinstance(given, _native.ProcessGroupGloo._Options):
        options, loops = given, [loop for device in given._devices for loop in _shared.get(id(device), (None, []))[1]]
    else:
        options, loops = _options(given)
    try:
        with _watched(loops):
            _native_init(backend, store, rank, size, options)
            if loops:
                store.set(_connected(rank), "")
    except StrangerError:
        _await_others(store, [_connected(other) for other in range(size)], loops)
        raise


def _connected(rank: int) -> str:
    return f"labkit/connected/{rank}"


def _await_others(store: Any, keys: Sequence[str], loops: Sequence[_Loop]) -> None:
    """Let each other rank come to the end of its own connecting: one that waits in there for a connection cannot be freed."""
    with _open(loops), contextlib.suppress(RuntimeError):  # a store that was cut
        while not all(store.check([key]) for key in keys):
            time.sleep(_LOOK_AGAIN_S)


def _options(timeout: Any) -> tuple[Any, list[_Loop]]:
    """Return the options that torch chooses for a time-out: a device for each interface that is named, with two threads each."""
    options = _native.ProcessGroupGloo._Options()
    if timeout is not None:
        options._timeout = timeout
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    made = [_create_device(interface) for interface in (named.split(",") if len(named) > 1 else [""])]
    options._devices = [device for device, _ in made]
    options._threads = 2 * len(made)
    return options, [loop for _, loops in made for loop in loops]


def _on_known_devices(make: Any) -> Any:
    """Let a method that makes backends on devices that are there already find their doors open."""

    def made(*args: Any, **more: Any) -> Any:
        for loop in [loop for loop in _closed if loop.inode not in _watched_by(loop.epoll)]:
            del _closed[loop]  # its device is gone
        with _watched(list(_closed)):
            return make(*args, **more)

    return made


def _create_device(interface: str) -> tuple[Any, list[_Loop]]:
    how: dict[str, Any] = {"interface": interface} if interface else {}
    make = c10d.ProcessGroupGloo.create_device if interface else c10d.ProcessGroupGloo.create_default_device
    if sys.platform != "linux":
        return make(**how), []
    with _making:
        for _ in range(_TRIES):
            before = _descriptors()
            device = make(**how, lazy_init=False)
            loops = _loops(_descriptors() - before)
            if len(loops) == 1:
                return device, loops
    return device, []


def _descriptors() -> set[str]:
    folder = os.open("/proc/self/fd", os.O_RDONLY)
    found = set(os.listdir(folder))
    of_the_listing = os.dup(folder)
    os.close(of_the_listing)
    os.close(folder)
    return found - {str(folder), str(of_the_listing)}


@contextlib.contextmanager
def _open(loops: Sequence[_Loop]) -> Iterator[None]:
    for loop in loops:
        _set_filter(loop, _SO_DETACH_FILTER)
    try:
        yield
    finally:
        for loop in loops:
            _set_filter(loop, _SO_ATTACH_FILTER)


@contextlib.contextmanager
def _watched(loops: Sequence[_Loop]) -> Iterator[None]:
    """Open the doors while a backend is made, close them, and look who has come in. Another user is a StrangerError."""
    with _open(loops):
        yield
    for loop in loops:
        present = _watched_by(loop.epoll)
        present.pop(loop.inode, None)
        _look({inode: fd for inode, fd in present.items() if inode not in _closed.get(loop, ())}, loop)
        _closed[loop] = set(present)


def _set_filter(loop: _Loop, option: int) -> None:
    with contextlib.suppress(OSError), _duplicate(loop.listener, loop.inode) as listener:
        listener.setsockopt(socket.SOL_SOCKET, option, _DROP_ALL)


def _loops(new: set[str]) -> list[_Loop]:
    """Return the devices among new descriptors."""
    found = []
    for name in new:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                inside = _watched_by(int(name), by_pointer=True)
                found += [_Loop(int(name), fd, inode) for inode, fd in inside.items() if str(fd) in new and _listens(fd, inode)]
    return found


def _watched_by(epoll: int, *, by_pointer: bool = False) -> dict[int, int]:
    """Return the files in an epoll, as descriptor by inode: all, or only those that gloo's pointers are for."""
    found = {}
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{epoll}") as lines:
        for line in lines:
            # tfd:        6 events:       19 data:     5609a30bb8c0  pos:0 ino:a6528 sdev:9
            words = line.split()
            if words and words[0] == "tfd:" and (not by_pointer or int(words[5], 16) != int(words[1])):
                found[int(words[7].removeprefix("ino:"), 16)] = int(words[1])
    return found


def _listens(fd: int, inode: int) -> bool:
    with contextlib.suppress(OSError), _duplicate(fd, inode) as probe:
        return bool(probe.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def _duplicate(fd: int, inode: int) -> socket.socket:
    """Return a socket under a descriptor of its own, since another thread may close the old one. Another file is an OSError."""
    copy = os.dup(fd)
    status = os.fstat(copy)
    if status.st_ino == inode and stat.S_ISSOCK(status.st_mode):
        return socket.socket(fileno=copy)
    os.close(copy)
    raise OSError("another file has this descriptor by now")


def _look(connections: dict[int, int], loop: _Loop) -> None:
    deadline = time.monotonic() + TAKEN_WITHIN_S
    looks = 0
    while connections:
        looks += 1
        patient = looks < _LOOKS_FOR_AN_END, time.monotonic() < deadline
        connections = {inode: fd for inode, fd in connections.items() if not _is_settled(fd, inode, loop, *patient)}
        if connections:
            time.sleep(_LOOK_AGAIN_S)


def _is_settled(fd: int, inode: int, loop: _Loop, may_be_missing: bool, may_arrive: bool) -> bool:
    """Return whether the other end is known: nobody, this user, or another machine. Raise StrangerError for another user."""
    with contextlib.suppress(OSError), _duplicate(fd, inode) as connection:  # what is no connection any more hears nothing
        own, peer = connection.getsockname(), connection.getpeername()
        here = _is_loopback(own[0]) or _is_loopback(peer[0]) or own[0] == peer[0]
        end = socket_ends.ask(connection.family, peer, own) or (socket_ends.find(peer, own) if here else None)
        if end is None:
            if not here or may_be_missing:
                return not here
        elif end.inode:
            if socket_ends.is_ours(end):
                return True
            connection.shutdown(socket.SHUT_RDWR)
            raise _stranger(end.uid, own[1], peer[1], loop)
        elif end.state in _ARRIVING and may_arrive:
            return False
        connection.shutdown(socket.SHUT_RDWR)
    return True


def _stranger(uid: int, own_port: int, peer_port: int, loop: _Loop) -> StrangerError:
    name, answered = "", False
    with contextlib.suppress(KeyError):
        name = pwd.getpwuid(uid).pw_name
    with contextlib.suppress(OSError), _duplicate(loop.listener, loop.inode) as listener:
        answered = listener.getsockname()[1] != own_port
    return StrangerError(uid, name, peer_port if answered else own_port, answered=answered)


def _is_loopback(host: str) -> bool:
    return host.removeprefix("::ffff:").startswith("127.") or host == "::1"
