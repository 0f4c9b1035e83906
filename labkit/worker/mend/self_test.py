"""Self-tests of labkit's assumptions about torch's private parts, on the installed torch.

labkit supports several releases of torch and repairs process groups and sharded models through attributes that torch does not
promise to keep (:mod:`labkit.worker.groups.backends`, :mod:`labkit.worker.mend.fsdp_private`). These functions really use each of
them in a world of torch's fake process group, which needs one process and no other rank. The test suite runs them, and so does a
pool's start (``python -m labkit.worker.mend.self_test``) when torch is newer than those the suite ran on.

Ranks: local. Never call them on a rank of a pool: they make a default process group and destroy it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from labkit.worker.groups import backends
from labkit.worker.mend import wrappers

WORLD_SIZE = 2


def groups() -> None:
    """Check replacing and breaking the backends of a group that keeps its identity.

    Raises:
        AssertionError: An assumption does not hold on this torch.
    """
    for backend in ("gloo", "cpu:gloo"):
        _check_groups(backend)


def _check_groups(backend: str) -> None:
    with _world(backend, world_size=1):
        group = dist.new_group([0])
        name, before = backends.group_name(group), group._get_backend(torch.device("cpu"))
        assert backends.group_ranks(group) == (0,)
        assert backends.obstacle(group) == ""
        assert not backends.waiting()
        for _ in range(2):
            backends.replace_backends(group, dist.HashStore(), timedelta(seconds=30))
            after = group._get_backend(torch.device("cpu"))
            assert after is not before, "the group keeps its old backend"
            (started,) = backends.sequence(group)
            ones = torch.ones(2)
            dist.all_reduce(ones, group=group)
            assert backends.sequence(group) == (started + 1,), "collectives are not counted"
            assert backends.group_name(group) == group.group_name == name
            assert after.options.global_ranks_in_group == [0]
            before = after
        _groups_that_are_broken(group)
        count = backends.group_count()
        backends.set_group_count(count + 5)
        assert backends.group_name(dist.new_group([0])) == str(count + 5), "the counter does not name the next group"


def _groups_that_are_broken(group: Any) -> None:
    backends.break_group(group, "broken on purpose")
    assert group not in backends.groups()
    ones = torch.ones(2)
    _refuses(lambda: dist.all_reduce(ones, group=group))
    _refuses(lambda: dist.broadcast(ones, 0, group=group))
    _refuses(lambda: dist.barrier(group=group))
    _refuses(lambda: torch.ops._c10d_functional.all_reduce(ones, "sum", group.group_name))
    _refuses(lambda: group.allreduce([ones]), says="")
    dist.all_reduce(ones)


def _refuses(act: Callable[[], Any], says: str = "broken on purpose") -> None:
    said = None
    try:
        act()
    except RuntimeError as error:
        said = str(error)
    assert said is not None, "a broken group was used and did not refuse"
    assert says in said, f"unclear error: {said}"


def models() -> None:
    """Check restoring FSDP2, FSDP1 and DDP from the middle of a forward and from the middle of a backward.

    Raises:
        AssertionError: An assumption does not hold on this torch.
    """
    with _world("fake", world_size=WORLD_SIZE):
        for wrap in (_fsdp2, _fsdp2_by_hand, _fsdp1, _fsdp1_flat):
            _check_model(wrap)
    with _world("gloo", world_size=1):  # DDP needs real results
        _check_model(_ddp)


def _check_model(wrap: Callable[[nn.Module], nn.Module]) -> None:
    for cut in (_cut_forward, _cut_backward):
        _check_cut(wrap, cut)


def _check_cut(wrap: Callable[[nn.Module], nn.Module], cut: Callable[[nn.Module], None]) -> None:
    what = f"{wrap.__name__.strip('_')}, {cut.__name__.strip('_')}"
    model = wrap(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))))
    batch = torch.ones(2, 4)
    model(batch).sum().backward()
    kept = _snapshot(model)
    model.zero_grad()
    with contextlib.suppress(_PlannedError):
        cut(model)
        raise AssertionError(f"{what}: nothing was cut")
    found = wrappers.find()
    mine = wrappers.Wrappers(
        fsdp2=[tree for tree in found.fsdp2 if tree[0]._modules[0] in set(model.modules())],
        fsdp1=[tree for tree in found.fsdp1 if tree[0] in set(model.modules())],
        ddp=[module for module in found.ddp if module is model],
    )
    (cut_off,) = wrappers.models(mine)
    # A DDP model in a forward looks like an idle one. That does no harm: only a backward changes gradients.
    assert cut_off.in_flight or (mine.ddp and cut is _cut_forward), f"{what}: a model inside an iteration looks idle"
    assert wrappers.reset(mine, [cut_off.signature]) == (1, []), f"{what}: not reset"
    (reset,) = wrappers.models(mine)
    assert not reset.in_flight, f"{what}: still in flight"
    assert reset.signature == cut_off.signature, f"{what}: cannot be told apart from others"
    assert all(parameter.grad is None for parameter in model.parameters()), f"{what}: gradients stay"
    unlike = [not torch.equal(a, b) for a, b in zip(kept, _snapshot(model), strict=True)]
    assert not any(unlike), f"{what}: parameters differ"
    model(batch).sum().backward()


def _snapshot(model: nn.Module) -> list[torch.Tensor]:
    return [getattr(parameter, "_local_tensor", parameter).detach().clone() for parameter in model.parameters()]


def _fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for block in model.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _fsdp2_by_hand(model: nn.Module) -> nn.Module:
    """Wrap as for FSDP2, but hide the public reset, which torch has since 2.13."""
    model.__class__ = type("Old", (nn.Sequential,), {})  # fully_shard makes one class for each class of module
    sharded = _fsdp2(model)
    setattr(type(sharded), "reset_iter_state", property())  # noqa: B010 (for hasattr() to say no)
    assert not hasattr(sharded, "reset_iter_state")
    return sharded


def _fsdp1(model: nn.Module, *, use_orig_params: bool = True) -> nn.Module:
    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
    blocks = (FullyShardedDataParallel(block, **options) for block in model.children())
    return FullyShardedDataParallel(nn.Sequential(*blocks), **options)


def _fsdp1_flat(model: nn.Module) -> nn.Module:
    return _fsdp1(model, use_orig_params=False)


def _ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


class _PlannedError(Exception):
    pass


def _inner(model: nn.Module) -> nn.Module:
    """Return the first layer of the first block."""
    return next(module for module in model.modules() if isinstance(module, nn.Linear))


def _cut_forward(model: nn.Module) -> None:
    def fail(module: nn.Module, args: Any, output: Any) -> None:
        raise _PlannedError

    hook = _inner(model).register_forward_hook(fail)
    try:
        model(torch.ones(2, 4))
    finally:
        hook.remove()


def _cut_backward(model: nn.Module) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise _PlannedError

    def watch(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    hook = _inner(model).register_forward_hook(watch)
    try:
        model(torch.ones(2, 4)).sum().backward()
    finally:
        hook.remove()


@contextlib.contextmanager
def _world(backend: str, world_size: int) -> Iterator[None]:
    if dist.is_initialized():
        raise RuntimeError("a default process group exists in this process")
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend as well

        store: Any = FakeStore()
    else:
        store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    # Without it gloo asks for the address of the host's name, which some machines do not know.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    groups()
    models()
