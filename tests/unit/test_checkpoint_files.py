"""Files as they are written: hashed, past the page cache or through it, and zip archives that others read."""

from __future__ import annotations

import errno
import io
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash

from labkit.checkpoint import direct_io, manifest, migrate, read, reshard, verify, zip_writer
from labkit.checkpoint.errors import CheckpointWriteError
from labkit.checkpoint.hashed_file import HashedFile
from labkit.checkpoint.zip_writer import StoredZip

BLOCK = direct_io.BLOCK_BYTES
WAYS = ["direct", "refused at once", "refused while writing"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file system that takes direct transfers (where the test's own does), refuses them, or refuses each of them."""
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
    monkeypatch.setattr(zip_writer, "_LARGE", large)  # from where on the form for more than 4 GiB is used
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
