"""Plans of training jobs: refusals, sums over all ranks, and assumptions about torch."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import Tensor, nn

from labkit.base.lookup import FunctionNotFoundError, find_function
from labkit.checkpoint.index.layout import ShardDim
from labkit.notebook.pictures.plans import draw_plans
from labkit.plan import JobError, Plan, TrainingJob, checkpoint, private
from labkit.plan.cli import plan as command
from labkit.plan.compute import compute_plan
from labkit.plan.held_boxes import Layout, held_elements
from labkit.plan.job import mesh_of
from labkit.plan.traffic import traffic_of
from labkit.spmd.shards.layouts import MeshRecord
from labkit.spmd.shards.tensor_parallel import tensor_parallel_plan
from labkit.spmd.trace.events import Collective


class Layers(nn.Module):
    """Two linear layers of 6 rows, one of 3 without bias."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(num_layers))
        self.head = nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)  # type: ignore[no-any-return]


def summed(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).sum()  # type: ignore[no-any-return]


JOB = TrainingJob(Layers, "dp=4", ranks_per_node=2, batch=(5, 6), batch_dtype="float32", loss=summed, optimizer="SGD")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return compute_plan(JOB)


def mesh(**axes: int) -> MeshRecord:
    return MeshRecord(tuple(axes), tuple(axes.values()), tuple(range(prod(axes.values()))))


def test_torch_is_as_the_adapter_takes_it() -> None:
    private.self_test()
    assert not dist.is_initialized()


def test_adapter_refuses_a_process_that_has_a_group() -> None:
    with private.fake_world(0, 2), pytest.raises(RuntimeError, match="default process group exists"), private.fake_world(1, 2):
        pass
    assert not dist.is_initialized()


# -- what is summed up ------------------------------------------------------------------------------------------------


def test_uneven_shards_are_counted_and_padding_is_held(plan: Plan) -> None:
    most, least = plan.ranks
    # Rows of 6, 6 and 3 over 4 ranks: 2, 2, 2, 0 of each layer and 1, 1, 1, 0 of the head.
    assert (most.rank, most.num_elements) == (0, 2 * (2 * 6 + 2) + 6)
    assert (least.rank, least.num_elements) == (3, 0)
    assert most.memory.parameters == least.memory.parameters == 4 * most.num_elements
    assert plan.num_idle_ranks == 1
    assert any("hold no element" in note for note in plan.notes)
    assert plan.num_parameters == 2 * 42 + 18


def test_activations_are_what_backward_needs(plan: Plan) -> None:
    # The batch, the output of each relu (which the next layer needs too); 5 rows of 6 float32 each.
    assert plan.ranks[0].memory.activations == 3 * 5 * 6 * 4


def test_collectives_go_over_an_axis_and_cross_nodes_where_the_ring_does(plan: Plan) -> None:
    gather, scatter = plan.traffic
    assert (gather.kind, gather.axis, gather.num_calls, gather.num_nodes) == ("all_gather", "dp", 5, 2)
    assert (scatter.kind, scatter.num_calls) == ("reduce_scatter", 3)
    assert gather.sent_bytes * 4 == gather.inside_bytes + gather.between_bytes
    assert gather.node_out_bytes == gather.sent_bytes  # the second of two ranks on a node sends to the other node


@pytest.mark.parametrize(("axis", "leaving_a_node", "between"), [("replicate", 4, 8), ("shard", 0, 0), ("of all", 1, 2)])
def test_bytes_between_nodes_follow_the_axis(axis: str, leaving_a_node: int, between: int) -> None:
    axes = mesh(replicate=2, shard=4)
    ranks = 8 if axis == "of all" else axes.shape[axes.axes.index(axis)]
    call = Collective("all_gather", 100 * ranks, ranks, 0.0, 0.0, axis)
    (found,) = traffic_of([call], axes, ranks_per_node=4)
    sent = 100 * (ranks - 1)
    assert (found.sent_bytes, found.node_out_bytes, found.between_bytes) == (sent, leaving_a_node * sent, between * sent)
    assert found.inside_bytes == (8 - between) * sent


def test_every_rank_s_elements_add_up_to_the_tensor() -> None:
    strided = Layout((7, 3), torch.float32, ("dp", "tp"), (ShardDim(0, strided=True), ShardDim(0)))
    row, copied = Layout((5, 4), torch.float32, ("dp", "tp"), (ShardDim(0), ShardDim(1))), Layout((5,), torch.float32)
    held = held_elements([strided, row, copied], mesh(dp=3, tp=2))
    assert held.sum() == 21 + 20 + 6 * 5
    assert held_elements([strided], mesh(replicate=4, dp=3, tp=2)).sum() == 4 * 21


def test_planner_over_some_tensors_of_each_layout_gives_what_it_gives_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(JOB, model=lambda: Layers(8), optimizer="AdamW", mesh="replicate=2,shard=3", checkpoint_threads=2)
    whole = compute_plan(job).checkpoint
    monkeypatch.setattr(checkpoint, "MAX_PAIRS", 0)
    found = compute_plan(job)
    part = found.checkpoint
    assert whole is not None
    assert part is not None
    assert whole.exact
    assert not part.exact
    assert any("some tensors of each layout" in note for note in found.notes)
    for name in ("tensor_bytes", "file_bytes", "num_files", "num_shards", "num_items"):
        assert getattr(part, name) == getattr(whole, name), name
    assert part.metadata_bytes == pytest.approx(whole.metadata_bytes, rel=0.1)
    assert part.num_empty_files is None


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("dp", "cannot read the mesh"),
        ("dp=4,pp=2", "an axis 'pp', which cannot be planned"),
        ("tp=4", "needs one axis that FSDP shards over"),
        ("tp=2,dp=4", "after it one called tp"),
        ("dp=2,fsdp=2", "needs one axis"),
        ("dp=32768", "32,768 ranks. Plans are made for up to 16,384"),
    ],
)
def test_a_mesh_that_cannot_be_planned_is_refused(text: str, match: str) -> None:
    with pytest.raises(JobError, match=match):
        mesh_of(replace(JOB, mesh=text))


