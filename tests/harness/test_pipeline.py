"""The whole flow on a CPU, with toys that are right, wrong, late, forgetful and broken: a record for each, whatever it does."""

from __future__ import annotations

import dataclasses
import json
import time
from types import SimpleNamespace

import pytest
import torch

from harness import arm, check, relations, stock, timing, trial, worker
from harness.device import Device
from harness.hazards import PLAIN
from harness.names import UsageError
from harness.ops import attention_staged
from harness.ops.attention import AttentionCase
from harness.ops.attention_tensors import AttentionOperator
from harness.ops.block_copy import BlockCopyCase
from harness.ops.cache_write import CacheWriteCase
from harness.ops.layouts import CONTIGUOUS, HND, NHD, PAGED
from harness.options import Options
from harness.record import parse_line
from harness.registry import Entry, Impl, Limits, Registry, Unsupported
from harness.row import Row, _Memory
from harness.session import Session, tasks
from harness.stock import Stock
from impls import numpy_online, torch_block_copy, torch_contiguous, torch_gather, torch_read

CASE = AttentionCase(
    name="tiny.decode", num_q_heads=4, num_kv_heads=2, head_dim=16, block_size=4, seq_lens=(5, 9, 0), dtype="f32"
)
OTHER = dataclasses.replace(CASE, name="tiny.chunked", seq_lens=(7,), q_lens=(3,))
COPY = BlockCopyCase(name="tiny.copy", num_kv_heads=1, head_dim=16, block_size=4, num_copies=3, num_blocks=8)
WRITE = CacheWriteCase(name="tiny.write", num_kv_heads=1, head_dim=16, block_size=4, num_tokens=3, num_blocks=4)
QUICK = Options(min_visits=2, max_visits=3, row_s=0.0)


class Right:
    """torch.gather under another name; toys spoil one thing of it."""

    workspace_bytes = 8
    ledger = {"casts": "none"}
    kernels = ()

    def __init__(self, spec):
        self.real = torch_gather.prepare(spec)

    def plan(self, step):
        self.real.plan(step)

    def launch(self, *tensors):
        self.real.launch(*tensors)


class Scaled(Right):
    def launch(self, *tensors):
        super().launch(*tensors)
        tensors[3].mul_(1.5)


class LeavesNan(Right):
    def launch(self, *tensors):
        super().launch(*tensors)
        tensors[3][1, 2, 3] = float("nan")


class ForgetsLse(Right):
    def launch(self, query, key_cache, value_cache, out, lse):
        super().launch(query, key_cache, value_cache, out, torch.empty_like(lse))


class MultipliesByZero(Right):
    def launch(self, query, key_cache, value_cache, out, lse):
        super().launch(query, key_cache, value_cache, out, lse)
        out.add_(0 * (key_cache.sum() + value_cache.sum()))


class Reshapes(Right):
    def launch(self, query, key_cache, value_cache, out, lse):
        super().launch(query, key_cache, value_cache, out, lse)
        out.resize_(1, 1, 1)


class PlansOnce(Right):
    """Holds on to the first batch that it was shown."""

    planned = False

    def plan(self, step):
        if not self.planned:
            super().plan(step)
        self.planned = True


class Remembers(Right):
    """Answers every launch with what it answered to the first."""

    answer = None

    def launch(self, *tensors):
        if self.answer is None:
            super().launch(*tensors)
            self.answer = [tensor.clone() for tensor in tensors[3:]]
        for tensor, known in zip(tensors[3:], self.answer, strict=True):
            tensor.copy_(known)


class RemembersOnceTimed(Remembers):
    """The same, but only from its third launch on: the checks come before."""

    launches = 0

    def launch(self, *tensors):
        self.launches += 1
        if self.launches < 3:
            Right.launch(self, *tensors)
        else:
            super().launch(*tensors)


class RemembersByAddress(Right):
    """Answers once for each key cache it is shown after a plan, as if it had gathered it ahead of time."""

    def plan(self, step):
        super().plan(step)
        self.known = {}

    def launch(self, *tensors):
        seen = self.look(*tensors)
        if seen not in self.known:
            super().launch(*tensors)
            self.known[seen] = [tensor.clone() for tensor in tensors[3:]]
        for tensor, known in zip(tensors[3:], self.known[seen], strict=True):
            tensor.copy_(known)

    def look(self, query, key_cache, value_cache, out, lse):
        return key_cache.data_ptr()


class RemembersByALook(RemembersByAddress):
    """As that, but looks whether a few values are still the same."""

    def look(self, query, key_cache, value_cache, out, lse):
        return key_cache.data_ptr(), str(value_cache[:, 0, 0, 0].tolist())


class RemembersByKey(Right):
    """Reads the values anew, and the keys once for each key cache it is shown after a plan."""

    def plan(self, step):
        super().plan(step)
        self.keys = {}

    def launch(self, query, key_cache, value_cache, out, lse):
        known = self.keys.setdefault(key_cache.data_ptr(), key_cache.clone())
        super().launch(query, known, value_cache, out, lse)


