"""transformers' paged attention, the library itself on a CPU where it is installed."""

from __future__ import annotations

import dataclasses

import pytest

from impls.peers.libraries import TRANSFORMERS
from tests.peers.conftest import CASES

pytestmark = pytest.mark.skipif(TRANSFORMERS.why_missing() is not None, reason=TRANSFORMERS.why_missing() or "it is here")


CHOSEN = ["own_scale", "group_16", "head_dim_80", "some_without_a_token"]


@pytest.mark.parametrize("case", CHOSEN)
def test_gathered_tokens_are_attended_to(measured, case):
    """Sequences are kept apart by the mask, and nothing of unused slots is gathered."""
    (record,) = measured("peer.transformers.sdpa_paged", CASES[case]).values()

    assert (record.status, record.reason) == ("ok", None)


@pytest.mark.parametrize("case", CHOSEN)
def test_eager_attention_is_right_in_float32_alone(measured, case):
    """In 16 bits it rounds scores, more than a careful kernel errs."""
    exact = dataclasses.replace(CASES[case], name="peers.float32", dtype="f32")
    (right,) = measured("peer.transformers.eager_paged", exact).values()
    (rounded,) = measured("peer.transformers.eager_paged", CASES[case]).values()

    assert (right.status, right.reason) == ("ok", None)
    assert rounded.status == "wrong"
    assert "outside tolerance" in rounded.reason


def test_tokens_without_keys_are_refused(measured):
    """The library would average over all keys of all sequences."""
    (record,) = measured("peer.transformers.sdpa_paged", CASES["ragged"]).values()

    assert record.status == "unsupported"
    assert record.reason.startswith("every query token must see a key")
