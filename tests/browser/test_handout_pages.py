"""Handout pages in a browser without a network: they are whole, in their own fonts, and fit on a narrow screen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser, Page

from labkit.course.handouts.copies.instructor import instructor_copy
from labkit.course.handouts.pages.page import make_page
from tests.matrix import matrix
from tests.notebooks.conventions import NOTEBOOKS


@pytest.fixture
def offline(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(offline=True, viewport={"width": 1100, "height": 1400})
    page = context.new_page()
    page.set_default_timeout(30_000)
    yield page
    context.close()


@pytest.mark.parametrize("path", matrix(*NOTEBOOKS), ids=lambda path: path.stem)
def test_a_page_is_whole_without_a_network(offline: Page, tmp_path: Path, shots: Path, path: Path) -> None:
    page = make_page(instructor_copy(nbformat.read(path, as_version=4)), "instructor")
    file = tmp_path / "page.html"
    file.write_text(page.html, encoding="utf-8")
    asked: list[str] = []
    problems: list[str] = []
    offline.on("request", lambda request: asked.append(request.url))
    offline.on("console", lambda message: problems.append(message.text))
    offline.goto(file.as_uri())
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert problems == []
    offline.evaluate("() => document.fonts.ready")
    fonts = offline.evaluate("() => [...document.fonts].filter(font => font.status === 'loaded').map(font => font.family)")
    assert {font.strip("\"'") for font in fonts} == {"Handout Sans", "Handout Mono"}
    offline.screenshot(path=shots / f"handout-{path.stem}.png")
    # Wide code and tables scroll on their own; the page does not.
    for width in (1100, 390):
        offline.set_viewport_size({"width": width, "height": 900})
        assert offline.evaluate("() => document.documentElement.scrollWidth") <= width
