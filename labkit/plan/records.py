"""A training job and its plan: plain data without torch, so that the kernel can show it."""

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

    A function is given as ``MODULE:FUNCTION``, ``FILE.py:FUNCTION`` or the function itself. A function from a notebook cell is
    pickled by value.

    Attributes:
        model: Builds the whole model; called without arguments under ``torch.device("meta")``, so that it takes no memory.
        mesh: Axes and sizes, outermost first: ``dp=128,tp=8``, or ``replicate=16,shard=8`` for HSDP, with or without ``tp``.
        ranks_per_node: Ranks ``0 .. ranks_per_node - 1`` are on the first node, and so on.
        batch: Shape of one rank's batch.
        batch_dtype: Its dtype, such as ``int64`` for tokens.
        loss: Returns the loss; called with model and batch. The default takes int64 tokens (rows, seq + 1).
        blocks: Class names of the modules that are sharded separately. If empty, these are the modules in each
            ``nn.ModuleList`` of the model, except in lists nested inside another.
        tp_plan: Returns the plan for ``parallelize_module``; needed if the mesh has an axis ``tp``.
        optimizer: A class of ``torch.optim``, used with its defaults, or a function of the parameters; None to plan none.
        dtype: The dtype in which the parameters are stored; None keeps those that ``model`` returns.
        param_dtype, reduce_dtype: As in ``MixedPrecisionPolicy``.
        reshard_after_forward: As in ``fully_shard``, for the blocks.
        activations: How to treat the tensors that the blocks save for backward: ``keep``, ``recompute`` (activation
            checkpointing), ``move`` to the host, or ``move-inputs``, which recomputes from inputs kept on the host.
        move_min_bytes: Storages smaller than this are not moved.
        checkpoint: The state that ``torch.distributed.checkpoint.save`` saves.
        checkpoint_dir: The checkpoint's directory. Nothing is written there; its name is part of the metadata.
        checkpoint_threads: As ``thread_count`` of ``FileSystemWriter``.
        ranks: Ranks to plan besides the ones that hold the most and the least.
        peak: Whether to find the step's peak memory too, which takes about as long again.
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
        memory: Bytes when the step's backward has ended and the optimizer has its state; ``activations`` are those at the end
            of forward. FSDP2 pads uneven shards: parameters and gradients count with their padded size. Activations are those that
            torch's kernels for the CPU save; an attention kernel of a GPU may save a little more or less.
        host_bytes: Bytes of activations kept on the host.
        peak: The most memory that the step takes at once, by torch's ``FSDPMemTracker``; None if the job did not ask for it.
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
    """The collectives of one step that have the same kind and mesh axis.

    Bytes assume rings in the order of the ranks: each rank passes ``(n - 1) / n`` of the whole to the next rank of its group, and
    an all-reduce does so twice. Bytes go between nodes if the next rank is on another node.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce`` ...
        axis: The mesh axis; several joined by ``+``.
        group_size: Ranks in a group.
        num_nodes: The largest number of nodes over which a group extends.
        num_calls: Calls that each rank makes.
        size_bytes: Whole tensors of all these calls together, as in `labkit.spmd.trace.events.Collective`.
        sent_bytes: Bytes that one rank sends.
        node_out_bytes: Bytes that leave one node, for the node that sends the most.
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
        file_bytes: The size of all ``.distcp`` files: the data, and the archive around each shard.
        num_files: The number of ``.distcp`` files. A rank writes one for each thread, even if nothing is left for it to write.
        num_empty_files: The number of empty files; None if it was not computed.
        largest_file_bytes: The size of the largest file; None if it was not computed.
        num_shards: Boxes of tensors, plus values, each written once.
        num_items: Items that all ranks propose to write, copies included; planning goes through all of them.
        metadata_bytes: The size of ``.metadata``.
        planning_s: Processor seconds that the coordinator's planning takes on this machine, in one thread.
        exact: Whether the planner ran over all items. If not, it ran over some tensors of each layout, and ``planning_s`` and
            ``metadata_bytes`` are multiplied up from them.
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
    """The plan of a job. Made by `labkit.plan.make_plan`.

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
        """Bytes that a step sends between nodes, all ranks together."""
        return sum(each.between_bytes for each in self.traffic)

    @property
    def inside_bytes(self) -> int:
        """Bytes that a step sends inside nodes, all ranks together."""
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
