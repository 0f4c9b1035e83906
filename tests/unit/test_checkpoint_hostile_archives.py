"""Archives in which torch's zip reader and others would see different contents, and paths that are not regular files."""

from __future__ import annotations

import io
import os
import socket
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from labkit.checkpoint import Reader, open_checkpoint, verify
from labkit.checkpoint.errors import CheckpointFormatError
from labkit.checkpoint.formats.torch_format import read_torch
from tests.unit.zip_archives import archive_of, records_of

Change = Callable[[bytearray], None]


def saved() -> bytes:
    file = io.BytesIO()
    torch.save({"weight": torch.arange(4.0)}, file)
    return file.getvalue()


def refused(path: Path, words: str) -> None:
    with pytest.raises(CheckpointFormatError, match=words):
        open_checkpoint(path)
    assert not verify(path).ok


@pytest.mark.parametrize(
    "twin",
    ["archive/data.pkl", "archive/DATA.PKL", "ARCHIVE/data.pkl", "archive//data.pkl", "archive\\data.pkl", "archive/./data.pkl"],
)
@pytest.mark.parametrize("first", [True, False])
def test_s4_two_records_of_one_name_are_refused(tmp_path: Path, twin: str, first: bool) -> None:
    other = io.BytesIO()
    torch.save({"other": torch.zeros(4)}, other)
    (hidden,) = (data for name, data in records_of(other.getvalue()) if name.endswith("data.pkl"))
    records = records_of(saved())
    (tmp_path / "x.pt").write_bytes(archive_of([(twin, hidden), *records] if first else [*records, (twin, hidden)]))
    refused(tmp_path / "x.pt", r"x\.pt.*DATA\.PKL|data\.pkl.*have the same name")


@pytest.mark.parametrize("twin", ["archive/data/0", "archive/Data/0", "archive/byteOrder", "archive/VERSION"])
def test_s4_two_storages_of_one_name_are_refused(tmp_path: Path, twin: str) -> None:
    (tmp_path / "x.pt").write_bytes(archive_of([*records_of(saved()), (twin, bytes(16))]))
    refused(tmp_path / "x.pt", "have the same name")


def test_s4_a_record_outside_the_folder_of_the_first_is_refused(tmp_path: Path) -> None:
    records = [("other/version", b"3\n"), *records_of(saved())]
    (tmp_path / "x.pt").write_bytes(archive_of(records))
    refused(tmp_path / "x.pt", r"no data\.pkl")
    (tmp_path / "x.pt").write_bytes(archive_of(records[::-1]))
    refused(tmp_path / "x.pt", "'other/version' is not in the folder 'archive'")


def test_s4_a_name_that_ends_early_for_some_readers_is_refused(tmp_path: Path) -> None:
    data = archive_of([("archive/data.pkl?x" if name.endswith("data.pkl") else name, part) for name, part in records_of(saved())])
    (tmp_path / "x.pt").write_bytes(data.replace(b"data.pkl?x", b"data.pkl\0x"))
    refused(tmp_path / "x.pt", "ends early for some readers")


