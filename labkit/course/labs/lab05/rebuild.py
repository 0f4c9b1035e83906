"""Exercise 3 of notebook 05: a whole tensor from the files of a checkpoint, without a process group."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from labkit.base import places
from labkit.course.labs.checks import Pool, ask, from_cell, refuse
from labkit.errors import ExerciseError

Rebuild = Callable[[Path, str], Any]


def check_rebuild(pool: Pool, rebuild: Rebuild) -> str:
    """Exercise 3: ``rebuild(folder, name)`` puts a tensor together from a distributed checkpoint, in the kernel.

    The ranks save tensors that are cut by rows, by columns, by rows in strided order, unevenly, and in only one dim, and also
    bfloat16 and replicated ones. The rebuilt tensors must be equal bit for bit.

    Args:
        pool: The pool that saves.
        rebuild: Takes the folder of the checkpoint and the tensor's name, returns the whole tensor.

    Returns:
        A line with the numbers of tensors and files.

    Raises:
        ExerciseError: A tensor is wrong (the message says in how many elements), it cannot be put together, or DCP was used to read
            it.

    Ranks: controller.
    """
    with places.temporary("labkit-check-") as scratch:
        folder = Path(scratch, "checkpoint")
        truth = pool.run(_save, str(folder))[0]
        for name, expected in truth.items():
            _judge(name, _rebuilt(rebuild, folder, name, truth), expected)
        num_files = len(list(folder.glob("*.distcp")))
    files = f"{num_files} file" + ("s" if num_files != 1 else "")
    return f"Solved: {len(truth)} tensors rebuilt from {files}, all equal bit for bit, without a process group."


def save_tensors(pool: Pool, folder: Path) -> Path:
    """Save the tensors with which `check_rebuild` tries an answer.

    Args:
        pool: The pool that saves.
        folder: The folder of the new checkpoint.

    Returns:
        The folder.

    Ranks: controller.
    """
    pool.run(_save, str(folder))
    return folder


def _rebuilt(rebuild: Rebuild, folder: Path, name: str, truth: dict[str, Any]) -> Any:
    """Call the learner's function and return its result. An error becomes a hint."""
    from torch.distributed.checkpoint import FileSystemReader

    def read_data(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(self, *args, **kwargs)

    calls: list[str] = []
    original = FileSystemReader.read_data
    try:
        with patch.object(FileSystemReader, "read_data", read_data):
            got = ask(rebuild, folder, name, case=f"rebuild(lab05.save_tensors(pool, folder / 'tensors'), {name!r})")
    except ExerciseError as error:
        cause = error.__cause__
        if not isinstance(cause, RuntimeError | IndexError | ValueError | EOFError | pickle.UnpicklingError):
            raise
        said = (str(cause).strip() or "no text").splitlines()[0][:160]
        refuse(f"{name}: rebuild raised {type(cause).__name__}: {said}.", "a whole tensor.", _hint_for_error(name, said, truth))
    if calls:
        refuse(
            f"{name}: DCP has read the data.", "that you read the bytes yourself.", "Leave dcp.load out; read_metadata is enough."
        )
    return got


def _hint_for_error(name: str, said: str, truth: dict[str, Any]) -> str:
    if "PytorchStreamReader" in said or "read" in said.lower() or "pickle" in said.lower():
        return "torch.load cannot read these bytes. A piece begins at place.offset in its file and is place.length bytes long."
    if name == next(iter(truth)):
        return (
            "The piece does not fit where you put it. Is it this tensor's? Its bytes begin at place.offset and are place.length "
            "long; index.fqn is its name; index.offset and the shape of the piece give one slice per dim."
        )
    if any(name != other and name in other for other in truth):
        return "The piece is another tensor's: its name contains this name. index.fqn has to be equal to it."
    if truth[name].dim() == 1:
        return "This tensor has one dim, and index.offset one number: make a slice for each dim that there is."
    return "Some tensors are cut by columns too: index.offset has one number per dim, and each dim needs its slice."


def _judge(name: str, got: Any, expected: Any) -> None:
    import torch

    if not isinstance(got, torch.Tensor):
        raise ExerciseError(f"rebuild returned {type(got).__name__} for {name}. It has to return a tensor.")
    if got.shape != expected.shape:
        hint = "state_dict_metadata[name].size is the whole shape."
        if got.shape == expected.shape[::-1]:
            hint = "Rows and columns have changed places."
        elif got.shape[:1] == expected.shape[:1] or got.numel() == expected.numel():
            hint = "The right elements in the wrong form: some tensors are cut by columns. index.offset has one number per dim."
        refuse(f"{name} has the shape {tuple(got.shape)}.", f"{tuple(expected.shape)}.", hint)
    if got.dtype != expected.dtype:
        refuse(
            f"{name} is {got.dtype}.",
            f"{expected.dtype}.",
            "state_dict_metadata[name].properties.dtype says what was saved; torch.empty takes it.",
        )
    wrong = int((got != expected).sum())
    if not wrong:
        return
    same_elements = torch.equal(got.flatten().sort().values, expected.flatten().sort().values)
    if same_elements:
        hint = "All elements are there, in another order. Put a piece where index.offset says, not in the order of the files."
    elif int((got == 0).sum()) > int((expected == 0).sum()):
        hint = "Some elements are zero: pieces were left out, or one was written over another. Are all files and all dims used?"
    else:
        hint = "Several pieces reach the same place, or a piece is read from a wrong byte. Set a copy, do not add it."
    refuse(f"{name}: {wrong} of {got.numel()} elements are wrong.", "no wrong element.", hint)


def _save(folder: str) -> dict[str, Any]:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    device, world_size = from_cell("device"), from_cell("world_size")
    across = 2 if world_size % 2 == 0 else 1
    mesh = init_device_mesh(device.type, (world_size // across, across), mesh_dim_names=("dp", "tp"))
    pair = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 3, bias=False)).to(device)
    with torch.no_grad():
        for parameter in pair.parameters():
            parameter.copy_(torch.arange(1.0, parameter.numel() + 1).view(parameter.shape))
    first, second = (parameter.detach().clone().cpu() for parameter in pair.parameters())
    # Simple mistakes should show on simple tensors, so even pieces come before uneven ones.
    whole: dict[str, torch.Tensor] = {
        "column-parallel": first,
        "bfloat16": torch.arange(1.0, 25.0).view(6, 4).bfloat16(),
        "row-parallel": second,
        "uneven": torch.arange(1.0, 36.0).view(7, 5),
        # Names that begin or end like another name, but with pieces that do not fit it.
        "uneven too": torch.arange(1.0, 64.0).view(9, 7),
        "not uneven": torch.arange(2.0, 65.0).view(9, 7),
        "one dim": torch.arange(1.0, 12.0),
        "copied": torch.arange(1.0, 9.0).view(2, 4),
    }
    places: dict[str, Any] = {"one dim": [Replicate(), Shard(0)], "copied": [Replicate()] * 2}
    state = {
        name: distribute_tensor(tensor.to(device), mesh, places.get(name, [Shard(0), Shard(1)])) for name, tensor in whole.items()
    }
    if across > 1:
        parallelize_module(pair, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(pair, mesh=mesh["dp"])
    for name, parameter in zip(("column-parallel", "row-parallel"), pair.parameters(), strict=True):
        assert isinstance(parameter, DTensor)
        state[name] = parameter
    # The tensor judged first is the last one in its files, so that a solution that reads from the start of a file fails at once.
    dcp.save(dict(reversed(state.items())), checkpoint_id=folder)
    return whole
