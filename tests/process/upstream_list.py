"""Read ``upstream_verdicts.toml``, the list of the verdicts that PyTorch's own test bodies are expected to get."""

from __future__ import annotations

import importlib.util
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.process.upstream import Verdict

FILE = Path(__file__).with_name("upstream_verdicts.toml")


@dataclass(frozen=True)
class Expected:
    """The list for one torch, on a pool or in plain processes.

    Attributes:
        exceptions: The bodies that do not simply pass.
        left_out: Bodies without a verdict here.
        quick: A few bodies that pass, for every run of the tests.
        restart_after: Bodies after which a pool is restarted.
    """

    exceptions: dict[str, Verdict]
    left_out: frozenset[str]
    quick: tuple[str, ...]
    restart_after: frozenset[str]

    def of(self, name: str) -> Verdict:
        """Return the verdict that a body is expected to get."""
        return self.exceptions.get(name, Verdict("passes"))

    def surprises(self, found: dict[str, Verdict]) -> list[str]:
        """Return a line for each body whose verdict is not the expected one."""
        return [
            f"{name}: expected {self.of(name)!s}; got {verdict!s}"
            for name, verdict in found.items()
            if not verdict.fits(self.of(name))
        ]

    def unknown(self, names: list[str]) -> list[str]:
        """Return a line for each name in the list that is not a body of this torch."""
        listed = {*self.exceptions, *self.left_out, *self.quick, *self.restart_after}
        return [f"{name}: listed in {FILE.name}, and no body of this torch" for name in sorted(listed - set(names))]


def expected(version: str, *, cuda_build: bool, where: str) -> Expected | None:
    """Return the list for a torch, or None when its release has not been measured.

    Args:
        version: ``torch.__version__``.
        cuda_build: Whether that torch was built with CUDA.
        where: ``pool`` or ``plain``.
    """
    release = ".".join(version.split(".")[:2])
    listed = tomllib.loads(FILE.read_text())
    if release not in listed["torch"]:
        return None
    exceptions: dict[str, Verdict] = {}
    left_out: set[str] = set()
    for group in listed["exceptions"]:
        if release not in group.get("torch", listed["torch"]) or group.get("where", where) != where:
            continue
        if _is_left_out(group, cuda_build):
            left_out.update(group["bodies"])
            continue
        for name in group["bodies"]:
            assert name not in exceptions, f"{FILE.name} lists {name} twice"
            exceptions[name] = Verdict(group["verdict"], group["says"])
    return Expected(exceptions, frozenset(left_out), tuple(listed["quick"]), frozenset(listed["restart_after"]))


def _is_left_out(group: dict[str, Any], cuda_build: bool) -> bool:
    if group.get("cpu_build_only") and cuda_build:
        return True
    return "not_with" in group and importlib.util.find_spec(group["not_with"]) is not None
