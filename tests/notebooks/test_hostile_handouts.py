"""Handouts of a stranger's notebooks: neither the page nor its printing runs, loads or reads anything."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from bs4 import BeautifulSoup, Tag
from click.testing import CliRunner, Result
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labkit.base import machine
from labkit.cli import main
from labkit.course.handouts.build import make_handouts
from labkit.course.handouts.copies.instructor import instructor_copy
from labkit.course.handouts.pages.page import Page, make_page
from labkit.course.handouts.pages.print_page import make_print_page, write_pdf
from labkit.course.handouts.pages.safe import POLICY, sanitized
from tests.conftest import TESTS
from tests.notebooks.hostile_notebooks import CHANGED, PAYLOADS, Traps, hostile_notebook, payload

SECRET = "CanaryThatNobodyMayRead"
CHROMIUM = machine.find_chromium()
# Together in one page, so that Chromium starts a few times only.
GROUPS = [range(start, min(start + 10, len(PAYLOADS))) for start in range(0, len(PAYLOADS), 10)]
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def asked() -> Iterator[tuple[str, list[str]]]:
    """A server on this machine, and the requests that it got."""
    paths: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_error(404)

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/asked", paths
    server.shutdown()
    server.server_close()


@pytest.fixture
def traps(tmp_path: Path, asked: tuple[str, list[str]]) -> Traps:
    (tmp_path / "secret.txt").write_text(SECRET)
    asked[1].clear()
    return Traps((tmp_path / "secret.txt").as_uri(), asked[0])


_DANGEROUS = {
    *(
        "script",
        "iframe",
        "frame",
        "frameset",
        "object",
        "embed",
        "base",
        "link",
        "form",
        "input",
        "button",
        "foreignobject",
        "use",
    ),
    *("image", "animate", "set", "video", "audio", "source", "math", "noscript", "template", "marquee", "textarea"),
}


class _Dangers(HTMLParser):
    """The parts of a page that could run, load or lead to a file."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.found += [tag] * (tag in _DANGEROUS)
        self.found += [
            name for name in values if name.startswith("on") or name in ("srcset", "srcdoc", "background", "poster", "data")
        ]
        if not re.fullmatch(r"(data:image/[a-z+]+;base64,[A-Za-z0-9+/=\s]*)?", values.get("src", "")):
            self.found.append(values["src"])
        if not re.fullmatch(r"(https?://.*|mailto:.*|#.*|[^/\\:]+\.(html|ipynb)(#.*)?)?", values.get("href", ""), re.DOTALL):
            self.found.append(values["href"])
        if re.search(r"url|image-set|import|expression|\\|fixed", values.get("style", "") + values.get("fill", "")):
            self.found.append(values["style"])
        if tag == "meta" and values.get("http-equiv", "").lower() not in ("", "content-security-policy"):
            self.found.append(tag)


def _page(numbers: range, traps: Traps) -> Page:
    return make_page(instructor_copy(hostile_notebook(numbers, traps)), "instructor")


@pytest.mark.parametrize("number", range(len(PAYLOADS)))
def test_s8_a_page_holds_nothing_that_runs_loads_or_leads_to_a_file(traps: Traps, number: int) -> None:
    page = _page(range(number, number + 1), traps)
    for html in (page.html, make_print_page(page)):
        assert _Dangers(html).found == []
        (policy,) = re.findall(r"<meta [^>]*Content-Security-Policy[^>]*>", html)
        assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'; font-src data:" in policy
        assert html.index(policy) < html.index("<title>")
        assert len(re.findall(r"<style\b", html)) == 1
        assert re.findall(r"url\((?!data:font)[^)]*\)|@import", re.search(r"<style>.*?</style>", html, re.DOTALL)[0]) == []
        assert SECRET not in html


