"""Read a large ``.metadata`` in seconds: its bulk by array operations, the rest by the restricted unpickler.

A checkpoint of 10,000 tensors by 1,024 ranks has a ``.metadata`` of 1.5 GB, from which an unpickler makes some hundred
million objects. Here the records that occur once per chunk are taken apart by :mod:`labkit.checkpoint.bulk_records`, cut out of
the pickle and replaced by the number of their run; what is left is small and is unpickled. Whatever does not have exactly the
expected form gives None, and the caller reads the file the slow way.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from labkit.checkpoint.bulk_records import NOTHING, NUMBER, PAD_BYTES, REFERENCE, SIZE, TEXT, Found, Scanner, Slot
from labkit.checkpoint.model import Int64s
from labkit.checkpoint.safe_pickle import IndexReader, Record, Stateful

LARGE_BYTES = 1 << 24
Bools = npt.NDArray[np.bool_]
_PAD = bytes(8)


class _OtherFormError(Exception):
    """The pickle is not of the form that is read here."""


@dataclass
class Columns:
    """The chunks of all tensors, in order, and where their bytes are.

    Attributes:
        state: The metadata with chunk lists emptied and ``storage_data`` without the bulk.
        bounds: Tensor key to the range of its chunks in the columns.
        offsets, sizes: (chunks, most dims); only as many dims as the tensor has are used.
        file_ids, starts, lengths: (chunks,).
        files: The files' names.
        opaque: Names outside the allow-list.
    """

    state: dict[str, Any]
    bounds: dict[str, tuple[int, int]]
    offsets: Int64s
    sizes: Int64s
    file_ids: Int64s
    starts: Int64s
    lengths: Int64s
    files: list[str]
    opaque: tuple[str, ...]


def read_large(file: BinaryIO, size: int) -> Columns | None:
    """Read a ``.metadata`` of many chunks.

    Args:
        file: The open file, at its beginning.
        size: Its size in bytes.

    Returns:
        Its columns, or None when the pickle has another form than DCP writes; it may then be damaged, or hostile, or of
        another version.

    Ranks: local.
    """
    try:
        return _read(file, size)
    except (_OtherFormError, ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, EOFError, struct.error):
        return None
    except Exception as error:  # pickle.UnpicklingError and whatever a damaged pickle makes the unpickler raise
        if "nplick" in type(error).__name__ or isinstance(error, ArithmeticError | LookupError | UnicodeError):
            return None
        raise


def _require(condition: bool) -> None:
    if not condition:
        raise _OtherFormError


def _read(file: BinaryIO, size: int) -> Columns:
    body = _without_frames(file, size)
    scanner = Scanner(body)
    found = scanner.find()
    kept, in_dict = _kept_runs(scanner, found)
    rest, bases, numbers = _rest(body, scanner.size, found, kept, in_dict)
    reader = IndexReader(rest)
    metadata = reader.load()
    _require(isinstance(metadata, Record))
    memo = dict(zip(numbers, reader.memo.copy().values(), strict=True))
    chunks, keys, places = _sorted_out(found, kept, in_dict, memo)
    del found
    bounds, offsets, sizes = _chunk_columns(metadata.state["state_dict_metadata"], chunks)
    del chunks
    files, starts, lengths = (np.full(len(offsets), -1, dtype=np.int64) for _ in range(3))
    columns = Columns(metadata.state, bounds, offsets, sizes, files, starts, lengths, [], tuple(sorted(reader.unknown)))
    _place(columns, scanner, keys, places, bases, memo)
    return columns


def _without_frames(file: BinaryIO, size: int) -> memoryview:
    """The pickle without its frame headers, and what the scanner wants behind it."""
    body = memoryview(bytearray(size + PAD_BYTES))
    _require(size > 11 and file.readinto(body[:2]) == 2 and body[0] == 0x80 and body[1] in (4, 5))  # type: ignore[attr-defined]
    read, at = 2, 2
    while read < size:
        head = file.read(9)
        _require(len(head) == 9 and head[0] == 0x95)
        (length,) = struct.unpack_from("<Q", head, 1)
        _require(read + 9 + length <= size and file.readinto(body[at : at + length]) == length)  # type: ignore[attr-defined]
        read, at = read + 9 + length, at + length
    return body[: at + PAD_BYTES]


def _kept_runs(scanner: Scanner, found: Found) -> tuple[Bools, Bools]:
    """Which runs are cut out of the pickle, and which of them are in a dict (the others are in a list)."""
    _require(len(found.start) > 0)
    closing = scanner.bytes[found.end]
    in_dict = closing == ord("u")
    # Other endings (a batch of one, a record inside another) stay in the rest; they are few.
    kept = in_dict | (closing == ord("e"))
    _require(bool(kept.any()) and bool((found.length[in_dict] % 2 == 0).all()))
    return kept, in_dict


def _rest(body: memoryview, size: int, found: Found, kept: Bools, in_dict: Bools) -> tuple[bytes, Int64s, list[int]]:
    """The pickle without the runs.

    A run in a list is replaced by its number, a run in a dict by its number and None. What the rest memoizes is numbered anew,
    and what it asks for by its number along with it.

    Returns:
        The rest; the memo number at which each run began; the memo numbers of what the rest memoizes, in order.
    """
    parts: list[memoryview | bytes] = []
    places, at, length = {}, 0, 0
    for index in np.flatnonzero(kept).tolist():
        start = int(found.start[index])
        parts.append(body[at:start])
        length += start - at
        places[length] = index
        parts.append(b"J" + struct.pack("<i", index) + (b"N" if in_dict[index] else b""))
        length += len(parts[-1])
        at = int(found.end[index])
    parts.append(body[at:size])
    return _numbered(b"".join(parts), places, found.puts.tolist())


# What matters to the memo: numbers (one may stand for a run), MEMOIZE and the two GETs. Everything else that DCP's metadata is
# written with is passed over; a byte that begins none of these ends the reading.
_OPCODES = re.compile(
    rb"(?P<memoize>\x94)|(?P<get>h.|j.{4})|(?P<number>J.{4})|X(?P<long>.{4})|(?:[.()}\]eusabtNR0\x81\x85-\x89\x93]|K.|M.."
    rb"|\x8c(?:" + b"|".join(b"\\x%02x.{%d}" % (n, n) for n in range(256)) + rb")"
    rb"|\x8a(?:" + b"|".join(b"\\x%02x.{%d}" % (n, n) for n in range(1, 9)) + rb")|G.{8}|\x80.)+",
    re.DOTALL,
)  # fmt: skip


def _numbered(rest: bytes, places: Mapping[int, int], puts: list[int]) -> tuple[bytes, Int64s, list[int]]:
    out, copied, at, count = [], 0, 0, 0
    bases = np.zeros(len(puts), dtype=np.int64)
    numbers: list[int] = []
    renumbered: dict[int, int] = {}
    end = len(rest)
    while at < end:
        match = _OPCODES.match(rest, at)
        if match is None:
            raise _OtherFormError
        kind, begin, at = match.lastgroup, at, match.end()
        if kind == "memoize":
            renumbered[count] = len(numbers)
            numbers.append(count)
            count += 1
        elif kind == "get":
            wanted = rest[begin + 1] if at == begin + 2 else int.from_bytes(rest[begin + 1 : at], "little")
            out += [rest[copied:begin], b"j", renumbered[wanted].to_bytes(4, "little")]
            copied = at
        elif kind == "number" and begin in places:
            bases[places[begin]] = count
            count += puts[places[begin]]
        elif kind == "long":
            at += int.from_bytes(match["long"], "little")
    _require(at == end)
    out.append(rest[copied:])
    return b"".join(out), bases, numbers


_CHUNK, _KEY, _PLACE = ("offsets", "sizes"), ("fqn", "index", "offset"), ("relative_path", "offset", "length")


@dataclass
class _Rows:
    """Records of one kind with their slots by key name, and where each run begins among them."""

    slots: dict[str, Slot]
    run: Int64s
    before: Int64s
    first_of_run: dict[int, int]
    length_of_run: dict[int, int]


def _sorted_out(found: Found, kept: Bools, in_dict: Bools, memo: Mapping[int, Any]) -> tuple[_Rows, _Rows, _Rows]:
    made: dict[tuple[str, ...], _Rows] = {}
    orders: dict[tuple[str, ...], Int64s] = {}
    for (cls, keys), every in found.rows.items():
        rows = every if kept.all() else every.take(kept[every.run])
        if not len(rows.order):
            continue
        names = tuple(memo[key] for key in keys)
        _require(memo.get(cls) is Stateful and names in (_CHUNK, _KEY, _PLACE) and names not in made)
        # In a list there are chunks only.
        _require(bool((in_dict[rows.run] == (names != _CHUNK)).all()))
        first = np.flatnonzero(np.diff(rows.run, prepend=-1))
        counts = np.diff(np.append(first, len(rows.run)))
        numbers = rows.run[first].tolist()
        slots = dict(zip(names, rows.slots, strict=True))
        starts, lengths = dict(zip(numbers, first.tolist(), strict=True)), dict(zip(numbers, counts.tolist(), strict=True))
        made[names], orders[names] = _Rows(slots, rows.run, rows.before, starts, lengths), rows.order
    _require(set(made) == {_CHUNK, _KEY, _PLACE} and len(orders[_KEY]) == len(orders[_PLACE]))
    # In a dict, keys and places take turns.
    _require(bool((orders[_KEY] + 1 == orders[_PLACE]).all()) and bool((made[_KEY].run == made[_PLACE].run).all()))
    return made[_CHUNK], made[_KEY], made[_PLACE]


def _chunk_columns(described: Mapping[str, Any], chunks: _Rows) -> tuple[dict[str, tuple[int, int]], Int64s, Int64s]:
    most = max(chunks.slots[name].dims.shape[1] for name in _CHUNK)
    _require(all(chunks.slots[name].dims.shape[1] == most for name in _CHUNK))
    bounds: dict[str, tuple[int, int]] = {}
    parts: list[tuple[Int64s, Int64s]] = []
    at = 0
    _require(bool((chunks.slots["offsets"].kind == SIZE).all() and (chunks.slots["sizes"].kind == SIZE).all()))
    for key, entry in described.items():
        listed = entry.state.get("chunks")
        if listed is None:
            continue
        begin, num_dims = at, len(entry.state["size"])
        for item in listed:
            if isinstance(item, int):
                first = chunks.first_of_run[item]
                rows = slice(first, first + chunks.length_of_run[item])
                _require(bool((chunks.slots["offsets"].value[rows] == num_dims).all()))
                _require(bool((chunks.slots["sizes"].value[rows] == num_dims).all()))
                parts.append((chunks.slots["offsets"].dims[rows], chunks.slots["sizes"].dims[rows]))
            else:
                (state,) = item
                parts.append((_padded(state["offsets"], most), _padded(state["sizes"], most)))
            at += len(parts[-1][0])
        bounds[key] = (begin, at)
        listed.clear()
    _require(bool(parts))
    return bounds, np.concatenate([offsets for offsets, _ in parts]), np.concatenate([sizes for _, sizes in parts])


def _padded(numbers: tuple[int, ...], most: int) -> Int64s:
    _require(len(numbers) <= most)
    return np.array([[*numbers, *[0] * (most - len(numbers))]], dtype=np.int64)


def _place(columns: Columns, scanner: Scanner, keys: _Rows, places: _Rows, bases: Int64s, memo: Mapping[int, Any]) -> None:
    """Note for each chunk where its bytes are, and check that key and chunk agree on where the chunk lies."""
    _require(bool((keys.slots["index"].kind == NUMBER).all() and (keys.slots["offset"].kind == SIZE).all()))
    _require(bool((places.slots["offset"].kind == NUMBER).all() and (places.slots["length"].kind == NUMBER).all()))
    names = list(columns.bounds)
    begins = np.array([columns.bounds[name][0] for name in names], dtype=np.int64)
    ends = np.array([columns.bounds[name][1] for name in names], dtype=np.int64)
    tensor = _looked_up(scanner, keys, "fqn", bases, memo, names)
    rows = begins[tensor] + keys.slots["index"].value
    _require(bool(((rows >= begins[tensor]) & (rows < ends[tensor])).all()))
    where_from = keys.slots["offset"].dims
    most = min(where_from.shape[1], columns.offsets.shape[1])
    _require(not where_from[:, most:].any() and not columns.offsets[:, most:].any())
    _require(bool((columns.offsets[rows, :most] == where_from[:, :most]).all()))
    texts = _texts(scanner, places, "relative_path", bases, memo)
    columns.files = list(dict.fromkeys(texts.values()))
    where = {name: index for index, name in enumerate(columns.files)}
    numbers = np.array(sorted(texts), dtype=np.int64)
    files = np.array([where[texts[number]] for number in numbers.tolist()], dtype=np.int64)
    slot = places.slots["relative_path"]
    number = np.where(slot.kind == TEXT, bases[places.run] + places.before + slot.memo, slot.value)
    found = np.minimum(np.searchsorted(numbers, number), len(numbers) - 1)
    _require(bool((numbers[found] == number).all()))
    columns.file_ids[rows] = files[found]
    columns.starts[rows] = places.slots["offset"].value
    columns.lengths[rows] = places.slots["length"].value
    # Each chunk was placed once, but for those whose key stayed in the rest.
    _require(len(rows) == int((columns.file_ids >= 0).sum()))


def _texts(scanner: Scanner, rows: _Rows, name: str, bases: Int64s, memo: Mapping[int, Any]) -> dict[int, str]:
    """All texts that records of a slot hold or refer to, by memo number."""
    slot = rows.slots[name]
    own = np.flatnonzero(slot.kind == TEXT)
    numbers = (bases[rows.run[own]] + rows.before[own] + slot.memo[own]).tolist()
    spans = zip(slot.value[own].tolist(), slot.length[own].tolist(), strict=True)
    found = {number: bytes(scanner.bytes[at : at + size]).decode() for number, (at, size) in zip(numbers, spans, strict=True)}
    _require(bool(((slot.kind == TEXT) | (slot.kind == REFERENCE)).all()))
    for number in np.unique(slot.value[slot.kind == REFERENCE]).tolist():
        if number not in found:
            _require(isinstance(memo.get(number), str))
            found[number] = memo[number]
    return found


def _looked_up(scanner: Scanner, rows: _Rows, name: str, bases: Int64s, memo: Mapping[int, Any], names: list[str]) -> Int64s:
    """The position in ``names`` of each record's text: compared byte for byte, eight bytes at a time."""
    slot = rows.slots[name]
    _require(bool((slot.kind != NOTHING).all()))
    result = np.full(len(rows.run), -1, dtype=np.int64)
    own = np.flatnonzero(slot.kind == TEXT)
    position = {text: index for index, text in enumerate(names)}
    for size in np.unique(slot.length[own]).tolist():
        same = own[slot.length[own] == size]
        wanted = [text for text in names if len(text.encode()) == size]
        result[same] = _same_length(scanner, slot.value[same], size, wanted, position)
    refers = np.flatnonzero(slot.kind == REFERENCE)
    if len(refers):
        numbers, back = np.unique(slot.value[refers], return_inverse=True)
        known = {}
        if not all(int(number) in memo for number in numbers):
            known = _texts(scanner, rows, name, bases, memo)
        texts = [memo.get(int(number)) or known[int(number)] for number in numbers]
        result[refers] = np.array([position[text] for text in texts], dtype=np.int64)[back]
    _require(bool((result >= 0).all()))
    return result


