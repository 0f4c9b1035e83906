"""The leftovers of a migration or reshard that fails, its messages about them, and the files that it leaves alone."""

from __future__ import annotations

import errno
import functools
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from labkit.checkpoint import migrate, open_checkpoint, reshard, verify
from labkit.checkpoint.cli import checkpoint as command
from labkit.checkpoint.convert import engine
from labkit.checkpoint.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    IncompleteCheckpointError,
)
from labkit.checkpoint.files import staging_leftovers
from labkit.checkpoint.index import manifest
from labkit.checkpoint.write.staging_area import StagingArea

NOBODY = 65534


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    torch.save({f"t{index}": torch.full((100,), float(index)) for index in range(6)}, folder / "x.pt")
    return folder / "x.pt"


def damaged(file: Path) -> dict[str, Any]:
    data = bytearray(file.read_bytes())
    data[data.find(torch.full((100,), 5.0).numpy().tobytes()) + 9] ^= 8
    file.write_bytes(data)
    return {}


def too_large(file: Path) -> dict[str, Any]:
    torch.save({"a": torch.ones(100), "b": torch.full((3,), 1e30)}, file)
    return {"dtypes": {"*": torch.float16}}


def without_name_in_safetensors(file: Path) -> dict[str, Any]:
    torch.save({"a": torch.ones(3, dtype=torch.complex128)}, file)
    return {"to": "safetensors"}


@pytest.mark.parametrize("prepare", [damaged, too_large, without_name_in_safetensors])
def test_a_refusal_while_writing_leaves_nothing(source: Path, tmp_path: Path, prepare: Callable[[Path], dict[str, Any]]) -> None:
    options = prepare(source)
    with pytest.raises(CheckpointError):
        migrate(source, tmp_path / "new/folder/out", shard_bytes=400, workers=1, **options)
    assert os.listdir(tmp_path) == ["source"]
    if prepare is damaged:
        with pytest.raises(CheckpointError):
            reshard(source, tmp_path / "out", 2)
        assert os.listdir(tmp_path) == ["source"]


