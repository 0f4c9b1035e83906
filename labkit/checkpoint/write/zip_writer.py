"""Writing of a zip of stored records in one pass, with each record's CRC-32 supplied by the caller.

:mod:`zipfile` computes the CRC-32 itself, with a zlib that is slower than the disk. The format is described in
https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, sections 4.3 and 4.5.3 (zip64).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.checkpoint.data.hashed_file import HashedFile
from labkit.checkpoint.files.checksums import crc32

_ELSEWHERE = 0xFFFFFFFF  # this value in a 32-bit field means that the number is in the zip64 part
_LARGE = _ELSEWHERE
_DATE = 0x21  # 1 January 1980, so that equal contents give equal bytes
_CRC_FOLLOWS = 1 << 3
_VERSION, _VERSION_64 = 20, 45


@dataclass(frozen=True, slots=True)
class _Record:
    name: bytes
    flags: int
    crc: int
    size: int
    offset: int


class StoredZip:
    """A zip archive written from a file's current position.

    Args:
        out: The file.
        align: Each record's data begin at a multiple of this many bytes in the file.
    """

    def __init__(self, out: HashedFile, align: int) -> None:
        self._out, self._align, self._start = out, align, out.tell()
        self._records: list[_Record] = []

    def add(self, name: str, data: Any) -> None:
        """Append a record whose bytes are in memory."""
        self._out.write(b"".join([self._header(name, len(data), crc32(data), flags=0), data]))

    def add_stream(self, name: str, size: int, write: Callable[[], int]) -> None:
        """Append a record of ``size`` bytes, which ``write`` writes to the file, returning their CRC-32."""
        self._out.write(self._header(name, size, 0, flags=_CRC_FOLLOWS))
        crc = write()
        self._out.write(struct.pack("<IIQQ" if size >= _LARGE else "<IIII", 0x08074B50, crc, size, size))
        header = self._records.pop()
        self._records.append(_Record(header.name, header.flags, crc, size, header.offset))

    def _header(self, name: str, size: int, crc: int, *, flags: int) -> bytes:
        """Note a record at the file's current position, and return the bytes that precede its data."""
        offset, encoded, large = self._out.tell() - self._start, name.encode(), size >= _LARGE
        noted = 0 if flags & _CRC_FOLLOWS else size
        extra = struct.pack("<HHQQ", 1, 16, noted, noted) if large else b""
        # The field that torch calls "FB" pads up to the alignment.
        padding = -(self._out.tell() + 30 + len(encoded) + len(extra) + 4) % self._align
        extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
        short = _ELSEWHERE if large else noted
        fixed = (0x04034B50, _VERSION_64 if large else _VERSION, flags, 0, 0, _DATE, crc, short, short, len(encoded), len(extra))
        self._records.append(_Record(encoded, flags, crc, size, offset))
        return struct.pack("<IHHHHHIIIHH", *fixed) + encoded + extra

    def close(self) -> None:
        """Write the directory."""
        start = self._out.tell() - self._start
        directory = b"".join(map(_directory_entry, self._records))
        size, count = len(directory), len(self._records)
        counts, where = min(count, 0xFFFF), (size, start)
        if max(where) >= _LARGE or count >= 0xFFFF:
            fixed = (0x06064B50, 44, _VERSION_64, _VERSION_64, 0, 0, count, count, size, start)
            directory += struct.pack("<IQHHIIQQQQ", *fixed) + struct.pack("<IIQI", 0x07064B50, 0, start + size, 1)
            counts, where = 0xFFFF, (_ELSEWHERE, _ELSEWHERE)
        self._out.write(directory + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, counts, counts, *where, 0))


def _directory_entry(record: _Record) -> bytes:
    # The zip64 part holds only the numbers that do not fit into their own fields, in this order.
    wide = [number for number in (record.size, record.size, record.offset) if number >= _LARGE]
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size, offset = (_ELSEWHERE if number >= _LARGE else number for number in (record.size, record.offset))
    version = _VERSION_64 if wide else _VERSION
    numbers = (record.crc, size, size, len(record.name), len(extra), 0, 0, 0, 0, offset)
    return (
        struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, version, version, record.flags, 0, 0, _DATE, *numbers) + record.name + extra
    )
