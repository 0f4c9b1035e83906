"""Invalid arguments of labkit checkpoint: one message, an exit code, and nothing left."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

from labkit.base.lookup import FunctionNotFoundError, find_function
from labkit.checkpoint.convert.rename import Rule, read_names, read_rules
from labkit.cli import main

MODELS = """
import sys
from torch import nn
def good(): return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
def raises(): raise RuntimeError("first line\\nsecond line")
def ends(): sys.exit(3)
def needs(size): return nn.Linear(size, size)
def wrong(): return 3
async def later(): return good()
def recurses(): return recurses()
class NoState(nn.Module):
    def state_dict(self, *args, **kwargs): raise ValueError("no state")
def lazy(): return nn.LazyLinear(3)
number = 3
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arguments")
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    torch.save({"model": model.state_dict(), "epoch": 1}, folder / "full.pt")
    save_file(model.state_dict(), folder / "w.safetensors")
    dcp.save({"model": model.state_dict(), "n": 3}, checkpoint_id=folder / "dcp", no_dist=True)
    (folder / "argument_models.py").write_text(MODELS)
    for name, text in {
        "syntax_x": "def (",
        "exits_x": "raise SystemExit(4)",
        "raises_x": "1 / 0",
        "base_x": "raise BaseException('x')",
    }.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "bytes_x.py").write_bytes(b"\xff\xfe\0")
    (folder / "folder_x.py").mkdir()
    (folder / "empty").mkdir()
    (folder / "file").write_text("x")
    return folder


