"""Text that appears when the pointer rests on a part of a picture.

The picture itself stays an image. Transparent boxes, each with a title, lie over it: plain HTML that needs no script and scales
with the picture. They repeat the content of the picture's table, so users of a keyboard or a screen reader miss nothing.
"""

from __future__ import annotations

import dataclasses
import html
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.notebook.drawing.style import Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARK = "_labkit_hover"


@dataclass(frozen=True)
class Spot:
    """A box over a picture.

    Attributes:
        left: Its left edge, as a fraction of the picture's width.
        top: Its upper edge, as a fraction of the picture's height.
        width: Its width, as a fraction of the picture's.
        height: Its height, as a fraction of the picture's.
        text: The text.
    """

    left: float
    top: float
    width: float
    height: float
    text: str


@dataclass(frozen=True, repr=False)
class HoverPicture(Picture):
    """A picture with text on its parts.

    Attributes:
        spots: The parts with text.
    """

    spots: tuple[Spot, ...] = ()

    def to_html(self) -> str:
        """Return the picture as one self-contained ``<figure>``, with the spots over its image."""
        figure = super().to_html()
        begin = figure.index("<img")
        end = figure.index(">", begin) + 1
        image, spots = figure[begin:end], "".join(map(_spot_html, self.spots))
        wrapped = f'<div style="position:relative;width:{round(self.width_in * 96)}px;max-width:100%">{image}{spots}</div>'
        return figure[:begin] + wrapped + figure[end:]


def _spot_html(spot: Spot) -> str:
    place = f"left:{spot.left:.2%};top:{spot.top:.2%};width:{spot.width:.2%};height:{spot.height:.2%}"
    words = html.escape(spot.text, quote=True).replace("\n", "&#10;")
    return f'<span aria-hidden="true" title="{words}" style="position:absolute;{place}"></span>'


def mark(patch: Any, text: str) -> None:
    """Attach a text to a part of a figure."""
    setattr(patch, _MARK, text)


def with_hover(fig: Figure, picture: Picture) -> HoverPicture:
    """Return the picture with text on the marked parts of its figure. Call it inside the ``with figure()`` block."""
    fig.draw_without_rendering()
    width, height = fig.bbox.width, fig.bbox.height
    spots = []
    for patch in fig.findobj(lambda artist: hasattr(artist, _MARK)):
        box = patch.get_window_extent()
        spots.append(Spot(box.x0 / width, 1 - box.y1 / height, box.width / width, box.height / height, str(getattr(patch, _MARK))))
    fields = {field.name: getattr(picture, field.name) for field in dataclasses.fields(Picture)}
    return HoverPicture(**fields, spots=tuple(spots))