def on_cpu() -> nn.Module:
    return nn.Linear(2, 2, device="cpu")


def reads_values() -> nn.Module:
    layer = nn.Linear(2, 2)
    if layer.weight.sum() > 0:
        layer.bias = None  # type: ignore[assignment]
    return layer


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ranks": (4,)}, "rank 4 is not on the mesh"),
        ({"ranks_per_node": 0}, "at least one rank"),
        ({"model": on_cpu}, "puts weight on cpu and not on meta"),
        ({"model": reads_values}, "cannot build the model on the meta device"),
        ({"model": dict}, "returned dict, not a torch.nn.Module"),
        ({"model": "nowhere:build"}, "model: 'nowhere:build' names no function"),
        ({"blocks": ("Block",)}, "no module of class 'Block'. Its classes: Layers, Linear, ModuleList"),
        ({"model": nn.Identity}, "has no ModuleList"),
        ({"mesh": "dp=2,tp=2"}, "nothing says how tensor parallelism cuts the model"),
        ({"mesh": "dp=2,tp=2", "tp_plan": tensor_parallel_plan}, "no module has this name"),
        ({"optimizer": "Adamw"}, "torch.optim has no 'Adamw'"),
        ({"optimizer": "SparseAdam"}, "SparseAdam cannot take a step"),
        ({"batch": (5, 7)}, r"the loss of a batch \(5, 7\) of float32 cannot be computed"),
        ({"loss": "labkit.spmd.model.transformer:next_token_loss"}, "--loss"),
        ({"loss": lambda model, batch: model(batch)}, "a tensor of one element"),
        ({"dtype": "float33"}, "no dtype 'float33'"),
    ],
)
def test_a_job_that_cannot_be_planned_is_refused_with_the_next_step(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(JobError, match=match):
        compute_plan(replace(JOB, **changes))
    assert not dist.is_initialized()


def test_tensor_parallelism_that_does_not_divide_the_model_is_refused() -> None:
    job = TrainingJob("labkit.spmd.model.initialize:build_model", "dp=2,tp=8", tp_plan=tensor_parallel_plan)
    with pytest.raises(JobError, match=r"4 heads of 16 rows cannot be spread evenly over 8 TP ranks(.|\n)*Choose another size"):
        compute_plan(job)


# -- how it is told ---------------------------------------------------------------------------------------------------


def test_plan_is_told_in_tables_and_as_data(plan: Plan) -> None:
    text = str(plan)
    assert "102 parameters on 4 ranks (dp 4), 2 nodes of 2" in text
    assert "0 (most)" in text
    assert "3 (least)" in text
    assert "dp: 4 ranks on 2 nodes" in text
    data = json.loads(json.dumps(plan.as_dict()))
    assert (data["mesh"], data["world_size"], data["ranks"][1]["rank"]) == ({"dp": 4}, 4, 3)
    with pytest.raises(KeyError, match="rank 2 was not planned"):
        plan.rank(2)


def test_picture_shows_memory_against_a_limit_and_what_crosses_nodes(plan: Plan) -> None:
    picture = draw_plans({"four": plan, "again": plan}, caption="Both alike.", limit_bytes=4096)
    assert [row[0] for row in picture.rows] == ["four", "four, rank 3", "again", "again, rank 3"]
    assert picture.rows[0][-1] == f"{plan.between_bytes:,}"
    assert "The device has 4,096 bytes" in picture.alt
    far = draw_plans({"four": plan}, caption="A device with room.", limit_bytes=1 << 40)
    assert "device" in far.alt
    assert far.svg != picture.svg
    with pytest.raises(ValueError, match="no plan to draw"):
        draw_plans({}, caption="Nothing.")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--batch", "4xx"], "Write it like 4x129"),
        (["--reshard-after-forward", "maybe"], "true, false, or a number"),
        (["--activations", "lose"], "'lose' is not one of"),
    ],
)
def test_command_refuses_what_it_cannot_read_before_it_starts_anything(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(command, ["--model", "m:f", "--mesh", "dp=2", *arguments])
    assert result.exit_code == 2
    assert says in result.output


# -- names of functions -----------------------------------------------------------------------------------------------


def test_functions_are_found_in_modules_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside.py").write_text("size = 3\n")
    (tmp_path / "my_model.py").write_text("from beside import size\n\ndef build():\n    return size\n")
    assert find_function(f"{tmp_path}/my_model.py:build")() == 3
    monkeypatch.chdir(tmp_path)
    assert find_function("my_model:build")() == 3


@pytest.mark.parametrize(
    ("reference", "match"),
    [
        ("build", "Write MODULE:FUNCTION"),
        ("no_such_module:build", "No module named"),
        ("no_such_file.py:build", "there is no file"),
        ("math:no_such_function", "no attribute"),
        ("math:pi", "of type float, not a function"),
    ],
)
def test_what_names_no_function_is_refused(reference: str, match: str) -> None:
    with pytest.raises(FunctionNotFoundError, match=match):
        find_function(reference)