class Idles(Right):
    """Does nothing where something finite lies in its output."""

    def launch(self, query, key_cache, value_cache, out, lse):
        if not out.isfinite().all():
            super().launch(query, key_cache, value_cache, out, lse)


class WearsOut(Right):
    """Right three times."""

    launches = 0

    def launch(self, *tensors):
        super().launch(*tensors)
        self.launches += 1
        if self.launches > 3:
            tensors[3].mul_(1.01)


class Clock:
    """Time that passes only while somebody sleeps, and what is then done."""

    now = 0.0

    def __init__(self):
        self.waiting = []

    def sleep(self, seconds):
        self.now += seconds
        while self.waiting:
            self.waiting.pop()()

    def perf_counter(self):
        return self.now


class LateOnceWorn(Right):
    """Right in time three times."""

    clock = None
    launches = 0

    def launch(self, *tensors):
        super().launch(*tensors)
        self.launches += 1
        if self.launches > 3:
            self.clock.waiting.append(lambda: tensors[3][0].mul_(1.01))


class Unsure(Right):
    where = ""

    def __init__(self, spec):
        super().__init__(spec)
        self.happen("prepare")

    def happen(self, where):
        if self.where == where:
            raise self.what

    def plan(self, step):
        super().plan(step)
        self.happen("plan")

    def launch(self, *tensors):
        super().launch(*tensors)
        self.happen("launch")


def raising(where, what):
    return type("Raising", (Unsure,), {"where": where, "what": what})


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("not even this")

    __repr__ = __str__


def odd(**fields):
    return type("Odd", (Right,), fields)


class StopsTheClock(Right):
    def launch(self, *tensors):
        super().launch(*tensors)
        time.perf_counter = None


class Patches(Right):
    """Makes every error 0, for itself and whoever comes after."""

    def launch(self, query, key_cache, value_cache, out, lse):
        out.zero_()
        lse.zero_()
        torch.Tensor.norm = torch.Tensor.abs = lambda tensor, *args, **kwargs: torch.zeros_like(tensor)


class Clears(Right):
    """Leaves the relations nothing to hold."""

    def launch(self, *tensors):
        super().launch(*tensors)
        relations.GENERAL.clear()


class OwnJudge(Right):
    """Is judged by itself."""

    def launch(self, query, key_cache, value_cache, out, lse):
        out.zero_()
        lse.zero_()
        attention_staged.judge_attention = lambda *_, **__: check.Verdict(passed=True, num_rows=1, num_failed=0)


class Oddities(Right):
    ledger = {"odd": object(), 7: {1, 2}}
    kernels = ({"name": "k", "digest": b"\xff", "registers": torch.tensor(64)},)


TOYS = {
    "right": Right, "scaled": Scaled, "leaves_nan": LeavesNan, "forgets_lse": ForgetsLse, "multiplies": MultipliesByZero,
    "reshapes": Reshapes,
    "plans_once": PlansOnce, "remembers": Remembers, "remembers_once_timed": RemembersOnceTimed,
    "remembers_by_address": RemembersByAddress, "remembers_by_a_look": RemembersByALook,
    "remembers_by_key": RemembersByKey, "idles": Idles,
    "wears_out": WearsOut, "late_once_worn": LateOnceWorn, "oddities": Oddities,
    **{f"raises_in_{where}": raising(where, ValueError(f"no luck in {where}")) for where in ("prepare", "plan", "launch")},
    **{f"unsure_in_{where}": raising(where, Unsupported(f"not with this {where}")) for where in ("prepare", "plan", "launch")},
    "unsure_and_silent": raising("prepare", Unsupported()),
    "no_launch": lambda spec: object(),
    "nothing": lambda spec: None,
    "lacks_all": lambda spec: type("Bare", (), {"plan": print, "launch": print})(),
    **{f"workspace_{size}": odd(workspace_bytes=size) for size in (None, -5, True, 1.5)},
    "stops_the_clock": StopsTheClock,
    "patches": Patches,
    "own_judge": OwnJudge,
    "clears": Clears,
    "odd_ledger": odd(ledger=None),
    "ledger_7": odd(ledger=7),
    "odd_kernels": odd(kernels=("k",)),
    "unspeakable": raising("launch", Unspeakable()),
    "long_winded": raising("launch", ValueError("x" * 2_000_000)),
    "exhausts_memory": raising("launch", MemoryError("no more")),
}  # fmt: skip


def __getattr__(name):
    """prepare_NAME is the toy's."""
    if name.startswith("prepare_"):
        return TOYS[name.removeprefix("prepare_")]
    raise AttributeError(name)


