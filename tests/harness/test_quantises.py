"""What an entry declares to round reaches every judgement of it, from its first launch to its relations."""

from __future__ import annotations

import pytest

from harness.ops.attention import AttentionCase
from harness.ops.layouts import HND
from harness.options import Options
from harness.registry import Entry, Impl, Registry
from harness.session import Session, tasks

CASE = AttentionCase(
    name="tiny.decode", num_q_heads=4, num_kv_heads=2, head_dim=16, block_size=4, seq_lens=(5, 9, 0), dtype="bf16"
)


@pytest.mark.parametrize(
    "quantises", [{"query"}, {"probabilities"}, {"query", "probabilities", "partials"}], ids=["query", "probabilities", "all"]
)
def test_an_entry_may_declare_what_it_rounds(quantises):
    """Fp8 roundings change what is allowed on every input and relation: the row is judged, not failed."""
    impl = Impl(name="toy.fp8", op="attention", prepare="impls.torch_gather:prepare", quantises=frozenset(quantises))
    session = Session(Options(bench=False, relations="all"), Registry([impl]), "cpu", "run")

    ((_, record),) = session.run_tasks(tasks([CASE], [Entry(impl, HND)]), lambda *_: None)

    assert (record.status, record.reason) == ("ok", None)
