"""A record is one line: what was written comes back, and no line, however odd, does more than be refused."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from harness.record import SCHEMA, STATUSES, Record, RecordError, Samples, parse_line

MINIMAL = Record(
    run="20261130T120000Z", suite="quick", started_at="2026-11-30T12:00:00+00:00", op="attention", case="some.case",
    case_digest="0123456789ab", shape={"op": "attention", "seq_lens": [5, 9]}, impl="toy.a", layout="NHD", status="ok",
    device="nvidia-h200", device_kind="cuda", toolchain={"torch": "2.13.0"},
)  # fmt: skip
FULL = dataclasses.replace(
    MINIMAL,
    role="reader", params={"splits": 4, "mode": "fast"}, status="wrong",
    reason="3 of 65536 outputs\nare \"off\" by ±1 \U0001f600",
    flags=("never converged", "throttled"), check={"plain": {"passed": False, "ratios": {"l2": 3.5}}},
    launch_s=Samples(median=2e-5, low=1.9e-5, high=2.1e-5, samples=(2e-5, 1.9e-5, 2.1e-5)),
    plan_s=Samples(median=1.0, low=1.0, high=1.0, samples=(1.0,)),
    host_s=4e-6, plan_host_s=2e-6, traffic_bytes=2**40, flops=3,
    ceiling_s=1e-5, ceiling_by="torch.read[HND] width=4", ceiling_share=0.5,
    workspace_bytes=0, memory={"nvml_bytes": 7}, nvml={"sm_clock_mhz": 1980, "throttles": ["power cap"]}, power_w=650.5,
    energy_j=0.01, kernels=({"name": "k", "registers": 64},), ledger={"plan": "outside"},
    unit={"name": "cuda:1", "uuid": "GPU-0"},
)  # fmt: skip
GOOD = json.loads(FULL.to_line())


def line(**changes):
    return json.dumps({**GOOD, **changes})


@pytest.mark.parametrize("record", [MINIMAL, FULL], ids=["minimal", "full"])
def test_a_record_survives_its_line(record):
    """Written and read again it is the same, in one line of ASCII."""
    text = record.to_line()

    assert parse_line(text) == record
    assert "\n" not in text
    assert text.isascii()
    assert json.loads(text)["schema"] == SCHEMA


def test_fields_of_a_later_version_are_ignored():
    """A field that this version does not know breaks nothing, so that fields may be added under one schema."""
    assert parse_line(line(invented_later={"a": 1})) == FULL


def test_records_are_told_apart_by_row_and_key():
    """The row shows the layout; the key is what runs are compared by."""
    assert FULL.row == "toy.a[NHD]"
    assert FULL.key == ("0123456789ab", "toy.a", "NHD", "nvidia-h200")


@pytest.mark.parametrize("status", [status for status in STATUSES if status != "ok"])
@pytest.mark.parametrize("reason", [None, ""])
def test_what_is_not_ok_gives_its_reason(status, reason):
    """Nothing vanishes: a record that failed without a reason cannot be made."""
    with pytest.raises(RecordError, match=f"a record with status '{status}' must give its reason"):
        dataclasses.replace(MINIMAL, status=status, reason=reason)


def test_an_unknown_status_names_the_known():
    """Six and no more."""
    with pytest.raises(RecordError, match=r"status must be one of ok, wrong, .*timeout \(got 'good'\)"):
        dataclasses.replace(MINIMAL, status="good")


def test_a_line_holds_no_number_that_json_lacks():
    """NaN and infinity inside a mapping become their names; strict readers of JSON can read every line."""
    odd = dataclasses.replace(MINIMAL, check={"plain": {"error": math.nan, "ratios": {"max": math.inf, "l2": -math.inf}}})

    assert parse_line(odd.to_line()).check == {"plain": {"error": "nan", "ratios": {"max": "inf", "l2": "-inf"}}}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (np.int64(7), 7), (np.float32(0.5), 0.5), (np.bool_(True), True), (frozenset({"x"}), "frozenset({'x'})"),
        (b"raw", "b'raw'"), (("a", None, True), ["a", None, True]), ({1: 2}, {"1": 2}), (complex(1, 2), "(1+2j)"),
    ],
    ids=repr,
)  # fmt: skip
def test_whatever_an_implementation_says_of_itself_can_be_written(given, read):
    """A ledger or a kernel's facts may hold anything; what JSON lacks is written as its text, and no run ends for it."""
    odd = dataclasses.replace(MINIMAL, ledger={"odd": given}, kernels=({"odd": given},))
    back = parse_line(odd.to_line())

    assert back.ledger == {"odd": read if isinstance(read, str) else json.dumps(read)}
    assert back.kernels == ({"odd": read},)


