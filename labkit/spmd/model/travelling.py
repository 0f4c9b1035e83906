"""The checkpoint that travels through the course: notebook 01 writes it, and notebooks 03 and 05 continue from it.

It is in the folder ``checkpoints`` of the current directory, which in Jupyter and under ``labkit run`` is the notebooks' folder.
If there is no checkpoint, a notebook makes an identical one by the same training, so the notebooks can be read in any order.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FOLDER = Path("checkpoints")
TABLE = ".metadata"  # DCP writes this file last: without it the checkpoint is incomplete


@dataclass(frozen=True)
class CourseRun:
    """The training run of notebook 01, up to its second checkpoint. The defaults are the parameters of that notebook.

    Attributes:
        seed: Determines the weights and the order of the text.
        batch_size: Sequences per global batch.
        seq_len: Bytes of text in a sequence.
        num_steps: Optimizer steps before the save, and the position of the sampler after it.
        learning_rate: Learning rate of AdamW.
    """

    seed: int = 0
    batch_size: int = 12
    seq_len: int = 64
    num_steps: int = 6
    learning_rate: float = 3e-3

    @property
    def name(self) -> str:
        """A file name for this run. It leaves out the world size, which changes only the order of sums.

        It has the version of torch: an older torch cannot read what torch 2.15 wrote.
        """
        major, minor = importlib.metadata.version("torch").split(".")[:2]
        settings = f"seed{self.seed}-batch{self.batch_size}x{self.seq_len}-lr{self.learning_rate:g}-step{self.num_steps}"
        return f"lab01-{settings}-torch{major}.{minor}"


@dataclass(frozen=True)
class LeftCheckpoint:
    """A checkpoint that is ready for the later notebooks.

    Attributes:
        place: Its folder.
        outcome: ``new`` if it was copied. An existing checkpoint stays: ``same`` if its data are the same, else ``other``.
    """

    place: Path
    outcome: Literal["new", "same", "other"]

    def __str__(self) -> str:
        said = {
            "new": "",
            "same": " (it was there, with the same data)",
            "other": " (it was there, with other data, for example from another number of ranks; remove its folder to replace it)",
        }
        return f"{self.place}{said[self.outcome]}"


def leave_checkpoint(source: Path, run: CourseRun, folder: Path = FOLDER) -> LeftCheckpoint:
    """Copy a complete checkpoint to the folder where the later notebooks look for it.

    An existing checkpoint of the same name stays: another notebook may be reading it right now.

    Args:
        source: A folder that DCP wrote, with the entries ``model`` and ``optimizer``.
        run: The run that wrote it.
        folder: The folder of the course's checkpoints.

    Raises:
        FileNotFoundError: ``source`` is not a complete checkpoint.

    Ranks: controller, or one rank.
    """
    if not (source / TABLE).is_file():
        raise FileNotFoundError(f"{source} has no {TABLE}, so it is not a complete checkpoint.")
    place = folder / run.name
    if (place / TABLE).is_file():
        return LeftCheckpoint(place, "same" if _data(place) == _data(source) else "other")
    draft = _draft(folder)
    shutil.copytree(source, draft)
    return LeftCheckpoint(_publish(draft, place), "new")


def _data(place: Path) -> dict[str, bytes]:
    """Return the SHA-256 of each data file, but not of ``.metadata``, into which DCP writes a different number at every save."""
    return {path.name: hashlib.sha256(path.read_bytes()).digest() for path in place.glob("*.distcp")}


def course_checkpoint(run: CourseRun, folder: Path = FOLDER, *, device_type: str = "cpu") -> Path:
    """Return the folder of the travelling checkpoint, making the checkpoint if it does not exist.

    It is a DCP checkpoint with the entries ``model`` (`build_model` with its default sizes) and ``optimizer`` (AdamW).

    Args:
        run: The training run.
        folder: The folder of the course's checkpoints, which every rank can see.
        device_type: Where to train if the checkpoint has to be made: ``cpu`` or ``cuda``.

    Ranks: collective, over the default process group.
    Blocks: for ``run.num_steps`` training steps and a save, at most.
    """
    import torch.distributed as dist

    found = [(folder / run.name / TABLE).is_file() if dist.get_rank() == 0 else None, str(_draft(folder))]
    dist.broadcast_object_list(found)  # only rank 0 looks, because a shared file system may show a new folder to some ranks later
    if not found[0]:
        draft = Path(str(found[1]))
        _train_and_save(run, draft, device_type)
        if dist.get_rank() == 0:
            _publish(draft, folder / run.name)
        dist.barrier()
    return folder / run.name


def _train_and_save(run: CourseRun, draft: Path, device_type: str) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh

    from labkit.spmd.model.initialize import build_model
    from labkit.spmd.model.text import BatchSampler
    from labkit.spmd.model.training import train
    from labkit.spmd.model.transformer import Block
    from labkit.spmd.shards.sharding import shard_model

    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)
    mesh = init_device_mesh(device_type, (world_size,))
    model = shard_model(build_model(seed=run.seed, device=device), mesh, blocks=Block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.learning_rate)
    # If a batch cannot be divided evenly, some ranks get the same rows. Each row is used equally often, so the mean stays the same.
    num_shares = math.gcd(run.batch_size, world_size)
    batches = BatchSampler(
        batch_size=run.batch_size,
        seq_len=run.seq_len,
        seed=run.seed,
        rank=rank % num_shares,
        world_size=num_shares,
        device=device,
    )
    train(model, optimizer, batches, run.num_steps)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=draft)


def _draft(folder: Path) -> Path:
    return folder / f".draft-{uuid.uuid4().hex[:12]}"


def _publish(draft: Path, place: Path) -> Path:
    """Rename a complete checkpoint to its final name. If two notebooks do so at once, the first one's checkpoint stays."""
    try:
        os.rename(draft, place)
    except OSError:
        if not (place / TABLE).is_file():
            raise
        shutil.rmtree(draft)
    return place
