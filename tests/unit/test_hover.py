"""Texts on the parts of a picture: each lies on its part, and the picture is complete without them."""

from __future__ import annotations

import io
import re

import pytest
from PIL import Image

from labkit.base.ranks import RankResults
from labkit.notebook.drawing.hover import HoverPicture, Spot
from labkit.notebook.drawing.style import rank_style
from labkit.notebook.pictures.mesh_maps import block_map
from labkit.notebook.pictures.shard_maps import shard_map
from labkit.spmd.shards.records import Chunk, ShardRecord


def record(rank: int, rows: tuple[int, int], columns: tuple[int, int] = (0, 4)) -> ShardRecord:
    chunk = Chunk((rows[0], columns[0]), (rows[1] - rows[0], columns[1] - columns[0]))
    return ShardRecord("layers.0.w", (10, 4), "float32", ("Shard(dim=0)",), (2,), ("dp",), (rank,), (chunk,), 4 * chunk.numel)


def uneven() -> RankResults[list[ShardRecord]]:
    return RankResults({0: [record(0, (0, 6))], 1: [record(1, (6, 10))]})


def color_at(picture: HoverPicture, spot: Spot, x: float = 0.1, y: float = 0.5) -> str:
    """The colour that the picture has under a point of a spot."""
    image = Image.open(io.BytesIO(picture.png)).convert("RGB")
    place = ((spot.left + x * spot.width) * image.width, (spot.top + y * spot.height) * image.height)
    return "#{:02X}{:02X}{:02X}".format(*image.getpixel((int(place[0]), int(place[1]))))


def test_a_shard_map_tells_name_shape_placements_rows_and_bytes_of_each_part() -> None:
    picture = shard_map(uneven())
    assert isinstance(picture, HoverPicture)
    assert [spot.text for spot in picture.spots] == [
        "layers.0.w\n10 x 4, float32, Shard(dim=0)\nrank 0: 0-5 x 0-3, 96 bytes",
        "layers.0.w\n10 x 4, float32, Shard(dim=0)\nrank 1: 6-9 x 0-3, 64 bytes",
    ]


@pytest.mark.parametrize("draw", [shard_map, block_map], ids=["shard_map", "block_map"])
def test_the_words_lie_on_the_part_of_their_rank(draw: object) -> None:
    assert callable(draw)
    picture = draw(uneven(), names=["*"])
    for rank, spot in enumerate(picture.spots):
        assert f"rank {rank}: " in spot.text
        assert color_at(picture, spot, y=0.15) == rank_style(rank).color
        assert 0 <= spot.left < spot.left + spot.width <= 1
        assert 0 <= spot.top < spot.top + spot.height <= 1


def test_a_part_that_all_hold_is_told_once_with_the_bytes_of_each() -> None:
    chunk = Chunk((0,), (6,))
    copies = RankResults(
        {rank: [ShardRecord("norm", (6,), "float32", ("Replicate()",), (2,), ("dp",), (rank,), (chunk,), 24)] for rank in (0, 1)}
    )
    (spot,) = shard_map(copies).spots  # type: ignore[attr-defined]
    assert spot.text == "norm\n6, float32, Replicate()\nranks 0-1, each: 0-5, 24 bytes"


def test_the_page_holds_one_box_per_part_over_one_image_and_nothing_new_for_screen_readers() -> None:
    picture = shard_map(uneven())
    page = picture.to_html()
    assert page.count("<img") == 1
    assert page.count('<span aria-hidden="true" title="') == 2
    assert "&#10;rank 1: 6-9" in page
    assert re.search(r"position:absolute;left:\d+\.\d\d%;top:", page)
    assert all(str(row[5]) in page for row in picture.rows)  # the table has it too
    assert "<span" not in picture.to_text()
