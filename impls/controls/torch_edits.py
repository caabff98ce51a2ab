"""Controls that are edits of the torch implementations; they run on a CPU and on a GPU."""

from __future__ import annotations

import functools

from impls.controls.edit import edit

_blocked = functools.partial(edit, right="torch_blocked.py", op="attention", params={"tile": (16,)})
_gather = functools.partial(edit, right="torch_gather.py", op="attention")
_write = functools.partial(edit, right="torch_cache_write.py", op="cache_write")
_copy = functools.partial(edit, right="torch_block_copy.py", op="block_copy")

# Statements of torch_blocked.py that are edited more than once.
_LARGER = "larger = torch.maximum(largest[:live], scores.amax(-1, keepdim=True))"
_SUMS = "sums[:live] = sums[:live] * rescale + weights @ value"
_PAIR = "pair = gather(key_cache, value_cache, spec.layout, table, spec.num_kv_heads)"
_BY_HEAD = "permute(0, 3, 1, 2, 4)"
_OUT = f"out = (sums / total).unflatten(2, (spec.group, -1)).{_BY_HEAD}"
_LSE = f"lse = (largest + total.log()).unflatten(2, (spec.group, -1)).{_BY_HEAD}"
_MASK = "scores = scores.masked_fill(positions >= limits[:live], -torch.inf)"
_BLIND = "        self.finish_blind(out, lse, layer.get(\"sinks\"))"

_ANY = {"max_seq_len": 1}

SOFTMAX = (
    _blocked(
        "softmax_per_block",
        (_LARGER, "larger = scores.amax(-1, keepdim=True)"),
        (_SUMS, "sums[:live] += weights / weights.sum(-1, keepdim=True) @ value"),
        (_OUT, _OUT.replace("(sums / total)", "sums")),
        at_least={"num_blocks_of_longest": 2},
        fault="a softmax of each block alone, added up (the Ascend article's paged_attention)",
    ),
    _blocked(
        "no_maximum_subtracted", (_LARGER, "larger = torch.zeros_like(largest[:live])"),
        at_least=_ANY, fault="exponentials that overflow (the Ascend article's kernel in Ascend C)",
    ),
    _blocked(
        "maximum_begins_at_0", ("rows.new_full((*rows.shape[:3], 1), -torch.inf)", "rows.new_zeros((*rows.shape[:3], 1))"),
        at_least={"num_outliers": 1}, fault="a maximum that begins at 0: 0 / 0 where every score is below -104",
    ),
    _blocked(
        "values_saturate",
        ("scores = rows[:live] @ key.mT", "value = value.clamp(-448, 448)\n            scores = rows[:live] @ key.mT"),
        at_least={"num_outliers": 1}, fault="values pass through a type that ends at 448 (fp8 e4m3)",
    ),
    _blocked(
        "scale_of_the_spec_ignored", ("mul_(spec.scale)", "mul_(spec.head_dim**-0.5)"),
        at_least={"own_scale": 1, "max_seq_len": 2}, fault="the model's own scale is not used (Gemma 2 has one)",
    ),
    _blocked(
        "scale_two_percent_off", ("mul_(spec.scale)", "mul_(1.02 * spec.scale)"),
        at_least={"max_seq_len": 2}, fault="a scale not quite head_dim ** -0.5, as a padded head makes it",
    ),
    _blocked(
        "sums_in_the_cache_dtype",
        (_SUMS, "sums[:live] = (sums[:live] * rescale + weights @ value).to(query.dtype).float()"),
        at_least={"num_blocks_of_longest": 6}, dtypes={"bf16"},
        fault="an accumulator of the cache's type (the Ascend article's LocalTensor<T> acc)",
    ),
    _blocked(
        "rounded_before_the_sum", ("(scores - shift).exp_()", "(scores - shift).exp_().to(query.dtype).float()"),
        at_least={"max_seq_len": 2}, dtypes={"f16", "bf16"}, fault="probabilities are summed once rounded; nothing declares it",
    ),
    _blocked(
        "sums_in_any_order",
        ("self.check_tokens(query)", "self.check_tokens(query)\n        self.turn = not getattr(self, 'turn', False)"),
        (_SUMS, f"if self.turn:\n                weights, value = weights.flip(-1), value.flip(-2)\n            {_SUMS}"),
        ("total[:live] * rescale + weights.sum(-1, keepdim=True)",
            "total[:live] * rescale + (weights.cumsum(-1)[..., -1:] if self.turn else weights.sum(-1, keepdim=True))"),
        at_least={"max_seq_len": 15}, fault="parts are added in the order they arrive: no two runs agree (flashinfer#1661)",
    ),
    _blocked(
        "lse_in_base_2", (_LSE, _LSE.replace("(largest + total.log())", "((largest + total.log()) * 1.442695)")),
        at_least={"max_seq_len": 2}, fault="LSE in base 2 (vllm#47079, sglang#33064, flashinfer#4485)",
    ),
    _blocked(
        "lse_heads_transposed", (_LSE, _LSE.replace(_BY_HEAD, "permute(0, 3, 2, 1, 4)")),
        at_least={"group": 2, "num_kv_heads": 2, **_ANY},
        fault="the LSE of packed heads in their packed order (vllm-project/flash-attention#87)",
    ),
)  # fmt: skip

KEYS = (
    _blocked(
        "length_plus_one", (_MASK, _MASK.replace(">=", ">")),
        at_least={"num_ragged": 1}, fault="one key too many (vllm#945)",
    ),
    _blocked(
        "length_minus_one", (_MASK, _MASK.replace("limits[:live]", "limits[:live] - 1")),
        at_least={"num_ragged": 1}, fault="one key too few (vllm#945)",
    ),
    _blocked(
        "tables_that_count_up",
        ("table = batch.table[:live, begin : begin + self.tile_blocks]",
            "width = min(self.tile_blocks, batch.table.shape[1] - begin)\n"
            "            table = batch.table[:live, :1] + torch.arange(begin, begin + width, device=query.device)\n"
            "            table %= spec.num_blocks"),
        at_least={"num_blocks_of_longest": 2}, fault="right where block ids count up (flashinfer#3219, vllm-ascend#14038)",
    ),
    _blocked(
        "block_ids_below_32768", (_PAIR, _PAIR.replace("table,", "table & 0x7FFF,")),
        at_least={"num_blocks": 40000}, fault="a block id loses its upper bits (the kind of vllm#1486, flashinfer#3130)",
    ),
    _blocked(
        "values_of_another_block",
        (_PAIR, f"{_PAIR}\n"
            "            other = (table + 1) % spec.num_blocks\n"
            "            pair = (pair[0], gather(key_cache, value_cache, spec.layout, other, spec.num_kv_heads)[1])"),
        at_least=_ANY, fault="K and V of different blocks (flashinfer#3022, TRT-LLM#17964)",
    ),
    _blocked(
        "stale_table_tail",
        ("self.deal(step, lambda", "self.step = step\n        self.deal(step, lambda"),
        (_PAIR, f"{_PAIR}\n"
            "            stale = self.step.block_tables[batch.seqs[:live], -1].long() % spec.num_blocks\n"
            "            pair = tuple(p + 0 * c[stale][:, :, :1] for p, c in zip(pair, (key_cache, value_cache)))"),
        at_least=_ANY, fault="the entry behind a sequence's last block is followed (vllm#42494)",
    ),
    _blocked(
        "tail_of_values_times_zero",
        ("                value = value.masked_fill(positions[:, None] >= lengths[:live], 0.0)\n", ""),
        at_least={"num_ragged": 1}, fault="0 * NaN behind the end of a sequence (vllm#641, vllm#936)",
    ),
    _blocked(
        "nan_taken_for_masked",
        (_MASK, "scores, value = scores.masked_fill(scores.isnan(), -torch.inf), value.nan_to_num(0.0)"),
        at_least={"num_ragged": 1}, fault="masked by what a debug allocator fills in, and not by length",
    ),
    _blocked(
        "tail_of_keys_times_zero",
        (_MASK, "scores = scores * (positions < limits[:live]) - 1e30 * (positions >= limits[:live])"),
        at_least={"num_ragged": 1}, fault="scores masked by arithmetic: NaN where the truth is finite (vllm#47305)",
    ),
)  # fmt: skip

HEADS = (
    _blocked(
        "wrong_gqa_map",
        ("batch.q_len, spec.num_kv_heads, spec.group, spec", "batch.q_len, spec.group, spec.num_kv_heads, spec"),
        ("view(shape).permute(0, 2, 3, 1, 4)", "view(shape).permute(0, 3, 2, 1, 4)"),
        (_LSE, _LSE.replace(_BY_HEAD, "permute(0, 3, 2, 1, 4)")),
        (_OUT, _OUT.replace(_BY_HEAD, "permute(0, 3, 2, 1, 4)")),
        at_least={"group": 2, "num_kv_heads": 2, **_ANY}, fault="query head h reads KV head h % num_kv_heads (vllm#496)",
    ),
    _blocked(
        "strides_swapped",
        ("spec, num_seqs = self.spec, len(batch.seqs)\n", "spec, num_seqs = self.spec, len(batch.seqs)\n"
            "        by_slot = (spec.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)\n"
            "        key_cache = key_cache.reshape(by_slot).transpose(1, 2).contiguous()\n"
            "        value_cache = value_cache.reshape(by_slot).transpose(1, 2).contiguous()\n"),
        at_least={"num_kv_heads": 2, "block_size": 2, "max_seq_len": 2},
        fault="the strides of heads and slots exchanged: HND read as NHD",
    ),
    _blocked(
        "group_cut_at_8", (_OUT, f"sums.unflatten(2, (spec.group, -1))[:, :, 8:] = 0\n        {_OUT}"),
        at_least={"group": 9, **_ANY}, fault="rows of a group past the eighth are dropped (b12x#24)",
    ),
    _blocked(
        "head_dim_cut_at_128", ("scores = rows[:live] @ key.mT", "scores = rows[:live, ..., :128] @ key[..., :128].mT"),
        at_least={"head_dim": 129, "max_seq_len": 2}, fault="elements past one tile of the head are dropped (vllm#3952)",
    ),
    _blocked(
        "query_taken_for_contiguous",
        ("self.check_tokens(query)", "self.check_tokens(query)\n"
            "        query = query.as_strided(query.shape, torch.empty(query.shape, device='meta').stride())"),
        at_least={"num_tokens": 2, **_ANY}, fault="a query that is a slice of fused QKV (flashinfer#1865, FA#2670)",
    ),
    _blocked(
        "cache_taken_for_packed",
        ("self.check_tokens(query)", "self.check_tokens(query)\n"
            "        packed = torch.empty(key_cache.shape, device='meta').stride()\n"
            "        key_cache = key_cache.as_strided(key_cache.shape, packed)\n"
            "        value_cache = value_cache.as_strided(value_cache.shape, packed)"),
        at_least={"num_blocks_of_longest": 2}, fault="a cache whose blocks lie further apart (vllm#50427)",
    ),
)  # fmt: skip

