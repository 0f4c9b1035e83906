"""Sanitizing of foreign HTML in a page of ours: it runs nothing, loads nothing, and links to no file of the reader's.

Three independent measures: bleach lets through only the elements and attributes listed here, the page's policy forbids whatever is
left to load or run, and the page is printed without scripts and without a network.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import tinycss2
from bleach.css_sanitizer import CSSSanitizer
from bleach.sanitizer import Cleaner
from bs4 import BeautifulSoup

POLICY = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    "font-src data:; base-uri 'none'; form-action 'none'\">"
)

# Elements whose content is not text for a reader: they are removed with their content.
_GONE = (
    "script", "style", "template", "noscript", "iframe", "frame", "frameset", "object", "embed", "applet", "math", "foreignobject",
    "title", "textarea", "select", "button", "input", "label", "form", "audio", "video", "canvas", "portal", "noembed", "noframes",
)  # fmt: skip
# A form is only a frame around text, so its text stays. The label of an input is useless without the input, so it goes.
_KEEPS_TEXT = {"form"}
_TAGS = """
a abbr b bdi bdo blockquote br caption cite code col colgroup dd del details dfn div dl dt em figcaption figure h1 h2 h3 h4 h5 h6
hr i img ins kbd li mark meter ol p pre progress q rp rt ruby s samp section small span strike strong sub summary sup table tbody td
tfoot th thead time tr tt u ul var wbr svg g rect text tspan line path circle ellipse polygon polyline
"""
_ATTRIBUTES = """
class id style title alt width height align valign role open start reversed colspan rowspan scope headers span dir lang datetime
tabindex value max min low high optimum viewBox preserveAspectRatio x y x1 x2 y1 y2 cx cy r rx ry dx dy d points transform fill
fill-opacity fill-rule stroke stroke-width stroke-dasharray stroke-linecap stroke-linejoin stroke-opacity opacity text-anchor
dominant-baseline font-size font-weight font-style font-family xmlns
"""
_PICTURE = re.compile(r"data:image/(png|jpeg|gif|webp|svg\+xml);base64,[A-Za-z0-9+/=\s]*")
# Another site, a place in the page, or another page of the set; no other file, and no code.
_ADDRESS = re.compile(r"https?://[^\s\\]+|mailto:[^\s\\]+|#\S*|[^/\\:?#\s][^/\\:?#]*\.(html|ipynb)(#\S*)?", re.IGNORECASE)
_PROPERTIES = re.compile(
    r"(margin|padding|border|background|color|font|text|white-space|word|overflow|line-height|letter-spacing|vertical-align|width|"
    r"height|min|max|display|flex|grid|gap|row-gap|column|align|justify|order|position|top|left|right|bottom|box-sizing|box-shadow|"
    r"opacity|list-style|table-layout|fill|stroke|float|clear|object-fit|transform|aspect-ratio|break|page-break|tab-size|"
    r"accent-color|hyphens|visibility|direction)(-[a-z-]+)?"
)
_FUNCTIONS = """
rgb rgba hsl hsla hwb lab lch oklab oklch color-mix light-dark calc min max clamp var repeat minmax fit-content linear-gradient
radial-gradient repeating-linear-gradient translate scale rotate
"""


def sanitized(source: Any) -> str:
    """Return HTML without anything that runs, loads, or links to a file. Text, tables, pictures and their styles stay."""
    html = "".join(map(str, source)) if isinstance(source, list) else str(source)
    soup = BeautifulSoup(html, "html.parser")
    for drawing in soup.find_all("svg"):
        if drawing.title is not None and not drawing.get("aria-label"):
            drawing["aria-label"] = drawing.title.get_text()
    for tag in soup.find_all(lambda tag: tag.name.lower() in _GONE):
        if tag.name in _KEEPS_TEXT:
            tag.unwrap()
        elif not tag.decomposed:
            tag.decompose()
    return str(_cleaner().clean(str(soup)))


def picture_data(data: Any) -> str:
    """Return the data of a picture reduced to base64 characters."""
    return re.sub(r"[^A-Za-z0-9+/=]", "", "".join(data) if isinstance(data, list) else str(data))


@cache
def _cleaner() -> Cleaner:
    return Cleaner(
        tags=frozenset(_TAGS.split()),
        attributes=_is_allowed,
        protocols={"http", "https", "mailto", "data"},
        strip=True,
        css_sanitizer=_Styles(),
    )


def _is_allowed(tag: str, name: str, value: str) -> bool:
    if name == "href":
        return tag == "a" and _ADDRESS.fullmatch(value) is not None
    if name == "src":
        return tag == "img" and _PICTURE.fullmatch(value) is not None
    if name in ("fill", "stroke"):  # a colour, and no drawing from elsewhere
        return re.fullmatch(r"(?!url)[\w#(),.% -]*", value, re.IGNORECASE) is not None
    return name in _ATTRIBUTES.split() or name.startswith("aria-")


class _Styles(CSSSanitizer):  # type: ignore[misc]  # bleach has no types
    """Style attributes that cannot load anything or cover the page: only known properties, and functions for colours and sizes."""

    def sanitize_css(self, style: str) -> str:
        declarations = tinycss2.parse_declaration_list(style, skip_comments=True, skip_whitespace=True)
        kept = [found for found in declarations if found.type == "declaration" and self._is_harmless(found)]
        return " ".join(tinycss2.serialize([found]).rstrip(";") + ";" for found in kept)

    @staticmethod
    def _is_harmless(declaration: Any) -> bool:
        if _PROPERTIES.fullmatch(declaration.lower_name) is None:
            return False
        words = {token.lower_value for token in declaration.value if token.type == "ident"}
        if declaration.lower_name == "position" and words & {"fixed", "sticky"}:
            return False
        return all(_is_plain(token) for token in declaration.value)


def _is_plain(token: Any) -> bool:
    if token.type == "function":
        return token.lower_name in _FUNCTIONS.split() and all(map(_is_plain, token.arguments))
    return token.type in ("ident", "number", "percentage", "dimension", "hash", "literal", "whitespace", "string")
