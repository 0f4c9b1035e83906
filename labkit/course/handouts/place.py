"""The folder that handouts lie in: what an earlier run wrote there may be replaced, what somebody else wrote may not.

A new set is built beside the old one and put in its place at the end. `handouts.json` in the folder lists what was written, each
file with its hash: a file that is not listed, or that has been changed since, is somebody's own work.
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
        written: What earlier runs wrote and what is still there: paths inside the folder, each with its hash.
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
        """Refuse inputs that lie where handouts go.

        Raises:
            HandoutError: It names them.
        """
        taken = [self.out / folder for folder in folders]
        inside = [path for path in inputs if any(_is_below(path, folder) for folder in taken)]
        if inside:
            names = ", ".join(map(str, inside))
            raise HandoutError(f"{names}: handouts go into this folder and could overwrite it. Choose another folder with --out.")

    def require_free(self, names: Iterable[str]) -> None:
        """Refuse to replace what no earlier run wrote, or what somebody has changed since.

        Raises:
            HandoutError: It names the files.
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
        """An empty folder in which a set can be built; it is gone afterwards."""
        self.out.mkdir(parents=True, exist_ok=True)
        built = Path(tempfile.mkdtemp(prefix=".building-", dir=self.out))
        try:
            yield built
        finally:
            shutil.rmtree(built, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.out.rmdir()  # only where nothing was made

    def take(self, built: Path, names: Sequence[str], stale: Iterable[str]) -> None:
        """Move what was built to its place, delete what it takes the place of, and write the list anew.

        An interrupt in these moments comes too late: there is no half of a set.

        Args:
            built: The folder with the new files.
            names: Which of its files to take.
            stale: Files of earlier runs that the new set no longer has.

        Raises:
            HandoutError: Something is in the way, see `require_free`. Nothing has been moved then.
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
        """Whether a listed name is a file of this folder: a list may come from elsewhere, and a link may lead there."""
        parts = Path(name).parts
        above = [self.out.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]
        if Path(name).is_absolute() or ".." in parts or any(path.is_symlink() for path in above):
            return False
        return (self.out / name).is_file()

    def _is_own(self, name: str) -> bool:
        path = self.out / name
        return name in self.written and path.is_file() and not path.is_symlink() and _hash(path) == self.written[name]


def _is_below(path: Path, folder: Path) -> bool:
    """Whether a file lies in a folder, however the two are spelled."""
    return folder.exists() and any(above.samefile(folder) for above in path.resolve().parents)


def _files_above(out: Path, name: str) -> list[Path]:
    """What should be a folder on the way to a file and is none."""
    above = [out.joinpath(*Path(name).parts[:count]) for count in range(1, len(Path(name).parts))]
    return [path for path in above if os.path.lexists(path) and not path.is_dir()]


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals that end a run find it finished: they are ignored in the moments that the block takes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
