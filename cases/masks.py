"""What layers add to a softmax: windows, soft caps, sinks, ALiBi. Each as a model has it, alone on a plain shape, and small."""

from __future__ import annotations

import dataclasses

from cases import facts, models
from harness.ops.attention import AttentionCase

# A server's batch, one layer of each model.
SERVED = (
    models.GPT_OSS_FULL.decode(64, 8192),
    models.GPT_OSS_WINDOW.decode(64, 8192),
    models.GEMMA2_9B_FULL.decode(32, 4096),
    models.GEMMA2_9B_WINDOW.decode(16, 16384),
    models.MISTRAL_7B.decode(32, 16384),
    models.MPT_7B.decode(16, 2048),
    models.BLOOM.decode(8, 2048),
)
GPT_OSS_WINDOW_SERVED = SERVED[1]

# The time of a window must not depend on what lies before it: 131072 tokens against the 1024 that are seen.
WINDOWS = tuple(
    dataclasses.replace(models.LLAMA3_8B, window=window).decode(batch, 131072, suffix=f".window{window}", pool_slack=1.0)
    for batch, window in ((1, 1024), (16, 1024), (16, 128))
)
# What each costs on plain decode, where nothing else is different.
COSTS = tuple(
    dataclasses.replace(fact, name=f"{fact.name}.{word}", **{word: value})
    for fact in (facts.A, facts.E) for word, value in (("softcap", 50.0), ("sinks", True), ("alibi", True))
)  # fmt: skip
#: what these are read against, in the same run: the keys of one window and no others; decode that asks for nothing
UNMASKED = (*(models.LLAMA3_8B.decode(batch, 1024) for batch in (1, 16)), facts.A, facts.E)

SMALL = (
    models.GPT_OSS_WINDOW.decode(4, 1024),
    models.GEMMA2_9B_WINDOW.attention("decode.gemma2_9b_window.2_ragged", (5000, 300)),
    models.MPT_7B.decode(2, 512),
)
# Drafts and chunks behind a window: each token has another one.
QUERIES = (
    models.GPT_OSS_WINDOW.attention("verify.gpt_oss_window.32x4096.q4", (4096,) * 32, q_lens=(4,) * 32),
    models.MISTRAL_7B.attention("prefill.mistral_7b.512_of_8192", (8192,), q_lens=(512,)),
)

MASKS: tuple[AttentionCase, ...] = (*SERVED, *WINDOWS, *COSTS, *SMALL, *QUERIES)
