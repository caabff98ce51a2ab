"""Whatever a launch does besides writing its outputs is found and named: canaries, inputs, late writes, wild blocks."""

from __future__ import annotations

import dataclasses
import threading
from unittest import mock

import pytest
import torch

from harness import guards
from harness.hazards import PLAIN
from harness.ops import operator
from harness.ops.attention import AttentionCase
from harness.ops.block_copy import BlockCopyCase
from harness.ops.cache_write import CacheWriteCase
from harness.ops.layouts import HND, KV_NHD, NHD
from harness.options import Options
from harness.registry import Impl, Registry
from harness.session import Session
from impls import numpy_online, torch_block_copy, torch_cache_write

CASE = AttentionCase(
    name="tiny.decode", num_q_heads=4, num_kv_heads=2, head_dim=16, block_size=4, seq_lens=(5, 9, 16), dtype="f32"
)
COPY = BlockCopyCase(name="tiny.copy", num_kv_heads=1, head_dim=16, block_size=4, num_copies=3, num_blocks=8)
WRITE = CacheWriteCase(name="tiny.write", num_kv_heads=1, head_dim=16, block_size=4, num_tokens=3, num_blocks=4)
DTYPES = (torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3, 5), (0, 7), (1,)], ids=str)
def test_a_guarded_tensor_is_as_any_other(shape, dtype):
    """Contiguous, aligned as CUDA's own, of the shape asked for; its canaries are whole, whatever is written inside."""
    tensor, guarded = guards.empty("some", shape, dtype, "cpu")
    tensor.fill_(1)

    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (torch.Size(shape), dtype, True)
    assert tensor.numel() == 0 or tensor.data_ptr() % guards.ALIGNMENT == 0
    assert guards.broken([guarded]) == []


@pytest.mark.parametrize("tool", [None, "memcheck"])
@pytest.mark.parametrize("size", [3, 24, 300])
def test_tensors_made_together_are_guarded_as_alone(size, tool):
    """Each is aligned and lies between whole canaries of its own: a byte too far is found, and whose it is."""
    with guards.watched_by(tool):
        tensors, held = guards.empty_each(["a", "b", "c"], (size,), torch.uint8, "cpu")
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)

    assert [int(tensor.sum()) for tensor in tensors] == [0, size, 2 * size]
    assert guards.broken(held) == []
    if tool is None:
        assert all(tensor.data_ptr() % guards.ALIGNMENT == 0 for tensor in tensors)
        held[1].buffer[held[1].begin + size] = 0
        assert guards.broken(held) == ["wrote 1 byte past the end of b"]
    else:
        assert [len(guarded.buffer) for guarded in held] == [size] * 3


def test_what_is_hashed_together_hashes_as_alone(monkeypatch):
    """Sizes, odd ones and none among them, in any order, and more than are hashed at a time."""
    monkeypatch.setitem(guards._CHUNK, "cpu", 8)
    held = [guards.empty("some", (size,), torch.uint8, "cpu")[1] for size in (24, 3, 24, 0, 24, 256, 3, 24)]
    for number, guarded in enumerate(held, start=1):
        guarded.words.fill_(number)

    together = guards.hashes(held).tolist()
    assert together == [int(guards.hashes([guarded])) for guarded in held]
    assert len(set(together)) == len(held)
    guards.seal(held)
    held[2].words[1] += 1
    held[6].words[0] += 1
    held[6].name = "other"
    assert guards.changed(held) == ["some", "other"]


@pytest.mark.parametrize(
    ("first", "count", "says"),
    [
        (0, 1, "wrote 1 byte past the end of some"),
        (4000, 96, "wrote 96 bytes past the end of some, 4000 bytes away"),
        (-15 - 1, 1, "wrote 1 byte before the start of some"),
        (-15 - 4096, 2, "wrote 2 bytes before the start of some, 4094 bytes away"),
    ],
)
def test_each_byte_of_a_canary_counts(first, count, says):
    """Both sides, to the last byte; once told, it is whole again. Places count from the end of a tensor of 15 bytes."""
    guarded = guards.empty("some", (3, 5), torch.uint8, "cpu")[1]
    begin = guarded.begin + 15 + first
    guarded.buffer[begin : begin + count] = 0

    assert guards.broken([guarded]) == [says]
    assert guards.broken([guarded]) == []


