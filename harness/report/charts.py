"""Two more pictures as inline SVG, beside those of plots.py: a row's time over runs, and shares of a whole, a bar a line."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence

from markupsafe import Markup

from harness.report.plots import BOTTOM, HEIGHT, LEFT, MARKERS, RIGHT, TOP, WIDTH, axis_names, frame_y, svg

_CHARACTER = 7.5  # units that a character of an axis takes, about


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dot:
    """One run: its value, what stands below it, and what hovering says."""

    value: float
    label: str
    title: str


def runs(dots: Sequence[Dot], edges: Sequence[int], y_label: str, title: str) -> Markup:
    """Draw runs in their order, and the level of each stretch between two edges. The axis does not begin at 0."""
    values = [dot.value for dot in dots]
    ticks = _ticks_around(min(values), max(values))
    step = (WIDTH - LEFT - RIGHT) / len(dots)

    def place_x(index: float) -> float:
        return LEFT + step * (index + 0.5)

    def place_y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - ticks[0]) / (ticks[-1] - ticks[0])

    parts = [frame_y(ticks, place_y), _run_names(dots, edges, place_x), axis_names("revision, in the order of runs", y_label)]
    for first, end in itertools.pairwise(edges):
        y = place_y(statistics.geometric_mean(values[first:end]))
        ends = place_x(first - 0.4), place_x(end - 0.6)
        parts.append(Markup('<path class="level" d="M{:.1f},{:.1f}H{:.1f}"/>').format(ends[0], y, ends[1]))
    for index, dot in enumerate(dots):
        parts.append(Markup('<g class="series c0"><path class="mark" transform="translate({:.1f},{:.1f})" d="{}">'
                            "<title>{}</title></path></g>").format(place_x(index), place_y(dot.value), MARKERS[0], dot.title))
    return svg(HEIGHT, title, parts)


def _run_names(dots: Sequence[Dot], edges: Sequence[int], place_x: Callable[[float], float]) -> Markup:
    """Names below the runs that begin a level, and below others as far as there is room."""
    taken: list[tuple[float, float]] = []
    parts = []
    for index in dict.fromkeys([*edges[:-1], len(dots) - 1, *range(len(dots))]):
        text, x = dots[index].label[:9], place_x(index)
        half = _CHARACTER * len(text) / 2
        x = min(max(x, LEFT + half), WIDTH - half)
        if all(x + half + 6 < start or x - half - 6 > end for start, end in taken):
            taken.append((x - half, x + half))
            parts.append(Markup('<text class="tick mid" x="{:.1f}" y="{}">{}</text>').format(x, HEIGHT - BOTTOM + 16, text))
    return Markup("").join(parts)


def _ticks_around(low: float, high: float, most: int = 5) -> list[float]:
    """Ticks of 1, 2 or 5 times a power of ten from at most `low` to at least `high`; of one value, some around it."""
    wide = (high - low) or abs(high) * 0.02 or 1.0
    power = 10.0 ** math.floor(math.log10(wide / most))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= wide / most * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{n * step:.12g}") for n in range(first, max(last, first + 1) + 1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
    """A whole of 1 and its parts, each (share, what hovering says), in the order of the colours."""

    name: str
    parts: Sequence[tuple[float, str]]


def shares(bars: Sequence[Bar], title: str) -> Markup:
    """Draw a bar for each whole, its name above it; the parts differ in colour and are divided by gaps."""
    step, left, thick = 34, 8, 12
    wide, height = WIDTH - 2 * left, TOP + step * len(bars) + 18
    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        anchor = "end" if share == 1 else "mid" if share else ""
        tick = Markup('<path class="grid" d="M{0:.1f},{1}V{2}"/><text class="tick {3}" x="{0:.1f}" y="{4}">{5:.0f}%</text>')
        parts.append(tick.format(left + wide * share, TOP, height - 16, anchor, height - 3, 100 * share))
    for index, bar in enumerate(bars):
        y = TOP + step * index + 16
        parts.append(Markup('<text class="name" x="{}" y="{}">{}</text>').format(left, y - 4, bar.name))
        start = 0.0
        for number, (share, said) in enumerate(bar.parts):
            if share > 0:
                rectangle = Markup('<path class="mark part p{}" d="M{:.1f},{}h{:.1f}v{}h-{:.1f}z"><title>{}</title></path>')
                length = max(wide * share - 1, 0.5)
                parts.append(rectangle.format(number, left + wide * start, y, length, thick, length, said))
            start += share
    return svg(height, title, parts)


def part_key(number: int) -> Markup:
    """Draw a legend's sample of a bar's part."""
    return Markup(
        '<svg class="key" viewBox="-14 -6 28 12" aria-hidden="true"><path class="part p{}" d="M-12,-5h24v10h-24z"/></svg>'
    ).format(number)
