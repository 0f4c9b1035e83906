"""The fonts inside a page: DejaVu, which comes with matplotlib, reduced to the characters that the page shows."""

from __future__ import annotations

import base64
import io
from functools import lru_cache
from pathlib import Path

from labkit.course.handouts.pages.own_matplotlib import own_matplotlib

# Family, weight, style, and matplotlib's file.
_FACES = (
    ("Handout Sans", 400, "normal", "DejaVuSans.ttf"),
    ("Handout Sans", 700, "normal", "DejaVuSans-Bold.ttf"),
    ("Handout Sans", 400, "italic", "DejaVuSans-Oblique.ttf"),
    ("Handout Mono", 400, "normal", "DejaVuSansMono.ttf"),
    ("Handout Mono", 700, "normal", "DejaVuSansMono-Bold.ttf"),
)


def font_css(text: str) -> str:
    """Return ``@font-face`` rules with the fonts in them.

    Args:
        text: All text that the page shows. The fonts contain its characters and printable ASCII.
    """
    characters = "".join(sorted(set(text) | {chr(code) for code in range(32, 127)}))
    rules = []
    for family, weight, style, file in _FACES:
        data = base64.b64encode(_subset(file, characters)).decode()
        rules.append(
            f"@font-face {{ font-family: '{family}'; font-weight: {weight}; font-style: {style}; "
            f"src: url(data:font/woff;base64,{data}) format('woff'); }}"
        )
    return "\n".join(rules)


@lru_cache(maxsize=64)
def _subset(file: str, characters: str) -> bytes:
    from fontTools import subset

    options = subset.Options(flavor="woff", layout_features=["kern"], notdef_outline=True)
    options.drop_tables += ["FFTM"]  # a time stamp of the font's editor
    font = subset.load_font(str(Path(own_matplotlib().get_data_path(), "fonts", "ttf", file)), options)
    subsetter = subset.Subsetter(options)
    subsetter.populate(text=characters)
    subsetter.subset(font)
    buffer = io.BytesIO()
    subset.save_font(font, buffer, options)
    return buffer.getvalue()
