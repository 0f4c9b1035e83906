"""A destination that is absent or complete: everything is written beside it, and appears by one rename.

``NEW.partial`` is a folder that labkit makes for its user alone. It holds

- ``.labkit``, the marker: it says for which destination the folder was begun, and is locked for as long as a run writes;
- ``data``, the checkpoint that is being written.

A run that was killed starts over: the next one for the same destination removes what is left and begins anew. It does so only
when the folder is a real directory of this user, with nothing but a marker and ``data`` in it, the marker is a regular file of
this user that names this destination, and nobody holds its lock. Two states have no marker to read and are removed too, since a
kill between two system calls leaves them: an empty directory, and one with an empty marker only. Anything else is refused and
stays as it is. Nothing is opened through a link, and of what such a folder holds only the marker is ever read.

Where this ends: whoever may rename entries of the destination's parent directory may also exchange the folder while a run writes
into it. Directories that others may write to, such as ``/tmp``, prevent that by their sticky bit.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from labkit.checkpoint import manifest
from labkit.checkpoint.errors import CheckpointExistsError, CheckpointWriteError

_MARKER, _DATA = ".labkit", "data"
_BEGUN = "unfinished"
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MARKER_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MARKER_BYTES = 1 << 16
_ATTEMPTS = 10  # runs that begin and end beside this one
START_OVER = "The same command removes it and starts over. Remove it yourself if you do not want that."


def partial_folder(destination: Path) -> Path:
    """Return the folder in which a destination is written until it is complete."""
    return destination.with_name(destination.name + ".partial")


def is_partial(path: Path) -> bool:
    """Return whether a path is a folder that a run has left unfinished, or the data in one."""
    folders = [path, path.parent] if path.name == _DATA else [path]
    return any(_is_regular(folder / _MARKER) for folder in folders)


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


class StagingArea:
    """The folder beside a destination. End it with :meth:`publish` or :meth:`discard`.

    Args:
        destination: Where the result goes.

    Attributes:
        data: An empty directory to write into.

    Raises:
        CheckpointExistsError: What lies where the folder is needed was not left by a killed run for this destination.
        CheckpointWriteError: Another process is writing to this destination.
        OSError: The folder cannot be made.
    """

    def __init__(self, destination: Path) -> None:
        self.destination, self.folder = destination, partial_folder(destination)
        self.data = self.folder / _DATA
        self._folder_fd = self._marker_fd = -1
        self._result: tuple[int, int] | None = None
        self._made = [parent for parent in self.folder.parents if not parent.exists()]
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self._text = json.dumps({"labkit": _BEGUN, "destination": str(destination.parent.resolve() / destination.name)})
            for _ in range(_ATTEMPTS):
                if self._begin():
                    return
            raise self._being_written()
        except BaseException as error:
            error.add_note(self.discard())
            raise

    def _begin(self) -> bool:
        """Make the folder; False when a leftover was removed, or another run came in between."""
        try:
            self.folder.mkdir(mode=0o700)
        except FileExistsError:
            self._remove_leftover()
            return False
        try:
            folder_fd = os.open(self.folder, _FOLDER_FLAGS)
            try:
                marker_fd = os.open(_MARKER, _MARKER_FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder_fd)
            except BaseException:
                os.close(folder_fd)
                raise
        except FileNotFoundError:
            return False  # another run found the folder empty and removed it
        if _lock(marker_fd) is False or not _is_linked(marker_fd, folder_fd):
            os.close(marker_fd)
            os.close(folder_fd)
            return False
        self._folder_fd, self._marker_fd = folder_fd, marker_fd
        os.write(marker_fd, self._text.encode())
        os.fsync(marker_fd)
        os.mkdir(_DATA, dir_fd=folder_fd)
        return True

    # -- what an earlier run has left ------------------------------------------------------------------------------------

    def _remove_leftover(self) -> None:
        try:
            folder_fd = os.open(self.folder, _FOLDER_FLAGS)
        except FileNotFoundError:
            return
        except OSError as error:
            what = "it is a link" if self.folder.is_symlink() else "it is no directory of yours that can be opened"
            raise self._refusal(f"{what} ({error.strerror})") from None
        try:
            if not _is_mine(os.fstat(folder_fd)):
                raise self._refusal("it belongs to another user")
            if os.listdir(folder_fd):
                self._remove_begun(folder_fd)
            else:
                self.folder.rmdir()
        except FileNotFoundError:
            return  # its own run has ended meanwhile
        finally:
            os.close(folder_fd)

    def _remove_begun(self, folder_fd: int) -> None:
        marker_fd = self._open_marker(folder_fd)
        try:
            locked = _lock(marker_fd)
            if locked is None:
                raise self._refusal("the file system has no locks, so nothing says whether a run still writes there")
            if not locked:
                raise self._being_written()
            if not _is_linked(marker_fd, folder_fd):
                return
            self._check_begun(marker_fd, folder_fd)
            # In this order a kill leaves what the next run recognises.
            _empty(folder_fd)
            self.folder.rmdir()
        finally:
            os.close(marker_fd)

    def _open_marker(self, folder_fd: int) -> int:
        try:
            found = os.stat(_MARKER, dir_fd=folder_fd, follow_symlinks=False)
        except FileNotFoundError:
            raise self._refusal(f"labkit did not begin it (there is no {_MARKER} in it)") from None
        if not stat.S_ISREG(found.st_mode):
            raise self._refusal(f"its {_MARKER} is not a regular file")
        if not _is_mine(found):
            raise self._refusal(f"its {_MARKER} belongs to another user")
        return os.open(_MARKER, _MARKER_FLAGS, dir_fd=folder_fd)

    def _check_begun(self, marker_fd: int, folder_fd: int) -> None:
        """Raise CheckpointExistsError unless labkit began this folder for this destination."""
        names = set(os.listdir(folder_fd))
        foreign = sorted(names - {_MARKER, _DATA})
        if foreign:
            raise self._refusal(f"it holds {foreign[0]!r}, which labkit does not put there")
        if _DATA in names:
            data = os.stat(_DATA, dir_fd=folder_fd, follow_symlinks=False)
            if not stat.S_ISDIR(data.st_mode) or not _is_mine(data):
                raise self._refusal(f"{_DATA!r} in it is no directory of yours")
        text = os.read(marker_fd, _MARKER_BYTES)
        if not text and _DATA not in names:
            return  # killed before the marker was written
        if text != self._text.encode():
            raise self._refusal(f"its {_MARKER} does not say that labkit began it for {self.destination}")

    def _refusal(self, what: str) -> CheckpointExistsError:
        return CheckpointExistsError(
            self.folder,
            f"{self.destination.name} is to be written there, and {what}. It was left as it is. Move or remove it, or choose "
            "another destination.",
        )

    def _being_written(self) -> CheckpointWriteError:
        return CheckpointWriteError(self.destination, "another process is writing it. Wait for it, or end it.")

    # -- the end -----------------------------------------------------------------------------------------------------------

    def publish(self, file: str | None = None) -> str:
        """Let the destination appear, complete, by one rename; nothing that is there is replaced.

        A directory cannot be renamed over a file, a link or a directory with something in it, and a hard link cannot be made where
        there is something. Where the file system has no hard links, a file that appears in the same instant is replaced.

        Args:
            file: The one file in ``data`` that becomes the destination; by default ``data`` itself does.

        Returns:
            What is left beside it, in a sentence; empty when nothing is.

        Raises:
            CheckpointExistsError: Something has appeared at the destination.
        """
        made = self.data if file is None else self.data / file
        status = made.lstat()
        if os.path.lexists(self.destination):
            raise self._appeared()
        self._result = status.st_dev, status.st_ino
        try:
            if file is None:
                made.rename(self.destination)
            else:
                _place(made, self.destination)
        except OSError as error:
            if os.path.lexists(self.destination):
                raise self._appeared() from error
            raise
        manifest.sync_directory(self.destination.parent)
        return self._remove()

    def _appeared(self) -> CheckpointExistsError:
        return CheckpointExistsError(self.destination, "it has appeared while it was being written. Choose another destination.")

    def discard(self) -> str:
        """Remove the folder.

        Returns:
            What is there now, in a sentence or two.
        """
        left = self._remove()
        published = self._is_published()
        if not published:
            for parent in self._made:
                try:
                    parent.rmdir()
                except OSError:
                    break  # somebody else has put something there
        made = f"{self.destination} is complete" if published else f"{self.destination} was not made"
        if left or published:
            return f"{made}. {left}".rstrip()
        return f"{made}, and nothing is left of it."

    def _is_published(self) -> bool:
        try:
            status = self.destination.lstat()
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._result

    def _remove(self) -> str:
        """Remove the folder where this run has made it, and let others write to the destination; return what is left."""
        if self._folder_fd < 0:
            return ""
        try:
            _empty(self._folder_fd)
            self.folder.rmdir()
        except OSError as error:
            return f"{self.folder} could not be removed ({error.strerror}): remove it."
        finally:
            os.close(self._marker_fd)
            os.close(self._folder_fd)
            self._folder_fd = self._marker_fd = -1
        return ""


def _is_mine(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid()


def _lock(fd: int) -> bool | None:
    """Return whether the lock was free; None where the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_linked(marker_fd: int, folder_fd: int) -> bool:
    """Return whether an open marker is still the one in its folder."""
    try:
        return os.path.samestat(os.fstat(marker_fd), os.stat(_MARKER, dir_fd=folder_fd, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _empty(folder_fd: int) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(_DATA, dir_fd=folder_fd)
    with suppress(FileNotFoundError):
        os.unlink(_MARKER, dir_fd=folder_fd)


def _place(file: Path, destination: Path) -> None:
    try:
        os.link(file, destination, follow_symlinks=False)
    except OSError as error:
        if error.errno == errno.EEXIST:
            raise
        file.rename(destination)