def test_a_canary_is_a_nan_and_no_block_id():
    """Whoever reads past the end meets NaN in every type of float, and as a block id an illegal one."""
    guarded = guards.allocate("some", 0, "cpu")

    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert guarded.canaries[1].view(dtype).isnan().all()
    assert (guarded.canaries[1].view(torch.int32) > 2**30).all()


def test_views_of_one_storage_keep_their_strides():
    """K and V of KV_NHD stay halves of one tensor, with canaries around both and none between."""
    key, value = KV_NHD.arrange(*torch.randn(2, 3, 2, 4, 8).unbind(0))
    (new_key, new_value), held = guards.house({"key_cache": key, "value_cache": value})

    assert (new_key.stride(), new_value.stride()) == (key.stride(), value.stride())
    assert torch.equal(new_key, key)
    assert torch.equal(new_value, value)
    assert [guarded.name for guarded in held] == ["key_cache and value_cache"]


@pytest.mark.parametrize("word", [0, 1, 12345, 262143, 262144, 299999])
def test_any_bit_changes_the_hash(word):
    """One flipped bit anywhere, also beyond the first chunk, and two words exchanged."""
    guarded = guards.empty("some", (300_000,), torch.int64, "cpu")[1]
    guarded.words.copy_(torch.arange(300_000))
    guards.seal([guarded])
    assert guards.changed([guarded]) == []

    guarded.words[word] ^= 1 << (word % 64)
    assert guards.changed([guarded]) == ["some"]
    guarded.words[word] ^= 1 << (word % 64)
    assert guards.changed([guarded]) == []
    guarded.words[[word, 7]] = guarded.words[[7, word]]
    assert guards.changed([guarded]) == ["some"]


def test_workspace_is_plain_outside_and_dirty_inside():
    """An implementation is usable without the harness; under it no workspace happens to be zero."""
    found = []
    with guards.watch(found):
        floats, counters = (guards.workspace((2, 3), dtype, "cpu") for dtype in (torch.float32, torch.int32))
    alone = guards.workspace(6, torch.float32, "cpu")

    assert floats.isnan().all()
    assert (counters == -2).all()
    assert [guarded.name for guarded in found] == ["workspace[0]", "workspace[1]"]
    assert alone.shape == (6,)


@pytest.mark.parametrize("tool", guards.EXACT)
@pytest.mark.parametrize("size", [0, 1, 6, 12, 4096])
def test_under_a_sanitizer_a_tensor_is_its_whole_allocation(tool, size):
    """A read one byte past the end leaves the allocation, and so does nothing of ours: hashes and words end with it."""
    with guards.watched_by(tool):
        tensor, guarded = guards.empty("some", (size,), torch.uint8, "cpu")
    tensor.fill_(1)
    guards.seal([guarded])

    assert tensor.untyped_storage().nbytes() == size
    assert (tensor.storage_offset(), guarded.words.nbytes) == (0, size)
    assert guards.broken([guarded]) == []
    assert guards.changed([guarded]) == []
    if size:
        tensor[-1] = 2
        assert guards.changed([guarded]) == ["some"]


@pytest.mark.parametrize("tool", [None, "memcheck", "racecheck", "initcheck", "synccheck"])
def test_initcheck_alone_meets_what_nobody_has_written(tool):
    """Workspace, and each output until its first launch: filled, they would count as written."""
    found = []
    with guards.watched_by(tool):
        with guards.watch(found), mock.patch.object(guards, "fill_unwritten") as fill:
            guards.workspace(6, torch.float32, "cpu")
        staged = operator("attention").build(CASE, PLAIN, layers=1, device="cpu").stage(HND)
        for tensor in (staged.outs[0], staged.lses[0]):
            tensor.fill_(0.5)
        staged.soil(0)
        first = bool(staged.outs[0].isnan().any())
        staged.soil(0)

    assert fill.called == (tool != "initcheck")
    assert first == (tool != "initcheck")
    assert staged.outs[0].isnan().all()


