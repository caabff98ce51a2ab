"""Signs of life: work of ours tells that it goes on, a kernel does not."""

from __future__ import annotations

import dataclasses

from harness import alive
from harness.hazards import NEEDLES
from harness.ops import operator
from harness.ops.attention import AttentionCase
from harness.ops.layouts import NHD

CASE = AttentionCase(name="tiny", num_q_heads=2, num_kv_heads=1, head_dim=16, block_size=4, seq_lens=(5, 9), dtype="f32")


def test_inputs_and_truth_say_that_they_go_on(monkeypatch):
    """Each of them, several times where there are several sets, sequences or parts."""
    monkeypatch.setattr(alive, "BEAT_S", 0.0)
    told = []
    with alive.telling(lambda: told.append(stage)):
        stage = "build"
        inputs = operator("attention").build(CASE, NEEDLES, layers=2, device="cpu")
        stage = "stage"
        inputs.stage(NHD)
        stage = "truth"
        inputs.truth(0)
    inputs = dataclasses.replace(inputs)
    inputs.truth(1)

    assert told == ["build"] * 6 + ["stage"] * 2 + ["truth"] * 2


def test_signs_of_life_are_seldom(monkeypatch):
    """However often work says so, it is told once in BEAT_S."""
    now = iter(range(100))
    monkeypatch.setattr(alive, "_clock", lambda: next(now) * alive.BEAT_S / 5)
    told = []
    with alive.telling(lambda: told.append(1)):
        for _ in range(12):
            alive.beat()

    assert len(told) == 2
