"""The tables beside the times: ledgers, kernels, conditions, environment."""

from dataclasses import replace

from harness.report import tables


def test_remarks_that_differ_in_numbers_are_one_line(gpu_run):
    """What is inside the timed region is said once, numbers that vary from case to case as a range."""
    lines = {line[0]: line[1:] for line in tables.ledgers(gpu_run).lines}

    assert lines["inputs"] == ("5 to 6 sets, rotated", "all", str(len(gpu_run)))
    assert lines["timed"][0] == "graph of 16 launches, events"
    assert lines["casts"][:2] == ("query to f32, out back", "torch.blocked")


def test_equal_kernels_are_one_line(gpu_run):
    """A kernel that several cases share is counted; one with another register count is a line of its own."""
    ours = [r for r in gpu_run if r.row == "cuda.split_kv[NHD]"]
    fat = replace(ours[0], kernels=({**ours[0].kernels[0], "registers": 255, "spill_bytes": 64},))

    [table], [fatter] = tables.kernels(ours), tables.kernels([*ours, fat])
    assert table.lines == (
        ("cuda.split_kv[NHD]", "split_kv", "0a1b2c3d4e5f", "128", "65.5 kB", "0 B", str(len(ours))),
    )
    assert fatter.lines[1][3:] == ("255", "65.5 kB", "64 B", "1")
    assert (table.fold, table.has_alarm) == ("cuda.split_kv: 1 kernel, 128 registers, no spills", False)
    assert (fatter.fold, fatter.has_alarm) == ("cuda.split_kv: 2 kernels, 128 to 255 registers, spills up to 64 B", True)


def test_conditions_are_ranges(gpu_run):
    """Clocks and temperatures go from least to most over all rows, in their units; each throttle is counted."""
    throttled = [replace(gpu_run[0], nvml={"throttles": reasons}) for reasons in (["power cap"], ["heat", "power cap"])]
    lines = {line[:2]: line[2] for line in tables.conditions([*gpu_run, *throttled]).lines}
    readings = str(2 * sum(bool(r.nvml) for r in gpu_run))

    assert lines == {
        ("sm clock (MHz)", "1965 to 1980"): readings, ("temperature (°C)", "41 to 55"): readings,
        ("throttles", "power cap"): "2", ("throttles", "heat"): "1",
    }


def test_checks_of_any_kind_are_counted(gpu_run):
    """A kind of check is a line whatever it is called and holds; the largest error is that of a row which passed."""
    first, second = gpu_run[0], gpu_run[1]
    ok, wrong = {"passed": True, "ratios": {"l2": 0.5}}, {"passed": False, "ratios": {"l2": "inf"}}
    records = [replace(first, check={"mixed": ok, "relations": {"permuted": "equal"}}), replace(second, check={"mixed": wrong})]

    assert tables.checks(records).lines == (
        ("mixed", f"{first.row} on {first.case}", "2", "1", "50.0%"), ("relations", "-", "1", "-", "-"),
    )


def test_the_environment_names_every_value(gpu_run):
    """Two versions of one tool in a run are two lines, so that neither hides."""
    mixed = [gpu_run[0], replace(gpu_run[1], toolchain={"torch": "2.13.0"})]

    assert {("torch", "2.11.0"), ("torch", "2.13.0")} <= set(tables.environment(mixed).lines)


def test_the_formats_own_error_stands_once_a_case(gpu_run):
    """It is the cache's, not a row's: a line for each case that has one, and none where nothing is quantised."""
    quantised = [
        replace(one, format_error=0.027, shape={**one.shape, "kv_dtype": "e4m3", "kv_scales": "head"})
        for one in gpu_run[:3]
    ]

    lines = tables.formats([*quantised, *gpu_run]).lines

    assert lines == tuple({one.case_digest: (one.case, "e4m3", "one a head", "2.7%") for one in quantised}.values())
    assert tables.formats(gpu_run).lines == ()