@needs_chromium
@pytest.mark.timeout(300)
@pytest.mark.parametrize("numbers", GROUPS, ids=str)
def test_s8_neither_a_browser_nor_the_printer_runs_loads_or_reads_what_a_page_asks_for(
    traps: Traps, asked: tuple[str, list[str]], tmp_path: Path, numbers: range
) -> None:
    page = _page(numbers, traps)
    (tmp_path / "page.html").write_text(page.html)
    shown = _dom(tmp_path / "page.html", tmp_path)
    assert f"<title>{CHANGED}" not in shown
    assert "1 Title" in re.search(r"<title>(.*?)</title>", shown, re.DOTALL)[1]
    write_pdf(make_print_page(page), tmp_path / "page.pdf", CHROMIUM)
    assert SECRET not in shown + _text(tmp_path / "page.pdf")
    assert asked[1] == []


@needs_chromium
@pytest.mark.timeout(300)
def test_s8_the_policy_and_the_printer_each_hold_without_the_sanitizer(
    traps: Traps, asked: tuple[str, list[str]], tmp_path: Path
) -> None:
    # Only a sanitizer can stop a page that redirects by itself.
    raw = "\n".join(
        payload(n, traps) for n in range(len(PAYLOADS)) if "refresh" not in PAYLOADS[n] and "frameset" not in PAYLOADS[n]
    )
    head = f'<!doctype html><html><head><meta charset="utf-8">{POLICY}<title>kept</title></head>'
    (tmp_path / "raw.html").write_text(f"{head}<body>before{raw}after</body></html>")
    assert "<title>kept</title>" in _dom(tmp_path / "raw.html", tmp_path)
    write_pdf((tmp_path / "raw.html").read_text(), tmp_path / "raw.pdf", CHROMIUM)
    assert "before" in _text(tmp_path / "raw.pdf")
    assert SECRET not in _text(tmp_path / "raw.pdf")
    assert asked[1] == []
    write_pdf((tmp_path / "raw.html").read_text().replace(POLICY, ""), tmp_path / "open.pdf", CHROMIUM)
    assert SECRET not in _text(tmp_path / "open.pdf")
    assert asked[1] == []  # the printer has no network, whatever the page allows


