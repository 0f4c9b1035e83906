"""Files that a command replaces are looked at in the folder that is written to, whatever its path meant before."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest

from labkit.course.files import IsOwn, OverwriteError, refuse_foreign, replace_file, sealed
from labkit.course.handouts import nbgrader
from labkit.course.running import junit, summary
from labkit.course.running.execution import is_executed_copy
from labkit.course.script import is_script

# What each command writes, and how it knows that again.
KINDS: dict[str, tuple[str, IsOwn]] = {
    "run": (sealed(nbformat.v4.new_notebook(), "labkit run"), is_executed_copy),
    "summary": (f"<!doctype html>\n{summary._MARK}", summary._is_summary),
    "junit": (f"<?xml?>\n{junit._MARK}>", junit._is_report),
    "script": ('"""The cells of 01_lab.ipynb as one script, written by `labkit script`.', is_script),
    "nbgrader": (sealed(nbformat.v4.new_notebook(), "labkit nbgrader"), nbgrader._is_assignment),
}


@pytest.mark.parametrize("there", ["text", "another kind", "link", "folder", "changed"])
@pytest.mark.parametrize("kind", KINDS)
def test_v4_what_comes_into_the_place_after_it_was_looked_at_stays(kind: str, there: str, tmp_path: Path) -> None:
    text, is_own = KINDS[kind]
    path, precious = tmp_path / "out" / "file", tmp_path / "precious"
    path.parent.mkdir()
    precious.mkdir()
    replace_file(path, text, is_own)
    refuse_foreign(path, [], is_own)
    replace_file(path, text, is_own)
    if there == "link":
        (precious / "file").symlink_to("elsewhere")
    elif there == "folder":
        (precious / "file").mkdir()
    else:
        other = KINDS["run" if kind != "run" else "nbgrader"][0]
        changed = text.replace("labkit", "lab") if kind not in ("run", "nbgrader") else text.replace('"cells": []', '"cells": [1]')
        (precious / "file").write_text({"text": "mine", "another kind": other, "changed": changed}[there])
    before = (precious / "file").lstat()
    path.parent.rename(tmp_path / "away")
    precious.rename(path.parent)
    with pytest.raises(OverwriteError, match=r"[Cc]hoose another place"):
        replace_file(path, text, is_own)
    assert path.lstat() == before
    assert os.listdir(path.parent) == ["file"]
    assert (tmp_path / "away" / "file").read_text() == text
