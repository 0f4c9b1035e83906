"""Safe work in folders that others may write to: what labkit follows, enters, replaces and deletes there.

Anyone who can write to a folder can plant names in it and, if it has no sticky bit, swap existing ones. The rules:

- labkit may make a new file in any folder that you name, no matter who owns it: a group's shared folder, or ``/tmp``.
- labkit replaces, deletes or trusts (a list or mark that it has left) only regular files of yours. Inside the folder that you name
  it enters only real folders of yours. It refuses or skips links and anything that other users own.
- On the way to the folder that you name, it follows only links that you or root made.

labkit holds a folder open while it works there, so swapping the folder's name meanwhile redirects nothing. A folder of yours that
others may write to counts as yours; they can still swap what is written into it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from labkit.base.plain_text import printable
from labkit.errors import LabkitError

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFLNK: "a link",
}
# Passing through a folder does not require the right to list it. Only Linux has O_PATH.
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_LINKS = 40  # as in Linux
_TEMPORARY = ("/tmp", "/var/tmp", "/usr/tmp")  # as Python has it, but for the working directory
# The most characters of a folder's path in which sockets are: a socket's own path has at most 107.
FOR_SOCKETS = 76
_ANOTHER = "Set TMPDIR to a folder that only you can write to."


class PlaceError(LabkitError, ValueError):
    """labkit refused a path because another user may have tampered with it.

    Attributes:
        path: The path.
        reason: What is wrong with it.
    """

    def __init__(self, path: object, reason: str) -> None:
        self.path, self.reason = str(path), reason
        super().__init__(f"{printable(self.path)} {reason}")


class NotRegularError(PlaceError):
    """A path is not a regular file, so it was not opened.

    Attributes:
        kind: What it is, such as "a FIFO".
    """

    def __init__(self, path: object, kind: str) -> None:
        self.kind = kind
        super().__init__(path, f"is {kind}, and was not opened")


def kind_of(mode: int) -> str | None:
    """Return the kind of a file in words; None for a regular file."""
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "not a regular file")


def is_mine(status: os.stat_result) -> bool:
    """Return whether a file belongs to this process's effective user."""
    return status.st_uid == os.geteuid()


def open_regular(path: str | Path, *, dir_fd: int | None = None, own: bool = False) -> io.BufferedReader:
    """Open a regular file for reading, and nothing else.

    Args:
        path: The file.
        dir_fd: The open folder that a relative path starts from.
        own: Open only a file of the caller's, and follow no link to it. Otherwise a link to a regular file is followed.

    Raises:
        NotRegularError: It is something else, and was not opened: a FIFO would block the reader.
        PlaceError: It belongs to another user.
        OSError: It is missing or unreadable.
    """
    _refuse(path, os.stat(path, dir_fd=dir_fd, follow_symlinks=not own), own=own)
    # O_NONBLOCK, because a FIFO may have been swapped in since the check.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if own else 0)
    file = os.fdopen(os.open(path, flags, dir_fd=dir_fd), "rb")
    try:
        _refuse(path, os.fstat(file.fileno()), own=own)
    except BaseException:
        file.close()
        raise
    return file


def _refuse(path: str | Path, status: os.stat_result, *, own: bool) -> None:
    if kind := kind_of(status.st_mode):
        raise NotRegularError(path, kind)
    if own and not is_mine(status):
        raise PlaceError(path, "belongs to another user")


@contextlib.contextmanager
def opened(folder: Path, *, make: bool = False) -> Iterator[int]:
    """Open a folder that the user named, to work inside it.

    Args:
        folder: The folder. Links on the way are followed if the caller or root made them.
        make: Make the folders that are missing.

    Yields:
        A descriptor for ``dir_fd`` arguments, possibly without the right to list the folder.

    Raises:
        PlaceError: A link on the way was made by another user.
        OSError: There is no such folder, or it cannot be made.
    """
    fd = _walk(folder, make=make)
    try:
        yield fd
    finally:
        os.close(fd)


def _walk(folder: Path, *, make: bool) -> int:
    fd = os.open("/" if folder.is_absolute() else ".", _FOLDER)
    left, at, num_links = [*reversed(_names(folder))], Path(folder.anchor), 0
    try:
        while left:
            name = left.pop()
            link = _link(fd, name, at / name)
            if link is None:
                inner = _enter(fd, name, make=make)
                at /= name
            else:
                num_links += 1
                if num_links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
                left += reversed(_names(link))
                if not link.is_absolute():
                    continue
                inner, at = os.open("/", _FOLDER), Path("/")
            os.close(fd)
            fd = inner
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError):
            error.filename = str(folder)
        raise
    return fd


def _names(path: Path) -> tuple[str, ...]:
    return path.parts[1:] if path.is_absolute() else path.parts


def _link(fd: int, name: str, path: Path) -> Path | None:
    """Return the target of a link, if it may be followed; None if the name is not a link."""
    try:
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISLNK(status.st_mode):
        return None
    target = Path(os.readlink(name, dir_fd=fd))
    # A link swapped in since may have reused the old one's inode, so compare the owner too.
    same = _identity(status) == _identity(os.stat(name, dir_fd=fd, follow_symlinks=False))
    if status.st_uid not in (0, os.geteuid()) or not same:
        raise PlaceError(path, "is a link that another user has made, and is not followed. Name another place.")
    return target


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_uid


