"""The edges catch what they are there for: a kernel that stops at a length, or maps its heads in a way that chance allows."""

from __future__ import annotations

import pytest

from cases import SUITES, UNTIMED
from harness.hazards import NEEDLES, PLAIN
from harness.ops import operator
from harness.ops.layouts import HND
from impls.numpy_dense import Dense

LONG = [case for case in SUITES["edges"] if case.op == "attention" and case.max_seq_len > 4096]
MANY_HEADS = [case for case in SUITES["edges"] if case.op == "attention" and case.num_kv_heads > 3]


class Faulty(Dense):
    """numpy.dense that attends to fewer tokens, or with other heads, than it was told."""

    def __init__(self, spec, fault):
        super().__init__(spec)
        self.fault = fault

    def attend(self, queries, key_cache, value_cache, blocks, seq_len):
        return super().attend(queries, key_cache, value_cache, blocks, self.fault(seq_len))


class Forgetful(Faulty):
    """Never reads the token at position `fault`."""

    def attend(self, queries, key_cache, value_cache, blocks, seq_len):
        return Dense.attend(self, queries, key_cache, value_cache, blocks, seq_len)

    def scores(self, queries, key, seq_len, first, head):
        scores = super().scores(queries, key, seq_len, first, head)
        scores[:, self.fault - first : self.fault - first + 1] = float("-inf")
        return scores


class Mapped(Faulty):
    """Reads the KV heads in another order."""

    def read(self, key_cache, value_cache, blocks):
        key, value = super().read(key_cache, value_cache, blocks)
        order = [self.fault(head, self.spec.num_kv_heads) for head in range(self.spec.num_kv_heads)]
        return key[order], value[order]

    def attend(self, queries, key_cache, value_cache, blocks, seq_len):
        return Dense.attend(self, queries, key_cache, value_cache, blocks, seq_len)


def verdicts(cases, make):
    """The verdict on each case and family of inputs, as `pagedbench check` comes by it."""
    for case in cases:
        for family in (PLAIN, NEEDLES):
            op = operator(case.op)
            staged = op.build(case, family, layers=op.rounds(case, family), device="cpu").stage(HND)
            prepared = make(op.spec(case, HND, "cpu", {}))
            prepared.plan(staged.step)
            for layer in range(staged.num_layers):
                staged.soil(layer)
                prepared.launch(*staged.arguments(layer), **staged.keywords(layer))
                yield staged.judge(layer, frozenset()).passed


FAULTS = {
    "nothing": (Dense, None),
    "keys from 4096 on are ignored": (Faulty, lambda seq_len: min(seq_len, 4096)),
    "token 2048 is dropped": (Forgetful, 2048),
    "token 4096 is dropped": (Forgetful, 4096),
    "lengths are cut at 32767": (Faulty, lambda seq_len: min(seq_len, 32767)),
    "lengths are cut at 65535": (Faulty, lambda seq_len: min(seq_len, 65535)),
    "lengths wrap at 65536": (Faulty, lambda seq_len: seq_len % 65536),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_long_contexts_are_among_the_edges(fault):
    """A kernel that is right up to some length is found out beyond it, and only then."""
    kind, argument = FAULTS[fault]

    passed = all(verdicts(LONG, lambda spec: kind(spec) if argument is None else kind(spec, argument)))

    assert passed == (fault == "nothing")


@pytest.mark.parametrize(
    "wrong_map",
    [
        lambda head, num_heads: num_heads - 1 - head,
        lambda head, num_heads: head ^ 1,
        lambda head, num_heads: min(head, 3),
        lambda head, num_heads: head * 3 % num_heads,
    ],
    ids=["reversed", "in pairs", "at most 4", "strided by the group"],
)
def test_a_wrong_map_of_heads_shows_in_every_sequence(wrong_map):
    """With many KV heads, three query heads each, a map that is right for one or two is wrong."""
    assert MANY_HEADS
    assert not any(next(verdicts([case], lambda spec: Mapped(spec, wrong_map))) for case in MANY_HEADS)


def test_the_quick_suite_times_no_edge():
    """Edges are there to be right; `quick` has some that no model is shaped like, and times none of them."""
    edges = {case.name for case in SUITES["quick"] if case.name.startswith("edges.")}

    assert edges <= set(UNTIMED["quick"])
    assert not edges & {case.name for case in MANY_HEADS}
