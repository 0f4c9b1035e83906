"""Staging folders left by other runs: their possible states, and when one may be removed.

``NEW.partial`` contains ``.labkit``, the marker, and ``data``. It is removed only if all of this holds: it is a real directory of
this user with nothing in it but a marker and ``data``; the marker is a regular file of this user that names this destination; and
no process holds the marker's lock. Two states without a readable marker are removed too, because a kill between two system calls
leaves them: an empty directory, and one with only an empty marker. Anything else is refused and left unchanged. Links are never
followed, and only the marker is ever read.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from labkit.checkpoint.errors import CheckpointExistsError, CheckpointWriteError

MARKER, DATA = ".labkit", "data"
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MARKER_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
START_OVER = "The same command removes it and starts over. Remove it yourself if you do not want that."
_MARKER_BYTES = 1 << 16


def partial_folder(destination: Path) -> Path:
    """Return the folder where a destination is written until it is complete."""
    return destination.with_name(destination.name + ".partial")


def is_partial(path: Path) -> bool:
    """Return whether a path is an unfinished staging folder, or the data in one."""
    folders = [path, path.parent] if path.name == DATA else [path]
    return any(_is_regular(folder / MARKER) for folder in folders)


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def remove_leftover(destination: Path, text: bytes) -> None:
    """Remove a destination's folder if a killed run left it; do nothing if another run has removed it meanwhile.

    Args:
        destination: The path of the result.
        text: The content of a marker for this destination.

    Raises:
        CheckpointExistsError: The folder was not left by a killed run for this destination.
        CheckpointWriteError: The folder's run is still working.
    """
    folder = partial_folder(destination)
    try:
        folder_fd = os.open(folder, FOLDER_FLAGS)
    except FileNotFoundError:
        return
    except OSError as error:
        what = "it is a link" if folder.is_symlink() else "it is not a directory of yours that can be opened"
        raise _refusal(destination, f"{what} ({error.strerror})") from None
    try:
        if not _is_mine(os.fstat(folder_fd)):
            raise _refusal(destination, "it belongs to another user")
        if os.listdir(folder_fd):
            _remove_begun(destination, text, folder_fd)
        else:
            remove_folder(folder)
    except FileNotFoundError:
        return  # its own run has removed it meanwhile
    finally:
        os.close(folder_fd)


def _remove_begun(destination: Path, text: bytes, folder_fd: int) -> None:
    marker_fd = _open_marker(destination, folder_fd)
    try:
        locked = lock(marker_fd)
        if locked is None:
            raise _refusal(destination, "the file system has no locks, so nothing says whether a run still writes there")
        if not locked:
            raise being_written(destination)
        if is_linked(marker_fd, folder_fd):
            _check_begun(destination, text, marker_fd, folder_fd)
            empty(folder_fd)
            remove_folder(partial_folder(destination))
    finally:
        os.close(marker_fd)


def _open_marker(destination: Path, folder_fd: int) -> int:
    try:
        found = os.stat(MARKER, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        if not os.listdir(folder_fd):
            raise  # another run has removed it meanwhile
        raise _refusal(destination, f"labkit did not begin it (there is no {MARKER} in it)") from None
    if not stat.S_ISREG(found.st_mode):
        raise _refusal(destination, f"its {MARKER} is not a regular file")
    if not _is_mine(found):
        raise _refusal(destination, f"its {MARKER} belongs to another user")
    return os.open(MARKER, MARKER_FLAGS, dir_fd=folder_fd)


def _check_begun(destination: Path, text: bytes, marker_fd: int, folder_fd: int) -> None:
    """Raise CheckpointExistsError unless labkit made this folder for this destination."""
    names = set(os.listdir(folder_fd))
    if foreign := sorted(names - {MARKER, DATA}):
        raise _refusal(destination, f"it holds {foreign[0]!r}, which labkit does not put there")
    if DATA in names:
        data = os.stat(DATA, dir_fd=folder_fd, follow_symlinks=False)
        if not stat.S_ISDIR(data.st_mode) or not _is_mine(data):
            raise _refusal(destination, f"{DATA!r} in it is not a directory of yours")
    found = os.read(marker_fd, _MARKER_BYTES)
    unwritten = not found and DATA not in names
    if found != text and not unwritten:
        raise _refusal(destination, f"its {MARKER} does not say that labkit began it for {destination}")


def _refusal(destination: Path, what: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        partial_folder(destination),
        f"{destination.name} would be written there, but {what}. It was left as it is. Move or remove it, or choose "
        "another destination.",
    )


def being_written(destination: Path) -> CheckpointWriteError:
    """Return the error for a destination that another run is writing."""
    return CheckpointWriteError(destination, "another process is writing it. Wait for it, or end it.")


# -- operations on a folder that is known to be labkit's -------------------------------------------------------------------------


def empty(folder_fd: int) -> None:
    """Remove what a run creates in its folder; if killed at any point, leave a state that the next run recognises."""
    with suppress(FileNotFoundError):
        shutil.rmtree(DATA, dir_fd=folder_fd)
    with suppress(FileNotFoundError):
        os.unlink(MARKER, dir_fd=folder_fd)


def remove_folder(folder: Path) -> None:
    """Remove an emptied folder, unless another run has started to use it."""
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno != errno.ENOTEMPTY or not is_partial(folder):
            raise


def lock(fd: int) -> bool | None:
    """Take the lock if it is free and return True; return False if it is taken, None if the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_linked(marker_fd: int, folder_fd: int) -> bool:
    """Return whether an open marker is still the one in its folder."""
    try:
        return os.path.samestat(os.fstat(marker_fd), os.stat(MARKER, dir_fd=folder_fd, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _is_mine(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid()
