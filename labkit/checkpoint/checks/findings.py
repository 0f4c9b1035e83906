"""Findings of verification, one line each with what they mean for a load, and the gate that lets some of them pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from labkit.base.plain_text import printable
from labkit.checkpoint.errors import CheckpointError, VerificationError

Severity = Literal["error", "warning"]

#: What each finding code means.
CODES: Mapping[str, str] = {
    "bad-manifest": "the manifest cannot be read, so nothing says what the files should hold",
    "changed-content": "bytes differ from the hash or checksum that was written with them",
    "changed-size": "a file's size differs from the manifest's",
    "copies-differ": "the files of several ranks hold different values of one tensor",
    "flat-parameters": "it holds flat parameters of FSDP1, which cannot be compared",
    "late-file": "a data file is newer than the index, which a save writes last",
    "misshapen-state": "a piece of optimizer state does not have its parameter's shape",
    "missing-file": "a file that the index or the manifest names is missing",
    "missing-rank": "a rank's file, or one of several numbered files, is missing, with everything that only it holds",
    "missing-key": "the model or the other checkpoint has a tensor that this one lacks",
    "newer-python": "the Python here cannot read the index, since a Python of another version or system wrote it",
    "newer-torch": "the torch here cannot read the index, since a torch of another version wrote it",
    "no-state": "a parameter has no optimizer state",
    "not-finite": "a tensor holds NaN or inf",
    "numbered-state": "optimizer state has numbers instead of names",
    "other-bits": "a tensor differs from the other checkpoint's",
    "other-dtype": "a tensor's dtype differs from the model's",
    "outside": "part of a tensor lies outside its shape",
    "overlapping": "some elements of a tensor are stored several times",
    "partial-state": "a parameter lacks a piece of optimizer state that its other pieces need",
    "shared-bytes": "two entries share bytes",
    "shared-moments": "an optimizer's first and second moments are the same numbers",
    "short-file": "a file ends before the data that the index places in it",
    "stranger-state": "optimizer state belongs to no parameter group",
    "stray-file": "a data file is not named by the index",
    "tied": "two parameters of the model are one tensor here",
    "trainer-shards": "its trainer's keys say that it holds part of a model or of flattened parameters, which that trainer joins",
    "uncovered": "some elements of a tensor are stored nowhere",
    "uneven-state": "a parameter has fewer pieces of optimizer state than others",
    "uneven-steps": "the step counters of one optimizer differ",
    "unexpected-key": "it has a tensor that the model or the other checkpoint lacks",
    "unpublished": "the save of this step did not finish",
    "unreadable": "an entry, or the whole checkpoint, cannot be read",
    "unsafe": "a pickle asks for something that torch would import and call",
    "unsupported": "a tensor is of a kind that labkit does not read: quantized, jagged, sparse, or far larger than what is stored",
    "untied": "one parameter of the model is two different tensors here",
    "wrapped-name": "names contain parts that wrappers added",
    "wrong-shape": "a tensor's shape differs from the model's",
}

#: These cannot be accepted: elements are missing, or it is unclear which of several copies to use.
FINAL = frozenset(
    {"missing-file", "short-file", "uncovered", "overlapping", "outside", "unreadable", "unsupported", "trainer-shards"}
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of a checkpoint.

    Attributes:
        code: A short stable name, for programs: ``missing-file``.
        severity: ``error`` if a load gives wrong values or fails; ``warning`` if it may.
        where: The file, or the tensor's name.
        what: The problem, with numbers; printable, and on one line unless it is an exception's text.
        consequence: What a load would do about it.
    """

    code: str
    severity: Severity
    where: str
    what: str
    consequence: str

    def line(self) -> str:
        """Format the finding for people. Line breaks are escaped in names but kept in an exception's text."""
        where, what = printable(self.where), self.what.removesuffix(".")
        return f"{self.severity}: {where}: {what}. Consequence: {self.consequence} [{self.code}]"


