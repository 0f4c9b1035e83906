"""Makes both sets of handouts from notebooks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from labkit import machine
from labkit.course.handouts.bundle import Entry, about, write_index, write_zip
from labkit.course.handouts.cells import is_executed, title, without_dead_links
from labkit.course.handouts.errors import HandoutError, SolutionLeakError
from labkit.course.handouts.instructor import instructor_copy
from labkit.course.handouts.page import Audience, make_page
from labkit.course.handouts.print_page import make_print_page, write_pdf
from labkit.course.handouts.solutions import Secrets
from labkit.course.handouts.student import student_copy
from labkit.course.runner import OnCell, OnResult, run_notebooks

AUDIENCES: tuple[Audience, ...] = ("student", "instructor")
RUN_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Handouts:
    """What was made.

    Attributes:
        folders: The folder of each audience.
        zips: The zip of each audience.
        num_pdfs: How many PDFs there are; 0 without Chromium.
    """

    folders: dict[Audience, Path]
    zips: dict[Audience, Path]
    num_pdfs: int


def make_handouts(
    notebooks: Sequence[Path],
    out: Path,
    *,
    timeout_s: float = RUN_TIMEOUT_S,
    chromium: str | None = None,
    on_file: Callable[[Path], None] | None = None,
    on_cell: OnCell | None = None,
    on_result: OnResult | None = None,
) -> Handouts:
    """Make the students' and the instructor's set: notebooks, pages, PDFs, an index page and a zip for each.

    A notebook that has not been run is run first; its executed copy stays in ``out/executed``. A link to a notebook that is
    not among them becomes plain text. PDFs need Chromium and are left out where there is none.

    Args:
        notebooks: Notebooks with their solutions, executed or not. They are only read.
        out: The folder for the handouts. Its folders ``student`` and ``instructor`` are replaced.
        timeout_s: Seconds that a run of one notebook may take.
        chromium: Chromium's path; found by itself when None.
        on_file: Called with each file that is finished.
        on_cell: See `labkit.course.runner.run_notebooks`, for notebooks that are run first.
        on_result: The same.

    Raises:
        HandoutError: A notebook fails when it runs, or cannot be made into a page.
        SolutionLeakError: A student's file would hold a line of a solution. Nothing is left in ``out/student`` then.
        ValueError: Two notebooks have the same name.

    It blocks for at most ``timeout_s`` plus 30 s per notebook to be run, and about 10 s per notebook and audience after that.
    Ranks: controller.
    """
    stems = [path.stem for path in notebooks]
    if twice := sorted({stem for stem in stems if stems.count(stem) > 1}):
        raise ValueError(f"there are several notebooks named {', '.join(twice)}; the handouts would overwrite each other.")
    run = _executed(notebooks, out, timeout_s, on_cell, on_result)
    executed = {stem: without_dead_links(notebook, stems) for stem, notebook in zip(stems, run, strict=True)}
    secrets = Secrets(executed.values())
    chromium = chromium or machine.find_chromium()
    report = on_file or (lambda path: None)
    folders: dict[Audience, Path] = {audience: _emptied(out / audience) for audience in AUDIENCES}
    num_pdfs = 0
    try:
        for audience, folder in folders.items():
            for stem, notebook in executed.items():
                made = student_copy(notebook, secrets) if audience == "student" else instructor_copy(notebook)
                num_pdfs += _write(made, folder / stem, audience, secrets, chromium, report)
            entries = [Entry(stem, title(notebook), about(notebook)) for stem, notebook in executed.items()]
            report(_checked(write_index(folder, entries, audience), audience, secrets))
    except BaseException:
        # Half a set is no handout, and a leak must not lie about.
        shutil.rmtree(folders["student"], ignore_errors=True)
        raise
    zips: dict[Audience, Path] = {}
    for audience, folder in folders.items():
        zips[audience] = write_zip(folder, out / f"labkit-{audience}.zip")
        report(zips[audience])
    return Handouts(folders, zips, num_pdfs)


def _executed(
    notebooks: Sequence[Path], out: Path, timeout_s: float, on_cell: OnCell | None, on_result: OnResult | None
) -> list[NotebookNode]:
    """The notebooks with their outputs, run now where they have none."""
    read = [nbformat.read(path, as_version=4) for path in notebooks]
    for path, notebook in zip(notebooks, read, strict=True):
        if notebook.metadata.get("papermill", {}).get("exception"):
            raise HandoutError(f"{path} is the copy of a run that failed. Run the notebook again, or give the notebook itself.")
    to_run = [path for path, notebook in zip(notebooks, read, strict=True) if not is_executed(notebook)]
    if to_run:
        results = run_notebooks(to_run, out / "executed", timeout_s=timeout_s, on_cell=on_cell, on_result=on_result)
        if failed := [result for result in results if not result.passed]:
            told = "\n".join(f"{result.notebook} {result.status}:\n{result.error}" for result in failed)
            raise HandoutError(f"{len(failed)} of {len(results)} notebooks did not run; no handouts were made.\n{told}")
        copies = {result.notebook: nbformat.read(result.executed, as_version=4) for result in results}
        read = [copies.get(path, notebook) for path, notebook in zip(notebooks, read, strict=True)]
    return read


def _emptied(folder: Path) -> Path:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def _write(
    notebook: NotebookNode, base: Path, audience: Audience, secrets: Secrets, chromium: str | None, report: Callable[[Path], None]
) -> int:
    """Write the three forms of one copy; say how many PDFs that were."""
    source, screen, pdf = (base.with_name(f"{base.name}{ending}") for ending in (".ipynb", ".html", ".pdf"))
    nbformat.validate(notebook)
    nbformat.write(notebook, source)
    report(_checked(source, audience, secrets))
    try:
        page = make_page(notebook, audience)
    except HandoutError as error:
        raise HandoutError(f"{base.name}: {error}") from None
    screen.write_text(page.html, encoding="utf-8")
    report(_checked(screen, audience, secrets))
    if chromium is None:
        return 0
    printed = make_print_page(page)
    if audience == "student" and (lines := secrets.in_page(printed)):
        raise SolutionLeakError(pdf.name, lines)
    write_pdf(printed, pdf, chromium)
    report(pdf)
    return 1


def _checked(path: Path, audience: Audience, secrets: Secrets) -> Path:
    """The path, when what stands there may be handed out."""
    if audience == "student":
        text = path.read_text(encoding="utf-8")
        lines = secrets.in_page(text) if path.suffix == ".html" else secrets.in_notebook(nbformat.reads(text, as_version=4))
        if lines:
            raise SolutionLeakError(path.name, lines)
    return path
