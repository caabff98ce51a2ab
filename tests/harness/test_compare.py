"""Two runs in, verdicts out: each with its reason, none by accident, and an exit code that a script can trust."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from harness.cli import main
from harness.commands.compare import compared
from harness.compare import MANY, VERDICTS, common_shift, exit_code, judge, unjudged
from harness.costs import grown
from harness.groups import groups
from harness.interval import summarise
from harness.match import Pair, match
from harness.ops.block_copy import BlockCopyCase
from harness.pytest_json import load_pytest_json
from tests.harness.runs import KERNEL, row, run, save, untimed


def verdict(old, new, **how):
    """What becomes of one row."""
    (found,) = judge([Pair(old=old, new=new)], **how)
    return found


@pytest.mark.parametrize(
    ("ratio", "wanted"), [(1.0, "SAME"), (1.004, "SAME"), (1.03, "SLOWER"), (0.97, "FASTER"), (1.0102, "UNSURE")]
)
def test_a_clear_ratio_has_a_clear_verdict(ratio, wanted):
    """1% is the default threshold on a GPU; near to it nothing is claimed."""
    found = verdict(row(), row(seconds=100e-6 * ratio, seed=1))

    assert found.verdict == wanted
    low, high = found.difference.interval(0.95)
    assert low < ratio < high
    assert found.reason


def test_noise_makes_unsure_and_never_slower():
    """20% of scatter hides 3%: too few samples is the answer, not a guess."""
    found = verdict(row(noise=0.2), row(seconds=103e-6, noise=0.2, seed=1))

    assert found.verdict == "UNSURE"
    assert "too few samples for their noise" in found.reason


def test_a_run_against_itself_moved_is_the_same_at_any_scale():
    """Two microseconds or two seconds: noise is a share."""
    for seconds in (2e-6, 2.0):
        assert verdict(row(seconds=seconds), row(seconds=seconds, seed=1)).verdict == "SAME"


@pytest.mark.parametrize(("kind", "wanted"), [("cuda", "SLOWER"), ("cpu", "SAME")])
def test_the_threshold_is_the_devices(kind, wanted):
    """1% on a GPU, 5% on a CPU; --threshold goes before."""
    old, new = row(device_kind=kind), row(seconds=103e-6, seed=1, device_kind=kind)

    assert verdict(old, new).verdict == wanted
    assert verdict(old, new, threshold=0.1).verdict == "SAME"
    assert verdict(old, new, threshold=0.005).verdict == "SLOWER"


def test_false_alarms_are_rarer_than_promised():
    """100 comparisons of 40 unchanged rows at noise of half the threshold: at most 5 with any alarm at all."""
    alarmed = 0
    for seed in range(100):
        judged = judge(match(run(seed=seed, noise=0.005), run(seed=f"b{seed}", noise=0.005)).pairs)
        alarmed += any(item.verdict in ("SLOWER", "FASTER") for item in judged)

    assert alarmed <= 2


def test_a_row_at_the_threshold_is_no_alarm_in_a_run_of_many():
    """The worst that is still none: every row slower by exactly 1%. All verdicts of a run together err with 2.5%."""
    alarmed = 0
    for seed in range(100):
        slower = run(seed=f"b{seed}", slow=range(40), by=1.01)
        alarmed += any(item.verdict == "SLOWER" for item in judge(match(run(seed=seed), slower).pairs))

    assert alarmed <= 7
    # the same without the correction for 40 rows would alarm in most runs
    single = [verdict(row(seed=seed), row(seed=f"b{seed}", seconds=101e-6)).verdict == "SLOWER" for seed in range(400)]
    assert sum(single) >= 3


def test_one_slowdown_of_two_percent_among_forty_is_caught():
    """At 0.2% of scatter and 6 visits, which is what an H200 shows, at least 95 of 100."""
    caught = 0
    for seed in range(100):
        judged = judge(match(run(seed=seed, noise=0.002), run(seed=f"b{seed}", noise=0.002, slow=(7,), by=1.02)).pairs)
        caught += judged[7].verdict == "SLOWER"
        assert [item.verdict for item in judged].count("SLOWER") <= 1

    assert caught >= 95


def test_more_rows_ask_for_more_evidence():
    """A row that is SLOWER alone is UNSURE among a thousand, and says how many it is one of."""
    old, new = row(), row(seconds=101.4e-6, seed=1)

    assert verdict(old, new).verdict == "SLOWER"
    among = verdict(old, new, num_tests=100_000)
    assert among.verdict == "UNSURE"
    assert "of 100000 rows one may well look like this" in among.reason


@pytest.mark.parametrize("status", ["wrong", "failed", "timeout"])
def test_a_row_with_no_right_answer_is_wrong(status):
    """Whatever it was before; the reason is the record's own."""
    assert verdict(row(), untimed(row(), status)).verdict == "WRONG"
    assert verdict(None, untimed(row(), status)).verdict == "WRONG"
    again = verdict(untimed(row(), status), untimed(row(), status))
    assert again.verdict == "WRONG"
    assert again.reason.endswith("because; it was " + status + " before, too")


