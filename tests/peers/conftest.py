"""Rows of peers on a CPU, their libraries faked, as `pagedbench check` runs them in a worker; `ragged` with relations."""

from __future__ import annotations

import dataclasses

import pytest

from harness.ops.attention import AttentionCase
from harness.options import Options
from harness.registry import Entry, Registry
from harness.session import Session, tasks
from impls.peers import PEERS


def decode(name, **fields):
    shape = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "block_size": 16, "dtype": "bf16"}
    return AttentionCase(name=f"peers.{name}", **{**shape, **fields})


CASES = {
    case.name.removeprefix("peers."): case
    for case in (
        decode("ragged", seq_lens=(5, 16, 33, 0, 48)),
        decode("some_without_a_token", seq_lens=(20, 7, 33), q_lens=(1, 0, 1), dtype="f16"),
        decode("no_token", seq_lens=(20, 7), q_lens=(0, 0)),
        decode("own_scale", seq_lens=(40, 3), scale=0.3),
        decode("group_16", seq_lens=(19, 64), num_q_heads=32, num_kv_heads=2, dtype="f16"),
        decode("partitions", seq_lens=(1100, 513, 512, 3), num_q_heads=2, num_kv_heads=1, block_size=32),
        decode("blocks_of_256", seq_lens=(300, 7, 256, 0), block_size=256),
        decode("head_dim_80", seq_lens=(30, 17), head_dim=80),
        decode("prefill", seq_lens=(20, 33, 5, 2), q_lens=(20, 3, 0, 4)),
    )
}


#: neighbours that begin with the same blocks, and some that do not
SHARED = {
    case.name.removeprefix("peers."): case
    for case in (
        decode("prefix", seq_lens=(70, 50, 64, 33), prefix=((0, 0), (0, 48), (0, 32), (0, 32))),
        decode("prefix_groups", seq_lens=(40, 40, 20, 70, 65), prefix=((0, 0), (0, 32), (0, 0), (0, 0), (3, 64)), dtype="f16"),
        decode(
            "prefix_levels", seq_lens=(100, 90, 80, 70, 34),
            prefix=((0, 0), (0, 80), (0, 32), (2, 64), (0, 16)), q_lens=(4, 1, 0, 6, 2),
        ),
        decode("prefix_softcap", seq_lens=(70, 50, 64), prefix=((0, 0), (0, 48), (0, 48)), softcap=20.0),
        decode("prefix_e4m3", seq_lens=(70, 50, 64), prefix=((0, 0), (0, 48), (0, 48)), kv_dtype="e4m3"),
    )
}

#: what a layer adds
ASKED = {
    case.name.removeprefix("peers."): case
    for case in (
        decode("window", seq_lens=(5, 40, 33, 64), window=20),
        decode("window_prefill", seq_lens=(40, 33, 5), q_lens=(20, 3, 1), window=9),
        decode("softcap", seq_lens=(5, 40), softcap=20.0),
        decode("alibi", seq_lens=(5, 40, 17), alibi=True),
        decode("sinks", seq_lens=(5, 40, 17), sinks=True),
        decode("e4m3", seq_lens=(5, 40, 17), kv_dtype="e4m3"),
        decode("e4m3_heads", seq_lens=(5, 40, 17), kv_dtype="e4m3", kv_scales="head"),
        decode("features_of_256", seq_lens=(300, 7), block_size=256, window=100, softcap=20.0, alibi=True),
    )
}


@pytest.fixture
def measured():
    """measured(NAME, case, PARAMETER=...): the record of each of the peer's layouts, by layout; `tails` changes the entry."""

    def measure(name, case, tails=None, **params):
        (impl,) = (peer for peer in PEERS if peer.name == name)
        here = dataclasses.replace(impl, devices=("cpu",), tails=tails or impl.tails)
        options = Options(bench=False, relations="all" if case is CASES["ragged"] else "none")
        session = Session(options, Registry([here]), "cpu", "run", isolated=True)
        rows = tasks([case], [Entry(here, layout, params) for layout in here.layouts])
        return {record.layout: record for _, record in session.run_tasks(rows, lambda *_: None)}

    return measure
