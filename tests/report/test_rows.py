"""What is derived from records: verdicts, shapes in words; and that no record, however odd, breaks a report."""

from dataclasses import replace

import pytest

from harness.record import Samples
from harness.report import rows, tables, terminal_table, write_report


@pytest.fixture
def one(gpu_run):
    """A right, timed row of ours."""
    return next(r for r in gpu_run if r.row == "cuda.split_kv[NHD]" and r.launch_s)


def test_the_larger_side_of_the_interval_counts(one):
    """What stands behind "±" is what convergence is judged by; a single visit has no interval."""
    lopsided = replace(one, launch_s=Samples(median=10.0, low=9.9, high=10.5, samples=(9.9, 10.0, 10.0, 10.0, 10.5)))
    single = replace(one, launch_s=Samples(median=10.0, low=10.0, high=10.0, samples=(10.0,)))

    assert rows.spread(lopsided) == pytest.approx(0.05)
    assert rows.spread(single) is None


def test_arithmetic_is_no_matter_of_reading(one):
    """From RIDGE FLOPs a byte on a rate is FLOPs a second and the ceiling of reading is no measure."""
    prefill = replace(one, flops=rows.RIDGE * one.traffic_bytes)

    assert rows.rate(one) == one.traffic_bytes / one.launch_s.median
    assert rows.rate(prefill) == prefill.flops / prefill.launch_s.median
    assert (rows.share(one), rows.share(prefill)) == (one.ceiling_share, None)
    assert tables.reached(prefill).endswith(" TFLOP/s")
    assert tables.reached(replace(prefill, device_kind="cpu")).endswith(" GFLOP/s")


@pytest.mark.parametrize(("flags", "mark"), [
    ((), ""), (("workspace: declares 0 bytes, holds 4 bytes",), rows.FLAGGED), (("never converged: within 9%",), rows.DOUBTED),
    (("timers disagree: by much",), rows.DOUBTED), (("above the ceiling: wrong",), rows.DOUBTED),
    (("throttled: 3 visits discarded",), rows.FLAGGED),
])
def test_a_doubted_time_is_marked(one, flags, mark):
    """Flags that put the time in doubt are marked apart from others."""
    assert rows.mark(replace(one, flags=flags)) == mark


def test_five_good_visits_outlive_a_throttle(one):
    """Throttled visits are discarded: with fewer than five left the time is in doubt."""
    few = replace(one.launch_s, samples=one.launch_s.samples[:4])

    assert rows.doubts(replace(one, flags=("throttled: 9 visits discarded",), launch_s=few))


def test_a_doubted_time_wears_no_crown(one):
    """The fastest row keeps its place, but is the best of its case only with a time that is not in doubt."""
    quick = replace(one, impl="cuda.quick", flags=("never converged: one visit, which has no interval",),
                    launch_s=replace(one.launch_s, median=one.launch_s.median / 2))
    [group] = rows.by_case([one, quick])

    assert group.timed == (quick, one)
    assert not group.is_crowned(quick)
    assert group.is_crowned(replace(quick, flags=()))


def test_what_runs_on_no_case_is_told_from_what_one_case_forbids(one):
    """A row unsupported everywhere for one reason is the device's matter; one that runs somewhere is no such row."""
    cases = [replace(one, case=name, case_digest=name) for name in ("a", "b")]
    barred = [replace(r, impl="numpy.x", status="unsupported", reason="runs on cpu only (got cuda)") for r in cases]
    partly = [replace(barred[0], impl="cuda.y", reason="head_dim"), replace(cases[1], impl="cuda.y")]

    assert rows.nowhere([*cases, *barred, *partly]) == barred
    assert rows.nowhere([cases[0], barred[0]]) == []