ODD_LINES = [
    ("", "not JSON"),
    ("{", "not JSON"),
    (line()[:-1], "not JSON"),
    (line()[:200], "not JSON"),
    (line() + "x", "not JSON"),
    ("[" * 100_000, "not JSON"),
    (line(shape="@").replace('"@"', '{"a":' * 100_000 + "1" + "}" * 100_000), "not JSON"),
    (line(flops="@").replace('"@"', "9" * 5000), "not JSON"),
    ("\x00", "not JSON"),
    ("7", "not an object (got int)"),
    ("null", "not an object (got NoneType)"),
    ("[]", "not an object (got list)"),
    ("{}", "schema must be 1 (got None)"),
    (line(schema=2), "schema must be 1 (got 2)"),
    (line(schema="1"), "schema must be 1 (got '1')"),
    (line(schema=True), "schema must be 1 (got True)"),
    (line(schema=[1]), "schema must be 1 (got [1])"),
    (json.dumps({"schema": 1}), "lacks run, suite, started_at, op, case"),
    (line(status="good"), "status must be one of"),
    (line(reason=None), "must give its reason"),
    *((line(**{name: value}), f"{name} has the wrong type")
      for name in ("run", "case", "case_digest", "impl", "layout", "status", "device", "role")
      for value in (None, 7, ["a"], {})),
    *((line(**{name: value}), f"{name} has the wrong type")
      for name in ("shape", "unit", "toolchain", "params", "check", "memory", "nvml", "ledger")
      for value in (None, 7, ["a"], "a")),
    *((line(**{name: {"torch": value}}), f"{name} has the wrong type")
      for name in ("unit", "toolchain") for value in (None, 7, ["a"], {})),
    *((line(**{name: value}), f"{name} has the wrong type")
      for name in (
          "host_s", "plan_host_s", "traffic_bytes", "flops", "ceiling_s", "ceiling_share", "workspace_bytes", "power_w",
          "energy_j",
      )
      for value in ("7", True, [1], math.nan, math.inf, 10**400)),
    *((line(**{name: value}), f"{name} has the wrong type") for name in ("reason", "ceiling_by") for value in (7, [], {})),
    *((line(flags=value), "flags has the wrong type") for value in (None, "a", {}, [7], [None])),
    *((line(kernels=value), "kernels has the wrong type") for value in (None, "a", {}, [7], ["k"])),
    *((line(**{name: value}), f"{name} has the wrong type") for name in ("launch_s", "plan_s") for value in (
        7, "1", [1.0], {}, {"median": 1.0}, {"median": 1.0, "low": 1.0, "high": 1.0},
        {"median": 1.0, "low": 1.0, "high": 1.0, "samples": 1.0}, {"median": 1.0, "low": 1.0, "high": 1.0, "samples": ["1"]},
        {"median": "1", "low": 1.0, "high": 1.0, "samples": [1.0]}, {"median": True, "low": 1.0, "high": 1.0, "samples": [1.0]},
        {"median": math.nan, "low": 1.0, "high": 1.0, "samples": [1.0]},
        {"median": 1.0, "low": 1.0, "high": math.inf, "samples": [1.0]},
        {"median": 1.0, "low": 1.0, "high": 1.0, "samples": [10**400]},
        {"median": 1.0, "low": 1.0, "high": 1.0, "samples": []},
        {"median": 0, "low": 0, "high": 1.0, "samples": [0]},
        {"median": -1.0, "low": -1.0, "high": 1.0, "samples": [-1.0]},
    )),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"), [pytest.param(*odd, id=f"{number}-{odd[1]}") for number, odd in enumerate(ODD_LINES)]
)
def test_a_line_that_is_no_record_says_why(text, says):
    """A RecordError and nothing else, whatever stands there."""
    with pytest.raises(RecordError) as caught:
        parse_line(text)

    assert says in str(caught.value)
    assert len(str(caught.value)) < 300


def test_nothing_in_a_line_is_run():
    """Python hidden in a line is text."""
    text = line(case="__import__('os').abort()", ledger={"__class__": "os.system", "py/object": "os.system"})

    assert parse_line(text).case == "__import__('os').abort()"