def past_end(tensor, count):
    """The `count` elements behind a tensor."""
    return tensor.as_strided((count,), (1,), tensor.storage_offset() + tensor.numel())


class Right(numpy_online.Online):
    """numpy.online with workspace of its own; toys spoil one thing of it."""

    def __init__(self, spec):
        super().__init__(spec)
        self.partials = guards.workspace(8, torch.float32, spec.device)

    def launch(self, *tensors):
        super().launch(*tensors)
        self.spoil(*tensors)

    def spoil(self, query, key_cache, value_cache, out, lse):
        pass


def spoiling(spoil):
    return type("Toy", (Right,), {"spoil": lambda self, *tensors: spoil(self, *tensors)})


def later(work):
    threading.Timer(0.02, work).start()


class LooksUpUnused(Right):
    """Gathers every entry of the tables, and masks afterwards."""

    def spoil(self, query, key_cache, value_cache, out, lse):
        key_cache[self.step.block_tables.long()]


TOYS = {
    "right": Right,
    "out_too_far": spoiling(lambda toy, q, k, v, out, lse: past_end(out, 4).fill_(0)),
    "lse_too_far": spoiling(lambda toy, q, k, v, out, lse: past_end(lse, 1).fill_(0)),
    "cache_too_far": spoiling(lambda toy, q, k, v, out, lse: past_end(v, 2).zero_()),
    "tables_too_far": spoiling(lambda toy, q, k, v, out, lse: past_end(toy.step.block_tables, 1).zero_()),
    "workspace_too_far": spoiling(lambda toy, *tensors: past_end(toy.partials, 3).zero_()),
    "scales_query": spoiling(lambda toy, q, *tensors: q.mul_(2)),
    "scrubs_cache": spoiling(lambda toy, q, k, v, *tensors: v.nan_to_num_(0.0)),
    "shortens_lens": spoiling(lambda toy, *tensors: toy.step.seq_lens.sub_(1)),
    "writes_late": spoiling(lambda toy, q, k, v, out, lse: later(lambda: out[0].mul_(2))),
    "looks_up_unused": LooksUpUnused,
}


class Write(torch_cache_write.CacheWrite):
    def launch(self, key, value, key_cache, value_cache):
        super().launch(key, value, key_cache, value_cache)
        key.zero_()


class Copy(torch_block_copy.BlockCopy):
    def launch(self, key_caches, value_caches):
        super().launch(key_caches, value_caches)
        past_end(value_caches[0], 1).zero_()


def __getattr__(name):
    """prepare_NAME is the toy's."""
    if name.startswith("prepare_"):
        return TOYS[name.removeprefix("prepare_")]
    raise AttributeError(name)


def toy(name, **fields):
    return Impl(**{"name": f"toy.{name}", "op": "attention", "prepare": f"{__name__}:prepare_{name}", **fields})


def check(*impls, case=CASE, isolated=False, **options):
    options = Options(bench=False, **{"relations": "none", **options})
    registry = Registry(impls)
    return list(Session(options, registry, "cpu", isolated=isolated).measure([case], registry.entries()))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("out_too_far", "guard: wrote 16 bytes past the end of out"),
        ("lse_too_far", "guard: wrote 4 bytes past the end of lse"),
        ("cache_too_far", "guard: wrote 8 bytes past the end of value_cache"),
        ("tables_too_far", "guard: wrote 4 bytes past the end of block_tables"),
        ("workspace_too_far", "guard: wrote 12 bytes past the end of workspace[0]"),
        ("scales_query", "changed its input: query"),
        ("scrubs_cache", "changed its input: value_cache"),
        ("shortens_lens", "changed its input: seq_lens"),
    ],
)
@pytest.mark.parametrize("layout", [HND, NHD], ids=str)
def test_a_launch_that_does_more_than_its_outputs_is_wrong(name, reason, layout):
    """What it did is named; the next implementation finds inputs as they were made."""
    spoiler, right = check(toy(name, layouts=(layout,)), toy("right", layouts=(layout,)))

    assert (spoiler.status, spoiler.reason) == ("wrong", f"plain inputs: {reason}")
    assert (right.status, right.reason) == ("ok", None)