def test_a_time_that_came_or_went_is_new_or_missing_with_its_reason():
    """Also where the row is there and has no time."""
    assert verdict(row(), untimed(row(), "unsupported")).reason == "now: unsupported: because"
    assert verdict(row(), replace(row(), launch_s=None)).reason == "now: not timed"
    assert verdict(untimed(row(), "wrong"), row()).reason == "before: wrong: because"
    assert [verdict(row(), None).verdict, verdict(None, row()).verdict] == ["MISSING", "NEW"]


def test_rows_without_a_time_on_either_side_are_counted():
    """Nothing vanishes: they are no verdicts, and the summary says how many and why."""
    pairs = [Pair(old=untimed(row(), "skipped"), new=untimed(row(), "unsupported")), Pair(new=untimed(row(), "skipped")),
             Pair(old=replace(row(), launch_s=None), new=replace(row(), launch_s=None))]  # fmt: skip

    assert judge(pairs) == []
    assert unjudged(pairs) == {"skipped before, then unsupported": 1, "skipped": 1, "ok, not timed": 1}


@pytest.mark.parametrize("visits", [1, 0])
def test_too_few_visits_for_an_interval_are_unsure(visits):
    """A row that was throttled to one visit says nothing."""
    few = row(visits=6)
    few = replace(few, launch_s=replace(few.launch_s, samples=few.launch_s.samples[:visits]))

    found = verdict(row(), few)
    assert (found.verdict, found.reason) == ("UNSURE", f"the new run has {visits} samples of it; an interval needs two")


def test_a_sample_that_is_no_time_is_named():
    """A logarithm of zero would end the whole comparison."""
    spoiled = row()
    spoiled = replace(spoiled, launch_s=replace(spoiled.launch_s, samples=(1e-4, 0.0)))

    assert "a sample that is no time: 0.0 s" in verdict(spoiled, row()).reason


def test_slower_with_the_same_binary_is_labelled_environment():
    """The kernel is what it was: the machine or its software is not."""
    slower = row(seconds=105e-6, seed=1)
    other = replace(slower, kernels=({**KERNEL, "digest": "bb"},))

    assert "environment: the kernel's binary is the same" in verdict(row(), slower).labels
    assert verdict(row(), other).labels == ("kernel changed",)
    assert verdict(row(), row(seed=1)).labels == ()
    assert verdict(row(), replace(slower, kernels=())).labels == ()


def test_a_time_of_another_gpu_is_labelled():
    """Cards of one kind are apart by more than the threshold; a row that is the SAME all the same needs no excuse."""
    first, second = ({"name": "cuda:0", "uuid": uuid} for uuid in ("GPU-1", "GPU-2"))
    old, slower = row(unit=first), row(seconds=112e-6, seed=1, unit=second)

    assert "another GPU of the kind" in verdict(old, slower).labels
    assert "another GPU of the kind" not in verdict(old, replace(slower, unit=first)).labels
    assert "another GPU of the kind" not in verdict(row(), slower).labels
    assert verdict(old, row(seed=1, unit=second)).labels == ()


def says(seconds):
    return (f"timers disagree: events say 0.1 s, the second opinion {seconds} s",) if seconds else ()


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        (None, "0.0001", "new"), ("0.000105", None, "old"),  # it denies that anything has changed
        (None, "0.0001.2", "new"),  # nobody can read it
        (None, "0.00012", ""), ("9e-05", None, ""),  # it says so, too
        ("0.0001", "0.0001", ""),  # like meets like
    ],
)  # fmt: skip
def test_no_alarm_rests_on_a_time_that_the_second_timer_denies(before, after, wanted):
    """5% by the visits of two runs, in one of which or in both the timers disagree."""
    found = verdict(row(flags=says(before)), row(seconds=105e-6, seed=1, flags=says(after)))

    assert found.verdict == ("UNSURE" if wanted else "SLOWER")
    if wanted:
        assert found.reason == f"SLOWER by its visits, which the second timer of the {wanted} run denies"


