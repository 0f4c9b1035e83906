"""Reading of the directory of a zip archive of stored records. It refuses archives that other readers may interpret differently.

:mod:`zipfile` and torch's reader (miniz) disagree on slightly malformed archives: which of two records with the same name counts,
whether case matters, where the archive begins, which of several directories is valid. Then torch might load something other than
what was checked here, so anything ambiguous is refused. The format is described in
https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, sections 4.3 and 4.5.3 (zip64).
"""

from __future__ import annotations

import os
import posixpath
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from labkit.checkpoint.errors import CheckpointFormatError, IncompleteCheckpointError

_END = struct.Struct("<4sHHHHIIH")
_END_64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_HEADER = struct.Struct("<4sHHHHHIIIHH")
_END_SIGN, _END_64_SIGN, _LOCATOR_SIGN, _ENTRY_SIGN, _HEADER_SIGN = b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\1\2", b"PK\3\4"
_TAIL_BYTES = 1 << 14
_LONGEST_COMMENT = 1 << 16
_ELSEWHERE, _ELSEWHERE_16 = 0xFFFFFFFF, 0xFFFF  # this value means that the number is in the zip64 part
_ENCRYPTED, _SIZES_FOLLOW, _UTF_8 = 1 << 0, 1 << 3, 1 << 11
_STORED = 0


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """A record as the directory describes it.

    Attributes:
        name: Its name; ``raw`` is the name as bytes.
        flags, method, crc, size: As the format defines them.
        header: The offset of its local header from the beginning of the archive.
        limit: The offset of the next record or of the directory.
    """

    name: str
    raw: bytes
    flags: int
    method: int
    crc: int
    size: int
    header: int
    limit: int


