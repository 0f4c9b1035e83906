"""Records of ranks' tensors: plain data without torch, so that the kernel can read and draw them."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan, prod
from typing import Literal

from labkit.errors import LabkitError


@dataclass(frozen=True)
class Chunk:
    """A box of a global tensor: its offset and size in each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements in the box."""
        return prod(self.sizes)


@dataclass(frozen=True)
class ShardRecord:
    """The part of one tensor that one rank holds.

    Attributes:
        name: The tensor's FQN, or its path in a nested state dict.
        shape: The global shape.
        dtype: For example ``float32``.
        placements: One text per mesh axis as torch writes it, such as ``Shard(dim=0)``; empty for a plain tensor.
        mesh_shape: Size of each mesh axis; empty for a plain tensor.
        mesh_axes: Name of each mesh axis, ``""`` if the mesh has no names.
        coordinate: This rank's coordinate on the mesh; None for a plain tensor or a rank outside the mesh.
        chunks: The boxes of the global tensor that this rank holds; none if the shard is empty.
        local_bytes: Bytes that this rank holds.
        tied_to: An earlier name of the same tensor, if there is one; the bytes are then counted there.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    placements: tuple[str, ...]
    mesh_shape: tuple[int, ...]
    mesh_axes: tuple[str, ...]
    coordinate: tuple[int, ...] | None
    chunks: tuple[Chunk, ...]
    local_bytes: int
    tied_to: str | None = None

    @property
    def is_distributed(self) -> bool:
        """True if the tensor belongs to a mesh (sharded or replicated), false for a plain tensor, which is this rank's own."""
        return bool(self.placements)


PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary")


@dataclass(frozen=True)
class MemoryParts:
    """Bytes on one rank at one moment.

    Attributes:
        parameters: Parameters and buffers: the rank's shard, or whole ones where FSDP has gathered them.
        gradients: Their gradients.
        optimizer: The optimizer's state.
        activations: What autograd keeps for backward.
        temporary: The rest: short-lived results and gradients, and collectives' buffers.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    temporary: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.temporary


@dataclass(frozen=True)
class FlatShare:
    """How much of one parameter is in this rank's piece of a flat parameter.

    Attributes:
        unit: FQN of the FSDP1 unit whose flat parameter holds it; ``""`` for the root.
        name: FQN of the parameter, without FSDP1's prefixes.
        numel: Elements on this rank; 0 if the piece holds nothing of the parameter.
    """

    unit: str
    name: str
    numel: int


class ParityError(LabkitError, AssertionError):
    """Two states that should be equal are not.

    Attributes:
        parity: The comparison, with one `Difference` per key.
    """

    def __init__(self, parity: Parity) -> None:
        self.parity = parity
        super().__init__(str(parity))


DifferenceKind = Literal["missing", "unexpected", "type", "shape", "dtype", "value"]


@dataclass(frozen=True)
class Difference:
    """The first difference found for one key.

    Attributes:
        key: The key, as text.
        kind: ``missing`` (only in the expected state), ``unexpected`` (only in the actual one), or what differs.
        detail: Both sides in words.
        max_abs: For tensor values, the largest absolute difference (NaN if a NaN is involved); else None.
    """

    key: str
    kind: DifferenceKind
    detail: str
    max_abs: float | None = None


@dataclass(frozen=True)
class Parity:
    """The result of a comparison; true when nothing differs.

    Attributes:
        num_tensors: Tensors present on both sides and compared by shape, dtype and value.
        num_elements: Elements of these tensors on the expected side.
        num_values: Other values present on both sides (numbers, texts, flags).
        differences: One per key that differs: first missing and unexpected keys, then the rest in the order of the expected state.
    """

    num_tensors: int
    num_elements: int
    num_values: int
    differences: tuple[Difference, ...] = ()

    def __bool__(self) -> bool:
        return not self.differences

    @property
    def max_abs(self) -> float:
        """The largest absolute difference of any tensor; 0.0 if all values agree."""
        # max() would drop a NaN that is not first.
        found = [difference.max_abs for difference in self.differences if difference.max_abs is not None]
        return next((value for value in found if isnan(value)), max(found, default=0.0))

    def require(self) -> Parity:
        """Return this object if nothing differs, for chaining.

        Raises:
            ParityError: Something differs.
        """
        if self.differences:
            raise ParityError(self)
        return self

    def __str__(self) -> str:
        what = f"{self.num_tensors} tensors, {self.num_elements:,} elements"
        if self.num_values:
            what += f", {self.num_values} other values"
        if not self.differences:
            return f"equal: {what}"
        shown = [f"  {d.key}: {d.detail}" for d in self.differences[:8]]
        more = len(self.differences) - len(shown)
        return "\n".join(
            [f"{_counted(len(self.differences))} ({what} compared)", *shown, *([f"  and {more} more"] if more else [])]
        )

    __repr__ = __str__


def _counted(num_keys: int) -> str:
    return f"{num_keys} keys differ" if num_keys != 1 else "1 key differs"
