"""The picture of a checkpoint shows its bytes by file, and nothing in a name becomes markup."""

from __future__ import annotations

from pathlib import Path

import torch

from labkit.checkpoint import open_checkpoint
from labkit.checkpoint.views.picture import file_shares


def test_bytes_by_file_and_part(tmp_path: Path) -> None:
    state = {
        "model": {"<b>w</b>\x1b[2J": torch.ones(4), "v": torch.ones(2)},
        "optim": {"state": {"w": {"exp_avg": torch.ones(4)}}, "param_groups": []},
    }
    torch.save(state, tmp_path / "x.pt")
    checkpoint = open_checkpoint(tmp_path / "x.pt")
    assert file_shares(checkpoint) == {"x.pt": {"model": 24, "optimizer": 16}}
    html = checkpoint._repr_html_()
    assert "&lt;b&gt;w&lt;/b&gt;\\x1b[2J" in html
    assert "\x1b" not in html
    assert "40 B" in html
    assert "<svg" not in html  # JupyterLab takes it out of a notebook that comes from elsewhere
    assert 'alt="Bytes by file: x.pt 40 B"' in html


def test_a_long_name_breaks_after_its_points_only(tmp_path: Path) -> None:
    torch.save({"model": {"layers.0.wq.weight": torch.ones(400)}}, tmp_path / "x.pt")
    html = open_checkpoint(tmp_path / "x.pt")._repr_html_()
    assert ">model.<wbr>layers.<wbr>0.<wbr>wq.<wbr>weight<" in html
    assert ">1.6 KiB<" in html