def test_a_mean_holds_no_time_that_the_second_timer_denies():
    """Alone it leaves its group UNSURE; a gain that is denied does not cancel a loss."""
    slow, fast = (f"timers disagree: events say {time} s, the second opinion 0.0001 s" for time in ("0.000105", "9.5e-05"))
    alone = of_groups("geomean", run(1), run(1, seed=1, slow=[0], by=1.05, flags=(slow,)))
    assert alone["cuda.split_kv[HND]"].verdict == "UNSURE"

    old = run(2)
    new = [run(2, seed=1, slow=[0], by=1.05)[0], run(2, seed=1, slow=[1], by=0.95, flags=(fast,))[1]]
    assert of_groups("geomean", old, new)["cuda.split_kv[HND]"].verdict == "SLOWER"


def test_a_row_of_another_gpu_moves_the_bound_of_a_mean_by_its_part_of_it():
    """One of forty: 6% slower is SLOWER. All forty: it is within 8%."""
    first, second = ({"name": "cuda:0", "uuid": uuid} for uuid in ("GPU-1", "GPU-2"))
    new = run(40, seed=1, slow=range(40), by=1.06, unit=first)
    one = [replace(record, unit=second if index == 0 else first) for index, record in enumerate(run(40))]

    assert of_groups("geomean", one, new)["cuda.split_kv[HND]"].verdict == "SLOWER"
    assert of_groups("geomean", run(40, unit=second), new)["cuda.split_kv[HND]"].verdict == "SAME"


def test_rows_without_a_time_on_one_side_are_no_part_of_a_common_shift():
    """A NEW one has one GPU; what the others have in common is 2% across GPUs, of which nobody need be told."""
    first, second = ({"name": "cuda:0", "uuid": uuid} for uuid in ("GPU-1", "GPU-2"))
    old, new = run(12, unit=first), run(12, seed=1, slow=range(12), by=1.02, unit=second)

    assert not any("Half of all rows" in note for note in compared(old[:-1], new, ("old", "new"), None, None).all_notes())


def test_times_of_two_gpus_are_held_to_what_gpus_of_a_kind_differ_by():
    """By 5% on another card nobody is woken, and the page says why; on the same card, or told a threshold, it is SLOWER."""
    first, second = ({"name": "cuda:0", "uuid": uuid} for uuid in ("GPU-1", "GPU-2"))
    old = [replace(record, unit=first) for record in run(9)]
    new = [replace(record, unit=second) for record in run(9, seed=1, slow=range(9), by=1.05)]

    def found(records, threshold=None, how=None):
        return compared(old, records, ("old", "new"), threshold, how)

    across = found(new)
    assert {item.verdict for item in across.judged} == {"SAME"}
    assert across.exit_code == found(new, how="geomean").exit_code == 0
    assert any("Two GPUs of the kind took the times of 9 rows, held to 8%" in note for note in across.all_notes())
    assert any("Half of all rows moved by +5" in note for note in across.all_notes())
    for told in (found(new, 0.01), found([replace(record, unit=first) for record in new])):
        assert {item.verdict for item in told.judged} == {"SLOWER"}
        assert not any("Two GPUs" in note for note in told.all_notes())
    slow = [replace(record, unit=second) for record in run(9, seed=1, slow=[3], by=1.10)]
    assert [item.verdict for item in found(slow).judged].count("SLOWER") == 1


def test_changed_parameters_and_new_doubts_are_labelled():
    old = row(params={"splits": 0}, flags=("never converged: x",))
    new = row(params={"splits": 4, "warps": 8}, flags=("never converged: x", "timers disagree: y"), seed=1)

    assert verdict(old, new).labels == ("splits 0 -> 4", "warps none -> 8", "timers disagree: y")


