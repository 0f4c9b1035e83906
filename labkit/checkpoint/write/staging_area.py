"""A destination that is absent or complete: everything is written beside it, and appears by one rename.

``NEW.partial`` is a folder that labkit creates for its user alone. It contains

- ``.labkit``, the marker: it names the folder's destination, and is locked while a run writes;
- ``data``, the checkpoint that is being written.

After a killed run, the next run for the same destination removes the leftovers and starts over
(:mod:`labkit.checkpoint.files.staging_leftovers` says when it may).

There is one limit: a user who may rename entries of the destination's parent directory can also swap the folder while a run writes
into it. Shared directories such as ``/tmp`` prevent that by their sticky bit.
"""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from pathlib import Path

from labkit.base import places
from labkit.base.places import PlaceError
from labkit.checkpoint.errors import CheckpointExistsError, CheckpointWriteError
from labkit.checkpoint.files.staging_leftovers import (
    DATA,
    FOLDER_FLAGS,
    MARKER,
    MARKER_FLAGS,
    being_written,
    empty,
    is_linked,
    lock,
    partial_folder,
    remove_folder,
    remove_leftover,
)
from labkit.checkpoint.index import manifest

_ATTEMPTS = 10  # other runs for this destination may begin and end meanwhile


class StagingArea:
    """The folder beside a destination. End it with :meth:`publish` or :meth:`discard`.

    Args:
        destination: The path of the result.

    Attributes:
        data: An empty directory to write into.

    Raises:
        CheckpointExistsError: The folder's path is taken by something that a killed run for this destination did not leave.
        CheckpointWriteError: Another process is writing to this destination, or the path leads through a link that another user
        made. OSError: The folder cannot be made.
    """

    def __init__(self, destination: Path) -> None:
        self.destination, self.folder = destination, partial_folder(destination)
        self.data = self.folder / DATA
        self._folder_fd = self._marker_fd = -1
        self._result: tuple[int, int] | None = None
        self._made = [parent for parent in self.folder.parents if not parent.exists()]
        try:
            _make(self.folder.parent)
            whole = destination.parent.resolve() / destination.name
            self._text = json.dumps({"labkit": "unfinished", "destination": str(whole)}).encode()
            for _ in range(_ATTEMPTS):
                if self._begin():
                    return
            raise being_written(destination)
        except BaseException as error:
            error.add_note(self.discard())
            raise

    def _begin(self) -> bool:
        """Create the folder; return False if a leftover had to be removed, or another run interfered."""
        try:
            self.folder.mkdir(mode=0o700)
        except FileExistsError:
            remove_leftover(self.destination, self._text)
            return False
        folder_fd = marker_fd = -1
        try:
            folder_fd = os.open(self.folder, FOLDER_FLAGS)
            marker_fd = os.open(MARKER, MARKER_FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder_fd)
            if lock(marker_fd) is not False and is_linked(marker_fd, folder_fd):
                self._folder_fd, self._marker_fd = folder_fd, marker_fd
        except (FileNotFoundError, FileExistsError):
            return False  # another run took the still empty folder for a leftover
        finally:
            if self._folder_fd < 0:
                _close(folder_fd, marker_fd)
                with suppress(OSError):
                    self.folder.rmdir()  # succeeds only if it is empty, so that nothing is lost
        if self._folder_fd < 0:
            return False
        os.write(self._marker_fd, self._text)
        os.fsync(self._marker_fd)
        os.mkdir(DATA, dir_fd=self._folder_fd)
        return True

    def publish(self, file: str | None = None) -> str:
        """Publish the complete destination by one rename, without replacing anything.

        A directory cannot be renamed over a file, a link or a non-empty directory, and a hard link cannot replace anything. Only on
        a file system without hard links can a file be replaced, if it appears at the same instant.

        Args:
            file: The one file in ``data`` that becomes the destination; by default ``data`` itself does.

        Returns:
            A sentence about leftovers beside the destination; empty if there are none.

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
            One or two sentences about what is there now.
        """
        left = self._remove()
        published = self._is_published()
        with suppress(OSError):  # another process has put something there
            for parent in self._made if not published else ():
                parent.rmdir()
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
        """Remove the folder if this run created it, and release the destination for other runs; return a note on leftovers."""
        if self._folder_fd < 0:
            return ""
        try:
            empty(self._folder_fd)
            remove_folder(self.folder)
        except FileNotFoundError:
            return ""  # a run that began meanwhile removed the emptied folder
        except OSError as error:
            return f"{self.folder} could not be removed ({error.strerror}): remove it."
        finally:
            _close(self._marker_fd, self._folder_fd)
            self._folder_fd = self._marker_fd = -1
        return ""


def _make(folder: Path) -> None:
    try:
        with places.opened(folder, make=True):
            pass
    except PlaceError as error:
        raise CheckpointWriteError(error.path, f"it {error.reason}") from None


def _close(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def _place(file: Path, destination: Path) -> None:
    try:
        os.link(file, destination, follow_symlinks=False)
    except OSError as error:
        if error.errno == errno.EEXIST:
            raise
        file.rename(destination)
