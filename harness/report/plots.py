"""Inline SVG: lines over a logarithmic axis, and ranges. Colours come from the page's CSS, so dark mode and print follow.

A picture is 420 units wide with 12-unit text: about its real size on a phone, larger on a desk. Marks carry <title>,
which is shown on hover; every picture has a table beside it for those who cannot hover.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from markupsafe import Markup

WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 10, 42
NUM_COLOURS, NUM_DASHES = 8, 3

#: markers of 8 units around (0, 0), told apart without colour
MARKERS = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",  # circle
    "M-3.6,-3.6h7.2v7.2h-7.2z",  # square
    "M0,-4.6L4.4,3.4H-4.4z",  # triangle
    "M0,-5L5,0L0,5L-5,0z",  # diamond
    "M0,4.6L4.4,-3.4H-4.4z",  # triangle, upside down
    "M-1.5,-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",  # cross
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Style:
    """How a series is told from others; the CSS classes c0 to c7 and dash0 to dash2, and a marker. faint: no colour."""

    colour: int = 0
    dash: int = 0
    marker: int = 0
    faint: bool = False

    @property
    def classes(self) -> str:
        """CSS classes of the series' group."""
        return f"series dash{self.dash} " + ("faint" if self.faint else f"c{self.colour}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """A value with its interval, and what hovering says."""

    x: float
    y: float
    low: float
    high: float
    title: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    name: str
    style: Style
    points: Sequence[Point]


def lines(series: Sequence[Series], ceiling: Sequence[tuple[float, float]], x_label: str, y_label: str, title: str) -> Markup:
    """Draw series over a log2 axis of x, and the ceiling as a dashed line; y starts at 0. Later series lie on top."""
    xs = sorted({p.x for s in series for p in s.points} | {x for x, _ in ceiling})
    top = max([p.high for s in series for p in s.points] + [y for _, y in ceiling], default=1.0)
    ticks = nice_ticks(top)
    low, high = math.log2(xs[0]), math.log2(xs[-1])

    def place_x(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log2(x) - low) / ((high - low) or 1)

    def place_y(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / ticks[-1]

    parts = [frame_y(ticks, place_y), _frame_x(xs, place_x), axis_names(x_label, y_label)]
    if ceiling:
        parts.append(Markup('<path class="ceiling" d="{}"><title>{}</title></path>').format(
            _path([(place_x(x), place_y(y)) for x, y in ceiling]), "measured ceiling"))
    for one in series:
        dots = [(place_x(p.x), place_y(p.y), place_y(p.low), place_y(p.high), p.title) for p in one.points]
        parts.append(Markup('<g class="{}">{}</g>').format(one.style.classes, _marks(dots, MARKERS[one.style.marker])))
    return svg(HEIGHT, title, parts)


def _marks(dots: Sequence[tuple[float, float, float, float, str]], marker: str) -> Markup:
    """A line through the dots, the band of their intervals where it can be seen, and each marker with its title."""
    line = Markup('<path class="line" d="{}"/>').format(_path([(x, y) for x, y, *_ in dots]))
    edge = [(x, high) for x, _, _, high, _ in dots] + [(x, low) for x, _, low, _, _ in reversed(dots)]
    is_seen = any(low - high >= 1 for _, _, low, high, _ in dots)
    band = Markup('<path class="band" d="{}z"/>').format(_path(edge)) if is_seen else Markup("")
    heads = Markup("").join(
        Markup('<path class="mark" transform="translate({:.1f},{:.1f})" d="{}"><title>{}</title></path>').format(
            x, y, marker, title)
        for x, y, _, _, title in dots
    )
    return band + line + heads


def frame_y(ticks: Sequence[float], at: Callable[[float], float]) -> Markup:
    """Draw a line and a number for each tick of the vertical axis."""
    return Markup("").join(
        Markup('<path class="grid" d="M{},{:.1f}H{}"/><text class="tick end" x="{}" y="{:.1f}">{}</text>').format(
            LEFT, at(tick), WIDTH - RIGHT, LEFT - 5, at(tick) + 4, f"{tick:g}")
        for tick in ticks
    )


def _frame_x(xs: Sequence[float], at: Callable[[float], float]) -> Markup:
    """A tick at every x; labels where they do not touch the one before."""
    parts, last = [], -math.inf
    for x in xs:
        where = at(x)
        parts.append(Markup('<path class="grid" d="M{0:.1f},{1}v4"/>').format(where, HEIGHT - BOTTOM))
        text = short(x)
        if where - last >= 7 * len(text) + 4:
            parts.append(Markup('<text class="tick mid" x="{:.1f}" y="{}">{}</text>').format(where, HEIGHT - BOTTOM + 16, text))
            last = where
    return Markup("").join(parts)


def axis_names(x_label: str, y_label: str) -> Markup:
    """Write what the axes are."""
    return Markup(
        '<text class="mid" x="{}" y="{}">{}</text><text class="mid" transform="translate(12,{}) rotate(-90)">{}</text>'
    ).format((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label, (TOP + HEIGHT - BOTTOM) / 2, y_label)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def svg(height: float, title: str, parts: Sequence[Markup]) -> Markup:
    """Return a picture of WIDTH by `height` units made of `parts`."""
    return Markup('<svg class="plot" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, height, title, Markup("").join(parts))


def key(style: Style) -> Markup:
    """Draw a legend's sample of a style."""
    return Markup(
        '<svg class="key" viewBox="-14 -6 28 12" aria-hidden="true"><g class="{}"><path class="line" d="M-14,0H14"/>'
        '<path class="mark" d="{}"/></g></svg>'
    ).format(style.classes, MARKERS[style.marker])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """One line of `spans`: a name over marks of several kinds, each (value, kind, title)."""

    name: str
    marks: Sequence[tuple[float, int, str]]


def spans(lines_of: Sequence[Span], ticks: Sequence[tuple[float, str]], title: str) -> Markup:
    """Draw a line for each name with its marks over a logarithmic axis; values must be above 0."""
    step, left = 30, 8
    low, high = math.log10(ticks[0][0]), math.log10(ticks[-1][0])

    def place_x(value: float) -> float:
        return left + (WIDTH - 2 * left) * (math.log10(value) - low) / ((high - low) or 1)

    height = TOP + step * len(lines_of) + 20
    parts = []
    for value, text in ticks:
        anchor = "end" if value == ticks[-1][0] else "mid" if value != ticks[0][0] else ""
        tick = Markup('<path class="grid" d="M{0:.1f},{1}V{2}"/><text class="tick {3}" x="{0:.1f}" y="{4}">{5}</text>')
        parts.append(tick.format(place_x(value), TOP, height - 18, anchor, height - 5, text))
    for index, span in enumerate(lines_of):
        y = TOP + step * index + 20
        parts.append(Markup('<text class="name" x="{}" y="{}">{}</text><path class="grid" d="M{},{}H{}"/>').format(
            left, y - 8, span.name, left, y, WIDTH - left))
        for value, kind, text in span.marks:  # kinds on either side of the line: equal values would hide each other
            mark = Markup('<g class="series c{}"><path class="mark" transform="translate({:.1f},{})" d="{}">'
                          "<title>{}</title></path></g>")
            parts.append(mark.format(kind, place_x(value), y + 6 * kind - 3, MARKERS[kind], text))
    return svg(height, title, parts)


def nice_ticks(top: float, most: int = 6) -> list[float]:
    """Return 0, step, ... up to the first tick at or over `top`, with a step of 1, 2 or 5 times a power of ten."""
    if not top > 0:
        return [0.0, 1.0]
    rough = top / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    return [round(i * step, 12) for i in range(math.ceil(top / step - 1e-9) + 1)]


def short(x: float) -> str:
    """Return 8192 as "8k": k is 1024, M its square; other numbers as they are."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "k")):
        if x >= unit and x % unit == 0:
            return f"{int(x) // unit}{name}"
    return f"{x:g}"


CEILING_KEY = Markup(
    '<svg class="key" viewBox="-14 -6 28 12" aria-hidden="true"><path class="ceiling" d="M-14,0H14"/></svg>'
)