def test_a_move_that_all_rows_share_is_told():
    """A clock that is 2% lower moves every row; one slow kernel moves none of the others."""
    everything = judge(match(run(MANY), run(MANY, seed=1, slow=range(MANY), by=1.02)).pairs)
    one = judge(match(run(MANY), run(MANY, seed=1, slow=(0,), by=1.5)).pairs)

    assert common_shift(everything) == pytest.approx(1.02, abs=0.003)
    assert common_shift(one) is None
    assert common_shift(everything[1:]) is None


def of_groups(how, old, new):
    judged = judge(match(old, new).pairs)
    return {group.row: group for group in groups(judged, how)}


def test_groups_speak_for_an_implementation():
    """One slow case of twenty: the worst is slow, the mean is not; all of them slow: both are."""
    old, one, every = run(20), run(20, seed=1, slow=(3,), by=1.05), run(20, seed=1, slow=range(20), by=1.02)
    name = "cuda.split_kv[HND]"

    assert of_groups("worst", old, one)[name].verdict == "SLOWER"
    assert of_groups("worst", old, one)[name].reason.startswith("case.3: ")
    assert of_groups("geomean", old, one)[name].verdict == "SAME"
    assert of_groups("geomean", old, every)[name].verdict == "SLOWER"
    assert of_groups("geomean", old, every)[name].difference.ratio == pytest.approx(1.02, abs=0.002)
    assert of_groups("geomean", old, every)[name].num_rows == 20


def test_a_wrong_row_makes_its_group_wrong():
    """No mean makes up for it."""
    new = [untimed(run(3)[0], "wrong"), *run(3, seed=1)[1:]]

    assert of_groups("geomean", run(3), new)["cuda.split_kv[HND]"].verdict == "WRONG"


def test_a_row_that_no_mean_can_hold_leaves_its_group_unsure():
    """One visit has no scatter: left out of the mean, the row could have become any slower."""
    new = [row(case="case.0", seconds=1.0, visits=1), *run(3, seed=1)[1:]]
    group = of_groups("geomean", run(3), new)["cuda.split_kv[HND]"]

    assert (group.verdict, group.reason) == ("UNSURE", "case.0: the new run has 1 samples of it; an interval needs two")
    slower = [new[0], *run(3, seed=1, slow=range(3), by=1.1)[1:]]
    assert of_groups("geomean", run(3), slower)["cuda.split_kv[HND]"].verdict == "SLOWER"


@pytest.mark.parametrize(
    ("field", "worse", "name"),
    [
        ({"workspace_bytes": 8192}, True, "workspace"),
        ({"workspace_bytes": 4100}, False, ""),
        ({"memory": {"allocator_peak_bytes": 2 << 20}}, True, "allocator's peak"),
        ({"kernels": ({**KERNEL, "registers": 65},)}, True, "most registers of a kernel"),
        ({"kernels": ({**KERNEL, "spill_bytes": 8},)}, True, "spilled bytes"),
        ({"energy_j": 0.0105}, False, ""),
        ({"energy_j": 0.012}, True, "energy a launch"),
        ({"plan_s": summarise([81e-6] * 5)}, True, "a plan, until the device is through"),
        ({"plan_s": summarise([79e-6] * 5)}, False, ""),
        ({"plan_host_s": 20e-6}, True, "a plan on the host"),
        ({"plan_host_s": 18e-6}, False, ""),
        ({"host_s": 29e-6}, True, "a launch on the host"),
        ({"host_s": 27e-6}, False, ""),
        ({"workspace_bytes": 0, "energy_j": None, "kernels": (), "plan_s": None, "host_s": None}, False, ""),
        ({"memory": {"allocator_peak_bytes": 10**400}, "kernels": ({**KERNEL, "registers": 10**400},)}, False, ""),
    ],
    ids=str,
)
def test_costs_that_grew_are_found_and_only_those(field, worse, name):
    """Each has its own margin; what shrank or is not known is no news."""
    old = replace(row(), plan_s=summarise([10e-6] * 5), plan_host_s=3e-6, host_s=6e-6)
    found = grown([Pair(old=old, new=replace(old, **field))])

    assert [growth.cost.name for growth in found] == ([name] if worse else [])


