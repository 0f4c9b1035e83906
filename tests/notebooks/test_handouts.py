"""Handouts: students' files hold no solution, and pages open offline and print completely."""

from __future__ import annotations

import hashlib
import html.parser
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import nbformat
import pytest
from bs4 import BeautifulSoup
from click.testing import CliRunner, Result
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labkit.base import machine
from labkit.cli import main
from labkit.course.handouts import build
from labkit.course.handouts.build import Handouts, make_handouts
from labkit.course.handouts.copies.cells import is_executed
from labkit.course.handouts.copies.instructor import instructor_copy
from labkit.course.handouts.copies.mistakes import Mistake, checks_in
from labkit.course.handouts.copies.solutions import Secrets, require_paired_markers, solution_lines, with_holes
from labkit.course.handouts.copies.student import student_copy
from labkit.course.handouts.errors import HandoutError, SolutionLeakError
from labkit.course.handouts.pages.page import make_page, prose
from labkit.course.handouts.pages.print_page import make_print_page
from tests.conftest import MakeNotebook
from tests.matrix import matrix
from tests.notebooks.conventions import NOTEBOOKS

SOLUTION = "    pieces = list(t.chunk(secret_count))\n    return torch.cat(pieces[::-1])"
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
SECRET = "pieces = list(t.chunk(secret_count))"
LONG_END = "the_end_of_a_long_line"
WIDE = f'<pre style="white-space:pre;overflow-x:auto">{"y" * 200} the_end_of_a_wide_table</pre>'
WIDGET = "application/vnd.jupyter.widget-view+json"


def _code(source: str, *outputs: NotebookNode, count: int = 1, tags: tuple[str, ...] = (), **metadata: Any) -> NotebookNode:
    return new_code_cell(source, outputs=list(outputs), execution_count=count, metadata={"tags": list(tags), **metadata})


def _stream(text: str) -> NotebookNode:
    return new_output("stream", name="stdout", text=text)


def _executed() -> NotebookNode:
    """A lab as papermill leaves it, with lines of its solution in every place where one can hide."""
    timed = {"papermill": {"duration": 2.4, "log": SECRET}}
    traceback = f"\x1b[0;31mNameError\x1b[0m\n----> 2     {SECRET}"
    widget = new_output(
        "display_data", data={WIDGET: {"model_id": "m1"}, "text/plain": "Output()", "text/html": f"<b>{SECRET}</b>"}
    )
    state = {"m1": {"state": {"outputs": [{"output_type": "stream", "name": "stdout", "text": [f"    {SECRET}\n", "x"]}]}}}
    cells = [
        new_markdown_cell("# 07 A lab\n\nAfter this lab you can cut.\n\n| | |\n|---|---|\n| **Takes** | a minute |"),
        _code("world_size = 2  # ranks", tags=("parameters",)),
        _code("world_size = 3", tags=("injected-parameters",)),
        new_markdown_cell(
            "## What is cut?\n\nEach rank gets $\\lceil N / R \\rceil$ rows, see [the guide](https://example.org/guide).\n\n"
            "**Predict first.** How many rows has rank 2?"
        ),
        _code("rows", _stream("the predicted number is 4242\n"), **timed),
        new_markdown_cell("**What to notice.** The answer is four thousand.\n\nMore rows follow."),
        new_markdown_cell("## Long lines"),
        _code("print('x' * 300)", _stream("x" * 300 + f" {LONG_END}\n")),
        _code("wide()", new_output("display_data", data={"text/html": WIDE, "text/plain": "wide"})),
        new_markdown_cell("### Exercise 1: cut ★\n\nWrite `cut`.\n\n<details><summary>Hint</summary>Use `chunk`.</details>"),
        _code(
            f"def cut(t):\n    ### BEGIN SOLUTION\n{SOLUTION}\n    ### END SOLUTION",
            _stream("solved output"),
            tags=("exercise",),
            **timed,
        ),
        _code("print(lab00.check_mean_loss(pool))", _stream("Solved: 17.5 on every rank.\n"), tags=("check",), **timed),
        _code("cut(None)", new_output("error", ename="NameError", evalue="t", traceback=traceback.split("\n")), tags=("fault",)),
        _code("show()", widget),
        new_markdown_cell("## Summary"),
        _code("Markdown(f'No, it is {gap}')", _stream("the recap gives 99.25 away"), tags=("recap",)),
    ]
    for number, cell in enumerate(cells):
        cell.id = f"L7-{number:02}"
    return new_notebook(
        cells=cells,
        metadata={
            "papermill": {"parameters": {"world_size": 3}, "exception": None, "note": SECRET},
            "widgets": {"application/vnd.jupyter.widget-state+json": {"state": state}},
        },
    )


