"""The in-memory model of any checkpoint: entries with name, shape, dtype and the location of their bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from labkit.checkpoint.files.plain_files import FileState
from labkit.checkpoint.pickles.pickle_records import Lazy, UnsupportedTensor

_NOT_LAZY = Lazy()
Kind = Literal["dcp", "torch", "torch_ranks", "safetensors", "parts"]
Section = Literal["model", "optimizer", "other"]
Path_ = tuple[str | int, ...]


Int64s = npt.NDArray[np.int64]

_WRITER = re.compile(r"^__([0-9]+)_[0-9]+\.distcp$|^shard-([0-9]+)-model")


def writer_rank(file: str) -> int | None:
    """Return the rank in the name of a file that DCP wrote; None for other files."""
    match = _WRITER.search(Path(file).name)
    if match is None:
        return None
    dcp, shard = match.groups()
    return int(shard) - 1 if shard else int(dcp)


@dataclass(frozen=True)
class Gap:
    """Files that, judging by other files' names, are missing or were not read.

    Attributes:
        severity: ``error`` if something is missing, ``warning`` if it may be.
        what: Which files they are, and what to do.
    """

    severity: Literal["error", "warning"]
    what: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """One box of a tensor and the bytes that hold it.

    Attributes:
        offsets: The position of the box in the tensor, one number per dim.
        sizes: The box's extent per dim.
        file: The file, relative to the checkpoint's root.
        start: The first byte in that file.
        length: The number of bytes.
        archive: True if the bytes are a torch.save archive that holds the data (DCP), False if they are the data.
        strides: The strides in elements, for data that are not in C order or have lazy bits; else None.
        lazy: What remains to be done to the data to get the values.
        writer: The rank that wrote the file, if it is known.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int
    archive: bool = False
    strides: tuple[int, ...] | None = None
    lazy: Lazy = _NOT_LAZY
    writer: int | None = None

    @property
    def numel(self) -> int:
        return prod(self.sizes)


