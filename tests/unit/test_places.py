"""Folders that others may write to: the links, folders and files that labkit follows, enters, replaces and opens there."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from labkit.base import places
from labkit.base.places import NotRegularError, PlaceError
from labkit.cli import main

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")


def given_away(path: Path) -> Path:
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    return path


def names_in(folder: Path, *inside: str, make: bool = False) -> list[str]:
    with places.opened(folder, make=make) as outer, places.inside(outer, folder, *inside, make=make) as fd:
        places.write_new("new", b"", fd)
    return sorted(os.listdir(folder.joinpath(*inside)))


@pytest.mark.parametrize("target", ["real", "./x/../real", "{tmp}/real", "second"])
def test_a_link_of_mine_on_the_way_is_followed(tmp_path: Path, target: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "x").mkdir()
    (tmp_path / "second").symlink_to("real")
    (tmp_path / "link").symlink_to(target.format(tmp=tmp_path))
    assert names_in(tmp_path / "link" / ".." / "link") == ["new"]
    assert names_in(tmp_path / "link" / "deep" / "er", make=True) == ["new"]
    assert (tmp_path / "real" / "deep" / "er" / "new").is_file()


@as_root
@pytest.mark.parametrize("place", ["link", "link/deep", "mine", "mine/deep"])
def test_a_link_of_another_user_on_the_way_is_refused_and_nothing_is_made(tmp_path: Path, place: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "mine").symlink_to("link")
    (tmp_path / "link").symlink_to("real")
    given_away(tmp_path / "link")
    with pytest.raises(PlaceError, match=r"link is a link that another user has made, .*\. Name another place"):
        names_in(tmp_path / place, make=True)
    assert os.listdir(tmp_path / "real") == []


@as_root
def test_s5_a_link_that_becomes_another_user_s_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new link may get the inode of the old one."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    read = os.readlink

    def exchanged(name: str, **where: int) -> str:
        given_away(tmp_path / "link")
        return read(name, **where)

    monkeypatch.setattr(os, "readlink", exchanged)
    with pytest.raises(PlaceError, match="is a link that another user has made"):
        names_in(tmp_path / "link")
    assert os.listdir(tmp_path / "real") == []


def test_links_in_a_circle_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels"):
        names_in(tmp_path / "a")


@as_root
def test_a_new_file_in_a_folder_of_another_user_is_made(tmp_path: Path) -> None:
    assert names_in(given_away(tmp_path)) == ["new"]


def test_a_folder_that_is_exchanged_while_it_is_open_stays_the_same(tmp_path: Path) -> None:
    for name in ("out", "private"):
        (tmp_path / name).mkdir()
    with places.opened(tmp_path / "out") as fd:
        (tmp_path / "out").rename(tmp_path / "away")
        (tmp_path / "out").symlink_to("private")
        places.write_new("new", b"", fd)
    assert (os.listdir(tmp_path / "private"), os.listdir(tmp_path / "away")) == ([], ["new"])


def test_a_relative_folder_is_found_from_where_the_process_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert names_in(Path("a/b"), "c", make=True) == names_in(Path(), "d", make=True) == ["new"]
    with pytest.raises(FileNotFoundError, match="e/f"):
        names_in(Path("e/f"))


@pytest.mark.parametrize(
    ("prepare", "what"),
    [
        (lambda path: path.symlink_to(path.parent / "real"), "is a link where a folder of yours is needed"),
        (lambda path: path.write_text(""), "is a file where a folder of yours is needed"),
        (os.mkfifo, "is a FIFO where a folder of yours is needed"),
        pytest.param(lambda path: given_away(path.mkdir() or path), "belongs to another user", marks=as_root),
    ],
)
def test_what_is_no_folder_of_mine_inside_of_the_named_one_is_refused(
    tmp_path: Path, prepare: Callable[[Path], object], what: str
) -> None:
    (tmp_path / "real").mkdir()
    prepare(tmp_path / "inner")
    with pytest.raises(PlaceError, match=what):
        names_in(tmp_path, "inner", make=True)
    assert os.listdir(tmp_path / "real") == []


def test_a_file_is_opened_where_it_is_regular_and_where_asked_for_mine(tmp_path: Path) -> None:
    file, fifo, link = tmp_path / "file", tmp_path / "fifo", tmp_path / "link"
    file.write_text("text")
    os.mkfifo(fifo)
    link.symlink_to(file)
    with places.open_regular(link) as opened:
        assert opened.read() == b"text"
    for path, own in ((fifo, False), (fifo, True), (link, True), (tmp_path, False)):
        with pytest.raises(NotRegularError, match="was not opened"):
            places.open_regular(path, own=own)
    if os.geteuid() == 0:
        with pytest.raises(PlaceError, match="belongs to another user"):
            places.open_regular(given_away(file), own=True)


def test_a_new_file_goes_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("elsewhere")
    with places.opened(tmp_path) as fd, pytest.raises(FileExistsError):
        places.write_new("link", b"", fd)
    assert not (tmp_path / "elsewhere").exists()


def test_a_refusal_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(NotRegularError("a\nb", "a FIFO")))
    assert (str(error), error.path, error.kind) == ("a\\nb is a FIFO, and was not opened", "a\nb", "a FIFO")


# -- labkit new, which makes a file and replaces none ---------------------------------------------------------------------------


def new(path: Path) -> Result:
    return CliRunner().invoke(main, ["new", str(path)])


@as_root
def test_s5_a_new_lab_in_a_shared_folder_is_made_and_one_behind_a_link_of_another_user_is_not(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "private").mkdir()
    given_away(tmp_path / "shared")
    assert new(tmp_path / "shared" / "deep" / "lab.ipynb").exit_code == 0
    (tmp_path / "shared" / "link").symlink_to(tmp_path / "private")
    given_away(tmp_path / "shared" / "link")
    told = new(tmp_path / "shared" / "link" / "lab.ipynb")
    assert (told.exit_code, len(told.output.splitlines())) == (1, 1), told.output
    assert "is a link that another user has made" in told.output
    assert os.listdir(tmp_path / "private") == []


def test_s11_a_new_lab_s_name_cannot_drive_the_terminal_and_can_be_copied(tmp_path: Path) -> None:
    told = new(tmp_path / "a\x1b]0;title\x07.ipynb").output
    assert told.replace("\n", "").isprintable()
    assert r"a\x1b]0;title\x07.ipynb" in told
    assert f"Run it with: labkit run '{tmp_path}/two words.ipynb'." in new(tmp_path / "two words.ipynb").output


@pytest.mark.parametrize("kind", ["link", "fifo", "file"])
def test_s5_a_new_lab_goes_into_nothing_that_is_there(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "lab.ipynb"
    prepare: dict[str, Callable[[], object]] = {
        "link": lambda: path.symlink_to("elsewhere"), "fifo": lambda: os.mkfifo(path), "file": lambda: path.write_text("mine")
    }  # fmt: skip
    prepare[kind]()
    told = new(path)
    assert told.exit_code == 1
    assert "exists already" in told.output
    assert not (tmp_path / "elsewhere").exists()
