"""A destination that is absent or complete: everything is written beside it and renamed last, and a killed run resumes.

``DST.partial`` holds the finished files, a journal of them, and the plan that they belong to. A run with the same plan
takes over the files that the journal lists, after hashing them again; a run with another plan starts anew. A run that ends in an
error removes the folder, unless there are finished files and the same run may go on with them.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import IO, Any

from labkit.checkpoint import manifest
from labkit.checkpoint.errors import CheckpointError, CheckpointExistsError, CheckpointWriteError
from labkit.checkpoint.manifest import FileSum, Manifest
from labkit.checkpoint.wording import counted

_NOTES = ".labkit"
GO_ON = "the same command goes on from there. Remove that folder if you do not want to go on."


def partial_folder(destination: Path) -> Path:
    """Where a destination is written until it is complete."""
    return destination.with_name(destination.name + ".partial")


def is_partial(folder: Path) -> bool:
    """Whether a directory is one that a run has left unfinished."""
    return (folder / _NOTES).is_dir()


@dataclass(frozen=True)
class Written:
    """A finished file.

    Attributes:
        total: Its size and hash.
        items: What the format needs to know of it for its index: plain data.
    """

    total: FileSum
    items: list[Any] = field(default_factory=list)


class StagingArea:
    """The directory beside a destination.

    Args:
        destination: Where the result goes; it must not exist.
        plan: Plain data that says what is being written; equal plans write equal bytes.

    Raises:
        CheckpointExistsError: The destination exists, or in the place of the folder beside it is something that is not labkit's.
        CheckpointWriteError: Another process is writing to this destination.
    """

    def __init__(self, destination: Path, plan: Mapping[str, Any]) -> None:
        self.destination = destination
        self.folder = partial_folder(destination)
        self._notes = self.folder / _NOTES
        self._lock = Lock()
        self.done: dict[str, Written] = {}
        if destination.exists():
            raise CheckpointExistsError(destination, "the destination exists. Choose another one, or remove it.")
        self._refuse_stranger()
        self._made = [parent for parent in self.folder.parents if not parent.exists()]
        self._notes.mkdir(parents=True, exist_ok=True)
        self._guard: IO[str] = (self._notes / "lock").open("w")
        try:
            fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._guard.close()
            raise CheckpointWriteError(destination, "another process is writing it. Wait for it, or end it.") from None
        text = json.dumps(plan, sort_keys=True)
        try:
            if not self._resume(text):
                self._start(text)
        except BaseException as error:
            error.add_note(self.stop())
            raise

    def _refuse_stranger(self) -> None:
        # Complete, and killed before the last rename, it has a manifest and no notes any more.
        if (
            self.folder.exists()
            and not is_partial(self.folder)
            and (not self.folder.is_dir() or (any(self.folder.iterdir()) and manifest.read(self.folder) is None))
        ):
            raise CheckpointExistsError(
                self.folder, "it is needed for writing, and is not labkit's. Move it, or choose another destination."
            )

    @property
    def resumed(self) -> int:
        """How many finished files were taken over from an earlier run."""
        return len(self.done)

    def _resume(self, plan: str) -> bool:
        try:
            if (self._notes / "plan.json").read_text() != plan:
                return False
        except FileNotFoundError:
            return False
        for name, written in self._journal().items():
            try:
                manifest.check_file(self.folder, name, written.total)
            except CheckpointError:
                continue
            self.done[name] = written
        for path in self.folder.iterdir():
            if path.name not in self.done and path.name != _NOTES:
                path.unlink()
        return True

    def _journal(self) -> dict[str, Written]:
        found: dict[str, Written] = {}
        try:
            lines = (self._notes / "journal.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return found
        for line in lines:
            try:
                note = json.loads(line)
                found[note["name"]] = Written(FileSum(**note["total"]), note["items"])
            except (ValueError, KeyError, TypeError):
                break  # a kill in the middle of the last line
        return found

    def _start(self, plan: str) -> None:
        for path in self.folder.iterdir():
            if path.name != _NOTES:
                path.unlink()
        (self._notes / "journal.jsonl").unlink(missing_ok=True)
        manifest.write_atomically(self._notes / "plan.json", plan.encode())

    def temporary(self, name: str) -> Path:
        """Where to write a file until it is complete."""
        return self.folder / f"{name}.tmp"

    def finish_file(self, name: str, written: Written) -> None:
        """Take over a file that is on disk under its temporary name, once it reads back as it was written.

        Raises:
            CheckpointWriteError: It does not read back.
        """
        temporary = self.temporary(name)
        try:
            manifest.check_file(self.folder, temporary.name, written.total, from_disk=True)
        except CheckpointError as error:
            raise CheckpointWriteError(temporary, f"what was just written does not read back ({error})") from None
        temporary.rename(self.folder / name)
        manifest.sync_directory(self.folder)
        line = json.dumps({"name": name, "total": asdict(written.total), "items": written.items})
        with self._lock, (self._notes / "journal.jsonl").open("a") as journal:
            journal.write(line + "\n")
            journal.flush()
            os.fsync(journal.fileno())
            self.done[name] = written

    def publish(self, extra: Mapping[str, FileSum], about: Mapping[str, Any], *, as_file: str | None = None) -> None:
        """Make the destination appear, complete, by one rename.

        Args:
            extra: Files beside the journal's, such as an index.
            about: For the manifest of a directory.
            as_file: The name of the one file that becomes the destination, when that is a file.
        """
        if as_file is not None:
            (self.folder / as_file).rename(self.destination)
            manifest.sync_directory(self.destination.parent)
            self.close()
            shutil.rmtree(self.folder)
            return
        files = {name: written.total for name, written in self.done.items()} | dict(extra)
        manifest.publish(self.folder, Manifest(files, about=about))
        self.close()
        shutil.rmtree(self._notes)
        manifest.sync_directory(self.folder)
        self.folder.rename(self.destination)
        manifest.sync_directory(self.destination.parent)

    def stop(self, *, resumable: bool = True) -> str:
        """End without a destination.

        Args:
            resumable: Whether the same run may come further with the files that are finished. Without that, and where none is,
                everything is removed.

        Returns:
            What is left, in a sentence or two.
        """
        if resumable and self.done:
            for path in self.folder.iterdir():
                if path.name not in self.done and path.name != _NOTES:
                    path.unlink(missing_ok=True)
            self.close()
            files = counted(len(self.done), "finished file")
            return f"{self.destination} was not made. {self.folder} keeps {files}: {GO_ON}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()
        for parent in self._made:
            try:
                parent.rmdir()
            except OSError:
                break  # somebody else has put something there
        return f"{self.destination} was not made, and nothing is left of it."

    def close(self) -> None:
        """Let others write to the destination; what is there stays for a later run."""
        self._guard.close()