class ChunkTable(Sequence[Chunk]):
    """The chunks of one tensor, stored as columns so that a million of them take little memory.

    Attributes:
        offsets, sizes: int64 arrays of shape (num_chunks, num_dims).
        file_ids: int64 array (num_chunks,), indices into ``files``.
        starts, lengths: int64 arrays (num_chunks,), byte ranges.
        writers: Maps file names to the rank that wrote the file, for names that do not contain it as DCP's do.
    """

    __slots__ = ("archive", "file_ids", "files", "lazy", "lengths", "offsets", "sizes", "starts", "strides", "writers")

    def __init__(
        self,
        offsets: Int64s,
        sizes: Int64s,
        file_ids: Int64s,
        starts: Int64s,
        lengths: Int64s,
        files: Sequence[str],
        *,
        archive: bool = False,
        strides: Mapping[int, tuple[int, ...]] | None = None,
        lazy: Mapping[int, Lazy] | None = None,
    ) -> None:
        self.offsets, self.sizes = offsets, sizes
        self.file_ids, self.starts, self.lengths = file_ids, starts, lengths
        self.files, self.archive, self.strides, self.lazy = files, archive, dict(strides or {}), dict(lazy or {})
        self.writers: Mapping[str, int] = {}

    @classmethod
    def of(cls, chunks: Sequence[Chunk], num_dims: int) -> ChunkTable:
        """Return the table of a few chunks, all with the same ``archive``."""
        files = list(dict.fromkeys(chunk.file for chunk in chunks))
        where = {file: index for index, file in enumerate(files)}
        count = len(chunks)
        return cls(
            np.array([chunk.offsets for chunk in chunks], dtype=np.int64).reshape(count, num_dims),
            np.array([chunk.sizes for chunk in chunks], dtype=np.int64).reshape(count, num_dims),
            np.array([where[chunk.file] for chunk in chunks], dtype=np.int64),
            np.array([chunk.start for chunk in chunks], dtype=np.int64),
            np.array([chunk.length for chunk in chunks], dtype=np.int64),
            files,
            archive=any(chunk.archive for chunk in chunks),
            strides={i: chunk.strides for i, chunk in enumerate(chunks) if chunk.strides is not None},
            lazy={i: chunk.lazy for i, chunk in enumerate(chunks) if chunk.lazy},
        )

    def __len__(self) -> int:
        return len(self.file_ids)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        file = self.files[int(self.file_ids[i])]
        return Chunk(
            tuple(self.offsets[i].tolist()),
            tuple(self.sizes[i].tolist()),
            file,
            int(self.starts[i]),
            int(self.lengths[i]),
            self.archive,
            self.strides.get(i),
            self.lazy.get(i, _NOT_LAZY),
            self.writers.get(file, writer_rank(file)),
        )

    def __iter__(self) -> Iterator[Chunk]:
        return (self[i] for i in range(len(self)))

    def in_directory(self, directory: str) -> ChunkTable:
        """Return the same chunks with file names relative to a parent directory."""
        files = [f"{directory}/{file}" for file in self.files]
        table = ChunkTable(
            self.offsets,
            self.sizes,
            self.file_ids,
            self.starts,
            self.lengths,
            files,
            archive=self.archive,
            strides=self.strides,
            lazy=self.lazy,
        )
        ranks = {f"{directory}/{file}": self.writers.get(file, writer_rank(file)) for file in self.files}
        table.writers = {file: rank for file, rank in ranks.items() if rank is not None}
        return table

    def file_names(self) -> list[str]:
        """Return the files that hold this tensor, each once, in order of first use."""
        _, first = np.unique(self.file_ids, return_index=True)
        return [self.files[int(self.file_ids[i])] for i in np.sort(first)]

    def same_place(self, other: ChunkTable) -> bool:
        """Return whether both tables have the same boxes in the same byte ranges, in the same order."""
        columns = ("offsets", "sizes", "starts", "lengths")
        return (
            all(np.array_equal(getattr(self, column), getattr(other, column)) for column in columns)
            and [self.files[n] for n in self.file_ids.tolist()] == [other.files[n] for n in other.file_ids.tolist()]
            and (self.strides, self.lazy) == (other.strides, other.lazy)
        )

    def intersecting(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Return the indices of the chunks that share at least one element with a box, in table order."""
        low = np.asarray(offsets, dtype=np.int64)
        high = low + np.asarray(sizes, dtype=np.int64)
        touching = (self.offsets < high) & (self.offsets + self.sizes > low) & (self.sizes > 0)
        return np.nonzero(touching.all(axis=1))[0].tolist()


@dataclass(slots=True)
class TensorEntry:
    """A tensor in a checkpoint.

    Attributes:
        key: Its flat name as stored, unique in the checkpoint.
        path: The nested keys that lead to it; an integer is a list position or, in a torch.save file, possibly a dict key.
        shape: The full shape.
        dtype: The stored dtype.
        chunks: Where its data are.
        section: Model, optimizer or other.
        tied_to: The key of the first entry that names the same bytes, or None.
        replicas: Copies under the same key in other rank files; each should equal ``chunks``.
        flat: True for a flat parameter of FSDP1, whose elements belong to several parameters.
    """

    key: str
    path: Path_
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: ChunkTable
    section: Section = "other"
    tied_to: str | None = None
    replicas: tuple[ChunkTable, ...] = ()
    flat: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """The bytes of the full tensor, without copies and file overhead."""
        return self.numel * self.dtype.itemsize


def tie(entries: Iterable[TensorEntry]) -> None:
    """Set ``tied_to``, in place, for each entry that shares its bytes with an earlier one."""
    seen: dict[Any, list[TensorEntry]] = {}
    for entry in entries:
        # All parameters often share one scalar step count; that is intended, not a tie.
        if not entry.shape or not entry.numel or not len(entry.chunks):
            continue
        first: Chunk = entry.chunks[0]
        owners = seen.setdefault((entry.shape, entry.dtype, first.file, first.start, first.strides, first.lazy), [])
        owner = next((other for other in owners if entry.chunks.same_place(other.chunks)), None)
        if owner is None:
            owners.append(entry)
        else:
            entry.tied_to = owner.key


@dataclass(slots=True)
class ValueEntry:
    """Anything in a checkpoint that is not a tensor.

    Attributes:
        key: Its flat name.
        path: The nested keys that lead to it.
        file: The file that holds it, relative to the root.
        start, length: The byte range of a torch.save archive in that file; the length is 0 if ``inline`` holds the value.
        inline: The value itself, if it was read along with the index.
        section: Optimizer or other.
        replicas: The values of the same key in other rank files, by rank.
    """

    key: str
    path: Path_
    file: str
    start: int = 0
    length: int = 0
    inline: Any = None
    section: Section = "other"
    replicas: Mapping[int, Any] = field(default_factory=dict)


def unsupported(value: ValueEntry) -> str | None:
    """Return the kind of a tensor that labkit describes but does not read; None for other values."""
    found = (found for found in (value.inline, *value.replicas.values()) if isinstance(found, UnsupportedTensor))
    return next((tensor.what for tensor in found), None)


@dataclass(repr=False)
class Checkpoint:
    """The contents of a checkpoint. :func:`labkit.checkpoint.open_checkpoint` makes it, and reads only indices.

    Attributes:
        path: The path that the caller gave.
        root: The directory that file names are relative to.
        kind: ``dcp``, ``torch`` (one file, or disjoint shards), ``torch_ranks`` (a file per rank), ``safetensors``,
            ``parts`` (several of these, assembled by the user).
        tensors, values: The entries by key, in stored order.
        files: The size in bytes of every file that belongs to the checkpoint, by name.
        metadata: Other information from the format (versions, safetensors metadata).
        notes: Sentences about anything odd that was noticed during reading.
        opaque: Names outside the allow-list whose contents were left unread because the caller chose not to refuse them.
        step: The step in a labkit store; None elsewhere.
        ranks: The rank that wrote each file, by file name, if each file belongs to a rank.
        missing_ranks: The ranks whose files are missing, as the other files suggest.
        index: The index file that lists the other files; empty if there is none.
        gaps: Files that seem to be missing, judging by the others' names; only if no index lists the files.
        parts: The checkpoints that it was assembled from.
        records: For torch.save files: each file's storages as (start, length, CRC-32), by start.
        conflicts: The tensors whose form differs between ranks' files, with both forms as text; the entry has the first file's.
        states: The state that each file must be in whenever it is read, by name; empty if that is not checked.
    """

    path: Path
    root: Path
    kind: Kind
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    values: dict[str, ValueEntry] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    opaque: tuple[str, ...] = ()
    step: int | None = None
    ranks: dict[str, int] = field(default_factory=dict)
    missing_ranks: tuple[int, ...] = ()
    index: str = ""
    gaps: list[Gap] = field(default_factory=list)
    parts: list[Checkpoint] = field(default_factory=list)
    records: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    conflicts: dict[str, str] = field(default_factory=dict)
    states: dict[str, FileState] = field(default_factory=dict)

    def section(self, section: Section) -> Iterable[TensorEntry]:
        """Return the tensors of one section."""
        return (entry for entry in self.tensors.values() if entry.section == section)

    @property
    def size_bytes(self) -> int:
        """The bytes of all tensors; tied tensors count once."""
        return sum(entry.size_bytes for entry in self.tensors.values() if entry.tied_to is None)

    def writer(self, file: str) -> int | None:
        """Return the rank that wrote a file, if it is known."""
        return self.ranks.get(file, writer_rank(file))

    @property
    def num_chunks(self) -> int:
        return sum(len(entry.chunks) for entry in self.tensors.values())

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path}: {self.kind}, {len(self.tensors):,} tensors, {self.size_bytes:,} bytes>"

    def _repr_html_(self) -> str:
        from labkit.checkpoint.views.picture import checkpoint_html

        return checkpoint_html(self)
