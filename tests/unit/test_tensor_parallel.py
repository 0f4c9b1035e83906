from __future__ import annotations

import pickle

import pytest
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from labkit.spmd.initialize import build_model
from labkit.spmd.model import ModelConfig
from labkit.spmd.tensor_parallel import PlanError, check_plan, lint_plan, match_modules, tensor_parallel_plan

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


def test_an_embedding_is_cut_the_other_way_round() -> None:
    model = nn.Sequential(nn.Embedding(9, 6))
    assert kinds({"0": RowwiseParallel()}, model) == [("0", "uneven")]
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
    with pytest.raises(PlanError, match="no module has this name") as caught:
        check_plan(MODEL, plan, 2)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert [finding.key for finding in copy.findings] == ["layers.*.attention.w0", "head"]
    assert str(copy) == str(caught.value)
