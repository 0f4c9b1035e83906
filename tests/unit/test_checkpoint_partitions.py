"""Files that only look like copies: shards without a place, drifted ranks, tensors that DeepSpeed or Megatron has cut."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from labkit.checkpoint import Reader, migrate, open_checkpoint, reshard, verify
from labkit.checkpoint.errors import RankDivergenceError

FULL = {
    "tok_embeddings.weight": torch.arange(48.0).reshape(8, 6),
    "layers.0.attention.wq.weight": torch.arange(48.0).reshape(8, 6) + 100,
    "layers.0.attention.wo.weight": torch.arange(48.0).reshape(6, 8) + 200,
    "norm.weight": torch.ones(6),
    "rope.freqs": torch.arange(3.0),
}
DIM = {"tok_embeddings.weight": 1, "layers.0.attention.wq.weight": 0, "layers.0.attention.wo.weight": 1}


def tensor_parallel(root: Path) -> Path:
    for rank in range(2):
        mine = {name: value.chunk(2, DIM[name])[rank].clone() if name in DIM else value for name, value in FULL.items()}
        torch.save(mine, root / f"consolidated.{rank:02d}.pth")
    return root / "consolidated.{rank}.pth"


def test_tensors_that_nearly_all_differ_are_called_shards_or_drifted_ranks_with_a_way_on_for_each(tmp_path: Path) -> None:
    pattern = tensor_parallel(tmp_path)
    with pytest.raises(RankDivergenceError) as caught:
        migrate(pattern, tmp_path / "new")
    text = str(caught.value)
    assert "3 of the 5 tensors" in text
    assert "shards of larger tensors" in text
    assert "drifted" in text
    assert text.index("shards of larger tensors") < text.index("--copies first")


def test_copies_first_says_how_many_tensors_differed(tmp_path: Path) -> None:
    result = migrate(tensor_parallel(tmp_path), tmp_path / "new", copies="first")
    (note,) = [note for note in result.notes if "first rank's" in note]
    assert note.startswith("3 of the 5 tensors")
    assert "tok_embeddings.weight" in note
    assert "only a part of each" in note


def test_a_few_buffers_that_differ_are_still_answered_with_the_first_ranks(tmp_path: Path) -> None:
    for rank in range(2):
        state = FULL | {"bn.running_mean": torch.full((6,), float(rank))}
        torch.save({"model": state}, tmp_path / f"rank{rank}.pt")
    with pytest.raises(RankDivergenceError, match=r"1 of the 6 tensors.*\n.*\n?.*--copies first") as caught:
        migrate(tmp_path / "rank{rank}.pt", tmp_path / "new")
    assert "shards" not in str(caught.value)
    migrate(tmp_path / "rank{rank}.pt", tmp_path / "new", copies="first")
    with Reader(open_checkpoint(tmp_path / "new")) as reader:
        assert torch.equal(reader.tensor("model.bn.running_mean"), torch.zeros(6))


def deepspeed(root: Path, stage: int = 2) -> Path:
    shapes = [OrderedDict({"w": torch.Size([4, 2])})]
    module = {"w": torch.ones(4, 2).half() if stage < 3 else torch.empty(0).half()}
    state = {"module": module, "optimizer": None, "param_shapes": shapes, "dp_world_size": 2, "ds_version": "0.14.0"}
    torch.save(state, root / "mp_rank_00_model_states.pt")
    for rank in range(2):
        part = torch.full((4,), float(rank))
        key = "single_partition_of_fp32_groups" if stage < 3 else "fp32_flat_groups"
        moments = {"step": 2, "exp_avg": part + 1, "exp_avg_sq": part + 2}
        content = {"base_optimizer_state": [moments], key: [part], "zero_stage": stage, "partition_count": [2]}
        file = root / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": content, "ds_version": "0.14.0"}, file)
    return root / "zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("copies", ["refuse", "first"])
@pytest.mark.parametrize("name", ["zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_partitions_of_deepspeed_are_named_with_deepspeeds_own_tool(tmp_path: Path, stage: int, copies: str, name: str) -> None:
    source = tmp_path / "global_step200"
    source.mkdir()
    deepspeed(source, stage)
    with pytest.raises(RankDivergenceError, match=r"DeepSpeed's ZeRO.*zero_to_fp32\.py") as caught:
        migrate(source / name, tmp_path / "new", copies=copies)  # type: ignore[arg-type]
    assert "--copies" not in str(caught.value)
    with pytest.raises(RankDivergenceError, match=r"zero_to_fp32\.py"):
        migrate(source, tmp_path / "new", parts=[("model", "mp_rank_00_model_states.pt"), ("optim", name)])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("stage", [2, 3])
def test_partitions_of_deepspeed_are_an_error_of_verify_and_no_case_for_reshard(tmp_path: Path, stage: int) -> None:
    pattern = deepspeed(tmp_path, stage)
    for source in (pattern, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        (error,) = [finding for finding in verify(source).findings if finding.code == "trainer-shards"]
        assert error.severity == "error"
        assert "zero_to_fp32.py" in error.what
        with pytest.raises(RankDivergenceError, match=r"zero_to_fp32\.py"):
            reshard(source, tmp_path / "new", 2)
    assert verify(tmp_path / "mp_rank_00_model_states.pt").ok == (stage == 2)


def test_the_names_of_parameters_without_any_weights_are_no_model(tmp_path: Path) -> None:
    shapes = [OrderedDict({"w": torch.Size([4, 2])})]
    source = tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    torch.save({"module": None, "param_shapes": shapes, "scheduler": torch.ones(2)}, source)
    assert [finding.code for finding in verify(source).findings if finding.severity == "error"] == ["trainer-shards"]
    with pytest.raises(RankDivergenceError, match=r"(?s)has none of them.*zero_to_fp32\.py"):
        migrate(source, tmp_path / "new")
    assert migrate(source, tmp_path / "new", drop=["param_shapes.*"]).num_tensors == 1


def test_the_model_of_deepspeed_that_is_whole_migrates_and_one_of_placeholders_does_not(tmp_path: Path) -> None:
    for stage in (2, 3):
        (tmp_path / str(stage)).mkdir()
        deepspeed(tmp_path / str(stage), stage)
    migrate(tmp_path / "2/mp_rank_00_model_states.pt", tmp_path / "new", only=["module"])
    with Reader(open_checkpoint(tmp_path / "new")) as reader:
        assert torch.equal(reader.tensor("module.w"), torch.ones(4, 2).half())
    with pytest.raises(RankDivergenceError, match=r"(?s)module\.w is empty.*zero_to_fp32\.py"):
        migrate(tmp_path / "3/mp_rank_00_model_states.pt", tmp_path / "other", only=["module"])


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "mp_rank_{rank}_model_states.pt"])
def test_shards_of_a_model_that_deepspeed_has_cut_are_refused_alone_and_together(tmp_path: Path, name: str) -> None:
    for rank in range(2):
        content = {"module": {"w": torch.full((2, 4), float(rank)), "norm": torch.ones(4)}, "mp_world_size": 2}
        torch.save(content, tmp_path / f"mp_rank_{rank:02}_model_states.pt")
    with pytest.raises(RankDivergenceError, match=r"mp_world_size is 2.*each file holds shards"):
        migrate(tmp_path / name, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    torch.save({"module": {"w": torch.ones(2, 4)}, "mp_world_size": 1}, tmp_path / "whole.pt")
    migrate(tmp_path / "whole.pt", tmp_path / "new")


def megatron(sizes: dict[str, int], form: Any, rank: int = 0) -> dict[str, Any]:
    model = {"w": torch.full((2, 4), float(rank)), "norm": torch.ones(4)}
    moments = {"state": {0: {"exp_avg": torch.ones(2, 4)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    return {"args": form({**sizes, "hidden_size": 4}), "iteration": 3, "model": model, "optimizer": moments}


FORMS = [dict, lambda sizes: Namespace(**sizes), lambda sizes: SimpleNamespace(**sizes), lambda sizes: {"model": sizes}]
TENSOR, PIPELINE, EXPERT = (f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [{TENSOR: 2, PIPELINE: 1}, {TENSOR: 1, PIPELINE: 2}, {EXPERT: 4}])
@pytest.mark.parametrize("options", [{"only": ["model"]}, {"drop": ["args*", "optimizer.*"]}, {"order": ["w"]}])
def test_one_rank_of_a_model_that_megatron_has_cut_is_refused_and_its_own_tool_named(
    tmp_path: Path, form: Any, sizes: dict[str, int], options: dict[str, Any]
) -> None:
    (tmp_path / "mp_rank_00").mkdir()
    torch.save(megatron(sizes, form), tmp_path / "mp_rank_00/model_optim_rng.pt")
    (name,) = (name for name, size in sizes.items() if size > 1)
    for source in (tmp_path / "mp_rank_00", tmp_path / "mp_rank_00/model_optim_rng.pt"):
        with pytest.raises(RankDivergenceError, match=rf"(?s){name} is {sizes[name]}.*tools/checkpoint/convert\.py") as caught:
            migrate(source, tmp_path / "new", **options)
        assert "trainer-shards" in {finding.code for finding in verify(source).findings}
        assert "zero_to_fp32" not in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_all_ranks_of_a_model_that_megatron_has_cut_are_refused_with_the_number_of_any(tmp_path: Path) -> None:
    for rank in range(2):
        content = megatron({TENSOR: 1 + rank}, lambda sizes: Namespace(**sizes), rank)
        torch.save(content, tmp_path / f"mp_rank_{rank:02}.pt")
    for copies in ("refuse", "first"):
        with pytest.raises(RankDivergenceError, match=rf"{TENSOR} is 2"):
            migrate(tmp_path / "mp_rank_{rank}.pt", tmp_path / "new", drop=["optimizer.*"], copies=copies)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_megatron_has_not_cut_is_whole(tmp_path: Path, form: Any) -> None:
    torch.save(megatron({TENSOR: 1, PIPELINE: 1}, form), tmp_path / "whole.pt")
    migrate(tmp_path / "whole.pt", tmp_path / "new", only=["model"])
    with Reader(open_checkpoint(tmp_path / "new")) as reader:
        assert torch.equal(reader.tensor("model.norm"), torch.ones(4))
        assert torch.equal(reader.tensor("model.w"), torch.zeros(2, 4))