@pytest.mark.parametrize("which", VERDICTS)
def test_exit_codes(which):
    """1 for SLOWER and WRONG, 3 for UNSURE and MISSING, 0 for the rest; a peer counts when told so."""
    code = {"SLOWER": 1, "WRONG": 1, "UNSURE": 3, "MISSING": 3}.get(which, 0)
    calm = verdict(row(), row())
    ours = replace(calm, verdict=which)
    peer = replace(calm, verdict=which, pair=Pair(old=row(impl="peer.x"), new=row(impl="peer.x")))

    assert exit_code([calm, ours]) == code
    assert exit_code([calm, peer]) == 0
    assert exit_code([calm, peer], strict_peers=True) == code


def test_an_alarm_outweighs_an_unsure():
    calm = verdict(row(), row())
    assert exit_code([replace(calm, verdict="UNSURE"), replace(calm, verdict="SLOWER")]) == 1


# The command.


def test_a_glob_that_chooses_nothing_is_told(runs, capsys):
    """What it was to choose was not looked at, whatever the others chose."""
    old, new = runs

    assert main(["compare", str(old), str(new), "--impl", "cuda.*,cuda.tpyo", "--case", "case.0"]) == 0
    assert "Nothing on either side is chosen by --impl cuda.tpyo.\n" in capsys.readouterr().out


def test_rows_of_which_none_can_be_judged_are_no_pass(tmp_path, capsys):
    """Unsupported on both sides: exit 2, and why, as where no row meets another."""
    old, new = (save(tmp_path / name, [untimed(record, "unsupported") for record in run(2)]) for name in ("old", "new"))

    assert main(["compare", str(old), str(new)]) == 2
    assert capsys.readouterr().err.endswith(f"nothing to judge between {old} and {new}: 2 rows unsupported\n")


@pytest.fixture
def runs(tmp_path):
    """Two runs of 12 rows: one is 5% slower, one wrong, one gone, one new."""
    new = run(12, seed=1, slow=(2,), by=1.05)
    new[3] = untimed(new[3], "wrong", "3 of 8 outputs outside tolerance")
    new[4] = row(case="case.new")
    new[5] = replace(new[5], workspace_bytes=1 << 20, toolchain={"torch": "2.12.0", "revision": "bbbb"})
    return save(tmp_path / "old", run(12)), save(tmp_path / "new", new)


def test_the_command_tells_all_and_fails(runs, capsys):
    """The terminal has the verdict first, each row with its reason, costs and what else changed; exit code 1."""
    old, new = runs
    assert main(["compare", str(old), str(new)]) == 1

    said = capsys.readouterr().out
    assert said.startswith("1 WRONG, 1 SLOWER, 1 MISSING, 1 NEW, 9 SAME: ")
    assert re.search(r"SLOWER +cuda\.split_kv\[HND\] +case\.2 .* \+5\.\d\d% ", said)
    assert "WRONG cuda.split_kv[HND] on case.3: 3 of 8 outputs outside tolerance" in said
    assert "MISSING cuda.split_kv[HND] on case.4: not in the new run" in said
    assert "COSTLIER cuda.split_kv[HND] on case.5: workspace 4.10 kB -> 1.05 MB" in said
    assert "Changed between the two: torch 2.11.0 -> 2.12.0, revision aaaa -> bbbb." in said


def test_the_summary_is_a_comment(runs, capsys):
    """Markdown beside the new run: the headline, rows to look at, calm rows folded away, no markup of a record's own."""
    old, new = runs
    main(["compare", str(old), str(new)])

    page = (new / "summary.md").read_text()
    assert page.startswith("### 1 WRONG, 1 SLOWER, 1 MISSING, 1 NEW, 9 SAME\n")
    slow = re.search(r"\*\*SLOWER\*\* +\| `cuda\.split_kv\[HND\]` \| `case\.2` ", page)
    assert slow
    assert slow.start() < page.index("<details>")
    assert "<summary>10 other rows</summary>" in page
    assert f"summary: {new / 'summary.md'}" in capsys.readouterr().out


def test_hostile_names_stay_text(tmp_path, capsys):
    """What records carry cannot steer a terminal or a page."""
    bad = "<img src=x>|`\x1b[31m"
    old, new = ([row(case=bad, case_digest="d", seed=s)] for s in (0, 1))
    new = [untimed(new[0], "wrong", bad)]
    assert main(["compare", str(save(tmp_path / "a", old)), str(save(tmp_path / "b", new))]) == 1

    assert "\x1b" not in capsys.readouterr().out
    page = (tmp_path / "b/summary.md").read_text()
    assert "<img" not in re.sub(r"`[^`]*`", "", page)