def ends_after(count: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a run fail when it has finished ``count`` files."""
    original, finished = engine.read_back, []

    def read_back(folder: Path, name: str, total: Any) -> None:
        if len(finished) == count:
            raise error
        finished.append(name)
        original(folder, name, total)

    monkeypatch.setattr(engine, "read_back", read_back)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    return result.exit_code, result.output


FULL = OSError(errno.ENOSPC, "No space left on device", "some file")


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize(
    ("error", "code", "words"), [(FULL, 1, "No space left on device"), (KeyboardInterrupt(), 130, "Interrupted")]
)
def test_a_failure_or_interrupt_leaves_nothing_and_says_so(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, words: str, count: int
) -> None:
    ends_after(count, error, monkeypatch)
    status, text = run("migrate", source, tmp_path / "new/out", "--shard-bytes", 400, "--workers", 1)
    assert status == code
    assert words in text
    assert "out was not made, and nothing is left of it." in text
    assert "Traceback" not in text
    assert os.listdir(tmp_path) == ["source"]


def test_an_interrupt_after_the_rename_says_that_the_destination_is_complete(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = manifest.sync_directory

    def interrupted(path: Path) -> None:
        original(path)
        if path == tmp_path and (tmp_path / "out").exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(manifest, "sync_directory", interrupted)
    assert f"Interrupted. {tmp_path}/out is complete." in run("migrate", source, tmp_path / "out")[1]
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]
    assert verify(tmp_path / "out", against=source).findings == []


def test_what_cannot_be_removed_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("shutil.rmtree", refuse)
    left = f"{tmp_path}/out.partial could not be removed (Input/output error): remove it."
    with monkeypatch.context() as patch:
        ends_after(0, FULL, patch)
        assert f"{tmp_path}/out was not made. {left}" in run("migrate", source, tmp_path / "out")[1]
    assert run("migrate", source, tmp_path / "new") == (
        0,
        f"note: {left.replace('out.', 'new.')}\n{tmp_path}/new: 6 tensors, 2.3 KiB, in 1 file, verified\n",
    )


def test_a_stop_does_not_wait_for_the_file_in_work(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "wait", interrupted)
    original = engine._advance

    def slow(stop: Any, progress: Any, size: int) -> None:
        pieces.append(size)
        stop.wait(10)
        original(stop, progress, size)

    monkeypatch.setattr(engine, "_advance", slow)
    with pytest.raises(KeyboardInterrupt):
        migrate(source, tmp_path / "out.pt", workers=1)
    assert len(pieces) == 1
    assert os.listdir(tmp_path) == ["source"]


# -- killed runs ----------------------------------------------------------------------------------------------------------


def killed(destination: Path) -> StagingArea:
    """The leftovers of a run that was killed while it wrote its first file."""
    area = StagingArea(destination)
    (area.data / "__0_0.distcp").write_text("half")
    os.close(area._marker_fd)  # the kernel gives a dead process's locks back
    return area


def test_what_a_killed_run_has_left_is_named_and_the_same_command_starts_over(source: Path, tmp_path: Path) -> None:
    partial = killed(tmp_path / "out").folder
    with pytest.raises(CheckpointNotFoundError, match=r"out\.partial is being written by .* unfinished by one. The same command"):
        open_checkpoint(tmp_path / "out")
    for path in (partial, partial / "data"):
        with pytest.raises(IncompleteCheckpointError, match=r"left unfinished by one\. The same command"):
            open_checkpoint(path)
    migrate(source, tmp_path / "out")
    assert verify(tmp_path / "out", against=source).findings == []
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]


def test_a_second_process_leaves_the_first_ones_files_alone(source: Path, tmp_path: Path) -> None:
    held = StagingArea(tmp_path / "out")
    (held.data / "file").write_text("in work")
    with pytest.raises(CheckpointWriteError, match="another process"):
        migrate(source, tmp_path / "out")
    assert (held.data / "file").exists()
    held.discard()
    assert os.listdir(tmp_path) == ["source"]


def test_s2_of_runs_that_begin_at_once_one_writes_and_the_others_are_refused(tmp_path: Path) -> None:
    writing, together, unexpected = threading.Lock(), [], []

    def begin(_: int) -> int:
        won = 0
        for _ in range(25):
            try:
                area = StagingArea(tmp_path / "out")
            except CheckpointWriteError:
                continue
            except BaseException as error:
                unexpected.append(error)
                raise
            won += 1
            if not writing.acquire(blocking=False):
                together.append(area)
            (area.data / "file").write_text("mine")
            writing.release()
            if won % 2:
                assert area.discard().endswith("nothing is left of it.")
            else:
                os.close(area._marker_fd)  # killed
        return won

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(begin, range(4)))
    assert not unexpected
    assert not together
    assert sum(won) >= 4


# -- what others have put there ----------------------------------------------------------------------------------------------


def listing(folder: Path) -> dict[str, object]:
    """Everything below a folder: kind, time of change, and contents."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else None
        found[str(path.relative_to(folder))] = (stat.S_IFMT(status.st_mode), status.st_mtime_ns, content)
    return found


def begun(tmp_path: Path, name: str = "out") -> Path:
    """A folder that matches in everything the leftovers of a killed run for this destination."""
    return killed(tmp_path / name).folder


def a_link(tmp_path: Path) -> None:
    begun(tmp_path, "other").rename(tmp_path / "elsewhere")
    (tmp_path / "out.partial").symlink_to(tmp_path / "elsewhere")


def a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "out.partial").symlink_to(tmp_path / "elsewhere")


def a_file(tmp_path: Path) -> None:
    (tmp_path / "out.partial").write_text("mine")


def a_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "out.partial")


