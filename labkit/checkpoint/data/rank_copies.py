"""Comparison of entries that have the same name in several ranks' files.

| the entry | result |
| --- | --- |
| is equal in all files | taken once |
| differs, and belongs to neither model nor optimizer | keyed by rank |
| has another shape or dtype in another file | refused: not a copy |
| is optimizer state that differs, and the files share few of the model's tensors | refused: each file is a pipeline stage of the \
model, with its own optimizer |
| differs otherwise | refused, or the first rank's is taken and a note says how many such tensors there are |

If half of the matrices or more differ, they may be shards of larger tensors without a recorded position. So the error then explains
this before it suggests taking the first rank's.
"""

from __future__ import annotations

from typing import Any, Literal

from labkit.base.plain_text import format_ranks
from labkit.checkpoint.data.read import Reader, same_bits
from labkit.checkpoint.errors import CheckpointError, RankDivergenceError
from labkit.checkpoint.index.model import Checkpoint, TensorEntry, ValueEntry
from labkit.checkpoint.index.sections import is_moment_piece, optimizer_roots
from labkit.checkpoint.pickles import safe_pickle
from labkit.checkpoint.pickles.values import digest
from labkit.checkpoint.wording import counted, listed

Copies = Literal["refuse", "first"]

_MOST_NAMES = 8
_SHARDS = (
    "If they are shards of larger tensors (tensor parallel), none of them is a copy, and no file says along which dim they were "
    "cut: labkit cannot join them. Let the program that cut them join them, or save them as DTensors."
)


def roots_of_each_rank(checkpoint: Checkpoint, copies: Copies, notes: list[str]) -> set[str]:
    """Return the top-level keys whose entries are keyed by rank, by this module's table.

    Args:
        checkpoint: A checkpoint, without the entries that are left out.
        copies: Whether to refuse copies that differ, or to take the first rank's.
        notes: Receives sentences about decisions.

    Raises:
        RankDivergenceError: Entries with the same name are not copies, or copies differ and ``copies`` is ``refuse``.

    Ranks: local. Reads the copies.
    """
    roots: set[str] = set()
    tensors: dict[str, str] = {}
    values: dict[str, str] = {}
    forms = _other_forms(checkpoint)
    with Reader(checkpoint, checksums=True) as reader:
        for entry in checkpoint.tensors.values():
            compared = entry.replicas and entry.key not in forms and not is_moment_piece(entry)
            if compared and not copies_agree(reader, entry):
                if entry.section == "other":
                    roots.add(str(entry.path[0]))
                else:
                    tensors[entry.key] = _camps(reader, entry)
    for value in checkpoint.values.values():
        plain = {rank: _comparable(inline) for rank, inline in value.replicas.items()}
        if len(set(plain.values())) > 1:
            if value.section == "other":
                roots.add(str(value.path[0]))
            else:
                values[value.key] = f"differs between the files of ranks {format_ranks(sorted(plain))}"
    _refuse_stages(checkpoint, forms.keys() | tensors.keys() | values.keys())
    if forms:
        raise RankDivergenceError(
            checkpoint.path,
            [f"{key} is {text}" for key, text in forms.items()],
            advice="They are not copies: either they are shards, and no file says where they belong, as DTensors would; or the "
            "files are not from one save. labkit does not join them: save them as DTensors, or join them in the program that cut "
            "them. To go on without them, leave them out with drop=[...] (--drop).",
        )
    if tensors or values:
        _tell(checkpoint, tensors, values, copies, notes)
    notes.extend(f"{root} differs between the rank files and is keyed by rank" for root in sorted(roots))
    return roots