def test_json_has_every_row_and_is_json_alone(runs, capsys):
    old, new = runs
    assert main(["compare", str(old), str(new), "--json", "--group", "worst"]) == 1

    data = json.loads(capsys.readouterr().out)
    assert (data["exit_code"], data["counts"]["SAME"], len(data["rows"])) == (1, 9, 13)
    slow = next(item for item in data["rows"] if item["case"] == "case.2")
    assert slow["low"] < slow["ratio"] < slow["high"]
    assert slow["ratio"] == pytest.approx(1.05, abs=0.01)
    assert data["groups"][0]["verdict"] == "WRONG"
    assert data["costs"] == [
        {"case": "case.5", "case_digest": "digest case.5", "impl": "cuda.split_kv", "layout": "HND", "device": "nvidia-h200",
         "params": {}, "cost": "workspace", "unit": "bytes", "old": 4096, "new": 1 << 20},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("globs", "code"), [(["--case", "case.1*"], 0), (["--case", "case.4,case.6"], 3), (["--case", "case.2"], 1)]
)
def test_a_choice_of_rows_decides_alone(runs, globs, code):
    """What was not asked for is neither compared nor missing."""
    assert main(["compare", *map(str, runs), *globs]) == code


def test_layouts_are_chosen_as_a_run_chooses_them(tmp_path, capsys):
    """A run of some layouts misses none of the others; a first layout, one named, and an entry that is gone are held."""
    rows = [("cuda.split_kv", "HND"), ("cuda.split_kv", "KV_NHD"), ("cuda.tensor_core", "HND_SWIZZLED"), ("cuda.gone", "NHD")]
    old = save(tmp_path / "a", [row(impl=impl, layout=layout) for impl, layout in [*rows, ("torch.gather", "HND")]])
    new = save(tmp_path / "b", [row(impl="torch.gather", layout="HND")])

    def missing(*words):
        assert main(["compare", str(old), str(new), "--json", *words]) == 3
        listed = json.loads(capsys.readouterr().out)["rows"]
        return [(item["impl"], item["layout"]) for item in listed if item["verdict"] == "MISSING"]

    assert missing() == rows
    assert missing("--layouts", "NHD") == [rows[0], rows[2], rows[3]]
    assert missing("--layouts", "NHD", "--impl", "*.*,cuda.split_kv[KV_NHD]") == rows
    assert main(["compare", str(old), str(new), "--layouts", "HDN"]) == 2
    assert "--layouts HDN: no such layout" in capsys.readouterr().err


def test_a_folder_with_one_run_is_that_run(tmp_path, capsys):
    """What --out named and not the stamp in it; the summary goes to the run. Of two, neither is guessed at."""
    old = save(tmp_path / "old", run(3))
    save(tmp_path / "out" / "20261130T080000Z", run(3))

    assert main(["compare", str(old), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "20261130T080000Z" / "summary.md").is_file()
    save(tmp_path / "out" / "20261130T080100Z", run(3))
    assert main(["compare", str(old), str(tmp_path / "out")]) == 2
    assert "holds 2 runs; name one of them, the newest is" in capsys.readouterr().err


def test_runs_of_different_devices_are_an_error(tmp_path, capsys):
    """Exit code 2 and why: nothing could be compared."""
    a = save(tmp_path / "a", run(3))
    b = save(tmp_path / "b", run(3, device="nvidia-a100"))

    assert main(["compare", str(a), str(b)]) == 2
    assert "different devices are never compared" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["nowhere"], "cannot read records of nowhere"),
        (["--threshold", "5"], "must be a share such as 2% or 0.02"),
        (["--case", "nothing.*"], "choose none of 3 records"),
        (["a", "b"], "takes one run or two (got 3)"),
    ],
)
def test_wrong_usage_is_named(tmp_path, capsys, words, error):
    """Exit code 2, one line."""
    words = ["compare", str(save(tmp_path / "a", run(3))), *words]
    try:
        code = main(words)
    except SystemExit as left:
        code = left.code

    assert code == 2
    assert error in capsys.readouterr().err


