"""The study of waste: what must come out whatever the trace."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.contiguous import grow_and_copy, oracle, reserve_max, reserve_power_of_two
from runtime.counting import Count
from runtime.manager import BlockManager
from runtime.models import MODELS
from runtime.replay import Replay
from runtime.stores import ContiguousStore, PagedStore
from runtime.traces import LENGTHS, BadTrace, Trace, from_csv, synthetic, with_prefixes

SLOTS = 8192
LONGEST = 2048


def paged(trace, block_size=16, **options):
    return Replay(trace, PagedStore(BlockManager(SLOTS // block_size, block_size), **options)).run(f"paged {block_size}")


def contiguous(trace, manager):
    return Replay(trace, ContiguousStore(manager, max_length=LONGEST)).run("contiguous")


@pytest.fixture(scope="module", params=LENGTHS)
def trace(request):
    return synthetic(request.param, 120, max_length=LONGEST)


def test_utilisation_rises_from_reserving_to_paging(trace):
    """reserve-max < power of two < oracle < blocks of 256 < 16 < 1, which wastes nothing."""
    rows = [
        contiguous(trace, reserve_max(SLOTS, LONGEST)),
        contiguous(trace, reserve_power_of_two(SLOTS)),
        contiguous(trace, oracle(SLOTS)),
        paged(trace, 16),
        paged(trace, 1),
    ]
    shares = [row.utilisation for row in rows]

    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert paged(trace, 256).utilisation < shares[-2]


def test_nothing_is_copied_when_paged(trace):
    """Growing moves tokens; a table only gets longer. And no hole is too small for a block."""
    growing, paging = contiguous(trace, grow_and_copy(SLOTS)), paged(trace)

    assert growing.copied_tokens > 0
    assert paging.copied_tokens == 0
    assert paging.external == 0
    assert growing.external > 0


def test_shares_of_the_pool_sum_to_one(trace):
    """Tokens, internal and external waste, free: nothing is counted twice or left out."""
    for row in (contiguous(trace, oracle(SLOTS)), contiguous(trace, grow_and_copy(SLOTS)), paged(trace, 64)):
        assert math.isclose(row.tokens + row.internal + row.external + row.free, 1)
        assert min(row.tokens, row.internal, row.external, row.free) >= 0


def test_waste_in_the_last_block_is_about_half_a_block(trace):
    """(block_size - 1) / 2 slots a sequence, as the article reckons."""
    row = paged(trace, 64)
    wasted = row.internal * SLOTS / row.mean_running

    assert wasted == pytest.approx(31.5, rel=0.25)


def test_sharing_holds_more_sequences():
    """With prefixes found, or samples forked, the same pool holds more at once, and is used more than once over."""
    shared = with_prefixes(synthetic("sharegpt", 150, max_length=LONGEST), num_prefixes=3, prefix_length=256)
    alone, together = paged(shared), paged(shared, prefixes=shared)
    trace = synthetic("azure_chat", 40, max_length=LONGEST // 4)
    copied, forked = paged(trace, num_samples=4), paged(trace, num_samples=4, forked=True)

    assert together.mean_running > alone.mean_running
    assert together.utilisation > 1 > alone.utilisation
    assert forked.mean_running > copied.mean_running
    assert forked.utilisation > 1 > copied.utilisation
    assert forked.copied_tokens > 0


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=40),
    num_blocks=st.integers(3, 30),
    block_size=st.integers(1, 16),
)
def test_counting_comes_to_what_the_manager_comes_to(lengths, num_blocks, block_size):
    """Bit for bit, with sequences thrown out and requests that never fit."""
    prompt, output = (np.array(column, np.int64) for column in zip(*lengths, strict=True))
    trace = Trace(name="drawn", prompt=prompt, output=output)
    counted = Count(trace, num_blocks=num_blocks, block_size=block_size).run("paged")
    manager = BlockManager(num_blocks, block_size)

    assert Replay(trace, PagedStore(manager)).run("paged") == counted
    assert manager.num_free_blocks == num_blocks


def test_counting_agrees_on_a_real_trace(trace):
    """Also at size."""
    assert paged(trace) == Count(trace, num_blocks=SLOTS // 16, block_size=16).run("paged 16")


def test_csv_arrivals_are_steps(tmp_path):
    """Columns in any order, seconds at a stated step time; nothing runs between requests."""
    path = tmp_path / "mine.csv"
    path.write_text("output,arrival,prompt\n3,10.0,5\n2,0.0,4\n", encoding="utf-8")
    trace = from_csv(path)
    seen = []
    row = Replay(trace, PagedStore(BlockManager(8, 4)), step_s=0.5, on_step=lambda step, store: seen.append(step)).run("paged")

    assert trace.arrival.tolist() == [0, 10]
    assert trace.prompt.tolist() == [4, 5]
    assert seen == [0, 1, 20, 21, 22]
    assert row.num_steps == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("arrival,prompt\n", "missing output"),
        ("arrival,prompt,output\n", "no requests below"),
        ("arrival,prompt,output\n1,2,3\n1,two,3\n", "line 3: invalid literal"),
        ("arrival,prompt,output\n1,2,0\n", "output 1 to"),
        ("arrival,prompt,output\nnan,2,1\n", "arrival must be finite"),
        ("arrival,prompt,output\n1,99999999999999999999,1\n", "prompt and output 1 to 2147483647"),
        ("arrival,prompt,output\n1,2,3\n1e30,2,1\n", "within 2147483647 seconds, got 1e.30"),
        ("arrival,prompt,output\n1,2,3,4\n", "line 2: more values than"),
        ("arrival,prompt,output\n1,2\n", "line 2: fewer values than"),
        ("arrival,prompt,output\n1,-2,3\n", "output 1 to"),
        ("arrival,prompt,output,prompt\n1,2,3,4\n", "each column once; prompt stands there again"),
        ("arrival,prompt,output\n1,2,\udcff\n", "not a CSV file in UTF-8"),
    ],
)
def test_a_bad_csv_says_which_line(tmp_path, text, words):
    """What is wrong, and where."""
    path = tmp_path / "bad.csv"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))

    with pytest.raises(BadTrace, match=words):
        from_csv(path)


def test_traces_have_the_published_means():
    """And equal seeds give equal traces."""
    for name, (prompt, output) in {"sharegpt": (161, 338), "azure_chat": (1155, 211), "azure_code": (2048, 28)}.items():
        trace = synthetic(name, 50_000, max_length=10**6)
        assert trace.prompt.mean() == pytest.approx(prompt, rel=0.03)
        assert trace.output.mean() == pytest.approx(output, rel=0.05)
    assert (synthetic("sharegpt", 10).prompt == synthetic("sharegpt", 10).prompt).all()


def test_bytes_of_a_token():
    """LLaMA-7B: 512 KiB a token, 2.15 GB at 4096, as the article says."""
    assert MODELS[0].token_bytes == 524_288
    assert round(MODELS[0].token_bytes * 4096 / 1e9, 2) == 2.15
