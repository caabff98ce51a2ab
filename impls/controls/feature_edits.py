"""Controls that get wrong what a layer adds: windows, soft caps, ALiBi, sinks, scales of fp8, shared prefixes."""

from __future__ import annotations

import functools

from harness.ops.features import FEATURES, KV_DTYPES
from harness.registry import Limits
from impls.controls.edit import edit

_ALL = Limits(features=frozenset(FEATURES))
_dense = functools.partial(edit, right="numpy_dense.py", op="attention", devices=("cpu",), limits=_ALL)
_online = functools.partial(edit, right="numpy_online.py", op="attention", devices=("cpu",), limits=_ALL)
_blocked = functools.partial(edit, right="torch_blocked.py", op="attention", params={"tile": (16,)}, limits=_ALL)
_write = functools.partial(
    edit, right="numpy_cache_write.py", op="cache_write", devices=("cpu",), limits=Limits(features=frozenset(KV_DTYPES))
)
_token = functools.partial(
    edit, right="cuda/per_token.py", op="attention", devices=("cuda",), available="impls.cuda.jit:why_missing",
    limits=Limits(max_head_dim=512, features=frozenset(FEATURES)),
)

_WINDOW = "(ahead <= -(spec.window or np.inf))"
_FIRST = "return max(seq_len - q_len - self.spec.window + 1, 0) if self.spec.window else 0"
_CAP = (
    "            if spec.softcap:\n"
    "                scores = (scores / spec.softcap).tanh_().mul_(spec.softcap)\n"
)
_LARGER = "            larger = torch.maximum("
_SCALED = "(part * self.layer[name][:, None, None]"

WINDOWS = (
    _dense(
        "window_plus_one", (_WINDOW, _WINDOW.replace("<=", "<")), (_FIRST, _FIRST.replace(" + 1", "")),
        at_least={"num_behind": 1}, fault="W + 1 keys (zml#763, vllm#4380)",
    ),
    _dense(
        "window_minus_one", (_WINDOW, _WINDOW.replace("-(spec", "1 - (spec")),
        at_least={"asks_window": 1, "max_seq_len": 2}, fault="W - 1 keys and the current one (transformers#39408)",
    ),
    _dense(
        "window_ignored", (_WINDOW, "False"), (_FIRST, "return 0"),
        at_least={"num_behind": 1}, fault="a window that decode does not know (vllm#4768, tt-metal#30362)",
    ),
    _dense(
        "window_of_the_first_token", (_WINDOW, "False"),
        at_least={"num_behind": 1, "max_q_len": 2}, fault="all tokens of a draft or a chunk have the first one's window",
    ),
)  # fmt: skip

SCORES = (
    _blocked(
        "softcap_after_mask", (_CAP, ""), (_LARGER, f"{_CAP}{_LARGER}"),
        at_least={"strong_cap": 1, "num_ragged": 1}, fault="cap * tanh(-inf) is -cap: what is masked counts (flashinfer#350)",
    ),
    _blocked(
        "softcap_lost", (_CAP, ""),
        at_least={"asks_softcap": 1, "max_seq_len": 2}, fault="no cap on one of the paths (vllm-metal#665, flashinfer#3890)",
    ),
    _dense(
        "alibi_from_the_start", ("[head] * ahead", "[head] * np.arange(first, first + num_keys)"),
        at_least={"alibi": 1, "max_seq_len": 2}, fault="biases that count from the sequence's start: right but for the LSE",
    ),
    _dense(
        "alibi_plus_one", ("[head] * ahead", "[head] * (ahead + 1)"),
        at_least={"alibi": 1, "max_seq_len": 1}, fault="the index of a bias off by one (vllm#945)",
    ),
    _dense(
        "alibi_by_kv_head",
        ('self.of_rows("alibi_slopes", num_rows)[head]', 'self.layer["alibi_slopes"][:, None, None][head]'),
        at_least={"alibi": 1, "group": 2, "max_seq_len": 2}, fault="one slope for all heads of a group (vllm#496)",
    ),
    _online(
        "sink_per_block", ("weights.sum(axis=2, keepdims=True)",
            "weights.sum(axis=2, keepdims=True) + np.exp(self.sinks(num_rows) - shift)"),
        at_least={"sinks": 1, "max_seq_len": 1}, fault="the sink joins the sum of every split",
    ),
    _dense(
        "sink_scaled", ('return self.of_rows("sinks", num_rows)', 'return self.spec.scale * self.of_rows("sinks", num_rows)'),
        at_least={"sinks": 1, "max_seq_len": 1}, fault="sinks are scaled as scores are",
    ),
    _dense(
        "lse_without_sink",
        ("np.log(np.where(empty, 1.0, total))", "np.log(weights.sum(axis=1, keepdims=True) + 1e-300)"),
        at_least={"sinks": 1, "max_seq_len": 1}, fault="an LSE of the keys alone: merged by it, parts count the sink twice",
    ),
    _dense(
        "lse_of_a_sink_alone", ('layer.get("sinks", -np.inf)', "-np.inf"),
        at_least={"sinks": 1, "num_empty": 1}, fault="a row that has its sink and no key is taken for one of nothing",
    ),
)  # fmt: skip