def test_a_run_that_was_killed_is_compared_as_far_as_it_went(tmp_path, capsys):
    """The torn last line is named, its row is missing, nothing else suffers."""
    old, new = save(tmp_path / "a", run(3)), save(tmp_path / "b", run(3, seed=1))
    file = new / "records.jsonl"
    file.write_text(file.read_text()[:-100])

    assert main(["compare", str(old), str(new)]) == 3
    said = capsys.readouterr()
    assert f"{file}:3: skipped, not JSON" in said.err
    assert said.out.startswith("1 MISSING, 2 SAME")


# --rerun-unsure.

CASE = BlockCopyCase(name="copy.tiny", num_kv_heads=1, head_dim=16, block_size=4, num_copies=4, num_blocks=16)


@pytest.fixture
def unsure(tmp_path):
    """Two runs of three rows of real cases: one UNSURE for its scatter."""

    def records(seed):
        where = {"case_digest": CASE.digest, "shape": CASE.to_json(), "device": "toy", "device_kind": "cpu"}
        noises = {"torch.block_copy": 0.2 * seed + 0.002, "cuda.block_copy": 0.002, "peer.x": 0.002}
        return [row(case=CASE.name, impl=impl, noise=noise, seed=seed, **where) for impl, noise in noises.items()]

    return str(save(tmp_path / "old", records(0))), str(save(tmp_path / "new", records(1)))


@pytest.fixture
def workers(monkeypatch):
    """Stands in for worker processes on the device "toy": all work asked for, each row answered by a calm record."""
    asked = []

    class Answers:
        def __init__(self, work, progress):
            self.work = work

        def records(self):
            self.work.require_device({"device": {"slug": "toy", "uuid": "GPU-here"}})
            asked.append(self.work)
            for case, entry in self.work.rows:
                yield row(
                    case=case.name, impl=entry.impl.name, case_digest=case.digest, device="toy", device_kind="cpu", visits=15,
                    seconds=101e-6, run=self.work.run,
                )  # fmt: skip

    monkeypatch.setattr("harness.rerun.Supervisor", Answers)
    return asked


def test_unsure_rows_are_measured_again_and_no_others(unsure, workers, tmp_path, capsys):
    """A fixed number of visits, in a run's folder of its own; the fresh visits take the place of the old ones."""
    words = ["compare", *unsure, "--runs-dir", str(tmp_path / "again")]
    assert main(words) == 3
    assert main([*words, "--rerun-unsure"]) == 0

    (work,) = workers
    assert [str(entry) for _, entry in work.rows] == ["torch.block_copy[HND]"]
    assert work.options.min_visits == 15
    (folder,) = (tmp_path / "again").iterdir()
    assert len((folder / "records.jsonl").read_text().splitlines()) == 1
    said = capsys.readouterr().out
    assert said.startswith("1 UNSURE, 2 SAME")
    assert "\n3 SAME: " in said
    assert "UNSURE at first, and measured again: 1 row." in said


def test_rows_of_another_device_are_not_measured_here(unsure, workers, tmp_path, capsys):
    """Exit code 2, with both devices."""
    for folder in unsure:
        file = tmp_path / folder / "records.jsonl"
        file.write_text(file.read_text().replace('"device":"toy"', '"device":"elsewhere"'))

    assert main(["compare", *unsure, "--rerun-unsure", "--runs-dir", str(tmp_path / "again")]) == 2
    assert "--rerun-unsure: the rows are of elsewhere, this is toy" in capsys.readouterr().err


@pytest.mark.parametrize(("uuid", "code"), [("GPU-there", 2), ("GPU-here", 0)])
def test_rows_of_another_gpu_of_the_kind_are_not_measured_here(unsure, workers, tmp_path, capsys, uuid, code):
    """They would be held to 8%, and what was UNSURE at 1% would pass."""
    for folder in unsure:
        file = tmp_path / folder / "records.jsonl"
        file.write_text(file.read_text().replace('"unit":{}', f'"unit":{{"uuid":"{uuid}"}}'))

    assert main(["compare", *unsure, "--rerun-unsure", "--runs-dir", str(tmp_path / "again")]) == code
    assert ("the rows are of GPU-there, this is GPU-here, another GPU of the kind" in capsys.readouterr().err) == (code == 2)


# pytest-benchmark's JSON.


