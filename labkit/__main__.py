"""``python -m labkit`` is the ``labkit`` command."""

from __future__ import annotations

from labkit.cli import main

main(prog_name="labkit")