def _enter(fd: int, name: str, *, make: bool) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=fd)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=fd)
    return os.open(name, _FOLDER, dir_fd=fd)


@contextlib.contextmanager
def inside(fd: int, folder: Path, *names: str, make: bool = False) -> Iterator[int]:
    """Enter nested folders inside an open folder. All have to be real folders of the caller's.

    Args:
        fd: The open folder.
        folder: Its path, for messages.
        names: The folders, outermost first.
        make: Make those that are missing.

    Yields:
        A descriptor of the innermost one, as :func:`opened`.

    Raises:
        PlaceError: One of them is a link, not a folder, or another user's.
        OSError: One is missing, or cannot be made.
    """
    with contextlib.ExitStack() as stack:
        for name in names:
            folder /= name
            try:
                fd = _enter(fd, name, make=make)
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    error.filename = str(folder)
                    raise
                kind = kind_of(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode) or "a file"
                raise PlaceError(
                    folder, f"is {kind} where a folder of yours is needed. Move it away, or choose another place."
                ) from None
            stack.callback(os.close, fd)
            if not is_mine(os.fstat(fd)):
                raise PlaceError(folder, "belongs to another user, and nothing is written into it. Choose another place.")
        yield fd


def private_folder(base: Path, *names: str) -> str:
    """Make nested folders that only the caller can enter, and return the path of the innermost one.

    Args:
        base: The folder that holds the first of them. It is made if it is missing.
        names: The folders, outermost first. Existing ones have to be the caller's.

    Raises:
        PlaceError: Another user could swap one of them or write into it, or has taken its name.
        OSError: One cannot be made.
    """
    base = base.absolute()
    with contextlib.ExitStack() as stack:
        fd = stack.enter_context(opened(base, make=True))
        # A path is resolved again at each use, so nobody else may be able to change where it leads.
        resolved = Path(os.path.realpath(base))
        if not os.path.samestat(os.fstat(fd), os.stat(resolved)):
            raise PlaceError(base, "was replaced while labkit looked at it")
        for folder in (*reversed(resolved.parents), resolved):
            _refuse_changeable(folder, os.lstat(folder))
        for name in names:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=fd)
            resolved /= name
            fd = stack.enter_context(inside(fd, resolved.parent, name))
            _refuse_changeable(resolved, os.fstat(fd))
    return str(resolved)


def _refuse_changeable(path: Path, status: os.stat_result) -> None:
    shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    if shared or status.st_uid not in (0, os.geteuid(), _hidden_root()):
        raise PlaceError(path, "can be changed by other users")


@functools.cache
def _hidden_root() -> int:
    """Return the user whom root's files seem to belong to: in a container without root, all whom it does not know are one."""
    try:
        names = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        nobody = int(Path("/proc/sys/kernel/overflowuid").read_text())
    except OSError:
        return 0
    known = any(int(first) <= nobody < int(first) + int(count) for first, _, count in names)
    return 0 if known else nobody


def new_temporary(prefix: str, *, longest: int | None = None) -> str:
    """Make a folder in the temporary folder that only the caller can enter, and return its path.

    Python's own ``tempfile.mkdtemp`` does not ask who can exchange the folder on the way, and takes the working directory when
    nothing else can be written to.

    Args:
        prefix: The beginning of its name.
        longest: The most characters that its path may have. Where TMPDIR is too long for that, the folder is made in ``/tmp``.

    Raises:
        PlaceError: Others can change the folder that TMPDIR names, or there is none that can be used. The message says what to do.
    """
    problem = ""
    for place in temporary_folders():
        name = prefix + secrets.token_hex(4)
        if longest is not None and len(os.fsencode(os.path.join(os.path.realpath(place), name))) > longest:
            continue
        try:
            made = private_folder(place, name)
        except PlaceError as error:
            if place not in _named_folders():
                problem = problem or str(error)
                continue
            raise PlaceError(error.path, f"{error.reason.removesuffix('.')}. Temporary files would go there. {_ANOTHER}") from None
        except OSError as error:
            problem = problem or f"{place}: {error.strerror}"
            continue
        try:
            # A folder can be made where no file has room.
            Path(made, "room").write_bytes(b"room")
            os.unlink(os.path.join(made, "room"))
        except OSError as error:
            problem = problem or f"{place}: {error.strerror}"
            shutil.rmtree(made, ignore_errors=True)
        else:
            return made
    raise PlaceError("TMPDIR", f"names no folder for temporary files, and the system's cannot be used ({problem}). {_ANOTHER}")


def temporary_folders() -> list[Path]:
    """Return where temporary files may go, the best place first: what TMPDIR, TEMP or TMP names, else the system's folders."""
    return [place for place in (*_named_folders(), *map(Path, _TEMPORARY)) if os.path.isdir(place)]


def _named_folders() -> list[Path]:
    return [Path(os.path.abspath(os.environ[name])) for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)]


@contextlib.contextmanager
def temporary(prefix: str, *, longest: int | None = None) -> Iterator[str]:
    """Make a folder as :func:`new_temporary` does, and remove it at the end of the block."""
    made = new_temporary(prefix, longest=longest)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def write_new(name: str, data: bytes, dir_fd: int) -> None:
    """Write a new file.

    Raises:
        FileExistsError: The name is taken, for example by a link.
        OSError: It cannot be written; a partial file stays.
    """
    with os.fdopen(os.open(name, _NEW, 0o666, dir_fd=dir_fd), "wb") as file:
        file.write(data)
