"""User values as bytes: cloudpickle for the structure, separate buffers for the data.

Large buffers do not pass through the socket of a local pool. The sender copies them once into an anonymous memory file, and the
receivers map that file privately, copy on write. So a 256 MiB tensor pushed to four ranks costs one copy, and no rank can change
what another sees. Across machines the buffers travel as frames of the message.

Tensors are pickled by their storages, so views of one storage stay views of one storage. Storages of accelerators are copied to the
CPU and arrive as CPU tensors: the kernel never has to touch an accelerator to look at a result.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import shutil
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from labkit.base import places
from labkit.errors import WireError
from labkit.wire.record import WireRecord

# Smaller buffers travel in the message: opening and mapping a file costs about as much as copying this much.
IN_MESSAGE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class FileSlice(WireRecord):
    """A buffer inside a memory file that another process of this machine has open.

    Attributes:
        path: A path under which this user's processes on this machine can open the file.
        offset: Where the buffer starts, a multiple of the page size.
        size: Its length in bytes.
    """

    path: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Payload(WireRecord):
    """A packed value.

    Attributes:
        data: The pickle.
        buffers: Its out-of-band buffers: bytes in the message, a slice of a memory file, or the number of a message
            frame (see :mod:`labkit.wire.transport`).
    """

    data: bytes
    buffers: tuple[bytes | FileSlice | int, ...] = ()

    @property
    def size_bytes(self) -> int:
        """The size of the value without the frames."""
        return len(self.data) + sum(
            item.size if isinstance(item, FileSlice) else len(item) for item in self.buffers if not isinstance(item, int)
        )


class MemoryFile:
    """The large buffers of one payload in one anonymous file. The creator closes it when every receiver has mapped it."""

    def __init__(self, size_bytes: int) -> None:
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create("labkit-payload", os.MFD_CLOEXEC)
            # Other processes of the same user open an anonymous file through its owner's descriptor table.
            self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
            self._folder = ""
        else:
            self._folder = places.new_temporary("labkit-payload-")
            self.path = os.path.join(self._folder, "payload")
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, size_bytes)

    def write(self, offset: int, data: memoryview) -> None:
        """Copy ``data`` to ``offset``."""
        # pwrite fills new pages directly; writing through a mapping would zero each page first (measured: twice the time).
        while data.nbytes:
            written = os.pwrite(self._fd, data, offset)
            data, offset = data[written:], offset + written

    def close(self) -> None:
        """Free the file in this process; receivers keep what they have mapped."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


@dataclass(slots=True)
class Packed:
    """A payload, and the memory file that holds its large buffers until the receivers have it."""

    payload: Payload
    memory: MemoryFile | None = None
    frames: tuple[memoryview, ...] = field(default=())

    def close(self) -> None:
        """Free the memory file, if there is one."""
        if self.memory is not None:
            self.memory.close()
            self.memory = None


def pack(value: Any, *, share_memory: bool, on_by_value: Callable[[Any], None] | None = None) -> Packed:
    """Turn a value into a payload.

    Args:
        value: Anything that cloudpickle can pickle: functions and classes from notebook cells, tensors, arrays.
        share_memory: The receivers run on this machine and can map a memory file. If False, large buffers become frames, to be sent
            after the message.
        on_by_value: Called with each function and class that is pickled by value and not by name.

    Returns:
        The payload. Close it when every receiver has unpacked it.

    Raises:
        WireError: The value cannot be pickled; the message names its type and the cause.
    """
    collected: list[pickle.PickleBuffer] = []
    sink = io.BytesIO()
    try:
        _Pickler(sink, collected.append, on_by_value).dump(value)
    except WireError:
        raise
    except Exception as error:
        raise WireError(_cannot_pickle(value, error)) from error
    views = [buffer.raw() for buffer in collected]
    large = [view for view in views if view.nbytes >= IN_MESSAGE_BYTES]
    if not share_memory:
        frames = iter(range(len(large)))
        slots: list[bytes | FileSlice | int] = [next(frames) if view.nbytes >= IN_MESSAGE_BYTES else bytes(view) for view in views]
        return Packed(Payload(sink.getvalue(), tuple(slots)), frames=tuple(large))
    memory = MemoryFile(sum(_pages(view.nbytes) for view in large)) if large else None
    slots, offset = [], 0
    for view in views:
        if memory is None or view.nbytes < IN_MESSAGE_BYTES:
            slots.append(bytes(view))
            continue
        memory.write(offset, view)
        slots.append(FileSlice(memory.path, offset, view.nbytes))
        offset += _pages(view.nbytes)
    return Packed(Payload(sink.getvalue(), tuple(slots)), memory)


def unpack(payload: Payload, frames: Sequence[Any] = ()) -> Any:
    """Turn a payload back into its value.

    Args:
        payload: A result of :func:`pack`, from this or another process.
        frames: The message's extra frames, for a payload that was packed without shared memory.

    Returns:
        The value. Its large arrays and tensors are writable and private to this process.
    """
    buffers: list[Any] = []
    for item in payload.buffers:
        if isinstance(item, FileSlice):
            buffers.append(_map_slice(item))
        elif isinstance(item, int):
            buffers.append(bytearray(frames[item]))
        else:
            buffers.append(bytearray(item))
    return pickle.loads(payload.data, buffers=buffers)


