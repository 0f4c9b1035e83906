"""The key file, with which machines find and trust the notebook of an attached pool."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labkit.base import places
from labkit.base.places import PlaceError
from labkit.errors import InvalidPoolError
from labkit.wire.transport import Keys


@dataclass(frozen=True)
class KeyFile:
    """The keys with which an agent and the notebook trust each other. Each can then run code in the other.

    Attributes:
        server_public, client_public, client_secret: The pool's CURVE keys, 40 characters of Z85 each.
        owner: ``pid.start@host`` of the notebook; the start tells it from a later process of that pid.
    """

    server_public: str
    client_public: str
    client_secret: str
    owner: str = ""

    @classmethod
    def of(cls, keys: Keys) -> KeyFile:
        """Take from a pool's keys the part that goes to the machines."""
        owner = f"{os.getpid()}.{_start_of(os.getpid())}@{socket.gethostname()}"
        return cls(keys.server_public.decode(), keys.client_public.decode(), keys.client_secret.decode(), owner)

    @property
    def in_use(self) -> bool:
        """True if the notebook that wrote the file still runs on this machine and is not this process."""
        process, _, host = self.owner.partition("@")
        pid, _, start = process.partition(".")
        if host != socket.gethostname() or not pid.isdigit() or int(pid) == os.getpid():
            return False
        return start == _start_of(int(pid)) != ""

    def keys(self) -> Keys:
        """Return the keys, without the server's secret key."""
        return Keys(self.server_public.encode(), b"", self.client_public.encode(), self.client_secret.encode())

    def write(self, path: Path) -> None:
        """Write the file; see :func:`write_private`."""
        write_private(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> KeyFile:
        """Read the file.

        Raises:
            InvalidPoolError: The file does not exist, others may read it, or it is not a key file.
        """
        try:
            return cls(**read_private(path, "Copy it here from the notebook's machine, with mode 0600."))
        except TypeError:
            raise InvalidPoolError(f"{path} is not a labkit key file. WorkerPool.attach() writes one.") from None


def _start_of(pid: int) -> str:
    """Return when a process of the caller's has started, in the system's ticks; empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name of its program, in parentheses, may hold anything.
            return file.read().rpartition(b")")[2].split()[19].decode() if places.is_mine(os.fstat(file.fileno())) else ""
    except OSError:
        return ""


def write_private(path: Path, content: dict[str, Any]) -> None:
    """Write JSON for this user alone (mode 0600), replacing an existing file.

    The file is written under a name that cannot be guessed, and then renamed, so that no link is followed. If that fails, no file
    is left behind.

    Raises:
        InvalidPoolError: The file cannot be written, or the path is a link or a folder.
    """
    beside = f".{path.name[:100]}.{secrets.token_hex(16)}"
    try:
        if path.is_symlink() or path.is_dir():
            kind = "link" if path.is_symlink() else "folder"
            raise InvalidPoolError(f"the key file cannot be written: {path} is a {kind}. Name another: key_file=...")
        with places.opened(path.parent) as folder:
            fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
            try:
                with os.fdopen(fd, "w") as file:
                    os.fchmod(fd, 0o600)
                    json.dump(content, file)
                os.replace(beside, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                os.unlink(beside, dir_fd=folder)
                raise
    except PlaceError as error:
        raise InvalidPoolError(f"the key file {path} cannot be written: {error} Or name another: key_file=...") from None
    except OSError as error:
        raise InvalidPoolError(f"the key file {path} cannot be written: {error.strerror}. Name another: key_file=...") from None


def remove_private(path: Path, content: dict[str, Any]) -> None:
    """Remove a file that :func:`write_private` wrote, if it is still there and no other is in its place."""
    with contextlib.suppress(OSError, ValueError), places.opened(path.parent) as folder:  # ValueError: a PlaceError, or no JSON
        with places.open_regular(path.name, dir_fd=folder, own=True) as file:
            same = json.load(file) == json.loads(json.dumps(content))
        if same:
            os.unlink(path.name, dir_fd=folder)


def read_private(path: Path, otherwise: str) -> dict[str, Any]:
    """Read JSON from a file that only its owner may read.

    Args:
        path: The file.
        otherwise: What to do when it is not there.

    Raises:
        InvalidPoolError: It does not exist, is not JSON, belongs to a user other than this one or root, or others may read it.
    """
    try:
        with places.open_regular(path) as file:  # links are followed, because Kubernetes mounts secrets as links
            status, text = os.fstat(file.fileno()), file.read()
    except OSError as error:
        raise InvalidPoolError(f"the key file {path} cannot be read: {error.strerror}. {otherwise}") from None
    except PlaceError as error:
        raise InvalidPoolError(f"the key file {error}. {otherwise}") from None
    # Check the owner as well: an owner can change the mode at any time, so the mode alone proves nothing.
    if status.st_uid not in (os.geteuid(), 0):
        raise InvalidPoolError(
            f"the key file {path} belongs to another user (uid {status.st_uid}), who would get what you run. {otherwise}"
        )
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise InvalidPoolError(f"{path} is not a labkit key file. WorkerPool.attach() writes one.")
    if status.st_mode & 0o077:
        raise InvalidPoolError(f"other users may read {path} (mode {status.st_mode & 0o777:o}). Run: chmod 600 {path}")
    return content