def _same_length(scanner: Scanner, starts: Int64s, size: int, wanted: list[str], position: Mapping[str, int]) -> Int64s:
    _require(bool(wanted) and size > 0)
    if size < 8:
        texts = [bytes(scanner.bytes[at : at + size]).decode() for at in starts.tolist()]
        return np.array([position[text] for text in texts], dtype=np.int64)
    table = np.frombuffer("".join(wanted).encode() + _PAD, dtype=np.uint8)
    words = np.ndarray((len(table) - 7,), "<u8", table.tobytes(), strides=(1,))
    at = np.arange(len(wanted), dtype=np.int64) * size
    steps = [*range(0, size - 7, 8), size - 8]
    # A mixed word tells candidates apart; equality of all words then decides.
    theirs, ours = _mixed(words, at, steps), _mixed(scanner.u64, starts, steps)
    order = np.argsort(theirs)
    found = order[np.minimum(np.searchsorted(theirs[order], ours), len(order) - 1)]
    for step in steps:
        _require(bool((words[at[found] + step] == scanner.u64[starts + step]).all()))
    result: Int64s = np.array([position[text] for text in wanted], dtype=np.int64)[found]
    return result


def _mixed(words: Any, at: Int64s, steps: list[int]) -> Any:
    mixed = np.zeros(len(at), dtype=np.uint64)
    for step in steps:
        mixed = (mixed ^ words[at + step]) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed
