"""Controls that are edits of the NumPy implementations; they run on a CPU."""

from __future__ import annotations

import functools

from impls.controls.edit import edit

_dense = functools.partial(edit, right="numpy_dense.py", op="attention", devices=("cpu",))
_online = functools.partial(edit, right="numpy_online.py", op="attention", devices=("cpu",))
_write = functools.partial(edit, right="numpy_cache_write.py", op="cache_write", devices=("cpu",))
_copy = functools.partial(edit, right="numpy_block_copy.py", op="block_copy", devices=("cpu",))

_POSITION = "position = seq_len - num_rows // spec.group + np.arange(num_rows) // spec.group"

EDITS = (
    # attention: which keys
    _dense(
        "last_block_dropped",
        ("step.host_seq_lens.tolist()", "(step.host_seq_lens // spec.block_size * spec.block_size).tolist()"),
        at_least={"num_ragged": 1}, fault="blocks counted by floor division: the last, unfinished one is dropped",
    ),
    _online(
        "first_block_dropped", ("in range(first_key // size, len(blocks)):", "in range(min(1, len(blocks) - 1), len(blocks)):"),
        at_least={"num_blocks_of_longest": 2}, fault="a window where none was asked for (vllm#4380, tokenspeed#578)",
    ),
    _dense(
        "causal_from_the_end", (_POSITION, "position = seq_len - 1 - np.arange(num_rows) // spec.group"),
        at_least={"max_q_len": 2}, fault="causal bound ctx - i for ctx - n + i (aiter#4290)",
    ),
    _dense(
        "causal_from_the_start", (_POSITION, "position = np.arange(num_rows) // spec.group"),
        at_least={"max_seq_len": 2}, fault="causal mask without the offset kv_len - q_len (hyprstream#1521)",
    ),
    _dense(
        "int16_block_ids", ("blocks.astype(np.int64))", "blocks.astype(np.int16).astype(np.int64) % self.spec.num_blocks)"),
        at_least={"num_blocks": 40000}, fault="block ids kept in 16 bits wrap at 32768 (the kind of vllm#1486)",
    ),
    _dense(
        "lengths_of_32_sequences",
        ("enumerate(step.host_seq_lens.tolist())", "enumerate(np.resize(step.host_seq_lens[:32], step.num_seqs).tolist())"),
        ("blocks = step.host_block_tables[seq, : -(-seq_len // spec.block_size)]",
            "seq_len = min(seq_len, int(step.host_seq_lens[seq])) or 1\n"
            "            blocks = step.host_block_tables[seq, : -(-seq_len // spec.block_size)]"),
        at_least={"num_seqs": 34, "num_lengths": 2}, fault="a lane of a warp holds a length: of 32 sequences",
    ),
    _dense(
        "tile_of_64_by_floor",
        ("first - begin : seq_len - begin]", "first - begin : seq_len - begin - (seq_len > 64 and seq_len % 64 == 1)]"),
        at_least={"num_past_64": 1}, fault="a tile that holds one token is not visited (the kind of sglang#2465)",
    ),
    # attention: the softmax
    _online(
        "partials_without_rescale", ("np.exp(largest - shift), np.exp(scores - shift)", "1.0, np.exp(scores - shift)"),
        at_least={"num_blocks_of_longest": 2}, fault="a running sum kept when its maximum grows (flashinfer#58)",
    ),
    _online(
        "exp_of_nothing", ("np.where(np.isneginf(larger), 0.0, larger)", "larger"), ("total[..., 0] > 0", "total[..., 0] != 0"),
        at_least={"num_masked": 1}, fault="exp(-inf - -inf) where a row sees no key (vllm#28181)",
    ),
    # attention: rows that see no key
    _dense(
        "empty_row_unwritten", ("            out[rows], lse[rows] = 0.0, layer.get(\"sinks\", -np.inf)\n", ""),
        at_least={"num_empty": 1}, fault="a row without keys is left as it was (flashinfer#4975, flashinfer#1533)",
    ),
    _dense(
        "lse_of_empty_is_plus_inf", ("layer.get(\"sinks\", -np.inf)", "np.inf"),
        at_least={"num_empty": 1}, fault="the LSE of no keys is +inf (FA#978)",
    ),
    _dense(
        "lse_of_masked_is_finite", ("np.where(empty, -np.inf, shift", "np.where(empty, -49994.0, shift"),
        at_least={"num_masked": 1}, fault="a fully masked row has an LSE of -49994 (flashinfer#4452)",
    ),
    # cache_write
    _write(
        "slot_minus_one_written", ("np.flatnonzero(step.host_slot_mapping >= 0)", "np.arange(len(step.host_slot_mapping))"),
        at_least={"num_padding": 1}, fault="slot -1 indexes the end of the cache (FlexAttention's paged assign)",
    ),
    _write(
        "last_tokens_unwritten", ("step.host_slot_mapping >= 0)", "step.host_slot_mapping >= 0)[:-1]"),
        at_least={"num_written": 1}, fault="slot_mapping shorter than the tokens (vllm-ascend#14024)",
    ),
    _write(
        "writes_keys_twice", ("(value, value_slots,", "(key, value_slots,"),
        at_least={"num_written": 1}, fault="keys go into both caches (the kind of vllm-ascend#8105)",
    ),
    # block_copy
    _copy(
        "copies_keys_only", ("for cache in (*key_caches, *value_caches)", "for cache in key_caches"),
        at_least={"num_copies": 1}, fault="copy-on-write forgets V",
    ),
    _copy(
        "copy_reversed", ("blocks[destination] = blocks[source]", "blocks[source] = blocks[destination]"),
        at_least={"num_copies": 1}, fault="source and destination of a pair exchanged (vllm#8824)",
    ),
    _copy(
        "copy_misses_last_slot", ("[destination] = blocks[source]", "[destination, :, :-1] = blocks[source, :, :-1]"),
        at_least={"num_copies": 1}, fault="a block's bytes counted one token short",
    ),
)  # fmt: skip
