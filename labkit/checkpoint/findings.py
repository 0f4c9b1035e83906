"""What verification reports: one line a finding, with what a load would do about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        code: A short stable name, for programs: ``missing-file``.
        severity: ``error`` when a load gives wrong values or fails; ``warning`` when it may.
        where: The file, or the tensor's name.
        what: What is wrong, in numbers.
        consequence: What a load would do about it.
    """

    code: str
    severity: Severity
    where: str
    what: str
    consequence: str

    def line(self) -> str:
        """The finding in one line."""
        return f"{self.severity}: {self.where}: {self.what.removesuffix('.')}. Consequence: {self.consequence} [{self.code}]"


@dataclass
class Report:
    """The outcome of a verification.

    Attributes:
        path: The checkpoint.
        findings: What is wrong, errors first.
        checked: What was looked at: counts and bytes by name.
        unchecked: Sentences about what could not be looked at.
    """

    path: str
    findings: list[Finding] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)
    unchecked: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return all(finding.severity != "error" for finding in self.findings)

    def error(self, code: str, where: object, what: str, consequence: str) -> None:
        """Note an error."""
        self.findings.append(Finding(code, "error", str(where), what, consequence))

    def warning(self, code: str, where: object, what: str, consequence: str) -> None:
        """Note a warning."""
        self.findings.append(Finding(code, "warning", str(where), what, consequence))

    def count(self, name: str, number: int = 1) -> None:
        """Add to what was looked at."""
        self.checked[name] = self.checked.get(name, 0) + number

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data for JSON."""
        fields = ("code", "severity", "where", "what", "consequence")
        return {
            "path": self.path,
            "ok": self.ok,
            "checked": self.checked,
            "unchecked": self.unchecked,
            "findings": [{name: getattr(finding, name) for name in fields} for finding in self.findings],
        }
