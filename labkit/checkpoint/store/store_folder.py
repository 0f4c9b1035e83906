"""A store's folder, held open while a save makes and removes steps in it.

Other users may be able to write to a store. A step that is a link or another user's is never removed, and does not count among the
steps to keep. The rule is that of :mod:`labkit.base.places`, but a step's owner is compared with that of a directory made just
before, since some file systems give all files to one user. Steps are removed through open directories, so that swapping names
meanwhile has no effect.

There is one limit: every rank writes a step's data by path, so a user who may rename entries of the store can swap the step's
directory meanwhile. A sticky bit on the store, as on ``/tmp``, prevents that.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from labkit.base import places
from labkit.base.places import PlaceError
from labkit.checkpoint.errors import CheckpointExistsError, CheckpointWriteError
from labkit.checkpoint.index.manifest import MANIFEST_FILE, step_of

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class StoreFolder:
    """An open store. Close it with :meth:`close`.

    Args:
        store: The store; it is made if needed.

    Raises:
        CheckpointWriteError: The path leads through a link that another user made.
        OSError: It cannot be opened or made.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        try:
            with places.opened(store, make=True) as fd:
                self._fd = os.open(".", _FOLDER, dir_fd=fd)
        except PlaceError as error:
            raise CheckpointWriteError(error.path, f"it {error.reason}") from None
        self._owner = os.geteuid()

    def close(self) -> None:
        """Close the store."""
        os.close(self._fd)

    def make_step(self, name: str) -> None:
        """Make the directory of a step, after removing what an unfinished save of this user left there.

        Raises:
            CheckpointExistsError: Something else is there.
            OSError: It cannot be made.
        """
        self._owner = self._owner_of_new()
        try:
            status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            pass
        else:
            if not stat.S_ISDIR(status.st_mode):
                raise self._refusal(name, f"it is {places.kind_of(status.st_mode) or 'a file'}")
            if not self.remove(name, only_unfinished=True):
                raise self._refusal(name, "it belongs to another user, or cannot be removed")
        os.mkdir(name, dir_fd=self._fd)

    def _refusal(self, name: str, what: str) -> CheckpointExistsError:
        return CheckpointExistsError(self._store / name, f"{what}, and was left as it is. Save another step, or move it away.")

    def _owner_of_new(self) -> int:
        """Return the owner that the file system gives to a directory made by this process here."""
        name = f".labkit-{secrets.token_hex(8)}"
        os.mkdir(name, 0o700, dir_fd=self._fd)
        try:
            return os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_uid
        finally:
            os.rmdir(name, dir_fd=self._fd)

    def remove(self, name: str, *, only_unfinished: bool = False) -> bool:
        """Remove a step, manifest first, so that a crash leaves an unfinished step, never a damaged one that looks complete.

        Args:
            name: The step's directory. A link or another user's directory stays.
            only_unfinished: Whether to keep it if it has a manifest.

        Returns:
            Whether it is gone.
        """
        with self._step(name) as fd:
            if fd is None or (only_unfinished and _has_manifest(fd)):
                return False
            with contextlib.suppress(OSError):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(MANIFEST_FILE, dir_fd=fd)
                os.fsync(fd)
                for entry in os.listdir(fd):
                    if stat.S_ISDIR(os.stat(entry, dir_fd=fd, follow_symlinks=False).st_mode):
                        shutil.rmtree(entry, ignore_errors=True, dir_fd=fd)  # follows no link
                    else:
                        os.unlink(entry, dir_fd=fd)
                os.rmdir(name, dir_fd=self._fd)
                return True
        return False

    def retain(self, keep: int, *, newest: int) -> list[Path]:
        """Remove all but the newest ``keep`` of this user's complete steps, and this user's unfinished steps before ``newest``.

        Returns:
            The directories that were removed.
        """
        complete: list[tuple[int, str]] = []
        unfinished: list[tuple[int, str]] = []
        for name in os.listdir(self._fd):
            step = step_of(Path(name))
            if step is None:
                continue
            with self._step(name) as fd:
                if fd is not None:
                    (complete if _has_manifest(fd) else unfinished).append((step, name))
        doomed = sorted(complete)[:-keep] + [found for found in sorted(unfinished) if found[0] < newest]
        return [self._store / name for _, name in doomed if self.remove(name)]

    @contextlib.contextmanager
    def _step(self, name: str) -> Iterator[int | None]:
        """Open a step's directory; yield None unless it is a directory of this user."""
        try:
            fd = os.open(name, _FOLDER, dir_fd=self._fd)
        except OSError:
            yield None
            return
        try:
            yield fd if os.fstat(fd).st_uid == self._owner else None
        finally:
            os.close(fd)


def _has_manifest(fd: int) -> bool:
    try:
        return stat.S_ISREG(os.stat(MANIFEST_FILE, dir_fd=fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False