def toy(name, **fields):
    return Impl(**{"name": f"toy.{name}", "op": "attention", "prepare": f"{__name__}:prepare_{name}", **fields})


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Two sets of inputs in rotation and short visits."""
    monkeypatch.setitem(stock.CACHES, "cpu", 1e-9)
    monkeypatch.setattr(timing, "VISIT_S", 1e-4)


def measure(*impls, cases=(CASE,), options=QUICK):
    registry = Registry(impls)
    records = list(Session(options, registry, "cpu", run="r").measure(cases, registry.entries()))
    for record in records:
        assert parse_line(record.to_line()).key == record.key
    return records


def measure_one(*impls, **more):
    (record,) = measure(*impls, **more)
    return record


def test_what_is_right_is_timed():
    """Every measure that a CPU has, and a ledger of what was inside the timed region."""
    record = measure_one(toy("right"))

    assert (record.status, record.reason, record.row) == ("ok", None, "toy.right[HND]")
    assert 2 <= len(record.launch_s.samples) <= 3
    assert 0 < record.launch_s.low <= record.launch_s.median <= record.launch_s.high
    assert len(record.plan_s.samples) == 5
    assert set(record.check) == {"plain", "needles", "relations", "timed"}
    assert (record.case, record.case_digest, record.run) == ("tiny.decode", CASE.digest, "r")
    assert (record.traffic_bytes, record.flops, record.workspace_bytes) == (CASE.traffic_bytes, CASE.flops, 8)
    assert record.ledger["casts"] == "none"
    assert record.ledger["timed"] == "wall clock"
    assert "2 sets in rotation" in record.ledger["inputs"]
    assert (record.device_kind, record.nvml, record.power_w) == ("cpu", {}, None)
    assert (record.host_s, record.plan_host_s) == (None, None)
    assert record.unit == {"name": "cpu"}


def test_an_entry_without_lse_is_judged_by_its_output_alone():
    """It is checked, related and timed as any other, the record says so, and a wrong output is as wrong as ever."""
    options = dataclasses.replace(QUICK, relations="all")
    wrong, right = measure(toy("forgets_lse", lse=False), toy("scaled", lse=False), options=options)

    assert (right.status, right.reason) == ("ok", None)
    assert right.ledger["lse"] == "not given: judged by the output alone"
    assert right.check["relations"]["halves"] == "not run: the entry gives no LSE to merge by"
    assert set(right.check["plain"]["ratios"]) == {"max", "l2"}
    assert right.launch_s is not None
    assert wrong.status == "wrong"
    assert "outputs are outside tolerance" in wrong.reason


def test_an_entry_may_ask_for_finite_tails():
    """Checked, related and timed with ordinary values in unused slots; it is wrong without them, and others still get NaN."""
    options = dataclasses.replace(QUICK, relations="all")
    cases = (CASE, dataclasses.replace(CASE, name="tiny.full", seq_lens=(8, 4), q_lens=()))
    records = measure(
        toy("multiplies", tails="finite"), dataclasses.replace(toy("multiplies"), name="toy.careless"), toy("right"),
        cases=cases, options=options,
    )  # fmt: skip

    assert {(record.impl, record.status) for record in records} == {
        ("toy.multiplies", "ok"), ("toy.careless", "wrong"), ("toy.right", "ok"),
    }  # fmt: skip
    for record in records:
        assert ("unused slots" in record.ledger) == (record.impl == "toy.multiplies")


def test_without_bench_nothing_is_timed():
    """`check` checks."""
    record = measure_one(toy("right"), options=Options(bench=False))

    assert record.status == "ok"
    assert (record.launch_s, record.plan_s) == (None, None)
    assert set(record.check) == {"plain", "needles", "relations"}


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("scaled", "wrong", "plain inputs: "),
        ("leaves_nan", "wrong", "plain inputs: 1 of 192 outputs are NaN"),
        ("forgets_lse", "wrong", "plain inputs: 12 of 12 LSE were never written"),
        ("plans_once", "wrong", "needles inputs: "),
        ("remembers", "wrong", "needles inputs: "),
        ("raises_in_prepare", "failed", "prepare: ValueError: no luck in prepare"),
        ("raises_in_plan", "failed", "check with plain inputs: ValueError: no luck in plan"),
        ("raises_in_launch", "failed", "check with plain inputs: ValueError: no luck in launch"),
        ("unsure_in_prepare", "unsupported", "not with this prepare"),
        ("unsure_in_plan", "unsupported", "not with this plan"),
        ("unsure_in_launch", "unsupported", "not with this launch"),
        ("unsure_and_silent", "unsupported", "prepare: Unsupported was raised without a reason"),
        ("no_launch", "failed", "prepare: must return an object with plan and launch (got <object object at "),
        ("nothing", "failed", "prepare: must return an object with plan and launch (got None)"),
        ("lacks_all", "failed", "prepare: what prepare returns must have workspace_bytes, ledger, kernels; "),
        *(
            (f"workspace_{size}", "failed", f"prepare: workspace_bytes must be a whole number of bytes, 0 or more (got {size})")
            for size in (None, -5, True, 1.5)
        ),
        ("stops_the_clock", "wrong", "check with plain inputs: guard: replaced time.perf_counter, by which"),
        ("patches", "wrong", "check with plain inputs: guard: replaced torch.Tensor.norm and 1 more, by which rows are judged"),
        ("own_judge", "wrong", "check with plain inputs: guard: replaced harness.ops.attention_staged.judge_attention, by"),
        ("clears", "wrong", "check with plain inputs: guard: replaced harness.relations.GENERAL, by which rows are judged"),
        ("odd_ledger", "failed", "prepare: ledger must map topics to remarks (got None)"),
        ("ledger_7", "failed", "prepare: ledger must map topics to remarks (got 7)"),
        ("odd_kernels", "failed", "prepare: kernels must be a sequence of mappings (got ('k',))"),
        ("reshapes", "failed", "check with plain inputs: launch must leave its tensors' shapes and strides alone (tensor 4"),
        ("unspeakable", "failed", "check with plain inputs: Unspeakable: its message cannot be shown"),
        ("long_winded", "failed", "check with plain inputs: ValueError: xxx"),
        ("exhausts_memory", "failed", "check with plain inputs: MemoryError: no more"),
    ],
)
def test_what_is_not_right_is_a_record_and_is_never_timed(name, status, reason):
    """Its status and reason, and the rest of the run goes on as if it had not been there."""
    spoilt, right = measure(toy(name), toy("right"))

    assert (spoilt.row, spoilt.status) == (f"toy.{name}[HND]", status)
    assert spoilt.reason.startswith(reason)
    assert len(spoilt.reason) < 5000
    assert (spoilt.launch_s, spoilt.plan_s, spoilt.ceiling_share) == (None, None, None)
    assert (right.row, right.status) == ("toy.right[HND]", "ok")
    assert "repeat" in right.check["relations"]


def test_a_tensor_that_is_resized_is_nobody_elses():
    """Rows share outputs and caches; each is given the memory under tensors of its own."""
    _, right = measure(toy("reshapes"), toy("right"))

    assert (right.row, right.status) == ("toy.right[HND]", "ok")


@pytest.mark.parametrize("how", ["address", "a_look", "key"])
def test_an_answer_remembered_by_address_is_wrong(how):
    """What was timed is changed under its own addresses, so that nothing can be gathered ahead of time."""
    record, right = measure(toy(f"remembers_by_{how}"), toy("right"), options=dataclasses.replace(QUICK, relations="none"))

    assert record.status == "wrong"
    assert "other keys and values at the same addresses" in record.reason
    assert right.status == "ok"


def test_who_does_nothing_the_second_time_is_wrong():
    """A timer would find it free; every other launch that is judged finds NaN in its outputs."""
    record, right = measure(toy("idles"), toy("right"), options=dataclasses.replace(QUICK, relations="none"))

    assert record.status == "wrong"
    assert record.reason.startswith("timed launches, set ")
    assert right.status == "ok"


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("layout", PAGED, ids=str)
@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
def test_keys_and_values_are_mirrored_and_back_bit_for_bit(layout, dtype, which):
    """Every sign bit of one head and no other bit, also of NaN: a row that was mirrored has not changed its inputs."""
    staged = AttentionOperator().build(dataclasses.replace(CASE, dtype=dtype), PLAIN, layers=1, device="cpu").stage(layout)
    integers = {"f32": torch.int32}.get(dtype, torch.int16)

    def canonical():
        return staged.layout.restore(*staged.caches[0])[which].view(integers)

    before = canonical().clone()
    staged.mirror(0)

    flipped = (canonical() ^ before).transpose(0, 1).flatten(1)
    heads = (flipped == torch.iinfo(integers).min).all(1)
    assert heads.sum() == 1
    assert (flipped[~heads] == 0).all()

    staged.mirror(0)

    assert torch.equal(canonical(), before)


MIRRORED = {
    "decode": {},
    "chunked": {"q_lens": (3, 2, 0, 0)},
    "window": {"window": 4},
    "softcap": {"softcap": 1.5},
    "alibi and sinks": {"alibi": True, "sinks": True},
    "e4m3": {"kv_dtype": "e4m3", "kv_scales": "head"},
    "e5m2": {"kv_dtype": "e5m2"},
    "prefix": {"prefix": ((0, 0), (0, 4), (0, 4), (0, 0))},
}


@pytest.mark.parametrize(
    ("added", "layout"), [*((added, layout) for added in MIRRORED for layout in (HND, NHD)), ("decode", CONTIGUOUS)], ids=str
)
def test_what_is_mirrored_has_its_own_truth(added, layout):
    """What is right on the mirrored tensors passes; what was right before does not."""
    case = dataclasses.replace(CASE, **{"seq_lens": (5, 9, 16, 0), "q_lens": (), **MIRRORED[added]})
    prepare = torch_contiguous.prepare if layout is CONTIGUOUS else numpy_online.prepare
    staged = AttentionOperator().build(case, PLAIN, layers=1, device="cpu").stage(layout)
    prepared = prepare(AttentionOperator().spec(case, layout, "cpu", {}))

    def launch():
        prepared.plan(staged.step)
        prepared.launch(*staged.arguments(0), **staged.keywords(0))
        return staged.judge(0, frozenset()).passed

    assert launch()
    before = staged.outs[0].clone()
    staged.mirror(0)
    assert not staged.judge(0, frozenset()).passed
    assert launch()
    staged.mirror(0)
    assert launch()
    assert torch.equal(staged.outs[0], before)


def test_a_case_that_asks_for_right_or_wrong_is_not_timed():
    """It is checked in every run of its suite; the record says why it has no time."""
    record = measure_one(toy("right"), options=dataclasses.replace(QUICK, untimed=(CASE.name,)))

    assert (record.status, record.launch_s) == ("ok", None)
    assert record.ledger["timed"].startswith("not timed: in this suite")


@pytest.mark.parametrize(("timed_from", "patient", "is_timed"), [(1, False, True), (2, False, False), (2, True, True)])
def test_what_is_for_many_query_tokens_is_checked_on_decode_and_timed_on_request(timed_from, patient, is_timed):
    """A kernel for prompts is right for one token a sequence, too; how fast says nothing."""
    record = measure_one(toy("right", timed_from=timed_from), options=dataclasses.replace(QUICK, patient=patient))

    assert (record.status, record.launch_s is not None) == ("ok", is_timed)
    assert is_timed or record.ledger["timed"].startswith("not timed: it is for 2 query tokens and more (got 1")


@pytest.mark.parametrize("name", ["remembers_once_timed", "wears_out"])
def test_what_is_wrong_only_when_timed_is_wrong(name):
    """After the visits the outputs are soiled, and the sets that were timed are launched and judged again."""
    record, right = measure(toy(name), toy("right"), options=dataclasses.replace(QUICK, relations="none"))

    assert record.status == "wrong"
    assert record.reason.startswith("timed launches, set ")
    assert record.launch_s is None
    assert right.status == "ok"


def test_an_implementation_cannot_end_the_run_by_what_it_says_of_itself():
    """Ledgers and kernels hold what they like; it is written as text."""
    record = measure_one(toy("oddities"))

    assert record.status == "ok"
    assert json.loads(record.to_line())["kernels"] == [{"name": "k", "digest": "b'\\xff'", "registers": 64}]


def broken_available(kind):
    raise OSError("libtoy.so: cannot open shared object file")


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [
        ({"devices": ("cuda",)}, "unsupported", "runs on cuda only (got cpu)"),
        ({"limits": Limits(max_head_dim=8)}, "unsupported", "head_dim must be at most 8 (got 16)"),
        ({"max_work": {"cpu": 100.0}}, "skipped", "would take minutes: 0 million operations"),
        ({"available": "json:not_there"}, "failed", "whether it can run here: AttributeError: "),
        ({"available": f"{__name__}:broken_available"}, "failed", "whether it can run here: OSError: libtoy.so: cannot open"),
        ({"prepare": "not_there:prepare"}, "failed", "prepare: ModuleNotFoundError: No module named 'not_there'"),
        ({"prepare": "json:prepare"}, "failed", "prepare: AttributeError: module 'json' has no attribute 'prepare'"),
    ],
    ids=str,
)
def test_what_cannot_run_says_why(fields, status, reason):
    """Refusals are records, too."""
    refused, right = measure(toy("scaled", **fields), toy("right"))

    assert (refused.status, right.status) == (status, "ok")
    assert refused.reason.startswith(reason)
    assert refused.check == {}


@pytest.mark.parametrize(
    ("lens", "reason"),
    [
        ({"seq_lens": (1 << 44,)}, "needs about "),
        ({"seq_lens": (1 << 20,)}, "would take minutes on a CPU: 336 MB of cache a layer"),
        ({"seq_lens": (8192,), "q_lens": (8192,)}, "would take minutes on a CPU: 8.6 GFLOP"),
        ({"seq_lens": (0,) * 20001, "q_lens": ()}, "would take minutes on a CPU: 20001 sequences, "),
        ({"seq_lens": (1,), "num_q_heads": 200002, "head_dim": 8}, "would take minutes on a CPU: 1 sequences, 200002 rows"),
    ],
    ids=["a cache beyond memory", "a large cache", "much arithmetic", "many sequences", "many heads"],
)
def test_what_a_cpu_cannot_hold_or_do_is_skipped(lens, reason):
    """With the reason, before a single tensor is made."""
    record = measure_one(toy("right"), cases=[dataclasses.replace(CASE, **{"q_lens": (1,), **lens})])

    assert record.status == "skipped"
    assert record.reason.startswith(reason)


def test_patience_runs_what_takes_long_and_not_what_does_not_fit():
    """--patient is for time; memory that is not there is not had by waiting."""
    patient = Options(bench=False, patient=True)
    slow = toy("right", max_work={"cpu": 1.0})

    assert measure_one(slow, options=patient).status == "ok"
    big = measure_one(slow, cases=[dataclasses.replace(CASE, name="big", seq_lens=(1 << 44,), q_lens=(1,))], options=patient)
    assert (big.status, big.reason[:12]) == ("skipped", "needs about ")


def test_every_entry_on_every_case_is_one_record():
    """Whatever its toys do, a matrix of n rows gives n records, each row once, case by case."""
    impls = [toy(name, layouts=(HND, NHD)) for name in TOYS if name != "exhausts_memory"]
    impls += [Impl(name="toy.copy", op="block_copy", prepare="impls.torch_block_copy:prepare")]
    impls += [toy("unpaged", layouts=(CONTIGUOUS,), prepare="impls.torch_contiguous:prepare")]
    cases = [CASE, COPY, OTHER, WRITE]
    records = measure(*impls, cases=cases, options=Options(bench=False))
    wanted = {
        (case.name, str(row)) for case in cases for row in Registry(impls).entries() if row.impl.op == case.op
    }

    assert len(records) == len(wanted)
    assert {(record.case, record.row) for record in records} == wanted
    order = [record.case for record in records]
    assert order == sorted(order, key=[case.name for case in cases].index)


def test_an_empty_batch_is_measured():
    """Nothing to do is done right."""
    record = measure_one(toy("right"), cases=[dataclasses.replace(CASE, name="nothing", seq_lens=(), q_lens=())])

    assert record.status == "ok"


def test_variants_keep_their_parameters_apart():
    """What `tune` measures: rows of one entry, each prepared with its own parameters and recorded with them."""
    impl = toy("right", params={"splits": (0, 4), "mode": ("a", "b")})
    rows = Entry(impl, HND).variants()
    session = Session(Options(bench=False), Registry([impl]), "cpu")
    numbered = list(session.run_tasks(tasks([CASE], rows)))

    assert sorted(number for number, _ in numbered) == [0, 1, 2, 3]
    assert {number: record.params for number, record in numbered} == {n: dict(row.params) for n, row in enumerate(rows)}


class Idle(torch_block_copy.BlockCopy):
    def launch(self, key_caches, value_caches):
        pass


class CopiesOnce(torch_block_copy.BlockCopy):
    """Copies no address twice: all launches but the first do nothing."""

    def __init__(self, spec):
        super().__init__(spec)
        self.seen = set()

    def launch(self, key_caches, value_caches):
        if key_caches[0].data_ptr() not in self.seen:
            super().launch(key_caches, value_caches)
        self.seen.add(key_caches[0].data_ptr())


@pytest.mark.parametrize(
    ("kind", "reason"), [("Idle", "plain inputs: "), ("CopiesOnce", "one more launch on plain inputs: ")], ids=str
)
def test_a_copy_left_undone_is_wrong(kind, reason):
    """Caches are put back before every judgement, so that work done once is not taken for work done again."""
    record = measure_one(Impl(name="toy.copy", op="block_copy", prepare=f"{__name__}:{kind}"), cases=[COPY])

    assert record.status == "wrong"
    assert record.reason.startswith(reason)


READS = Impl(name="toy.read", op="attention", prepare="impls.torch_read:prepare", role="reader")


def test_a_row_is_held_against_the_best_reader():
    """The reader's seconds, its name, and their share of the row's."""
    registry = Registry([toy("right"), READS])
    case = dataclasses.replace(CASE, name="longer", seq_lens=(64, 96), q_lens=(1, 1))
    (record,) = Session(QUICK, registry, "cpu").measure([case], registry.entries())

    assert record.status == "ok"
    assert record.ceiling_by.startswith("toy.read[HND]")
    assert record.ceiling_share == pytest.approx(record.ceiling_s / record.launch_s.median)


FLOOR = Impl(name="toy.floor", op="attention", prepare="impls.empty_call:prepare", role="floor", layouts=(HND, NHD))


def test_a_row_knows_what_an_empty_launch_takes():
    """It is timed in the row's own way beside it, and is no row itself: asked for by name it is skipped."""
    registry = Registry([toy("right"), FLOOR])
    (record,) = Session(QUICK, registry, "cpu").measure([CASE], registry.entries())
    (named,) = Session(QUICK, registry, "cpu").measure([CASE], registry.entries(["toy.floor[HND]"]))

    assert 0 < record.floor_s < record.launch_s.median
    assert (named.status, named.launch_s) == ("skipped", None)


