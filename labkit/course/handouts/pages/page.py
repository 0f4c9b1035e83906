"""A notebook as one self-contained HTML page: no script, no network, fonts and pictures inside."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from nbconvert.exporters import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from traitlets.config import Config

from labkit.course.handouts.copies.cells import title
from labkit.course.handouts.pages.fonts import font_css
from labkit.course.handouts.pages.formulas import formula
from labkit.course.handouts.pages.safe import POLICY, picture_data, sanitized

Audience = Literal["student", "instructor"]
KINDS: Mapping[Audience, str] = {"student": "labkit course", "instructor": "labkit course, instructor's copy"}
_TEMPLATES = Path(str(files("labkit.course.handouts").joinpath("templates")))
_CODE_STYLE = "default"
_SHOWN = ["text/html", "text/markdown", "image/svg+xml", "text/latex", "image/png", "image/jpeg", "text/plain"]


@dataclass(frozen=True)
class Page:
    """A page in parts, so that the printed form can have other styles.

    Attributes:
        title: The notebook's title.
        audience: The audience it is for.
        html: The page for the screen.
    """

    title: str
    audience: Audience
    html: str


def make_page(notebook: NotebookNode, audience: Audience) -> Page:
    """Render a student's or an instructor's copy.

    Raises:
        HandoutError: A formula cannot be drawn.
    """
    heading = title(notebook)
    handout = {
        "title": heading,
        "audience": audience,
        "kind": KINDS[audience],
        "policy": POLICY,
        "css": _Fonts.PLACE + style("page.css"),
    }
    body, _ = _exporter().from_notebook_node(notebook, resources={"handout": handout})
    body = _with_contents(body)
    return Page(heading, audience, _Fonts.filled(body))


def style(name: str, **values: str) -> str:
    """Return a style sheet of this package, with the rules for code, and values filled in."""
    text = (_TEMPLATES / name).read_text(encoding="utf-8")
    for key, value in values.items():
        # Escape every unusual character: "</style>" would end the style sheet.
        written = re.sub(r"[^\w .,:]", lambda char: f"\\{ord(char[0]):x} ", value)
        text = text.replace(f"{{{{ {key} }}}}", written)
    return text + (HtmlFormatter(style=_CODE_STYLE, nobackground=True).get_style_defs("pre") if name == "page.css" else "")


class _Fonts:
    """The fonts of a page. They are added last, because only the finished page determines which characters it shows."""

    PLACE = "/* fonts */\n"

    @classmethod
    def filled(cls, page: str) -> str:
        shown = html.unescape(re.sub(r"data:[^\"')]+|<style.*?</style>", "", page, flags=re.DOTALL))
        return page.replace(cls.PLACE, font_css(shown) + "\n", 1)


def embed_fonts(css: str, shown: str) -> str:
    """Return a style sheet that begins with the fonts for a text."""
    return f"{font_css(shown)}\n{css}"


@cache
def _exporter() -> HTMLExporter:
    config = Config()
    # A page shows no scripts or widgets, so an output that has such a form is shown in its next one.
    config.NbConvertBase.display_data_priority = _SHOWN
    config.TemplateExporter.extra_template_basedirs = [str(_TEMPLATES)]
    exporter = HTMLExporter(config=config, template_name="handout")
    exporter.register_filter("prose", prose)
    exporter.register_filter("sanitized", sanitized)
    exporter.register_filter("picture_data", picture_data)
    exporter.register_filter("highlighted", highlighted)
    exporter.register_filter("alternative", _alternative)
    exporter.register_filter("width", _width)
    exporter.register_filter("in_base64", lambda text: base64.b64encode(text.encode()).decode())
    return exporter


def highlighted(source: str) -> str:
    """Return code with colours. ``%%spmd`` is followed by Python, which Pygments' own lexer for notebooks does not recognize."""
    formatter = HtmlFormatter(nowrap=True)
    first, newline, rest = source.partition("\n")
    if first.startswith("%%spmd"):
        return (
            f'<span class="magic">{html.escape(first)}</span>{newline}{highlight(rest, get_lexer_by_name("ipython3"), formatter)}'
        )
    return str(highlight(source, get_lexer_by_name("ipython3"), formatter))


class _Prose(IPythonRenderer):
    """Markdown whose formulas become pictures and whose links lead from page to page."""

    def __init__(self, attachments: dict[str, Any]) -> None:
        super().__init__(escape=False, exclude_anchor_links=False, attachments=attachments)

    def block_math(self, body: str) -> str:
        return formula(body, display=True)

    def multiline_math(self, text: str) -> str:
        return formula(text.strip().strip("$"), display=True)

    def latex_environment(self, name: str, body: str) -> str:
        return formula(rf"\begin{{{name}}}{body}\end{{{name}}}", display=True)

    def inline_math(self, body: str) -> str:
        return formula(body, display=False)

    def table_cell(self, text: str, align: str | None = None, head: bool = False) -> str:
        # In a table a bar has to be escaped even in code, and in code mistune keeps the backslash.
        cell = text.replace(r"\|", "|")
        tag, style = "th" if head else "td", f' style="text-align:{align}"' if align else ""
        return f"  <{tag}{style}>{cell}</{tag}>\n"

    def link(self, text: str, url: str, title: str | None = None) -> str:
        if "://" not in url:
            url = re.sub(r"\.ipynb(?=$|#)", ".html", url)
        return super().link(text, url, title)

    def image(self, text: str, url: str, title: str | None = None) -> str:
        if url.startswith("attachment:") and url.removeprefix("attachment:") not in self.attachments:
            return f'<img alt="{html.escape(text, quote=True)}">'
        return super().image(text, url, title)


def prose(source: str, attachments: dict[str, Any] | None = None) -> str:
    """Return markdown as HTML, with the pictures attached to its cell. Pictures stored elsewhere are only named."""
    return sanitized(str(MarkdownWithMath(renderer=_Prose(attachments or {})).render(source)))


def _alternative(output: Any) -> str:
    """Return the alternative text of a picture: its own, else its plain text."""
    for mime in ("image/svg+xml", "image/png", "image/jpeg"):
        about = output.metadata.get(mime)
        if isinstance(about, dict) and (alt := about.get("alt")):
            return html.escape(str(alt), quote=True)
    return html.escape(str(output.data.get("text/plain", "")), quote=True)


def _width(output: Any) -> int:
    """Return the width of a picture on the page; 0 if its output does not specify one."""
    about = output.metadata.get("image/png")
    width = about.get("width") if isinstance(about, dict) else None
    return int(width) if isinstance(width, int | float) and 0 < width < 10_000 else 0


def _with_contents(page: str) -> str:
    """Insert links to the sections after the first cell."""
    found = re.findall(r'<h2 id="([^"]+)">(.*?)(?:<a class="anchor-link"[^>]*>.*?</a>)?</h2>', page, flags=re.DOTALL)
    if len(found) < 2:
        return page
    items = "".join(f'<li><a href="#{anchor}">{text}</a></li>' for anchor, text in found)
    first_end = page.find("\n</div>", page.index("<main>")) + len("\n</div>")
    return f'{page[:first_end]}<nav aria-label="Sections"><ul class="contents">{items}</ul></nav>{page[first_end:]}'
