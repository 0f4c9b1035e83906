"""A notebook written as a script: the conversion of each kind of cell, and refusals."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from click.testing import CliRunner
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import labkit
from labkit.cli import main
from labkit.course.files import NotebookError, read_notebook
from labkit.course.script import ScriptError, write_script
from labkit.notebook.views.rank_names import OPTIONS
from labkit.spmd.script.cells import future_flags, run_cell, text_of

NOBODY = 65534


@pytest.fixture
def script_of(tmp_path: Path) -> Any:
    """Write cells (source, or source and tag) as a notebook, and return its script from the first cell on."""

    def write(*cells: str | tuple[str, str]) -> str:
        pairs = [(cell, "") if isinstance(cell, str) else cell for cell in cells]
        code = [new_code_cell(source, metadata={"tags": [tag]} if tag else {}, id=f"c{n}") for n, (source, tag) in enumerate(pairs)]
        path = tmp_path / "07_sample.ipynb"
        nbformat.write(new_notebook(cells=[new_markdown_cell("# 07 Sample", id="m0"), *code]), path)
        script = write_script(path)
        compile(script, "script", "exec")
        head, _, rest = script.partition("job = Job.start(globals())\n")
        assert head.startswith('"""The cells of 07_sample.ipynb')
        assert rest.endswith("\n\njob.end()\n")
        return rest.removesuffix("\n\njob.end()\n")

    return write


def lines(script: str) -> list[str]:
    return [line for line in script.splitlines() if line and not line.startswith(("# Cell", "job.cell("))]


def test_every_option_of_the_magic_is_known(script_of: Any) -> None:
    values = {"--ranks": "0", "--timeout": "3", "--out": "x", "--needs": "2", "--expect": "RankFailedError", "--tabs": ""}
    assert values.keys() == set(OPTIONS)
    for option, value in values.items():
        script_of(f"%%spmd {option} {value}\n1")


def test_an_spmd_cell_is_plain_code_and_its_last_expression_is_shown(script_of: Any) -> None:
    assert lines(script_of("%%spmd\nx = rank  # mine\nx + 1")) == ["# %%spmd", "x = rank  # mine", "job.show(x + 1)"]


def test_a_tuple_is_shown_as_one_value(script_of: Any) -> None:
    assert lines(script_of("%%spmd\n1, 2"))[-1] == "job.show((1, 2))"


def test_an_expression_over_several_lines_stays_whole_and_what_stands_before_it_on_the_line_runs_first(script_of: Any) -> None:
    assert lines(script_of("%%spmd\na = 1; max(\n    a,\n    2,\n)"))[1:] == ["a = 1", "job.show(max(", "    a,", "    2,", "))"]


def test_columns_are_counted_in_bytes_as_python_does(script_of: Any) -> None:
    assert lines(script_of("%%spmd\nä = 'ö'; ä"))[1:] == ["ä = 'ö'", "job.show(ä)"]


@pytest.mark.parametrize("source", ["%%spmd\nx = 1", "%%spmd\nx;"])
def test_a_statement_or_a_semicolon_shows_nothing(script_of: Any, source: str) -> None:
    assert "job.show" not in script_of(source)


def test_print_stays_as_it_is(script_of: Any) -> None:
    assert lines(script_of("%%spmd\nprint(rank)"))[-1] == "print(rank)"


def test_out_hands_the_value_to_the_notebook_s_own_process(script_of: Any) -> None:
    assert lines(script_of("%%spmd --out found\nx = 1\nx"))[1:] == ["x = 1", "job.keep('found', x)"]
    assert lines(script_of("%%spmd --out found\nx = 1"))[1:] == ["x = 1", "job.keep('found', None)"]


def test_a_cell_for_some_ranks_is_guarded_and_what_it_shows_travels_outside_of_the_guard(script_of: Any) -> None:
    expected = ["_value = None", "if rank in (0, 1, 3):", "    x = 1", "    _value = x", "job.show(_value, ranks=(0, 1, 3))"]
    assert lines(script_of("%%spmd --ranks 0-1,3\nx = 1\nx"))[1:] == expected
    assert lines(script_of("%%spmd --ranks 0\nx = 1"))[1:] == ["if rank in (0,):", "    x = 1"]
    assert lines(script_of("%%spmd --ranks 0\nprint(1)"))[1:] == ["if rank in (0,):", "    print(1)"]


