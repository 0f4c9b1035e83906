"""Exercise 3 of notebook 07: what a checkpoint loses with the files of one node."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.course.checks import hint_for, refuse
from labkit.errors import ExerciseError

LostNames = Callable[[Path, int, int], Collection[str]]
Writers = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Case:
    """A checkpoint by the files that hold each tensor's pieces, and a node that is lost."""

    what: str
    files: Writers
    node: int
    ranks_per_node: int

    @property
    def lost(self) -> frozenset[str]:
        """The tensors of which a piece is in a file that the lost node wrote."""
        return self.lost_where(lambda file: _rank(file) // self.ranks_per_node)

    def lost_where(self, of_file: Callable[[str], int], enough: Callable[[Iterable[bool]], bool] = any) -> frozenset[str]:
        """The tensors of which a file, or every file, is the lost node's by some rule."""
        return frozenset(name for name, files in self.files.items() if enough(of_file(file) == self.node for file in files))


def check_lost_names(lost_names: LostNames) -> str:
    """Exercise 3: ``lost_names(folder, node, ranks_per_node)`` names the tensors that need a file which this node wrote.

    Args:
        lost_names: Takes the folder of a DCP checkpoint, a node, and the number of ranks on a node. Returns a set of names.

    Returns:
        A line with the number of checkpoints.

    Raises:
        ExerciseError: A name is missing or too much; the message says for which checkpoint.

    Ranks: controller.
    """
    cases = _cases()
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="labkit-check-") as scratch:
            _write(Path(scratch), case.files)
            answer = lost_names(Path(scratch), case.node, case.ranks_per_node)
        if isinstance(answer, str) or not isinstance(answer, Collection):
            raise ExerciseError(f"lost_names returned {answer!r}. It has to return a set of names.")
        found, target = frozenset(answer), case.lost
        if found != target:
            said, wanted = (", ".join(sorted(map(str, names))) or "nothing" for names in (found, target))
            refuse(
                f"{case.what}, {case.ranks_per_node} ranks on a node, node {case.node} is lost: lost_names says {said}.",
                f"{wanted}.",
                hint_for((found, case), _MISTAKES, "metadata.storage_data says for each piece in which file it is."),
            )
    return f"Solved: {len(cases)} checkpoints, every lost tensor named and no other."


def _rank(file: str) -> int:
    return int(file.strip("_").partition("_")[0])


_MISTAKES: Any = [
    (
        lambda given: any(str(name).endswith(".distcp") for name in given[0]),
        "These are files. Which tensors have a piece in them? metadata.storage_data tells: its keys have an fqn.",
    ),
    (
        lambda given: given[0] == given[1].lost_where(lambda file: _rank(file) // given[1].ranks_per_node, all),
        "A tensor is lost when one of its pieces is, also when others are still there.",
    ),
    (
        lambda given: given[0] == given[1].lost_where(_rank),
        "The number in a file's name is the rank that wrote it. On which node is that rank?",
    ),
    (
        lambda given: given[0] == given[1].lost_where(lambda file: int(file[2]) // given[1].ranks_per_node),
        "Ranks may have more than one digit: __12_0.distcp is of rank 12.",
    ),
    (
        lambda given: given[0] == given[1].lost_where(lambda file: int(Path(file).stem.split("_")[-1]) // given[1].ranks_per_node),
        "The second number counts the files of one rank. The first one is the rank.",
    ),
]


def _cases() -> list[Case]:
    def of(*ranks: int) -> tuple[str, ...]:
        return tuple(f"__{rank}_0.distcp" for rank in ranks)

    hsdp = {"embed.weight": of(0, 1), "head.weight": of(2, 3), "norm.weight": of(2)}
    return [
        Case("two files from each rank", {"w1": ("__0_0.distcp", "__0_1.distcp"), "w2": ("__1_0.distcp", "__2_1.distcp")}, 0, 1),
        Case("sharded over all ranks", {"embed.weight": of(0, 1, 2, 3), "norm.weight": of(0, 1, 2, 3)}, 1, 2),
        Case("every piece written by one of its replicas", hsdp, 1, 2),
        Case("the same, the other node", hsdp, 0, 2),
        Case("16 ranks", {"w1": of(1, 3), "w2": of(12, 13), "w3": of(7, 8), "w4": of(0, 15)}, 1, 8),
        Case("nobody wrote there", {"w1": of(0, 1)}, 3, 2),
    ]


def _write(folder: Path, files: Writers) -> None:
    """The index of a checkpoint; what the exercise asks does not need its data."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name, parts in files.items():
        chunks = [ChunkStorageMetadata(torch.Size([2 * index]), torch.Size([2])) for index in range(len(parts))]
        properties = TensorProperties(dtype=torch.float32)
        tensors[name] = TensorStorageMetadata(properties, torch.Size([2 * len(parts)]), chunks)
        places |= {MetadataIndex(name, chunk.offsets): _StorageInfo(part, 0, 8) for chunk, part in zip(chunks, parts, strict=True)}
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(state_dict_metadata=tensors, storage_data=places)))
