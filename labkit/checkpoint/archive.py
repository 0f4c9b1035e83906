"""torch.save archives: a zip whose records are stored uncompressed, so each storage is a byte range of the file.

The layout is described in :func:`torch.save` and ``caffe2/serialize/inline_container.h``. DCP writes one such archive
per item into its ``.distcp`` files, so an archive here may be a slice of a file.
"""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.checkpoint import safe_pickle
from labkit.checkpoint.errors import CheckpointFormatError, IncompleteCheckpointError

_LOCAL_HEADER = 30
_MAX_INDEX_BYTES = 1 << 32


@dataclass(frozen=True, slots=True)
class RecordRange:
    """Where a record's data lie in the file, and the CRC-32 that the writer noted for them."""

    start: int
    length: int
    crc: int


class FileView(io.RawIOBase):
    """A byte range of a file, as a read-only file of its own."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), max(0, self._length - self._at))
        self._file.seek(self._start + self._at)
        data = self._file.read(wanted)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class TorchArchive:
    """The index of one torch.save archive.

    Args:
        file: An open binary file.
        path: Its name, for messages.
        start: Where the archive begins in the file.
        length: Its length in bytes.

    Raises:
        IncompleteCheckpointError: The file ends before the archive does.
        CheckpointFormatError: It is no torch.save archive, or compressed, or big-endian, or a TorchScript module.
    """

    def __init__(self, file: io.BufferedReader, path: Path, start: int, length: int) -> None:
        self._file, self._path, self._start, self._length = file, path, start, length
        try:
            self._zip = zipfile.ZipFile(io.BufferedReader(FileView(file, start, length)))
            self._infos = {info.filename: info for info in self._zip.infolist()}
        except (zipfile.BadZipFile, EOFError, ValueError, OSError, struct.error, NotImplementedError) as error:
            raise IncompleteCheckpointError(
                path, f"the torch.save archive at byte {start} has no readable directory ({error}). The file is cut off or damaged."
            ) from None
        self.prefix = self._find_prefix()
        order = self._infos.get(f"{self.prefix}/byteorder")
        if order is not None and self.read(f"{self.prefix}/byteorder") != b"little":
            raise CheckpointFormatError(path, "it was written on a big-endian machine. Load it there with torch and save it again.")

    def _find_prefix(self) -> str:
        indices = [name for name in self._infos if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(indices) != 1:
            raise CheckpointFormatError(self._path, "it is a zip file and no torch.save archive (it has no data.pkl)")
        prefix = indices[0].removesuffix("/data.pkl")
        if f"{prefix}/constants.pkl" in self._infos:
            raise CheckpointFormatError(self._path, "it is a TorchScript module (code, not data). Save its state_dict() instead.")
        return prefix

    def record(self, name: str) -> RecordRange:
        """The byte range of a record, in the file (not in the archive).

        Raises:
            CheckpointFormatError: There is no such record, it is compressed, or it lies outside the archive.
        """
        info = self._infos.get(name)
        if info is None:
            raise CheckpointFormatError(self._path, f"the archive lacks its record {name!r}")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise CheckpointFormatError(self._path, f"its record {name!r} is compressed or encrypted, which torch.save never does")
        self._file.seek(self._start + info.header_offset)
        header = self._file.read(_LOCAL_HEADER)
        if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
            raise CheckpointFormatError(self._path, f"its record {name!r} has no header where the directory says")
        name_length, extra_length = struct.unpack("<HH", header[26:30])
        start = info.header_offset + _LOCAL_HEADER + name_length + extra_length
        if start + info.file_size > self._length:
            raise IncompleteCheckpointError(self._path, f"its record {name!r} ends after the archive does")
        return RecordRange(self._start + start, info.file_size, info.CRC)

    def storage(self, key: str) -> RecordRange:
        """The byte range of a storage."""
        return self.record(f"{self.prefix}/data/{key}")

    def records(self) -> dict[str, RecordRange]:
        """All records, in directory order."""
        return {name: self.record(name) for name in self._infos if not name.endswith("/")}

    def read(self, name: str) -> bytes:
        """A small record's bytes."""
        where = self.record(name)
        if where.length > _MAX_INDEX_BYTES:
            raise CheckpointFormatError(self._path, f"its index {name!r} claims {where.length} bytes")
        self._file.seek(where.start)
        data = self._file.read(where.length)
        if len(data) != where.length:
            raise IncompleteCheckpointError(self._path, f"it ends inside the record {name!r}")
        return data

    def load(self, unknown: safe_pickle.Unknown = "refuse") -> tuple[Any, tuple[str, ...]]:
        """The archive's object with tensors as references; see :func:`labkit.checkpoint.safe_pickle.load`."""
        return safe_pickle.load(self.read(f"{self.prefix}/data.pkl"), self._path, unknown=unknown, storages=True)
