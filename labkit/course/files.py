"""Reading of notebooks and writing of files for the commands: only files that labkit wrote itself are replaced.

The rule: a file may be replaced if it has labkit's own mark and is unchanged since labkit wrote it. A notebook's mark is a hash of
its cells in its metadata; a text's mark is a line near its beginning. An input, a link, and anything else is somebody's own work
and is refused. A mark that somebody has added by hand is not recognized as such.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from labkit.errors import LabkitError

_MARK = "labkit"
# A mark is at the beginning of a file, which may be large or not a text at all.
_HEAD_BYTES = 4096
# nbformat 4.5 introduced ids of cells.
_WITH_IDS = 5


class NotebookError(LabkitError, ValueError):
    """A file is not a readable notebook."""


class OverwriteError(LabkitError, ValueError):
    """A command would overwrite its input, or a file that labkit did not write."""


def shown(path: Path | str) -> str:
    """Return a path as one line of plain text: line breaks and bytes that are not UTF-8 become escapes."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(path))


def plain(text: str) -> str:
    """Return a text without characters that control a terminal, except line breaks and tabs."""
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)


def papermill_of(part: NotebookNode) -> dict[str, Any]:
    """Return papermill's record about a notebook or a cell; empty if something else is in its place."""
    found = part.metadata.get("papermill")
    return dict(found) if isinstance(found, dict) else {}


def read_notebook(path: Path) -> NotebookNode:
    """Read a notebook of any version as version 4.

    Raises:
        NotebookError: It cannot be read or is not valid.
    """
    try:
        with open(path, encoding="utf-8") as file:
            notebook: NotebookNode = nbformat.read(file, as_version=4)
        if notebook.nbformat_minor < _WITH_IDS:
            notebook = nbformat.v4.upgrade(notebook)
            for number, cell in enumerate(notebook.cells, start=1):
                cell.id = f"cell-{number}"  # the same ids each time
        nbformat.validate(notebook, relax_add_props=True)
    except OSError as error:
        raise NotebookError(f"{shown(path)} cannot be read: {error.strerror}.") from None
    except Exception as error:  # nbformat raises its parser's errors and its own
        reason = shown((str(error).splitlines() or [type(error).__name__])[0][:300])
        raise NotebookError(
            f"{shown(path)} is no valid notebook: {reason}. Open it in JupyterLab and save it there, or choose another."
        ) from None
    return notebook


def sealed(notebook: NotebookNode, writer: str) -> str:
    """Return a notebook as the text of a file, with the mark of the command that writes it."""
    notebook.metadata[_MARK] = {"written_by": writer, "sha256": _hash(notebook.cells)}
    return str(nbformat.writes(notebook)) + "\n"


def is_sealed(path: Path, writer: str) -> bool:
    """Return whether a notebook was written by a command and has not been changed since."""
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        mark = notebook["metadata"][_MARK]
        return bool(mark == {"written_by": writer, "sha256": _hash(nbformat.from_dict(_joined(notebook["cells"])))})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _joined(cells: list[dict[str, Any]]) -> Any:
    """Return cells as nbformat reads them: lists of lines are joined into one text."""
    return nbformat.v4.rwbase.rejoin_lines(nbformat.from_dict({"cells": cells}))["cells"]


def _hash(cells: Any) -> str:
    return hashlib.sha256(json.dumps(cells, sort_keys=True).encode()).hexdigest()


def has_mark(path: Path, mark: str) -> bool:
    """Return whether labkit wrote a text file: ``mark`` is near its beginning."""
    try:
        with open(path, "rb") as file:
            return mark.encode() in file.read(_HEAD_BYTES)
    except OSError:
        return False


def refuse_foreign(path: Path, inputs: Iterable[Path], is_own: Callable[[Path], bool]) -> None:
    """Make sure that a file may be written.

    Args:
        path: The file to write.
        inputs: The files that the command reads. They are recognized as files, however their paths are spelled.
        is_own: Returns whether this command wrote the existing file.

    Raises:
        OverwriteError: It is one of the inputs, a link, a folder, or not the command's own file.
    """
    try:
        folder = next(folder for folder in path.absolute().parents if folder.is_dir())
        if len(os.fsencode(path.name)) > os.pathconf(folder, "PC_NAME_MAX"):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        there = os.lstat(path)
        same = next((source for source in inputs if os.path.exists(path) and os.path.samefile(source, path)), None)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise OverwriteError(f"{shown(path)} cannot be written: {error.strerror}. Choose another name.") from None
    if same is not None:
        raise OverwriteError(f"{shown(path)} is {shown(same)} itself, which would be overwritten. Choose another place.")
    if stat.S_ISLNK(there.st_mode):
        raise OverwriteError(f"{shown(path)} is a link; what it leads to would be lost. Choose another place.")
    if not stat.S_ISREG(there.st_mode) or not is_own(path):
        raise OverwriteError(
            f"{shown(path)} was not written by this command, or has been changed since. Nothing was touched. "
            "Move it away, or choose another place."
        )


def replace_file(path: Path, text: str) -> None:
    """Write a text file in one step: a reader finds either the old file or the new one, and a link is not followed.

    Raises:
        OSError: It cannot be written. An existing file is unchanged.
    """
    draft = path.parent / f".labkit-{secrets.token_hex(8)}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        # A lone surrogate, which a kernel may send, becomes its JSON escape.
        with open(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