class ZipReader:
    """The records of one archive, which may be a slice of a file.

    Args:
        fd: The open file. Its own position is not used.
        path: The file's name, for messages.
        start, length: The position of the archive in the file.

    Attributes:
        records: The records by name, in the directory's order.

    Raises:
        IncompleteCheckpointError: There is no directory at the end.
        CheckpointFormatError: The directory can be read in more than one way.
    """

    def __init__(self, fd: int, path: Path, start: int, length: int) -> None:
        self._fd, self._path, self._start, self._length = fd, path, start, length
        self._tail = self._read(max(0, length - _TAIL_BYTES), min(length, _TAIL_BYTES))
        count, begin, end = self._directory_place()
        self.records = self._parse(self._read(begin, end - begin), count, begin)

    def data_start(self, record: ZipRecord) -> int:
        """Return the offset of a record's data in the file, after comparing its local header with the directory.

        Raises:
            CheckpointFormatError: The record is compressed or encrypted, its header does not match the directory, or it overlaps
                what follows.
        """
        if record.method != _STORED or record.flags & _ENCRYPTED:
            raise self._wrong(f"its record {record.name!r} is compressed or encrypted, which torch.save never does")
        head = self._read(record.header, _HEADER.size)
        if len(head) < _HEADER.size or not head.startswith(_HEADER_SIGN):
            raise self._wrong(f"its record {record.name!r} has no header where the directory says")
        _, _, flags, method, _, _, crc, packed, size, name_length, extra_length = _HEADER.unpack(head)
        rest = self._read(record.header + _HEADER.size, name_length + extra_length)
        # Sizes that do not fit are in the zip64 part; they are zero if the writer did not know them yet.
        expected = {(record.crc, record.size, record.size), (record.crc, _ELSEWHERE, _ELSEWHERE)}
        if flags & _SIZES_FOLLOW:
            expected |= {(0, 0, 0), (0, _ELSEWHERE, _ELSEWHERE)}
        same = (flags, method, rest[:name_length]) == (record.flags, record.method, record.raw) and (crc, packed, size) in expected
        if _ELSEWHERE in (packed, size) and not flags & _SIZES_FOLLOW:
            same = same and _zip64(rest[name_length:], 2) == [record.size, record.size]
        if not same:
            raise self._wrong(f"the header of its record {record.name!r} does not match the directory")
        begin = record.header + _HEADER.size + len(rest)
        if begin + record.size > record.limit:
            raise self._wrong(f"its record {record.name!r} reaches into what follows it")
        return self._start + begin

    def _read(self, at: int, size: int) -> bytes:
        return os.pread(self._fd, max(0, min(size, self._length - at)), self._start + at)

    def _wrong(self, what: str) -> CheckpointFormatError:
        return CheckpointFormatError(self._path, f"{what}. torch.save writes no such archive; readers would see different things.")

    def _directory_place(self) -> tuple[int, int, int]:
        """Return the number of records, and the offsets of the directory's beginning and end."""
        end = self._length - _END.size
        last = self._tail[-_END.size :]
        if len(last) < _END.size or not last.startswith(_END_SIGN):
            near = self._read(max(0, self._length - _LONGEST_COMMENT - _END.size), _LONGEST_COMMENT + _END.size)
            if _END_SIGN in near[: -_END.size] and len(self._tail):
                raise self._wrong("the zip archive has a comment, or bytes after its end")
            raise IncompleteCheckpointError(
                self._path,
                f"the torch.save archive at byte {self._start} has no directory at its end. The file is cut off or damaged.",
            )
        _, disk, first_disk, here, count, size, begin, comment = _END.unpack(last)
        if disk or first_disk or here != count or comment or _END_SIGN in last[1:]:
            raise self._wrong("the end of the zip archive is not that of a single file")
        wide = self._wide_end(end)
        if wide is not None:
            end, numbers = wide
            for narrow, number, elsewhere in zip(
                (count, size, begin), numbers, (_ELSEWHERE_16, _ELSEWHERE, _ELSEWHERE), strict=True
            ):
                if narrow not in (number, elsewhere):
                    raise self._wrong("the two ends of the zip archive (zip64) say different things")
            count, size, begin = numbers
        if begin + size != end:
            raise self._wrong(
                "the zip archive's directory does not end where its end begins, or there are bytes before the archive"
            )
        return count, begin, end

    def _wide_end(self, end: int) -> tuple[int, tuple[int, int, int]] | None:
        """Return the zip64 end's offset and its numbers (records, the directory's size and offset); None if there is none."""
        at = end - _LOCATOR.size
        locator = self._read(at, _LOCATOR.size) if at >= 0 else b""
        if not locator.startswith(_LOCATOR_SIGN):
            return None
        _, disk, begin, disks = _LOCATOR.unpack(locator)
        wide = self._read(begin, _END_64.size) if begin + _END_64.size == at else b""
        if disk or disks > 1 or not wide.startswith(_END_64_SIGN):
            raise self._wrong("the zip archive's zip64 end is not where it should be")
        _, length, _, _, here_disk, first_disk, here, count, size, first = _END_64.unpack(wide)
        if length != _END_64.size - 12 or here_disk or first_disk or here != count:
            raise self._wrong("the zip archive's zip64 end is not that of a single file")
        return begin, (count, size, first)

    def _parse(self, directory: bytes, count: int, begin: int) -> dict[str, ZipRecord]:
        records: list[ZipRecord] = []
        at = 0
        while at < len(directory):
            record, at = self._entry(directory, at, begin)
            records.append(record)
        if len(records) != count:
            raise self._wrong(f"the zip archive's end says {count} records, and its directory has {len(records)}")
        self._check_names(records)
        return self._limited(records, begin)

    def _entry(self, directory: bytes, at: int, begin: int) -> tuple[ZipRecord, int]:
        fixed = directory[at : at + _ENTRY.size]
        if len(fixed) < _ENTRY.size or not fixed.startswith(_ENTRY_SIGN):
            raise self._wrong("the zip archive's directory is damaged")
        fields = _ENTRY.unpack(fixed)
        flags, method, crc = fields[3], fields[4], fields[7]
        lengths, disk = fields[10:13], fields[13]
        name_end = at + _ENTRY.size + lengths[0]
        after = name_end + lengths[1] + lengths[2]
        raw = directory[at + _ENTRY.size : name_end]
        numbers = [fields[9], fields[8], fields[16]]  # size, packed size, header's offset: the order of the zip64 part
        wide = [index for index, number in enumerate(numbers) if number == _ELSEWHERE]
        extra = directory[name_end : name_end + lengths[1]]
        for index, number in zip(wide, _zip64(extra, len(wide)), strict=False):
            numbers[index] = number
        size, packed, header = numbers
        name = raw.decode("utf-8" if flags & _UTF_8 else "cp437", "replace")
        if disk or after > len(directory) or header >= begin or (method == _STORED and size != packed):
            raise self._wrong(f"the zip archive's directory has impossible numbers for its record {name!r}")
        return ZipRecord(name, raw, flags, method, crc, size, header, 0), after

    def _check_names(self, records: list[ZipRecord]) -> None:
        seen: dict[str, str] = {}
        for record in records:
            if "\0" in record.name:
                raise self._wrong(f"its record {record.name!r} has a name that ends early for some readers")
            same = posixpath.normpath(record.name.replace("\\", "/")).casefold().lstrip("/")
            if same in seen:
                raise self._wrong(f"its records {seen[same]!r} and {record.name!r} have the same name")
            seen[same] = record.name

    def _limited(self, records: list[ZipRecord], begin: int) -> dict[str, ZipRecord]:
        order = sorted(records, key=lambda record: record.header)
        if order and order[0].header:
            raise self._wrong(f"there are bytes before its first record {order[0].name!r}")
        limits = {}
        for first, second in pairwise(order):
            if first.header == second.header:
                raise self._wrong(f"its records {first.name!r} and {second.name!r} are in the same place")
            limits[first.header] = second.header
        return {
            record.name: ZipRecord(
                record.name, record.raw, record.flags, record.method, record.crc, record.size, record.header,
                limits.get(record.header, begin),
            )
            for record in records
        }  # fmt: skip


def _zip64(extra: bytes, count: int) -> list[int]:
    """Return at most ``count`` numbers from the zip64 part of an extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            part = extra[at + 4 : at + 4 + size][: 8 * count]
            return list(struct.unpack(f"<{len(part) // 8}Q", part[: len(part) // 8 * 8]))
        at += 4 + size
    return []
