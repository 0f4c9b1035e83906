"""Names from files and paths reach a terminal spelled out, in errors, findings, notes and tables."""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from labkit.base.plain_text import printable
from labkit.checkpoint import CheckpointError, open_checkpoint, verify
from labkit.checkpoint.errors import FQNMismatchError, UnsafeCheckpointError
from labkit.cli import main

# Clears the screen, sets the title, fakes a line, turns the reading direction, hides what follows.
EVIL = "\x1b[2J\x1b]0;owned\x07\nx.pt: ok\r\u202egnp\u2066\u200b\u0085\x9b31m\u2028\x7f"


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])


def assert_tame(result: Result) -> None:
    assert isinstance(result.exception, SystemExit | None), result.exception
    assert not [char for char in result.output if not char.isprintable() and char != "\n"]
    assert "\nx.pt: ok" not in result.output


def test_s11_each_character_that_cannot_be_seen_is_spelled_out() -> None:
    assert printable(EVIL).isprintable()
    assert printable(printable(EVIL)) == printable(EVIL)
    assert printable("größe/层.weight") == "größe/层.weight"
    assert printable("a\udc80") == r"a\udc80"


def test_s11_an_errors_text_is_printable_wherever_it_is_shown() -> None:
    errors = [
        CheckpointError(EVIL),
        UnsafeCheckpointError(EVIL, [EVIL]),
        FQNMismatchError(EVIL, missing=[EVIL], unexpected=[EVIL], problems=[EVIL], advice=EVIL),
    ]
    for error in errors:
        shown = "".join(traceback.format_exception_only(error))
        assert printable(shown, keep="\n") == shown
        assert "\nx.pt: ok" not in shown
    assert str(errors[2]).count("\n") == 4


def hostile_names(folder: Path) -> list[Path]:
    """Checkpoints of each kind with such names in all places that they have."""
    inside = EVIL.replace("/", "")
    torch.save({"model": {EVIL: torch.ones(2)}, "note": EVIL, EVIL: 1}, folder / f"{inside}.pt")
    save_file({EVIL: torch.ones(2), "b": torch.zeros(1)}, folder / f"{inside}.safetensors", metadata={EVIL: EVIL})
    dcp.save({EVIL: torch.ones(2), "n": EVIL}, checkpoint_id=folder / f"d{inside}", no_dist=True)
    (folder / f"i{inside}").mkdir()
    (folder / f"i{inside}" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {EVIL: f"{inside}.safetensors"}}))
    (folder / f"{inside}.bin").write_text("no checkpoint")
    return sorted(folder.iterdir())


def test_s11_no_command_lets_a_name_drive_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number, path in enumerate(hostile_names(tmp_path / "in")):
        out = tmp_path / f"out{number}{EVIL}"
        for arguments in (
            ("show", path),
            ("show", path, "--chunks", "--json"),
            ("show", path, EVIL),
            ("verify", path),
            ("verify", path, "--model", EVIL),
            ("verify", path, "--against", path.with_name("absent" + EVIL)),
            ("migrate", path, out),
            ("migrate", path, out, "--drop", EVIL, "--rename", EVIL),
            ("migrate", path, f"{out}b", "--drop", EVIL, "--drop", "b" + EVIL),
            ("reshard", path, f"{out}c", "--mesh", EVIL),
            ("reshard", path, f"{out}d", "--mesh", "dp=1,tp=1", "--shard", f"tp:{EVIL}=0"),
        ):
            assert_tame(run(*arguments))


def test_s11_a_file_name_taken_for_an_option_does_not_drive_the_terminal() -> None:
    assert_tame(run("show", "-\x1b[31m"))
    assert_tame(CliRunner().invoke(main, ["\x1b[31m"]))


def test_s11_a_name_that_is_no_utf8_is_shown(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe.pt"))
    try:
        torch.save({"w": torch.ones(1)}, tmp_path / "x.pt")
        (tmp_path / "x.pt").rename(path)
    except OSError:
        pytest.skip("this file system takes UTF-8 only")
    for arguments in (("show", path), ("verify", path), ("migrate", path, tmp_path / "out"), ("show", path.with_suffix(".bin"))):
        result = run(*arguments)
        assert_tame(result)
        assert r"\udcff\udcfe" in result.output or arguments[0] == "migrate"
    assert verify(path).ok
    assert list(open_checkpoint(path).tensors) == ["w"]