@dataclass
class Report:
    """The outcome of a verification.

    Attributes:
        path: The checkpoint.
        findings: The problems, errors first.
        checked: How many items and bytes of each kind were checked.
        unchecked: Sentences about what could not be checked.
    """

    path: str
    findings: list[Finding] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)
    unchecked: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if no finding is an error."""
        return all(finding.severity != "error" for finding in self.findings)

    def error(self, code: str, where: object, what: str | CheckpointError, consequence: str) -> None:
        """Add an error; the text of an exception keeps its line breaks."""
        self.findings.append(Finding(code, "error", str(where), _text(where, what), consequence))

    def warning(self, code: str, where: object, what: str | CheckpointError, consequence: str) -> None:
        """Add a warning, as :meth:`error` does."""
        self.findings.append(Finding(code, "warning", str(where), _text(where, what), consequence))

    def count(self, name: str, number: int = 1) -> None:
        """Add to a count of what was checked."""
        self.checked[name] = self.checked.get(name, 0) + number

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        fields = ("code", "severity", "where", "what", "consequence")
        return {
            "path": self.path,
            "ok": self.ok,
            "checked": self.checked,
            "unchecked": self.unchecked,
            "findings": [{name: getattr(finding, name) for name in fields} for finding in self.findings],
        }


def _text(where: object, what: str | CheckpointError) -> str:
    # An exception's text already says which file or tensor it is about, and its names are already escaped.
    if isinstance(what, str):
        return printable(what)
    name = printable(str(where))
    return str(what).removeprefix(f"{name}: ").removeprefix(f"{name} ")


#: These stop nothing: labkit reads the index itself, and writes a new one for the installed torch or the version the caller names.
CURED = frozenset({"newer-torch", "newer-python"})


@dataclass
class Gate:
    """A gate that passes checkpoints with no errors, or only accepted ones.

    An error stops the operation unless its code is in :data:`CURED` or the caller accepts it (``despite``). Warnings stop
    nothing. Errors in entries that the operation leaves out are ignored.

    Attributes:
        path: The checkpoint being checked, for messages.
        despite: The codes that the caller accepts.
        accepted: The errors that passed because the caller accepts them.
    """

    path: object
    despite: frozenset[str]
    accepted: list[Finding] = field(default_factory=list)

    @classmethod
    def of(cls, path: object, despite: Iterable[str]) -> Gate:
        """Return a gate that accepts the given codes.

        Raises:
            CheckpointError: A code is unknown, or cannot be accepted.
        """
        codes = [despite] if isinstance(despite, str) else list(despite)
        known = ", ".join(sorted(CODES.keys() - FINAL))
        for code in codes:
            if code not in CODES:
                raise CheckpointError(f"despite={code!r} (--despite) is not a finding's code. The codes are: {known}.")
            if code in FINAL:
                raise CheckpointError(
                    f"despite={code!r} (--despite) cannot be accepted: {CODES[code]}, so there is nothing to go on with. "
                    f"The codes are: {known}."
                )
        return cls(path, frozenset(codes))

    def allows(self, code: str) -> bool:
        """Return whether an error with this code lets the operation continue."""
        return code in self.despite or code in CURED

    def check(self, report: Report, advice: str) -> None:
        """Record the errors that the caller accepts; raise if any others remain.

        Args:
            report: The findings.
            advice: The last sentence of an error: what has or has not happened.

        Raises:
            VerificationError: There are errors that the caller does not accept.
        """
        errors = [finding for finding in report.findings if finding.severity == "error"]
        refused = [finding for finding in errors if not self.allows(finding.code)]
        if refused:
            raise VerificationError(
                self.path,
                [finding.line() for finding in refused],
                codes=sorted({finding.code for finding in refused}),
                advice=f"{advice} {way_on({finding.code for finding in refused}, self.despite)}",
            )
        known = {finding.code for finding in self.accepted}
        self.accepted += [finding for finding in errors if finding.code not in CURED and finding.code not in known]

    def notes(self) -> list[str]:
        """Return the findings that the caller accepted, one sentence each."""
        return [f"accepted: {finding.line()}" for finding in self.accepted]


def way_on(codes: Iterable[str], accepted: Iterable[str] = ()) -> str:
    """Return a sentence on how to continue despite these errors; ``accepted`` lists the codes already accepted."""
    final = sorted(FINAL.intersection(codes))
    if final:
        return (
            f"[{'], ['.join(final)}] cannot be accepted: data are missing, or nothing says which are meant. "
            "Use another copy of the checkpoint, or leave those entries out."
        )
    every = sorted({*codes, *accepted})
    options = " ".join(f"--despite {code}" for code in every)
    return f"If you accept that, go on with despite={every!r} ({options})."
