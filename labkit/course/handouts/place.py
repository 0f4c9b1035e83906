"""The folder of the handouts: files that an earlier run wrote there may be replaced, other files may not.

A new set is built in a separate folder and moved to its place at the end. `handouts.json` in the folder lists the files that were
written, each with its hash. A file that is not listed, or has been changed since, is somebody's own work.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from labkit.course.handouts.errors import HandoutError

LIST = "handouts.json"


class Place:
    """A folder of handouts.

    Args:
        out: The folder; it need not exist.

    Attributes:
        out: The folder.
        written: Files that earlier runs wrote and that still exist: paths inside the folder, each with its hash.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.written: dict[str, str] = {}
        if (out / LIST).exists():
            try:
                listed = json.loads((out / LIST).read_text(encoding="utf-8"))["files"]
                self.written = {str(name): str(hashed) for name, hashed in listed.items() if self._is_inside(str(name))}
            except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
                raise HandoutError(f"{out / LIST} is no list of handouts. Choose another folder.") from None

    def require_apart(self, inputs: Sequence[Path], folders: Iterable[str]) -> None:
        """Refuse inputs that are in the folders for handouts.

        Raises:
            HandoutError: There are such inputs; the message names them.
        """
        taken = [self.out / folder for folder in folders]
        inside = [path for path in inputs if any(_is_below(path, folder) for folder in taken)]
        if inside:
            names = ", ".join(map(str, inside))
            raise HandoutError(f"{names}: handouts go into this folder and could overwrite it. Choose another folder with --out.")

    def require_free(self, names: Iterable[str]) -> None:
        """Refuse to replace files that no earlier run wrote, or that somebody has changed since.

        Raises:
            HandoutError: There are such files; the message names them.
        """
        foreign = {self.out / name: "" for name in names if os.path.lexists(self.out / name) and not self._is_own(name)}
        foreign |= {folder: "" for name in names for folder in _files_above(self.out, name)}
        if foreign:
            shown = "\n".join(f"    {path}" for path in foreign)
            raise HandoutError(
                f"handouts would replace what no earlier run wrote, or what has been changed since:\n{shown}\n"
                "Nothing was touched. Move these files away, or choose another folder with --out."
            )

    @contextlib.contextmanager
    def beside(self) -> Iterator[Path]:
        """Make an empty folder in which a set can be built, and remove it at the end."""
        self.out.mkdir(parents=True, exist_ok=True)
        built = Path(tempfile.mkdtemp(prefix=".building-", dir=self.out))
        try:
            yield built
        finally:
            shutil.rmtree(built, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.out.rmdir()  # only if nothing was made

    def take(self, built: Path, names: Sequence[str], stale: Iterable[str]) -> None:
        """Move the built files to their place, delete the files they replace, and rewrite the list.

        Interrupts are ignored during this, so that no half of a set is left.

        Args:
            built: The folder with the new files.
            names: The files to take from it.
            stale: Files of earlier runs that the new set no longer has.

        Raises:
            HandoutError: A file is in the way, see `require_free`. Nothing has been moved then.
        """
        gone = [name for name in stale if name not in names]
        with _undisturbed():
            self.require_free([*names, *gone])
            new = {name: _hash(built / name) for name in names}
            for name in names:
                (self.out / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(built / name, self.out / name)
            for name in gone:
                (self.out / name).unlink(missing_ok=True)
            self.written = {name: hashed for name, hashed in (self.written | new).items() if name not in gone}
            draft = built / LIST
            draft.write_text(json.dumps({"files": self.written}, indent=1), encoding="utf-8")
            os.replace(draft, self.out / LIST)

    def _is_inside(self, name: str) -> bool:
        """Return whether a listed name is a file in this folder. A list may come from elsewhere, and a link may lead outside."""
        parts = Path(name).parts
        above = [self.out.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]
        if Path(name).is_absolute() or ".." in parts or any(path.is_symlink() for path in above):
            return False
        return (self.out / name).is_file()

    def _is_own(self, name: str) -> bool:
        path = self.out / name
        return name in self.written and path.is_file() and not path.is_symlink() and _hash(path) == self.written[name]


def _is_below(path: Path, folder: Path) -> bool:
    """Return whether a file is in a folder, however the two paths are spelled."""
    return folder.exists() and any(above.samefile(folder) for above in path.resolve().parents)


def _files_above(out: Path, name: str) -> list[Path]:
    """Return the paths on the way to a file that should be folders and are not."""
    above = [out.joinpath(*Path(name).parts[:count]) for count in range(1, len(Path(name).parts))]
    return [path for path in above if os.path.lexists(path) and not path.is_dir()]


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore signals that end a run during the block, so that they find it finished."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
