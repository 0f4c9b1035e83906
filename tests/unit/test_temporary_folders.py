"""Folders for temporary files: nobody else can change the way to them, and the working directory is none of them."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from labkit.base import places
from labkit.base.places import PlaceError
from labkit.cli import main
from tests.conftest import TESTS

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder to another user, and make a namespace")
# What makes a name in the temporary folder that others may see and exchange. TemporaryFile makes none.
NAMES = {"mkdtemp", "TemporaryDirectory", "gettempdir", "gettempdirb", "mkstemp", "mktemp", "NamedTemporaryFile"}


def named(source: str) -> set[str]:
    tree = ast.parse(source)
    return NAMES & {
        *(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)),
        *(alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names),
    }


def test_v2_only_places_makes_temporary_folders() -> None:
    assert named("from tempfile import mkdtemp\nimport tempfile\ntempfile.gettempdir()") == {"mkdtemp", "gettempdir"}
    package = TESTS.parent / "labkit"
    assert {str(path.relative_to(package)): found for path in package.rglob("*.py") if (found := named(path.read_text()))} == {}


@pytest.mark.parametrize("what", ["open", "open for a group", "below an open one", "another user's", "a link there"])
def test_v2_a_named_folder_that_others_can_change_is_refused_with_the_next_step(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "another user's" and os.geteuid() != 0:
        pytest.skip("only root may give a folder to another user")
    outer = tmp_path / "outer"
    (outer / "tmp").mkdir(parents=True)
    (tmp_path / "link").symlink_to(outer / "tmp")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "link" if what == "a link there" else outer / "tmp"))
    if what == "another user's":
        os.chown(outer, 65534, 65534)
    else:
        bad = outer if what == "below an open one" else outer / "tmp"
        bad.chmod(0o770 if what == "open for a group" else 0o777)
    with pytest.raises(
        PlaceError, match=r"outer.* can be changed by other users\. .* Set TMPDIR to a folder that only you can write"
    ):
        places.new_temporary("labkit-")
    assert os.listdir(outer / "tmp") == []


def test_v2_a_shared_folder_with_a_sticky_bit_is_good_and_what_is_made_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with places.temporary("labkit-") as made:
        assert Path(made).parent == tmp_path
        assert Path(made).stat().st_mode & 0o777 == 0o700
        assert os.listdir(made) == []
        Path(made, "file").touch()
    assert os.listdir(tmp_path) == []


def test_v2_the_working_directory_is_never_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(places, "_TEMPORARY", ("/missing", "/proc"))
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(PlaceError, match=r"the system's cannot be used \(/proc: .*\)\. Set TMPDIR"):
        places.new_temporary("labkit-")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "not there"))
    with pytest.raises(PlaceError, match="Set TMPDIR"):
        places.new_temporary("labkit-")
    assert os.listdir(tmp_path) == []


def test_v2_a_folder_without_room_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full, free = tmp_path / "full", tmp_path / "free"
    full.mkdir()
    free.mkdir()
    write = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", lambda path, data: _full() if full in path.parents else write(path, data))
    monkeypatch.setenv("TMPDIR", str(full))
    monkeypatch.setattr(places, "_TEMPORARY", (str(free),))
    assert Path(places.new_temporary("labkit-")).parent == free
    assert os.listdir(full) == []


def _full() -> int:
    raise OSError(28, "No space left on device")


def test_a_folder_for_sockets_has_a_short_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    made = places.new_temporary("labkit-", longest=places.FOR_SOCKETS)
    assert len(made) <= places.FOR_SOCKETS
    assert long not in Path(made).parents
    os.rmdir(made)
    made = places.new_temporary("labkit-")
    assert long in Path(made).parents


@as_root
def test_what_belongs_to_nobody_counts_as_root_s_only_where_root_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(tmp_path, 65534, 65534)
    tmp_path.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(PlaceError, match="can be changed by other users"):
        places.new_temporary("labkit-")
    monkeypatch.setattr(places, "_hidden_root", lambda: 65534)
    assert Path(places.new_temporary("labkit-")).parent == tmp_path


MADE = "from labkit.base import places; print(places.new_temporary('labkit-'))"


@as_root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_root_s_folders_are_root_s_in_a_container_that_does_not_know_root(tmp_path: Path) -> None:
    """There /tmp belongs to nobody, as everything of root's does."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    ways = [folder, *folder.parents]
    before = [way.stat().st_mode for way in ways]
    try:
        for way in ways[:-2]:
            way.chmod(way.stat().st_mode | 0o005)
        drop = ["setpriv", "--reuid=4242", "--regid=4242", "--clear-groups"]
        given = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(TESTS.parent)}
        command = [*drop, "unshare", "--user", sys.executable, "-P", "-c", MADE]
        done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
        if "Operation not permitted" in done.stderr or "ermission denied" in done.stderr:
            pytest.skip("another user can neither make a namespace here nor read this Python")
        assert Path(done.stdout.strip()).parent == folder, done.stderr
    finally:
        for way, mode in zip(ways, before, strict=True):
            way.chmod(mode & 0o7777)


def test_v2_a_run_stops_where_others_can_change_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = tmp_path / "one.ipynb"
    notebook.write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    with tempfile.TemporaryDirectory(prefix="t") as shared:  # short, as sockets need it
        Path(shared).chmod(0o777)
        monkeypatch.setenv("TMPDIR", shared)
        for command in ("run", "handouts"):
            result = CliRunner().invoke(main, [command, str(notebook), "--out", str(tmp_path / "out")])
            assert result.exit_code != 0
            assert "Set TMPDIR" in result.output
        assert os.listdir(shared) == []