def pytest_json(path, scale=1.0, rounds=1000, data=True):
    """A file as pytest-benchmark writes it, of somebody's own benchmark."""
    chance = random.Random(scale)
    times = [1e-3 * scale * chance.gauss(1, 0.01) for _ in range(rounds)]
    stats = {"median": 1e-3 * scale, **({"data": times} if data else {})}
    benchmark = {"name": "test_a", "fullname": "tests/test_x.py::test_a", "group": None, "extra_info": {}, "stats": stats}
    machine = {"python_version": "3.12.3", "system": "Linux", "cpu": {"brand_raw": "EPYC 9554", "count": 64}}
    path.write_text(json.dumps({"machine_info": machine, "commit_info": {"id": "c" * 40}, "benchmarks": [benchmark]}))
    return str(path)


@pytest.mark.parametrize(("scale", "code"), [(1.0, 0), (1.2, 1)])
def test_pytest_benchmarks_files_are_compared(tmp_path, capsys, scale, code):
    """Somebody's own benchmarks, with no word of ours in them."""
    old, new = pytest_json(tmp_path / "a.json"), pytest_json(tmp_path / "b.json", scale)

    assert main(["compare", old, new]) == code
    assert "tests/test_x.py::test_a" in capsys.readouterr().out or code == 0


def test_a_file_without_its_rounds_is_unsure(tmp_path, capsys):
    """--benchmark-save leaves the rounds out: a median alone has no interval."""
    old, new = pytest_json(tmp_path / "a.json"), pytest_json(tmp_path / "b.json", 1.2, data=False)

    assert main(["compare", old, new]) == 3
    said = capsys.readouterr()
    assert "has 1 samples of it" in said.out
    assert said.err.startswith(f"pagedbench: {new}: ")
    assert said.err.endswith("--benchmark-save-data keeps them\n")


def test_rows_of_our_plugin_keep_their_names_and_visits(tmp_path):
    """Case, digest, implementation and device are those of the record; a round is a visit."""
    record = row()
    fields = ("op", "impl", "layout", "case", "case_digest", "suite", "run", "device", "flags", "workspace_bytes")
    extra = {name: getattr(record, name) for name in fields}
    stats = {"median": record.launch_s.median, "data": record.launch_s.samples}
    benchmark = {"fullname": "tests/test_matrix.py::x", "extra_info": extra, "stats": stats}
    device = {"slug": record.device, "kind": "cuda", "uuid": "GPU-1", "name": "cuda:0"}
    machine = {"pagedbench": {"device": device, "toolchain": {"torch": "2.11.0"}}}
    file = tmp_path / "ours.json"
    file.write_text(json.dumps({"machine_info": machine, "commit_info": {}, "benchmarks": [benchmark]}))
    (read,) = load_pytest_json(file)

    assert (read.key, read.launch_s, read.device_kind) == (record.key, record.launch_s, "cuda")
    assert read.toolchain["torch"] == "2.11.0"
    assert read.unit == {"name": "cuda:0", "uuid": "GPU-1"}


@pytest.mark.parametrize("text", ["{", "[]", '{"benchmarks": 3}', '{"machine_info": {}, "benchmarks": [{}]}'])
def test_another_json_is_refused_by_name(tmp_path, capsys, text):
    file = tmp_path / "x.json"
    file.write_text(text)

    assert main(["compare", str(file)]) == 2
    assert str(file) in capsys.readouterr().err


PEOPLE = """
import os

def test_sum(benchmark):
    benchmark(lambda: [sum(range(2000)) for _ in range(int(os.environ["WORK"]))])
"""


@pytest.mark.parametrize(("work", "code"), [("1", 0), ("3", 1)])
def test_files_that_pytest_benchmark_itself_writes_are_compared(tmp_path, capsys, monkeypatch, work, code):
    """Somebody who has never heard of us: two saved runs of a test, and three times the work in the second."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # pytest-benchmark times nothing in a worker of pytest-xdist
    (tmp_path / "test_people.py").write_text(PEOPLE)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_people.py", "--benchmark-max-time=0.2"]
    for name, amount in (("old", "1"), ("new", work)):
        environment = {**os.environ, "WORK": amount}
        asked = [*words, f"--benchmark-json={name}.json"]
        done = subprocess.run(asked, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    files = [str(tmp_path / f"{name}.json") for name in ("old", "new")]
    assert main(["compare", *files, "--threshold", "60%"]) == code
    assert ("1 SLOWER" if code else "1 SAME") in capsys.readouterr().out
