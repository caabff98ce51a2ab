"""Controls that are edits of the Triton implementations; on a CPU they run in Triton's interpreter."""

from __future__ import annotations

import functools

from harness.registry import Limits
from impls.controls.edit import edit

#: two splits of the longest sequence, where it is longer than a tile
_SPLIT = {"splits": (2,), "tile": (32,), "warps": (0,), "stages": (5,)}
_split = functools.partial(
    edit, right="triton/split_kv.py", op="attention", params=_SPLIT, limits=Limits(max_head_dim=512),
    available="impls.triton.interpreter:why_missing", timed=("cuda",), max_work={"cpu": 3e6},
)
_write = functools.partial(
    edit, right="triton/cache_write.py", op="cache_write", available="impls.triton.interpreter:why_missing", timed=("cuda",),
)

_VALUES = "values = tl.load(value_cache + (block * value_block_stride + within)[:, None] + dim[None, :], readable, other=0.0)"

EDITS = (
    _split(
        "loads_by_block",
        (_VALUES, _VALUES.replace("readable", "(dim < head_dim)[None, :]")),
        ("position // block_size, is_key, other=0)",
            "position // block_size, position // block_size <= (end - 1) // block_size, other=0)"),
        at_least={"num_ragged": 1}, fault="loads masked by block and not by token: 0 * NaN (vllm#47305, aiter#5401)",
    ),
    _split(
        "split_edge_dropped", ("end = tl.minimum(begin + chunk, seq_len", "end = tl.minimum(begin + chunk - 1, seq_len"),
        at_least={"max_seq_len": 65}, fault="the last key of a split belongs to none (sglang#2465, FA#2550)",
    ),
    _split(
        "offsets_in_int32",
        # Without its sign, or it would read in front of the pool, where nothing may be mapped.
        ("(block * key_block_stride + within)", "(((block * key_block_stride) & 0x7FFFFFFF) + within)"),
        at_least={"num_elements": 9 << 28}, devices=("cuda",), fault="block id times stride in 32 bits (vllm#47671)",
    ),
    _write(
        "triton_padding_to_slot_0", ("= tl.load(slot_mapping + token)", "= tl.maximum(tl.load(slot_mapping + token), 0)"),
        at_least={"num_padding": 1}, fault="padding is written to slot 0 (vllm-ascend#11774)",
    ),
)  # fmt: skip
