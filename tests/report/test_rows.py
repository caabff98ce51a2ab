"""What is derived from records: verdicts, commands, shapes in words; and that no record, however odd, breaks a report."""

import shlex
from dataclasses import replace

import pytest

from harness.report import rows, terminal_table, write_report


@pytest.fixture
def one(gpu_run):
    """A right, timed row of ours."""
    return next(r for r in gpu_run if r.row == "cuda.split_kv[NHD]" and r.launch_s)


def test_a_wrong_peer_does_not_spoil_ours(one):
    """Ours decide the verdict; a peer's fault is told."""
    peer = replace(one, impl="peer.x", status="wrong", reason="NaN")

    assert rows.verdict([one]) == ("All 1 row that ran are right", True)
    assert rows.verdict([one, peer]) == ("All of ours that ran are right; peers: 1 row wrong", True)
    assert rows.verdict([replace(peer, impl="cuda.x")]) == ("1 row wrong", False)


def test_a_control_that_passes_is_bad_news(one):
    """A kernel that is wrong on purpose and passes means that the checker is blind."""
    assert rows.verdict([one, replace(one, role="control")]) == (
        "All of ours that ran are right; 1 control passed that should not", False
    )


def test_a_command_survives_the_shell(one):
    """Split by a shell, the command has the row, the case and every parameter, whatever characters they hold."""
    odd = replace(one, impl="a.b c'd", params={"mode": "x y"}, device_kind="cpu")

    assert shlex.split(rows.command(odd)) == [
        "pagedbench", "run", "--impl", "a.b c'd[NHD]", "--case", one.case, "--set", "mode=x y", "--device", "cpu",
    ]


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
], ids=["decode", "ragged", "empty", "write", "copy"])
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
