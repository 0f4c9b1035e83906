"""Detection of entries that are split over the ranks' files, so that no share is taken for the whole."""

from __future__ import annotations

from labkit.checkpoint.data.rank_copies import copies_agree
from labkit.checkpoint.data.read import Reader
from labkit.checkpoint.index.model import Checkpoint, TensorEntry
from labkit.checkpoint.index.names import FLAT_PARAMETER
from labkit.checkpoint.index.sections import Nest, is_moment_piece, name_in, nest_of


def is_flat(entry: TensorEntry) -> bool:
    """Return whether a tensor is one of FSDP1's flat parameters, or optimizer state of one."""
    keys = [part for step in entry.path for part in str(step).split(".")]
    return entry.flat or (entry.section != "other" and FLAT_PARAMETER in keys[-2:])


def model_shapes(checkpoint: Checkpoint) -> list[dict[str, tuple[int, ...]]]:
    """Return the names and shapes, without flat parameters, of each model and, if there are several, of all together."""
    nests: dict[Nest, dict[str, tuple[int, ...]]] = {}
    for entry in checkpoint.section("model"):
        if not is_flat(entry):
            nests.setdefault(nest_of(entry.path), {})[name_in(entry.path)] = entry.shape
    together = {".".join([*map(str, nest), name]): shape for nest, found in nests.items() for name, shape in found.items()}
    return [*nests.values(), *([together] if len(nests) > 1 else [])]


def moment_shares(checkpoint: Checkpoint) -> list[TensorEntry]:
    """Return the numbered moments that are split over the rank files, in pieces to be joined in rank order.

    Moments that are equal in every rank's file are copies, unless the model is flat: then each one is a share.

    Ranks: local. Reads the moments that have the same shape in all files.
    """
    flat = any(entry.flat for entry in checkpoint.tensors.values())
    if len(checkpoint.ranks) < 2 and not flat:
        return []
    num_ranks = int(checkpoint.metadata.get("ranks", 1))
    shares = []
    with Reader(checkpoint, checksums=True) as reader:
        for entry in checkpoint.tensors.values():
            # In a checkpoint of several parts, the rank files may belong to a part other than this entry's.
            of_a_rank = flat or entry.chunks.files[0] in checkpoint.ranks
            if of_a_rank and is_moment_piece(entry) and len(entry.chunks) == 1:
                whole = not flat and all(chunk.sizes == entry.shape for table in (entry.chunks, *entry.replicas) for chunk in table)
                if not whole or len(entry.replicas) + 1 < num_ranks or not copies_agree(reader, entry):
                    shares.append(entry)
    return shares