def test_the_worst_error_is_of_all_families(one):
    """The largest ratio of any test on any inputs counts; infinity survives JSON as its name."""
    def checked(**ratios):
        return replace(one, check={"plain": {"ratios": {"l2": 0.2}}, "needles": {"ratios": ratios}})

    assert rows.worst_error(checked(l2=0.1, max=0.7)) == 0.7
    assert rows.worst_error(checked(lse="inf")) == float("inf")
    assert rows.worst_error(replace(one, check={"plain": {"passed": True, "ratios": {}}})) is None


@pytest.mark.parametrize(("shape", "text"), [
    ({"seq_lens": [8192] * 64, "q_lens": [1] * 64, "num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16,
      "dtype": "bf16"}, "64 x 8192 tokens, heads 32/8 x 128, block 16, bf16"),
    ({"seq_lens": [5, 0, 7], "q_lens": [1, 0, 4], "block_size": 8}, "3 x 0 to 7 tokens, queries 3 x 0 to 4 each, block 8"),
    ({"seq_lens": []}, "empty batch"),
    ({"num_kv_heads": 8, "head_dim": 128, "num_tokens": 64, "block_size": 16, "dtype": "f16"},
     "heads 8 x 128, 64 tokens, block 16, f16"),
    ({"num_kv_heads": 8, "head_dim": 128, "num_copies": 4, "num_layers": 32, "block_size": 16},
     "heads 8 x 128, 4 copies, 32 layers, block 16"),
    ({"seq_lens": [64, 64], "window": 1024, "softcap": 50.0, "alibi": True, "sinks": True, "kv_dtype": "e4m3",
      "kv_scales": "head", "prefix": [[0, 0], [0, 32]]},
     "2 x 64 tokens, window 1024, softcap 50.0, ALiBi, sinks, e4m3 cache with a scale a head, 1 share a prefix"),
    ({"seq_lens": [64], "window": None, "softcap": None, "alibi": False, "kv_dtype": None, "kv_scales": "tensor", "prefix": []},
     "1 x 64 tokens"),
], ids=["decode", "ragged", "empty", "write", "copy", "features", "no features"])
def test_shapes_in_words(shape, text):
    """Batch, lengths, heads and block size of every operator's cases, in a line."""
    assert rows.describe(shape) == text


@pytest.mark.parametrize("odd", [
    {"shape": {}}, {"shape": {"seq_lens": "many", "q_lens": {"a": 1}, "block_size": "16"}}, {"shape": {"num_copies": 0}},
    {"traffic_bytes": 0}, {"traffic_bytes": None, "flops": None}, {"ceiling_s": 0.0}, {"ceiling_share": None},
    {"ceiling_share": -1.0}, {"check": {"plain": 7, "needles": {"ratios": [1]}}}, {"memory": {"allocator_peak_bytes": "much"}},
    {"workspace_bytes": -5},
    {"nvml": {"a": {"b": [1, "x"]}, "c": True}}, {"kernels": ({},)}, {"toolchain": {}},
    {"reason": "\ud800 \x1b[2J"}, {"role": "oracle"},
], ids=str)
def test_no_record_breaks_a_report(tmp_path, gpu_run, odd):
    """Records come from files: whatever a free-form field holds, every table and page is made."""
    sweep = [replace(r, **odd) for r in gpu_run if r.case.startswith(("context.", "block_size."))]
    broken = [replace(r, status="wrong", reason="x", **{k: v for k, v in odd.items() if k != "reason"}) for r in sweep[:5]]

    assert len(write_report(sweep + broken, tmp_path)) == 2
    assert "\x1b" not in terminal_table([*sweep, *(replace(r, status="failed", reason="\x1b[2J") for r in sweep[:1])])


def test_a_time_of_zero_has_no_rate(tmp_path, gpu_run):
    """A median of 0 s, which no clock should give, makes no rate and breaks nothing."""
    zero = [replace(r, launch_s=replace(r.launch_s, median=0.0, low=0.0)) for r in gpu_run if r.launch_s]

    assert rows.rate(zero[0]) is None
    assert len(write_report(zero, tmp_path)) == 2