@pytest.mark.parametrize("tool", guards.EXACT)
def test_a_right_row_is_right_under_a_sanitizer(tool):
    """Without canaries and fills: in every layout, with relations, and an input that is changed is still found and put back."""
    entries = [toy(name, layouts=(HND, NHD, KV_NHD)) for name in ("scales_query", "right")]
    with guards.watched_by(tool):
        found = {(record.impl, record.status, record.reason) for record in check(*entries, relations="all")}

    assert found == {("toy.scales_query", "wrong", "plain inputs: changed its input: query"), ("toy.right", "ok", None)}


def test_outputs_that_change_after_the_launch_are_wrong():
    """A thread that goes on when launch has returned is found a little later, and nobody else is blamed."""
    late, right = sorted(check(toy("writes_late"), toy("right")), key=lambda record: record.impl, reverse=True)

    assert (late.status, late.reason) == ("wrong", "out changed after the launch had ended")
    assert (right.status, right.reason) == ("ok", None)


def test_wild_block_ids_are_tried_where_the_process_may_die():
    """Looking up an unused entry fails there; elsewhere the ledger says that nobody tried."""
    (tried,) = check(toy("looks_up_unused"), isolated=True)
    (untried,) = check(toy("looks_up_unused"))
    (right,) = check(toy("right"), isolated=True)

    assert tried.status == "failed"
    assert tried.reason.startswith("check with wild block ids in unused table entries: IndexError: ")
    assert (untried.status, right.status) == ("ok", "ok")
    assert untried.ledger["wild block ids"].startswith("not tried: ")
    assert "wild" in right.check


def prepare_write(spec):
    return Write(spec)


def prepare_copy(spec):
    return Copy(spec)


def test_writes_and_copies_are_guarded_too():
    """New tokens are an input of a write; caches of a copy have canaries."""
    (write,) = check(Impl(name="toy.write", op="cache_write", prepare=f"{__name__}:prepare_write"), case=WRITE)
    (copy,) = check(Impl(name="toy.copy", op="block_copy", prepare=f"{__name__}:prepare_copy"), case=COPY)

    assert write.reason == "plain inputs: changed its input: key"
    assert copy.reason == "plain inputs: guard: wrote 2 bytes past the end of value_cache of layer 0"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda staged: staged.soil(1), "set 1: 192 outputs were never written"),
        (lambda staged: staged.outs[1][2, 3, 5].fill_(torch.inf), "set 1: 1 outputs are not finite"),
        (lambda staged: staged.lses[0][0, 0].fill_(torch.nan), "set 0: 1 LSE are NaN or +inf"),
        (lambda staged: staged.lses[0][0, 0].fill_(-torch.inf), None),
    ],
)
def test_a_scan_needs_no_truth(spoil, says):
    """Of many sets few are judged, and all are scanned for what no launch may leave."""
    staged = operator("attention").build(CASE, PLAIN, layers=2, device="cpu").stage(HND)
    for tensor in (*staged.outs, *staged.lses):
        tensor.fill_(0.5)
    assert staged.scan([0, 1]) is None
    spoil(staged)

    assert staged.scan([0, 1]) == says


def test_every_block_has_had_a_needle():
    """Where rows are too few for the blocks there are more rounds, and the record says how far they came."""
    long = dataclasses.replace(CASE, seq_lens=(100, 5), q_lens=())
    (record,) = check(toy("right"), case=long)
    needles = record.check["needles"]

    assert (needles["needle_blocks"], needles["blocks"]) == (27, 27)
    assert 6 < needles["needle_rounds"] <= 8
