"""A store in a folder that others may write to: a save removes and enters only steps of its own user, and follows no link."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from labkit import checkpoint
from labkit.checkpoint import migrate
from labkit.checkpoint.errors import CheckpointExistsError, CheckpointWriteError
from labkit.checkpoint.index import manifest
from labkit.checkpoint.store import saving
from labkit.checkpoint.store.store_folder import StoreFolder

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")


def save(store: Path, step: int, keep: int | None = None) -> Path:
    return checkpoint.save(store, {"a": torch.full((2,), float(step))}, step, keep=keep)


def given_away(path: Path) -> Path:
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    return path


def test_s5_a_linked_step_makes_retention_delete_nothing_behind_it(tmp_path: Path) -> None:
    store, private = tmp_path / "store", tmp_path / "private"
    step = save(private, 50)
    unfinished = private / "unfinished"
    unfinished.mkdir()
    (unfinished / "mine").write_text("mine")
    store.mkdir()
    (store / "step_00000001").symlink_to(step)
    (store / "step_00000002").symlink_to(unfinished)
    save(store, 9)
    save(store, 10, keep=1)
    assert sorted(path.name for path in store.iterdir()) == ["step_00000001", "step_00000002", "step_00000010"]
    assert manifest.complete_steps(private) == [50]
    assert (unfinished / "mine").is_file()
    assert checkpoint.load(private, {"a": torch.zeros(2)}).step == 50


@as_root
def test_s5_steps_of_another_user_are_neither_deleted_nor_counted_by_retention(tmp_path: Path) -> None:
    for step in (1, 99):
        given_away(save(tmp_path, step))
    given_away(save(tmp_path, 2) / manifest.MANIFEST_FILE)  # in a folder of mine: mine to remove
    unfinished = tmp_path / "step_00000003"
    unfinished.mkdir()
    given_away(unfinished)
    for step in (10, 11, 12):
        save(tmp_path, step, keep=2)
    assert manifest.complete_steps(tmp_path) == [1, 11, 12, 99]
    assert unfinished.is_dir()


@as_root
@pytest.mark.parametrize("own", [True, False])
def test_s5_an_unfinished_step_of_another_user_stays_and_one_of_mine_is_replaced(tmp_path: Path, own: bool) -> None:
    unfinished = tmp_path / "step_00000002"
    unfinished.mkdir()
    (unfinished / "half").write_text("half")
    if own:
        save(tmp_path, 2)
        assert not (unfinished / "half").exists()
        return
    given_away(unfinished)
    with pytest.raises(CheckpointExistsError, match=r"step_00000002: it belongs to another user.* Save another step"):
        save(tmp_path, 2)
    assert (unfinished / "half").is_file()


@pytest.mark.parametrize("kind", ["folder", "nothing", "file", "fifo"])
def test_s5_what_is_no_folder_in_the_place_of_a_step_stays_and_the_save_is_refused(tmp_path: Path, kind: str) -> None:
    store, private = tmp_path / "store", tmp_path / "private"
    store.mkdir()
    private.mkdir()
    (private / "mine").write_text("mine")
    place = store / "step_00000002"
    prepare: dict[str, Callable[[], object]] = {
        "folder": lambda: place.symlink_to(private), "nothing": lambda: place.symlink_to(tmp_path / "none"),
        "file": lambda: place.write_text("mine"), "fifo": lambda: os.mkfifo(place),
    }  # fmt: skip
    prepare[kind]()
    before = place.lstat().st_ino
    with pytest.raises(CheckpointExistsError, match=r"step_00000002: it is .* Save another step"):
        save(store, 2)
    assert place.lstat().st_ino == before
    assert os.listdir(private) == ["mine"]
    assert not (tmp_path / "none").exists()


@as_root
@pytest.mark.parametrize("make", ["save", "migrate"])
def test_s5_a_store_behind_a_link_of_another_user_is_refused_and_nothing_is_written_or_deleted(tmp_path: Path, make: str) -> None:
    private, link = tmp_path / "private", tmp_path / "link"
    for step in (1, 2):
        save(private, step)
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt")
    link.symlink_to(private)
    given_away(link)
    before = sorted(private.rglob("*"))
    with pytest.raises(CheckpointWriteError, match="link: it is a link that another user has made"):
        save(link, 3, keep=1) if make == "save" else migrate(tmp_path / "old.pt", link / "new.safetensors")
    assert sorted(private.rglob("*")) == before


def test_a_store_behind_a_link_of_mine_is_used_as_before(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("store")
    (tmp_path / "store").mkdir()
    for step in (1, 2, 3):
        save(tmp_path / "link", step, keep=2)
    assert manifest.complete_steps(tmp_path / "store") == [2, 3]


@pytest.mark.parametrize("at", ["publish", "read back"])
def test_s5_a_store_exchanged_for_a_link_during_a_save_loses_no_step_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    store, private = tmp_path / "store", tmp_path / "private"
    for step in (1, 2, 50):
        save(private, step)
    (private / "step_00000003").mkdir()
    (private / "step_00000003" / "half").write_text("half")
    save(store, 1)
    before = sorted(private.rglob("*"))

    def exchanged(*_: object, **__: object) -> None:
        store.rename(tmp_path / "away")
        store.symlink_to(private)
        if at == "read back":
            raise OSError("a disk that is gone")

    monkeypatch.setattr(saving.manifest if at == "publish" else saving.DirectoryWriter, at.replace(" ", "_"), exchanged)
    if at == "publish":
        save(store, 3, keep=1)
    else:
        with pytest.raises(CheckpointWriteError, match="a disk that is gone"):
            save(store, 3, keep=1)
    assert sorted(private.rglob("*")) == before


def test_s5_a_step_exchanged_for_a_link_between_a_look_and_its_removal_is_left(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    (private / "mine").write_text("mine")
    folder = StoreFolder(tmp_path / "store")
    folder.make_step("step_00000001")
    (tmp_path / "store" / "step_00000001").rename(tmp_path / "away")
    (tmp_path / "store" / "step_00000001").symlink_to(private)
    assert not folder.remove("step_00000001")
    folder.close()
    assert (private / "mine").is_file()
    assert (tmp_path / "store" / "step_00000001").is_symlink()


def test_s5_a_link_under_the_name_of_the_manifest_s_draft_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    monkeypatch.setattr(secrets, "token_hex", lambda *_: "known")
    for name in (f".manifest.json.{os.getpid()}.tmp", ".manifest.json.known.tmp"):
        (tmp_path / name).symlink_to(mine)
    with pytest.raises(FileExistsError):
        manifest.write_atomically(tmp_path / "manifest.json", b"{}")
    assert mine.read_text() == "mine"
    monkeypatch.undo()
    manifest.write_atomically(tmp_path / "manifest.json", b"{}")
    assert mine.read_text() == "mine"
    assert (tmp_path / "manifest.json").read_bytes() == b"{}"


def test_where_the_file_system_gives_all_files_to_one_user_retention_works_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # as on NFS with root_squash: new files belong to another user
    (tmp_path / "step_00000003").mkdir()
    for step in (1, 2, 3):
        save(tmp_path, step, keep=2)
    assert manifest.complete_steps(tmp_path) == [2, 3]


def test_a_step_is_made_as_the_user_makes_folders(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        assert stat.S_IMODE(save(tmp_path / "store", 1).stat().st_mode) == 0o750
    finally:
        os.umask(before)