@dataclass
class Made:
    handouts: Handouts


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("handouts")
    nbformat.write(_executed(), folder / "07_lab.ipynb")
    return Made(make_handouts([folder / "07_lab.ipynb"], folder / "out"))


def _student_texts(made: Made) -> Iterator[tuple[str, str]]:
    """Every students' file and everything in their zip, as text."""
    for path in sorted(made.handouts.folders["student"].iterdir()):
        yield path.name, _pdf_text(path) if path.suffix == ".pdf" else path.read_text(encoding="utf-8")
    with zipfile.ZipFile(made.handouts.zips["student"]) as packed:
        for name in packed.namelist():
            # Bytes of a compressed file can spell any number; its text has been looked at.
            if name.endswith(".pdf"):
                assert packed.read(name) == (made.handouts.folders["student"] / Path(name).name).read_bytes()
            else:
                yield name, packed.read(name).decode("utf-8", errors="replace")


def _pdf_text(path: Path) -> str:
    if shutil.which("pdftotext") is None:
        pytest.skip("needs pdftotext: apt-get install poppler-utils")
    return subprocess.run(["pdftotext", "-layout", path, "-"], capture_output=True, text=True, check=True, timeout=60).stdout


def _letters(text: str) -> str:
    """Strip markup, entities, escapes and blanks, so that a line is found however it was wrapped or coloured."""
    text = re.sub(r"<[^>]*>", "", text)
    return re.sub(r"\s|\\n|\\", "", text.replace("&#39;", "'").replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">"))


def test_no_line_of_a_solution_is_in_any_students_file(made: Made) -> None:
    lines = [line.strip() for line in SOLUTION.splitlines()]
    texts = dict(_student_texts(made))
    assert {Path(name).suffix for name in texts} >= {".ipynb", ".html"}
    assert not [(name, line) for name, text in texts.items() for line in lines if _letters(line) in _letters(text)]
    instructor = (made.handouts.folders["instructor"] / "07_lab.html").read_text()
    assert all(_letters(line) in _letters(instructor) for line in lines)  # the search finds what is there


@pytest.mark.parametrize("given_away", ["solved output", "17.5", "4242", "99.25", "Output()"])
def test_outputs_that_give_an_exercise_or_a_prediction_away_are_in_no_students_file(made: Made, given_away: str) -> None:
    assert not [name for name, text in _student_texts(made) if given_away in text]


def test_a_students_notebook_has_holes_an_open_prediction_and_no_trace_of_the_run(made: Made) -> None:
    path = made.handouts.folders["student"] / "07_lab.ipynb"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    sources = [cell.source for cell in notebook.cells]
    assert "def cut(t):\n    # YOUR CODE HERE\n    raise NotImplementedError" in sources
    assert sources[sources.index("**Your prediction:**") - 1].endswith("How many rows has rank 2?")
    assert any(
        "<details><summary>What to notice: open this" in source and source.endswith("More rows follow.") for source in sources
    )
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert all(set(cell.metadata) <= {"tags", "jupyter"} for cell in notebook.cells)
    assert "world_size = 3" not in sources
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    (kept,) = [cell for cell in notebook.cells if cell.source.startswith("print('x'")]
    assert LONG_END in kept.outputs[0].text


def test_the_answers_in_a_summary_s_source_are_folded_in_notebooks_and_on_no_page(made: Made) -> None:
    for audience, folder in made.handouts.folders.items():
        notebook = nbformat.read(folder / "07_lab.ipynb", as_version=4)
        assert notebook.cells[-1].metadata["jupyter"] == {"source_hidden": True}
        page = (folder / "07_lab.html").read_text()
        assert "No, it is" not in page
        assert ("The summary, with the numbers of your run, stands here when the notebook has run" in page) == (
            audience == "student"
        )
        assert ("99.25" in page) == (audience == "instructor")


