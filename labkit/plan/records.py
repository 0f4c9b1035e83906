"""A training job and its plan: plain data without torch, so that the kernel can show them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from labkit.errors import LabkitError
from labkit.spmd.shards.layouts import MeshRecord
from labkit.spmd.shards.records import MemoryParts

MAX_RANKS = 16_384
OnActivations = Literal["keep", "recompute", "move", "move-inputs"]
Saved = Literal["model", "model+optimizer", "nothing"]


class JobError(LabkitError, ValueError):
    """A job cannot be planned in this form; the message says what to change."""


@dataclass(frozen=True)
class TrainingJob:
    """One training job: a model, the ranks that train it, and how they train it.

    Give functions as ``MODULE:FUNCTION``, ``FILE.py:FUNCTION`` or the function itself; those from notebook cells are pickled by
    value.

    Attributes:
        model: Builds the whole model. It is called without arguments under ``torch.device("meta")``, so the model takes no memory.
        mesh: Axes and sizes, outermost first: ``dp=128,tp=8``, or ``replicate=16,shard=8`` for HSDP, with or without ``tp``.
        ranks_per_node: Ranks on each node: ranks ``0 .. ranks_per_node - 1`` are on the first, and so on.
        batch: Shape of one rank's batch.
        batch_dtype: Its dtype, such as ``int64`` for tokens.
        loss: Returns the loss, given model and batch. The default takes int64 tokens (rows, seq + 1).
        blocks: Class names of the modules to shard separately. If empty, these are the modules in each of the model's
            ``nn.ModuleList``, except in lists nested inside another.
        tp_plan: Returns the plan for ``parallelize_module``; needed if the mesh has an axis ``tp``.
        optimizer: A class in ``torch.optim``, used with its defaults, or a function of the parameters; None for no optimizer.
        dtype: The dtype in which parameters are stored; None keeps the dtypes of the model that was built.
        param_dtype, reduce_dtype: As in ``MixedPrecisionPolicy``.
        reshard_after_forward: As in ``fully_shard``, but only for the blocks.
        activations: How to treat the tensors that the blocks save for backward: ``keep``; ``recompute`` (activation checkpointing);
            ``move`` to the host; or ``move-inputs``, which recomputes from inputs kept on the host.
        move_min_bytes: Storages smaller than this are not moved.
        checkpoint: Which state ``torch.distributed.checkpoint.save`` saves.
        checkpoint_dir: The checkpoint's directory. Nothing is written there; its name is part of the metadata.
        checkpoint_threads: As ``thread_count`` of ``FileSystemWriter``.
        ranks: Ranks to plan in addition to those that hold the most and the least.
        peak: Whether to also find the step's peak memory, which doubles the time.
    """

    model: str | Callable[[], Any]
    mesh: str
    ranks_per_node: int = 8
    batch: tuple[int, ...] = (1, 129)
    batch_dtype: str = "int64"
    loss: str | Callable[[Any, Any], Any] = "labkit.spmd.model.transformer:next_token_loss"
    blocks: tuple[str, ...] = ()
    tp_plan: str | Callable[[], Any] | None = None
    optimizer: str | Callable[[Any], Any] | None = "AdamW"
    dtype: str | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    reshard_after_forward: bool | int | None = None
    activations: OnActivations = "keep"
    move_min_bytes: int = 1 << 20
    checkpoint: Saved = "model+optimizer"
    checkpoint_dir: str = "checkpoint"
    checkpoint_threads: int = 1
    ranks: tuple[int, ...] = ()
    peak: bool = False


@dataclass(frozen=True)
class RankPlan:
    """The memory of one rank.

    Attributes:
        rank: The rank.
        coordinate: Its coordinate on the mesh.
        node: Its node.
        num_elements: Elements of its shards of the parameters, without padding.
        memory: Bytes after the step's backward, when the optimizer has its state; only ``activations`` are as at the end of
            forward. FSDP2 pads uneven shards, so parameters and gradients count with their padded sizes. Activations are what
            torch's CPU kernels save; a GPU's attention kernel may save slightly more or less.
        host_bytes: Bytes of activations kept on the host.
        peak: The most memory that the step takes at once, according to torch's ``FSDPMemTracker``; None if the job did not ask for
            it.
    """

    rank: int
    coordinate: tuple[int, ...]
    node: int
    num_elements: int
    memory: MemoryParts
    host_bytes: int = 0
    peak: MemoryParts | None = None


@dataclass(frozen=True)
class Traffic:
    """All collectives in one step that have the same kind and mesh axis.

    Bytes assume rings in rank order: each rank passes ``(n - 1) / n`` of the whole to the next rank in its group, in an all-reduce
    twice. They go between nodes if that next rank is on another node.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce`` ...
        axis: The mesh axis; several are joined by ``+``.
        group_size: Ranks in a group.
        num_nodes: The most nodes that any group extends over.
        num_calls: Calls that each rank makes.
        size_bytes: The whole tensors of all these calls together, as in `labkit.spmd.trace.events.Collective`.
        sent_bytes: Bytes that one rank sends.
        node_out_bytes: Bytes that leave the node that sends the most.
        inside_bytes: Bytes that all ranks together send inside their nodes.
        between_bytes: Bytes that all ranks together send to other nodes.
    """

    kind: str
    axis: str
    group_size: int
    num_nodes: int
    num_calls: int
    size_bytes: int
    sent_bytes: int
    node_out_bytes: int
    inside_bytes: int
    between_bytes: int


@dataclass(frozen=True)
class CheckpointPlan:
    """A checkpoint as ``torch.distributed.checkpoint.save`` writes it.

    Attributes:
        tensor_bytes: The data of all tensors, each element counted once.
        file_bytes: The total size of the ``.distcp`` files: the data, and the archive around each shard.
        num_files: The number of ``.distcp`` files. A rank writes one per thread, even if there is nothing to put in it.
        num_empty_files: The number of empty files; None if it was not computed.
        largest_file_bytes: The size of the largest file; None if it was not computed.
        num_shards: The number of boxes of tensors, plus values, each written once.
        num_items: The number of items that all ranks propose to write, including copies; planning goes through all of them.
        metadata_bytes: The size of ``.metadata``.
        planning_s: CPU seconds that the coordinator's planning takes on this machine, in one thread.
        exact: Whether the planner ran over all items. If not, it ran over some tensors of each layout, from which ``planning_s``
            and ``metadata_bytes`` are extrapolated.
    """

    tensor_bytes: int
    file_bytes: int
    num_files: int
    num_empty_files: int | None
    largest_file_bytes: int | None
    num_shards: int
    num_items: int
    metadata_bytes: int
    planning_s: float
    exact: bool


@dataclass(frozen=True)
class Plan:
    """The plan of a job, made by `labkit.plan.make_plan`.

    Attributes:
        mesh: The mesh.
        ranks_per_node: As in the job.
        num_parameters: Elements of the whole model's parameters; tied parameters count once.
        ranks: First the rank that holds the most elements, then the one that holds the least if it differs, then the ranks that
            the job names.
        num_idle_ranks: Ranks that hold no element of any parameter.
        traffic: The step's collectives.
        checkpoint: The checkpoint; None if nothing is saved.
        notes: Sentences about anything unusual.
        seconds: Seconds that planning took, by part.
        torch_version: The version of torch that made the plan.
    """

    mesh: MeshRecord
    ranks_per_node: int
    num_parameters: int
    ranks: tuple[RankPlan, ...]
    num_idle_ranks: int
    traffic: tuple[Traffic, ...]
    checkpoint: CheckpointPlan | None
    notes: tuple[str, ...]
    seconds: dict[str, float]
    torch_version: str

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.mesh.ranks)

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return -(-self.world_size // self.ranks_per_node)

    @property
    def between_bytes(self) -> int:
        """Bytes that all ranks together send between nodes in a step."""
        return sum(each.between_bytes for each in self.traffic)

    @property
    def inside_bytes(self) -> int:
        """Bytes that all ranks together send inside nodes in a step."""
        return sum(each.inside_bytes for each in self.traffic)

    def rank(self, rank: int) -> RankPlan:
        """Return the plan of one rank.

        Raises:
            KeyError: The rank was not planned; name it in the job's ``ranks``.
        """
        for each in self.ranks:
            if each.rank == rank:
                return each
        raise KeyError(f"rank {rank} was not planned; name it in the job's `ranks`")

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, ready for JSON."""
        found = asdict(self)
        found["mesh"] = dict(zip(self.mesh.axes, self.mesh.shape, strict=True))
        return found | {
            "world_size": self.world_size,
            "num_nodes": self.num_nodes,
            "inside_bytes": self.inside_bytes,
            "between_bytes": self.between_bytes,
        }

    def __str__(self) -> str:
        from labkit.plan.show import as_text

        return as_text(self)

    __repr__ = __str__
