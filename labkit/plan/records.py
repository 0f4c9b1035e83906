"""A training job and its plan: plain data without torch, so that the kernel can show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from labkit.errors import LabkitError
from labkit.spmd.layouts import MeshRecord
from labkit.spmd.records import MemoryParts

MAX_RANKS = 16_384
OnActivations = Literal["keep", "recompute", "move", "move-inputs"]
Saved = Literal["model", "model+optimizer", "nothing"]


class JobError(LabkitError, ValueError):
    """A job cannot be planned as it is given; the message says what to change."""


@dataclass(frozen=True)
class TrainingJob:
    """One training job: a model, the ranks that train it, and how.

    Where a function is wanted, ``MODULE:FUNCTION``, ``FILE.py:FUNCTION`` or the function itself will do. A function from a notebook
    cell travels by value.

    Attributes:
        model: Builds the whole model; called without arguments under ``torch.device("meta")``, so that no memory is taken.
        mesh: Axes and sizes, outermost first: ``dp=128,tp=8``, or ``replicate=16,shard=8`` for HSDP, with or without ``tp``.
        ranks_per_node: Ranks ``0 .. ranks_per_node - 1`` are on the first node, and so on.
        batch: Shape of one rank's batch.
        batch_dtype: Its dtype, such as ``int64`` for tokens.
        loss: Called with model and batch; gives the loss. The default takes int64 tokens (rows, seq + 1).
        blocks: Class names of the modules that are sharded by themselves; none for those in the model's ``nn.ModuleList``, or in
            several, but not in one inside of another.
        tp_plan: Gives the plan for ``parallelize_module``; needed where the mesh has an axis ``tp``.
        optimizer: A class of ``torch.optim``, used with its defaults, or a function of the parameters; None to plan none.
        dtype: What the parameters are stored in; None for what ``model`` gives.
        param_dtype, reduce_dtype: As in ``MixedPrecisionPolicy``.
        reshard_after_forward: As in ``fully_shard``, for the blocks.
        activations: What becomes of what the blocks save for backward: ``keep``, ``recompute`` (activation checkpointing), ``move``
            to the host, or ``move-inputs``, which recomputes from inputs that wait on the host.
        move_min_bytes: Storages smaller than this are not moved.
        checkpoint: What ``torch.distributed.checkpoint.save`` is to save.
        checkpoint_dir: Where to. Nothing is written there; its name is part of the metadata.
        checkpoint_threads: As ``thread_count`` of ``FileSystemWriter``.
        ranks: Ranks to look at beside the one that holds most and the one that holds least.
        peak: Whether to find the peak of the step too, which takes about as long again.
    """

    model: str | Callable[[], Any]
    mesh: str
    ranks_per_node: int = 8
    batch: tuple[int, ...] = (1, 129)
    batch_dtype: str = "int64"
    loss: str | Callable[[Any, Any], Any] = "labkit.spmd.model:next_token_loss"
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
    """What one rank holds.

    Attributes:
        rank: The rank.
        coordinate: Its place on the mesh.
        node: Its node.
        num_elements: Elements of its shards of the parameters, without padding.
        memory: Bytes when the step's backward has ended and the optimizer has its state; ``activations`` as they were when
            forward had ended. Uneven shards are padded by FSDP2: parameters and gradients take their padded size. Activations are
            those that torch's kernels for the CPU save; an attention kernel of a GPU may save a little more or less.
        host_bytes: Activations that wait on the host.
        peak: The most that the step takes at once, by torch's ``FSDPMemTracker``; None where it was not asked for.
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
    """The collectives of one step that are of one kind and go over one axis of the mesh.

    Bytes are those of rings in the order of the ranks: each rank passes ``(n - 1) / n`` of the whole to the next one of its group,
    and an all-reduce does it twice. A byte goes between nodes where the next one is on another node.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce`` ...
        axis: The mesh axis; several joined by ``+``.
        group_size: Ranks in a group.
        num_nodes: Nodes that a group reaches over, the most of any.
        num_calls: Calls that each rank makes.
        size_bytes: The wholes of all these calls together, as in `labkit.spmd.events.Collective`.
        sent_bytes: What one rank sends.
        node_out_bytes: What leaves a node, of the node from which most does.
        inside_bytes: What all ranks together send inside their nodes.
        between_bytes: What all ranks together send to other nodes.
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
        tensor_bytes: The data of all tensors, each element once.
        file_bytes: All ``.distcp`` files: the data, and the archive around each shard.
        num_files: The ``.distcp`` files. A rank writes one for each thread, also where nothing is left for it to write.
        num_empty_files: Those with nothing in them; None where this was not worked out.
        largest_file_bytes: The largest; None where this was not worked out.
        num_shards: Boxes of tensors, and values, each written once.
        num_items: What all ranks propose to write, copies included; planning goes through all of them.
        metadata_bytes: The file ``.metadata``.
        planning_s: Processor seconds that the coordinator's planning takes, on this machine. It works in one thread.
        exact: Whether the planner ran over all items. If not, it ran over some tensors of each layout, and ``planning_s`` and
            ``metadata_bytes`` are multiples of what that gave.
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
    """What a job takes. Made by `labkit.plan.make_plan`.

    Attributes:
        mesh: The mesh.
        ranks_per_node: As in the job.
        num_parameters: Elements of the whole model's parameters, tied ones once.
        ranks: The rank that holds most elements first, then the one that holds least where they differ, then those asked for.
        num_idle_ranks: Ranks that hold no element of any parameter.
        traffic: The step's collectives.
        checkpoint: The checkpoint; None where nothing is saved.
        notes: Sentences about what is odd.
        seconds: What it took to find out, by part.
        torch_version: The torch that it was found out with.
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
        """What is planned for a rank.

        Raises:
            KeyError: The rank was not looked at; name it in the job's ``ranks``.
        """
        for each in self.ranks:
            if each.rank == rank:
                return each
        raise KeyError(f"rank {rank} was not looked at; name it in the job's `ranks`")

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain data, ready for JSON."""
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