def test_the_instructors_notebook_says_what_to_expect_how_long_it_takes_and_what_goes_wrong(made: Made) -> None:
    notebook = nbformat.read(made.handouts.folders["instructor"] / "07_lab.ipynb", as_version=4)
    plan, exercise = [cell.source for cell in notebook.cells if "instructor" in cell.metadata.get("tags", ())]
    assert "`world_size = 3`" in plan
    assert "All cells together ran for 7 s." in plan
    assert "200 words of text a minute, 2 minutes a prediction, 5 minutes a star of an exercise" in plan
    assert "| What is cut? | 2 min | 1 prediction | 1 | 2 s |" in plan
    assert "| Exercise 1: cut ★ | 5 min | 1 exercise | 4 | 5 s |" in plan
    assert "Exercise 1: cut" in exercise
    assert "Solved: 17.5 on every rank." in exercise
    assert "the mean over all losses" in exercise  # what lab00's check says of itself
    assert (
        "| `is_close(got.numbers, sum(rank_means) / len(rank_means))` | This is the mean of the ranks' means. A rank with more "
        "losses counts for more. |" in exercise
    )
    assert any(SECRET in cell.source for cell in notebook.cells)
    assert "4242" in json.dumps(notebook)


def test_the_teaching_time_counts_words_predictions_stars_and_the_run_also_in_sections_without_a_cell() -> None:
    cells = [
        new_markdown_cell("# 1 T"),
        new_markdown_cell("## A\n\n" + "word " * 598 + "\n\n## B\n\n**Predict first.** What?\n\n### Exercise 1: c ★★"),
        _code(f"{BEGIN}\na = 1\n{END}", papermill={"duration": 120.0}),
        new_markdown_cell("## Exercise 2: untold"),
        _code("", tags=("exercise",)),
        _code("", tags=("exercise",)),
    ]
    plan = instructor_copy(new_notebook(cells=cells)).cells[1].source
    assert "**Teaching takes about 27 min.**" in plan
    rows = [line for line in plan.splitlines() if line.startswith("|")][2:]
    assert rows == [
        "| Setup | 1 min |  | 0 |  |",
        "| A | 3 min |  | 0 |  |",
        "| B | 2 min | 1 prediction | 0 |  |",
        "| Exercise 1: c ★★ | 12 min | 1 exercise | 1 | 2.0 min |",
        "| Exercise 2: untold | 10 min | 2 exercises | 2 | not recorded |",
    ]


