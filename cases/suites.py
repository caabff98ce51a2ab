"""Suites: named tuples of cases. No suite asks the same question twice, whatever its names."""

from __future__ import annotations

from collections.abc import Iterable

from cases import ceilings, copies, decode, edges, facts, faults, masks, prefill, prefix, writes
from harness.ops.case import Case

Suite = tuple[Case, ...]


def _first_of_each(cases: Iterable[Case]) -> Suite:
    """Leave out cases whose question, the digest, stands already under another name; the records would be one row."""
    first: dict[str, Case] = {}
    for case in cases:
        first.setdefault(case.digest, case)
    return tuple(first.values())


#: each feature once, the smallest
SMOKE_FEATURES = (
    "edges.window_16", "edges.scores_all", "edges.e4m3_head", "edges.sinks_without_keys", "edges.prefix", "edges.write_e4m3",
)

SMOKE: Suite = (
    edges.ALL_LENGTHS,
    decode.SMOKE_QWEN3_0_6B,
    decode.SMOKE_GPT_OSS_F16,
    decode.SMOKE_GEMMA2_9B,
    prefill.SMOKE_MIXED,
    next(case for case in edges.GROUPS if case.name == "edges.group_7"),
    next(case for case in edges.BLOCK_SIZES if case.name == "edges.block_size_24"),
    writes.SMALL,
    writes.SMOKE_RUNS,
    copies.SMOKE,
    copies.SMOKE_CHAINED,
    *(case for case in edges.EDGES if case.name in SMOKE_FEATURES),
)

ONLY_KILLERS = (
    "faults.block_ids_over_65535", "faults.query_over_keys", "faults.heads_12_1", "faults.causal_offset", "faults.write_5_of_8",
    "faults.head_dim_256_page_16",
)

#: what no model above is shaped like, each the smallest: several chunks, no query, odd groups and heads, blocks of 24 and 32
ODD_SHAPES = (
    "edges.window_q_len_ragged", "edges.scores_all_q_len", "edges.e4m3_scores_all", "edges.prefix_levels", "edges.softcap_1",
    "edges.write_block_size_24",
    "edges.tiles", "edges.q_len_ragged", "edges.q_len_0", "edges.prefill_head_dim_80", "edges.group_1", "edges.group_71",
)

QUICK: Suite = (
    # On any machine.
    decode.QWEN3_0_6B_SMALL, decode.LLAMA3_8B_SINGLE, decode.GPT_OSS_SMALL, prefill.MIXED_SMALL, edges.ALL_LENGTHS, facts.J,
    writes.DECODE_64, writes.PREFILL_2048, copies.SMALL, copies.SMALL_CHAINED,
    # Each alone kills a control that nothing else here does (docs/audit.md).
    *(case for case in faults.FAULTS if case.name in ONLY_KILLERS),
    *(case for case in edges.EDGES if case.name in ODD_SHAPES),
    # On a GPU.
    facts.A, facts.C, facts.E, facts.F,
    decode.LLAMA3_70B_SERVED, decode.LLAMA_7B_ASCEND, prefill.CHUNKED,
    facts.E4M3[4], masks.GPT_OSS_WINDOW_SERVED,
    writes.PREFILL_16384, copies.MANY,
)

MODELS: Suite = (
    *decode.SERVED, *decode.SINGLE, *decode.SMALL, *decode.RAGGED, *decode.SKEWED, *decode.DTYPES, *prefill.PREFILL,
    *writes.WRITES, *copies.COPIES,
)

BLOCK_SIZE: Suite = (*decode.BLOCK_SIZE, *writes.BLOCK_SIZE, *copies.BLOCK_SIZE)

CONTEXT: Suite = _first_of_each(decode.CONTEXT)

FP8: Suite = (*facts.FP8, *writes.FP8, copies.FP8)
VERIFY: Suite = (*(fact for fact in facts.FACTS if fact in (facts.A, facts.B, facts.G)), *facts.VERIFY)
MASKS: Suite = (*masks.MASKS, *masks.UNMASKED)

_TIMED: Suite = (
    *SMOKE, *QUICK, *facts.FACTS, *MODELS, *CONTEXT, *BLOCK_SIZE, *edges.EDGES, *FP8, *VERIFY, *MASKS, *prefix.PREFIX,
)

# To time the faults, too, would say nothing.
FULL: Suite = _first_of_each(_TIMED)

SUITES: dict[str, Suite] = {
    "smoke": SMOKE,
    "quick": QUICK,
    "full": FULL,
    "edges": edges.EDGES,
    "models": MODELS,
    "block_size": BLOCK_SIZE,
    "context": CONTEXT,
    "facts": facts.FACTS,
    "fp8": FP8,
    "verify": VERIFY,
    "masks": MASKS,
    "prefix": prefix.PREFIX,
    "faults": faults.FAULTS,
    "ceiling": ceilings.CEILINGS,
}

#: cases of a suite that are there to be right, not to be fast: checked in every run of the suite, timed when named alone
UNTIMED: dict[str, tuple[str, ...]] = {
    "quick": tuple(case.name for case in QUICK if case.name.startswith(("edges.", "faults."))),
}

#: one sentence a suite, for `pagedbench list`
SUITE_NOTES: dict[str, str] = {
    "smoke": "Tiny cases of all three operators on real head shapes, up to some 200 tokens: seconds on two CPU cores.",
    "quick": "The default: real model shapes for a GPU, with enough of them small enough for a CPU.",
    "full": "Every question of every suite but the faults, once.",
    "edges": "Lengths to 70,000, groups, head and block sizes, query counts and dtypes on which such kernels have gone wrong.",
    "models": "Every model served to many, to one and to ragged batches, its prefill, cache writes and block copies.",
    "block_size": "The same tokens in blocks of 1 to 256.",
    "context": "Llama 3 8B from 512 tokens to 131072 and from one sequence to 256.",
    "facts": "The twelve cases on which other libraries' kernels were measured side by side.",
    "fp8": "The twelve with an fp8 cache, and the writes and copies that such a cache takes.",
    "verify": "Cases a, b and g of facts with one, four, eight and ragged query tokens a sequence.",
    "masks": "Windows, soft caps, sinks, ALiBi: as models have them, what each costs, a window at the end of 131072 tokens.",
    "prefix": "Tables of many sequences that begin with the same blocks: much, little, groups, levels.",
    "ceiling": "Reads of 8 MB to 2 GB in chunks of 1 to 32 KB that lie anywhere: what `pagedbench ceiling` measures by itself.",
    "faults": "The smallest input that shows each public fault, 32-bit offsets among them (docs/faults.md).",
}

#: every case by its name
ALL: dict[str, Case] = {case.name: case for case in (*_TIMED, *faults.FAULTS, *ceilings.CEILINGS)}
