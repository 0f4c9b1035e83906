"""The construction of both sets of handouts from notebooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from labkit.base import machine
from labkit.course.files import papermill_of, read_notebook, shown
from labkit.course.handouts.bundle import INDEX, Entry, write_index, write_zip
from labkit.course.handouts.copies.cells import about, has_results, is_executed, left_out_of_run, title, without_dead_links
from labkit.course.handouts.copies.instructor import instructor_copy
from labkit.course.handouts.copies.solutions import Secrets, require_paired_markers
from labkit.course.handouts.copies.student import student_copy
from labkit.course.handouts.errors import HandoutError, SolutionLeakError
from labkit.course.handouts.handout_folder import HandoutFolder
from labkit.course.handouts.pages.page import Audience, make_page
from labkit.course.handouts.pages.print_page import make_print_page, write_pdf
from labkit.course.running.runner import OnCell, OnResult, run_notebooks

AUDIENCES: tuple[Audience, ...] = ("student", "instructor")
RUN_TIMEOUT_S = 600.0
# These copies contain solutions, so do not put them beside the students' folder: somebody may publish it with its surroundings.
EXECUTED = "instructor/executed"
_MOST_NAMED = 5


@dataclass(frozen=True)
class Handouts:
    """The result of a build.

    Attributes:
        folders: The folder of each audience.
        zips: The zip of each audience.
        files: The files that this run wrote.
        others: Other notebooks whose handouts, from earlier runs, are in the same set.
    """

    folders: dict[Audience, Path]
    zips: dict[Audience, Path]
    files: list[Path]
    others: list[str]


def make_handouts(
    notebooks: Sequence[Path],
    out: Path,
    *,
    timeout_s: float = RUN_TIMEOUT_S,
    chromium: str | None = None,
    on_page: Callable[[str, Audience], None] | None = None,
    on_cell: OnCell | None = None,
    on_result: OnResult | None = None,
) -> Handouts:
    """Make the students' and the instructor's sets, each with notebooks, pages, PDFs, an index page and a zip.

    Notebooks that have not been run are run first; their executed copies go to ``out/instructor/executed``, not into a zip. Links
    to notebooks outside the set become plain text. PDFs need Chromium, and are left out without it.

    Handouts that earlier runs made of other notebooks stay in the folder, and the index and zips include them. Everything is built
    elsewhere first, so an error or an interrupt leaves ``out`` as it was.

    Args:
        notebooks: Notebooks with their solutions, executed or not. They are only read.
        out: The folder for the handouts. A file is replaced only if an earlier run wrote it and it is unchanged.
        timeout_s: Time limit for running one notebook, in seconds.
        chromium: Chromium's path; None searches for it.
        on_page: Called with a notebook's name and an audience before that copy is made.
        on_cell: See `labkit.course.running.runner.run_notebooks`, for notebooks that are run first.
        on_result: The same.

    Raises:
        HandoutError: A notebook was run only in part, fails when run, or cannot be made into a page; or something in ``out`` is in
        the way. PlaceError: Handouts would be written through a link, or into another user's folder. SolutionLeakError: A student's
        file would hold a line of a solution. NotebookError: A file is not a notebook. ValueError: Two notebooks have the same name.

    Blocks for at most ``timeout_s`` plus 30 s per notebook to be run, and about 10 s per notebook and audience after that.
    Ranks: controller.
    """
    stems = [path.stem for path in notebooks]
    _require_names(stems)
    target = HandoutFolder(out)
    target.require_apart(notebooks, AUDIENCES)
    read = _read(notebooks)
    to_run = [path for path, notebook in read.items() if not is_executed(notebook)]
    chromium = machine.find_chromium() if chromium is None else chromium
    forms = [".ipynb", ".html", *([".pdf"] if chromium else [])]
    names = [f"{audience}/{stem}{form}" for audience in AUDIENCES for stem in stems for form in forms]
    names += [f"{EXECUTED}/{path.name}" for path in to_run]
    names += [name for audience in AUDIENCES for name in (f"{audience}/{INDEX}", _zip_name(audience))]
    target.require_free(names)
    with target.building() as built:
        others = _copy_others(target, built, stems)
        if to_run:
            read |= _run(to_run, built / EXECUTED, timeout_s, on_cell, on_result)
        executed = {path.stem: without_dead_links(notebook, [*stems, *others]) for path, notebook in read.items()}
        _build(executed, built, chromium, on_page or (lambda stem, audience: None))
        stale = [name for name in target.written if Path(name).stem in stems]
        target.take(built, names, stale)
    return Handouts(
        {audience: out / audience for audience in AUDIENCES},
        {audience: out / _zip_name(audience) for audience in AUDIENCES},
        [out / name for name in names],
        others,
    )


def _require_names(stems: Sequence[str]) -> None:
    # Some file systems ignore case in names.
    folded = [stem.casefold() for stem in stems]
    if twice := sorted({shown(stem) for stem in stems if folded.count(stem.casefold()) > 1}):
        raise ValueError(f"there are several notebooks named {', '.join(twice)}; the handouts would overwrite each other.")
    if Path(INDEX).stem in folded:
        raise ValueError(f"a notebook named {Path(INDEX).stem} would become {INDEX}, the index page. Rename it.")
    if odd := [stem for stem in stems if not stem.isprintable()]:
        raise HandoutError(f"{shown(odd[0])}: pages cannot link to a file with control characters in its name. Rename it.")


def _zip_name(audience: Audience) -> str:
    return f"labkit-{audience}.zip"


def _read(notebooks: Sequence[Path]) -> dict[Path, NotebookNode]:
    read = {path: read_notebook(path) for path in notebooks}
    for path, notebook in read.items():
        require_paired_markers(notebook, str(path))
        if papermill_of(notebook).get("exception"):
            raise HandoutError(
                f"{shown(path)} is the copy of a run that failed. Run the notebook again, or pass the notebook itself."
            )
        # A user who sees results does not expect it to be run, and may have got it from somebody else.
        if has_results(notebook) and (left := left_out_of_run(notebook)):
            named = shown(", ".join(left[:_MOST_NAMED])) + (f" and {len(left) - _MOST_NAMED} more" * (len(left) > _MOST_NAMED))
            raise HandoutError(
                f"{shown(path)} has been run in part only: not {named}. Nothing was run. "
                "Run all its cells, or clear all its outputs: then it is run here."
            )
    return read


def _copy_others(target: HandoutFolder, built: Path, stems: Sequence[str]) -> list[str]:
    """Copy the handouts that earlier runs made of other notebooks, for the index and zips, and return those notebooks' names."""
    others = set()
    for audience in AUDIENCES:
        (built / audience).mkdir()
        for name in target.written:
            path = Path(name)
            if path.parent == Path(audience) and path.name != INDEX and path.stem not in stems:
                (built / name).write_bytes(target.read(name))
                others.add(path.stem)
    return sorted(others)


