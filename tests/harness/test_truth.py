"""The truth is the truth: held against a dense softmax of its own, and its baseline against a real kernel."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from harness import truth as truth_module
from harness.ops.attention import AttentionStep
from harness.truth import attention_truth

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def make_step(seq_lens, q_lens, block_size, rng):
    """Blocks dealt shuffled from a pool with two to spare; table entries past a sequence's end name the poisoned one."""
    num_blocks = [-(-n // block_size) for n in seq_lens]
    ids = rng.permutation(sum(num_blocks) + 2).astype(np.int32)
    tables = np.full((len(seq_lens), max(num_blocks, default=0) + 1), ids[-1], dtype=np.int32)
    for seq, count in enumerate(num_blocks):
        tables[seq, :count], ids = ids[:count], ids[count:]
    lens = np.array(seq_lens, dtype=np.int32)
    starts = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    return AttentionStep(
        block_tables=torch.from_numpy(tables), seq_lens=torch.from_numpy(lens), query_start_loc=torch.from_numpy(starts),
        host_block_tables=tables, host_seq_lens=lens, host_query_start_loc=starts,
    )


def make_problem(seq_lens, q_lens=None, heads=(8, 2), head_dim=64, block_size=16, dtype="bf16", seed=0):
    """Return (query, key, value, step, scale); every slot that no sequence fills is NaN."""
    rng = np.random.default_rng(seed)
    q_lens = q_lens or [1] * len(seq_lens)
    step = make_step(seq_lens, q_lens, block_size, rng)
    num_blocks = sum(-(-n // block_size) for n in seq_lens) + 2
    key, value = np.full((2, num_blocks, heads[1], block_size, head_dim), np.nan, dtype=np.float32)
    for seq, seq_len in enumerate(seq_lens):
        for pool in (key, value):
            for t in range(seq_len):
                block = step.host_block_tables[seq, t // block_size]
                pool[block, :, t % block_size] = rng.standard_normal((heads[1], head_dim))
    query = rng.standard_normal((sum(q_lens), heads[0], head_dim)).astype(np.float32)
    query, key, value = (torch.from_numpy(a).to(DTYPES[dtype]) for a in (query, key, value))
    return query, key, value, step, head_dim**-0.5


def dense(query, key, value, step, scale, *, window=None, softcap=None, named=None):
    """The definition, one row at a time, in NumPy float64: (out, lse, keys seen)."""
    named = {name: tensor.double().numpy() for name, tensor in (named or {}).items()}
    query, key, value = (tensor.double().numpy() for tensor in (query, key, value))
    key, value = (
        pool * named.get(scale, np.ones(1))[:, None, None] for pool, scale in ((key, "k_scale"), (value, "v_scale"))
    )
    group, block_size = query.shape[1] // key.shape[1], key.shape[2]
    out, lse, seen = np.zeros(query.shape), np.full(query.shape[:2], -np.inf), []
    for seq, seq_len in enumerate(step.host_seq_lens):
        begin, end = step.host_query_start_loc[seq : seq + 2]
        where = [(step.host_block_tables[seq, t // block_size], t % block_size) for t in range(seq_len)]
        for row in range(begin, end):
            position = seq_len - (end - begin) + row - begin
            first = max(position - window + 1, 0) if window else 0
            slots = where[first : max(position + 1, 0)]
            seen.append(len(slots))
            for head in range(query.shape[1]):
                sink = named["sinks"][head] if "sinks" in named else -np.inf
                lse[row, head] = sink
                if not slots:
                    continue
                k, v = (np.stack([pool[block, head // group, offset] for block, offset in slots]) for pool in (key, value))
                scores = scale * k @ query[row, head]
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                if "alibi_slopes" in named:
                    scores += named["alibi_slopes"][head] * (np.arange(first, position + 1) - position)
                lse[row, head] = np.logaddexp(np.logaddexp.reduce(scores), sink)
                out[row, head] = np.exp(scores - lse[row, head]) @ v
    return out, lse, seen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("seq_lens", "q_lens", "heads", "block_size"),
    [
        ([1, 15, 16, 17, 100], None, (8, 2), 16),
        ([0, 5, 0, 33], None, (4, 4), 24),
        ([7, 40, 3], [7, 5, 1], (5, 1), 1),
        ([2, 0, 9, 9], [4, 3, 0, 2], (6, 3), 8),
        ([20, 20, 20], None, (4, 2), 256),
    ],
    ids=["edges", "empty", "chunked", "more-queries-than-keys", "alike"],
)
def test_equals_the_definition(seq_lens, q_lens, heads, block_size, dtype):
    """Output, LSE and keys seen are those of a dense softmax, whatever lies in unused slots."""
    problem = make_problem(seq_lens, q_lens, heads=heads, block_size=block_size, dtype=dtype)
    out, lse, seen = dense(*problem)

    truth = attention_truth(*problem)

    np.testing.assert_allclose(truth.out.numpy(), out, atol=1e-13)
    np.testing.assert_allclose(truth.lse.numpy(), lse, atol=1e-13)
    assert truth.num_visible.tolist() == seen


SLOPES, SINKS = torch.tensor([0.5, 0.25, 0.125, 0.0625]), torch.tensor([2.0, -5.0, 0.0, 9.0])
FEATURES = {
    "window": {"window": 5},
    "window of one": {"window": 1},
    "window across blocks": {"window": 33},
    "softcap": {"softcap": 0.5},
    "alibi": {"named": {"alibi_slopes": SLOPES}},
    "sinks": {"named": {"sinks": SINKS}},
    "scales": {"named": {"k_scale": torch.tensor([3.0]), "v_scale": torch.tensor([0.25, 7.0])}},
    "all": {
        "window": 20, "softcap": 2.0,
        "named": {"alibi_slopes": SLOPES, "sinks": SINKS, "k_scale": torch.tensor([0.5, 2.0]), "v_scale": torch.tensor([3.0])},
    },
}  # fmt: skip


@pytest.mark.parametrize("asked", FEATURES)
def test_what_a_case_asks_for_besides_equals_the_definition(asked):
    """Windows, soft caps, slopes, sinks and scales, alone and together; rows without keys, and several tokens, among them."""
    problem = make_problem([7, 40, 2, 33, 0], [7, 5, 4, 1, 2], heads=(4, 2), dtype="f32")
    out, lse, seen = dense(*problem, **FEATURES[asked])

    truth = attention_truth(*problem, **FEATURES[asked])

    np.testing.assert_allclose(truth.out.numpy(), out, atol=1e-12)
    np.testing.assert_allclose(truth.lse.numpy(), lse, atol=1e-12)
    assert truth.num_visible.tolist() == seen


@pytest.mark.parametrize("asked", [None, "window", "all"])
def test_parts_make_the_same_whole(asked, monkeypatch):
    """Cut to the smallest parts (a sequence, a KV head, a query token at a time) nothing changes."""
    problem = make_problem([30, 30, 9], [4, 4, 2], heads=(4, 2))
    more = FEATURES[asked] if asked else {}
    whole = attention_truth(*problem, **more)
    monkeypatch.setattr(truth_module, "BUDGET_BYTES", {"cpu": 1})

    cut = attention_truth(*problem, **more)

    for name in ("out", "lse", "baseline_l2", "baseline_max", "baseline_lse", "baseline_normaliser"):
        torch.testing.assert_close(getattr(cut, name), getattr(whole, name), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("seq_lens", [[], [0, 0]])
def test_nothing_to_attend_to(seq_lens):
    """An empty batch, and sequences with no tokens, have a truth: 0, -inf, and no error allowed."""
    truth = attention_truth(*make_problem(seq_lens))

    assert truth.out.shape == (len(seq_lens), 8, 64)
    assert not truth.out.any()
    assert bool((truth.lse == -math.inf).all())
    assert not any(getattr(truth, f"baseline_{name}").any() for name in ("l2", "max", "lse", "normaliser"))


def test_a_token_without_keys_has_no_baseline():
    """Of four queries over two keys the first two see none: exactly 0 and -inf is asked of them."""
    truth = attention_truth(*make_problem([2], [4]))

    assert truth.num_visible.tolist() == [0, 0, 1, 2]
    assert not truth.baseline_l2[:2].any()
    assert bool((truth.baseline_l2[2:] > 0).all())
    assert bool(truth.lse[:2].isneginf().all())


def test_a_row_without_keys_has_the_sink_for_its_sum():
    """Out is 0 and LSE the sink: the sink is all that its softmax runs over."""
    truth = attention_truth(*make_problem([2], [4], heads=(4, 2)), named={"sinks": SINKS})

    assert not truth.out[:2].any()
    assert torch.equal(truth.lse[:2], SINKS.double().expand(2, -1))
    assert bool((truth.baseline_lse[:2] <= 2**-24 * SINKS.abs()).all())


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("seq_len", [17, 500])
def test_baseline_is_what_sdpa_errs(dtype, seq_len):
    """The L2 baseline, which includes a tail, is 1.3 to 2.6 times the median error of torch's own attention."""
    query, key, value, step, scale = make_problem([seq_len] * 8, head_dim=128, dtype=dtype)
    truth = attention_truth(query, key, value, step, scale)
    blocks = step.block_tables[:, : -(-seq_len // 16)].long()
    gathered = [pool[blocks].transpose(1, 2).flatten(2, 3)[:, :, :seq_len] for pool in (key, value)]
    sdpa = torch.nn.functional.scaled_dot_product_attention(query[:, :, None], *gathered, enable_gqa=True)[:, :, 0]

    error = (sdpa.double() - truth.out).norm(dim=-1)

    assert 1.3 < float((truth.baseline_l2 / error).median()) < 2.6


def test_fp8_baselines_are_wider():
    """Declaring fp8 probabilities or an fp8 query widens the baseline several times; the truth stays."""
    problem = make_problem([200] * 2)
    plain = attention_truth(*problem)
    for quantised in ("probabilities", "query"):
        wide = attention_truth(*problem, quantises=frozenset({quantised}))

        assert torch.equal(wide.out, plain.out)
        assert bool((wide.baseline_l2 > 4 * plain.baseline_l2).all()), quantised
