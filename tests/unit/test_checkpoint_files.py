"""Files while they are read and written: sources that change, hashes, and zip archives that others read."""

from __future__ import annotations

import errno
import functools
import io
import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors.torch import save_file

from labkit.checkpoint import Reader, migrate, reshard, verify
from labkit.checkpoint.checks import verification
from labkit.checkpoint.convert import engine, migration
from labkit.checkpoint.data import read
from labkit.checkpoint.data.hashed_file import HashedFile
from labkit.checkpoint.errors import CheckpointError, CheckpointWriteError
from labkit.checkpoint.files import direct_io
from labkit.checkpoint.index import manifest
from labkit.checkpoint.write import zip_writer
from labkit.checkpoint.write.zip_writer import StoredZip

BLOCK = direct_io.BLOCK_BYTES
WAYS = ["direct", "refused at once", "refused while writing"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file system that accepts direct transfers (if the test's own does), refuses the mode, or refuses each transfer."""
    if request.param == "refused at once":
        monkeypatch.setattr(direct_io, "set_direct", lambda fd, on: False)
    elif request.param == "refused while writing":
        switched: set[int] = set()

        def set_direct(fd: int, on: bool) -> bool:
            (switched.add if on else switched.discard)(fd)
            return on

        def refuse(real: Any) -> Any:
            def transfer(fd: int, *rest: Any) -> Any:
                if fd in switched:
                    raise OSError(errno.EINVAL, "Invalid argument")
                return real(fd, *rest)

            return transfer

        class Refusing(io.FileIO):
            def write(self, data: Any) -> int:
                return refuse(os.write)(self.fileno(), data)

        original = Path.open

        def opened(self: Path, mode: str = "r", buffering: int = -1, **rest: Any) -> Any:
            return Refusing(self, mode) if mode == "xb" else original(self, mode, buffering, **rest)

        monkeypatch.setattr(direct_io, "set_direct", set_direct)
        monkeypatch.setattr(Path, "open", opened)
        monkeypatch.setattr(os, "readv", refuse(os.readv))
    return str(request.param)


@pytest.mark.parametrize("size", [0, 1, 4095, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 4096 + 7])
def test_a_file_holds_what_was_written_whatever_the_file_system_offers(tmp_path: Path, way: str, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "source").write_bytes(b"head" + data)
    with HashedFile(tmp_path / "written") as written, HashedFile(tmp_path / "copied") as copied:
        for at in range(0, size, 1_000_003):
            written.write(data[at : at + 1_000_003])
        with (tmp_path / "source").open("rb") as source:
            assert copied.copy(source.fileno(), 4, size) == (size, zlib.crc32(data))
    total = manifest.FileSum(size, xxhash.xxh3_128_hexdigest(data))
    for file in (written, copied):
        assert file.total() == total
    for name in ("written", "copied"):
        assert (tmp_path / name).read_bytes() == data
        assert manifest.hash_file(tmp_path / name, from_disk=True) == manifest.hash_file(tmp_path / name) == total


def test_a_copy_past_the_end_says_how_much_there_was(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"abc")
    with HashedFile(tmp_path / "out") as out, (tmp_path / "source").open("rb") as source:
        assert out.copy(source.fileno(), 1, 10) == (2, zlib.crc32(b"bc"))


@pytest.mark.parametrize("large", [0, 60, 10**9])
def test_others_read_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: int) -> None:
    monkeypatch.setattr(zip_writer, "_LARGE", large)  # the size from which the form for more than 4 GiB is used
    records = {"a/x": b"", "a/data/0": os.urandom(50), "a/ä": os.urandom(300)}
    with HashedFile(tmp_path / "x.zip") as out:
        out.write(b"before")
        archive = StoredZip(out, align=64)
        for number, (name, data) in enumerate(records.items()):

            def write(data: bytes = data) -> int:
                out.write(data)
                return zlib.crc32(data)

            if number % 2:
                archive.add_stream(name, len(data), write)
            else:
                archive.add(name, data)
        archive.close()
    whole = (tmp_path / "x.zip").read_bytes()
    assert all(not data or whole.find(data) % 64 == 0 for data in records.values())
    with zipfile.ZipFile(io.BytesIO(whole[6:])) as read_back:
        assert read_back.testzip() is None
        assert [read_back.read(info) for info in read_back.infolist()] == list(records.values())


def test_torch_reads_an_archive_in_the_form_for_more_than_4_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": torch.randn(40, 3), "b": torch.arange(7, dtype=torch.bfloat16), "e": torch.ones(0, 2)}
    torch.save(tensors, tmp_path / "x.pt")
    monkeypatch.setattr(zip_writer, "_LARGE", 16)
    for number, destination in enumerate((tmp_path / "out.pt", tmp_path / "dcp")):
        migrate(tmp_path / "x.pt", destination)
        assert verify(destination, against=tmp_path / "x.pt").findings == [], number
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    mapped = torch.load(tmp_path / "out.pt", weights_only=True, mmap=True)
    filled = {key: torch.zeros_like(value) for key, value in tensors.items()}
    dcp.load(filled, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for key, value in tensors.items():
        assert torch.equal(found[key], value)
        assert torch.equal(mapped[key], value)
        assert torch.equal(filled[key], value)


def test_each_storage_of_the_source_is_summed_once_however_many_ranks_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp.save({f"t{index}": torch.randn(16, 5) for index in range(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    original, summed = read.file_crc, []

    def counted(fd: int, start: int, length: int) -> int:
        summed.append(start)
        return original(fd, start, length)

    monkeypatch.setattr(read, "file_crc", counted)
    reshard(tmp_path / "dcp", tmp_path / "out", 8, workers=4)
    assert len(summed) == 3
    assert verify(tmp_path / "out", against=tmp_path / "dcp").findings == []


def test_what_the_disk_does_not_give_back_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"a": torch.ones(5)}, tmp_path / "x.pt")
    original = HashedFile.close

    def close_and_lose(self: HashedFile) -> None:
        lost = not self.closed
        path = Path(self._file.name)
        original(self)
        if lost and path.suffix == ".distcp":
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)

    monkeypatch.setattr(HashedFile, "close", close_and_lose)
    with pytest.raises(CheckpointWriteError, match="does not read back"):
        migrate(tmp_path / "x.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- sources that change ---------------------------------------------------------------------------------------------------


def in_place(file: Path) -> None:
    size = file.stat().st_size
    with file.open("r+b") as out:
        out.seek(size // 2)
        out.write(b"\x01" * (size - size // 2))


def by_a_rename(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    file.with_suffix(".new").write_bytes(data)
    file.with_suffix(".new").rename(file)


def with_its_times_kept(file: Path) -> None:
    status = file.stat()
    in_place(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def cut_off(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def removed(file: Path) -> None:
    file.unlink()


CHANGES = [in_place, by_a_rename, with_its_times_kept, cut_off, removed]


def stored(folder: Path, kind: str) -> tuple[Path, Path]:
    """A checkpoint of 12 tensors, and the file in it that holds them."""
    tensors = {f"t{index}": torch.full((1000,), float(index)) for index in range(12)}
    if kind == "dcp":
        dcp.save(tensors, checkpoint_id=folder / "x", no_dist=True)
        return folder / "x", folder / "x/__0_0.distcp"
    if kind == "torch":
        torch.save(tensors, folder / "x.pt")
        return folder / "x.pt", folder / "x.pt"
    save_file(tensors, folder / "x.safetensors")
    return folder / "x.safetensors", folder / "x.safetensors"


@pytest.mark.parametrize("moment", ["after the index was read", "after some tensors were copied", "after all were copied"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
def test_s14_a_source_that_changes_while_it_is_copied_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, change: Callable[[Path], None], moment: str
) -> None:
    source, file = stored(tmp_path, kind)
    copies: list[int] = []

    def before(module: Any, name: str, number: int) -> None:
        original = getattr(module, name)

        def call(*arguments: Any, **options: Any) -> Any:
            copies.append(0)
            if len(copies) == number:
                change(file)
            return original(*arguments, **options)

        monkeypatch.setattr(module, name, call)

    if moment == "after the index was read":
        before(migration, "transform", 1)
    elif moment == "after some tensors were copied":
        before(HashedFile, "copy", 6)
    else:
        before(engine, "read_back", 1)
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        migrate(source, tmp_path / "out", workers=1)
    assert not list(tmp_path.glob("out*"))


def test_s14_an_index_that_changes_right_after_it_was_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, file = stored(tmp_path, "safetensors")
    original = verification.open_checkpoint

    def open_and_change(path: Path, **options: Any) -> Any:
        found = original(path, **options)
        in_place(file)
        return found

    monkeypatch.setattr(verification, "open_checkpoint", open_and_change)
    for work in (migrate, functools.partial(reshard, mesh=2)):
        with pytest.raises(CheckpointError, match="was changed while it was read"):
            work(source, tmp_path / "out")


def test_s14_a_link_that_leads_elsewhere_for_a_while_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, file = stored(tmp_path, "safetensors")
    save_file({f"t{index}": torch.zeros(1000) for index in range(12)}, tmp_path / "other.safetensors")
    link = tmp_path / "latest.safetensors"
    link.symlink_to(file)
    original = Reader.open

    def open_elsewhere(self: Reader, name: str) -> Any:
        link.unlink()
        link.symlink_to(tmp_path / "other.safetensors")
        try:
            return original(self, name)
        finally:
            link.unlink()
            link.symlink_to(file)

    monkeypatch.setattr(Reader, "open", open_elsewhere)
    with pytest.raises(CheckpointError, match=r"latest\.safetensors: it was changed while it was read"):
        migrate(link, tmp_path / "out")


def test_reading_a_source_and_changing_its_neighbours_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = stored(tmp_path, "safetensors")
    (tmp_path / "notes.txt").write_text("before")
    original = engine.read_back

    def read_back(*arguments: Any) -> None:
        source.read_bytes()
        (tmp_path / "notes.txt").write_text("after")
        original(*arguments)

    monkeypatch.setattr(engine, "read_back", read_back)
    migrate(source, tmp_path / "out")
    assert verify(tmp_path / "out", against=source).findings == []
