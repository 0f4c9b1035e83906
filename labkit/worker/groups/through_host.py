"""Collectives on CUDA tensors through host memory, for ranks that share a GPU.

NCCL refuses two ranks on one GPU, and gloo's own code for CUDA tensors ends the process in some calls (sends, functional
all-gathers). So in such a process the CUDA kernels of torch's ``c10d`` operators are replaced. The new kernel copies what the call
reads into page-locked memory, makes the same call on these CPU tensors, and copies what it wrote back to the GPU. All callers use
these operators (torch.distributed, functional collectives, DTensor, FSDP, DDP's reducer), and the group is a plain gloo group,
which labkit frees and mends as on the CPU.

A call returns before its data has arrived, like any asynchronous collective. A rank that waited in the call itself would block
programs that are right, such as two ranks that each begin to receive before they send. When gloo has finished a collective, the
copy to the GPU runs in gloo's thread, on a stream of its own. gloo does not say when a message or a reduce-scatter is finished, so
there the copy is part of ``wait()``, before which the data must not be used anyway. Only C++ code, such as DDP's reducer, gets
collectives that are complete: it asks the work for a future, and torch lets no Python class answer that.

Reductions of float8 happen in float32, which gloo can add. Other dtypes that gloo does not know are moved as bytes.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d as c10d

_native: Any = _distributed_c10d  # its stubs leave out some names used here


class _Operator(NamedTuple):
    """The places of an operator's arguments: what the call reads and writes, and its root if only the root's result is defined."""

    reads: int | None = 0
    writes: int | None = 0
    reduces: bool = False
    root: int | None = None


_OPERATORS = {
    "allreduce_": _Operator(reduces=True),
    "allreduce_coalesced_": _Operator(reduces=True),
    "reduce_": _Operator(reduces=True, root=3),
    "broadcast_": _Operator(),
    "allgather_": _Operator(reads=1),
    "allgather_coalesced_": _Operator(reads=1),
    "allgather_into_tensor_coalesced_": _Operator(reads=1),
    "_allgather_base_": _Operator(reads=1),
    "gather_": _Operator(reads=1),
    "scatter_": _Operator(reads=1),
    "reduce_scatter_": _Operator(reads=1, reduces=True),
    "reduce_scatter_tensor_coalesced_": _Operator(reads=1, reduces=True),
    "_reduce_scatter_base_": _Operator(reads=1, reduces=True),
    "alltoall_": _Operator(reads=1),
    "alltoall_base_": _Operator(reads=1),
    "barrier": _Operator(writes=None),
    "send": _Operator(writes=None),
    "recv_": _Operator(reads=None),
    "recv_any_source_": _Operator(reads=None),
}

# What gloo adds and moves by itself, in torch 2.11 to 2.13.
_OF_GLOO = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
}

_library: list[torch.library.Library] = []
# The work that was returned last and not waited for. torch's C++ code hands on its native half only, and Python would make a new
# other half of it.
_returned: list[_Work | None] = [None]


def install(device_type: str = "cuda", dispatch_key: str = "CUDA") -> None:
    """Replace the kernels of this process for good. Call this before the first collective; a second call does nothing.

    Args:
        device_type: The device whose tensors go through host memory.
        dispatch_key: The key under which the operators look up their kernel for it. Tests use ``cpu`` and ``AutogradCPU``.
    """
    if _library:
        return
    library = torch.library.Library("c10d", "IMPL")
    _library.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that a kernel is replaced
        for name, operator in _OPERATORS.items():
            overload = getattr(torch.ops.c10d, name).default
            kernel = functools.partial(_call, overload, operator, device_type)
            library.impl(name, kernel, dispatch_key, allow_override=True)


def _call(overload: Any, operator: _Operator, device_type: str, *args: Any, **kwargs: Any) -> Any:
    """Stand in for one operator: begin it in host memory and return its result, with a work that also stands for the copy back."""
    names = [argument.name for argument in overload._schema.arguments]
    args = (*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs))
    staged = {place for place in (operator.reads, operator.writes) if place is not None}
    devices = {tensor.device for place in staged for tensor in _tensors(args[place]) if tensor.device.type == device_type}
    pairs: dict[int, list[_Pair]] = {place: [] for place in staged}

    def in_host_memory(place: int, tensor: Tensor) -> Tensor:
        if tensor.device.type != device_type:
            return tensor
        dtype = torch.float32 if operator.reduces and _is_float8(tensor.dtype) else tensor.dtype
        memory = torch.empty(tensor.shape, dtype=dtype, pin_memory=device_type == "cuda")
        if place == operator.reads:
            memory.copy_(tensor.detach(), non_blocking=True)
        pairs[place].append(_Pair(tensor, memory))
        return memory if dtype in _OF_GLOO or operator.reduces else memory.unsqueeze(-1).view(torch.uint8)

    here = [_mapped(arg, functools.partial(in_host_memory, place)) if place in staged else arg for place, arg in enumerate(args)]
    for device in devices:
        _finish_queue(device)
    with torch._C._AutoDispatchBelowAutograd():
        result = overload(*here)
    parts = result if isinstance(result, tuple) else (result,)
    results = pairs[operator.writes] if operator.writes is not None and _has_result(operator, args) else []
    landing = _Landing(_native.Work.unbox(parts[-1]), results, devices)
    caller = sys._getframe().f_back  # none in autograd's threads
    work = _work(landing, for_python=caller is not None and caller.f_code.co_filename == c10d.__file__).boxed()
    return (args[0], work) if isinstance(result, tuple) else work


class _Pair(NamedTuple):
    """A tensor of the caller's and its counterpart in host memory."""

    tensor: Tensor
    memory: Tensor


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an argument: it is one, a list of them, or a list of lists."""
    if isinstance(value, Tensor):
        yield value
    else:
        for item in value:
            yield from _tensors(item)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return change(value) if isinstance(value, Tensor) else [_mapped(item, change) for item in value]


def _is_float8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def _has_result(operator: _Operator, args: Sequence[Any]) -> bool:
    """Return whether the call defines what it writes on this rank. gloo leaves intermediate sums on the other ranks of a reduce."""
    if operator.root is None:
        return True
    group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
    return bool(_native.ProcessGroup.unbox(group).rank() == args[operator.root])


def _work(landing: _Landing, *, for_python: bool) -> Any:
    """Return the work that a call hands out. Blocks if it is for C++ code, until the collective is complete."""
    if for_python or not landing.lands_by_itself:
        _returned[0] = work = _Work(landing)
        return work
    landing.wait()
    return _native._create_work_from_future(landing.future())


class _Landing:
    """The end of a call: gloo's own work, then the copy of its results to the GPU.

    Args:
        work: gloo's work.
        results: The tensors to fill, with the host memory they come from.
        devices: The devices of the call's tensors.

    Attributes:
        work: gloo's work.
        tensors: The tensors to fill.
        lands_by_itself: Whether the copy begins when gloo has finished, without a call of :meth:`wait`.
    """

    def __init__(self, work: Any, results: list[_Pair], devices: set[torch.device]) -> None:
        self.work, self.tensors = work, [pair.tensor for pair in results]
        self._results, self._devices = results, sorted(map(str, devices))
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._landed = False
        self._futures: list[torch.futures.Future[list[Tensor]]] = []
        self.lands_by_itself = False
        with contextlib.suppress(RuntimeError):  # messages and gloo's reduce-scatter have no future
            # gloo calls this before it wakes those who wait for its work.
            work.get_future().add_done_callback(self._when_done)
            self.lands_by_itself = True

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the results.

        Raises:
            RuntimeError: The call has failed, or the time is over.
        """
        if (last := _returned[0]) is not None and last.landing is self:
            _returned[0] = None  # else its tensors would stay until the next call
        self.work.wait(timeout)
        self._land()
        if self._error is not None:
            raise self._error
        return True

    def is_over(self) -> bool:
        """Return whether the results are there, or the call has failed. A message is over only when it has been waited for."""
        return self._landed or bool(self.work.is_completed())

    def future(self) -> Any:
        """Return a future for the results, on their device."""
        if not self.lands_by_itself:
            return self.work.get_future()  # raises the error that says so
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[name for name in self._devices if name != "cpu"])
        with self._lock:
            self._futures.append(future)
            if self._landed or self._error is not None:
                self._answer()
        return future

    def _when_done(self, done: torch.futures.Future[Any]) -> None:
        try:
            done.value()
        except RuntimeError as error:
            self._error = error
        self._land()

    def _land(self) -> None:
        with self._lock:
            if not self._landed and self._error is None:
                try:
                    _copy_back(self._results)
                    self._landed = True
                except RuntimeError as error:
                    self._error = error
            self._results = []
            self._answer()

    def _answer(self) -> None:
        futures, self._futures = self._futures, []
        for future in futures:
            if self._error is None:
                future.set_result(self.tensors)
            else:
                future.set_exception(self._error)  # type: ignore[arg-type]


