"""Peers: other people's kernels, measured beside ours in the same run. Plain data; docs/peers.md says how to get them.

A peer appears in a run when its library is there; named without it, its rows are "unsupported" and say how to get it. An
entry whose library gives no log-sum-exp, or gives one at the cost of another kernel, says `lse=False`; where there is one,
NAME.lse asks for it and converts it to natural logarithm: that row is checked and not timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set

from harness.ops.layouts import HND, KV_NHD, NHD, X_PACKED
from harness.registry import Impl, Limits

HALVES = frozenset({"f16", "bf16"})
#: FlashInfer's templates make lanes of head_dim / 8 elements and 128-byte swizzles: these are what its releases ship built
FLASHINFER_DIMS = frozenset({64, 128, 256})


#: masks of those that multiply by 0 what lies before a window, and approximate softcap's tanh
MASKS = frozenset({"window", "softcap"})


def _peer(name: str, prepare: str, **fields: object) -> Impl:
    of_all = {"op": "attention", "devices": ("cuda",), "lse": False}
    return Impl(name=f"peer.{name}", prepare=f"impls.peers.{prepare}", **{**of_all, **fields})  # type: ignore[arg-type]


def _with_lse(impl: Impl) -> tuple[Impl, Impl]:
    """The entry, and its twin that gives the log-sum-exp."""
    note = f"{impl.name} and its log-sum-exp, in natural logarithm; checked only"
    params = {**impl.params, "lse": ("natural",)}
    return impl, dataclasses.replace(impl, name=f"{impl.name}.lse", lse=True, timed=(), params=params, note=note)


def _flashinfer(name: str, prepare: str, **fields: object) -> Impl:
    return _peer(f"flashinfer.{name}", f"flashinfer:{prepare}", **{"available": "impls.peers.libraries:flashinfer", **fields})


def _flashinfer_prefill(name: str, prepare: str, rounds: set[str], features: Set[str], **fields: object) -> Impl:
    limits = Limits(dtypes=HALVES, head_dims=FLASHINFER_DIMS, features=frozenset(features))
    return _peer(
        f"flashinfer.{name}", f"flashinfer_prefill:{prepare}", layouts=(HND, NHD), limits=limits, quantises=frozenset(rounds),
        available="impls.peers.libraries:flashinfer", **fields,
    )


def _xqa(name: str, prepare: str, rounds: set[str], features: set[str], note: str) -> Impl:
    limits = Limits(
        dtypes=HALVES, head_dim_multiple=16, max_head_dim=256, block_sizes={16, 32, 64, 128}, max_q_len=1,
        features=frozenset({"window", "sinks"} | features),
    )
    return _flashinfer(
        name, prepare, layouts=(HND, NHD), limits=limits, quantises=frozenset(rounds), tails="window", note=note
    )


def _fa3(name: str, prepare: str, library: str, note: str) -> Impl:
    is_fp8 = prepare.endswith("Fp8")
    features = MASKS | ({"e4m3"} if is_fp8 else set())
    limits = Limits(
        dtypes={"bf16"} if is_fp8 else HALVES, head_dim_multiple=16 if is_fp8 else 8, max_head_dim=256, features=features
    )
    return _peer(
        name, f"fa3:{prepare}", layouts=(NHD, KV_NHD), limits=limits, available=f"impls.peers.libraries:{library}", note=note,
        tails="window", quantises=frozenset({"tanh", "query", "probabilities"} if is_fp8 else {"tanh"}),
    )


def _paged_attention(version: int, note: str, rounds: set[str]) -> Impl:
    return _peer(
        f"vllm.paged_attention_v{version}", f"vllm_kernels:Version{version}", layouts=(X_PACKED,),
        limits=Limits(head_dims={32, 64, 80, 96, 112, 120, 128, 192, 256}, block_sizes={8, 16, 32}, max_q_len=1,
            features=frozenset({"alibi", "e4m3", "e5m2"})),
        quantises=frozenset(rounds), available="impls.peers.libraries:vllm_kernels", note=note,
    )


PEERS: tuple[Impl, ...] = (
    # attention
    *_with_lse(_flashinfer(
        "decode", "Decode", layouts=(HND, NHD), params={"cuda_graph": (1, 0)},
        quantises=frozenset({"partials", "merges", "tanh"}), tails="window", limits=Limits(
            dtypes=HALVES, head_dims=FLASHINFER_DIMS, groups={1, 2, 3, 4, 8}, max_q_len=1, features=MASKS | {"e4m3", "e5m2"}
        ),
        note="FlashInfer's decode wrapper on CUDA cores",
    )),
    *_with_lse(_flashinfer(
        "tensor_core", "TensorCore", layouts=(HND, NHD), params={"cuda_graph": (1, 0)},
        quantises=frozenset({"partials", "merges", "normaliser", "tanh"}), tails="window",
        limits=Limits(dtypes=HALVES, head_dims=FLASHINFER_DIMS, max_q_len=1, features=MASKS | {"e4m3", "e5m2"}),
        note="FlashInfer's decode wrapper, use_tensor_cores=True",
    )),
    *_with_lse(_flashinfer(
        "batch", "Batch", layouts=(HND, NHD), quantises=frozenset({"partials", "merges", "normaliser"}),
        limits=Limits(dtypes=HALVES, head_dims=FLASHINFER_DIMS), note="FlashInfer's persistent BatchAttention",
    )),
    *_with_lse(_flashinfer_prefill(
        "prefill.fa2", "Prefill", {"partials", "merges", "normaliser", "tanh"}, MASKS | {"e4m3", "e5m2"}, tails="window",
        params={"cuda_graph": (0, 1)}, timed_from=2, note="FlashInfer's paged prefill, the group packed, keys split over CTAs",
    )),
    *_with_lse(_flashinfer_prefill(
        "prefill.fa3", "PrefillFa3", {"tanh"}, MASKS, tails="window", params={"cuda_graph": (0, 1)}, timed_from=2,
        note="FlashInfer's paged prefill by its kernels for Hopper",
    )),
    _flashinfer_prefill(
        "cascade", "Cascade", {"partials", "merges", "levels", "normaliser", "tanh"}, {"softcap"}, params={"levels": (3, 2)},
        note="FlashInfer's cascade: a level for each prefix that neighbours share",
    ),
    *_with_lse(_flashinfer_prefill(
        "cascade.fa2", "CascadeFa2", {"partials", "merges", "levels", "normaliser", "tanh"}, {"softcap", "e4m3", "e5m2"},
        params={"levels": (3, 2)}, note="the same of its parts on fa2, which splits a prefix over CTAs",
    )),
    _xqa("xqa", "Xqa", {"partials", "merges", "warps", "scales", "normaliser"}, set(), "TensorRT-LLM's XQA in FlashInfer"),
    _xqa("xqa.fp8", "XqaFp8", {"partials", "query", "probabilities"}, {"e4m3"}, "XQA on fp8: query rounded as well"),
    _fa3("fa3", "Dao", "fa3", "FlashAttention-3, scheduled in its launch"),
    *_with_lse(_fa3("fa3.scheduled", "DaoScheduled", "fa3", "FlashAttention-3, scheduler metadata computed in plan")),
    _fa3("vllm.fa3", "Vllm", "vllm_fa3", "FlashAttention-3 as vLLM builds it, scheduled in its launch"),
    *_with_lse(_fa3(
        "vllm.fa3.scheduled", "VllmScheduled", "vllm_fa3", "FlashAttention-3 as vLLM builds it, scheduler metadata from plan"
    )),
    _fa3("fa3.fp8", "DaoFp8", "fa3", "FlashAttention-3 on fp8: query rounded as well, scheduled in plan"),
    _fa3("vllm.fa3.fp8", "VllmFp8", "vllm_fa3", "FlashAttention-3 as vLLM builds it on fp8: query rounded as well"),
    _paged_attention(1, "vLLM's first kernel: one CTA a query head", {"products"}),
    *_with_lse(_paged_attention(2, "the same in partitions of 512 tokens", {"products", "partials"})),
    _peer(
        "vllm.unified", "vllm_unified:Unified", layouts=(NHD, KV_NHD),
        limits=Limits(dtypes=HALVES, features=frozenset({"window", "softcap", "alibi", "sinks", "e4m3", "e5m2"})),
        tails="window", available="impls.peers.libraries:vllm", note="vLLM's Triton unified attention",
    ),
    *_with_lse(_peer(
        "fa2", "fa2:FlashAttention2", layouts=(NHD, KV_NHD), graph=False, available="impls.peers.libraries:fa2",
        limits=Limits(
            dtypes=HALVES, head_dim_multiple=8, max_head_dim=256, block_sizes={256, 512, 1024}, max_q_len=1,
            features=MASKS | {"alibi"},
        ),
        tails="window", quantises=frozenset({"tanh"}),
        note="FlashAttention-2's flash_attn_with_kvcache",
    )),
    _peer(
        "torch.flex", "flex:Flex", layouts=(NHD,), devices=("cuda", "cpu"), timed=("cuda",), max_work={"cpu": 3e7}, lse=True,
        tails="finite", on_request=True,  # on a GPU it compiles for a while, every shape anew
        limits=Limits(dtypes={"f32", "f16", "bf16"}, block_sizes={16, 32, 64, 128, 256}, max_q_len=1),
        note="FlexAttention, a paged cache behind a block mask",
    ),
    # On request: their work grows with the square of the batch, a hundred times the others' already at 32 sequences.
    _peer(
        "transformers.sdpa_paged", "transformers:Paged", layouts=(NHD,), devices=("cuda", "cpu"), on_request=True,
        available="impls.peers.libraries:transformers", max_work={"cpu": 1e8}, note="SDPA over all tokens of the batch at once",
    ),
    _peer(
        "transformers.eager_paged", "transformers:EagerPaged", layouts=(NHD,), devices=("cuda", "cpu"), on_request=True,
        available="impls.peers.libraries:transformers", max_work={"cpu": 1e8}, note="the same by matrix products",
    ),
    # cache_write
    _peer(
        "flashinfer.append", "flashinfer_write:CacheWrite", op="cache_write", layouts=(NHD, HND), lse=True,
        limits=Limits(dtypes=HALVES, head_dims=FLASHINFER_DIMS | {512}), available="impls.peers.libraries:flashinfer",
        note="FlashInfer's append_paged_kv_cache, a thread for each 16 bytes of a token",
    ),
    _peer(
        "vllm.reshape_and_cache_flash", "vllm_kernels:CacheWrite", op="cache_write", layouts=(NHD, HND, KV_NHD), lse=True,
        limits=Limits(features=frozenset({"e4m3"})),
        available="impls.peers.libraries:vllm_kernels", note="vLLM's scatter by strides, one CTA a token",
    ),
    _peer(
        "vllm.reshape_and_cache", "vllm_kernels:PackedCacheWrite", op="cache_write", layouts=(X_PACKED,), lse=True,
        limits=Limits(features=frozenset({"e4m3"})),
        available="impls.peers.libraries:vllm_kernels", note="vLLM's scatter into the layout of its v1 and v2",
    ),
)  # fmt: skip