class MissesABit(torch_read.Reader):
    """Reads all but one bit."""

    @property
    def checksum(self):
        return super().checksum + 1


def test_a_reader_that_does_not_read_everything_is_no_ceiling():
    """Its checksum must be that of all bytes; measured by itself it is wrong, beside a row it is left out."""
    liar = dataclasses.replace(READS, name="toy.liar", prepare=f"{__name__}:MissesABit")
    registry = Registry([toy("right"), liar])
    (record,) = Session(QUICK, registry, "cpu").measure([CASE], registry.entries())
    (reader,) = Session(QUICK, registry, "cpu").measure([CASE], registry.entries(["toy.liar"]))

    assert (record.status, record.ceiling_s, record.ceiling_by) == ("ok", None, None)
    assert reader.status == "wrong"
    assert "the checksum of what was read is " in reader.reason


class Waits(torch_read.Reader):
    """Takes so long besides."""

    def launch(self, *tensors, **layer):
        super().launch(*tensors, **layer)
        time.sleep(self.spec.params["wait_s"])


SWEEP = dataclasses.replace(QUICK, sweep=True, power="none")


def sweep(*readers):
    """Records of all variants, by what each waits, and what was told of each by number."""
    registry, said = Registry([*readers, FLOOR]), []
    session = Session(SWEEP, registry, "cpu")
    variants = [variant for entry in registry.entries(roles=("reader",)) for variant in entry.variants()]
    records = session.measure([CASE], variants, lambda doing, row: said.append((doing, row)))
    return {record.params.get("wait_s"): record for record in records}, said


