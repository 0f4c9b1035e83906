from __future__ import annotations

import pickle

import pytest
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.transformer import ModelConfig
from labkit.spmd.shards.tensor_parallel import ParallelPlanError, check_plan, lint_plan, match_modules, tensor_parallel_plan

MODEL = build_model(device="meta")


def kinds(plan: dict[str, object], model: nn.Module = MODEL, tp_size: int = 2) -> list[tuple[str, str]]:
    return [(finding.key, finding.kind) for finding in lint_plan(model, plan, tp_size)]  # type: ignore[arg-type]


def test_the_course_s_plan_names_every_projection_of_every_block_once() -> None:
    plan = tensor_parallel_plan()
    named = [name for key in plan for name in match_modules(MODEL, key)]
    assert sorted(named) == sorted(
        name for name, module in MODEL.named_modules() if isinstance(module, nn.Linear) and name != "head"
    )
    check_plan(MODEL, plan, 2)
    check_plan(MODEL, plan, 4)


def test_a_typo_is_found() -> None:
    assert kinds({"layers.*.attention.w0": RowwiseParallel()}) == [("layers.*.attention.w0", "unmatched")]


def test_keys_match_level_by_level_as_in_torch() -> None:
    assert list(match_modules(MODEL, "layers.*")) == ["layers.0", "layers.1", "layers.2"]
    assert list(match_modules(MODEL, "layers.[02].ffn_norm")) == ["layers.0.ffn_norm", "layers.2.ffn_norm"]
    assert match_modules(MODEL, "layers.*.wq") == {}
    assert match_modules(MODEL, "") == {"": MODEL}


def test_a_size_that_does_not_divide_is_found_in_the_dim_that_the_style_cuts() -> None:
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 6))
    assert kinds({"0": ColwiseParallel(), "1": RowwiseParallel()}, model) == [("0", "uneven"), ("1", "uneven")]
    assert kinds({"0": RowwiseParallel(), "1": ColwiseParallel()}, model) == []


def test_a_size_that_does_not_divide_is_no_fault_where_its_placements_are_kept() -> None:
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6))
    kept = ColwiseParallel(use_local_output=False)
    assert kinds({"0": kept, "2": RowwiseParallel()}, model) == []
    assert kinds({"0": ColwiseParallel(output_layouts=Replicate())}, model) == []
    assert kinds({"2": RowwiseParallel(input_layouts=Replicate())}, model) == []


def test_a_row_parallel_layer_is_judged_by_the_layers_beside_it() -> None:
    model = build_model(ModelConfig(hidden_dim=191), device="meta")
    kept, rows = ColwiseParallel(use_local_output=False), RowwiseParallel()
    w1, w2, w3 = (f"layers.*.feed_forward.w{number}" for number in (1, 2, 3))
    assert kinds({w1: kept, w3: kept, w2: rows}, model) == []
    assert {key for key, _ in kinds({w1: kept, w3: ColwiseParallel(), w2: rows}, model)} == {w3}
    assert {key for key, _ in kinds({"layers.0.feed_forward.w1": kept, "layers.1.feed_forward.w2": rows}, model)} == {
        "layers.1.feed_forward.w2"
    }


def test_an_uneven_size_names_its_way_out() -> None:
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6))
    columns, rows = lint_plan(model, {"0": ColwiseParallel(), "2": RowwiseParallel()}, 2)
    assert columns.detail.endswith("over 2 TP ranks; use_local_output=False would keep the size")
    assert "input_layouts=Replicate()" in rows.detail


@pytest.mark.parametrize(("size", "num_tp"), [(3, 4), (5, 4), (9, 8)])
def test_a_rank_without_a_row_is_a_fault_also_where_placements_are_kept(size: int, num_tp: int) -> None:
    model = nn.Sequential(nn.Linear(6, size), nn.ReLU(), nn.Linear(size, 6))
    findings = list(lint_plan(model, {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}, num_tp))
    assert [(finding.key, finding.kind) for finding in findings] == [("0", "uneven"), ("2", "uneven")]
    assert all("a rank would get none" in finding.detail for finding in findings)


@pytest.mark.parametrize(
    ("size", "num_dp", "is_fault"), [(13, 1, False), (13, 2, False), (13, 3, True), (7, 3, True), (15, 3, False), (191, 3, False)]
)
def test_rows_that_fsdp_would_put_into_the_wrong_place_of_a_checkpoint_are_found(size: int, num_dp: int, is_fault: bool) -> None:
    model = nn.Sequential(nn.Linear(6, size), nn.ReLU(), nn.Linear(size, 6))
    plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
    findings = list(lint_plan(model, plan, 2, dp_size=num_dp))
    assert [finding.key for finding in findings] == ["0"] * is_fault
    assert all("its checkpoint fails" in finding.detail for finding in findings)


def test_heads_are_not_cut_by_a_size_that_keeps_its_placements() -> None:
    model = build_model(ModelConfig(dim=48, num_heads=3), device="meta")
    plan = {"layers.0.attention.wq": ColwiseParallel(use_local_output=False)}
    assert kinds(plan, model, 5) == [("layers.0.attention.wq", "heads")]


def test_an_embedding_is_cut_the_other_way_round() -> None:
    model = nn.Sequential(nn.Embedding(9, 6))
    assert kinds({"0": RowwiseParallel()}, model) == [("0", "uneven")]
    assert kinds({"0": RowwiseParallel(input_layouts=Replicate())}, model) == []
    assert kinds({"0": ColwiseParallel()}, model) == []


def test_heads_are_not_cut_although_the_rows_divide() -> None:
    model = build_model(ModelConfig(num_heads=2), device="meta")
    assert kinds({"layers.0.attention.wq": ColwiseParallel()}, model, 4) == [("layers.0.attention.wq", "heads")]


def test_a_tied_parameter_is_not_cut_in_two() -> None:
    assert kinds({"head": ColwiseParallel()}) == [("head", "tied")]


def test_a_module_that_two_keys_split_is_found() -> None:
    plan = {"layers.0.attention.wq": ColwiseParallel(), "layers.*.attention.wq": ColwiseParallel()}
    assert kinds(plan) == [("layers.*.attention.wq", "twice")]


def test_other_styles_are_checked_for_a_match_only() -> None:
    assert kinds({"layers.*.ffn_norm": SequenceParallel(), "layers.*.norm": SequenceParallel()}) == [("layers.*.norm", "unmatched")]


def test_the_error_lists_every_finding_and_travels_between_processes() -> None:
    plan = {"layers.*.attention.w0": RowwiseParallel(), "head": ColwiseParallel()}
    with pytest.raises(ParallelPlanError, match="no module has this name") as caught:
        check_plan(MODEL, plan, 2)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert [finding.key for finding in copy.findings] == ["layers.*.attention.w0", "head"]
    assert str(copy) == str(caught.value)
