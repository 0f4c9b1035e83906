"""What a migration or reshard leaves behind when it does not end well, and what it says about it."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from labkit.checkpoint import migrate, open_checkpoint, reshard, verify
from labkit.checkpoint.cli import checkpoint as command
from labkit.checkpoint.errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError, CheckpointWriteError
from labkit.checkpoint.staging_area import StagingArea


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
    """Let a run fail when it has finished ``count`` files."""
    original, finished = StagingArea.finish_file, []

    def finish_file(self: Any, name: str, written: Any) -> None:
        if len(finished) == count:
            raise error
        finished.append(name)
        original(self, name, written)

    monkeypatch.setattr(StagingArea, "finish_file", finish_file)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    return result.exit_code, result.output


FULL = OSError(errno.ENOSPC, "No space left on device", "some file")


@pytest.mark.parametrize(
    ("error", "code", "words"), [(FULL, 1, "No space left on device"), (KeyboardInterrupt(), 130, "Interrupted")]
)
def test_what_can_go_on_says_where_it_is_and_how(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, words: str
) -> None:
    call = ("migrate", source, tmp_path / "out", "--shard-bytes", 400, "--workers", 1)
    with monkeypatch.context() as patch:
        ends_after(3, error, patch)
        status, text = run(*call)
    partial = tmp_path / "out.partial"
    assert status == code
    assert words in text
    assert "out was not made" in text
    assert f"{partial} keeps 3 finished files" in text
    assert "the same command goes on from there" in text
    assert "Traceback" not in text
    assert "out.partial is what an unfinished run of migrate or reshard has left" in run("show", tmp_path / "out")[1]
    assert "the same command goes on" in run("show", partial)[1]
    assert "took over 3 finished files of an earlier run" in run(*call)[1]
    assert not partial.exists()


@pytest.mark.parametrize(("error", "code"), [(FULL, 1), (KeyboardInterrupt(), 130)])
def test_what_has_finished_nothing_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    ends_after(0, error, monkeypatch)
    status, text = run("migrate", source, tmp_path / "new/out.pt")
    assert status == code
    assert "out.pt was not made, and nothing is left of it" in text
    assert os.listdir(tmp_path) == ["source"]


def test_a_stop_does_not_wait_for_the_file_in_work(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from labkit.checkpoint import engine

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


def test_a_folder_of_somebody_else_in_the_place_of_the_unfinished_one_is_left_alone(source: Path, tmp_path: Path) -> None:
    mine = tmp_path / "out.partial/notes.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    for work in (migrate, functools.partial(reshard, mesh=2)):
        with pytest.raises(CheckpointExistsError, match=r"out\.partial.*is not labkit's"):
            work(source, tmp_path / "out")
    assert mine.read_text() == "mine"


def test_a_second_process_leaves_the_first_ones_files_alone(source: Path, tmp_path: Path) -> None:
    held = StagingArea(tmp_path / "out", {})
    (held.folder / "file").write_text("in work")
    with pytest.raises(CheckpointWriteError, match="another process"):
        migrate(source, tmp_path / "out")
    assert (held.folder / "file").exists()
    held.close()


def test_what_was_killed_right_before_the_last_rename_is_done_again(source: Path, tmp_path: Path) -> None:
    migrate(source, tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "out.partial")
    with pytest.raises(CheckpointNotFoundError, match=r"out\.partial"):
        open_checkpoint(tmp_path / "out")
    migrate(source, tmp_path / "out")
    assert verify(tmp_path / "out", against=source).findings == []
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]