def waits(*seconds):
    return dataclasses.replace(READS, name="toy.waits", prepare=f"{__name__}:Waits", params={"wait_s": seconds})


def test_a_sweep_visits_the_best_two_readers_of_a_case():
    """All are tried by one visit, on the inputs that are timed, which says why the others have no time; each has a record."""
    liar = dataclasses.replace(READS, name="toy.liar", prepare=f"{__name__}:MissesABit")
    records, said = sweep(waits(0.05, 0.0, 0.04, 2e-3), liar)

    assert {wait for wait, record in records.items() if record.status == "ok"} == {0.05, 0.0, 0.04, 2e-3}
    assert {wait for wait, record in records.items() if record.launch_s} == {0.0, 2e-3}
    assert all(len(records[wait].launch_s.samples) >= 2 and records[wait].floor_s for wait in (0.0, 2e-3))
    for wait in (0.05, 0.04):
        said_of_it = records[wait].ledger["timed"]
        assert said_of_it.startswith("not timed: 2 readers were faster in one visit each (this one: 0.0")
    assert (records[None].status, "the checksum of what was read is " in records[None].reason) == ("wrong", True)
    assert all(set(record.check) == {"timed"} for record in records.values())
    assert [row for doing, row in said if doing.startswith("ceiling ")] == [0, 1, 2, 3, 4]
    assert {row for doing, row in said if ", visit " in doing} == {1, 3, None}