class _Work(_native.PythonCallbackWork):  # type: ignore[misc]
    """A call under way, for Python. Its native half can be waited for when this half is gone.

    Args:
        landing: Its end.

    Attributes:
        landing: The same.
    """

    def __init__(self, landing: _Landing) -> None:
        super().__init__(landing.wait)
        self.landing = landing

    def is_completed(self) -> bool:
        """Return whether the call is over; see :meth:`_Landing.is_over`."""
        return self.landing.is_over()

    def is_success(self) -> bool:
        """Return whether the call has not failed so far."""
        return bool(self.landing.work.is_success())

    def exception(self) -> Any:
        """Return the error of a call that has failed."""
        return self.landing.work.exception()

    def get_future(self) -> Any:
        """Return a future for the results, as far as gloo has one for such a call."""
        return self.landing.future()

    def result(self) -> list[Tensor]:
        """Return the results."""
        return self.landing.tensors

    def source_rank(self) -> int:
        """Return the rank that has sent a message."""
        return int(self.landing.work.source_rank())

    _source_rank = source_rank


def _copy_back(results: list[_Pair]) -> None:
    """Copy results from host memory to their device and wait until they are there."""
    for device in {pair.tensor.device for pair in results}:
        with _side_stream(device):
            for tensor, memory in results:
                if tensor.device == device:
                    # Through `.data`, so that autograd does not count this as a change of the tensor. It does not with NCCL either.
                    tensor.data.copy_(memory, non_blocking=True)
            _finish_queue(device)


def _side_stream(device: torch.device) -> Any:
    return torch.cuda.stream(_stream_of(device)) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _finish_queue(device: torch.device) -> None:
    """Wait for the current stream: what the copies read is there, and nothing before them still uses what they write."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
