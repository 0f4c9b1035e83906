"""Every collective of torch.distributed with its results, so that two ways to carry it out can be compared value by value."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

WORLD_SIZE = 4
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
)
# gloo does not know these. Messages and copies of them are expected to be those of float32.
AS_FLOAT32 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.uint16)
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


@dataclass(frozen=True)
class Setting:
    """What a case runs with: the device and dtype of its tensors, and the reduction."""

    device: str
    dtype: torch.dtype = torch.float32
    op: str = "SUM"

    def tensor(self, *shape: int, step: int = 1) -> Tensor:
        """A tensor that differs between ranks, of small integers, so that sums and products are exact in every dtype."""
        count = torch.Size(shape).numel()
        values = (torch.arange(count) * step + dist.get_rank()) % 3
        return values.reshape(shape).to(torch.float32).to(self.dtype).to(self.device)

    def empty(self, *shape: int) -> Tensor:
        """A tensor to fill."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    @property
    def reduction(self) -> Any:
        """The reduction as torch writes it."""
        return getattr(dist.ReduceOp, self.op)


Case = Callable[[Setting], Iterable[Tensor]]
MOVES: dict[str, Case] = {}
REDUCTIONS: dict[str, Case] = {}
OTHERS: dict[str, Case] = {}


def into(table: dict[str, Case]) -> Callable[[Case], Case]:
    """Add a case to a table under its name."""

    def add(case: Case) -> Case:
        table[case.__name__] = case
        return case

    return add


