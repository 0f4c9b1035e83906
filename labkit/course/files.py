"""Reading of notebooks and writing of files for the commands, which replace only files that labkit wrote itself.

The rule: a file may be replaced if it is yours, carries labkit's mark and is unchanged since. A notebook's mark is a hash of its
cells, kept in its metadata; a text file's is a line near the beginning. Inputs, links and everything else count as somebody's work
and are refused. A file that you marked by hand cannot be told apart. :mod:`labkit.base.places` has the rule for folders that others
can write to.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import nbformat
from nbformat import NotebookNode

from labkit.base import places
from labkit.base.places import NotRegularError, PlaceError
from labkit.errors import LabkitError

_MARK = "labkit"
# Marks are near the beginning, so there is no need to read all of a possibly large or binary file.
_HEAD_BYTES = 4096
# nbformat 4.5 introduced cell ids.
_WITH_IDS = 5
_MOST_BYTES = 512 << 20

IsOwn = Callable[[BinaryIO], bool]


class NotebookError(LabkitError, ValueError):
    """A file is not a readable notebook."""


class OverwriteError(LabkitError, ValueError):
    """A command would overwrite its input, or a file that labkit did not write."""


def shown(path: Path | str) -> str:
    """Return a path as one line of plain text, with line breaks and bytes that are not UTF-8 escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(path))


def plain(text: str) -> str:
    """Remove a text's terminal control characters, except line breaks and tabs."""
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)


def papermill_of(part: NotebookNode) -> dict[str, Any]:
    """Return papermill's record in a notebook or cell; empty if there is no valid one."""
    found = part.metadata.get("papermill")
    return dict(found) if isinstance(found, dict) else {}


def read_notebook(path: Path) -> NotebookNode:
    """Read a notebook of any version as version 4.

    Raises:
        NotebookError: It cannot be read or is not valid.
    """
    try:
        with places.open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > _MOST_BYTES:
                raise NotebookError(f"{shown(path)} has more than {_MOST_BYTES >> 20} MiB. Clear its outputs, or choose another.")
            notebook: NotebookNode = nbformat.reads(file.read().decode(), as_version=4)
        if notebook.nbformat_minor < _WITH_IDS:
            notebook = nbformat.v4.upgrade(notebook)
            for number, cell in enumerate(notebook.cells, start=1):
                cell.id = f"cell-{number}"  # the same ids each time
        nbformat.validate(notebook, relax_add_props=True)
    except NotebookError:
        raise
    except NotRegularError as error:
        raise NotebookError(f"{shown(path)} is {error.kind}, and was not opened.") from None
    except OSError as error:
        raise NotebookError(f"{shown(path)} cannot be read: {error.strerror}.") from None
    except Exception as error:  # nbformat raises both its parser's errors and its own
        reason = shown((str(error).splitlines() or [type(error).__name__])[0][:300])
        raise NotebookError(
            f"{shown(path)} is not a valid notebook: {reason}. Open it in JupyterLab and save it there, or choose another."
        ) from None
    return notebook


def sealed(notebook: NotebookNode, writer: str) -> str:
    """Return a notebook as text for a file, marked with the command that writes it."""
    notebook.metadata[_MARK] = {"written_by": writer, "sha256": _hash(notebook.cells)}
    return str(nbformat.writes(notebook)) + "\n"


def is_sealed(file: BinaryIO, writer: str) -> bool:
    """Return whether a command wrote a notebook that is unchanged since."""
    try:
        notebook = json.load(file)
        mark = notebook["metadata"][_MARK]
        return bool(mark == {"written_by": writer, "sha256": _hash(nbformat.from_dict(_joined(notebook["cells"])))})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def mark_of(path: Path) -> dict[str, Any] | None:
    """Return the mark of the command that wrote a notebook, even if it was changed since; None if it has no mark."""
    try:
        with places.open_regular(path) as file:
            mark = json.load(file)["metadata"][_MARK]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, PlaceError):
        return None
    return mark if isinstance(mark, dict) else None


def _joined(cells: list[dict[str, Any]]) -> Any:
    """Return cells as nbformat reads them, with lists of lines joined into one text."""
    return nbformat.v4.rwbase.rejoin_lines(nbformat.from_dict({"cells": cells}))["cells"]


def _hash(cells: Any) -> str:
    return hashlib.sha256(json.dumps(cells, sort_keys=True).encode()).hexdigest()


def has_mark(file: BinaryIO, mark: str) -> bool:
    """Return whether labkit wrote a text file, which then has ``mark`` near its beginning."""
    return mark.encode() in file.read(_HEAD_BYTES)