@needs_chromium
@pytest.mark.timeout(300)
def test_v1_the_printer_starts_in_a_private_folder_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the working directory its libraries would look for others to load, which a neighbour may have put there."""
    wrapper, told = tmp_path / "chromium", tmp_path / "told"
    wrapper.write_text(f'#!/bin/sh\n{{ pwd; echo "$TMPDIR"; stat -c %a .; }} > {told}\nexec {CHROMIUM} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    before = {path.name for path in Path(tempfile.gettempdir()).iterdir()}
    write_pdf("<p>printed</p>", tmp_path / "page.pdf", "./chromium")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    folder, temporary, mode = told.read_text().split()
    assert folder == temporary
    assert Path(folder).name.startswith("labkit-print-")
    assert mode == "700"
    assert {path.name for path in Path(tempfile.gettempdir()).iterdir()} == before


FORMULA = """
import sys
from labkit.course.handouts.pages.formulas import formula
before = "matplotlib" in sys.modules
print(before, hash(formula("x^2", display=True)), open("here").read())
"""


@pytest.mark.parametrize("what", ["fifo", "tex", "colour"])
def test_v5_a_matplotlibrc_in_the_working_directory_neither_holds_nor_steers_handouts(tmp_path: Path, what: str) -> None:
    (tmp_path / "here").write_text("here")

    def drawn(environ: dict[str, str]) -> str:
        given = {**os.environ, "PYTHONPATH": str(TESTS.parent), "PYTHONHASHSEED": "0", "SOURCE_DATE_EPOCH": "0", **environ}
        command = [sys.executable, "-P", "-c", FORMULA]
        return subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, check=True, timeout=60).stdout

    before = drawn({})
    assert before.startswith("False ")
    assert before.endswith(" here\n")
    rc = tmp_path / "matplotlibrc"
    if what == "fifo":
        os.mkfifo(rc)
        assert drawn({}) == before
    else:
        rc.write_text({"tex": "text.usetex: True", "colour": "text.color: red\nmathtext.fontset: cm"}[what])
        assert drawn({}) == before
        assert drawn({"MATPLOTLIBRC": str(rc)}) == before  # nor do the user's own settings


def test_v1_no_program_is_taken_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("chromium", "nvidia-smi"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "_MAC_CHROME", "/missing")
    monkeypatch.setenv("PATH", f".:{os.pathsep}")
    assert machine.find_chromium() is None
    assert machine.find_program("nvidia-smi") is None
    monkeypatch.setenv("PATH", f".:{tmp_path}")
    assert machine.find_chromium() == str(tmp_path / "chromium")


def _dom(page: Path, folder: Path) -> str:
    """The page after Chromium has run whatever it allows to run."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={folder}/profile"]
    command += ["--virtual-time-budget=3000", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def _text(path: Path) -> str:
    if shutil.which("pdftotext") is None:
        pytest.skip("needs pdftotext: apt-get install poppler-utils")
    return subprocess.run(["pdftotext", path, "-"], capture_output=True, text=True, check=True, timeout=60).stdout


def test_s8_pictures_tables_folds_and_styles_of_our_own_stay_as_they_are() -> None:
    own = (
        '<figure style="margin:0.5em 0"><img src="data:image/svg+xml;base64,AAAA" alt="a &amp; b" '
        'style="width:576px;max-width:100%;height:auto"><figcaption style="max-width:48em;font-size:92%">c</figcaption>'
        '<details><summary>The numbers as a table</summary><table><thead><tr><th scope="col">d</th></tr></thead>'
        '<tbody><tr><td style="text-align:right;white-space:pre">1</td></tr></tbody></table></details></figure>'
    )
    kept, before = BeautifulSoup(sanitized(own), "html.parser"), BeautifulSoup(own, "html.parser")
    assert [_as_it_looks(tag) for tag in kept.find_all(True)] == [_as_it_looks(tag) for tag in before.find_all(True)]
    assert kept.get_text() == before.get_text()


def _as_it_looks(tag: Tag) -> tuple[str, dict[str, str]]:
    return tag.name, {name: re.sub(r"[\s;]", "", str(value)) for name, value in tag.attrs.items()}


def test_s8_a_picture_that_is_attached_stays_and_one_that_lies_elsewhere_is_named() -> None:
    attached = {"a.png": {"image/png": "iVBORw0KGgo="}}
    cell = new_markdown_cell("# 1 T\n\n![here](attachment:a.png) ![there](images/b.png)", attachments=attached)
    page = make_page(new_notebook(cells=[cell]), "student").html
    assert 'src="data:image/png;base64,iVBORw0KGgo="' in page
    assert '<img alt="there"/>' in page


def test_s8_an_output_with_a_script_shows_its_next_form() -> None:
    data = {"application/javascript": "x", "text/plain": "instead"}
    cell = new_code_cell("1", outputs=[new_output("display_data", data=data)], execution_count=1)
    assert "instead" in make_page(new_notebook(cells=[new_markdown_cell("# 1 T"), cell]), "student").html


@pytest.mark.parametrize("name", ['x" onmouseover="a', "<img src=x onerror=a>", "a b", "it's", "{x}", "-x", "100%41", "ä" * 100])
def test_s16_handouts_of_a_notebook_of_any_name_keep_it_in_its_attribute(tmp_path: Path, name: str) -> None:
    nbformat.write(new_notebook(cells=[new_markdown_cell("# 1 T")]), tmp_path / f"{name}.ipynb")
    made = make_handouts([tmp_path / f"{name}.ipynb"], tmp_path / "out", chromium="")
    index = (made.folders["student"] / "index.html").read_text()
    assert _Dangers(index).found == []
    assert (made.folders["student"] / f"{name}.html").exists()


@pytest.mark.parametrize("name", ["two\nlines", "bell\x07", os.fsdecode(b"\xff")])
def test_s16_handouts_of_a_name_that_no_page_can_hold_are_refused_in_a_line(tmp_path: Path, name: str) -> None:
    told = _handouts(_notebook(tmp_path / f"{name}.ipynb"), tmp_path / "out")
    assert (told.exit_code, len(told.output.splitlines())) == (1, 1), told.output
    assert "Rename it." in told.output
    assert not (tmp_path / "out").exists()


def _notebook(path: Path) -> Path:
    nbformat.write(new_notebook(cells=[new_markdown_cell("# 1 T")]), path)
    return path


def _handouts(notebook: Path, out: Path) -> Result:
    return CliRunner().invoke(main, ["handouts", str(notebook), "-o", str(out)])


CONTENTS = ["", "{", "[]", '{"cells": 3}', '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [1]}', "[" * 100_000]


@pytest.mark.parametrize("content", CONTENTS, ids=range(len(CONTENTS)))
def test_s12_what_is_no_notebook_is_refused_in_a_line_and_nothing_is_left(tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.ipynb").write_text(content)
    told = _handouts(tmp_path / "bad.ipynb", tmp_path / "out")
    assert (told.exit_code, len(told.output.splitlines())) == (1, 1), told.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "papermill", ["text", [], {"parameters": 3, "exception": None}, {"duration": "long", "parameters": {"a": "`b`"}}]
)
def test_s12_metadata_that_papermill_did_not_write_stops_no_handout(tmp_path: Path, papermill: object) -> None:
    cells = [new_markdown_cell("# 1 T"), new_code_cell("1", execution_count=1, metadata={"papermill": papermill})]
    nbformat.write(new_notebook(cells=cells, metadata={"papermill": papermill}), tmp_path / "a.ipynb")
    make_handouts([tmp_path / "a.ipynb"], tmp_path / "out", chromium="")


def test_s5_a_list_of_handouts_from_elsewhere_makes_no_file_outside_its_folder_replaced_or_handed_out(tmp_path: Path) -> None:
    out, secret = tmp_path / "out", tmp_path / "a.html"
    (out / "student").mkdir(parents=True)
    secret.write_text(SECRET)
    (out / "student" / "b.html").symlink_to(secret)
    names = ["../a.html", str(secret), "student/b.html", "student/../../a.html"]
    hashed = hashlib.sha256(SECRET.encode()).hexdigest()
    (out / "handouts.json").write_text(json.dumps({"files": dict.fromkeys(names, hashed)}))
    made = make_handouts([_notebook(tmp_path / "a.ipynb")], out, chromium="")
    assert secret.read_text() == SECRET
    assert made.others == []
    with zipfile.ZipFile(made.zips["student"]) as packed:
        assert not [name for name in packed.namelist() if SECRET.encode() in packed.read(name)]


@pytest.mark.parametrize("kind", ["hard link", "link", "dangling link", "linked folder"])
def test_s5_handouts_are_written_over_no_notebook_and_through_no_link(tmp_path: Path, kind: str) -> None:
    notebook, out = _notebook(tmp_path / "a.ipynb"), tmp_path / "out"
    (out / "student").mkdir(parents=True)
    place = out / "student" / "a.ipynb"
    if kind == "hard link":
        place.hardlink_to(notebook)
    elif kind == "linked folder":
        (out / "student").rmdir()
        (out / "student").symlink_to(tmp_path)
    else:
        place.symlink_to(notebook if kind == "link" else tmp_path / "nowhere")
    before = notebook.read_bytes(), sorted(tmp_path.rglob("*"))
    told = _handouts(notebook, out)
    assert told.exit_code == 1
    assert "Error: " in told.output
    assert (notebook.read_bytes(), sorted(tmp_path.rglob("*"))) == before
