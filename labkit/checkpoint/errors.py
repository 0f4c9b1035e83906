"""The errors of labkit.checkpoint. Each names the file it is about and says what to do next."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.base.plain_text import printable
from labkit.errors import CheckpointError

__all__ = [
    "AmbiguousCheckpointError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointFormatError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointWriteError",
    "CorruptCheckpointError",
    "DtypeNarrowingError",
    "FQNMismatchError",
    "IncompleteCheckpointError",
    "RankDivergenceError",
    "UnsafeCheckpointError",
    "UnsavableStateError",
    "UnsupportedTensorError",
    "VerificationError",
]

#: What to do about a file that is missing or cut off.
COPY_ADVICE = "Copy it from where it was saved, or use an earlier checkpoint."
# Used as the path in errors about the caller's state.
STATE = "the state"


class CheckpointFormatError(CheckpointError):
    """A file is not what its name or its checkpoint says, or it has a form that labkit does not read.

    Attributes:
        path: The file or directory.
        reason: What is wrong with it.
    """

    def __init__(self, path: object, reason: str) -> None:
        self.path, self.reason = str(path), reason
        super().__init__(f"{self.path}: {reason}")


class CheckpointNotFoundError(CheckpointFormatError):
    """There is no checkpoint at this path, or no complete step in this store."""


class AmbiguousCheckpointError(CheckpointFormatError):
    """A path can be read in several ways, and labkit does not guess which one is meant.

    Attributes:
        readings: The paths that may be meant, in a form that the caller can pass instead.
    """

    def __init__(self, path: object, reason: str, readings: Sequence[str], *, advice: str) -> None:
        self.readings, self.advice = tuple(readings), advice
        super().__init__(path, reason)
        self.args = ("\n".join(map(printable, [f"{path}: {reason}.", *(f"  - {reading}" for reading in readings), advice])),)

    def __str__(self) -> str:
        return Exception.__str__(self)

    def seen_from(self, root: object) -> AmbiguousCheckpointError:
        """Return the same error with paths relative to a directory, for an option that takes such paths."""
        here = f"{root}/"
        readings = [reading.replace(here, "") for reading in self.readings]
        return AmbiguousCheckpointError(self.path, self.reason, readings, advice=self.advice.replace(here, ""))


class UnsafeCheckpointError(CheckpointFormatError):
    """A pickle in a checkpoint names code outside the allow-list. None of it was run.

    Attributes:
        names: The dotted names in the pickle that are outside the list, sorted.
    """

    #: The message lists at most this many names; the attribute holds all of them.
    max_listed = 12

    def __init__(self, path: object, names: Sequence[str], *, advice: str = "") -> None:
        self.names = tuple(sorted(set(names)))
        listed = ", ".join(self.names[: self.max_listed])
        if len(self.names) > self.max_listed:
            listed += f" and {len(self.names) - self.max_listed} more"
        super().__init__(
            path,
            f"its pickle asks for {listed}, which is outside the list of data that labkit reads. Nothing was run. "
            + (advice or "Do not load this file with torch.load(weights_only=False) or DCP unless you know who made it."),
        )


class UnsupportedTensorError(CheckpointFormatError):
    """A tensor of a kind that labkit describes but does not read: quantized, sparse, jagged, a subclass.

    Attributes:
        what: A description of the tensor's kind.
    """

    def __init__(self, path: object, what: str, key: str = "") -> None:
        self.what = what
        super().__init__(path, f"not supported: {key and f'{key}: '}{what}")


class IncompleteCheckpointError(CheckpointFormatError):
    """Part of a checkpoint is missing: a file, the end of a file, a region of a tensor, or the manifest."""

    def __init__(self, path: object, reason: str, *, advice: str = COPY_ADVICE) -> None:
        super().__init__(path, f"{reason.removesuffix('.')}. {advice}" if advice else reason)


class CorruptCheckpointError(CheckpointFormatError):
    """The bytes of a file are not the bytes that were written: a hash or checksum differs."""


class CheckpointExistsError(CheckpointFormatError):
    """The destination already exists; labkit never overwrites a checkpoint."""


class CheckpointWriteError(CheckpointFormatError):
    """A checkpoint could not be written. Existing complete checkpoints are untouched."""


def _first(problems: Sequence[str], most: int) -> list[str]:
    more = len(problems) - most
    return [*problems[:most], *([f"and {more} more"] if more > 0 else [])]


class CheckpointMismatchError(CheckpointError):
    """A checkpoint and the state that should receive it do not match.

    Attributes:
        path: The checkpoint.
        problems: One sentence per problem.
    """

    #: The message lists at most this many problems; the attribute holds all of them.
    max_listed = 12
    #: What the first line says about ``path``.
    verdict = "does not fit"
    #: Characters not to escape in problems: line breaks, for problems that are already printable and may span lines.
    _kept = ""

    def __init__(self, path: object, problems: Sequence[str], *, advice: str = "") -> None:
        self.path, self.problems = str(path), tuple(problems)
        lines = [self._headline(), *(f"  - {problem}" for problem in self._listed())]
        if advice:
            lines.append(advice)
        super().__init__("\n".join(printable(line, keep=self._kept) for line in lines))

    def __str__(self) -> str:
        return Exception.__str__(self)

    def _headline(self) -> str:
        return f"{self.path} {self.verdict}:"

    def _listed(self) -> list[str]:
        return _first(self.problems, self.max_listed)


class FQNMismatchError(CheckpointMismatchError):
    """Names are missing, unexpected, or collide.

    Attributes:
        missing: Names that the receiving side has and the checkpoint lacks.
        unexpected: Names that the checkpoint has and the receiving side lacks.

    ``problems`` are sentences about names that are neither.
    """

    #: If there are several kinds of problems, the message lists at most this many of each.
    max_listed_of_each = 5

    def __init__(
        self,
        path: object,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        problems: Sequence[str] = (),
        advice: str = "",
    ) -> None:
        self.missing, self.unexpected = tuple(missing), tuple(unexpected)
        self._groups = [
            list(problems),
            [f"missing in the checkpoint: {name}" for name in self.missing],
            [f"unexpected in the checkpoint: {name}" for name in self.unexpected],
        ]
        super().__init__(path, [problem for group in self._groups for problem in group], advice=advice)

    def _listed(self) -> list[str]:
        """Return some problems of each kind, so that a reader can compare what each side lacks."""
        groups = [group for group in self._groups if group]
        if len(groups) < 2 or len(self.problems) <= self.max_listed:
            return super()._listed()
        return [line for group in groups for line in _first(group, self.max_listed_of_each)]


class DtypeNarrowingError(CheckpointMismatchError):
    """A value would lose range or precision on the way from the checkpoint into the receiving tensor."""


class RankDivergenceError(CheckpointMismatchError):
    """Ranks hold different values under the same name, so that only one of them would be saved."""


class UnsavableStateError(CheckpointMismatchError):
    """A state holds something that a load would not restore unchanged. Nothing was written."""

    verdict = "cannot be saved"


class VerificationError(CheckpointMismatchError):
    """A checkpoint has errors that ``verify`` reports, and the caller has not accepted them.

    Attributes:
        codes: The errors' codes, sorted.

    ``problems`` holds the findings, formatted for people.
    """

    _kept = "\n"

    def __init__(self, path: object, problems: Sequence[str], *, codes: Sequence[str], advice: str = "") -> None:
        self.codes = tuple(codes)
        super().__init__(path, problems, advice=advice)

    def _headline(self) -> str:
        return f"{self.path}: verify finds {len(self.problems)} error{'s' if len(self.problems) > 1 else ''}:"