class _Fetched(html.parser.HTMLParser):
    """The addresses that a browser would fetch to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.scripts = 0
        self.without_alt: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.scripts += tag == "script"
        self.addresses += [values[name] for name in ("src", "srcset", "data", "poster") if name in values]
        if tag == "link":
            self.addresses.append(values.get("href", ""))
        if tag == "img" and not values.get("alt"):
            self.without_alt.append(values["src"][:60])


@pytest.mark.parametrize("audience", ["student", "instructor"])
@pytest.mark.parametrize("page", ["07_lab.html", "index.html"])
def test_a_page_fetches_nothing_and_runs_no_script(made: Made, audience: Any, page: str) -> None:
    text = (made.handouts.folders[audience] / page).read_text()
    fetched = _Fetched()
    fetched.feed(text)
    assert not fetched.scripts
    assert not fetched.without_alt
    assert [address for address in fetched.addresses if not address.startswith("data:")] == []
    assert re.findall(r"url\((?!data:)[^)]*\)|@import", text) == []
    assert text.count("@font-face") == 5


def test_a_formula_is_a_picture_with_its_source_as_words(made: Made) -> None:
    text = (made.handouts.folders["student"] / "07_lab.html").read_text()
    (image,) = re.findall(r"<img[^>]*lceil[^>]*>", text)
    assert 'alt="\\lceil N / R \\rceil"' in image
    assert 'src="data:image/svg+xml;base64,' in image
    assert "$\\lceil" not in text


def test_the_index_leads_to_every_file_and_the_zip_holds_them_all(made: Made) -> None:
    for audience, folder in made.handouts.folders.items():
        files = {path.name for path in folder.iterdir()}
        links = set(re.findall(r'href="([^"]+)"', (folder / "index.html").read_text()))
        assert links == files - {"index.html"}
        assert "After this lab you can cut." in (folder / "index.html").read_text()
        with zipfile.ZipFile(made.handouts.zips[audience]) as packed:
            assert {Path(name).name for name in packed.namelist()} == files
            assert {Path(name).parent.name for name in packed.namelist()} == {f"labkit-{audience}"}


@pytest.mark.skipif(machine.find_chromium() is None, reason="needs Chromium: apt-get install chromium")
def test_a_printed_handout_names_notebook_and_page_cuts_no_line_and_spells_its_links_out(made: Made) -> None:
    pages = _pdf_text(made.handouts.folders["student"] / "07_lab.pdf").rstrip("\f").split("\f")
    for number, page in enumerate(pages, start=1):
        head = page.strip().splitlines()[0]
        assert "07 A lab" in head
        assert f"{number}/{len(pages)}" in head.replace(" ", "")
    text = "".join(pages)
    assert LONG_END in re.sub(r"\s", "", text)
    assert "the_end_of_a_wide_table" in re.sub(r"\s", "", text)
    assert "https://example.org/guide" in text
    assert "Your prediction:" in text
    # Text that is folded on the screen is on the last pages.
    hints, answers = (next(place for place, page in enumerate(pages) if name in page.splitlines()) for name in ("Hints", "Answers"))
    assert hints < answers == len(pages) - 1
    assert "Use chunk" in re.sub(r"\s+", " ", pages[hints])
    assert "The answer is four thousand." in pages[answers]
    assert "see number 1 of the hints" in text
    assert "see number 1 of the answers" in text


def test_on_paper_an_output_stays_open_in_its_place_and_a_section_begins_at_its_heading() -> None:
    folded = "<details><summary><b>wq.weight</b><span>64x64</span></summary>rank 0</details>"
    cells = [
        new_markdown_cell("# 1 A\n\n## B"),
        _code("browse()", new_output("display_data", data={"text/html": folded, "text/plain": ""})),
        new_markdown_cell("Of B.\n\n## C\n\n<details><summary>Hint</summary>\n\nTry.\n\n</details>"),
    ]
    for number, cell in enumerate(cells):
        cell.id = f"c-{number}"
    soup = BeautifulSoup(make_print_page(make_page(new_notebook(cells=cells), "student")), "html.parser")
    sections = soup.main.select("section.of-h2") if soup.main else []
    texts = [section.get_text(" ", strip=True) for section in sections]
    assert re.fullmatch(r"B .*wq\.weight 64x64 rank 0 Of B\.", texts[0])
    assert re.fullmatch(r"C \S* ?Hint: see number 1 of the hints, on the last pages\.", texts[1])
    assert texts[2].startswith("Hints")


@pytest.mark.skipif(machine.find_chromium() is None, reason="needs Chromium: apt-get install chromium")
def test_the_pdf_carries_no_path_of_this_machine(made: Made) -> None:
    for folder in made.handouts.folders.values():
        assert b"file://" not in (folder / "07_lab.pdf").read_bytes()


def test_a_link_to_what_is_not_handed_out_is_plain_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_chromium", lambda: None)
    text = (
        "# 07 A lab\n\nAfter [`that` lab](03_left_out.ipynb#Who-waits?) and [this](08_other.ipynb#end), the "
        "[model](../labkit/model.py), [below](#end) and [the guide](https://example.org/03_left_out.ipynb); "
        "`x[0](y.ipynb)`.\n\n```python\nx[1](z.ipynb)\n```"
    )
    for name in ("07_lab", "08_other"):
        nbformat.write(new_notebook(cells=[new_markdown_cell(text)]), tmp_path / f"{name}.ipynb")
    made = make_handouts([tmp_path / "07_lab.ipynb", tmp_path / "08_other.ipynb"], tmp_path / "out")
    for folder in made.folders.values():
        source = nbformat.read(folder / "07_lab.ipynb", as_version=4).cells[0].source
        assert "After `that` lab and [this](08_other.ipynb#end), the model, [below](#end)" in source
        assert "[the guide](https://example.org/03_left_out.ipynb); `x[0](y.ipynb)`" in source
        assert "x[1](z.ipynb)" in source
        page = (folder / "07_lab.html").read_text()
        assert 'href="08_other.html#end"' in page
        assert 'href="03_left_out' not in page
        assert "labkit/model.py" not in page


def test_without_chromium_everything_but_the_pdfs_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_chromium", lambda: None)
    nbformat.write(_executed(), tmp_path / "07_lab.ipynb")
    result = CliRunner().invoke(main, ["handouts", str(tmp_path / "07_lab.ipynb"), "-o", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "No PDFs: they need Chromium" in result.output
    assert sorted(path.name for path in (tmp_path / "out" / "student").iterdir()) == ["07_lab.html", "07_lab.ipynb", "index.html"]
    assert "pdf" not in (tmp_path / "out" / "student" / "index.html").read_text().split("</style>")[1]


def _lab(folder: Path, name: str, *cells: NotebookNode) -> Path:
    """A small executed notebook."""
    folder.mkdir(parents=True, exist_ok=True)
    heading = new_markdown_cell(f"# {name} A lab\n\nAfter {name} you can.")
    notebook = new_notebook(cells=[heading, *cells])
    for number, cell in enumerate(notebook.cells):
        cell.id = f"{name}-{number:02}"
    nbformat.write(notebook, folder / f"{name}.ipynb")
    return folder / f"{name}.ipynb"


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _handouts(*arguments: Path | str) -> Result:
    return CliRunner().invoke(main, ["handouts", *map(str, arguments)])


@pytest.fixture
def _no_chromium(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_chromium", lambda: None)


def test_a_leak_is_refused_and_the_set_of_before_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    make_handouts([_lab(tmp_path, "07_lab")], out, chromium="")
    before = _contents(out)
    monkeypatch.setattr(build, "student_copy", lambda notebook, secrets: notebook)
    nbformat.write(_executed(), tmp_path / "07_lab.ipynb")
    with pytest.raises(SolutionLeakError, match=r"07_lab\.ipynb, a file for students(.|\n)*secret_count"):
        make_handouts([tmp_path / "07_lab.ipynb"], out)
    assert _contents(out) == before
    with pytest.raises(SolutionLeakError):
        make_handouts([tmp_path / "07_lab.ipynb"], tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("_no_chromium")
@pytest.mark.parametrize("name", ["student/a.html", "instructor/a.ipynb", "labkit-student.zip", "student/index.html", "student"])
def test_a_file_that_no_earlier_run_wrote_is_named_and_not_replaced(tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("mine")
    before = _contents(out)
    result = _handouts(_lab(tmp_path, "a"), "-o", out)
    assert result.exit_code == 1
    assert str(out / name) in result.output
    assert _contents(out) == before


@pytest.mark.usefixtures("_no_chromium")
def test_what_lies_beside_handouts_stays_and_goes_into_no_zip(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in ("student/slides.txt", "instructor/grades.csv"):
        (out / name).parent.mkdir(parents=True)
        (out / name).write_text("mine")
    for _ in range(2):
        result = _handouts(_lab(tmp_path, "a"), "-o", out)
        assert result.exit_code == 0, result.output
    assert (out / "student" / "slides.txt").read_text() == (out / "instructor" / "grades.csv").read_text() == "mine"
    with zipfile.ZipFile(out / "labkit-student.zip") as packed:
        assert {Path(name).name for name in packed.namelist()} == {"a.html", "a.ipynb", "index.html"}


@pytest.mark.usefixtures("_no_chromium")
def test_a_handout_that_somebody_has_changed_is_named_and_not_replaced(tmp_path: Path) -> None:
    path, out = _lab(tmp_path, "a"), tmp_path / "out"
    assert _handouts(path, "-o", out).exit_code == 0
    (out / "instructor" / "a.ipynb").write_text("my notes")
    before = _contents(out)
    result = _handouts(path, "-o", out)
    assert result.exit_code == 1
    assert "changed since" in result.output
    assert str(out / "instructor" / "a.ipynb") in result.output
    assert _contents(out) == before


@pytest.mark.usefixtures("_no_chromium")
@pytest.mark.parametrize("folder", ["student", "instructor", "student/old"])
def test_a_notebook_in_the_way_of_its_own_handouts_is_refused(tmp_path: Path, folder: str) -> None:
    path = _lab(tmp_path / "out" / folder, "a")
    before = _contents(tmp_path)
    result = _handouts(path, "-o", tmp_path / "out")
    assert result.exit_code == 1
    assert "Choose another folder" in result.output
    assert _contents(tmp_path) == before


@pytest.mark.usefixtures("_no_chromium")
def test_a_second_call_adds_its_notebooks_to_the_set(tmp_path: Path) -> None:
    out = tmp_path / "out"
    link = new_markdown_cell("Next: [b](b.ipynb), before: [a](a.ipynb).")
    assert _handouts(_lab(tmp_path, "a"), "-o", out).exit_code == 0
    result = _handouts(_lab(tmp_path, "b", link), "-o", out)
    assert result.exit_code == 0, result.output
    assert "kept, from earlier calls: a" in result.output
    for audience in ("student", "instructor"):
        names = {"a.ipynb", "a.html", "b.ipynb", "b.html", "index.html"}
        assert {path.name for path in (out / audience).iterdir()} == names
        page = (out / audience / "index.html").read_text()
        assert set(re.findall(r'href="([^"]+)"', page)) == names - {"index.html"}
        assert page.index("After a you can.") < page.index("After b you can.")
        with zipfile.ZipFile(out / f"labkit-{audience}.zip") as packed:
            assert {Path(name).name for name in packed.namelist()} == names
        assert 'href="a.html"' in (out / audience / "b.html").read_text()


def test_a_file_that_a_notebook_no_longer_has_goes(tmp_path: Path) -> None:
    path, out = _lab(tmp_path, "a"), tmp_path / "out"
    (out / "student").mkdir(parents=True)
    make_handouts([path], out, chromium="")
    pdf = out / "student" / "a.pdf"
    pdf.write_bytes(b"pdf")
    listed = json.loads((out / "handouts.json").read_text())
    listed["files"]["student/a.pdf"] = hashlib.sha256(b"pdf").hexdigest()
    (out / "handouts.json").write_text(json.dumps(listed))
    make_handouts([path], out, chromium="")
    assert not pdf.exists()
    assert "student/a.pdf" not in json.loads((out / "handouts.json").read_text())["files"]


@pytest.mark.parametrize("number", matrix(signal.SIGINT, signal.SIGTERM))
def test_an_interrupt_leaves_the_set_of_before_whole_and_exits_with_130(
    tmp_path: Path, make_notebook: MakeNotebook, number: signal.Signals
) -> None:
    out = tmp_path / "out"
    done, started = _lab(tmp_path, "a"), tmp_path / "started"
    make_handouts([done], out, chromium="")
    before = _contents(out)
    slow = make_notebook("slow", f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(300)")
    command = [sys.executable, "-m", "labkit", "handouts", str(done), str(slow), "-o", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not started.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert started.exists()
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert "made " not in stdout
    assert "is unchanged" in stderr
    assert _contents(out) == before


def test_an_interrupt_that_a_command_does_not_handle_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(main.commands, "interrupted", click.Command("interrupted", callback=interrupted))
    result = CliRunner().invoke(main, ["interrupted"])
    assert result.exit_code == 130
    assert result.output == "Interrupted.\n"


def test_an_executed_copy_lies_with_the_instructors_set_and_in_no_zip(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    out = tmp_path / "out"
    make_handouts([make_notebook("fresh", "print('made', 6 * 7)")], out, chromium="")
    assert sorted(path.name for path in out.iterdir()) == [
        "handouts.json", "instructor", "labkit-instructor.zip", "labkit-student.zip", "student"
    ]  # fmt: skip
    assert (out / "instructor" / "executed" / "fresh.ipynb").exists()
    with zipfile.ZipFile(out / "labkit-instructor.zip") as packed:
        assert [name for name in packed.namelist() if "executed" in name] == []


def test_a_copy_of_a_failed_run_is_refused(tmp_path: Path) -> None:
    notebook = _executed()
    notebook.metadata.papermill.exception = True
    nbformat.write(notebook, tmp_path / "07_lab.ipynb")
    with pytest.raises(HandoutError, match="the copy of a run that failed"):
        make_handouts([tmp_path / "07_lab.ipynb"], tmp_path / "out")


def test_a_notebook_that_has_not_been_run_is_run_first(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    path = make_notebook("fresh", "print('made', 6 * 7)")
    assert not is_executed(nbformat.read(path, as_version=4))
    made = make_handouts([path], tmp_path / "out", chromium="")
    assert "made 42" in (made.folders["instructor"] / "fresh.html").read_text()


@pytest.mark.parametrize("how", ["counts", "outputs", "many"])
def test_v8_a_notebook_that_has_been_run_in_part_is_refused_and_not_run(
    make_notebook: MakeNotebook, tmp_path: Path, how: str
) -> None:
    hidden = [f"open({str(tmp_path / 'ran')!r}, 'w')"] * (7 if how == "many" else 1)
    path = make_notebook("half", "print(1)", *hidden)
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].execution_count = notebook.cells[1].execution_count = None if how == "outputs" else 1
    notebook.cells[1].outputs = [new_output("stream", text="1\n")]
    nbformat.write(notebook, path)
    with pytest.raises(
        HandoutError, match=r"half.ipynb has been run in part only: not .*cell 3.* Run all its cells, or clear"
    ) as error:
        make_handouts([path], tmp_path / "out", chromium="")
    assert ("cell 8" in str(error.value), "and 2 more" in str(error.value)) == (False, how == "many")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tex", [r"$\frac{1$", r"$$\begin{cases}1\end{cases}$$"])
def test_a_formula_that_cannot_be_drawn_is_named(tex: str) -> None:
    with pytest.raises(HandoutError, match="the formula"):
        make_page(new_notebook(cells=[new_markdown_cell(f"# 1 T\n\n{tex}")]), "student")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_students_copy_of_each_notebook_of_the_course_keeps_its_solutions_secret(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    lines = [line for cell in notebook.cells for line in solution_lines(cell.source)]
    secrets = Secrets([notebook])
    assert len(secrets.lines) > len(lines) / 2  # most of a solution occurs nowhere else
    copied = student_copy(notebook, secrets)
    text = "\n".join(cell.source for cell in copied.cells)
    assert not [line for line in secrets.lines if line in map(str.strip, text.splitlines())]
    assert "SOLUTION" not in text
    page = make_page(copied, "student").html
    assert not secrets.in_page(page)
    for cell in copied.cells:
        if cell.cell_type == "code" and not cell.source.startswith("%"):
            compile(cell.source, path.name, "exec", flags=0x2000)  # top-level await is allowed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_instructors_copy_knows_the_mistakes_of_every_exercise(path: Path) -> None:
    copied = instructor_copy(nbformat.read(path, as_version=4))
    checks = [index for index, cell in enumerate(copied.cells) if "check" in cell.metadata.get("tags", ())]
    assert checks
    for said in ("What is measured: ", "| What the check sees | What it says |"):
        assert [copied.cells[i].source for i in checks if said not in copied.cells[i + 1].source] == []


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (f"def f(t):\n    {BEGIN}\n    return 3 * t\n\nprint(f(2))", f"line 2: '{BEGIN}' has no END"),
        (f"a = 1\n{END}", f"line 2: '{END}' has no BEGIN"),
        (f"{BEGIN}\na = 1\n{BEGIN}\nb = 2\n{END}", f"line 3: '{BEGIN}' has no END before it"),
        *(
            (f"{marker}\na = 1\n{END}", f"line 1: '{marker}' is almost a marker")
            for marker in (
                "# BEGIN SOLUTION",
                "#### BEGIN SOLUTION",
                "### Begin Solution",
                "###BEGIN SOLUTION",
                "### BEGIN  SOLUTION",
                "### BEGIN_SOLUTION",
                "# start of the solution",
                f"x = 1  {BEGIN}",
            )
        ),
        (f"{BEGIN}\na = 1\n# END SOLUTION", "line 3: '# END SOLUTION' is almost a marker"),
    ],
)
@pytest.mark.usefixtures("_no_chromium")
def test_a_marker_without_its_pair_or_almost_one_is_an_error_with_notebook_and_cell(
    tmp_path: Path, source: str, problem: str
) -> None:
    result = _handouts(_lab(tmp_path, "a", _code("1"), _code(source, _stream("6\n"))), "-o", tmp_path / "out")
    assert result.exit_code == 1
    assert f"a.ipynb, cell 3 (id a-02), {problem}" in result.output
    assert not (tmp_path / "out").exists()


def test_a_marker_in_text_is_an_error_unless_students_do_not_get_the_cell() -> None:
    text = new_markdown_cell(f"{BEGIN}\nIt is 42.\n{END}", id="t")
    with pytest.raises(HandoutError, match=r"a, cell 1 \(id t\), line 1: .* in a cell without code"):
        require_paired_markers(new_notebook(cells=[text]), "a")
    text.metadata["tags"] = ["solution"]
    require_paired_markers(new_notebook(cells=[text]), "a")


def test_a_text_may_speak_of_markers_and_a_marker_may_say_more() -> None:
    text = new_markdown_cell(f"Solutions stand between `{BEGIN}` and `{END}`.")
    code = _code(f"{BEGIN} (easy)\na = 1\n{END}\nb = 2\n{BEGIN}\nc = 3\n{END}")
    require_paired_markers(new_notebook(cells=[text, code]), "a")


def _shown(*cells: NotebookNode) -> str:
    """Everything that a students' copy of these cells shows."""
    notebook = new_notebook(cells=list(cells))
    for number, cell in enumerate(cells):
        cell.id = f"c-{number}"
    copied = student_copy(notebook, Secrets([notebook]))
    nbformat.validate(copied)
    assert len({cell.id for cell in copied.cells}) == len(copied.cells)
    return json.dumps(copied.cells, indent=1)