def to_frames(payload: Payload) -> tuple[Payload, list[mmap.mmap]]:
    """Return the same payload with its memory file's slices as frames, so that it can leave this machine."""
    frames: list[mmap.mmap] = []
    slots: list[bytes | FileSlice | int] = []
    for item in payload.buffers:
        if isinstance(item, FileSlice):
            slots.append(len(frames))
            frames.append(_map_slice(item))
        else:
            slots.append(item)
    return Payload(payload.data, tuple(slots)), frames


def to_memory(payload: Payload, frames: Sequence[Any]) -> Packed:
    """Return the same payload with its frames in a memory file, for several processes of this machine."""
    views = {item: memoryview(frames[item]) for item in payload.buffers if isinstance(item, int)}
    memory = MemoryFile(sum(_pages(view.nbytes) for view in views.values()))
    offset = 0
    slots: list[bytes | FileSlice | int] = []
    for item in payload.buffers:
        if isinstance(item, int):
            memory.write(offset, views[item])
            slots.append(FileSlice(memory.path, offset, views[item].nbytes))
            offset += _pages(views[item].nbytes)
        else:
            slots.append(item)
    return Packed(Payload(payload.data, tuple(slots)), memory)


def _map_slice(item: FileSlice) -> mmap.mmap:
    fd = os.open(item.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, item.size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=item.offset)
    finally:
        os.close(fd)


def _pages(size: int) -> int:
    return -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with tensor storages as out-of-band buffers."""

    def __init__(self, sink: io.BytesIO, on_buffer: Callable[[Any], Any], on_by_value: Callable[[Any], None] | None) -> None:
        super().__init__(sink, protocol=5, buffer_callback=on_buffer)
        self._on_by_value = on_by_value

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None:
            if isinstance(obj, torch.UntypedStorage):
                return _reduce_storage(torch, obj)
            if isinstance(obj, torch.TypedStorage):
                # A tensor reduces to a new TypedStorage each time. The UntypedStorage below it keeps its identity, so pickle's memo
                # keeps views of one storage together.
                return _typed_storage, (obj._untyped_storage, obj.dtype)
            if isinstance(obj, torch.Tensor) and _is_dtensor(obj):
                raise WireError(
                    "a DTensor lives on its device mesh and cannot leave its rank. Send its shard with .to_local(), "
                    "or the whole tensor with .full_tensor() (collective: call it on every rank of the mesh)."
                )
            if type(obj) is torch.Tensor and _has_no_typed_storage(torch, obj):
                return _reduce_as_integers(torch, obj)
        if isinstance(obj, types.CodeType):
            # cloudpickle replaces the file name by a placeholder; a traceback on the rank needs the real one.
            make, arguments = self.dispatch_table[types.CodeType](obj)
            return _code_of_file, (obj.co_filename, make, arguments)
        reduced = super().reducer_override(obj)
        if self._on_by_value is not None and reduced is not NotImplemented and isinstance(obj, type | types.FunctionType):
            self._on_by_value(obj)
        return reduced


def _code_of_file(filename: str, make: Callable[..., types.CodeType], arguments: tuple[Any, ...]) -> types.CodeType:
    return make(*arguments).replace(co_filename=filename)


def _is_dtensor(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


# The dtypes that torch pickles by way of a TypedStorage. It can write the others (float8, uint16, complex32, ...) only with
# torch.save.
_TYPED = frozenset(
    ["float64", "float32", "float16", "bfloat16", "complex128", "complex64", "int64", "int32", "int16", "int8", "uint8", "bool"]
)


def _has_no_typed_storage(torch: Any, tensor: Any) -> bool:
    plain = tensor.layout is torch.strided and tensor.device.type != "meta" and not tensor.is_quantized and not tensor.is_nested
    return plain and str(tensor.dtype).removeprefix("torch.") not in _TYPED


def _reduce_as_integers(torch: Any, tensor: Any) -> Any:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().resolve_conj().resolve_neg().view(integers)
    return _tensor_from_integers, (bits, tensor.dtype, tensor.requires_grad)


def _tensor_from_integers(bits: Any, dtype: Any, requires_grad: bool) -> Any:
    return bits.view(dtype).requires_grad_(requires_grad)


def _reduce_storage(torch: Any, storage: Any) -> Any:
    if storage.device.type == "meta":
        return NotImplemented
    if storage.device.type != "cpu":
        storage = storage.cpu()
    data = torch.tensor([], dtype=torch.uint8).set_(storage).numpy()
    return _storage_from_buffer, (pickle.PickleBuffer(data),)


def _storage_from_buffer(buffer: Any) -> Any:
    import torch

    if len(buffer) == 0:
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _typed_storage(untyped: Any, dtype: Any) -> Any:
    import torch

    return torch.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _cannot_pickle(value: Any, error: Exception) -> str:
    what = f"{type(value).__module__}.{type(value).__qualname__}"
    return (
        f"a value of type {what} cannot be sent to another process: {error}. "
        "Send plain data, arrays or tensors, or create the object on the ranks with %%spmd."
    )
