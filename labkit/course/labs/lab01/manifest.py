"""Exercise 3 of notebook 01: a manifest that notices damage."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.base import places
from labkit.course.labs.checks import ask, hint_for, refuse, trying

MANIFEST = "manifest.json"

WriteManifest = Callable[[Path], object]
FindDamage = Callable[[Path], Iterable[str]]


def check_manifest(checkpoint: Path, older: Path, write_manifest: WriteManifest, find_damage: FindDamage) -> str:
    """Exercise 3: ``write_manifest(folder)`` publishes a checkpoint, ``find_damage(folder)`` names the files that are not as saved.

    Copies of a real checkpoint are damaged, both in ways that torch loads without an error and in ways that it does not.

    Args:
        checkpoint: A complete checkpoint. If it already has a manifest, the copies leave it out.
        older: An earlier checkpoint of the same model, whose files have the same names.
        write_manifest: Writes ``manifest.json`` into the folder, complete or not at all.
        find_damage: Returns the names of files that are missing, changed or not listed; ``manifest.json`` if there is none.

    Returns:
        A line with the number of kinds of damage found.

    Raises:
        ExerciseError: Damage goes unnoticed, an intact folder is reported as damaged, a manifest is not published in one piece, or
            one of the functions raises when it should not.

    Ranks: controller.
    """
    with places.temporary("labkit-check-") as scratch:
        published = Path(scratch, "published")
        _copy(checkpoint, published)
        _check_intact(published, Path(scratch, "intact"), write_manifest, find_damage)
        for number, damage in enumerate(_DAMAGES):
            folder = Path(scratch, f"damaged-{number}")
            shutil.copytree(published, folder)
            victim = damage.apply(folder, older)
            if (folder / victim).exists():  # keep the saved file's dates, so that they are no evidence
                shutil.copystat(published / victim if (published / victim).exists() else published / ".metadata", folder / victim)
            found = _names(find_damage, folder, damage.what)
            if victim not in found:
                said = f"find_damage names {', '.join(found)}" if found else "find_damage finds nothing"
                refuse(f"{damage.what}: {said}.", f"{victim} is named.", damage.hint)
            if others := [name for name in found if name != victim]:
                refuse(f"{damage.what}: {', '.join(others)} is accused too.", f"{victim} and nothing else.")
        _check_broken_attempt(Path(checkpoint), Path(scratch, "unreadable"), write_manifest)
    return f"Solved: {len(_DAMAGES)} kinds of damage found, the intact checkpoint accepted, and a broken attempt publishes nothing."


def _copy(checkpoint: Path, folder: Path) -> None:
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns(MANIFEST))


def _names(find_damage: FindDamage, folder: Path, case: str) -> list[str]:
    found: Any = ask(find_damage, folder, case=case)
    with trying("what find_damage returned", "a set of file names."):
        names = None if isinstance(found, str) or not isinstance(found, Iterable) else list(found)
    if names is None or any(not isinstance(name, str) or os.sep in name for name in names):
        hint = "path.name is the name of a file without its folder." if names else ""
        refuse(f"{case}: find_damage returned {found!r:.120}.", "file names: a list or a set of texts such as '.metadata'.", hint)
    return sorted(names)


def _check_intact(published: Path, copy: Path, write_manifest: WriteManifest, find_damage: FindDamage) -> None:
    files = {path.name for path in published.iterdir()}
    for case in ("an intact checkpoint", "an intact checkpoint, published a second time"):
        with _opened() as opened:
            ask(write_manifest, published, case=case)
        if not (published / MANIFEST).is_file():
            refuse(f"write_manifest left no {MANIFEST}.", "a manifest in the folder.")
        _require_not_accused(_names(find_damage, published, case), case, files)
        if published / MANIFEST in opened.for_writing:
            refuse(
                f"write_manifest opened {MANIFEST} itself and wrote into it: a reader can see it unfinished, a kill leaves it so.",
                "a manifest that appears in one piece, after everything it lists.",
                "Write to another name first and rename it at the end: os.replace is one step, a copy is not.",
            )
    shutil.copytree(published, copy)
    for path in copy.iterdir():
        os.utime(path, ns=(0, 0))
    accused = _names(find_damage, copy, "an intact copy with other dates")
    if accused:
        hint = "A date is not content: a copy has another date, and a damaged file can have the same. Compare what is in the files."
        refuse(f"an intact copy with other dates is accused: {', '.join(accused)}.", "no name for an intact checkpoint.", hint)


def _require_not_accused(accused: list[str], case: str, files: set[str]) -> None:
    if not accused:
        return
    again = "second" in case
    hint = hint_for(
        accused,
        [
            (
                lambda names: MANIFEST in names,
                "The folder has a manifest already. It is not a file of the checkpoint: leave it out of the new one."
                if again
                else "The manifest cannot list itself: it does not exist yet when it is written.",
            ),
            (
                lambda names: not files.issuperset(names),
                "This is not a file of the checkpoint. A draft of the manifest is in the folder too while the files are listed.",
            ),
            (
                lambda names: names == [".metadata"],
                "find_damage looks at .metadata, write_manifest leaves it out. Names that begin with a dot count.",
            ),
        ],
        "Both functions have to go through the same files and take the same hash of each.",
    )
    refuse(f"{case} is accused: {', '.join(accused)}.", "no name for an intact checkpoint.", hint)


def _check_broken_attempt(checkpoint: Path, folder: Path, write_manifest: WriteManifest) -> None:
    _copy(checkpoint, folder)
    unreadable = folder / "~unreadable.distcp"
    unreadable.write_bytes(b"unreadable")
    with contextlib.suppress(Exception), _opened(broken=unreadable):  # how it fails is up to the learner
        write_manifest(folder)
    if (folder / MANIFEST).exists():
        refuse(
            f"write_manifest could not read one of the files, but left a {MANIFEST} anyway.",
            f"no {MANIFEST} after a failure: it is the sign that the checkpoint is complete.",
            "Hash everything first, and let an error end the function. The manifest comes last.",
        )


@dataclass
class _Opened:
    """Files that are opened while a learner's function runs.

    Attributes:
        broken: A file that cannot be read.
        for_writing: The files that were opened for writing.
    """

    broken: Path | None = None
    for_writing: set[Path] = field(default_factory=set)


_watching: list[_Opened] = []


@contextlib.contextmanager
def _opened(broken: Path | None = None) -> Iterator[_Opened]:
    _install_audit_hook()
    opened = _Opened(broken)
    _watching.append(opened)
    try:
        yield opened
    finally:
        _watching.remove(opened)


@functools.cache
def _install_audit_hook() -> None:
    """Install an audit hook, which sees every way of opening a file; only once per process, because it cannot be removed."""
    sys.addaudithook(_on_audit_event)


def _on_audit_event(event: str, args: tuple[Any, ...]) -> None:
    if not _watching or event != "open" or not isinstance(args[0], str | os.PathLike):
        return
    path, flags = Path(os.path.abspath(os.fspath(args[0]))), args[2]
    for opened in _watching:
        if flags & (os.O_WRONLY | os.O_RDWR):
            opened.for_writing.add(path)
        elif path == opened.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


@dataclass(frozen=True)
class _Damage:
    """One way to damage a checkpoint.

    Attributes:
        what: A description of the damage.
        apply: Damages a folder, with an older checkpoint available, and returns the victim's name.
        hint: What a solution needs to do to notice it.
    """

    what: str
    apply: Callable[[Path, Path], str]
    hint: str


def _largest(folder: Path) -> Path:
    return max(folder.glob("*.distcp"), key=lambda path: (path.stat().st_size, path.name))


def _flip_bit(path: Path, position: int) -> str:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    return path.name


def _flip_payload(folder: Path, _: Path) -> str:
    path = _largest(folder)
    return _flip_bit(path, path.stat().st_size // 2)


def _flip_metadata(folder: Path, _: Path) -> str:
    path = folder / ".metadata"
    return _flip_bit(path, path.stat().st_size // 2)


def _truncate(folder: Path, _: Path) -> str:
    path = _largest(folder)
    path.write_bytes(path.read_bytes()[:-64])
    return path.name


def _remove(folder: Path, _: Path) -> str:
    path = _largest(folder)
    path.unlink()
    return path.name


def _swap_in_older(folder: Path, older: Path) -> str:
    path = _largest(folder)
    before = hashlib.sha256(path.read_bytes()).digest()
    shutil.copy(older / path.name, path)
    if hashlib.sha256(path.read_bytes()).digest() == before:
        raise ValueError(f"{older} holds the same {path.name}; the older checkpoint has to be another one")
    return path.name


def _add_stranger(folder: Path, _: Path) -> str:
    path = _largest(folder)
    stranger = folder / "__99_0.distcp"
    shutil.copy(path, stranger)
    return stranger.name


def _remove_manifest(folder: Path, _: Path) -> str:
    (folder / MANIFEST).unlink()
    return MANIFEST


_CONTENT = "Sizes and dates do not show it. Compare what is in the files."
_DAMAGES = (
    _Damage("one bit of a tensor has flipped", _flip_payload, _CONTENT),
    _Damage("a shard is cut off at its end", _truncate, "Compare every file, not only .metadata."),
    _Damage("a shard is missing", _remove, "Go through the names in the manifest too, not only through the files that are there."),
    _Damage("a shard comes from an older save", _swap_in_older, _CONTENT),
    _Damage("one bit of .metadata has flipped", _flip_metadata, "Its name begins with a dot, and it is part of the checkpoint."),
    _Damage(
        "there is a file that was not saved", _add_stranger, "Saving over a folder leaves such files. Compare in both directions."
    ),
    _Damage("there is no manifest", _remove_manifest, f"Without {MANIFEST} it is unknown whether the save was finished. Name it."),
)
