"""What is measured: one file a variant, one line each in this table. Strings load on first use."""

from __future__ import annotations

import dataclasses

from harness.ops.features import FEATURES, KV_DTYPES
from harness.ops.layouts import CONTIGUOUS, HND, HND_SWIZZLED, KV_NHD, LAYOUTS, NHD, PAGED
from harness.registry import DETERMINISTIC, Impl, Limits
from impls.controls import CONTROLS
from impls.peers import PEERS

#: every layout in which a paged cache can be held
WRITABLE = (*PAGED, HND_SWIZZLED)

#: of kernels that move whole vectors of 16 bytes
VECTORS = Limits(dtypes={"f32", "f16", "bf16"}, head_dim_multiple=8)
#: all that a case can ask for
EVERYTHING = frozenset(FEATURES)
#: all that a cache write can be asked for
QUANTISED = frozenset(KV_DTYPES)
READER = dataclasses.replace(VECTORS, features=EVERYTHING)

IMPLS: tuple[Impl, ...] = (
    # attention
    Impl(
        name="numpy.dense", op="attention", claims=DETERMINISTIC,
        prepare="impls.numpy_dense:prepare",
        layouts=WRITABLE, devices=("cpu",), limits=Limits(features=EVERYTHING),
        note="float64, all keys of a sequence at once: the reference",
    ),
    Impl(
        name="numpy.online", op="attention", claims=DETERMINISTIC,
        prepare="impls.numpy_online:prepare",
        layouts=WRITABLE, devices=("cpu",), limits=Limits(features=EVERYTHING),
        note="float64, block by block with the online softmax",
    ),
    Impl(
        name="torch.gather", op="attention", prepare="impls.torch_gather:prepare",
        layouts=WRITABLE, limits=Limits(features=EVERYTHING), note="gathers the blocks in use, then SDPA",
    ),
    Impl(
        name="torch.blocked", op="attention", prepare="impls.torch_blocked:prepare",
        layouts=WRITABLE, limits=Limits(features=EVERYTHING), params={"tile": (256, 16, 64, 1024)},
        note="walks block tables, one online softmax across tiles",
    ),
    Impl(
        name="torch.contiguous", op="attention", prepare="impls.torch_contiguous:prepare",
        layouts=(CONTIGUOUS,), note="SDPA over a cache that is not paged: the price of paging",
    ),
    # attention, CUDA C++
    Impl(
        name="cuda.per_token", op="attention", replays=True, claims=DETERMINISTIC,
        prepare="impls.cuda.per_token:prepare", layouts=PAGED, devices=("cuda",),
        limits=Limits(max_head_dim=512, features=EVERYTHING), available="impls.cuda.jit:why_missing",
        note="one warp a query head, tokens in order",
    ),
    Impl(
        name="cuda.block_parallel", op="attention", replays=True, claims=DETERMINISTIC,
        prepare="impls.cuda.block_parallel:prepare", layouts=(HND, NHD, KV_NHD),
        devices=("cuda",), limits=Limits(head_dim_multiple=8, max_head_dim=256), available="impls.cuda.jit:why_missing",
        note="one CTA a KV head, warps over blocks, one read for the group",
    ),
    Impl(
        name="cuda.split_kv", op="attention", replays=True, claims=DETERMINISTIC,
        prepare="impls.cuda.split_kv:prepare", layouts=(HND, NHD, KV_NHD),
        devices=("cuda",), limits=Limits(head_dim_multiple=8, max_head_dim=256), available="impls.cuda.jit:why_missing",
        params={"splits": (0, 1, 2, 4, 8, 16, 32, 64)}, note="block_parallel, sequences cut over CTAs, then merged",
    ),
    Impl(
        name="cuda.tensor_core", op="attention", replays=True, prepare="impls.cuda.tensor_core:prepare",
        layouts=(HND_SWIZZLED, HND, NHD, KV_NHD), devices=("cuda",),
        limits=Limits(dtypes={"f16", "bf16"}, head_dim_multiple=16, max_head_dim=256, max_q_len=8, features=EVERYTHING),
        available="impls.cuda.tensor_core:why_no_tensor_cores",
        params={
            "team": (0, 1, 2, 4, 6, 8, 12), "warps": (0, 4, 8, 12, 16), "stages": (0, 2, 3, 4, 6),
            "tile": (0, 16, 32, 64, 128), "products": ("planned", "warps", "warpgroups"),
            "copy": ("planned", "bulk", "async", "load", "load_once"), "solo": ("planned", 0, 4, 8, 16, 32),
            "prefix": ("planned", "always", "never"),
            "opening": ("planned", "plain", "quick"), "closing": ("planned", "fences", "release"), "ctas": (0, 128, 132),
        },
        note="persistent, equal shares of all sequences, heads and query tokens in the tensor cores' tile",
    ),
    Impl(
        name="cuda.prefill", op="attention", replays=True, claims=DETERMINISTIC, timed_from=2,
        prepare="impls.cuda.prefill:prepare", layouts=(HND, NHD, KV_NHD, HND_SWIZZLED), devices=("cuda",),
        limits=Limits(dtypes={"f16", "bf16"}, head_dims={64, 128, 256}), available="impls.cuda.prefill:why_no_wgmma",
        params={
            "tile": (0, 64, 80, 128, 160, 176, 192), "stages": (2, 3, 4), "warpgroups": (2, 3),
            "query": ("shared", "registers"),
        },
        note="many query tokens: warpgroup products of Hopper, a warpgroup that copies, items from a counter",
    ),
    # attention, Triton
    Impl(
        # Interpreted, the last bits of a row depend on its place in a product, and `layers` moves heads.
        name="triton.split_kv", op="attention", replays=True, claims={**DETERMINISTIC, "layers": "tolerance"},
        prepare="impls.triton.split_kv:prepare", layouts=(HND, NHD, KV_NHD),
        limits=Limits(max_head_dim=512), available="impls.triton.interpreter:why_missing",
        # K and V lie behind a table entry: Triton's pipeline holds one tile of them at 3 or 4 stages, two from 5 on.
        timed=("cuda",), max_work={"cpu": 3e7},  # the interpreter: 40 million operations a second
        params={"splits": (0, 1, 2, 4, 8, 16, 32, 64), "tile": (0, 32, 64, 128), "warps": (0, 2, 4, 8), "stages": (5, 3, 2, 7)},
        note="chunks of equal length, merged by a second kernel; 0 is planned",
    ),
    # cache_write
    Impl(
        name="numpy.cache_write", op="cache_write", prepare="impls.numpy_cache_write:prepare",
        layouts=WRITABLE, devices=("cpu",), limits=Limits(features=QUANTISED), note="NumPy indexing",
    ),
    Impl(
        name="torch.cache_write", op="cache_write", prepare="impls.torch_cache_write:prepare",
        layouts=WRITABLE, limits=Limits(features=QUANTISED), note="index_put_, padding repeats a valid write",
    ),
    Impl(
        name="cuda.cache_write", op="cache_write", prepare="impls.cuda.cache_write:prepare",
        layouts=WRITABLE, limits=dataclasses.replace(VECTORS, features=QUANTISED), devices=("cuda",),
        available="impls.cuda.jit:why_missing", note="16 bytes a thread",
    ),
    Impl(
        name="triton.cache_write", op="cache_write", prepare="impls.triton.cache_write:prepare",
        layouts=(HND, NHD, KV_NHD), limits=Limits(features=QUANTISED), available="impls.triton.interpreter:why_missing",
        timed=("cuda",), max_work={"cpu": 1e7},  # the interpreter: a millisecond a token
        note="one program a token",
    ),
    # block_copy
    Impl(
        name="numpy.block_copy", op="block_copy", prepare="impls.numpy_block_copy:prepare",
        layouts=WRITABLE, devices=("cpu",), note="pair after pair",
    ),
    Impl(
        name="torch.block_copy", op="block_copy", prepare="impls.torch_block_copy:prepare",
        layouts=WRITABLE, note="index_select and index_copy_ a wave",
    ),
    Impl(
        name="cuda.block_copy", op="block_copy", prepare="impls.cuda.block_copy:prepare",
        layouts=WRITABLE, limits=dataclasses.replace(VECTORS, dtypes={"f32", "f16", "bf16", *KV_DTYPES}), devices=("cuda",),
        available="impls.cuda.jit:why_missing", note="all layers in one launch a wave",
    ),
    # readers: what the device can read in the case's own tables
    Impl(
        name="ceiling.load_16b", op="attention", role="reader", prepare="impls.cuda.read_blocks:prepare_load",
        layouts=(HND, NHD, KV_NHD), limits=READER, devices=("cuda",), available="impls.cuda.jit:why_missing",
        params={"ctas_per_sm": (4, 2), "warps": (8,), "loads": (4, 2)},
        note="16-byte loads past L1, persistent",
    ),
    Impl(
        name="ceiling.bulk_copy", op="attention", role="reader", prepare="impls.cuda.read_blocks:prepare_bulk",
        layouts=(HND, NHD, KV_NHD), limits=READER, devices=("cuda",), available="impls.cuda.read_blocks:why_no_bulk_copy",
        params={"ctas_per_sm": (2,), "warps": (4,), "stages": (2, 3), "chunk_bytes": (4096, 8192)},
        note="cp.async.bulk into a ring of each warp",
    ),
    Impl(
        name="ceiling.torch_read", op="attention", role="reader", prepare="impls.torch_read:prepare",
        layouts=(HND, NHD), limits=Limits(head_dim_multiple=2, features=EVERYTHING), devices=("cpu",),
        note="embedding_bag over scattered rows",
    ),
    # floors: what a launch takes at least
    Impl(
        name="floor.empty_kernel", op="attention", role="floor", prepare="impls.cuda.empty:prepare",
        layouts=tuple(LAYOUTS.values()), devices=("cuda",), available="impls.cuda.jit:why_missing",
        limits=Limits(features=EVERYTHING), note="a kernel that does nothing",
    ),
    Impl(
        name="floor.empty_call", op="attention", role="floor", prepare="impls.empty_call:prepare",
        layouts=tuple(LAYOUTS.values()), devices=("cpu",), limits=Limits(features=EVERYTHING),
        note="a call that does nothing",
    ),
    # other people's, where their libraries are found
    *PEERS,
    # wrong on purpose: the checker's own tests
    *CONTROLS,
)
