"""Run pytest and append the results to ``tests/gpu/RESULTS.md``: ``python -m tests.gpu.record ARGUMENTS-OF-PYTEST``.

``make gpu`` does so for the tests on GPUs and for the benchmarks on GPUs. The exit code is pytest's.
"""

from __future__ import annotations

import collections
import json
import platform
import shlex
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import torch

from labkit.base import machine
from tests.benchmarks.table import OUT

RESULTS = Path(__file__).with_name("RESULTS.md")


def main(arguments: list[str]) -> int:
    """Run and record."""
    began_s = time.time()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        code = subprocess.run([sys.executable, "-m", "pytest", *arguments, f"--junitxml={report}"], check=False).returncode
        cases = list(ET.parse(report).getroot().iter("testcase")) if report.exists() else []
    lines = [heading(), f"`pytest {shlex.join(arguments)}`: {outcome(cases)}", ""]
    for path in sorted(OUT.glob("gpu-*.json"), key=lambda path: path.stat().st_mtime):
        if path.stat().st_mtime >= began_s:
            lines += table(json.loads(path.read_text()))
    with RESULTS.open("a") as results:
        results.write("\n" + "\n".join(lines))
    return code


def heading() -> str:
    """The date, the cards and the versions."""
    cards = collections.Counter((gpu.name, gpu.driver) for gpu in machine.nvidia_gpus())
    names = ", ".join(f"{count} x {name} (driver {driver})" for (name, driver), count in cards.items()) or "no GPU"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    system = f"{platform.system()}, {machine.usable_cores()} cores, Python {platform.python_version()}"
    moment = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return f"### {moment}, {names}\n\n{system}, torch {torch.__version__}, NCCL {nccl}.\n"


def outcome(cases: list[ET.Element]) -> str:
    """The number of tests that passed, and the names of the others."""
    if not cases:
        return "no test ran"
    kinds = {kind: [case for case in cases if case.find(kind) is not None] for kind in ("failure", "error", "skipped")}
    bad = {case.get("name", "") for kind in ("failure", "error") for case in kinds[kind]}
    reasons = collections.Counter(skip.get("message", "") for case in kinds["skipped"] for skip in case.iter("skipped"))
    text = f"{len(cases) - len(kinds['skipped']) - len(bad)} passed"
    text += "".join(f", {count} skipped ({reason})" for reason, count in reasons.items())
    return text + (f", {len(bad)} failed: {', '.join(sorted(bad))}" if bad else "")


def table(record: dict[str, object]) -> list[str]:
    """One benchmark's figures."""
    rows = record["figures"]
    assert isinstance(rows, list)
    lines = [f"{record['title']}", "", "| figure | measured | against | aim |", "| --- | --- | --- | --- |"]
    lines += [f"| {row['what']} | {row['value']} | {row['against']} | {row['aim']} |".replace("\n", " ") for row in rows]
    return [*lines, ""]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
