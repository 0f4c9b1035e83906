"""The page for paper, and its PDF: folded text and link addresses move to the end, and long outputs are cut."""

from __future__ import annotations

import re
from pathlib import Path

from bs4 import BeautifulSoup, Tag

from labkit.course.handouts.pages.chromium import print_pdf
from labkit.course.handouts.pages.page import KINDS, Page, embed_fonts, style

# A page holds about 70 lines of output.
_MAX_LINES, _FIRST_LINES, _LAST_LINES = 56, 30, 12
_LONG_LINES = 45
_NUMBERS = "The numbers as a table"


def make_print_page(page: Page) -> str:
    """Return the page as it is printed.

    A printed page cannot be unfolded. For students, hints and answers are moved to its end, where they are not read by accident.
    Folded text in an output stays there, unfolded; the tables behind pictures are only in the HTML page. The addresses of links are
    at the end of each section.
    """
    soup = BeautifulSoup(page.html, "html.parser")
    main = soup.main
    assert main is not None
    _cut_long_outputs(main)
    if page.audience == "student":
        _move_folded_text(soup, main)
    _unfold(main)
    _split_at_headings(soup, main)
    _note_links(soup, main)
    _group(soup, main, "h2")
    for section in main.find_all("section"):
        _group(soup, section, "h3")
    assert soup.style is not None
    assert soup.style.string is not None
    sheet = re.sub(r"@font-face \{[^}]*\}\n?", "", soup.style.string)
    values = {"title": page.title, "kind": KINDS[page.audience]}
    soup.style.string = embed_fonts(sheet + style("print.css", **values), soup.get_text() + "".join(values.values()))
    return str(soup)


def write_pdf(print_page: str, path: Path, chromium: str) -> None:
    """Print a page with Chromium.

    Args:
        print_page: A result of `make_print_page`.
        path: The path of the PDF.
        chromium: Chromium's path.

    Raises:
        HandoutError: See `labkit.course.handouts.pages.chromium.print_pdf`.
    """
    path.write_bytes(print_pdf(print_page, chromium, path.name))


def _cut_long_outputs(main: Tag) -> None:
    """Keep the beginning and the end of outputs that would fill more than a page. Mark those that may be split over two pages."""
    for block in main.find_all("pre"):
        lines = block.get_text().splitlines()
        if "input" not in (block.get("class") or []) and len(lines) > _MAX_LINES:
            left_out = len(lines) - _FIRST_LINES - _LAST_LINES
            block.string = "\n".join(
                [*lines[:_FIRST_LINES], f"... {left_out} lines, all in the HTML page ...", *lines[-_LAST_LINES:]]
            )
        if len(lines) > _LONG_LINES:
            _allow_break(block)
    for table in main.find_all("table"):
        if len(table.find_all("tr")) > _LONG_LINES:
            _allow_break(table)
            _allow_break(table.parent)


def _allow_break(tag: Tag | None) -> None:
    if tag is not None:
        tag["class"] = " ".join([*(tag.get("class") or []), "is-long"])


def _move_folded_text(soup: BeautifulSoup, main: Tag) -> None:
    """Move folded text to two lists at the end, so that a student who looks up a hint does not see an answer beside it."""
    lists: dict[str, list[Tag]] = {"Hints": [], "Answers": []}
    for fold in main.find_all("details"):
        if fold.find_parent(class_="outputs"):
            continue
        summary = fold.summary.get_text(" ", strip=True) if fold.summary else ""
        if fold.summary:
            fold.summary.decompose()
        name = "Hints" if summary.startswith("Hint") else "Answers"
        word, number = summary.split(":")[0], len(lists[name]) + 1
        entry = soup.new_tag("div", attrs={"class": "folded"})
        label = soup.new_tag("strong")
        label.string = f"{number}. {word}: {_heading_before(fold)}"
        entry.append(label)
        reference = soup.new_tag("p", attrs={"class": "reference"})
        reference.string = f"{word}: see number {number} of the {name.lower()}, on the last pages."
        fold.replace_with(reference)
        fold.name = "div"
        entry.append(fold)
        lists[name].append(entry)
    for name, moved in lists.items():
        if moved:
            last = soup.new_tag("div", attrs={"class": "cell last"})
            head = soup.new_tag("h2")
            head.string = name
            last.append(head)
            last.extend(moved)
            main.append(last)


def _unfold(main: Tag) -> None:
    for fold in main.find_all("details"):
        summary = fold.summary
        if summary is not None and summary.get_text(strip=True) == _NUMBERS:
            fold.decompose()
            continue
        if summary is not None:
            summary.name = "strong"
        fold.name = "div"


def _heading_before(tag: Tag) -> str:
    found = tag.find_previous(["h1", "h2", "h3", "h4"])
    if found is None:
        return ""
    return "".join(str(part) for part in found.find_all(string=True) if part.parent and part.parent.name != "a").strip("¶ ")


def _note_links(soup: BeautifulSoup, main: Tag) -> None:
    """Add numbers to the links of each section and list their addresses at its end. Links to other handouts become plain text."""
    notes: list[str] = []
    for tag in [*main.find_all(["h2", "a"]), None]:
        if tag is None or tag.name == "h2":
            if notes:
                _add_notes(soup, main, tag, notes)
                notes = []
            continue
        address = str(tag.get("href") or "")
        if not address.startswith(("http://", "https://")):
            tag.unwrap() if "anchor-link" not in (tag.get("class") or []) else tag.decompose()
            continue
        if address not in notes:
            notes.append(address)
        mark = soup.new_tag("sup", attrs={"class": "note"})
        mark.string = str(notes.index(address) + 1)
        tag.insert_after(mark)


def _split_at_headings(soup: BeautifulSoup, main: Tag) -> None:
    """Begin a cell at each heading, so that the text before it in the same cell stays in its own section."""
    for heading in main.find_all(["h2", "h3"]):
        cell = heading.parent
        if isinstance(cell, Tag) and "prose" in (cell.get("class") or []) and heading.find_previous_sibling() is not None:
            begun = soup.new_tag("div", attrs={"class": "cell prose"})
            begun.extend([heading, *heading.next_siblings])
            cell.insert_after(begun)


def _group(soup: BeautifulSoup, parent: Tag, heading: str) -> None:
    """Wrap each cell that begins with a heading, and the cells up to the next one, in a section."""
    section: Tag | None = None
    for child in [child for child in parent.children if isinstance(child, Tag)]:
        if child.find(heading) is not None:
            section = soup.new_tag("section", attrs={"class": f"of-{heading}"})
            child.insert_before(section)
        if section is not None:
            section.append(child.extract())


def _add_notes(soup: BeautifulSoup, main: Tag, heading: Tag | None, notes: list[str]) -> None:
    listing = soup.new_tag("ol", attrs={"class": "notes"})
    for address in notes:
        item = soup.new_tag("li")
        item.string = address
        listing.append(item)
    if heading is None:
        main.append(listing)
        return
    # Insert before the cell in which the next section begins, not inside it.
    cell = heading.find_parent(class_="cell")
    (cell if isinstance(cell, Tag) and cell.find(["h2"]) is heading else heading).insert_before(listing)
