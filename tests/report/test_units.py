"""Numbers as text: enough digits, one unit a column, no exponents."""

import pytest

from harness.record import Samples
from harness.report import units


@pytest.mark.parametrize(("value", "text"), [
    (489.73, "489.7"), (12.0, "12.00"), (2157.8, "2158"), (1234567.0, "1234567"), (0.0, "0"),
    (9.99996, "10.00"), (-3.14159, "-3.142"), (0.00012345, "0.0001234"), (float("inf"), "inf"),
])
def test_decimals_keep_four_digits(value, text):
    """Four significant digits, all digits before the point, never an exponent."""
    assert units.decimal(value) == text


@pytest.mark.parametrize(("count", "text"), [
    (None, "-"), (0, "0 B"), (999, "999 B"), (67_200_000, "67.2 MB"), (2_148_000_000, "2.15 GB"), (1.41e11, "141 GB"),
])
def test_sizes_are_powers_of_a_thousand(count, text):
    """Bytes are shown with three digits in the largest unit that keeps them over one."""
    assert units.size(count) == text


@pytest.mark.parametrize(("kind", "smallest", "unit"), [
    ("cuda", 3e-6, "µs"), ("cuda", 2.0, "µs"), ("cpu", 3e-6, "µs"), ("cpu", 0.02, "ms"), ("cpu", 30.0, "s"),
])
def test_a_column_has_one_unit(kind, smallest, unit):
    """A GPU's column is in microseconds; a CPU's follows its smallest value, and missing ones have no say."""
    assert units.time_scale(kind, [smallest, None, 100 * smallest]).unit == unit


def test_an_interval_shows_both_ends():
    """An interval that is not symmetric is not shown as if it were."""
    assert units.interval(units.MICROSECONDS, Samples(median=10e-6, low=9.9e-6, high=10.5e-6, samples=())) == "9.900 to 10.50"
    assert units.interval(units.MICROSECONDS, None) == "-"


def test_one_visit_has_no_interval():
    """The interval of one visit would read as if nothing varied."""
    assert units.interval(units.MICROSECONDS, Samples(median=10e-6, low=10e-6, high=10e-6, samples=(10e-6,))) == "-"


@pytest.mark.parametrize(("flag", "text"), [
    ("timers disagree: events say 4.64e-05 s, the second opinion 0.0123 s",
     "timers disagree: events say 46.4 µs, the second opinion 12.3 ms"),
    ("workspace: declares 512 bytes, holds 33567232 bytes", "workspace: declares 512 B, holds 33.6 MB"),
    ("the limit is 60 s after 12 visits of v2.5 sets", "the limit is 60 s after 12 visits of v2.5 sets"),
])
def test_flags_are_in_units_for_people(flag, text):
    """Seconds and bytes within a sentence are shown as everywhere; other numbers stay."""
    assert units.prose(flag) == text


@pytest.mark.parametrize(("error", "text"), [
    (None, "-"), (0.412, "41.2%"), (3.5, "350.0%"), (35.2, "35 times"), (3e8, "3e+08 times"), (float("inf"), "not finite"),
])
def test_errors_are_shares_of_what_is_allowed(error, text):
    """A wrong row's error is so many times what is allowed, and NaN or infinity is neither a share nor a number."""
    assert units.of_allowed(error) == text


@pytest.mark.parametrize(("value", "text"), [(5.12e-6, "5.12 µs"), (79e-6, "79.0 µs"), (2.346e-3, "2.35 ms"), (4.0, "4.00 s")])
def test_a_duration_has_the_unit_that_fits_it(value, text):
    """Microseconds, milliseconds or seconds; three digits."""
    assert units.seconds(value) == text


def test_what_was_not_measured_is_a_dash():
    """None is a dash in every unit, never a zero."""
    shown = {show(None) for show in (units.percent, units.ratio, units.joules, units.seconds, units.MICROSECONDS.show)}

    assert shown == {"-"}


@pytest.mark.parametrize(("error", "text"), [
    (None, "-"), (0.412, "41.2%"), (35.4, "35 times"), (2.5e7, "2e+07 times"), (3e297, "0 allowed"),
    (float("inf"), "not finite"),
])
def test_an_error_is_told_by_what_was_allowed(error, text):
    """Where nothing was allowed there is no share to tell."""
    assert units.of_allowed(error) == text
