"""Exercise 3 of notebook 07: the tensors that a checkpoint loses with the files of one node."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.base import places
from labkit.course.labs.checks import ask, hint_for, refuse
from labkit.errors import ExerciseError

LostNames = Callable[[Path, int, int], Set[str]]
Writers = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class LossCase:
    """A checkpoint, described by which files hold each tensor's pieces, and a lost node."""

    what: str
    files: Writers
    node: int
    ranks_per_node: int

    @property
    def lost(self) -> frozenset[str]:
        """The tensors with a piece in a file that the lost node wrote."""
        return self.lost_where(lambda file: _rank(file) // self.ranks_per_node)

    def lost_where(self, of_file: Callable[[str], int], enough: Callable[[Iterable[bool]], bool] = any) -> frozenset[str]:
        """Return the tensors of which some file, or every file, belongs to the lost node by a given rule."""
        return frozenset(name for name, files in self.files.items() if enough(of_file(file) == self.node for file in files))


def check_lost_names(lost_names: LostNames) -> str:
    """Exercise 3: ``lost_names(folder, node, ranks_per_node)`` names the tensors that need a file which this node wrote.

    Args:
        lost_names: Takes the folder of a DCP checkpoint, a node, and the number of ranks on a node. Returns a set of names.

    Returns:
        A line with the number of checkpoints.

    Raises:
        ExerciseError: The answer is not a set, lacks a name, or has one too many; the message names the checkpoint.

    Ranks: controller.
    """
    cases = _cases()
    answers = [_answer(lost_names, case) for case in cases]
    for case, found in zip(cases, answers, strict=True):
        if found != case.lost:
            said, wanted = (", ".join(sorted(map(str, names))) or "nothing" for names in (found, case.lost))
            refuse(
                f"{case.what}, {case.ranks_per_node} ranks on a node, node {case.node} is lost: lost_names says {said}.",
                f"{wanted}.",
                hint_for(answers, _MISTAKES, "metadata.storage_data says for each piece in which file it is."),
            )
    return f"Solved: {len(cases)} checkpoints, every lost tensor named and no other."


def _answer(lost_names: LostNames, case: LossCase) -> frozenset[str]:
    with places.temporary("labkit-check-") as scratch:
        _write(Path(scratch), case.files)
        answer = ask(lost_names, Path(scratch), case.node, case.ranks_per_node)
    if not isinstance(answer, Set):
        raise ExerciseError(f"lost_names returned {answer!r}. It has to return a set of names, each of them once.")
    return frozenset(answer)


def _rank(file: str) -> int:
    return int(file.strip("_").partition("_")[0])


def _second(file: str) -> int:
    return int(Path(file).stem.split("_")[-1])


def _if(names: Callable[[LossCase], frozenset[str]]) -> Callable[[Sequence[frozenset[str]]], bool]:
    """Return a test of whether a mistake explains every answer, given the names that the mistake calls lost."""
    return lambda answers: all(answer == names(case) for answer, case in zip(answers, _cases(), strict=True))


_MISTAKES: Any = [
    (
        lambda answers: any(str(name).endswith(".distcp") for names in answers for name in names),
        "These are files. Which tensors have a piece in them? metadata.storage_data tells: its keys have an fqn.",
    ),
    (
        _if(lambda case: frozenset(case.files)),
        "These are all tensors of the checkpoint. Lost are those with a piece in a file that a rank of this node wrote.",
    ),
    (
        _if(lambda case: frozenset(case.files) - case.lost),
        "These are the tensors that are left whole. Name the lost ones.",
    ),
    (
        _if(lambda case: case.lost_where(lambda file: case.node if _rank(file) // case.ranks_per_node != case.node else -1)),
        "These have a piece in a file of the nodes that are left. The files of the lost node are gone, not those.",
    ),
    (
        _if(lambda case: case.lost_where(lambda file: _rank(file) // case.ranks_per_node, all)),
        "A tensor is lost when one of its pieces is, even if others are still there.",
    ),
    (
        _if(lambda case: case.lost_where(_rank)),
        "The number in a file's name is the rank that wrote it. Which node is it on?",
    ),
    (
        _if(lambda case: case.lost_where(lambda file: _rank(file) // 2)),
        "Your nodes have 2 ranks each, whatever ranks_per_node says.",
    ),
    (
        _if(lambda case: case.lost_where(lambda file: int(file[2]) // case.ranks_per_node)),
        "Ranks may have more than one digit: __12_0.distcp belongs to rank 12.",
    ),
    (
        _if(lambda case: case.lost_where(lambda file: _second(file) // case.ranks_per_node)),
        "The second number counts the files of one rank. The first one is the rank.",
    ),
]


def _cases() -> list[LossCase]:
    def of(*ranks: int) -> tuple[str, ...]:
        return tuple(f"__{rank}_0.distcp" for rank in ranks)

    hsdp = {"embed.weight": of(0, 1), "head.weight": of(2, 3), "norm.weight": of(2)}
    return [
        LossCase(
            "two files from each rank", {"w1": ("__0_0.distcp", "__0_1.distcp"), "w2": ("__1_0.distcp", "__2_1.distcp")}, 0, 1
        ),
        LossCase("sharded over all ranks", {"embed.weight": of(0, 1, 2, 3), "norm.weight": of(0, 1, 2, 3)}, 1, 2),
        LossCase("every piece written by one of its replicas", hsdp, 1, 2),
        LossCase("the same, the other node", hsdp, 0, 2),
        LossCase("16 ranks", {"w1": of(1, 3), "w2": of(12, 13), "w3": of(7, 8), "w4": of(0, 15)}, 1, 8),
        LossCase("a node that wrote nothing", {"w1": of(0, 1)}, 3, 2),
    ]


def _write(folder: Path, files: Writers) -> None:
    """Write the index of a checkpoint; the exercise does not need its data."""
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
