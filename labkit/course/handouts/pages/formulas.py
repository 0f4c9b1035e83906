r"""Formulas as pictures inside the page: no script, no font, no network.

matplotlib's mathtext draws them. It supports much of TeX's mathematics, but no environments such as ``\begin{cases}``.
"""

from __future__ import annotations

import base64
import html
import io

from labkit.course.handouts.errors import HandoutError
from labkit.course.handouts.pages.own_matplotlib import own_matplotlib

_SIZE_PT = {False: 11.0, True: 12.5}


def formula(tex: str, *, display: bool) -> str:
    """Return a formula as an image with its source as alternative text.

    Args:
        tex: The formula without dollar signs.
        display: Whether the formula is on its own line, or part of a line.

    Raises:
        HandoutError: mathtext cannot draw it.
    """
    mpl = own_matplotlib()
    from matplotlib.font_manager import FontProperties
    from matplotlib.mathtext import math_to_image

    picture = io.BytesIO()
    try:
        with mpl.rc_context():
            mpl.rcdefaults()  # not the user's, under which a page would look otherwise, or TeX would draw the formula
            mpl.rcParams.update({"mathtext.fontset": "dejavusans", "svg.fonttype": "path", "svg.hashsalt": "labkit"})
            depth = math_to_image(f"${tex.strip()}$", picture, FontProperties(size=_SIZE_PT[display]), dpi=72, format="svg")
    except ValueError as error:
        raise HandoutError(f"the formula {tex.strip()!r} cannot be drawn: {error}") from None
    data = base64.b64encode(picture.getvalue()).decode()
    image = (
        f'<img class="formula" style="vertical-align:{-depth:.2f}pt" src="data:image/svg+xml;base64,{data}" '
        f'alt="{html.escape(tex.strip(), quote=True)}">'
    )
    return f'<p class="formula">{image}</p>' if display else image