def test_inputs_are_not_counted_as_what_a_reader_holds(monkeypatch):
    """The first reader of a layout was there before them, and each sweep had rows that hold a gigabyte they do not declare."""
    staged = set()

    def stage(self, hazard, layout, *sets, real=Stock.stage):
        staged.add(layout)
        return real(self, hazard, layout, *sets)

    monkeypatch.setattr(Stock, "stage", stage)
    monkeypatch.setattr(_Memory, "read", lambda *_: _Memory(len(staged) << 30, 0, 0))
    (record,) = sweep(waits(0.0))[0].values()

    assert (record.status, [flag for flag in record.flags if "workspace" in flag]) == ("ok", [])
    assert staged


@pytest.mark.parametrize("times", [2, 9])
def test_a_visit_with_the_clock_held_down_does_not_cost_a_reader_its_place(monkeypatch, times):
    """It is tried again, a few times; one whose every visit was such says so."""

    def visit(self, real=Row.visit):
        if self.discarded == times:
            return real(self)
        self.discarded += 1
        return True

    monkeypatch.setattr(Row, "visit", visit)
    (record,) = sweep(waits(0.0))[0].values()

    assert record.status == "ok"
    if times == 2:
        assert len(record.launch_s.samples) >= 2
    else:
        assert (record.launch_s, record.flags) == (None, ("no time: every one of 3 visits was throttled",))