def test_a_solution_s_outputs_and_those_after_it_are_cut_up_to_the_next_heading_tagged_or_not() -> None:
    shown = _shown(
        _code(f'{BEGIN}\ntext = "forty two"\n{END}\nprint(text)', _stream("forty two it is")),
        _code("print(n + 1)", _stream("next: 43")),
        new_markdown_cell("That is what `verify` does.\n\n**What to notice.** It says 17,753.\n\nGo on."),
        _code("verify()", _stream("lacks 17,753")),
        new_markdown_cell("## And now?"),
        _code("other()", _stream("kept output")),
    )
    assert not [text for text in ("forty two", "next: 43", "lacks 17,753") if text in shown]
    assert "<summary>What to notice: open this" in shown
    assert "kept output" in shown
    assert '"exercise"' in shown  # with room for an answer on paper


def test_what_answers_a_prediction_is_cut_or_folded_up_to_the_next_heading() -> None:
    shown = _shown(
        new_markdown_cell(
            "## GPUs\n\n**Predict first.** Is it printed?\n\n<details><summary>Seen</summary>\n\n```python\n# a comment\n\nx\n"
            "```\n\n</details>\n\n**What to notice.** Rank 0 printed its line."
        ),
        _code("x", _stream("right below")),
        new_markdown_cell("**What to notice.** So it is.\n\nA cell can also run on some ranks:"),
        _code("x", _stream("said again later")),
        new_markdown_cell("### Next\n\n**What to notice.** Open."),
        _code("y", _stream("kept output")),
    )
    assert "right below" not in shown
    assert "said again later" not in shown
    assert "kept output" in shown
    order = ["Is it printed?", "**Your prediction:**", "<summary>Seen", "open this when", "Rank 0 printed", "open this when"]
    places = [shown.index(order[0])]
    for text in order[1:]:
        places.append(shown.index(text, places[-1] + 1))
    assert places == sorted(places)
    assert shown.count("open this when") == 2


