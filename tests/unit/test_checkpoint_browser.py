"""The tree of a checkpoint: names unfold to shards, a filter chooses, long ones are cut with a count, and text stays text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from labkit.checkpoint.index.model import Checkpoint, Chunk, ChunkTable, TensorEntry
from labkit.notebook.views import checkpoint_browser as module
from labkit.notebook.views.checkpoint_browser import CheckpointTree, NameBranch, box_of, browse, tree_of
from labkit.notebook.views.explore import ControlError


def entry(key: str, shape: tuple[int, ...] = (8, 4), shards: int = 2, section: str = "model") -> TensorEntry:
    rows = shape[0] // shards if shape else 1
    chunks = [
        Chunk(
            (rank * rows, *(0,) * (len(shape) - 1)) if shape else (),
            (rows, *shape[1:]) if shape else (),
            f"__{rank}_0.distcp",
            100,
            64,
        )
        for rank in range(shards)
    ]
    table = ChunkTable.of(chunks, len(shape))
    return TensorEntry(key, tuple(key.split(".")), shape, torch.float32, table, section)  # type: ignore[arg-type]


def checkpoint(*entries: TensorEntry) -> Checkpoint:
    return Checkpoint(Path("x"), Path("x"), "dcp", {found.key: found for found in entries})


LAYERS = [entry(f"model.layers.{place}.{name}.weight") for place in (0, 1) for name in ("w1", "w2")]
STEP = entry("optimizer.state.step", (), 1, "optimizer")
WHOLE = checkpoint(*LAYERS, entry("model.embed.weight"), STEP)


def names_of(node: NameBranch) -> Any:
    """The tree as plain names; tensors side by side as a list."""
    below = {name: names_of(child) if isinstance(child, NameBranch) else None for name, child in node.children.items()}
    return list(below) if all(names is None for names in below.values()) else below


def test_names_that_do_not_branch_are_one_step_of_the_tree() -> None:
    tree = tree_of(list(WHOLE.tensors.values()))
    assert names_of(tree) == {
        "model.": {
            "layers.": {"0.": ["w1.weight", "w2.weight"], "1.": ["w1.weight", "w2.weight"]},
            "embed.weight": None,
        },
        "optimizer.state.step": None,
    }
    assert [found.key for found in tree.entries()] == list(WHOLE.tensors)


def test_a_name_may_be_the_beginning_of_another() -> None:
    tree = tree_of([entry("a.b"), entry("a.b.c"), entry("a.b.d")])
    assert [found.key for found in tree.entries()] == ["a.b", "a.b.c", "a.b.d"]


def test_a_tensor_unfolds_to_its_shards_with_rank_file_and_bytes() -> None:
    page = CheckpointTree(WHOLE, "layers.0.w1").to_html()
    assert "1 of 6 tensors, 128 bytes" in page
    assert re.findall(r"<td>(.*?)</td>", page) == [
        *("[0:4, 0:4]", "rank 0", "__0_0.distcp", "100", "64"),
        *("[4:8, 0:4]", "rank 1", "__1_0.distcp", "100", "64"),
    ]
    assert page.count("<details open") == 1  # so few are unfolded at once
    assert page.count("position:absolute") == 2
    assert "top:50.00%;width:100.00%;height:50.00%" in page


@pytest.mark.parametrize(
    ("name", "part", "keys"),
    [
        ("", "all", list(WHOLE.tensors)),
        ("embed", "all", ["model.embed.weight"]),
        ("*.0.w?.weight", "all", ["model.layers.0.w1.weight", "model.layers.0.w2.weight"]),
        ("", "optimizer", ["optimizer.state.step"]),
        ("embed", "optimizer", []),
    ],
)
def test_the_filter_is_a_part_of_the_name_or_a_pattern(name: str, part: str, keys: list[str]) -> None:
    assert [found.key for found in CheckpointTree(WHOLE, name, part).found] == keys


def test_what_is_left_out_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TENSORS", 2)
    monkeypatch.setattr(module, "MAX_SHARDS", 3)
    tree = CheckpointTree(checkpoint(*LAYERS, entry("model.wide", (8,), 8)))
    assert "and 3 more; a filter by name shows them" in tree.to_html()
    assert "and 3 more" in tree.to_text()
    assert "and 5 more shards" in CheckpointTree(checkpoint(entry("model.wide", (8,), 8))).to_html()
    assert CheckpointTree(WHOLE, "nothing like it").to_text() == "0 of 6 tensors, 0 bytes"


def test_names_from_the_file_are_text() -> None:
    page = CheckpointTree(checkpoint(entry("<script>alert(1)</script>\x1b.weight"))).to_html()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\x1b" in page


def test_boxes_are_read_like_slices() -> None:
    assert [box_of(chunk) for chunk in LAYERS[0].chunks] == ["[0:4, 0:4]", "[4:8, 0:4]"]
    assert box_of(STEP.chunks[0]) == "all"


def test_outside_a_notebook_it_is_a_table_and_a_part_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    browse(WHOLE, name="embed")
    assert capsys.readouterr().out.splitlines()[:2] == [
        "1 of 6 tensors, 128 bytes",
        "tensor              shape  dtype    size       shards",
    ]
    with pytest.raises(ControlError, match="part starts from 'other'"):
        browse(WHOLE, section="other")
