"""Files without an index: if their names show that one is missing, a part of a model does not pass for the whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch.distributed.checkpoint import save

from labkit.checkpoint import migrate, open_checkpoint, verify
from labkit.checkpoint.cli import checkpoint as command
from labkit.checkpoint.errors import VerificationError

ONE = torch.ones(2, 2)


def stages(root: Path, ranks: list[int], name: str = "ckpt_rank{}.pt") -> Path:
    """Write files that each hold their own parameters, like pipeline stages."""
    root.mkdir(parents=True)
    for rank in ranks:
        state = {f"layers.{rank}.weight": ONE * rank}
        file = root / name.format(rank)
        save_file(state, file) if file.suffix == ".safetensors" else torch.save({"model": state, "epoch": 4}, file)
    return root


def found(path: Path) -> list[tuple[str, str]]:
    return [(finding.severity, finding.code) for finding in verify(path).findings]


@pytest.mark.parametrize("name", ["ckpt_rank{}.pt", "layer_{:02d}.pt", "stage{}.safetensors"])
@pytest.mark.parametrize(("ranks", "missing"), [([2, 3], [0, 1]), ([0, 2, 3], [1]), ([0, 3], [1, 2])])
def test_a_gap_in_the_numbers_of_disjoint_files_is_an_error_in_every_spelling(
    tmp_path: Path, name: str, ranks: list[int], missing: list[int]
) -> None:
    root = stages(tmp_path / "x", ranks, name)
    patterns = [re.sub(r"\{.*\}", text, name) for text in ("*", "{rank}")]
    for path in (root, *(root / pattern for pattern in patterns)):
        report = verify(path)
        (finding,) = report.findings
        assert (finding.severity, finding.code) == ("error", "missing-rank"), path
    for number in missing:
        assert name.format(number) in verify(root).findings[0].what
    with pytest.raises(VerificationError, match="missing-rank"):
        migrate(root, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    result = migrate(root, tmp_path / "new", despite=["missing-rank"])
    assert result.num_tensors == len(ranks)
    assert "missing" in result.notes[-1]


def test_a_missing_file_that_lies_in_a_folder_beside_is_named_with_it_by_every_command(tmp_path: Path) -> None:
    nodes = [tmp_path / "local" / name for name in ("node0", "node1")]
    save({"w": ONE}, checkpoint_id=nodes[0], no_dist=True)
    nodes[1].mkdir()
    (nodes[0] / "__0_0.distcp").rename(nodes[1] / "__0_0.distcp")
    runner = CliRunner()
    for words in (["show"], ["verify"], ["migrate", str(tmp_path / "new")]):
        output = runner.invoke(command, [words[0], str(nodes[0]), *words[1:]]).output
        assert f"A file of this name is in '{nodes[1]}': if it is from the same save, copy it here" in output, words


@pytest.mark.parametrize("name", ["ckpt_rank{}.pt", "stage{}.safetensors"])
def test_disjoint_files_that_count_from_0_are_whole(tmp_path: Path, name: str) -> None:
    root = stages(tmp_path / "x", [0, 1, 2], name)
    assert not [code for severity, code in found(root) if severity == "error"]
    assert migrate(root, tmp_path / "new").num_tensors == 3


@pytest.mark.parametrize("name", ["ckpt_rank{}.pt", "stage{}.safetensors"])
def test_disjoint_files_that_count_from_1_are_asked_for_and_named_by_rank_plus_1(tmp_path: Path, name: str) -> None:
    root = stages(tmp_path / "x", [1, 2], name)
    pattern = root / name.format("{rank+1}")
    with pytest.raises(VerificationError) as caught:
        migrate(root, tmp_path / "new")
    assert f"if the names count from 1, write '{pattern}'" in str(caught.value)
    assert migrate(pattern, tmp_path / "new").num_tensors == 2
    assert found(root / name.format("{rank}")) == [("error", "missing-rank")]


@pytest.mark.parametrize(
    ("names", "whole"),
    [
        (["n0_g0.pt", "n0_g1.pt", "n1_g0.pt", "n1_g1.pt"], True),
        (["n0_g0.pt", "n0_g1.pt", "n1_g2.pt", "n1_g3.pt"], True),
        (["n0_g0.pt", "n0_g1.pt", "n1_g1.pt"], False),
        (["step100_stage0.pt", "step200_stage1.pt"], True),
        (["step100_stage1.pt", "step200_stage2.pt"], False),
        (["day20240101.pt", "day20240102.pt"], True),
    ],
)
def test_names_with_several_numbers_have_to_count_through_in_one_or_in_all_of_them(
    tmp_path: Path, names: list[str], whole: bool
) -> None:
    for number, name in enumerate(names):
        torch.save({f"w{number}": ONE}, tmp_path / name)
    assert found(tmp_path) == ([] if whole else [("error", "missing-rank")])


def test_files_that_an_index_lists_need_no_numbers_without_gaps(tmp_path: Path) -> None:
    for number in (3, 7):
        save_file({f"w{number}": ONE}, tmp_path / f"part{number}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w3": "part3.safetensors", "w7": "part7.safetensors"}}')
    assert found(tmp_path) == []
    assert len(open_checkpoint(tmp_path).tensors) == 2


# -- one file of several --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model-{:05d}-of-00002.safetensors", "pytorch_model-{:05d}-of-00002.bin"])
@pytest.mark.parametrize("there", [[1], [1, 2]])
def test_a_file_whose_name_states_how_many_there_are_is_refused_alone(tmp_path: Path, name: str, there: list[int]) -> None:
    root = stages(tmp_path / "x", there, name)
    one = root / name.format(1)
    (finding,) = verify(one).findings
    assert (finding.severity, finding.code) == ("error", "missing-rank")
    assert name.format(2) in finding.what
    with pytest.raises(VerificationError, match=name.format(2)):
        migrate(one, tmp_path / "new")
    assert migrate(one, tmp_path / "new", despite=["missing-rank"]).num_tensors == 1


def test_a_pattern_that_leaves_out_a_file_of_the_stated_count_is_refused(tmp_path: Path) -> None:
    root = stages(tmp_path / "x", [1, 3], "model-{:05d}-of-00003.safetensors")
    (finding,) = verify(root / "model-*-of-00003.safetensors").findings
    assert finding.code == "missing-rank"
    assert "model-00002-of-00003.safetensors" in finding.what


def test_one_of_several_files_with_other_weights_is_read_with_a_warning(tmp_path: Path) -> None:
    root = stages(tmp_path / "x", [0, 1])
    (finding,) = verify(root / "ckpt_rank1.pt").findings
    assert (finding.severity, finding.code) == ("warning", "missing-rank")
    assert "ckpt_rank0.pt" in finding.what
    assert str(root / "ckpt_rank{rank}.pt") in finding.what
    result = CliRunner().invoke(command, ["migrate", str(root / "ckpt_rank1.pt"), str(tmp_path / "new")])
    assert result.exit_code == 0, result.output
    assert "note: " in result.output
    assert "ckpt_rank0.pt" in result.output


def test_a_file_that_its_name_calls_that_of_a_later_rank_is_read_with_a_warning(tmp_path: Path) -> None:
    root = stages(tmp_path / "x", [2])
    for path in (root, root / "ckpt_rank2.pt"):
        (finding,) = verify(path).findings
        assert (finding.severity, finding.code) == ("warning", "missing-rank")
        assert "ckpt_rank0.pt, ckpt_rank1.pt" in finding.what


@pytest.mark.parametrize("names", [["epoch_1.pt", "epoch_2.pt"], ["model_1000.pt"], ["ckpt_rank0.pt"], ["x.pt"]])
def test_one_of_several_epochs_is_read_without_a_word(tmp_path: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        torch.save({"model": {"w": ONE * number}}, tmp_path / name)
    assert found(tmp_path / names[0]) == []


@pytest.mark.parametrize(("word", "told"), [("stage", True), ("rank", True), ("epoch", False)])
def test_a_file_read_alone_whose_neighbour_has_the_same_names_is_told_where_its_name_suggests_parts(
    tmp_path: Path, word: str, told: bool
) -> None:
    for number in range(2):
        torch.save({"w": torch.full((2,), float(number))}, tmp_path / f"{word}_{number}.pt")
    notes = migrate(tmp_path / f"{word}_0.pt", tmp_path / "new").notes
    assert any("If each holds a part, this is only one" in note for note in notes) == told
