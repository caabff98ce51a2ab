"""The checker's own test: every control that a CPU can run is caught, and nothing right is found wrong."""

from __future__ import annotations

import json

import pytest

from cases import SUITES
from cases.suites import ONLY_KILLERS, SMOKE_FEATURES
from harness.cli import main
from impls import IMPLS
from impls.controls import CONTROLS

#: of `smoke` and `quick`, those that are small and together enough
CASES = (
    "edges.lengths", "edges.tiles", *ONLY_KILLERS, "write.qwen3_0_6b.48_padded", "edges.write_block_size_24",
    *SMOKE_FEATURES, "edges.window_q_len_ragged", "edges.scores_all_q_len", "edges.e4m3_scores_all", "edges.prefix_levels",
    "edges.softcap_1", "copy.qwen3_0_6b.6.two_layers", "copy.qwen3_0_6b.9_chained.bs8",
)  # fmt: skip
#: of controls that are timed: one case is enough, and on a CPU each takes seconds
TIMED_CASE = "faults.causal_offset"

ONLY_TIMED = {control.name for control in CONTROLS if control.only_timed}
ON_CPU = {control.name for control in CONTROLS if "cpu" in control.devices and control.why_missing("cpu") is None}
RIGHT = [impl.name for impl in IMPLS if impl.role == "implementation" and "cpu" in impl.devices and not impl.on_request]


def test_the_cases_are_those_of_the_suites():
    """What is shown here is shown of `smoke` and `quick`."""
    assert set(CASES) <= {case.name for suite in ("smoke", "quick") for case in SUITES[suite]}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the audit says of controls that are checked, and of those that are timed."""
    out = tmp_path_factory.mktemp("runs")
    found = {}
    for kind, impls, cases in (
        ("checked", {*ON_CPU, *RIGHT} - ONLY_TIMED, CASES), ("timed", ONLY_TIMED & ON_CPU, [TIMED_CASE]),
    ):  # fmt: skip
        # All relations: which of them a slow machine would leave out must not decide.
        how = ["--device", "cpu", "--layouts", "HND", "--relations", "all", "--out", str(out / kind)]
        code = main(["audit", *how, "--impl", ",".join(impls), "--case", ",".join(cases)])
        (run,) = (out / kind).iterdir()
        found[kind] = json.loads((run / "audit.json").read_text()) | {"code": code}
    return found


def test_every_control_is_caught(found):
    """None survives, none is broken, and every one that a CPU can run was judged by a check."""
    caught = {name for kind in found.values() for name, kills in kind["kills"].items() if kills}

    for kind in found.values():
        assert kind["survivors"] == []
        assert kind["broken"] == {}
    assert caught == ON_CPU


def test_nothing_right_is_found_wrong(found):
    """No false alarm, although controls ran in the same process just before."""
    assert found["checked"]["false_alarms"] == []
    assert found["checked"]["num_right"] >= len(RIGHT)
    assert [kind["code"] for kind in found.values()] == [0, 0]


def test_every_check_catches_something(found):
    """Each family of inputs, and the guard, earns its time."""
    checks = {check for kind in found.values() for kills in kind["kills"].values() for check in kills.values()}

    assert {"plain", "needles", "guard", "changed its input", "timed launches"} <= checks
    assert {f"relation {name}" for name in ("repeat", "strided_query", "strided_cache")} <= checks
