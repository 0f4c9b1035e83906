"""`labkit checkpoint show` describes the values of every kind of checkpoint without running anything."""

from __future__ import annotations

import json
import os
import pty
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

from labkit.checkpoint import verify
from labkit.checkpoint.cli import checkpoint as command

STATE = {
    "model": {"w": torch.ones(2, 2)},
    "epoch": 7,
    "best_loss": 0.25,
    "name": "a run [bold] of\nmany",
    "betas": (0.9, 0.999),
    "milestones": list(range(30)),
    "groups": [[1, 2], [3]],
    "nothing": None,
}


class Attack:
    """Pickles as a call of a function with arguments."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def show(path: Path, *options: str) -> str:
    result = CliRunner().invoke(command, ["show", str(path), *options])
    assert result.exit_code == 0, result.output
    return result.output


def values(path: Path) -> dict[str, dict[str, Any]]:
    return {value["key"]: value for value in json.loads(show(path, "--json"))["values"]}


def rows(path: Path) -> dict[str, str]:
    """The contents in the table of values, by key."""
    table = show(path).split("\n\n")[-1].splitlines()[1:]
    return {line.split()[0]: line.split(None, 1)[1].split("  ")[0] for line in table}


def test_values_of_a_dcp_directory_are_shown_like_those_of_a_torch_save_file(tmp_path: Path) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save(STATE, tmp_path / "x.pt")
    shown = rows(tmp_path / "dcp")
    assert shown == rows(tmp_path / "x.pt")
    assert shown["epoch"] == "7"
    assert shown["betas"] == "(0.9, 0.999)"
    assert shown["milestones"] == "list of 30 items"
    assert shown["name"] == r"'a run [bold] of\nmany'"
    one, other = values(tmp_path / "dcp"), values(tmp_path / "x.pt")
    for key in other:
        for field in ("value", "repr"):
            assert one[key].get(field, "none") == other[key].get(field, "none"), key
    assert one["epoch"]["value"] == 7
    assert one["groups"]["repr"] == "[[1, 2], [3]]"


def test_a_hostile_value_is_named_and_not_run(tmp_path: Path) -> None:
    ran, path = tmp_path / "ran", tmp_path / "dcp"
    attack = Attack(exec, f"open({str(ran)!r}, 'w').close()")
    dcp.save({"w": torch.ones(2), "epoch": 7, "sched": attack}, checkpoint_id=path, no_dist=True)
    assert rows(path)["sched"] == "asks for builtins.exec, not run"
    assert rows(path)["epoch"] == "7"
    assert "names outside the allow-list, not run: builtins.exec" in show(path)
    assert values(path)["sched"]["asks_for"] == ["builtins.exec"]
    assert "value" not in values(path)["sched"]
    assert json.loads(show(path, "--json"))["opaque"] == ["builtins.exec"]
    findings = verify(path).findings
    assert [(finding.code, finding.where) for finding in findings] == [("unsafe", "sched")]
    assert "builtins.exec" in findings[0].what
    assert not ran.exists()


def test_a_value_that_is_not_read_says_why(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2), "large": "x" * 100_000, "lost": 3}, checkpoint_id=tmp_path, no_dist=True)
    assert rows(tmp_path)["large"].endswith("bytes, not read")
    assert rows(tmp_path)["lost"] == "3"
    assert values(tmp_path)["large"]["unread"].endswith("bytes")
    (tmp_path / "__0_0.distcp").unlink()
    assert "missing" in rows(tmp_path)["lost"]
    assert "missing" in values(tmp_path)["lost"]["unread"]


def _doubled(value: Any) -> Any:
    for _ in range(60):
        value = (value, value)  # torch's own flattening never ends with lists
    return value


@pytest.mark.timeout(20)
@pytest.mark.parametrize("value", [_doubled(0), 10**5000], ids=["2**60 items by reference", "5,001 digits"])
def test_a_value_that_is_huge_when_written_out_is_shown_at_once(tmp_path: Path, value: Any) -> None:
    dcp.save({"w": torch.ones(2), "v": value}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save({"w": torch.ones(2), "v": value}, tmp_path / "x.pt")
    assert rows(tmp_path / "dcp")["v"] == rows(tmp_path / "x.pt")["v"]
    assert len(rows(tmp_path / "dcp")["v"]) <= 60
    assert values(tmp_path / "dcp")["v"]["repr"] == values(tmp_path / "x.pt")["v"]["repr"]


def test_more_files_than_a_process_may_open_are_read(tmp_path: Path) -> None:
    for rank in range(120):
        torch.save({f"layer{rank}": torch.full((3,), float(rank))}, tmp_path / f"x_rank{rank}.pt")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        assert verify(tmp_path, workers=1).findings == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_missing_files_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(tmp_path / "all", thread_count=12)
    dcp.save({f"w{number:02}": torch.ones(2) for number in range(12)}, storage_writer=writer, no_dist=True)
    for file in (tmp_path / "all").glob("*.distcp"):
        file.unlink()
    lines = show(tmp_path / "all").splitlines()
    assert sum(line.startswith("missing: ") for line in lines) == 8
    assert any(line.startswith("and 4 more missing files (") for line in lines)
    assert show(tmp_path / "all", "--all").count("\nmissing: ") == 12
    assert len(json.loads(show(tmp_path / "all", "--json"))["missing"]) == 12


@pytest.mark.parametrize("way", ["pipe", "notebook"])
def test_p16_long_name_stays_on_one_line_where_no_terminal_ends_it(tmp_path: Path, way: str) -> None:
    name = "model." + "a_long_module_name." * 15 + "weight"
    torch.save({name: torch.zeros(2)}, tmp_path / "one.pt")
    command = f"{sys.executable} -m labkit checkpoint show {tmp_path / 'one.pt'}"
    if way == "pipe":
        shown = subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout
    else:  # IPython runs ! in a terminal of 80 columns, and a kernel's children know that they are its children
        read, write = pty.openpty()
        done = subprocess.run(command, shell=True, stdout=write, env={**os.environ, "JPY_PARENT_PID": "1"}, check=True)
        assert done.returncode == 0
        os.close(write)
        shown = b"".join(iter(lambda: _read(read), b"")).decode()
        os.close(read)
    assert name in shown


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 4096)
    except OSError:
        return b""
