"""Write zip archives that torch.save would not write."""

from __future__ import annotations

import io
import warnings
import zipfile
from collections.abc import Sequence


def records_of(data: bytes) -> list[tuple[str, bytes]]:
    """The records of an archive, in order."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(info.filename, archive.read(info)) for info in archive.infolist()]


def archive_of(records: Sequence[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> bytes:
    """An archive of records, of whatever names."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about two of one name
        for name, data in records:
            archive.writestr(name, data)
    return file.getvalue()


def replace_record(data: bytes, name: str, content: bytes) -> bytes:
    """The archive with another content of one record, which is named without its folder."""
    return archive_of([(known, content if known.endswith("/" + name) else old) for known, old in records_of(data)])