def place(data: bytes, name: str) -> tuple[int, int]:
    """The positions of a record's own header, and of its entry in the directory."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        header = next(info.header_offset for info in archive.infolist() if info.filename.endswith(name))
    encoded = f"archive/{name}".encode()
    return header, data.rindex(encoded) - 46


def put(data: bytearray, at: int, form: str, value: int) -> None:
    struct.pack_into(form, data, at, value)


HEADER_FIELDS = {
    "another name": (30, "B", ord("A")),
    "another method": (8, "<H", 8),
    "another size": (22, "<I", 15),
    "another packed size": (18, "<I", 15),
    "another checksum": (14, "<I", 1),
    "other flags": (6, "<H", 0x0800),
    "no header": (0, "B", ord("Q")),
}


@pytest.mark.parametrize("record", ["data.pkl", "data/0"])
@pytest.mark.parametrize("field", HEADER_FIELDS)
def test_s4_a_header_that_says_something_else_than_the_directory_is_refused(tmp_path: Path, field: str, record: str) -> None:
    data = bytearray(saved())
    offset, form, value = HEADER_FIELDS[field]
    put(data, place(bytes(data), record)[0] + offset, form, value)
    (tmp_path / "x.pt").write_bytes(data)
    refused(tmp_path / "x.pt", f"{record}'|it is not a torch.save file")


def test_s4_records_that_overlap_are_refused(tmp_path: Path) -> None:
    data = bytearray(saved())
    header, entry = place(bytes(data), "data/0")
    for at in (entry + 20, entry + 24):
        put(data, at, "<I", 300)
    (tmp_path / "x.pt").write_bytes(data)
    refused(tmp_path / "x.pt", "'archive/data/0' reaches into what follows it")
    data = bytearray(saved())
    put(data, place(bytes(data), "byteorder")[1] + 42, "<I", header)
    (tmp_path / "x.pt").write_bytes(data)
    refused(tmp_path / "x.pt", "are in the same place")


def shifted(data: bytearray) -> None:
    data[:0] = b"PK\3\4" + bytes(96)


def commented(data: bytearray) -> None:
    put(data, len(data) - 2, "<H", 22)
    data += data[-22:]


def two_ends(data: bytearray) -> None:
    data += data[-22:]


def wide_end_elsewhere(data: bytearray) -> None:
    put(data, len(data) - 42 + 8, "<Q", 0)


def wide_end_of_another_count(data: bytearray) -> None:
    put(data, len(data) - 98 + 24, "<Q", 2)


def narrow_end_of_another_count(data: bytearray) -> None:
    for at in (len(data) - 14, len(data) - 12):
        put(data, at, "<H", 2)


def directory_elsewhere(data: bytearray) -> None:
    put(data, len(data) - 98 + 48, "<Q", 0)
    put(data, len(data) - 6, "<I", 0)


def wide_number_too_large(data: bytearray) -> None:
    put(data, len(data) - 42 + 8, "<Q", 2**64 - 1)


CHANGES = [
    shifted, commented, two_ends, wide_end_elsewhere, wide_end_of_another_count, narrow_end_of_another_count, directory_elsewhere,
    wide_number_too_large,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_s4_an_end_that_can_be_read_in_two_ways_is_refused(tmp_path: Path, change: Change) -> None:
    data = bytearray(saved())
    change(data)
    (tmp_path / "x.pt").write_bytes(data)
    refused(tmp_path / "x.pt", "zip archive|bytes before its first record")


def test_s4_an_item_of_dcp_is_read_by_the_same_rules(tmp_path: Path) -> None:
    dcp.save({"a": torch.arange(4.0)}, checkpoint_id=tmp_path, no_dist=True)
    file = tmp_path / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    put(data, place(bytes(data), "data/0")[0] + 8, "<H", 8)
    file.write_bytes(data)
    with Reader(open_checkpoint(tmp_path)) as reader, pytest.raises(CheckpointFormatError, match=r"__0_0\.distcp.*data/0"):
        reader.tensor("a")
    assert not verify(tmp_path).ok


def test_s4_a_storage_of_another_size_than_the_index_says_is_refused(tmp_path: Path) -> None:
    records = [(name, data + bytes(16) if name.endswith("data/0") else data) for name, data in records_of(saved())]
    (tmp_path / "x.pt").write_bytes(archive_of(records))
    refused(tmp_path / "x.pt", r"storage '0' has 32 bytes; the index gives it 4 elements")


def test_an_archive_that_other_tools_pack_without_compression_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(archive_of([("archive/", b""), *records_of(saved())]))
    with Reader(open_checkpoint(tmp_path / "x.pt"), checksums=True) as reader:
        assert torch.equal(reader.tensor("weight"), torch.arange(4.0))
    assert torch.equal(torch.load(tmp_path / "x.pt")["weight"], torch.arange(4.0))


def pipe(path: Path) -> None:
    os.mkfifo(path)


def socket_file(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))


def link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [pipe, socket_file, link_to_a_device], ids=lambda make: make.__name__)
def test_s9_what_is_no_regular_file_is_refused_and_not_waited_for(
    tmp_path: Path, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": torch.ones(2)}, tmp_path / "rank0.pt")
    make(tmp_path / "rank1.pt")
    with pytest.raises(CheckpointFormatError, match=r"rank1\.pt: it is a"):
        read_torch(tmp_path, tmp_path, ["rank1.pt"])
    dcp.save({"a": torch.arange(4.0)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    checkpoint = open_checkpoint(tmp_path / "dcp")
    (tmp_path / "dcp/__0_0.distcp").unlink()
    make(tmp_path / "dcp/__0_0.distcp")
    with Reader(checkpoint) as reader, pytest.raises(CheckpointFormatError, match=r"__0_0\.distcp: it is a"):
        reader.tensor("a")


def test_a_link_to_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(saved())
    (tmp_path / "x.pt").symlink_to("blob")
    assert list(open_checkpoint(tmp_path / "x.pt").tensors) == ["weight"]
