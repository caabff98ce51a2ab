"""The command beside each row runs that row, and no other: read back by the command line itself."""

import argparse
import shlex
from dataclasses import replace

import pytest

from harness.commands import run as run_command
from harness.commands.selection import apply_settings, cases_of, entries_of, parse_settings, registry_of, rows_of
from harness.registry import default_registry
from harness.report.again import command
from harness.rooms import load_room
from tests.harness.runs import row

ENTRIES = default_registry().entries(roles=("implementation", "control", "reader"))


def read_back(text):
    """What a command line would run: its command, [(case, entry)], and its options."""
    program, name, *words = shlex.split(text)
    assert program == "pagedbench"
    parser = argparse.ArgumentParser(exit_on_error=False)
    run_command.add_arguments(parser, name)
    arguments = parser.parse_args(words)
    entries = apply_settings(parse_settings(arguments.set), entries_of(arguments, registry_of(arguments)))
    return name, rows_of(cases_of(arguments)[1], entries), arguments


def record_of(case, entry):
    """The record of a row, as far as commands are made of it."""
    return row(case.name, entry.impl.name, layout=entry.layout.name, role=entry.impl.role, op=case.op,
               params=entry.impl.resolve_params(entry.params))


@pytest.mark.parametrize("op", ["attention", "cache_write", "block_copy"])
def test_every_row_of_every_kind_is_found_again(op):
    """Implementations, controls and readers, in every layout, with the parameters that were used."""
    case = next(case for case in load_room("cases").SUITES["smoke"] if case.op == op)
    for entry in (entry for entry in ENTRIES if entry.impl.op == op):
        name, [(found, again)], _ = read_back(command(record_of(case, entry), {"command": "run"}))

        assert (name, found, str(again)) == ("run", case, str(entry))
        assert again.impl.resolve_params(again.params) == entry.impl.resolve_params({})


def test_every_case_is_found_again():
    """Each name chooses its case alone, whatever characters it holds."""
    entry = {entry.impl.op: entry for entry in ENTRIES if entry.impl.role == "implementation"}
    for case in load_room("cases").ALL.values():
        _, [(found, _)], _ = read_back(command(record_of(case, entry[case.op])))

        assert found == case


def test_what_tune_tried_is_tried_again():
    """Every variant's settings, of whatever type, come back as they were."""
    case = next(case for case in load_room("cases").SUITES["smoke"] if case.op == "attention")
    tuned = next(entry for entry in ENTRIES if entry.impl.name == "triton.split_kv")
    for variant in tuned.variants():
        _, [(_, again)], _ = read_back(command(record_of(case, variant), {"command": "tune"}))

        assert again.params == variant.params


def test_a_shape_of_ones_own_comes_with_the_command():
    """A case that is in no suite, and a kernel that is in no table, are found by the options that brought them."""
    shape = "q=8,kv=2,d=64,bs=16,lens=100x3,name=mine"
    given = ["check", "--shape", shape, "--suite=smoke", "--relations=none", "--json"]
    text = command(row("mine", "numpy.dense", device_kind="cpu"), {"command": "check", "arguments": given})
    name, [(found, _)], arguments = read_back(text)

    assert (name, found.name, found.seq_lens) == ("check", "mine", (100, 100, 100))
    assert (arguments.device, arguments.relations, arguments.suite) == ("cpu", "none", None)


@pytest.mark.parametrize(("facts", "device"), [({}, "cpu"), ({"arguments": ["run", "--device", "cpu"]}, "cpu")])
def test_the_device_is_named_once(facts, device):
    """On a CPU it must be named, else a GPU that is there would be taken; as given, where it was given."""
    words = shlex.split(command(row(device_kind="cpu"), facts))

    assert words.count("--device") == 1
    assert words[words.index("--device") + 1] == device


@pytest.mark.parametrize(
    ("unit", "arguments", "device"),
    [
        ({"name": "cuda:3", "uuid": "GPU-3"}, ["run", "--devices", "all"], "cuda:3"),
        ({"name": "cuda:3"}, ["run", "--device=cuda:3"], "cuda:3"),
        ({"name": "cuda:0"}, ["run"], None),
        ({"name": "cuda:1", "node": "worker-7"}, ["run", "--engine", "ray"], None),
        ({}, ["run"], None),
    ],
    ids=str,
)
def test_a_row_of_one_of_many_gpus_runs_on_that_one(unit, arguments, device):
    """GPUs of one kind differ a little; an index on another machine of a cluster would name a GPU of this one."""
    _, _, found = read_back(command(row("facts.j", unit=unit), {"command": "run", "arguments": arguments}))

    assert (found.device, found.devices) == (device, None)


@pytest.mark.parametrize("arguments", [None, "run", [["run"]], {"run": 1}, ["--shape"]], ids=str)
def test_odd_facts_break_no_command(arguments):
    """run.json comes from a file: whatever stands there, the command names row and case."""
    text = command(row(), {"command": ["x"], "arguments": arguments})

    assert text.startswith("pagedbench run --impl 'cuda.split_kv[HND]' --case decode.a")


def test_a_command_survives_the_shell():
    """Split by a shell, it has the row, the case and every parameter, whatever characters they hold."""
    odd = replace(row("a; rm -rf /"), impl="a.b c'd", params={"mode": "$(x) y"}, device_kind="cpu")

    assert shlex.split(command(odd)) == [
        "pagedbench", "run", "--impl", "a.b c'd[HND]", "--case", "a; rm -rf /", "--set", "mode=$(x) y", "--device", "cpu",
    ]
    assert "--case=-x" in shlex.split(command(row("-x")))