WRITTEN = (
    _blocked(
        "last_row_unwritten",
        ("(0, batch.tokens, attended.to(out.dtype))", "(0, batch.tokens[:-1], attended[:-1].to(out.dtype))"),
        at_least=_ANY, fault="the grid is one row short",
    ),
    _blocked(
        "lse_unwritten", ("            lse.index_copy_(0, batch.tokens, logs)\n", ""),
        at_least=_ANY, fault="LSE is not stored on one of the paths (flashinfer#50)",
    ),
    _blocked(
        "query_scaled_in_place", ("self.check_tokens(query)", "self.check_tokens(query)\n        query.mul_(2)"),
        ("mul_(spec.scale)", "mul_(spec.scale / 2)"),
        at_least=_ANY, fault="an input serves as scratch",
    ),
    _blocked(
        "writes_past_out", (_BLIND, f"{_BLIND}\n"
            "        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(1)"),
        at_least=_ANY, fault="one element past the end of an output is written",
    ),
    _blocked(
        "workspace_overrun", ("self.check_tokens(query)", "self.check_tokens(query)\n"
            "        end = self.integers.storage_offset() + self.integers.numel()\n"
            "        self.integers.as_strided((1,), (1,), end).fill_(1)"),
        at_least=_ANY, fault="a workspace one element short of what is written (FlashInfer's split workspaces)",
    ),
    _blocked(
        "state_not_cleared",
        ("self.deal(step, lambda", "self.kept = {}\n        self.deal(step, lambda"),
        ("        limits = batch.limits.repeat",
            "        largest, total, sums = self.kept.setdefault(id(batch), (largest, total, sums))\n"
            "        limits = batch.limits.repeat"),
        at_least=_ANY, fault="a second launch starts from what the first has left (semaphores of flashinfer/xqa.py)",
    ),
    _gather(
        "cache_tail_scrubbed",
        ("                for part in (key, value):\n",
            "                row, token = batch.tails\n"
            "                for cache in (key_cache, value_cache):\n"
            "                    block = batch.table[row, token // self.spec.block_size]\n"
            "                    cache[block, :, token % self.spec.block_size] = self.zero\n"
            "                for part in (key, value):\n"),
        at_least={"num_ragged": 1}, fault="the caller's cache is cleared behind the end, against 0 * NaN (Tencent/hpc-ops)",
    ),
    _write(
        "padding_to_slot_0",
        ("torch.where(valid, slots, slots.index_select(0, first[None]).clamp_min(0))", "slots.clamp_min(0)"),
        ("torch.where(valid, token, first)", "token"),
        at_least={"num_padding": 1}, fault="padding is clipped to a real slot (tpu-inference#2366)",
    ),
    _write(
        "block_size_taken_for_16", ("= target // self.spec.block_size", "= target // 16 % self.spec.num_blocks"),
        ("self.offset[: self.num_tokens] = target % self.spec.block_size", "self.offset[: self.num_tokens] = target % 16"),
        at_least={"block_size": 17, "num_written": 1}, fault="the block size is a constant (vllm#42510)",
    ),
    _copy(
        "chain_read_after_write", ("for begin, end in waves(step.host_copies)]", "for begin, end in [(0, len(step.copies))]]"),
        at_least={"chained": 1, "num_copies": 2}, fault="all pairs at once, though one reads what another has written",
    ),
    _copy(
        "copies_first_layer_only", ("(*key_caches, *value_caches)", "(key_caches[0], value_caches[0])"),
        at_least={"num_layers": 2, "num_copies": 1}, fault="other layers keep the old blocks",
    ),
)  # fmt: skip

EDITS = (*SOFTMAX, *KEYS, *HEADS, *WRITTEN)