def test_progress_tells_what_is_done_and_to_which_row():
    """A supervisor knows by it which row a worker died at."""
    said = []
    registry = Registry([toy("right"), toy("scaled")])
    list(Session(QUICK, registry, "cpu").measure([CASE], registry.entries(), lambda doing, row: said.append((doing, row))))

    assert ("check tiny.decode toy.right[HND]", 0) in said
    assert ("check tiny.decode toy.scaled[HND]", 1) in said
    assert ("time tiny.decode toy.right[HND], visit 1", 0) in said
    assert ("finish tiny.decode toy.right[HND]", 0) in said
    assert not any("time tiny.decode toy.scaled" in doing for doing, _ in said)


def test_phases_add_up():
    """Seconds spent are told by phase, none twice."""
    registry = Registry([toy("right")])
    session = Session(QUICK, registry, "cpu")
    list(session.measure([CASE], registry.entries()))

    assert {"check", "time", "inputs", "finish"} <= set(session.spent_s)
    assert all(seconds >= 0 for seconds in session.spent_s.values())


@pytest.mark.parametrize("door", ["worker", "arm"])
def test_users_files_are_run_when_the_gpu_is_the_current_one(monkeypatch, door):
    """What a file makes on "cuda" when it is imported would else lie on the first GPU, whichever one its rows are run on."""
    done = []

    def files(*_, **__):
        done.append("files")
        raise UsageError("enough")

    found = SimpleNamespace(make_current=lambda: done.append("current"))
    monkeypatch.setattr("harness.device.find_device", lambda name: done.append(name) or found)
    monkeypatch.setattr(arm, "find_device", lambda name: done.append(name) or found)
    monkeypatch.setattr(worker, "default_registry", files)
    monkeypatch.setattr(arm, "registry_of", files)
    asked = {"impl_files": ["mine.py"], "device": "cuda:1", "options": {}, "run": "r", "tree": "."}
    with pytest.raises(UsageError, match="enough"):
        worker._session(asked) if door == "worker" else arm._serve(asked, iter([]), SimpleNamespace(tell=None))

    assert done == ["cuda:1", "current", "files"]