@pytest.mark.parametrize("tag", ["instructor", "solution"])
def test_a_cell_for_the_instructor_is_in_the_instructors_copy_only(tag: str) -> None:
    secret = "answer = sorted(names)[::-1]"
    cells = [
        new_markdown_cell("# 1 A"),
        new_markdown_cell(f"My private note: {secret}", metadata={"tags": [tag]}),
        _code(f"note = 1\n{secret}", _stream("private output"), tags=(tag,)),
        _code(f"{BEGIN}\n{secret}\n{END}"),
        new_markdown_cell("## B"),
        _code("1", _stream(secret)),
    ]
    shown = _shown(*cells)
    assert not [text for text in ("private", secret) if text in shown]
    told = json.dumps(instructor_copy(new_notebook(cells=cells)).cells)
    assert "My private note" in told
    assert "private output" in told


def test_a_mistake_is_told_by_what_the_check_sees_and_a_hint_with_a_value_of_the_run_is_left_out() -> None:
    (all_reduce,) = checks_in("lab00.check_my_all_reduce(pool)")
    assert (
        Mistake("`got.kind in ('list', 'tuple')`", "These are the pieces. torch.cat joins them into one tensor.")
        in all_reduce.mistakes
    )
    assert not [mistake for mistake in all_reduce.mistakes if "numbers: the all-gather" in mistake.hint]
    (manifest,) = checks_in("lab01.check_manifest(a)")
    seen = {mistake.hint: mistake.seen for mistake in manifest.mistakes}
    assert seen["Compare every file, not only .metadata."] == "a shard is cut off at its end"
    assert seen["Without manifest.json it is unknown whether the save was finished. Name it."] == "there is no manifest"


