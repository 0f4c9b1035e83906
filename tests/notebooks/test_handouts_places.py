"""Handouts in a folder that others may write to: labkit trusts, replaces, deletes and enters only the caller's own files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from click.testing import CliRunner, Result
from nbformat.v4 import new_markdown_cell, new_notebook

from labkit.base import machine
from labkit.base.places import PlaceError
from labkit.cli import main
from labkit.course.handouts.build import Handouts, make_handouts
from labkit.course.handouts.errors import HandoutError

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")


@pytest.fixture(autouse=True)
def _no_chromium(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_chromium", lambda: None)


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """A notebook of the user's, in a folder of its own."""
    (tmp_path / "private").mkdir()
    path = tmp_path / "private" / "a.ipynb"
    nbformat.write(new_notebook(cells=[new_markdown_cell("# 1 T")]), path)
    return path


def _given_away(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def _handouts(notebook: Path, out: Path) -> Result:
    return CliRunner().invoke(main, ["handouts", str(notebook), "-o", str(out)])


def _made(notebook: Path, out: Path, meanwhile: Callable[[], object] | None = None) -> Handouts:
    """Make handouts, and call a function while they are built."""
    steps = [meanwhile] if meanwhile else []
    return make_handouts([notebook], out, chromium="", on_page=lambda name, audience: steps and steps.pop()())


def _list(out: Path, *names: str) -> Path:
    """Write a list with the hashes of these files."""
    hashes = {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in names}
    (out / "handouts.json").write_text(json.dumps({"files": hashes}))
    return out / "handouts.json"


def _is_refused_in_a_line(told: Result, *words: str) -> None:
    assert (told.exit_code, len(told.output.splitlines())) == (1, 1), told.output
    assert [word for word in words if word not in told.output] == []


@pytest.mark.parametrize("whose", ["mine", pytest.param("another's", marks=as_root)])
def test_s5_a_folder_of_handouts_that_is_a_link_is_refused_and_nothing_is_written_behind_it(
    tmp_path: Path, lab: Path, whose: str
) -> None:
    site, out = tmp_path / "site", tmp_path / "out"
    site.mkdir()
    out.mkdir()
    (out / "student").symlink_to(site)
    if whose != "mine":
        _given_away(out / "student")
    _is_refused_in_a_line(_handouts(lab, out), str(out / "student"), "is a link where a folder of yours is needed", "Move it away")
    assert [*site.iterdir()] == []
    assert [path.name for path in out.iterdir()] == ["student"]


@as_root
@pytest.mark.parametrize("mode", [0o777, 0o700])
def test_s5_a_folder_of_handouts_that_another_user_owns_is_refused_and_stays_empty(tmp_path: Path, lab: Path, mode: int) -> None:
    (tmp_path / "out" / "student").mkdir(parents=True)
    (tmp_path / "out" / "student").chmod(mode)
    _given_away(tmp_path / "out" / "student")
    _is_refused_in_a_line(_handouts(lab, tmp_path / "out"), "belongs to another user", "Choose another place")
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["student"]


@as_root
def test_s5_a_shared_folder_of_another_user_takes_handouts_and_replaces_them(tmp_path: Path, lab: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    out.chmod(0o2775)
    _given_away(out)
    for _ in range(2):
        told = _handouts(lab, out)
        assert told.exit_code == 0, told.output
    assert sorted(path.name for path in out.iterdir()) == [
        "handouts.json", "instructor", "labkit-instructor.zip", "labkit-student.zip", "student"
    ]  # fmt: skip


@as_root
def test_s5_handouts_behind_a_link_that_another_user_has_made_are_refused(tmp_path: Path, lab: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "out").symlink_to("site")
    _given_away(tmp_path / "out")
    _is_refused_in_a_line(_handouts(lab, tmp_path / "out"), "is a link that another user has made", "Name another place")
    assert [*(tmp_path / "site").iterdir()] == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["a FIFO", "a link", "a directory"])
def test_s5_a_list_of_handouts_that_is_no_regular_file_is_refused_and_not_read(tmp_path: Path, lab: Path, kind: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    prepare: dict[str, Callable[[Path], object]] = {
        "a FIFO": os.mkfifo, "a link": lambda path: path.symlink_to(_list(tmp_path)), "a directory": Path.mkdir
    }  # fmt: skip
    prepare[kind](out / "handouts.json")
    _is_refused_in_a_line(
        _handouts(lab, out), f"is {kind}, and was not opened", "Move it away, or choose another folder with --out"
    )


@as_root
def test_s5_a_list_of_handouts_that_another_user_wrote_is_refused(tmp_path: Path, lab: Path) -> None:
    (tmp_path / "out").mkdir()
    _given_away(_list(tmp_path / "out"))
    _is_refused_in_a_line(_handouts(lab, tmp_path / "out"), "handouts.json belongs to another user", "Move it away")


def test_s5_a_folder_exchanged_for_a_link_while_handouts_are_built_loses_no_file_behind_it(tmp_path: Path, lab: Path) -> None:
    out, sub = tmp_path / "out", tmp_path / "out" / "sub"
    sub.mkdir(parents=True)
    shutil.copy(lab, sub)
    _list(out, "sub/a.ipynb")

    def exchange() -> None:
        sub.rename(out / "sub2")
        sub.symlink_to(lab.parent)

    with pytest.raises(PlaceError, match="sub is a link where a folder of yours is needed"):
        _made(lab, out, exchange)
    assert lab.is_file()
    assert not [path for path in out.rglob("*") if path.is_file() and path.name not in ("handouts.json", "a.ipynb")]


@as_root
def test_s5_a_file_that_another_user_put_in_the_place_of_a_handout_is_not_replaced(tmp_path: Path, lab: Path) -> None:
    out = tmp_path / "out"
    _made(lab, out)
    _given_away(out / "labkit-student.zip")
    before = (out / "labkit-student.zip").stat().st_ino
    with pytest.raises(HandoutError, match=r"labkit-student\.zip"):
        _made(lab, out)
    assert (out / "labkit-student.zip").stat().st_ino == before


def test_s5_handouts_are_built_where_nobody_can_exchange_what_is_being_built(tmp_path: Path, lab: Path) -> None:
    out, private = tmp_path / "out", tmp_path / "site"
    for folder in (private / "student", private / "instructor"):
        folder.mkdir(parents=True)
        (folder / "a.ipynb").write_text("mine")

    def exchange() -> None:
        (building,) = out.glob(".building-*")
        building.rename(out / "away")
        building.symlink_to(private)

    _made(lab, out, exchange)
    assert [path.read_text() for path in private.rglob("*") if path.is_file()] == ["mine", "mine"]
    assert (out / "student" / "a.ipynb").is_file()


def test_s5_the_folder_of_handouts_exchanged_for_a_link_while_they_are_built_stays_the_one_that_gets_them(
    tmp_path: Path, lab: Path
) -> None:
    out, private = tmp_path / "out", tmp_path / "site"
    private.mkdir()
    out.mkdir()

    def exchange() -> None:
        out.rename(tmp_path / "away")
        out.symlink_to(private)

    _made(lab, out, exchange)
    assert [*private.iterdir()] == []
    assert (tmp_path / "away" / "student" / "a.ipynb").is_file()


def test_s5_a_handout_is_deleted_only_when_all_new_ones_are_in_their_places(
    tmp_path: Path, lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    _made(lab, out)
    (out / "student" / "a.pdf").write_bytes(b"pdf")
    listed = json.loads((out / "handouts.json").read_text())["files"]
    _list(out, *listed, "student/a.pdf")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("labkit.base.places.write_new", full)
    with pytest.raises(OSError, match="No space left"):
        _made(lab, out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert not [*out.glob(".building-*")]
