"""The tracer records all events, for every way to shard, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import labkit
from labkit.spmd.model.transformer import Block, next_token_loss
from labkit.spmd.shards.sharding import shard_model
from labkit.spmd.trace import fsdp_events, record_events
from labkit.spmd.trace.events import ALL_GATHER, RESHARD, UNSHARD, WAIT, Trace
from tests.matrix import matrix
from tests.process.s3_scenarios import (
    batches,
    default,
    hybrid_mesh,
    kept_after_forward,
    mesh_of_all,
    sharded,
    small_model,
    traced,
    traced_fsdp1,
    wrap_fsdp1,
)


@pytest.fixture(scope="module", params=matrix(2, 4))
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu") as pool:
        yield pool


# Events ---------------------------------------------------------------------------------------------------------------


def test_a_gather_lies_in_its_block_s_unshard_and_has_its_bytes(pool: labkit.WorkerPool) -> None:
    trace = pool.run(default)[0]
    sizes = {block.name: block.whole_bytes for block in trace.blocks}
    assert sum(sizes.values()) == sum(p.numel() for p in small_model("cpu").parameters()) * 4
    gathers = [event for event in trace.events if event.kind == ALL_GATHER]
    assert [event.block for event in gathers] == [
        "root", "layers.0", "layers.1", "layers.2", "layers.2", "layers.1", "layers.0",
    ]  # fmt: skip
    unshards = {event.began_s: event for event in trace.events if event.kind == UNSHARD and event.changes}
    for event in gathers:
        outer = max((u for began_s, u in unshards.items() if began_s <= event.began_s), key=lambda u: u.began_s)
        assert outer.block == event.block
        assert outer.began_s + outer.duration_s >= event.began_s + event.duration_s
        # 16 and 24 rows divide by 2 and by 4, so nothing is padded.
        assert event.size_bytes == outer.size_bytes == sizes[event.block]


def padded() -> list[tuple[str, int, int]]:
    model = nn.Sequential(nn.Linear(8, 5, bias=False), nn.ReLU(), nn.Linear(5, 3, bias=False))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh_of_all("cpu"))
    with record_events(model) as recording:
        model(torch.ones(2, 8)).sum().backward()
    trace = recording.trace()
    return [
        (block.name, block.whole_bytes, trace.collectives(block.name)[0].size_bytes) for block in trace.blocks if block.whole_bytes
    ]


def test_a_gather_of_rows_that_do_not_divide_moves_the_padding_too(pool: labkit.WorkerPool) -> None:
    up = -(-5 // pool.world_size) * pool.world_size * 8 * 4
    down = -(-3 // pool.world_size) * pool.world_size * 5 * 4
    assert pool.run(padded).same() == [("0", 160, up), ("2", 60, down)]


def test_an_unshard_without_effect_is_told_from_a_gather(pool: labkit.WorkerPool) -> None:
    trace = pool.run(default)[0]
    asked, done = trace.calls(UNSHARD)
    # In backward FSDP2 asks again for the root, which is still whole, and for each block that was prefetched.
    assert (asked, done) == (7 + 4, 7)
    idle = [(event.block, event.phase) for event in trace.events if event.kind == UNSHARD and not event.changes]
    assert idle == [(name, "backward") for name in ("root", "layers.2", "layers.1", "layers.0")]
    assert trace.calls(RESHARD) == (8, 7)


@pytest.mark.parametrize("run", [default, kept_after_forward])
def test_parameters_are_whole_whenever_their_block_computes(pool: labkit.WorkerPool, run: Callable[[], Trace]) -> None:
    whole: set[str] = set()
    computing: set[str] = set()
    seen = 0
    for event in pool.run(run)[0].events:
        if event.kind == WAIT and event.changes:
            whole.add(event.block)
        elif event.kind == RESHARD and event.changes:
            assert event.block not in computing
            whole.discard(event.block)
        elif event.kind in ("forward_begin", "backward_begin"):
            assert event.block in whole
            computing.add(event.block)
            seen += 1
        elif event.kind in ("forward_end", "backward_end"):
            computing.discard(event.block)
    assert seen == 8


def test_fsdp1_and_fsdp2_give_the_same_events_from_gather_to_reduction(pool: labkit.WorkerPool) -> None:
    def story(trace: Trace) -> list[tuple[str, str, str, int]]:
        # They differ only in where the root's backward begins between its first two gathers.
        return [
            (event.kind, event.block, event.phase, event.size_bytes)
            for event in trace.events
            if event.changes and (event.kind, event.block) != ("backward_begin", "root")
        ]

    new = pool.run(default)[0]
    old = pool.run(traced_fsdp1, "cpu", "auto", "FULL_SHARD")[0]
    assert story(old) == story(new)
    assert old.blocks == new.blocks


def hybrid() -> Trace:
    return traced(shard_model(small_model("cpu"), hybrid_mesh("cpu"), blocks=Block), "cpu")


def test_hybrid_sharding_adds_one_all_reduce_of_a_shard_per_block(pool: labkit.WorkerPool) -> None:
    trace = pool.run(hybrid)[0]
    assert trace.counts() == {"all_gather": 7, "reduce_scatter": 4, "all_reduce": 4}
    shards = {block.name: block.shard_bytes for block in trace.blocks}
    for event in trace.events:
        if event.kind == "all_reduce":
            assert event.size_bytes == shards[event.block]
            assert event.group_size == (2 if pool.world_size == 4 else 1)


def resharded_to_pairs() -> Trace:
    return traced(sharded(reshard=2), "cpu")


def test_reshard_to_a_smaller_group_keeps_a_part(pool: labkit.WorkerPool) -> None:
    trace = pool.run(resharded_to_pairs)[0]
    block = trace.blocks[1]
    freed = [event.size_bytes for event in trace.events if event.kind == RESHARD and event.block == block.name and event.changes]
    if pool.world_size == 4:
        assert freed == [block.whole_bytes // 2, block.whole_bytes]
        assert {event.group_size for event in trace.events if event.kind == ALL_GATHER and event.phase == "backward"} == {2}
    assert trace.live_bytes()[-1] == 0


def saved_while_whole() -> Trace:
    model = sharded(reshard=False)
    (batch,) = batches("cpu", 1)
    with record_events(model) as recording:
        next_token_loss(model, batch)
        model.state_dict()
    return recording.trace()


def test_a_state_dict_frees_what_is_whole_and_the_trace_knows(pool: labkit.WorkerPool) -> None:
    trace = pool.run(saved_while_whole)[0]
    assert [event.phase for event in trace.events if event.kind == RESHARD and event.changes] == ["outside"] * 4
    assert trace.live_bytes()[-1] == 0


def grouped() -> Trace:
    model = small_model("cpu", num_layers=4)
    for pair in (model.layers[:2], model.layers[2:]):
        fully_shard(list(pair), mesh=mesh_of_all("cpu"))
    return traced(fully_shard(model, mesh=mesh_of_all("cpu")), "cpu")


def test_several_modules_in_one_group_are_one_block(pool: labkit.WorkerPool) -> None:
    trace = pool.run(grouped)[0]
    assert [block.name for block in trace.blocks] == ["root", "layers.0, layers.1", "layers.2, layers.3"]
    assert trace.counts() == {"all_gather": 5, "reduce_scatter": 3}
    assert trace.order(names=False)[:4] == ("U root", "U 0-1", "R 0-1", "U 2-3")


def of_another_model() -> tuple[Trace, Trace]:
    one, other = sharded(), sharded(num_layers=1)
    (batch,) = batches("cpu", 1)
    with record_events(one) as inner, record_events(other) as outer:
        next_token_loss(one, batch).backward()
    return inner.trace(), outer.trace()


def test_events_of_another_model_are_left_out(pool: labkit.WorkerPool) -> None:
    own, foreign = pool.run(of_another_model)[0]
    assert own.calls(UNSHARD)[1] == 7
    assert foreign.calls(UNSHARD) == (0, 0)


# It changes nothing ---------------------------------------------------------------------------------------------------


def with_and_without(kind: str) -> tuple[list[float], list[float], bool]:
    def train(record: bool) -> tuple[list[float], list[torch.Tensor]]:
        model = sharded() if kind == "fsdp2" else wrap_fsdp1(small_model("cpu"), "cpu", "auto", "FULL_SHARD")
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        losses = []
        for batch in batches("cpu", 3):
            optimizer.zero_grad()
            if record:
                with record_events(model):
                    loss = next_token_loss(model, batch)
                    loss.backward()
            else:
                loss = next_token_loss(model, batch)
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, [getattr(p, "_local_tensor", p).detach() for p in model.parameters()]

    (plain, weights), (watched, watched_weights) = train(False), train(True)
    return plain, watched, all(torch.equal(a, b) for a, b in zip(weights, watched_weights, strict=True))


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_a_traced_training_is_bit_for_bit_the_untraced_one(pool: labkit.WorkerPool, kind: str) -> None:
    for plain, watched, same_weights in pool.run(with_and_without, kind).values():
        assert plain == watched
        assert same_weights


def functions_after(fail: bool) -> bool:
    owners = [(owner, name) for owner, name, _ in fsdp_events._EXPECTED_PARAMETERS]
    before = [getattr(owner, name) for owner, name in owners]
    model = sharded()
    try:
        with record_events(model):
            if fail:
                raise KeyError("stop")
    except KeyError:
        pass
    return all(getattr(owner, name) is function for (owner, name), function in zip(owners, before, strict=True))


@pytest.mark.parametrize("fail", [False, True])
def test_torch_is_as_before_when_the_trace_is_over(pool: labkit.WorkerPool, fail: bool) -> None:
    assert pool.run(functions_after, fail).same()


def test_this_torch_is_as_the_tracer_expects() -> None:
    fsdp_events.self_test()


def test_a_torch_without_a_private_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fsdp_events._ParamGroup, "wait_for_unshard")
    with pytest.raises(fsdp_events.TraceError, match=r"FSDPParamGroup.wait_for_unshard is missing: the tracer does not support"):
        fsdp_events.self_test()


def test_a_torch_with_other_parameters_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def reshard(self: Any, *, free: bool) -> None: ...

    monkeypatch.setattr(fsdp_events._Handle, "reshard", reshard)
    with pytest.raises(fsdp_events.TraceError, match=r"FlatParamHandle.reshard takes \('self', 'free'\)"):
        fsdp_events.self_test()


def test_one_rank_gathers_nothing_and_its_blocks_still_show() -> None:
    with labkit.WorkerPool(1, device="cpu", replace=True) as alone:
        trace = alone.run(default)[0]
    assert trace.counts() == {}
    assert trace.order(names=False, phase="forward") == ("U root", "U 0", "R 0", "U 1", "R 1", "U 2", "R 2")
    assert trace.sent_bytes == 0