def contents(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*") if "__pycache__" not in str(path)}


def assert_refused(place: Path, monkeypatch: pytest.MonkeyPatch, *commands: Sequence[Any], code: int | None = None) -> None:
    monkeypatch.chdir(place)
    before = contents(place)
    for command in commands:
        result = CliRunner().invoke(main, ["checkpoint", *map(str, command)])
        assert isinstance(result.exception, SystemExit), (command, result.exc_info, result.output)
        assert result.exit_code in ((1, 2) if code is None else (code,)), (command, result.output)
        assert len(result.output.splitlines()) == 1 or "Usage: " in result.output or "\n  - " in result.output, result.output
        assert "Error: " in result.output
        assert "Traceback" not in result.output
        assert contents(place) == before, command


@pytest.mark.parametrize(
    "model",
    [
        *("", "x", ":", ":f", "x:", "argument_models:nope", "argument_models:number", "no_module_x:f", "a.b.c:f", "..relative:f"),
        *(
            "argument_models:raises",
            "argument_models:ends",
            "argument_models:needs",
            "argument_models:wrong",
            "argument_models:recurses",
        ),
        *(
            "argument_models:NoState",
            "argument_models:lazy",
            "argument_models.py:ends",
            "argument_models:__doc__",
            "sys:exit",
            "os:getcwd",
        ),
        *(
            "syntax_x.py:f",
            "syntax_x:f",
            "exits_x.py:f",
            "exits_x:f",
            "raises_x.py:f",
            "raises_x:f",
            "base_x:f",
            "bytes_x.py:f",
            "folder_x.py:f",
        ),
        *("none.py:f", ".py:f", "/dev/null:f", "x" * 3000 + ":f", "x" * 3000 + ".py:f", "\udcff:f", "a b:f"),
    ],
)
def test_s12_a_model_of_any_wrong_kind_is_one_message(place: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    assert_refused(
        place, monkeypatch, ("verify", "full.pt", f"--model={model}"), ("migrate", "full.pt", "out", f"--model={model}"), code=1
    )


@pytest.mark.filterwarnings("ignore:coroutine")
def test_s12_a_function_that_has_to_be_awaited_is_one_message(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(place, monkeypatch, ("verify", "full.pt", "--model", "argument_models:later"), code=1)


def test_s12_a_module_that_ends_the_process_or_fails_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "ends_here.py").write_text("import sys\nsys.exit(5)\n")
    with pytest.raises(FunctionNotFoundError, match=r"cannot be imported: SystemExit: 5 \(.*ends_here\.py, line 2\)"):
        find_function(f"{tmp_path / 'ends_here.py'}:f")
    import sys

    assert "ends_here" not in sys.modules


@pytest.mark.parametrize(
    "text",
    [
        "",
        "=",
        "*=",
        "=float16",
        "*=nothing",
        "*=nn",
        "*=__class__",
        "*=torch.float16",
        "*=float16\udcff",
        "*=int8",
        "*=qint8",
        "*=int4",
    ],
)
def test_s12_a_dtype_that_is_none_or_does_not_hold_the_values_is_one_message(
    place: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    assert_refused(place, monkeypatch, ("migrate", "full.pt", "out", "--dtype", text))


def test_s12_two_dtypes_for_one_pattern_are_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(place, monkeypatch, ("migrate", "full.pt", "out", "--dtype", "*=float16", "--dtype", "*=float32"), code=1)


@pytest.mark.parametrize(
    "mesh",
    [
        *("", "dp", "dp=", "=2", "dp=0", "dp=-1", "dp=2,dp=2", "dp=x", "dp=\u00b2", "dp=\uff12", "dp=1e3", "dp=2,", "dp=2;tp=2"),
        *(
            "dp=" + "9" * 30,
            "dp=" + "9" * 5000,
            "dp=99999999",
            ",".join(f"a{index}=2" for index in range(40)),
            "dp=2\udcff",
        ),
    ],
)
def test_s12_a_mesh_that_cannot_be_read_or_made_is_one_message(place: Path, monkeypatch: pytest.MonkeyPatch, mesh: str) -> None:
    assert_refused(place, monkeypatch, ("reshard", "full.pt", "out", "--mesh", mesh))


@pytest.mark.parametrize("number", ["0", "-1", "x", "", "1.5", "99999999", "9" * 30, "\u00b2"])
def test_s12_a_number_of_no_ranks_or_workers_is_one_message(place: Path, monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    assert_refused(place, monkeypatch, ("reshard", "full.pt", "out", "--ranks", number))
    if not number.isascii() or not number.isdigit() or number == "0":
        assert_refused(
            place, monkeypatch, ("migrate", "full.pt", "out", "--workers", number), ("verify", "full.pt", "--workers", number)
        )


@pytest.mark.parametrize(
    "rule",
    [
        *("", "tp", "tp:", "tp:*", "tp:*=", ":*=0", "tp:=0", "tp:*=x", "tp:*=\u00b2", "tp:*=--1", "tp:*=1_0", "tp:*= 0"),
        *("tp:*=" + "9" * 30, "tp:*=" + "9" * 5000, "tp:*=9", "tp:*=-9", "dp:*=0", "zz:*=0"),
    ],
)
def test_s12_a_shard_rule_that_cannot_be_read_or_used_is_one_message(
    place: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    assert_refused(place, monkeypatch, ("reshard", "full.pt", "out", "--mesh", "dp=2,tp=2", "--shard", rule), code=1)


@pytest.mark.parametrize(
    "data",
    [b"\xff\xfe\0a", bytes(range(256)), b"no rule", b"->", b"* -> **", b"* -> same", b"* -> ", b"0.\0 -> a"],
    ids=["utf16", "bytes", "no rule", "arrow", "more stars", "one name for all", "drops all", "nul"],
)
def test_s12_a_table_of_names_that_is_none_is_one_message(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    (tmp_path / "table").write_bytes(data)
    if data[:1] != b"0":
        assert_refused(place, monkeypatch, ("migrate", "w.safetensors", "out", "--rename", tmp_path / "table"), code=1)
    if data[0] > 127:
        assert_refused(place, monkeypatch, ("migrate", "full.pt", "out", "--order", tmp_path / "table"), code=1)


def test_s12_a_table_that_never_ends_is_one_message(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for option in ("--rename", "--order"):
        assert_refused(place, monkeypatch, ("migrate", "full.pt", "out", option, "/dev/zero"), code=1)
        assert_refused(place, monkeypatch, ("migrate", "full.pt", "out", option, "empty"), code=2)


def test_s12_a_table_may_come_through_a_pipe() -> None:
    for read, expected in ((read_names, ["a", "b"]), (read_rules, [Rule("a", "b")])):
        reading, writing = os.pipe()
        os.write(writing, b"a\nb\n" if read is read_names else b"a -> b\n")
        os.close(writing)
        assert read(Path(f"/dev/fd/{reading}")) == expected
        os.close(reading)


def test_s12_a_pattern_of_many_stars_takes_no_time() -> None:
    assert Rule("*a" * 100 + "b", "x").apply("a" * 5000) is None
    assert Rule("*.*.weight", "*/*").apply("x.y.z.weight") == "x.y/z"
    assert Rule("a*", "*b").apply("a") == "b"
    assert Rule("ab*ba", "*").apply("aba") is None


@pytest.mark.parametrize(
    "destination",
    [
        *(
            "",
            ".",
            "..",
            "/",
            "full.pt",
            "dcp",
            "empty",
            "file/x",
            "full.pt/x",
            "/proc/nothing/x",
            "/dev/null",
            "/dev/null/x",
        ),
        *("x" * 300, "y/" * 3000 + "z", "x" * 250 + ".pt", "out.xyz"),
    ],
)
@pytest.mark.parametrize("source", ["full.pt", "dcp", "w.safetensors"])
def test_s12_a_destination_that_cannot_be_made_is_one_message(
    place: Path, monkeypatch: pytest.MonkeyPatch, source: str, destination: str
) -> None:
    assert_refused(place, monkeypatch, ("migrate", source, destination))
    if destination != "out.xyz":
        assert_refused(place, monkeypatch, ("reshard", source, destination, "--ranks", "2"), code=1)


def test_s12_a_destination_in_the_source_is_one_message(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for destination in ("dcp/inside", "./dcp/in/side", "empty/../dcp/inside"):
        assert_refused(place, monkeypatch, ("migrate", "dcp", destination), ("reshard", "dcp", destination, "--ranks", "2"), code=1)


@pytest.mark.parametrize("name", ["-x", "--to", "o\nut", "out\udcff", "out put", "\u202eout"])
@pytest.mark.parametrize("to", ["dcp", "torch", "safetensors"])
def test_s12_a_destination_of_an_odd_name_is_made(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, to: str
) -> None:
    monkeypatch.chdir(tmp_path)
    only = ["--only", "model"] if to == "safetensors" else []
    result = CliRunner().invoke(main, ["checkpoint", "migrate", "--to", to, *only, "--", str(place / "full.pt"), name])
    assert result.exit_code == 0, (result.output, result.exc_info)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert CliRunner().invoke(main, ["checkpoint", "verify", "--", name]).exit_code == 0


@pytest.mark.parametrize(
    "source",
    ["none", "empty", "file", "/", "/dev/zero", "/dev/null", "/proc/self/mem", "x" * 300, "y/" * 3000, "full.pt/x", "dcp/none"],
)
def test_s12_a_source_that_is_no_checkpoint_is_one_message(place: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    assert_refused(
        place,
        monkeypatch,
        ("show", source),
        ("verify", "dcp", "--against", source),
        ("migrate", source, "out"),
        ("reshard", source, "out", "--ranks", "2"),
        code=1,
    )


@pytest.mark.parametrize("reason", [errno.EACCES, errno.EROFS, errno.EDQUOT, errno.ENOSPC])
def test_s12_a_place_that_takes_no_files_is_one_message(place: Path, monkeypatch: pytest.MonkeyPatch, reason: int) -> None:
    def refused(path: Any, *_: Any, **__: Any) -> None:
        raise OSError(reason, os.strerror(reason), os.fspath(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", refused)
        assert_refused(place, monkeypatch, ("migrate", "full.pt", "out"), ("reshard", "dcp", "deep/er/out", "--ranks", "2"), code=1)


def test_s12_memory_that_runs_out_is_one_message(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("labkit.checkpoint.formats.catalog.read_torch", refused)
    assert_refused(place, monkeypatch, ("show", "full.pt"), ("verify", "full.pt"), ("migrate", "full.pt", "out"), code=1)