FP8 = (
    _dense(
        "scales_lost", ("if self.spec.kv_dtype:", "if False:"),
        at_least={"asks_fp8": 1, "max_seq_len": 1}, fault="k_scale and v_scale are not used (flashinfer#1023, #4979)",
    ),
    _dense(
        "scales_swapped", ('(key, "k_scale"), (value, "v_scale")', '(key, "v_scale"), (value, "k_scale")'),
        at_least={"asks_fp8": 1, "max_seq_len": 1}, fault="K by the scale of V, V by that of K (sglang#20705)",
    ),
    _dense(
        "scale_twice", (_SCALED, _SCALED.replace("None, None]", "None, None] ** 2")),
        at_least={"asks_fp8": 1, "max_seq_len": 1}, fault="a scale is applied twice (TRT-LLM#2699)",
    ),
    _dense(
        "scale_of_the_first_head", (_SCALED, _SCALED.replace("[:,", "[:1,")),
        at_least={"scales_by_head": 1, "max_seq_len": 1}, fault="scales of heads read as one of all",
    ),
    _blocked(
        "cached_keys_without_scales",
        ('key *= layer', 'if first + len(self.offsets) >= batch.lengths[live - 1]:\n                    key *= layer'),
        at_least={"asks_fp8": 1, "num_blocks_of_longest": 3}, fault="older keys are read without their scale (sglang#18904)",
    ),
    _write(
        "write_without_scale", (" / layer[scale].numpy()[:, None]", ""),
        at_least={"asks_fp8": 1, "num_written": 1}, fault="a quantised cache is written unscaled",
    ),
    _write(
        "write_wraps", ("np.float32(most))", "np.float32(2 * most))"),
        at_least={"asks_fp8": 1, "num_written": 1}, fault="what is too large wraps into another number, or NaN",
    ),
    _write(
        "write_truncates", ("np.rint(", "np.trunc("),
        at_least={"asks_fp8": 1, "num_written": 1}, fault="rounded towards 0",
    ),
)  # fmt: skip

PREFIXES = (
    _dense(
        "prefix_by_counts",
        ("        self.step = step\n", "        import dataclasses\n"
            "        tables = step.host_block_tables.copy()\n"
            "        held = (tables[:, None] == tables[None]).sum(axis=1) - 1  # other tables with the same block there\n"
            "        common = int((held > 0).sum(axis=1).max(initial=0))\n"
            "        tables[:, :common] = tables[:1, :common]\n"
            "        self.step = dataclasses.replace(step, host_block_tables=tables)\n"),
        at_least={"num_sharing": 1}, fault="blocks that are referenced twice are taken for everyone's (vllm#55227, #23130)",
    ),
)  # fmt: skip

ON_GPU = (
    _token(
        "window_plus_one_on_gpu", ("paged.cuh", "max(num_tokens - layer.window, 0)", "max(num_tokens - layer.window - 1, 0)"),
        at_least={"num_behind": 1}, fault="W + 1 keys (zml#763, vllm#4380)",
    ),
    _token(
        "softcap_overflows", ("per_token.cu", "tanhf(score / layer.softcap)",
            "(1.0f - __expf(-2.0f * score / layer.softcap)) / (1.0f + __expf(-2.0f * score / layer.softcap))"),
        at_least={"strong_cap": 1, "max_seq_len": 2}, fault="tanh by exponentials that overflow: NaN at scores far below -cap",
    ),
    _token(
        "sink_in_base_2", ("per_token.cu", "most = layer.sinks[q_head]", "most = layer.sinks[q_head] * kLog2e"),
        at_least={"sinks": 1, "max_seq_len": 1}, fault="a sink in natural units among scores in base 2, or the reverse",
    ),
    _token(
        "v_scale_lost_on_gpu", ("per_token.cu", ", v_scale = layer.v_scale[head]", ""),
        at_least={"asks_fp8": 1, "max_seq_len": 1}, fault="v_scale does not reach the epilogue (flashinfer#4979)",
    ),
)  # fmt: skip

EDITS = (*WINDOWS, *SCORES, *FP8, *PREFIXES, *ON_GPU)