def a_folder_of_notes(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/notes.txt").write_text("mine")


def a_marker_that_is_a_link(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    (tmp_path / "mine").write_text((folder / ".labkit").read_text())
    (folder / ".labkit").unlink()
    (folder / ".labkit").symlink_to(tmp_path / "mine")


def a_marker_that_is_a_fifo(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    (folder / ".labkit").unlink()
    os.mkfifo(folder / ".labkit")


def a_marker_for_another_destination(tmp_path: Path) -> None:
    begun(tmp_path, "other").rename(tmp_path / "out.partial")


def an_empty_marker_beside_data(tmp_path: Path) -> None:
    os.truncate(begun(tmp_path) / ".labkit", 0)


def no_marker(tmp_path: Path) -> None:
    (begun(tmp_path) / ".labkit").unlink()


def something_beside_the_data(tmp_path: Path) -> None:
    (begun(tmp_path) / "manifest.json").write_text("{}")


def data_that_is_a_link(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    (folder / "data").rename(tmp_path / "mine")
    (folder / "data").symlink_to(tmp_path / "mine")


def a_complete_checkpoint(tmp_path: Path) -> None:
    migrate(tmp_path / "source/x.pt", tmp_path / "good")
    (tmp_path / "good").rename(tmp_path / "out.partial")


def a_prepared_folder_with_an_old_journal(tmp_path: Path) -> None:
    notes = tmp_path / "out.partial/.labkit"
    notes.mkdir(parents=True)
    (tmp_path / "mine").write_text("mine")
    (notes / "lock").symlink_to(tmp_path / "mine")
    (notes / "plan.json").write_text("{}")
    (notes / "journal.jsonl").write_text(json.dumps({"name": "__0_0.distcp", "total": {"size": 4, "hash": "0"}, "items": []}))
    (tmp_path / "out.partial/__0_0.distcp").write_text("evil")


STRANGERS = [
    a_link,
    a_link_to_nothing,
    a_file,
    a_fifo,
    a_folder_of_notes,
    a_marker_that_is_a_link,
    a_marker_that_is_a_fifo,
    a_marker_for_another_destination,
    an_empty_marker_beside_data,
    no_marker,
    something_beside_the_data,
    data_that_is_a_link,
    a_complete_checkpoint,
    a_prepared_folder_with_an_old_journal,
]


@pytest.mark.parametrize("stranger", STRANGERS)
def test_s2_what_labkit_did_not_begin_for_this_destination_is_refused_and_stays(
    source: Path, tmp_path: Path, stranger: Callable[[Path], None]
) -> None:
    stranger(tmp_path)
    before = listing(tmp_path)
    for work in (migrate, functools.partial(reshard, mesh=2)):
        with pytest.raises(CheckpointExistsError, match=r"(?s)out\.partial: .*left as it is. Move or remove it, or choose another"):
            work(source, tmp_path / "out")
        assert listing(tmp_path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")
@pytest.mark.parametrize("part", ["", ".labkit", "data"])
def test_s2_what_another_user_owns_is_refused_and_stays(source: Path, tmp_path: Path, part: str) -> None:
    os.chown(begun(tmp_path) / part, NOBODY, NOBODY)
    before = listing(tmp_path)
    with pytest.raises(CheckpointExistsError, match=r"another user|of yours"):
        migrate(source, tmp_path / "out")
    assert listing(tmp_path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_s2_a_neighbours_folder_with_a_link_as_marker_does_not_reach_my_files(source: Path, tmp_path: Path) -> None:
    shared, mine = tmp_path / "shared", tmp_path / "mine.txt"
    shared.mkdir()
    shared.chmod(0o1777)
    for folder in [tmp_path, *tmp_path.parents]:
        folder.chmod(folder.stat().st_mode | 0o011)
    mine.write_text("mine")
    plant = (
        f"import os; os.setgid({NOBODY}); os.setuid({NOBODY}); os.mkdir('{shared}/out.partial', 0o777);"
        f" os.symlink('{mine}', '{shared}/out.partial/.labkit')"
    )
    subprocess.run([sys.executable, "-S", "-c", plant], check=True)
    with pytest.raises(CheckpointExistsError, match="another user"):
        migrate(source, shared / "out")
    assert mine.read_text() == "mine"
    assert os.listdir(shared / "out.partial") == [".labkit"]


def test_s2_the_folder_is_closed_to_others_and_the_result_is_as_the_user_makes_files(source: Path, tmp_path: Path) -> None:
    area = StagingArea(tmp_path / "out")
    assert stat.S_IMODE(area.folder.stat().st_mode) == 0o700
    area.discard()
    (tmp_path / "ordinary").mkdir()
    migrate(source, tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


@pytest.mark.parametrize("name", ["out", "out.pt"])
@pytest.mark.parametrize("what", ["file", "folder", "link"])
def test_s2_what_appears_at_the_destination_meanwhile_is_not_replaced(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, what: str
) -> None:
    destination, original = tmp_path / name, os.path.lexists

    def lexists(path: Any) -> bool:
        """Make the folder appear right after the last check."""
        found = original(path)
        if Path(path) == destination and not found and (tmp_path / f"{name}.partial/data").exists():
            if what == "link":
                destination.symlink_to(tmp_path / "nowhere")
            elif what == "file":
                destination.write_text("mine")
            else:
                (destination / "mine").mkdir(parents=True)
        return found

    monkeypatch.setattr(os.path, "lexists", lexists)
    with pytest.raises(CheckpointExistsError, match="has appeared while it was being written"):
        migrate(source, destination)
    assert sorted(os.listdir(tmp_path)) == sorted(["source", name])
    assert destination.is_symlink() or (destination / "mine").is_dir() or destination.read_text() == "mine"


def test_a_link_to_nothing_as_the_destination_is_refused_at_once(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointExistsError, match="the destination exists"):
        migrate(source, tmp_path / "out")
    assert not (tmp_path / "nowhere").exists()


def test_a_file_system_without_links_and_locks_still_takes_a_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    partial = begun(tmp_path, "out.pt")
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(staging_leftovers.fcntl, "flock", refuse)
    with pytest.raises(CheckpointExistsError, match="no locks, so nothing says whether a run still writes there"):
        migrate(source, tmp_path / "out.pt")
    subprocess.run(["rm", "-r", str(partial)], check=True)
    migrate(source, tmp_path / "out.pt")
    assert verify(tmp_path / "out.pt", against=source).findings == []
    assert sorted(os.listdir(tmp_path)) == ["out.pt", "source"]