def test_secrets_are_what_only_solutions_show() -> None:
    shown = "import torch\nfor name in names:\n    total = loss.clone()"
    hidden = "### BEGIN SOLUTION\nfor name in names:\nstate = torch.cat(parts, dim=1)\n### END SOLUTION"
    secrets = Secrets([new_notebook(cells=[new_code_cell(shown), new_code_cell(hidden)])])
    assert secrets.lines == ["state = torch.cat(parts, dim=1)"]
    assert secrets.in_text("x\n  state = torch.cat(parts,\n     dim=1)") == secrets.lines
    assert secrets.in_page('<b>state</b> = torch.<i>cat</i>(parts, <span class="a">dim</span>=1)') == secrets.lines
    assert secrets.in_notebook({"a": [{"b": ["state = torch.", "cat(parts, dim=1)"]}]})
    assert secrets.in_text("for name in names:") == []


def test_a_hole_keeps_its_indent_and_what_stands_around_it() -> None:
    region = "{0}### BEGIN SOLUTION\n{0}b = 2\n{0}### END SOLUTION"
    hole = "{0}# YOUR CODE HERE\n{0}raise NotImplementedError"
    frame = "def f():\n    a = 1\n{}\n    return a\n{}"
    source = frame.format(region.format("    "), region.format(""))
    assert with_holes(source) == frame.format(hole.format("    "), hole.format(""))


def test_two_notebooks_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="several notebooks named 07_lab"):
        make_handouts([tmp_path / "a" / "07_lab.ipynb", tmp_path / "b" / "07_lab.ipynb"], tmp_path / "out")


def test_a_bar_in_the_code_of_a_table_has_no_backslash_on_a_page() -> None:
    assert "<td><code>str | Path</code></td>" in prose("| seen |\n|---|\n| `str \\| Path` |")