def test_a_guard_does_not_indent_what_stands_inside_of_a_string(script_of: Any) -> None:
    script = script_of('%%spmd --ranks 0\ntext = """a\nb"""\nlen(text)')
    namespace: dict[str, Any] = {"rank": 0, "job": Recorder()}
    exec(script, namespace)
    assert namespace["text"] == "a\nb"


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def cell(self, name: str) -> None: ...

    def show(self, value: Any, ranks: Any = None) -> None:
        self.calls.append(("show", value))


def test_too_few_ranks_skip_the_cell_with_all_that_it_hands_on(script_of: Any) -> None:
    expected = ["if world_size >= 4:", "    x = 1", "    job.keep('y', x)", "else:", "    job.skip(4)"]
    assert lines(script_of("%%spmd --needs 4 --out y\nx = 1\nx"))[1:] == expected


def test_a_cell_that_teaches_a_failure_is_left_out_with_its_reason(script_of: Any) -> None:
    script = script_of("%%spmd --needs 2 --timeout {timeout_s} --expect RunTimeoutError\nboom()")
    assert "boom" not in script
    assert "# Left out: it teaches a failure, RunTimeoutError." in script


def test_d_a_future_import_comes_first_once_and_in_order_with_the_docstring_before_it(tmp_path: Path) -> None:
    cells = [
        "# -*- coding: latin-1 -*-\nfrom __future__ import annotations\nkernel = 1",
        "%%spmd\nfrom __future__ import (\n    generator_stop,\n    annotations,  # twice\n)\ndef f(x: Missing): return 'ä'",
        "%%spmd\nx = 1; from __future__ import annotations; y = 2\ny",
    ]
    path = tmp_path / "07_sample.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell(cell, id=f"c{n}") for n, cell in enumerate(cells)]), path)
    script = write_script(path)
    tree = ast.parse(script)
    compile(tree, "script", "exec")
    assert ast.get_docstring(tree).startswith("The cells of 07_sample.ipynb")
    hoisted = [ast.unparse(statement) for statement in tree.body[1:4]]
    assert hoisted == [
        "from __future__ import generator_stop", "from __future__ import annotations", "from labkit.spmd.script.torchrun import Job"
    ]  # fmt: skip
    assert lines(script.split("c1 -", 1)[1])[1:3] == ["# %%spmd", "def f(x: Missing): return 'ä'"]
    assert lines(script.split("c2 -", 1)[1])[1:] == ["# %%spmd", "x = 1; pass; y = 2", "job.show(y)", "job.end()"]


def test_d_a_cell_has_the_features_it_imports_and_those_of_cells_before_it_and_no_others() -> None:
    namespace: dict[str, Any] = {}
    assert run_cell("def f(x: int): ...\nf.__annotations__", "cell", namespace) == {"x": int}
    late = "y = 1\nfrom __future__ import annotations\ndef f(x: int): ...\nf.__annotations__"
    assert run_cell(late, "cell", namespace) == {"x": "int"}
    assert run_cell("def f(x: int): ...\nf.__annotations__", "cell", namespace, future_flags(ast.parse(late))) == {"x": "int"}


@pytest.mark.parametrize(
    ("source", "what"),
    [("x = '\ud800'\nfrom __future__ import nonsense", "no such feature"), ("x = 1\x00", "null byte"), ("(" * 300, "")],
)
def test_s12_a_cell_that_python_cannot_read_is_refused_with_its_name(script_of: Any, source: str, what: str) -> None:
    source = source.replace("\ud800", "")
    with pytest.raises(ScriptError, match=r"07_sample\.ipynb, cell c0: ") as caught:
        script_of(source)
    assert what in str(caught.value)


@pytest.mark.parametrize("spelling", ["lab.ipynb", "./x/../lab.ipynb", "link.ipynb", "hard.ipynb", "sub/lab.ipynb"])
def test_s5_a_script_is_not_written_over_its_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("x", "sub"):
        (tmp_path / folder).mkdir()
    nbformat.write(new_notebook(cells=[new_code_cell("1 + 1", id="c0")]), "lab.ipynb")
    before = Path("lab.ipynb").read_bytes()
    Path("link.ipynb").symlink_to("lab.ipynb")
    Path("hard.ipynb").hardlink_to("lab.ipynb")
    Path("sub/lab.ipynb").symlink_to(tmp_path / "lab.ipynb")
    told = CliRunner().invoke(main, ["script", "lab.ipynb", "-o", spelling])
    assert told.exit_code == 1
    assert "itself, which would be overwritten" in told.output
    assert Path("lab.ipynb").read_bytes() == before


