"""FlexAttention itself, on a CPU by its unfused reference."""

from __future__ import annotations

import pytest

from tests.peers.conftest import CASES


@pytest.mark.parametrize("case", ["ragged", "some_without_a_token", "no_token", "own_scale", "group_16"])
def test_a_paged_cache_is_attended_to_through_a_block_mask(measured, case):
    """Out and log-sum-exp, foreign and stale tokens masked, relations held to."""
    (record,) = measured("peer.torch.flex", CASES[case]).values()

    assert (record.status, record.reason) == ("ok", None)
    assert record.ledger["unused slots"].startswith("finite")


def test_it_cannot_do_without_finite_tails(measured):
    """The reason why its entry asks for them: what is masked is multiplied by 0."""
    (record,) = measured("peer.torch.flex", CASES["own_scale"], tails="anything").values()

    assert record.status == "wrong"
    assert "outputs are NaN" in record.reason
