"""The style of labkit's figures and their format: one colour per rank, one size, one class for every picture.

The colours are the palette of Okabe and Ito (2008), which readers with a colour vision deficiency can distinguish. A rank keeps its
colour and its hatch through the whole course, so a reader who recognizes rank 2 in one figure recognizes it in all.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH_IN = 6.0
HEIGHT_IN = 2.5
PNG_DPI = 150

INK = "#222222"
MUTED = "#767676"
FAINT = "#E6E6E6"

_RANK_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
# Use lines only: a dotted hatch makes an SVG ten times as large.
_RANK_HATCHES = ("", "///", "---", "\\\\\\", "xxx", "|||", "+++", "///|||")

_RC: dict[Any, Any] = {  # matplotlib's own key type is a list of 300 names
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "hatch.linewidth": 0.6,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    # Draw glyphs as paths, so that the picture is the same whatever fonts the reader's machine has.
    "svg.fonttype": "path",
    "svg.hashsalt": "labkit",
}


@dataclass(frozen=True)
class RankStyle:
    """The appearance of one rank.

    Attributes:
        color: Fill colour as ``#RRGGBB``.
        hatch: A matplotlib hatch, which identifies the rank in black and white where no label fits.
        text_color: Black or white, whichever is easier to read on ``color``.
    """

    color: str
    hatch: str
    text_color: str


def rank_style(rank: int) -> RankStyle:
    """Return the colour and hatch of a rank: colours repeat after 8 ranks, the pair of colour and hatch after 64."""
    color = _RANK_COLORS[rank % 8]
    return RankStyle(color, _RANK_HATCHES[(rank + rank // 8) % 8], text_color_on(color))


def text_color_on(color: str) -> str:
    """Return black or white, whichever has the higher WCAG contrast on ``color`` (``#RRGGBB``)."""
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#FFFFFF" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "#000000"


@contextmanager
def figure(*, width_in: float = WIDTH_IN, height_in: float = HEIGHT_IN) -> Iterator[Figure]:
    """Make a figure in labkit's style. Draw on it inside the ``with``, and make the `Picture` there too.

    The figure is independent of pyplot, backends and global state, and need not be closed.

    Args:
        width_in: Width in inches. Keep the default: a page shows all figures equally wide.
        height_in: Height in inches; more only if the rows need it.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_RC):
        yield Figure(figsize=(width_in, height_in), layout="constrained")


@dataclass(frozen=True)
class Picture:
    """A finished figure with its texts, which a notebook shows, saves, prints and reads aloud.

    The notebook shows ``text/html``: a ``<figure>`` with an SVG image and its alt text, the caption, and the numbers as a folded
    table. The image is in an ``<img>`` and not in the page itself, because JupyterLab removes inline SVG from notebooks that it
    does not trust. ``image/png`` and ``text/plain`` are equivalents for readers without HTML.

    Attributes:
        svg: The drawing as an SVG document.
        png: The same drawing as PNG bytes, `PNG_DPI` dots per inch.
        width_in: Width in inches.
        alt: One or two sentences for a reader who cannot see the picture.
        caption: The line under the figure.
        columns: The head of the table, which holds the same numbers as the picture.
        rows: Its rows, each as long as ``columns``.
    """

    svg: str
    png: bytes
    width_in: float
    alt: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def from_figure(
        cls, fig: Figure, *, alt: str, caption: str, columns: Sequence[str], rows: Sequence[Sequence[object]]
    ) -> Picture:
        """Render a drawn figure. Call it inside the ``with figure()`` block, because its settings must hold while rendering.

        Raises:
            ValueError: The alt text or the table is missing, or a row is not as long as the head.
        """
        if not alt.strip() or not rows:
            raise ValueError("a picture needs alt text and a table with the numbers it draws")
        if any(len(row) != len(columns) for row in rows):
            raise ValueError(f"each row of the table needs {len(columns)} cells, one per column")
        svg, png = io.StringIO(), io.BytesIO()
        fig.savefig(svg, format="svg", metadata={"Date": None, "Title": alt})
        fig.savefig(png, format="png", dpi=PNG_DPI)
        document = svg.getvalue()
        text_rows = tuple(tuple(str(cell) for cell in row) for row in rows)
        return cls(
            document[document.index("<svg") :], png.getvalue(), float(fig.get_figwidth()), alt, caption, tuple(columns), text_rows
        )

    def to_html(self) -> str:
        """Return the picture as one self-contained ``<figure>``."""
        data = base64.b64encode(self.svg.encode()).decode()
        return (
            '<figure style="margin:0.5em 0">'
            f'<img src="data:image/svg+xml;base64,{data}" alt="{html.escape(self.alt, quote=True)}"'
            f' style="width:{round(self.width_in * 96)}px;max-width:100%;height:auto">'
            f'<figcaption style="max-width:48em;font-size:92%">{html.escape(self.caption)}</figcaption>'
            f"<details><summary>The numbers as a table</summary>{self._html_table()}</details></figure>"
        )

    def to_text(self) -> str:
        """Return the caption, the alt text and the table in columns."""
        return "\n".join([self.caption, self.alt, *text_table(self.columns, self.rows)])

    def _html_table(self) -> str:
        head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in self.columns)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self.rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def __repr__(self) -> str:
        return self.to_text()

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> tuple[dict[str, str], dict[str, Any]]:
        data = {"text/html": self.to_html(), "image/png": base64.b64encode(self.png).decode(), "text/plain": self.to_text()}
        return data, {"image/png": {"alt": self.alt, "width": round(self.width_in * 96)}}


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Align a table in plain text: one line for the head, one per row, numbers to the right."""
    table = [tuple(columns), *(tuple(row) for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    numeric = [all(_is_number(row[i]) for row in rows) for i in range(len(columns))]
    lines = []
    for row in table:
        cells = zip(row, widths, numeric, strict=True)
        lines.append("  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells).rstrip())
    return lines


def _is_number(text: str) -> bool:
    return text.replace(",", "").replace(".", "", 1).lstrip("-").isdigit()
