"""The folder of handouts: files that an earlier run wrote there may be replaced, others may not.

A new set is built in a separate folder and replaces the old one at the end. `handouts.json` in the folder lists the files with
their hashes: a file that is not listed, or was changed since, is somebody's work. Other users may be able to write to the folder,
so the list and its files count only if they are the caller's (:mod:`labkit.base.places`), and each file is checked again, in
folders held open, before it is replaced or deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from labkit.base import places
from labkit.base.places import PlaceError
from labkit.course.handouts.errors import HandoutError

LIST = "handouts.json"


class HandoutFolder:
    """A folder of handouts.

    Args:
        out: The folder; it need not exist.

    Attributes:
        out: The folder.
        written: Files from earlier runs that still exist: maps each path inside the folder to its hash.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.written: dict[str, str] = {}
        with contextlib.suppress(FileNotFoundError), places.opened(out) as fd:
            self.written = self._read_list(fd)

    def require_apart(self, inputs: Sequence[Path], folders: Iterable[str]) -> None:
        """Refuse inputs that are inside the folders for handouts.

        Raises:
            HandoutError: There are such inputs; the message names them.
        """
        taken = [self.out / folder for folder in folders]
        inside = [path for path in inputs if any(_is_below(path, folder) for folder in taken)]
        if inside:
            names = ", ".join(map(str, inside))
            raise HandoutError(f"{names}: handouts go into this folder and could overwrite it. Choose another folder with --out.")

    def require_free(self, names: Iterable[str]) -> None:
        """Refuse to replace files that no earlier run wrote, or that were changed since.

        Raises:
            HandoutError: There are such files; the message names them.
        """
        with contextlib.suppress(FileNotFoundError), places.opened(self.out) as fd:
            self._require_free(names, lambda name: self._folder_of(fd, name))

    def _require_free(self, names: Iterable[str], folder_of: Callable[[str], AbstractContextManager[int]]) -> None:
        foreign = []
        for name in names:
            try:
                with folder_of(name) as fd, self._open(fd, name) as file:
                    data = file.read()
            except FileNotFoundError:
                continue
            except PlaceError as error:
                if Path(error.path) != self.out / name:
                    raise  # a folder on the way to it
                data = None
            if data is None or _hash(data) != self.written.get(name):
                foreign.append(name)
        if foreign:
            shown = "\n".join(f"    {self.out / name}" for name in foreign)
            raise HandoutError(
                f"handouts would replace what no earlier run wrote, or what has been changed since:\n{shown}\n"
                "Nothing was touched. Move these files away, or choose another folder with --out."
            )

    def read(self, name: str) -> bytes:
        """Return a file that an earlier run wrote.

        Raises:
            PlaceError: Something else is there now.
            OSError: It cannot be read.
        """
        with places.opened(self.out) as out, self._folder_of(out, name) as fd, self._open(fd, name) as file:
            return file.read()

    @contextlib.contextmanager
    def building(self) -> Iterator[Path]:
        """Make an empty folder for building a set, to which nobody else can write; it is deleted afterwards."""
        with places.opened(self.out, make=True) as self._fd:
            # Files are written here and then renamed, so the last step cannot fail for lack of space or permission.
            draft = f".building-{secrets.token_hex(8)}"
            try:
                os.mkdir(draft, 0o700, dir_fd=self._fd)
                with (
                    places.inside(self._fd, self.out, draft) as self._draft_fd,
                    places.temporary("labkit-handouts-") as built,
                ):
                    yield Path(built)
            finally:
                with contextlib.suppress(OSError):
                    os.rmdir(draft, dir_fd=self._fd)
                with contextlib.suppress(OSError):
                    self.out.rmdir()  # only if nothing was made

    def take(self, built: Path, names: Sequence[str], stale: Iterable[str]) -> None:
        """Move the built files to their place, delete the files they replace, and rewrite the list.

        Signals are ignored meanwhile, so that no partial set is left. Before the first rename, everything is checked, and the files
        and their list are written beside their final places. Old files are deleted once the list is in place. After the first
        rename, the only thing that can fail is a rename onto a folder that somebody makes at that moment.

        Args:
            built: The folder with the new files.
            names: The files to take from it.
            stale: Files of earlier runs that the new set no longer has.

        Raises:
            HandoutError: Something is in the way, see `require_free`. Nothing has been moved.
            PlaceError: A folder there is a link or another user's. Nothing has been moved.
        """
        gone = [name for name in stale if name not in names]
        with _undisturbed(), contextlib.ExitStack() as stack:
            folders = {
                parent: stack.enter_context(places.inside(self._fd, self.out, *parent.parts, make=True))
                for parent in dict.fromkeys(PurePosixPath(name).parent for name in [*names, *gone])
            }
            self._require_free([*names, *gone], lambda name: contextlib.nullcontext(folders[PurePosixPath(name).parent]))
            drafts: dict[str, str] = {}
            try:
                new = {}
                for name in names:
                    data = (built / name).read_bytes()
                    new[name] = _hash(data)
                    self._write_draft(drafts, name, data)
                written = {name: hashed for name, hashed in (self.written | new).items() if name not in gone}
                self._write_draft(drafts, LIST, json.dumps({"files": written}, indent=1).encode())
                for name in (*names, LIST):
                    path = PurePosixPath(name)
                    to = self._fd if name == LIST else folders[path.parent]
                    os.replace(drafts[name], path.name, src_dir_fd=self._draft_fd, dst_dir_fd=to)
                    del drafts[name]
            finally:
                for draft in drafts.values():
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(draft, dir_fd=self._draft_fd)
            self.written = written
            for name in gone:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(PurePosixPath(name).name, dir_fd=folders[PurePosixPath(name).parent])

    def _write_draft(self, drafts: dict[str, str], name: str, data: bytes) -> None:
        drafts[name] = str(len(drafts))
        places.write_new(drafts[name], data, self._draft_fd)

    def _read_list(self, fd: int) -> dict[str, str]:
        """Return the trustworthy entries of the list: the caller's own files in this folder. The list must be the caller's too."""
        try:
            with places.open_regular(LIST, dir_fd=fd, own=True) as file:
                listed = json.load(file)["files"]
            return {str(name): str(hashed) for name, hashed in listed.items() if self._is_there(fd, str(name))}
        except FileNotFoundError:
            return {}
        except PlaceError as error:
            raise HandoutError(f"{self.out / LIST} {error.reason}. Move it away, or choose another folder with --out.") from None
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise HandoutError(f"{self.out / LIST} is not a list of handouts. Choose another folder.") from None

    def _is_there(self, fd: int, name: str) -> bool:
        """Return whether a listed name is a file in this folder; a foreign list, or a link, may lead elsewhere."""
        parts = PurePosixPath(name).parts
        if not parts or PurePosixPath(name).is_absolute() or ".." in parts:
            return False
        try:
            with self._folder_of(fd, name) as folder, self._open(folder, name):
                return True
        except (OSError, ValueError):  # PlaceError is a ValueError
            return False

    def _folder_of(self, out_fd: int, name: str) -> AbstractContextManager[int]:
        return places.inside(out_fd, self.out, *PurePosixPath(name).parent.parts)

    def _open(self, fd: int, name: str) -> BinaryIO:
        """Open a file of the set in its folder."""
        try:
            return places.open_regular(PurePosixPath(name).name, dir_fd=fd, own=True)
        except PlaceError as error:
            raise PlaceError(self.out / name, error.reason) from None


def _is_below(path: Path, folder: Path) -> bool:
    """Return whether a file is inside a folder, however the paths are spelled."""
    return folder.exists() and any(above.samefile(folder) for above in path.resolve().parents)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore signals that would end the run while the block runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