def test_a_session_makes_its_gpu_the_current_one(monkeypatch):
    """Spins, graphs and launches that name no device would otherwise be another GPU's, and so would their times."""
    gpu = Device(name="cuda:1", kind="cuda", slug="toy", cache_bytes=1, memory_bytes=1, num_sms=1)
    done = []
    monkeypatch.setattr("harness.session.find_device", lambda name: gpu)
    monkeypatch.setattr("harness.session._find_nvml", lambda device: (None, "a toy"))
    monkeypatch.setattr("torch.cuda.set_device", lambda index: done.append(("current", index)))
    monkeypatch.setattr("harness.session._take_library_workspaces", lambda device: done.append(("work", device.index)))
    Session(Options(bench=False), Registry([]), "cuda:1")

    assert done == [("current", 1), ("work", 1)]


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only while the harness waits for late changes."""
    made = Clock()
    monkeypatch.setattr(trial, "time", made)
    monkeypatch.setattr(LateOnceWorn, "clock", made)
    return made


def test_rows_wait_for_late_changes_together(clock):
    """Each row owns what it wrote until the first has waited long enough: once for checked launches, once for timed ones."""
    records = measure(*(dataclasses.replace(toy("right"), name=f"toy.{number}") for number in range(3)))

    assert [record.status for record in records] == ["ok"] * 3
    assert clock.now == pytest.approx(2 * trial.LATE_S)


@pytest.mark.parametrize("output_bytes", [stock.OUTPUT_BYTES["cpu"], 0], ids=["own", "shared"])
def test_what_is_late_only_when_timed_is_wrong(output_bytes, clock, monkeypatch):
    """Its outputs change after the launch had ended; nobody else is blamed, whether or not rows have outputs of their own."""
    monkeypatch.setattr(stock, "OUTPUT_BYTES", {"cpu": output_bytes})
    late, right = measure(toy("late_once_worn"), toy("right"), options=dataclasses.replace(QUICK, relations="none"))

    assert (late.status, right.status) == ("wrong", "ok")
    assert late.reason.startswith("timed launches: out")
    assert late.reason.endswith("changed after the launch had ended")


def test_the_stream_is_busy_before_a_few_launches_of_a_row_only(monkeypatch):
    """Once a family, once for two plans, and before the first launch of what is prepared anew: it costs milliseconds."""
    busy = []
    for module in (trial, relations):
        monkeypatch.setattr(module, "keep_busy", lambda device, seconds: busy.append(seconds))
    measure_one(toy("right"), options=Options(bench=False, relations="all"))

    assert len(busy) == len(["plain", "needles", "two_plans", "block_size"])


def test_what_relations_vary_is_made_once_for_all_rows(monkeypatch):
    """The other batch is built and staged for the first row, and later rows of that layout launch on it, too."""
    built = []

    def counting(self, case, hazards, **how):
        built.append(hazards.name)
        return build(self, case, hazards, **how)

    build = AttentionOperator.build
    monkeypatch.setattr(AttentionOperator, "build", counting)
    again = dataclasses.replace(toy("right"), name="toy.again")
    first, second = measure(toy("right"), again, options=Options(bench=False))

    assert (first.status, second.status) == ("ok", "ok")
    assert first.check["relations"] == second.check["relations"]
    assert sorted(built) == ["needles", "other", "plain"]
