from __future__ import annotations

import base64
import subprocess
import sys
import xml.dom.minidom

import pytest

from labkit.base.ranks import RankResults
from labkit.notebook.drawing.style import rank_style
from labkit.notebook.pictures.shard_maps import shard_map
from labkit.spmd.shards.records import Chunk, ShardRecord


def sharded(name: str, rank: int, rows: tuple[int, int], of: int = 10, columns: tuple[int, int] = (0, 4)) -> ShardRecord:
    chunk = Chunk((rows[0], columns[0]), (rows[1] - rows[0], columns[1] - columns[0]))
    chunks = (chunk,) if chunk.numel else ()
    return ShardRecord(name, (of, 4), "float32", ("Shard(dim=0)",), (2,), ("dp",), (rank,), chunks, 4 * chunk.numel)


def plain(name: str) -> ShardRecord:
    return ShardRecord(name, (6,), "float32", (), (), (), None, (Chunk((0,), (6,)),), 24)


def uneven() -> RankResults[list[ShardRecord]]:
    return RankResults(
        {
            0: [sharded("w", 0, (0, 6)), plain("b"), sharded("v", 0, (0, 1), of=1)],
            1: [sharded("w", 1, (6, 10)), plain("b"), sharded("v", 1, (1, 1), of=1)],
        }
    )


def test_the_table_says_what_each_rank_holds() -> None:
    picture = shard_map(uneven())
    assert picture.columns == ("tensor", "shape", "dtype", "placements", "rank", "holds", "bytes")
    assert picture.rows[:2] == (
        ("w", "10 x 4", "float32", "Shard(dim=0)", "0", "0-5 x 0-3", "96"),
        ("w", "10 x 4", "float32", "Shard(dim=0)", "1", "6-9 x 0-3", "64"),
    )
    assert picture.rows[2][3:6] == ("plain", "0", "0-5")
    assert [row[5] for row in picture.rows if row[0] == "v"] == ["0 x 0-3", "nothing"]


def test_the_alt_text_counts_split_tensors_and_bytes() -> None:
    alt = shard_map(uneven()).alt
    assert "Map of 3 tensors, 2 of them split over the ranks" in alt
    assert "rank 0 136 bytes, rank 1 88 bytes" in alt


def test_each_rank_s_part_has_the_rank_s_colour_and_its_width() -> None:
    picture = shard_map(uneven(), names=["w"])
    document = xml.dom.minidom.parseString(picture.svg)
    widths = {}
    for path in document.getElementsByTagName("path"):
        for rank in (0, 1):
            if f"fill: {rank_style(rank).color.lower()}" in path.getAttribute("style"):
                xs = [float(word) for word in path.getAttribute("d").replace("\n", " ").split() if _is_float(word)][::2]
                widths[rank] = max(xs) - min(xs)
    assert widths.keys() == {0, 1}
    assert widths[0] / widths[1] == pytest.approx(6 / 4, rel=1e-3)


def test_tied_tensors_are_drawn_and_counted_once() -> None:
    from dataclasses import replace

    tables = {rank: [sharded("w", rank, (5 * rank, 5 * rank + 5))] for rank in (0, 1)}
    for rank in (0, 1):
        tables[rank].append(replace(tables[rank][0], name="head", tied_to="w"))
    picture = shard_map(tables)
    assert [row[5:] for row in picture.rows if row[0] == "head"] == [("as w", "0"), ("as w", "0")]
    assert "rank 0 80 bytes" in picture.alt


def test_every_form_of_holding_can_be_drawn() -> None:
    blocks = {
        rank: [
            sharded("quarter", rank, (5 * (rank // 2), 5 * (rank // 2) + 5), columns=(2 * (rank % 2), 2 * (rank % 2) + 2)),
            sharded("pairs", rank, (5 * (rank % 2), 5 * (rank % 2) + 5)),
            sharded("copies", rank, (0, 10)),
            ShardRecord("scalar", (), "int64", (), (), (), None, (Chunk((), ()),), 8),
        ]
        for rank in range(4)
    }
    rows = {(row[0], row[4]): row[5] for row in shard_map(blocks, title="Forms").rows}
    assert rows["quarter", "3"] == "5-9 x 2-3"
    assert rows["pairs", "2"] == "0-4 x 0-3"
    assert rows["copies", "1"] == "0-9 x 0-3"
    assert rows["scalar", "0"] == "all"


def test_a_pattern_chooses_tensors() -> None:
    assert {row[0] for row in shard_map(uneven(), names=["v", "b*"]).rows} == {"v", "b"}
    with pytest.raises(ValueError, match="no tensor matches"):
        shard_map(uneven(), names=["layers.*"])


def test_too_many_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="33 tensors are too many"):
        shard_map({0: [plain(f"t{i}") for i in range(33)]})


def test_a_tensor_that_only_some_ranks_report_is_refused() -> None:
    with pytest.raises(ValueError, match="b is reported by ranks 0 of 0-1 only"):
        shard_map({0: [plain("a"), plain("b")], 1: [plain("a")]})


def test_the_notebook_gets_html_with_alt_text_a_png_and_a_text_twin() -> None:
    picture = shard_map(uneven())
    data, metadata = picture._repr_mimebundle_()
    assert data.keys() == {"text/html", "image/png", "text/plain"}
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert metadata["image/png"]["alt"] == picture.alt
    assert f'alt="{picture.alt}"' in data["text/html"]
    assert "<figcaption" in data["text/html"]
    assert "6-9 x 0-3" in data["text/html"]
    assert "6-9 x 0-3" in data["text/plain"]
    # JupyterLab strips inline SVG from untrusted notebooks; inside an <img> it stays.
    assert "<svg" not in data["text/html"]


def test_names_are_escaped_in_html() -> None:
    html = shard_map({0: [plain("<script>alert(1)</script>")]}).to_html()
    assert "<script>" not in html


def test_the_same_shards_give_the_same_svg() -> None:
    assert shard_map(uneven()).svg == shard_map(uneven()).svg


_WITHOUT_TORCH = """
import sys
from labkit.notebook.pictures.shard_maps import shard_map
from labkit.spmd.shards.records import Chunk, ShardRecord
shard_map({0: [ShardRecord("w", (2,), "float32", (), (), (), None, (Chunk((0,), (2,)),), 8)]})
print(sorted({"torch", "matplotlib.pyplot"} & sys.modules.keys()))
"""


def test_drawing_imports_neither_torch_nor_pyplot() -> None:
    run = subprocess.run([sys.executable, "-c", _WITHOUT_TORCH], check=True, timeout=60, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"


def _is_float(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
