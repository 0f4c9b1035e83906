"""The index page and the zip of a set of handouts."""

from __future__ import annotations

import html
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from labkit.course.handouts.pages.page import KINDS, Audience, embed_fonts, style
from labkit.course.handouts.pages.safe import POLICY

INDEX = "index.html"
# A fixed date (the oldest that a zip can hold), so that equal handouts give equal zips.
_DATE = (1980, 1, 1, 0, 0, 0)
_FORMS = ((".html", "read"), (".pdf", "print"), (".ipynb", "run"))


@dataclass(frozen=True)
class Entry:
    """One notebook of a set.

    Attributes:
        stem: The name of its files without their endings.
        title: Its title.
        about: What readers will be able to do after it, as plain text.
    """

    stem: str
    title: str
    about: str


def write_index(folder: Path, entries: Sequence[Entry], audience: Audience) -> Path:
    """Write the index page, with links to every file in a set."""
    rows = "".join(_row(folder, entry) for entry in entries)
    heading = "labkit: notebooks of the course" if audience == "student" else "labkit: the instructor's notebooks"
    words = {
        "student": "Read a page in the browser, print the PDF, or open the notebook in JupyterLab and run it: "
        "solutions are left for you to write, and predictions for you to make.",
        "instructor": "With solutions, the outputs of one run, and notes on time, expected numbers and common mistakes.",
    }[audience]
    shown = re.sub(r"<[^>]*>", "", rows) + heading + words + KINDS[audience]
    page = folder / INDEX
    head = f"<th scope=col>Notebook</th><th scope=col colspan={len(_FORMS)}>Files</th>"
    page.write_text(
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{POLICY}\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{html.escape(heading)}</title>\n'
        f"<style>\n{embed_fonts(style('page.css'), html.unescape(shown))}\n</style>\n</head>\n"
        f'<body class="{audience}">\n<header class="running"><span>{KINDS[audience]}</span></header>\n<main>\n'
        f"<h1>{html.escape(heading)}</h1>\n<p>{words}</p>\n"
        f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody>\n</table>\n</main>\n</body>\n</html>\n",
        encoding="utf-8",
    )
    return page


def _row(folder: Path, entry: Entry) -> str:
    links = [
        f'<a href="{quote(entry.stem + ending)}" aria-label="{word} {html.escape(entry.title, quote=True)}">{word}</a>'
        f'<br><small style="white-space:nowrap">{ending[1:]}, {_size(folder / (entry.stem + ending))}</small>'
        for ending, word in _FORMS
        if (folder / (entry.stem + ending)).exists()
    ]
    cells = "".join(f"<td>{link}</td>" for link in links)
    return f"<tr><td><strong>{html.escape(entry.title)}</strong><br>{html.escape(entry.about)}</td>{cells}</tr>\n"


def _size(path: Path) -> str:
    size_kb = path.stat().st_size / 1000
    return f"{size_kb:.0f} kB" if size_kb < 1000 else f"{size_kb / 1000:.1f} MB"


def write_zip(folder: Path, path: Path) -> Path:
    """Pack the files of a set, except those in subfolders, into one zip, inside a folder of the same name."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in sorted(folder.iterdir()):
            if file.is_file():
                info = zipfile.ZipInfo(f"{path.stem}/{file.name}", _DATE)
                info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                packed.writestr(info, file.read_bytes())
    return path