def refuse_foreign(path: Path, inputs: Iterable[Path], is_own: IsOwn, *, within: Path | None = None) -> None:
    """Make sure that a file may be written.

    Args:
        path: The file to write.
        inputs: The files that the command reads, recognised even if their paths are spelled differently.
        is_own: A function that returns whether this command wrote an existing file, given the open file.
        within: The folder that the user named, if the file is deeper inside it; the folders in between must be the user's own.

    Raises:
        OverwriteError: It is an input, a link, a folder, not this command's, or another user's; or it would be written through a
            link, into another user's folder, or into one that the user may not write to.
    """
    try:
        _refuse_unwritable(path)
        with _folder_of(path, within) as fd:
            same = next((source for source in inputs if os.path.exists(path) and os.path.samefile(source, path)), None)
            if same is not None:
                raise OverwriteError(f"{shown(path)} is {shown(same)} itself, which would be overwritten. Choose another place.")
            _refuse_what_is_there(path, fd, is_own)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OverwriteError(f"{shown(path)} cannot be written: {error.strerror}. Choose another name.") from None
    except PlaceError as error:
        raise OverwriteError(str(error)) from None


def _refuse_what_is_there(path: Path, fd: int, is_own: IsOwn) -> None:
    """Refuse to replace what has a file's name in its open folder, unless this command wrote it.

    Raises:
        OverwriteError: See :func:`refuse_foreign`.
        FileNotFoundError: Nothing is there.
    """
    there = os.stat(path.name, dir_fd=fd, follow_symlinks=False)
    kind = places.kind_of(there.st_mode)
    if kind == "a link":
        raise OverwriteError(f"{shown(path)} is a link, and its target would be lost. Choose another place.")
    if kind:
        raise OverwriteError(f"{shown(path)} is {kind}, and nothing is written to it. Move it away, or choose another place.")
    if not places.is_mine(there):
        raise OverwriteError(f"{shown(path)} belongs to another user, and is not replaced. Choose another place.")
    if not is_written(path.name, is_own, dir_fd=fd):
        raise OverwriteError(
            f"{shown(path)} was not written by this command, or has been changed since. Nothing was touched. "
            "Move it away, or choose another place."
        )


def is_written(path: str | Path, is_own: IsOwn, *, dir_fd: int | None = None) -> bool:
    """Return whether a file is regular, the user's own, and a command's own according to ``is_own``."""
    try:
        with places.open_regular(path, dir_fd=dir_fd, own=True) as file:
            return is_own(file)
    except (OSError, PlaceError):
        return False


def _refuse_unwritable(path: Path) -> None:
    """Check, as far as possible in advance, that a file of this name and its missing folders can be made."""
    folder = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    code = 0
    if len(os.fsencode(path.name)) > os.pathconf(folder, "PC_NAME_MAX"):
        code = errno.ENAMETOOLONG
    elif not folder.is_dir():
        code = errno.ENOTDIR
    elif not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        code = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
    if code:
        raise OSError(code, os.strerror(code))


@contextlib.contextmanager
def _folder_of(path: Path, within: Path | None, *, make: bool = False) -> Iterator[int]:
    """Open the folder of a file by the rules of :mod:`labkit.base.places`."""
    named = path.parent if within is None else within
    inside = path.parent.relative_to(named).parts
    with places.opened(named, make=make) as outer, places.inside(outer, named, *inside, make=make) as fd:
        yield fd


def replace_file(path: Path, text: str, is_own: IsOwn, *, within: Path | None = None, make: bool = False) -> None:
    """Write a text file in one step, so that readers find either the old file or the new one. Links are not followed.

    An existing file is checked once more, in the folder that is written to, because folders may have been swapped since
    :func:`refuse_foreign`.

    Args:
        path: The file.
        text: What to write.
        is_own: As for :func:`refuse_foreign`.
        within: As for :func:`refuse_foreign`.
        make: Whether to make missing folders on the way.

    Raises:
        OverwriteError: The command did not write the old file, which is unchanged.
        PlaceError: It would be written through a link or into another user's folder. The old file is unchanged.
        OSError: It cannot be written. The old file is unchanged.
    """
    draft = f".labkit-{secrets.token_hex(8)}"
    with _folder_of(path, within, make=make) as fd:
        try:
            # A kernel may send half of a surrogate pair, which becomes a JSON escape.
            places.write_new(draft, text.encode("utf-8", "backslashreplace"), fd)
            with contextlib.suppress(FileNotFoundError):
                _refuse_what_is_there(path, fd, is_own)
            os.replace(draft, path.name, src_dir_fd=fd, dst_dir_fd=fd)
        except BaseException as error:
            if isinstance(error, OSError):
                error.filename = str(path)  # the user does not know about the draft
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft, dir_fd=fd)
            raise