def outcome(table: str, name: str, setting: Setting) -> list[Tensor] | str:
    """Run a case and return its results on the CPU, or the error that it raised.

    Ranks: collective.
    """
    case = {"moves": MOVES, "reductions": REDUCTIONS, "others": OTHERS}[table][name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return [tensor.detach().cpu().clone() for tensor in case(setting)]
        except (RuntimeError, ValueError, TypeError) as error:
            return f"{type(error).__name__}: {error}"


def differences(table: str, names: list[str], settings: list[Setting], expected: list[Setting]) -> list[str]:
    """Run cases in each setting and in the one that it is to be compared with; return what differs, a line each.

    Ranks: collective.
    """
    found = []
    for setting, other in zip(settings, expected, strict=True):
        for name in names:
            results, wanted = outcome(table, name, setting), outcome(table, name, other)
            if line := difference(results, wanted, setting.dtype):
                found.append(f"{name} {setting.dtype} {setting.op}: {line}")
    return found


def difference(results: list[Tensor] | str, wanted: list[Tensor] | str, dtype: torch.dtype) -> str:
    """Return in which way results differ; empty if they do not."""
    if isinstance(results, str) or isinstance(wanted, str):
        kinds = [one.partition(":")[0] for one in (results, wanted) if isinstance(one, str)]
        return "" if len(kinds) == 2 and kinds[0] == kinds[1] else f"{results} instead of {wanted}"
    if len(results) != len(wanted):
        return f"{len(results)} tensors instead of {len(wanted)}"
    for result, one in zip(results, wanted, strict=True):
        right = one if one.dtype == result.dtype else one.to(dtype)
        if result.shape != right.shape or bytes_of(result) != bytes_of(right):
            return f"{result} instead of {right}"
    return ""


def bytes_of(tensor: Tensor) -> bytes:
    """A tensor's bytes: all dtypes can be compared so, and NaN is equal to itself."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


# -- cases that move data ---------------------------------------------------------------------------------------------


@into(MOVES)
def broadcast(setting: Setting) -> Iterable[Tensor]:
    for source in range(WORLD_SIZE):
        tensor = setting.tensor(5)
        dist.broadcast(tensor, source)
        yield tensor


@into(MOVES)
def all_gather(setting: Setting) -> Iterable[Tensor]:
    outputs = [setting.empty(2, 3) for _ in range(WORLD_SIZE)]
    dist.all_gather(outputs, setting.tensor(2, 3))
    return outputs


@into(MOVES)
def all_gather_into_tensor(setting: Setting) -> Iterable[Tensor]:
    output = setting.empty(2 * WORLD_SIZE, 3)
    dist.all_gather_into_tensor(output, setting.tensor(2, 3))
    stacked = setting.empty(WORLD_SIZE, 2, 3)
    dist.all_gather_into_tensor(stacked, setting.tensor(2, 3))
    # As FSDP does: the input is a part of the output.
    rank = dist.get_rank()
    within = setting.empty(WORLD_SIZE * 3)
    within[3 * rank : 3 * rank + 3] = setting.tensor(3)
    dist.all_gather_into_tensor(within, within[3 * rank : 3 * rank + 3])
    return output, stacked, within


@into(MOVES)
def gather(setting: Setting) -> Iterable[Tensor]:
    for root in (0, WORLD_SIZE - 1):
        outputs = [setting.empty(4) for _ in range(WORLD_SIZE)] if dist.get_rank() == root else None
        dist.gather(setting.tensor(4), outputs, root)
        yield from outputs or ()


@into(MOVES)
def scatter(setting: Setting) -> Iterable[Tensor]:
    for root in (0, WORLD_SIZE - 1):
        inputs = [setting.tensor(4, step=step + 1) for step in range(WORLD_SIZE)] if dist.get_rank() == root else None
        output = setting.empty(4)
        dist.scatter(output, inputs, root)
        yield output


@into(MOVES)
def all_to_all_single(setting: Setting) -> Iterable[Tensor]:
    output = setting.empty(WORLD_SIZE, 2)
    dist.all_to_all_single(output, setting.tensor(WORLD_SIZE, 2))
    rank = dist.get_rank()
    # Rank r sends r + 1 elements to each rank.
    uneven = setting.empty(sum(range(1, WORLD_SIZE + 1)))
    sent = setting.tensor((rank + 1) * WORLD_SIZE)
    dist.all_to_all_single(uneven, sent, list(range(1, WORLD_SIZE + 1)), [rank + 1] * WORLD_SIZE)
    return output, uneven


@into(MOVES)
def send_and_receive(setting: Setting) -> Iterable[Tensor]:
    rank, tensor = dist.get_rank(), setting.empty(3)
    if rank % 2 == 0:
        dist.send(setting.tensor(3), rank + 1, tag=7)
        dist.recv(tensor, rank + 1)
    else:
        assert dist.recv(tensor, rank - 1, tag=7) == rank - 1
        dist.send(tensor, rank - 1)
    return [tensor]


@into(MOVES)
def receive_from_any_rank(setting: Setting) -> Iterable[Tensor]:
    tensor = setting.empty(3)
    if dist.get_rank() == 0:
        by_source = {}
        for _ in range(WORLD_SIZE - 1):
            source = dist.recv(tensor, tag=5)
            by_source[source] = tensor.clone()
        results = [by_source[source] for source in sorted(by_source)]
    else:
        dist.send(setting.tensor(3), 0, tag=5)
        results = []
    dist.barrier()  # else rank 0 would take what a rank sends in the next case
    return results


@into(MOVES)
def both_receive_first(setting: Setting) -> Iterable[Tensor]:
    rank, got, empty = dist.get_rank(), setting.empty(4), setting.empty(0)
    after, before = (rank + 1) % WORLD_SIZE, (rank - 1) % WORLD_SIZE
    receiving = dist.irecv(got, before)
    sending = dist.isend(setting.tensor(4), after)
    assert receiving is not None
    assert sending is not None
    receiving.wait()
    sending.wait()
    assert receiving.is_completed()
    both = [dist.P2POp(dist.irecv, empty, before), dist.P2POp(dist.isend, setting.tensor(4, step=2), after)]
    both[0] = dist.P2POp(dist.irecv, other := setting.empty(4), before)
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return got, other


@into(MOVES)
def non_contiguous(setting: Setting) -> Iterable[Tensor]:
    tensor, output = setting.tensor(4, 6), setting.empty(WORLD_SIZE * 6, 4).t().contiguous().t()
    column, rows = setting.tensor(4, 6)[:, ::2], tensor.t()
    if setting.device == "cpu":  # gloo itself takes the memory for contiguous
        column, rows, output = column.contiguous(), rows.contiguous(), output.contiguous()
    dist.broadcast(column, 1)
    dist.all_gather_into_tensor(output, rows)
    return column, output


@into(MOVES)
def without_elements(setting: Setting) -> Iterable[Tensor]:
    tensor, output = setting.empty(0, 3), setting.empty(0, 3)
    dist.broadcast(tensor, 0)
    dist.all_gather_into_tensor(output, tensor)
    dist.all_to_all_single(output, tensor)
    return tensor, output


# -- cases that reduce ------------------------------------------------------------------------------------------------


@into(REDUCTIONS)
def all_reduce(setting: Setting) -> Iterable[Tensor]:
    tensor, scalar = setting.tensor(2, 5), setting.tensor(1)[0]
    dist.all_reduce(tensor, setting.reduction)
    dist.all_reduce(scalar, setting.reduction)
    return tensor, scalar


@into(REDUCTIONS)
def reduce_(setting: Setting) -> Iterable[Tensor]:
    for root in range(WORLD_SIZE):
        tensor = setting.tensor(6)
        dist.reduce(tensor, root, setting.reduction)
        if dist.get_rank() == root:
            yield tensor


@into(REDUCTIONS)
def reduce_scatter(setting: Setting) -> Iterable[Tensor]:
    output = setting.empty(3)
    dist.reduce_scatter(output, [setting.tensor(3, step=step + 1) for step in range(WORLD_SIZE)], setting.reduction)
    return [output]


@into(REDUCTIONS)
def reduce_scatter_tensor(setting: Setting) -> Iterable[Tensor]:
    output = setting.empty(2, 3)
    dist.reduce_scatter_tensor(output, setting.tensor(2 * WORLD_SIZE, 3), setting.reduction)
    return [output]


# -- further ways to call them ----------------------------------------------------------------------------------------


@into(OTHERS)
def asynchronous(setting: Setting) -> Iterable[Tensor]:
    tensor, output = setting.tensor(1000), setting.empty(250)
    works = [dist.all_reduce(tensor, async_op=True)]
    works.append(dist.reduce_scatter_tensor(output, setting.tensor(1000), async_op=True))
    gathered = [setting.empty(3) for _ in range(WORLD_SIZE)]
    works.append(dist.all_gather(gathered, setting.tensor(3), async_op=True))
    for work in reversed(works):
        assert work is not None
        work.wait()
        assert work.is_success()
    again = setting.tensor(1000)
    work = dist.all_reduce(again, async_op=True)
    assert work is not None
    while not work.is_completed():
        pass
    assert work.exception() is None
    return tensor, output, *gathered, again, *work.result()


@into(OTHERS)
def one_rank_late(setting: Setting) -> Iterable[Tensor]:
    """A call returns before the last rank has called, and its work is over when that one has."""
    tensor, late = setting.tensor(1000), dist.get_rank() == 1
    if late:
        time.sleep(0.2)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    early = late or not work.is_completed()
    work.wait()
    return tensor, torch.tensor([early, work.is_completed()])


@into(OTHERS)
def by_future(setting: Setting) -> Iterable[Tensor]:
    work = dist.all_reduce(setting.tensor(5), async_op=True)
    assert work is not None
    halved = work.get_future().then(lambda done: done.value()[0] / 2)
    return [halved.wait()]


@into(OTHERS)
def in_halves(setting: Setting) -> Iterable[Tensor]:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    tensor = setting.tensor(4)
    dist.all_reduce(tensor, setting.reduction, group=halves[dist.get_rank() // 2])
    for group in halves:
        dist.destroy_process_group(group)
    return [tensor]


@into(OTHERS)
def coalesced(setting: Setting) -> Iterable[Tensor]:
    first, second = setting.tensor(3), setting.tensor(2, 2)
    with _coalescing_manager():
        dist.all_reduce(first)
        dist.all_reduce(second)
    gathered, scattered = [setting.empty(WORLD_SIZE * 2) for _ in range(2)], [setting.empty(2) for _ in range(2)]
    with _coalescing_manager(async_ops=True) as manager:
        for output in gathered:
            dist.all_gather_into_tensor(output, setting.tensor(2))
    manager.wait()
    with _coalescing_manager():
        for output in scattered:
            dist.reduce_scatter_tensor(output, setting.tensor(2 * WORLD_SIZE))
    dist.all_reduce_coalesced(coalesced := [setting.tensor(2), setting.tensor(3)])
    return first, second, *gathered, *scattered, *coalesced


@into(OTHERS)
def lists_of_different_tensors(setting: Setting) -> Iterable[Tensor]:
    rank = dist.get_rank()
    outputs = [setting.empty(source + 1) for source in range(WORLD_SIZE)]
    dist.all_to_all(outputs, [setting.tensor(rank + 1) for _ in range(WORLD_SIZE)])
    return outputs


def functional_calls(tensor: Tensor) -> tuple[Tensor, ...]:
    """Functional collectives on a tensor of WORLD_SIZE rows. All of them can be compiled."""
    group = dist.group.WORLD
    assert group is not None
    total = functional.all_reduce(tensor * 2, "sum", group) + 1
    whole = functional.all_gather_tensor(tensor, 0, group) * 2
    piece = functional.reduce_scatter_tensor(tensor, "avg", 0, group) + 1
    swapped = functional.all_to_all_single(tensor, None, None, group) + 1
    sent = functional.broadcast(tensor, 1, group) + 1
    pair = functional.all_reduce_coalesced([tensor, tensor * 3], "sum", group)
    wholes = functional.all_gather_into_tensor_coalesced([tensor, tensor * 3], group)
    pieces = functional.reduce_scatter_tensor_coalesced([tensor, tensor * 3], "sum", [0, 0], group)
    return total, whole, piece, swapped, sent, *(one + 1 for one in (*pair, *wholes, *pieces))


@into(OTHERS)
def functional_collectives(setting: Setting) -> Iterable[Tensor]:
    tensor, group = setting.tensor(WORLD_SIZE, 3), dist.group.WORLD
    assert group is not None
    return *functional_calls(tensor), functional.all_gather_tensor(tensor, 1, group) * 2


@into(OTHERS)
def functional_without_use(setting: Setting) -> Iterable[Tensor]:
    group = dist.group.WORLD
    assert group is not None
    for _ in range(3):
        functional.all_reduce(setting.tensor(4), "sum", group)
    return [functional.all_reduce(setting.tensor(4), "sum", group) + 0]


@into(OTHERS)
def differentiable(setting: Setting) -> Iterable[Tensor]:
    group = dist.group.WORLD
    assert group is not None
    tensor = setting.tensor(WORLD_SIZE, 2).requires_grad_()
    (functional.all_gather_tensor_autograd(tensor, 0, group) * 3).sum().backward()
    assert tensor.grad is not None
    output = functional.reduce_scatter_tensor_autograd(tensor, "sum", 0, group) * 2
    return tensor.grad, *torch.autograd.grad(output.sum(), tensor)


@into(OTHERS)
def mesh_and_dtensors(setting: Setting) -> Iterable[Tensor]:
    mesh = init_device_mesh(setting.device, (2, 2), mesh_dim_names=("rows", "columns"))
    whole = torch.arange(30, dtype=torch.float32, device=setting.device).reshape(6, 5)
    cut = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    turned = cut.redistribute(mesh, [Shard(1), Replicate()])
    product = distribute_tensor(whole, mesh, [Replicate(), Shard(1)]) @ distribute_tensor(whole.t(), mesh, [Replicate(), Shard(0)])
    return cut.to_local(), cut.full_tensor(), turned.to_local(), turned.full_tensor(), product.full_tensor()


@into(OTHERS)
def ddp_with_and_without_a_hook(setting: Setting) -> Iterable[Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    for hook in (None, default_hooks.fp16_compress_hook, default_hooks.allreduce_hook):
        for as_view in (False, True):
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).to(setting.device)
            replica = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=as_view)
            if hook is not None:
                replica.register_comm_hook(None, hook)
            for _ in range(3):
                replica(setting.tensor(4, 8)).sum().backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                yield parameter.grad.round(decimals=2)


@into(OTHERS)
def objects(setting: Setting) -> Iterable[Tensor]:
    rank, device = dist.get_rank(), torch.device(setting.device)
    mine = {"rank": rank, "tensor": setting.tensor(2).cpu()}
    everyone: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(everyone, mine)
    one: list[Any] = [mine if rank == 1 else None]
    dist.broadcast_object_list(one, 1, device=device)
    rooted: list[Any] | None = [None] * WORLD_SIZE if rank == 0 else None
    dist.gather_object(mine, rooted, 0)
    part: list[Any] = [None]
    dist.scatter_object_list(part, everyone if rank == 0 else None, 0)
    if rank == 0:
        dist.send_object_list([mine], 1, device=device)
    elif rank == 1:
        dist.recv_object_list(one, 0, device=device)
    assert [item["rank"] for item in (*everyone, *part)] == [*range(WORLD_SIZE), rank]
    assert rooted is None or [item["rank"] for item in rooted] == list(range(WORLD_SIZE))
    return [torch.tensor(one[0]["rank"])]


@into(OTHERS)
def barriers(setting: Setting) -> Iterable[Tensor]:
    dist.barrier()
    work = dist.barrier(async_op=True)
    assert work is not None
    work.wait()
    return []


@into(OTHERS)
def versions(setting: Setting) -> Iterable[Tensor]:
    """autograd does not take what a collective writes for a change of the tensor."""
    tensor = setting.tensor(3)
    before = tensor._version
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    return tensor, torch.tensor(tensor._version - before)


@into(OTHERS)
def wrong_arguments(setting: Setting) -> Iterable[Tensor]:
    """An error on every rank, before anything is sent."""
    dist.all_reduce(setting.tensor(3), dist.ReduceOp.BAND)
    return []


#: Cells in which all ranks but rank 1 wait. `big` is a tensor of 1 << 20 ones.
HANGS = {
    "all_reduce": "if rank != 1: dist.all_reduce(big)",
    "all_reduce later": "if rank != 1:\n    work = dist.all_reduce(big, async_op=True)\n    work.wait()",
    "reduce_scatter_tensor": "if rank != 1: dist.reduce_scatter_tensor(big[: 1 << 18].clone(), big)",
    "recv": "if rank != 1: dist.recv(big, 1)",
}
