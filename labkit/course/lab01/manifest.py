"""Exercise 3 of notebook 01: a manifest that notices damage."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from labkit.course.checks import refuse
from labkit.errors import ExerciseError

MANIFEST = "manifest.json"


def check_manifest(
    checkpoint: Path, older: Path, write_manifest: Callable[[Path], object], find_damage: Callable[[Path], Iterable[str]]
) -> str:
    """Exercise 3: ``write_manifest(folder)`` publishes a checkpoint, ``find_damage(folder)`` names the files that are not as saved.

    Copies of a real checkpoint are damaged in ways that torch loads without a word, and in ways that it does not.

    Args:
        checkpoint: A complete checkpoint without a manifest.
        older: An earlier checkpoint of the same model, whose files have the same names.
        write_manifest: Writes ``manifest.json`` into the folder, complete or not at all.
        find_damage: Returns the names of files that are missing, changed or not listed; ``manifest.json`` if there is none.

    Returns:
        A line with the number of kinds of damage found.

    Raises:
        ExerciseError: A damage goes unnoticed, an intact folder is accused, or a broken attempt leaves a manifest behind.

    Ranks: controller.
    """
    with tempfile.TemporaryDirectory(prefix="labkit-check-") as scratch:
        published = Path(scratch, "published")
        shutil.copytree(checkpoint, published)
        write_manifest(published)
        if not (published / MANIFEST).is_file():
            refuse(f"write_manifest left no {MANIFEST}.", "a manifest in the folder.")
        accused = _names(find_damage(published))
        if accused:
            hint = "The manifest cannot list itself: it does not exist yet when it is written." if MANIFEST in accused else ""
            refuse(f"an intact checkpoint is accused: {', '.join(accused)}.", "no name for an intact checkpoint.", hint)
        for number, damage in enumerate(_DAMAGES):
            folder = Path(scratch, f"damaged-{number}")
            shutil.copytree(published, folder)
            victim = damage.apply(folder, older)
            found = _names(find_damage(folder))
            if victim not in found:
                said = f"find_damage names {', '.join(found)}" if found else "find_damage finds nothing"
                refuse(f"{damage.what}: {said}.", f"{victim} is named.", damage.hint)
            if others := [name for name in found if name != victim]:
                refuse(f"{damage.what}: {', '.join(others)} is accused too.", f"{victim} and nothing else.")
        _check_publication(Path(checkpoint), Path(scratch, "unreadable"), write_manifest)
    return f"Solved: {len(_DAMAGES)} kinds of damage found, the intact checkpoint accepted, and a broken attempt publishes nothing."


def _names(found: Iterable[str]) -> list[str]:
    if isinstance(found, str) or not isinstance(found, Iterable):
        raise ExerciseError(f"find_damage returned {found!r}. It has to return file names: a list or a set of texts.")
    return sorted(str(name) for name in found)


def _check_publication(checkpoint: Path, folder: Path, write_manifest: Callable[[Path], object]) -> None:
    shutil.copytree(checkpoint, folder)
    # Sorts behind every file of the checkpoint and cannot be read: hashing stops when the others are done.
    (folder / "~unreadable.distcp").symlink_to(folder / "nowhere")
    try:
        write_manifest(folder)
    except OSError:
        if (folder / MANIFEST).exists():
            refuse(
                f"write_manifest failed at a file that it could not read, and left a {MANIFEST}.",
                "a manifest that appears in one piece, after everything it lists.",
                "Write to another name first and rename it at the end. A reader takes the manifest as the sign that all is there.",
            )


@dataclass(frozen=True)
class _Damage:
    """One way to damage a checkpoint.

    Attributes:
        what: The damage in words.
        apply: Does it to a folder, with an older checkpoint at hand, and returns the victim's name.
        hint: What a solution needs in order to see it.
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
        "a file lies there that was not saved", _add_stranger, "Saving over a folder leaves such files. Compare in both directions."
    ),
    _Damage("there is no manifest", _remove_manifest, f"Without {MANIFEST} nobody knows whether the save was finished. Name it."),
)