def _run(
    notebooks: Sequence[Path], folder: Path, timeout_s: float, on_cell: OnCell | None, on_result: OnResult | None
) -> dict[Path, NotebookNode]:
    """Run the notebooks and return them with outputs, writing their executed copies into the folder."""
    results = run_notebooks(notebooks, folder, timeout_s=timeout_s, on_cell=on_cell, on_result=on_result)
    if failed := [result for result in results if not result.passed]:
        told = "\n".join(f"{result.notebook} {result.status}:\n{result.error}" for result in failed)
        raise HandoutError(f"{len(failed)} of {len(results)} notebooks did not run; no handouts were made.\n{told}")
    return {result.notebook: read_notebook(result.executed) for result in results}


def _build(
    executed: Mapping[str, NotebookNode], built: Path, chromium: str | None, on_page: Callable[[str, Audience], None]
) -> None:
    """Build both sets in a folder that already holds copies of other notebooks' handouts."""
    secrets = Secrets(executed.values())
    for audience in AUDIENCES:
        folder = built / audience
        for stem, notebook in executed.items():
            on_page(stem, audience)
            made = student_copy(notebook, secrets) if audience == "student" else instructor_copy(notebook)
            _write(made, folder / stem, audience, secrets, chromium)
        copies = {path.stem: nbformat.read(path, as_version=4) for path in sorted(folder.glob("*.ipynb"))}
        entries = [Entry(stem, title(copy), about(copy)) for stem, copy in copies.items()]
        _require_no_secret(write_index(folder, entries, audience), audience, secrets)
        write_zip(folder, built / _zip_name(audience))


def _write(notebook: NotebookNode, base: Path, audience: Audience, secrets: Secrets, chromium: str | None) -> None:
    """Write the notebook, the page and, if possible, the PDF of one copy."""
    source, screen, pdf = (base.with_name(f"{base.name}{ending}") for ending in (".ipynb", ".html", ".pdf"))
    nbformat.validate(notebook)
    nbformat.write(notebook, source)
    _require_no_secret(source, audience, secrets)
    try:
        page = make_page(notebook, audience)
    except HandoutError as error:
        raise HandoutError(f"{base.name}: {error}") from None
    screen.write_text(page.html, encoding="utf-8")
    _require_no_secret(screen, audience, secrets)
    if not chromium:
        return
    printed = make_print_page(page)
    if audience == "student" and (lines := secrets.in_page(printed)):
        raise SolutionLeakError(pdf.name, lines)
    write_pdf(printed, pdf, chromium)


def _require_no_secret(path: Path, audience: Audience, secrets: Secrets) -> None:
    if audience == "student":
        text = path.read_text(encoding="utf-8")
        lines = secrets.in_page(text) if path.suffix == ".html" else secrets.in_notebook(nbformat.reads(text, as_version=4))
        if lines:
            raise SolutionLeakError(path.name, lines)
