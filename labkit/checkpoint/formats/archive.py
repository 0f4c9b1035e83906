"""torch.save archives: a zip whose records are stored uncompressed, so each storage is a byte range of the file.

The layout is described in :func:`torch.save` and ``caffe2/serialize/inline_container.h``. DCP writes one such archive
per item into its ``.distcp`` files, so an archive here may be a slice of a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from labkit.checkpoint.errors import CheckpointFormatError, IncompleteCheckpointError
from labkit.checkpoint.files.checksums import read_into
from labkit.checkpoint.files.mistaken_files import refuse_mistaken
from labkit.checkpoint.files.zip_reader import ZipReader
from labkit.checkpoint.index.layout import span
from labkit.checkpoint.pickles import safe_pickle
from labkit.checkpoint.pickles.pickle_records import TensorRef

_MAX_INDEX_BYTES = 1 << 32
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def refuse_other(path: Path, magic: bytes) -> None:
    """Raise an error if a file's first bytes show that it is not a torch.save archive.

    Raises:
        CheckpointFormatError: It is in the format from before torch 1.6, a plain pickle, a Git LFS pointer or a web page.
        IncompleteCheckpointError: It is empty.
    """
    if magic.startswith(_LEGACY):
        raise CheckpointFormatError(
            path, "it is in torch's format from before 1.6. Convert it: torch.save(torch.load(file, weights_only=True), new_file)."
        )
    if not magic:
        raise IncompleteCheckpointError(path, "it is empty")
    if magic.startswith(b"\x80"):
        raise CheckpointFormatError(
            path,
            "it is a plain pickle, not a torch.save archive. If you trust it, load it with pickle and save it with torch.save.",
        )
    if not magic.startswith(b"PK"):
        refuse_mistaken(path)


def expanded_bytes(stored: int) -> int:
    """Return how many bytes an archive's tensors may take in total when read; each distinct view counts once.

    Overlapping views, such as an expanded tensor, are stored once, so a file of a kilobyte may claim terabytes. Sixteen times the
    stored size leaves room for flat parameters and their views; the 16 MiB are for small expanded tensors.
    """
    return 16 * stored + (1 << 24)


@dataclass(frozen=True, slots=True)
class RecordRange:
    """The byte range of a record's data in the file, and the CRC-32 that the writer recorded."""

    start: int
    length: int
    crc: int


class TorchArchive:
    """The index of one torch.save archive.

    Args:
        file: An open binary file.
        path: The file's name, for messages.
        start: Offset of the archive in the file.
        length: Length of the archive in bytes.

    Raises:
        IncompleteCheckpointError: The file ends before the archive does.
        CheckpointFormatError: It is no torch.save archive; is compressed, big-endian or a TorchScript module; or torch and other
            programs would read it differently.
    """

    def __init__(self, file: BinaryIO, path: Path, start: int, length: int) -> None:
        self._fd, self._path = file.fileno(), path
        self._zip = ZipReader(self._fd, path, start, length)
        self.prefix = self._find_prefix()
        order = f"{self.prefix}/byteorder"
        if order in self._zip.records and self.read(order) != b"little":
            raise CheckpointFormatError(path, "it was written on a big-endian machine. Load it there with torch and save it again.")

    def _find_prefix(self) -> str:
        # torch assumes that all records are in the folder of the first one.
        names = list(self._zip.records)
        prefix = names[0].partition("/")[0] if names else ""
        if f"{prefix}/data.pkl" not in self._zip.records:
            raise CheckpointFormatError(self._path, "it is a zip file, but not a torch.save archive (it has no data.pkl)")
        for name in names:
            if not name.startswith(f"{prefix}/"):
                raise CheckpointFormatError(self._path, f"its record {name!r} is not in the folder {prefix!r} of the others")
        if f"{prefix}/constants.pkl" in self._zip.records:
            raise CheckpointFormatError(self._path, "it is a TorchScript module (code, not data). Save its state_dict() instead.")
        return prefix

    @property
    def index_bytes(self) -> int:
        """The length of the pickle."""
        return self._zip.records[f"{self.prefix}/data.pkl"].size

    def record(self, name: str) -> RecordRange:
        """Return the byte range of a record, in the file (not in the archive).

        Raises:
            CheckpointFormatError: There is no such record, it is compressed, or its header and the directory differ.
        """
        found = self._zip.records.get(name)
        if found is None:
            raise CheckpointFormatError(self._path, f"the archive lacks its record {name!r}")
        return RecordRange(self._zip.data_start(found), found.size, found.crc)

    def storage(self, key: str) -> RecordRange:
        """Return the byte range of a storage."""
        return self.record(f"{self.prefix}/data/{key}")

    def tensor(self, ref: TensorRef, known: RecordRange | None = None) -> RecordRange:
        """Return the byte range of the storage that a tensor views; ``known`` is the range from an earlier look-up.

        Raises:
            CheckpointFormatError: The storage has a different size than the index says, or the tensor reaches past its end.
        """
        found = known or self.storage(ref.storage.key)
        reach = span(ref.shape, ref.strides)
        if reach and (ref.offset + reach) * ref.dtype.itemsize > found.length:
            raise CheckpointFormatError(self._path, f"a tensor reaches past the end of its storage {ref.storage.key!r}")
        if not ref.storage.fits(found.length):
            raise CheckpointFormatError(
                self._path,
                f"its storage {ref.storage.key!r} has {found.length:,} bytes; the index gives it {ref.storage.numel:,} elements",
            )
        return found

    def records(self) -> dict[str, RecordRange]:
        """Return all records, in directory order."""
        return {name: self.record(name) for name in self._zip.records if not name.endswith("/")}

    def read(self, name: str) -> bytes:
        """Return a small record's bytes."""
        where = self.record(name)
        if where.length > _MAX_INDEX_BYTES:
            raise CheckpointFormatError(self._path, f"its index {name!r} claims {where.length} bytes")
        data = bytearray(where.length)
        if read_into(self._fd, memoryview(data), where.start) != where.length:
            raise IncompleteCheckpointError(self._path, f"it ends inside the record {name!r}")
        return bytes(data)

    def load(self, unknown: safe_pickle.Unknown = "refuse") -> tuple[Any, tuple[str, ...]]:
        """Return the archive's object with tensors as references; see :func:`labkit.checkpoint.pickles.safe_pickle.load`."""
        return safe_pickle.load(self.read(f"{self.prefix}/data.pkl"), self._path, unknown=unknown, storages=True)
