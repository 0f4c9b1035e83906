"""A picture of a training step's memory over its operations, stacked by kind, with the moment of the peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from labkit.notebook.drawing.hover import HoverPicture, mark, with_hover
from labkit.notebook.drawing.style import INK, MUTED, Picture, figure
from labkit.notebook.pictures.bars import PART_LOOKS, scale_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# labkit.spmd.memory.timeline.MemoryTimeline. Its module imports torch; this module does not import torch, not even for types.
MemoryTimeline: TypeAlias = Any

KINDS = ("parameters", "optimizer", "gradients", "activations", "temporary")
# More columns than the picture has pixels would only make the file larger.
MAX_COLUMNS = 250


@dataclass(frozen=True)
class StepPart:
    """A part of the step: a block's forward or backward, or the operations outside of blocks.

    Attributes:
        phase: Forward, backward or optimizer.
        block: The block, empty outside of blocks.
        begin: Its first operation.
        end: The operation after its last one.
        peak: The bytes of each kind at the moment when their sum is largest.
    """

    phase: str
    block: str
    begin: int
    end: int
    peak: tuple[int, ...]

    @property
    def name(self) -> str:
        """The span in words."""
        return f"{self.phase} of block {self.block}" if self.block else self.phase


def memory_timeline(timeline: MemoryTimeline, *, caption: str, what: str = "memory of one rank") -> HoverPicture:
    """Draw a record of `labkit.spmd.memory.timeline.record_memory`.

    Each kind is stacked on the one below it, so the upper edge is the total. The kinds that live longest are lowest. The numbers
    below are blocks.

    Args:
        timeline: The record of one step.
        caption: The line under the picture.
        what: The axis label: what the bytes are.

    Returns:
        The picture, with a table of the peak bytes in each part of the step.

    Ranks: controller or local.
    """
    samples = [tuple(getattr(sample, kind) for kind in KINDS) for sample in timeline.samples]
    spans = spans_of(timeline, samples)
    totals = [sum(sample) for sample in samples]
    scale, unit = scale_for(max(totals))
    with figure(height_in=2.9) as fig:
        ax = fig.add_subplot()
        _draw_areas(ax, samples, scale)
        _draw_spans(ax, spans, max(totals) / scale)
        peak = timeline.peak_at
        ax.plot(peak + 0.5, totals[peak] / scale, marker="D", ms=6, mfc="white", mec=INK, mew=1.3, ls="", label="peak")
        ax.set_xlim(0, len(samples))
        ax.set_ylim(0, max(totals) / scale * 1.18)
        ax.set_xlabel("operations of the step, in order")
        ax.set_ylabel(f"{what}, {unit}")
        fig.legend(loc="outside upper left", ncols=len(KINDS) + 1, handlelength=1.4, columnspacing=0.9, handletextpad=0.4)
        return with_hover(
            fig,
            Picture.from_figure(
                fig,
                alt=_alt(spans, samples, peak),
                caption=caption,
                columns=("part of the step", "operations", *KINDS, "together"),
                rows=[
                    (span.name, span.end - span.begin, *(f"{size:,}" for size in span.peak), f"{sum(span.peak):,}")
                    for span in spans
                ],
            ),
        )


def spans_of(timeline: MemoryTimeline, samples: Sequence[tuple[int, ...]]) -> list[StepPart]:
    """Cut the step at its marks. The operations before the first mark belong to its span."""
    begins = [0, *(found.at for found in timeline.marks[1:]), len(samples)]
    spans = []
    for found, begin, end in zip(timeline.marks, begins, begins[1:], strict=False):
        if begin < end:
            spans.append(StepPart(found.phase, found.block, begin, end, max(samples[begin:end], key=sum)))
    return spans


def _draw_areas(ax: Axes, samples: Sequence[tuple[int, ...]], scale: int) -> None:
    step = max(1, -(-len(samples) // MAX_COLUMNS))
    begins = range(0, len(samples), step)
    columns = [max(samples[begin : begin + step], key=sum) for begin in begins]
    edges = [*begins, len(samples)]
    below = [0.0] * len(columns)
    for place, kind in enumerate(KINDS):
        above = [low + column[place] / scale for low, column in zip(below, columns, strict=True)]
        color, hatch = PART_LOOKS[kind]
        # A value is valid until the next one; the last one until the end.
        low, high = [*below, below[-1]], [*above, above[-1]]
        ax.fill_between(edges, low, high, step="post", fc=color, hatch=hatch, ec=INK, lw=0.3, label=kind)
        below = above


def _draw_spans(ax: Axes, spans: Sequence[StepPart], top: float) -> None:
    from matplotlib.patches import Rectangle

    for before, span in zip([None, *spans], spans, strict=False):
        if before is None or before.phase != span.phase:
            ax.axvline(span.begin, color=INK, ls="--", lw=0.8)
            ax.text(span.begin + 0.006 * spans[-1].end, top * 1.16, span.phase, ha="left", va="top", fontsize=8, color=INK)
        else:
            ax.axvline(span.begin, color=MUTED, ls=":", lw=0.6)
        parts = "\n".join(f"{kind}: {size:,}" for kind, size in zip(KINDS, span.peak, strict=True))
        box = ax.add_patch(Rectangle((span.begin, 0), span.end - span.begin, top, fc="none", ec="none"))
        mark(box, f"{span.name}, at most {sum(span.peak):,} bytes\n{parts}")
    blocks = [span for span in spans if span.block]
    ax.set_xticks([(span.begin + span.end) / 2 for span in blocks], [span.block for span in blocks])
    ax.tick_params(axis="x", length=0)


def _alt(spans: Sequence[StepPart], samples: Sequence[tuple[int, ...]], peak: int) -> str:
    at = next(span for span in spans if span.begin <= peak < span.end)
    largest = max(range(len(KINDS)), key=lambda place: samples[peak][place])
    return (
        f"Stacked areas over {len(samples):,} operations of a step. It begins with {sum(samples[0]):,} bytes and ends with "
        f"{sum(samples[-1]):,}. The peak is in {at.name}: {sum(samples[peak]):,} bytes, most of them {KINDS[largest]} "
        f"({samples[peak][largest]:,})."
    )
