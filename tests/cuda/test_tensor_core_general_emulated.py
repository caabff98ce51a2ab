"""All that is asked besides plain decode, by warps, on a CPU as in test_prefill_emulated.py, judged as a GPU's answers are."""

from __future__ import annotations

import pytest

from harness.hazards import PLAIN
from harness.ops import operator
from harness.ops.attention import AttentionCase
from harness.ops.layouts import HND, HND_SWIZZLED, NHD
from harness.registry import Registry
from impls import IMPLS
from impls.cuda import tensor_core
from tests.cuda import emulated
from tests.cuda.test_verify_emulated import on_cpu  # noqa: F401 - a fixture

pytestmark = pytest.mark.skipif(emulated.why_missing() is not None, reason=emulated.why_missing() or "g++ is here")

LENS = (150, 40, 5, 0, 33, 64)
Q_LENS = (6, 1, 8, 1, 0, 3)
DECODE = (1, 1, 0, 1, 1, 1)
FIELDS = {
    "name": "some.features", "num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "block_size": 16,
    "seq_lens": LENS, "q_lens": DECODE, "dtype": "f16",
}
ASKED = {
    "window": {"window": 33, "q_lens": Q_LENS},
    "softcap, alibi, sinks": {"softcap": 30.0, "alibi": True, "sinks": True},
    "query tokens": {"q_lens": Q_LENS, "num_q_heads": 16, "dtype": "bf16"},
    "e4m3": {"kv_dtype": "e4m3", "head_dim": 128, "dtype": "bf16"},
    "e4m3 by head": {"kv_dtype": "e4m3", "head_dim": 128, "kv_scales": "head", "q_lens": Q_LENS, "sinks": True},
    "e5m2, more than a warp lists": {"kv_dtype": "e5m2", "head_dim": 128, "seq_lens": tuple(range(33)), "q_lens": ()},
}
#: layout, CTAs, parameters
KERNELS = {
    "as planned": (HND_SWIZZLED, 3, {}),
    "fences": (NHD, 1, {"opening": "plain", "closing": "fences", "copy": "async"}),
    "release": (HND, 5, {"opening": "quick", "closing": "release", "tile": 16, "warps": 4}),
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=[name.replace(" ", "_") for name in KERNELS])
@pytest.mark.parametrize("asked", ASKED.values(), ids=[name.replace(" ", "_") for name in ASKED])
def test_it_is_right(on_cpu, monkeypatch, asked, kernel):  # noqa: F811
    """Poison lies behind windows and ends; sequences are one share's, or several'; the counters are as they were."""
    layout, num_ctas, chosen = kernel
    op, case = operator("attention"), AttentionCase(**FIELDS | asked)
    monkeypatch.setattr(tensor_core, "count_sms", lambda device: num_ctas)
    (entry,) = (entry for entry in Registry(IMPLS).entries(("cuda.tensor_core",)) if entry.layout is layout)
    params = entry.impl.resolve_params({"products": "warps", "prefix": "never", **chosen})
    made = tensor_core.prepare(op.spec(case, layout, "cpu", params))
    staged = op.build(case, PLAIN, layers=1, device="cpu").stage(layout)

    made.plan(staged.step)
    staged.soil(0)
    made.launch(*staged.arguments(0), **staged.keywords(0))
    verdict = staged.judge(0, entry.impl.quantises)

    assert verdict.passed, verdict.reason
    assert not made._arrived.any()
