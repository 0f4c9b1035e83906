from __future__ import annotations

import subprocess
import sys
import xml.dom.minidom
from dataclasses import replace

import pytest

from labkit.notebook.drawing.style import rank_style
from labkit.notebook.pictures.mesh_maps import DiskChunk, block_map, mesh_picture
from labkit.spmd.shards.layouts import MeshRecord
from labkit.spmd.shards.records import Chunk, ShardRecord

STRIDED = ("_StridedShard(dim=0, sf=2)", "Shard(dim=0)")
CHESSBOARD = ("Shard(dim=0)", "Shard(dim=1)")


def record(name: str, rank: int, placements: tuple[str, ...], shape: tuple[int, ...], chunk: Chunk) -> ShardRecord:
    axes = ("dp", "tp")[: len(placements)]
    return ShardRecord(name, shape, "float32", placements, (2,) * len(axes), axes, (rank // 2, rank % 2), (chunk,), 4 * chunk.numel)


def tables() -> dict[int, list[ShardRecord]]:
    held = {}
    for rank in range(4):
        dp, tp = divmod(rank, 2)
        held[rank] = [
            record("w1", rank, STRIDED, (10, 4), Chunk((5 * tp + 3 * dp, 0), (3 - dp, 4))),
            record("w2", rank, CHESSBOARD, (4, 10), Chunk((2 * dp, 5 * tp), (2, 5))),
            record("norm", rank, ("Shard(dim=0)",), (4,), Chunk((2 * dp,), (2,))),
        ]
    return held


def on_disk() -> dict[str, list[DiskChunk]]:
    return {
        name: [
            DiskChunk(one.chunks[0], f"__{rank}_0.distcp")
            for rank, records in tables().items()
            for one in records
            if one.name == name
        ]
        for name in ("w1", "w2", "norm")
    }


def rectangles(svg: str, rank: int) -> list[tuple[float, float, float, float]]:
    """Left, top, right and bottom of each box in a rank's colour."""
    found = []
    for path in xml.dom.minidom.parseString(svg).getElementsByTagName("path"):
        if f"fill: {rank_style(rank).color.lower()}" in path.getAttribute("style"):
            numbers = [float(word) for word in path.getAttribute("d").split() if word[0] in "-.0123456789"]
            found.append((min(numbers[::2]), min(numbers[1::2]), max(numbers[::2]), max(numbers[1::2])))
    return found


def test_the_mesh_table_has_a_place_for_every_rank() -> None:
    picture = mesh_picture(MeshRecord(("dp", "tp"), (2, 2), (0, 1, 2, 3)))
    assert picture.columns == ("rank", "dp", "tp")
    assert picture.rows == (("0", "0", "0"), ("1", "0", "1"), ("2", "1", "0"), ("3", "1", "1"))
    assert "A mesh of 2 (dp) by 2 (tp) ranks. Row by row: 0, 1; 2, 3." in picture.alt
    assert "Ranks in a row form one tp group, ranks in a column one dp group" in picture.caption


def test_the_second_axis_of_a_mesh_runs_to_the_right() -> None:
    svg = mesh_picture(MeshRecord(("dp", "tp"), (2, 2), (0, 1, 2, 3))).svg
    (first,), (second,), (third,) = (rectangles(svg, rank) for rank in (0, 1, 2))
    assert first[1] == second[1]
    assert first[2] < second[0]
    assert first[0] == third[0]
    assert first[3] < third[1]


def test_a_mesh_of_one_axis_or_without_names_can_be_drawn() -> None:
    assert mesh_picture(MeshRecord(("dp",), (3,), (0, 1, 2))).rows[2] == ("2", "2")
    assert mesh_picture(MeshRecord(("", ""), (1, 2), (0, 1))).columns == ("rank", "axis 0", "axis 1")


def test_a_mesh_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match="3 axes"):
        mesh_picture(MeshRecord(("a", "b", "c"), (1, 1, 1), (0,)))
    with pytest.raises(ValueError, match="65 ranks"):
        mesh_picture(MeshRecord(("dp",), (65,), tuple(range(65))))


def test_the_block_table_has_the_strided_blocks_in_the_order_of_their_rows() -> None:
    picture = block_map(tables(), names=["w1"])
    assert picture.columns == ("where", "tensor", "placements", "rows", "columns", "ranks")
    assert [(row[3], row[5]) for row in picture.rows] == [("0-2", "0"), ("3-4", "2"), ("5-7", "1"), ("8-9", "3")]
    assert "w1: 4 blocks, of ranks 0, 2, 1, 3" in picture.alt


def test_blocks_have_the_place_and_size_of_their_rows_and_columns() -> None:
    svg = block_map(tables(), names=["w1", "w2"]).svg
    (uneven, corner), (second, right) = rectangles(svg, 0), rectangles(svg, 1)
    height = rectangles(svg, 3)[0][3] - uneven[1]
    assert (uneven[3] - uneven[1]) / height == pytest.approx(0.3, rel=1e-3)
    assert (second[1] - uneven[1]) / height == pytest.approx(0.5, rel=1e-3)
    assert corner[1] == right[1]
    assert corner[2] == pytest.approx(right[0])


def test_copies_are_named_and_not_coloured() -> None:
    picture = block_map(tables(), names=["norm"])
    assert [row[3:] for row in picture.rows] == [("0-1", "all", "0-1"), ("2-3", "all", "2-3")]
    assert all(not rectangles(picture.svg, rank) for rank in range(4))


def test_chunks_on_disk_stand_below_with_the_rank_that_wrote_them() -> None:
    picture = block_map(tables(), names=["w1"], disk=on_disk())
    live, disk = ([row[3:] for row in picture.rows if row[0] == where] for where in ("live", "on disk"))
    assert live == disk
    above, below = rectangles(picture.svg, 2)
    assert above[0] == below[0]
    assert above[3] < below[1]


def test_a_chunk_that_another_rank_wrote_shows() -> None:
    chunks = on_disk()
    chunks["w1"][2] = DiskChunk(chunks["w1"][2].chunk, "__3_0.distcp")
    picture = block_map(tables(), names=["w1"], disk=chunks)
    assert [row[5] for row in picture.rows if row[0] == "on disk"] == ["0", "3", "1", "3"]


def test_plain_tensors_and_tensors_without_names_can_be_drawn() -> None:
    whole = Chunk((0, 0), (2, 2))
    plain = ShardRecord("p", (2, 2), "float32", (), (), (), None, (whole,), 16)
    nameless = replace(tables()[0][1], mesh_axes=("", ""))
    assert block_map({0: [plain]}, names=["*"]).rows[0][2] == "plain"
    assert "w2" in block_map({0: [nameless]}, names=["*"]).alt


@pytest.mark.parametrize(
    ("names", "disk", "message"),
    [(["w9"], None, "no tensor matches"), (["w1"], {}, "the checkpoint's chunks of w1 are missing")],
)
def test_what_cannot_be_drawn_is_refused(names: list[str], disk: dict[str, list[DiskChunk]] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        block_map(tables(), names=names, disk=disk)


def test_too_many_matrices_and_too_many_dims_are_refused() -> None:
    many = {0: [replace(tables()[0][0], name=f"w{index}") for index in range(5)]}
    with pytest.raises(ValueError, match="5 matrices do not fit"):
        block_map(many, names=["*"])
    deep = {0: [replace(tables()[0][0], shape=(1, 2, 3), chunks=(Chunk((0, 0, 0), (1, 2, 3)),))]}
    with pytest.raises(ValueError, match="w1 cannot be drawn as a matrix"):
        block_map(deep, names=["*"])


def test_a_file_that_names_no_rank_is_refused() -> None:
    chunks = {"w1": [DiskChunk(Chunk((0, 0), (10, 4)), "weights.bin")]}
    with pytest.raises(ValueError, match=r"weights\.bin does not say which rank"):
        block_map(tables(), names=["w1"], disk=chunks)


def test_drawing_imports_neither_torch_nor_pyplot() -> None:
    code = (
        "import sys\nfrom labkit.notebook.pictures.mesh_maps import mesh_picture\n"
        "from labkit.spmd.shards.layouts import MeshRecord\n"
        "mesh_picture(MeshRecord(('dp',), (1,), (0,)))\nprint(sorted({'torch', 'matplotlib.pyplot'} & sys.modules.keys()))"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"