def test_s5_a_script_replaces_an_earlier_script_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    nbformat.write(new_notebook(cells=[new_code_cell("1 + 1", id="c0")]), "lab.ipynb")
    for _ in range(2):
        assert CliRunner().invoke(main, ["script", "lab.ipynb", "-o", "lab.py"]).exit_code == 0
    Path("mine.py").write_text("mine")
    Path("link.py").symlink_to("mine.py")
    for name, what in (("mine.py", "was not written by this command"), ("link.py", "is a link")):
        told = CliRunner().invoke(main, ["script", "lab.ipynb", "-o", name])
        assert told.exit_code == 1
        assert what in told.output
    assert Path("mine.py").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lab.ipynb", "lab.py", "link.py", "mine.py"]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    nbformat.write(new_notebook(cells=[new_code_cell("1 + 1", id="c0")]), "lab.ipynb")
    return "lab.ipynb"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("with_reader", [True, False])
def test_s5_a_fifo_in_a_script_s_place_is_refused_and_gets_nothing(lab: str, with_reader: bool) -> None:
    os.mkfifo("lab.py")
    reader = os.open("lab.py", os.O_RDONLY | os.O_NONBLOCK) if with_reader else None
    told = CliRunner().invoke(main, ["script", lab, "-o", "lab.py"])
    assert told.exit_code == 1
    assert "lab.py is a FIFO, and nothing is written to it. Move it away, or choose another place." in told.output
    assert "Run it" not in told.output
    if reader is not None:
        assert os.read(reader, 1) == b""
        os.close(reader)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")
@pytest.mark.parametrize("kind", ["file", "link", "linked folder", "shared folder"])
def test_s5_a_script_replaces_no_file_and_follows_no_link_of_another_user(lab: str, tmp_path: Path, kind: str) -> None:
    for folder in ("shared", "private"):
        (tmp_path / folder).mkdir()
        os.chown(folder, NOBODY, NOBODY)
    place, private = Path("shared/lab.py"), Path("private/lab.py")
    for path in (place, private):
        assert CliRunner().invoke(main, ["script", lab, "-o", str(path)]).exit_code == 0  # one that it would replace
    private.write_text(private.read_text() + "# mine")
    before = private.read_bytes()
    if kind == "file":
        os.chown(place, NOBODY, NOBODY)
    elif kind == "link":
        place.unlink()
        place.symlink_to(private.absolute())
    elif kind == "linked folder":
        Path("shared").rename("away")
        Path("shared").symlink_to("private")
        os.chown("shared", NOBODY, NOBODY, follow_symlinks=False)
    told = CliRunner().invoke(main, ["script", lab, "-o", str(place)])
    assert told.exit_code == (0 if kind == "shared folder" else 1), told.output
    if kind != "shared folder":
        assert {"file": "belongs to another user", "link": "is a link"}.get(kind, "that another user has made") in told.output
    assert private.read_bytes() == before


@pytest.mark.parametrize("place", ["/dev/stdout", "/dev/fd/{}", "/proc/self/fd/{}"])
def test_a_script_goes_into_what_the_shell_has_opened(lab: str, place: str) -> None:
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "labkit", "script", lab, "-o", place.format(writing)]
    env = os.environ | {"PYTHONPATH": str(Path(labkit.__file__).parents[1])}
    done = subprocess.run(command, stdout=subprocess.PIPE, pass_fds=[writing], env=env, check=True)
    os.close(writing)
    with open(reading, "rb") as piped:
        assert piped.read() + done.stdout == write_script(Path(lab)).encode()


def test_a_limit_of_time_alone_is_dropped_and_the_cell_stays(script_of: Any) -> None:
    script = script_of("%%spmd --timeout 5\nwork()")
    assert "job.show(work())" in script
    assert "nobody watches" in script


def test_cells_of_the_notebook_s_own_process_are_text_for_rank_0_without_labkit_s_magics(script_of: Any) -> None:
    script = script_of(("world_size = 4", "parameters"), "%load_ext labkit\npool = labkit.WorkerPool(world_size)\n%pool\npool")
    sources = {call.args[0].value: call for call in _calls(script, "kernel")}
    assert ast.literal_eval(sources["c0"].args[1]).strip() == "world_size = 4"
    assert [keyword.arg for keyword in sources["c0"].keywords] == ["parameters"]
    assert ast.literal_eval(sources["c1"].args[1]).strip() == "pool = script_pool(world_size)\npool"


@pytest.mark.parametrize("source", ["a = '''x'''\nb = \"\"\"y\"\"\"", "a = 'back\\\\slash'", "'end'"])
def test_any_source_comes_through_its_literal_unchanged(script_of: Any, source: str) -> None:
    (call,) = _calls(script_of(source), "kernel")
    assert ast.literal_eval(call.args[1]).strip("\n") == source


