"""What a layer adds, as each library takes it, against fakes under the real signatures."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from impls.peers import PEERS
from tests.peers import fake_flash_attn, fake_flashinfer, fake_vllm
from tests.peers.conftest import ASKED

ROWS = [
    *((name, case) for name in ("peer.flashinfer.decode", "peer.flashinfer.tensor_core.lse") for case in
      ("window", "softcap", "e4m3")),
    *(("peer.flashinfer.prefill.fa2", case) for case in ("window", "window_prefill", "softcap", "e4m3")),
    *(("peer.flashinfer.prefill.fa3.lse", case) for case in ("window", "window_prefill", "softcap")),
    ("peer.flashinfer.xqa", "window"), ("peer.flashinfer.xqa", "sinks"), ("peer.flashinfer.xqa.fp8", "e4m3"),
    *((f"peer.{name}", case) for name in ("fa3", "fa3.scheduled.lse", "vllm.fa3", "vllm.fa3.scheduled.lse") for case in
      ("window", "window_prefill", "softcap")),
    *((name, case) for name in ("peer.fa3.fp8", "peer.vllm.fa3.fp8") for case in ("e4m3", "e4m3_heads")),
    *((f"peer.vllm.paged_attention_{name}", case) for name in ("v1", "v2.lse") for case in ("alibi", "e4m3")),
    ("peer.fa2.lse", "features_of_256"),
    *(("peer.vllm.unified", case) for case in ("window", "window_prefill", "softcap", "alibi", "sinks", "e4m3")),
]  # fmt: skip


@pytest.fixture(autouse=True)
def libraries(monkeypatch, tmp_path):
    """All of them at once."""
    for name, module in fake_flashinfer.module().items():
        monkeypatch.setitem(sys.modules, name, module)
    flash_attn = types.ModuleType("flash_attn")
    flash_attn.flash_attn_with_kvcache = fake_flash_attn.flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash_attn.interface())
    for variable, name in (("PAGEDBENCH_VLLM", "_C_stable_libtorch.abi3.so"), ("PAGEDBENCH_VLLM_FA3", "_vllm_fa3_C.abi3.so")):
        (tmp_path / name).touch()
        monkeypatch.setenv(variable, str(tmp_path / name))
    monkeypatch.setattr(torch.ops, "load_library", fake_vllm.load_library)
    unified = types.ModuleType("vllm.v1.attention.ops.triton_unified_attention")
    unified.unified_attention = fake_vllm.unified_attention
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, unified.__name__, unified)


@pytest.mark.parametrize(("name", "case"), ROWS)
def test_every_feature_arrives_as_the_library_takes_it(measured, name, case):
    """One that is lost, or scaled or counted in another way, makes the row wrong."""
    for layout, record in measured(name, ASKED[case]).items():
        assert (layout, record.status, record.reason) == (layout, "ok", None)


def test_a_record_tells_the_formats_own_error_beside_the_rows(measured):
    """Some per cent of a row, whoever reads the cache; none where it is of the query's type."""
    found = {case: measured("peer.flashinfer.decode", ASKED[case])["HND"].format_error for case in ("e4m3", "window")}

    assert found["window"] is None
    assert 0.01 < found["e4m3"] < 0.06


@pytest.mark.parametrize("name", ["peer.flashinfer.decode", "peer.vllm.unified", "peer.vllm.paged_attention_v2"])
def test_scales_by_head_are_refused_by_those_that_have_one(measured, name):
    """In words of its own."""
    for record in measured(name, ASKED["e4m3_heads"]).values():
        assert (record.status, record.reason) == ("unsupported", "takes one scale for K and one for V (got kv_scales head)")


def test_what_no_adapter_passes_on_is_not_declared():
    """FlashAttention-3's sinks are bf16, and FlashInfer's slopes its own: neither is what a case asks for."""
    features = {impl.name: impl.limits.features for impl in PEERS}

    assert not any("sinks" in features[name] for name in features if "fa3" in name)
    assert not any("alibi" in features[name] for name in features if "flashinfer" in name)
