"""Asks Linux for the socket at one end of a TCP connection: in what state it is, and whose."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import Any, NamedTuple

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
_LISTEN = 10
_ALL_UIDS = 2**32 - 1


class End(NamedTuple):
    """The state of a socket in the kernel. Without an inode it belongs to no process, not yet or not any more."""

    state: int
    uid: int
    inode: int


def ask(family: int, own: Any, peer: Any) -> End | None:
    """Ask the kernel for the socket with these addresses, in some 20 us; None where there is none, or the kernel cannot say."""
    ends = struct.pack(">HH16s16s", own[1], peer[1], _packed(own), _packed(peer)) + struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
    request = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + ends
    with contextlib.suppress(OSError), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as link:
        link.settimeout(1.0)
        link.sendto(struct.pack("=IHHII", 16 + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0) + request, (0, 0))
        answer = link.recv(4096)
        if struct.unpack_from("=H", answer, 4)[0] == _SOCK_DIAG_BY_FAMILY and answer[17] != _LISTEN:
            return End(answer[17], *struct.unpack_from("=II", answer, 80))
    return None


def find(own: Any, peer: Any) -> End | None:
    """Look for the socket in the kernel's tables; takes milliseconds where there are thousands of sockets."""
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(path) as table:
            for line in table:
                words = line.split()
                if words[1].endswith(_in_table(own)) and words[2].endswith(_in_table(peer)):
                    return End(int(words[3], 16), int(words[7]), int(words[9]))
    return None


def is_ours(end: End) -> bool:
    """Return whether a process of this user holds a socket.

    A user namespace (a container without root) gives all users that it has no number for the same one, the overflow uid. Where this
    process has that number itself, it says nothing: then the processes that the kernel lets this user look into are asked.
    """
    if end.uid != os.geteuid():
        return False
    return not _may_be_anybody(end.uid) or _is_held_by_mine(end.inode)


def _may_be_anybody(uid: int) -> bool:
    try:
        with open("/proc/sys/kernel/overflowuid") as file:
            overflow = int(file.read())
        with open("/proc/self/uid_map") as lines:
            # One range a line: first uid inside, first uid outside, how many. The first namespace has all in one.
            return uid == overflow and sum(int(line.split()[2]) for line in lines) < _ALL_UIDS
    except FileNotFoundError:  # a kernel without user namespaces
        return False


def _is_held_by_mine(inode: int) -> bool:
    """Look through the descriptors of all processes; takes milliseconds. Other users' descriptors cannot be read."""
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{process}/fd/{descriptor}") == f"socket:[{inode}]":
                        return True
    return False


def _packed(address: Any) -> bytes:
    host = address[0].partition("%")[0]
    return socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)


def _in_table(address: Any) -> str:
    """Return an address as the tables have it: words of four bytes in the machine's own order, with more in front in tcp6."""
    packed = _packed(address)
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(packed) // 4}I", packed)) + f":{address[1]:04X}"