def _calls(script: str, name: str) -> list[ast.Call]:
    found = [node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Call)]
    return [call for call in found if isinstance(call.func, ast.Attribute) and call.func.attr == name]


def test_a_cell_tagged_notebook_only_is_left_out(script_of: Any) -> None:
    assert "look" not in script_of(("look()", "notebook-only"))


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("!ls", "a magic or `!`"),
        ("%%spmd\n%timeit 1", "a magic or `!`"),
        ("%%spmd\nx = = 1", "in line 1"),
        ("%%spmd\nawait x", "'await' outside function"),
        ("%%spmd --ranks {some}\n1", "--ranks {some} is not known"),
        ("%%spmd --colour red\n1", "no option --colour red"),
        ("%%spmd --needs many\n1", "cannot be read"),
    ],
)
def test_what_cannot_be_part_of_a_script_is_refused_with_the_cell(script_of: Any, source: str, what: str) -> None:
    with pytest.raises(ScriptError) as caught:
        script_of("1", source)
    assert "07_sample.ipynb, cell c1: " in str(caught.value)
    assert what in str(caught.value)


def test_the_command_writes_a_file_or_the_standard_output_and_names_what_it_refuses(tmp_path: Path) -> None:
    path = tmp_path / "08_other.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("%%spmd\n1 + 1", id="c0")]), path)
    to_stdout = CliRunner().invoke(main, ["script", str(path)])
    to_file = CliRunner().invoke(main, ["script", str(path), "-o", str(tmp_path / "out.py")])
    assert "torchrun" in to_file.output
    assert to_stdout.output == (tmp_path / "out.py").read_text() == write_script(path)
    nbformat.write(new_notebook(cells=[new_code_cell("!ls", id="c0")]), path)
    refused = CliRunner().invoke(main, ["script", str(path)])
    assert refused.exit_code == 1
    assert "cell c0" in refused.output


def test_a_parameter_of_the_command_line_comes_after_the_notebook_s_own(tmp_path: Path) -> None:
    path = tmp_path / "08_other.ipynb"
    cell = new_code_cell("size = 1  # of it", id="c0", metadata={"tags": ["parameters"]})
    nbformat.write(new_notebook(cells=[cell]), path)
    text = write_script(path, {"size": [2, "x"]})
    assert "size = 1  # of it\nsize = [2, 'x']\n" in text
    refused = CliRunner().invoke(main, ["script", str(path), "-p", "sizes", "3"])
    assert refused.exit_code == 1
    assert "has no parameter 'sizes'. Did you mean 'size'?" in refused.output


@pytest.mark.parametrize("content", ["", "{", '{"cells": 3}', "[]"])
def test_what_is_no_notebook_or_cannot_be_written_is_told_in_a_line(tmp_path: Path, content: str) -> None:
    bad, good = tmp_path / "bad.ipynb", tmp_path / "good.ipynb"
    bad.write_text(content)
    nbformat.write(new_notebook(cells=[new_code_cell("1 + 1", id="c0")]), good)
    for arguments, what in (
        ([str(bad)], "bad.ipynb is not a valid notebook"),
        ([str(good), "-o", str(tmp_path / "no/x.py")], "No such file"),
    ):
        told = CliRunner().invoke(main, ["script", *arguments])
        assert told.exit_code == 1
        assert what in told.output
        assert "Traceback" not in told.output


@pytest.mark.parametrize(
    ("source", "value"), [("x = 1\nx + 1", 2), ("x = 1", None), ("3;", None), ("3  # a; b", 3), ("", None), ("'a;'", "a;")]
)
def test_a_cell_gives_the_value_of_its_last_expression(source: str, value: Any) -> None:
    assert run_cell(source, "<cell>", {}) == value


def test_markdown_is_shown_as_its_source_and_the_rest_as_ipython_prints_it() -> None:
    from IPython.display import Markdown

    assert text_of(Markdown("| a |")) == "| a |"
    assert text_of({"b": 1, "a": "x"}) == "{'b': 1, 'a': 'x'}"


def test_what_a_value_shows_as_a_whole_comes_before_its_repr() -> None:
    class Picture:
        def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
            return {"text/html": "<svg>", "text/plain": "in words"}

        def __repr__(self) -> str:
            return "Picture(svg='...')"

    assert text_of(Picture()) == "in words"


def test_h6_a_fifo_in_a_notebook_s_place_is_refused_and_holds_no_command(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lab.ipynb")
    with pytest.raises(NotebookError, match="is a FIFO, and was not opened"):
        read_notebook(tmp_path / "lab.ipynb")