def _tell(checkpoint: Checkpoint, tensors: dict[str, str], values: dict[str, str], copies: Copies, notes: list[str]) -> None:
    """Refuse copies that differ, or note how many are taken from the first rank."""
    compared = [entry for entry in checkpoint.tensors.values() if entry.replicas and entry.section != "other"]
    matrices = [entry.key for entry in compared if len(entry.shape) > 1] or [entry.key for entry in compared if entry.shape]
    many = len(matrices) <= 2 * len(tensors.keys() & set(matrices)) and bool(tensors)
    numbers = [f"{len(tensors):,} of the {counted(len(compared), 'tensor')}"] * bool(tensors)
    numbers += [counted(len(values), "value")] * bool(values)
    what = f"{' and '.join(numbers)} that several rank files hold differ between them"
    if copies == "refuse":
        first = "labkit checkpoint migrate --copies first (copies='first') takes the first rank's"
        raise RankDivergenceError(
            checkpoint.path,
            [what, *(f"{key}: {text}" for key, text in (tensors | values).items())],
            advice=f"{_SHARDS} If the ranks have drifted apart, find out since when, and use a checkpoint from before; if one "
            f"rank's are as good as another's, {first}."
            if many
            else f"If they are meant to be equal, {first}.",
        )
    warning = ". If they are shards of larger tensors, the result holds only a part of each" if many else ""
    notes.append(f"{what}, and the first rank's are taken: {listed([*tensors, *values], most=_MOST_NAMES)}{warning}")


def _refuse_stages(checkpoint: Checkpoint, differing: set[str]) -> None:
    """Raise :class:`RankDivergenceError` if optimizer state differs and each file has different model parameters."""
    entries: list[TensorEntry | ValueEntry] = [*checkpoint.tensors.values(), *checkpoint.values.values()]
    own = [entry.key for entry in checkpoint.tensors.values() if is_moment_piece(entry) and entry.replicas]
    found = [entry.key for entry in entries if entry.section == "optimizer" and entry.key in {*differing, *own}]
    model = [entry for entry in checkpoint.tensors.values() if entry.section == "model"]
    files = {file for entry in model for file in entry.chunks.files}
    common = sum(bool(entry.replicas) or len(entry.chunks) != 1 for entry in model)
    if not found or len(files) < 2 or 2 * common >= len(model):
        return
    roots = [".".join(map(str, root)) for root in sorted(optimizer_roots(entries), key=str)]
    drops = " ".join(f"--drop '{root}.*'" if root else "--drop 'state.*' --drop 'param_groups.*'" for root in roots)
    raise RankDivergenceError(
        checkpoint.path,
        [f"{key} is state of another parameter in each file" for key in found],
        advice="Each file has other parameters of the model, as a pipeline's stages do, and an optimizer of its own. The model is "
        f"put together without the optimizers: {drops}. To keep an optimizer's state, migrate each file by itself; labkit does not "
        "join the results.",
    )


def _other_forms(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the tensors whose shape or dtype differs between ranks' files, with both forms as text."""
    found = {key: text for key, text in checkpoint.conflicts.items() if key in checkpoint.tensors}
    for entry in checkpoint.tensors.values():
        if entry.section == "other" or is_moment_piece(entry) or len(entry.chunks) != 1:
            continue
        for table in entry.replicas:
            if len(table) == 1 and tuple(table[0].sizes) != entry.chunks[0].sizes:
                shapes = ["x".join(map(str, one.sizes)) for one in (entry.chunks[0], table[0])]
                found[entry.key] = f"{shapes[0]} in {entry.chunks.files[0]} and {shapes[1]} in {table.files[0]}"
                break
    return found


def _camps(reader: Reader, entry: TensorEntry) -> str:
    """Name the first file and one that differs from it, for a message."""
    other = next(
        table
        for table in entry.replicas
        for chunk in table
        if not same_bits(reader.box(entry, chunk.offsets, chunk.sizes), reader.box(entry, chunk.offsets, chunk.sizes, table))
    )
    return f"{entry.chunks.files[0]} and {other.files[0]} hold different values"


def copies_agree(reader: Reader, entry: TensorEntry) -> bool:
    """Return whether the copies in all other rank files have the same bits as the first."""
    for table in entry.replicas:
        for chunk in table:
            if not same_bits(reader.box(entry, chunk.offsets, chunk.sizes), reader.box(entry, chunk.offsets, chunk.sizes, table)):
                return False
    return True


def _comparable(value: Any) -> bytes:
    try:
        return digest(safe_pickle.plain(value, "a value"))
    except (CheckpointError, TypeError, LookupError):  # labkit saves no such values (a date, for example), but other programs may
        return repr(value).encode()
