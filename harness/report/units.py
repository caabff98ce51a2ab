"""SI in, text out: every number that people read is formatted here. "-" is "not measured"."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable

from harness.record import Samples

MISSING = "-"
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclasses.dataclass(frozen=True)
class Scale:
    """A unit and how many SI units it is: Scale("µs", 1e-6). One scale serves a whole column."""

    unit: str
    size: float

    def show(self, value: float | None, digits: int = 4, most_places: int = 3) -> str:
        """Return `value`, in SI, as a plain decimal number of this unit, without the unit's name."""
        return MISSING if value is None else decimal(value / self.size, digits, most_places)


MICROSECONDS, MILLISECONDS, SECONDS = Scale("µs", 1e-6), Scale("ms", 1e-3), Scale("s", 1.0)


def time_scale(device_kind: str, values: Iterable[float | None]) -> Scale:
    """Microseconds on a GPU; elsewhere the unit in which the smallest value is at least 10, if any."""
    smallest = min((value for value in values if value), default=0.0)
    if device_kind == "cuda" or smallest < 10e-3:
        return MICROSECONDS
    return MILLISECONDS if smallest < 10.0 else SECONDS


def interval(scale: Scale, samples: Samples | None) -> str:
    """Return a confidence interval as "479.9 to 480.8"; one visit has none."""
    if samples is None or len(samples.samples) == 1:
        return MISSING
    return f"{scale.show(samples.low)} to {scale.show(samples.high)}"


def rate_scale(device_kind: str, is_arithmetic: bool = False) -> Scale:
    """TB/s on a GPU, GB/s on a CPU; 10^12 and 10^9 bytes a second. For arithmetic TFLOP/s and GFLOP/s."""
    what = "FLOP/s" if is_arithmetic else "B/s"
    return Scale(f"T{what}", 1e12) if device_kind == "cuda" else Scale(f"G{what}", 1e9)


def decimal(value: float, digits: int = 4, most_places: int = 12) -> str:
    """Return `value` with `digits` significant digits and no exponent; digits before the point are all kept."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    if abs(round(value, places)) >= 10.0 ** (digits - places):  # 9.9996 becomes 10.00, with one place fewer
        places -= 1
    return f"{value:.{min(max(places, 0), most_places)}f}"


def size(count: float | None) -> str:
    """Return a number of bytes as "2.15 GB"; powers of 1000."""
    if count is None:
        return MISSING
    for unit, name in _BYTES:
        if abs(count) >= unit:
            return f"{decimal(count / unit, 3)} {name}"
    return f"{count:.0f} B"


def flops(count: float) -> str:
    """Return a number of floating-point operations as "66.5 GFLOP"."""
    unit, name = next(((unit, name) for unit, name in ((1e12, "TFLOP"), (1e9, "GFLOP")) if count >= unit), (1e6, "MFLOP"))
    return f"{decimal(count / unit, 3)} {name}"


def round_size(count: float) -> str:
    """Return a round number of bytes, a tick of an axis, as "10 MB"."""
    unit, name = next(((unit, name) for unit, name in _BYTES if count >= unit), (1.0, "B"))
    return f"{count / unit:g} {name}"


def percent(share: float | None) -> str:
    """Return a share of one as "97.8%"."""
    return MISSING if share is None else f"{100 * share:.1f}%"


#: harness/check.py divides by at least 1e-300: beyond any ratio of two floats of the tensors, nothing was allowed
FROM_NOTHING = 1e150


def of_allowed(error: float | None) -> str:
    """Return an error as a share of what was allowed: "41.2%", "35 times", "not finite", "0 allowed"."""
    if error is None or error < 10:
        return percent(error)
    if FROM_NOTHING < error < math.inf:
        return "0 allowed"
    return f"{error:.0f} times" if error < 1e6 else f"{error:.0e} times" if math.isfinite(error) else "not finite"


def ratio(value: float | None) -> str:
    """Return how many times the best, as "1.03"; two places, none from 100 on."""
    return MISSING if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def seconds(value: float | None) -> str:
    """Return a duration as "5.12 µs", "2.35 ms", "4.00 s"."""
    if value is None:
        return MISSING
    scale = MICROSECONDS if value < 1e-3 else MILLISECONDS if value < 1.0 else SECONDS
    return f"{scale.show(value, 3)} {scale.unit}"


def joules(value: float | None) -> str:
    """Return an energy as "0.21 mJ", "3.1 J"."""
    if value is None:
        return MISSING
    unit, name = ((1.0, "J") if value >= 1 else (1e-3, "mJ") if value >= 1e-3 else (1e-6, "µJ"))
    return f"{decimal(value / unit, 3)} {name}"


def count(number: int, noun: str) -> str:
    """Return "1 row", "2 rows"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


_RAW = re.compile(r"(?<![\w.])(\d{1,15}(?:\.\d{1,15})?(?:e[+-]?\d{1,2})?) (s|bytes)\b")


def prose(text: str) -> str:
    """Return a flag with its seconds and bytes, which records have in SI, as people read them: "4.64e-05 s" is "46.4 µs"."""

    def shown(found: re.Match[str]) -> str:
        value = float(found[1])
        if found[2] == "bytes":
            return size(value)
        scale = MICROSECONDS if value < 10e-3 else MILLISECONDS if value < 1 else SECONDS
        return f"{scale.show(value, 3)} {scale.unit}" if value < 1 else found[0]

    return _RAW.sub(shown, text)


def flags(found: Iterable[str]) -> str:
    """Return a row's flags as one line."""
    return "; ".join(map(prose, found))


def plain(value: object) -> str:
    """Return a value of which only the name is known, as in NVML facts and versions; numbers to 4 digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ", ".join(map(plain, value)) if isinstance(value, list | tuple) else str(value)
    return str(value) if isinstance(value, int) else decimal(value)
