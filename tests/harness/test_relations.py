"""Each relation finds the fault that is its own, by name, in an entry that is right on the inputs as they are."""

from __future__ import annotations

import contextlib
import dataclasses
import types

import numpy as np
import pytest
import torch

from harness import relations
from harness.attention_relations import ATTENTION
from harness.device import find_device
from harness.hazards import PLAIN
from harness.names import UsageError
from harness.ops import operator
from harness.ops.attention import AttentionCase
from harness.ops.block_copy import BlockCopyCase
from harness.ops.cache_write import CacheWriteCase
from harness.ops.features import FEATURES
from harness.ops.layouts import CONTIGUOUS, HND, NHD
from harness.options import Options
from harness.registry import DETERMINISTIC, RELATIONS, Entry, Impl, Limits, Registry, Unsupported
from harness.relations import Subject, check_relations
from harness.session import Session
from harness.trial import Trial
from impls import numpy_online

CASE = AttentionCase(
    name="tiny.decode", num_q_heads=4, num_kv_heads=2, head_dim=16, block_size=4, seq_lens=(5, 9, 16, 0), dtype="f32"
)
CHUNKED = dataclasses.replace(CASE, name="tiny.chunked", seq_lens=(7,), q_lens=(3,))
ONE_ROW = dataclasses.replace(CASE, name="tiny.one_row", seq_lens=(7,), q_lens=(), num_q_heads=1, num_kv_heads=1)
NO_GPU = "not run: there is no GPU"


class Right(numpy_online.Online):
    """numpy.online; toys are right on one kind of input only."""

    launches = 0

    def launch(self, query, key_cache, value_cache, out, lse):
        self.launches += 1
        super().launch(query, key_cache, value_cache, out, lse)
        if self.errs(query, key_cache):
            out.mul_(1.01)

    def errs(self, query, key_cache):
        return False


def erring(errs):
    return type("Toy", (Right,), {"errs": lambda self, *tensors: errs(self, *tensors)})


def rounding(errs):
    """One last bit up, where `errs`: as sums in another order."""

    def launch(self, query, key_cache, value_cache, out, lse):
        Right.launch(self, query, key_cache, value_cache, out, lse)
        if errs(self, query, key_cache):
            out.copy_(torch.nextafter(out, 2 * out))

    return type("Toy", (Right,), {"launch": launch})


LastBit = rounding(lambda toy, *_: toy.launches % 2 == 0)  # the order that chance decides


class Packed(Right):
    """Takes a tensor for contiguous, whatever its strides; `what` is its place among the arguments."""

    what = 0

    def launch(self, *tensors):
        views = list(tensors)
        packed = torch.empty(views[self.what].shape).stride()
        views[self.what] = views[self.what].as_strided(views[self.what].shape, packed)
        super().launch(*views)


class Remembers(Right):
    """Answers the second layer of a plan as it did the first."""

    def plan(self, step):
        super().plan(step)
        self.answer = None

    def launch(self, query, key_cache, value_cache, out, lse):
        if self.answer is None:
            super().launch(query, key_cache, value_cache, out, lse)
            self.answer = out.clone(), lse.clone()
        out.copy_(self.answer[0])
        lse.copy_(self.answer[1])


class OneBuffer(Right):
    """Planning clears what the last launch has written: its outputs served as the plan's scratch."""

    last = None

    def plan(self, step):
        super().plan(step)
        if self.last is not None:
            self.last.zero_()

    def launch(self, query, key_cache, value_cache, out, lse):
        super().launch(query, key_cache, value_cache, out, lse)
        self.last = lse


class ReadsOutputs(Right):
    """What lies in the outputs before a launch changes what it leaves, unless it is NaN; `how` says in which way."""

    def launch(self, query, key_cache, value_cache, out, lse):
        old_out, old_lse = out.clone(), lse.clone()
        super().launch(query, key_cache, value_cache, out, lse)
        self.how(old_out, old_lse, out, lse)


def reading(how):
    return type("Toy", (ReadsOutputs,), {"how": lambda self, *tensors: how(*tensors)})


#: kernels that take an output for theirs where it is finite, as it never is before a checked launch
STALE = {
    "largest_lse": reading(lambda old_out, old_lse, out, lse: lse.copy_(torch.fmax(old_lse, lse))),
    "accumulates": reading(lambda old_out, old_lse, out, lse: out.add_(old_out.nan_to_num(0.0))),
    "written_already": reading(lambda old_out, old_lse, out, lse: out.copy_(out.where(old_out.isnan(), old_out))),
    "doubles": reading(lambda old_out, old_lse, out, lse: out.mul_(1 if old_out.isnan().any() else 2)),
}


class ByAddress(Right):
    """Plans once for tables at one address."""

    def __init__(self, spec):
        super().__init__(spec)
        self.plans = {}

    def plan(self, step):
        super().plan(self.plans.setdefault(step.block_tables.data_ptr(), step))


class Refuses(Right):
    def launch(self, query, key_cache, value_cache, out, lse):
        if not (query.is_contiguous() and key_cache.is_contiguous()):
            raise ValueError("tensors must be contiguous")
        super().launch(query, key_cache, value_cache, out, lse)


def tables(toy):
    return toy.step.host_block_tables


def shares(toy):
    lens = toy.step.host_seq_lens
    owned = np.concatenate([row[: -(-n // toy.spec.block_size)] for row, n in zip(tables(toy), lens, strict=True)])
    return len(set(owned.tolist())) < len(owned)


class Featured(numpy_online.Online):
    """numpy.online with all that a layer adds; `errs` on steps that are shorter than the case's."""

    errs = False

    def launch(self, query, key_cache, value_cache, out, lse, **layer):
        super().launch(query, key_cache, value_cache, out, lse, **layer)
        if self.errs and self.step.host_seq_lens.max() < 30:
            lse.add_(0.01)


#: decode of sequences whose windows begin in blocks and at them, some with fewer keys than a window
LONGER = dataclasses.replace(CASE, name="tiny.longer", seq_lens=(31, 9, 16, 0, 25, 1), q_lens=(1, 1, 0, 1, 1, 1))
ADDED = {
    "window": {"window": 10},
    "window of one key": {"window": 1},
    "window at blocks": {"window": 8, "seq_lens": (32, 16, 24), "q_lens": ()},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": True, "num_kv_heads": 4},
    "sinks": {"sinks": True},
    "e4m3": {"kv_dtype": "e4m3", "kv_scales": "head"},
    "prefix": {"prefix": ((0, 0), (0, 8), (0, 8), (0, 0), (1, 8), (0, 0))},
    "all": {"window": 10, "softcap": 3.0, "alibi": True, "sinks": True, "kv_dtype": "e5m2"},
}

FIRST_BLOCK = operator("attention").build(CASE, PLAIN, layers=1, device="cpu").step.host_block_tables[0, 0]

FAULTS = {
    "repeat": LastBit,
    "two_plans": OneBuffer,
    "block_permutation": erring(lambda toy, *_: tables(toy).shape == (4, 5) and tables(toy)[0, 0] != FIRST_BLOCK),
    "clean_pool": erring(lambda toy, query, key_cache: not key_cache.isnan().any()),
    "same_addresses": ByAddress,
    "batch_order": erring(lambda toy, *_: toy.step.host_seq_lens[0] == 0),
    "smaller_step": erring(lambda toy, *_: toy.step.num_seqs < toy.spec.max_num_seqs),
    "shared_prefix": erring(lambda toy, *_: shares(toy)),
    "layers": Remembers,
    "halves": erring(lambda toy, *_: toy.step.host_seq_lens.max() <= 8),
    "strided_query": Packed,
    "strided_cache": type("Toy", (Packed,), {"what": 1}),
    "block_size": erring(lambda toy, *_: toy.spec.block_size != 4),
    "splits": erring(lambda toy, *_: toy.spec.params["splits"] == 3),
}
#: the same places, and one last bit: no fault but for who claims bits
BITS = {
    "repeat": LastBit,
    "two_plans": rounding(lambda toy, *_: toy.launches == 3),
    "block_permutation": rounding(lambda toy, *_: tables(toy)[0, 0] != FIRST_BLOCK),
    "clean_pool": rounding(lambda toy, query, key_cache: not key_cache.isnan().any()),
    "same_addresses": rounding(lambda toy, *_: toy.launches == 3),
    "batch_order": rounding(lambda toy, *_: toy.step.host_seq_lens[0] == 0),
    "smaller_step": rounding(lambda toy, *_: toy.step.num_seqs < toy.spec.max_num_seqs),
    "shared_prefix": rounding(lambda toy, *_: shares(toy)),
    "layers": rounding(lambda toy, *_: toy.launches == 4),
    "strided_query": rounding(lambda toy, query, key_cache: not query.is_contiguous()),
    "strided_cache": rounding(lambda toy, query, key_cache: not key_cache.is_contiguous()),
}
FEATURED = {"featured": Featured, "featured_errs": type("Toy", (Featured,), {"errs": True})}
TOYS = {
    **FAULTS, **STALE, **FEATURED, **{f"bits_{name}": toy for name, toy in BITS.items()}, "right": Right, "refuses": Refuses,
}  # fmt: skip


def __getattr__(name):
    """prepare_NAME is the toy's."""
    if name.startswith("prepare_"):
        return TOYS[name.removeprefix("prepare_")]
    raise AttributeError(name)


def toy(name, **fields):
    params = {"splits": (1, 2, 3)}
    defaults = {"name": f"toy.{name}", "op": "attention", "prepare": f"{__name__}:prepare_{name}", "params": params}
    return Impl(**{**defaults, **fields})


def hold(impl, case=CASE, layout=HND, only=None, monkeypatch=None):
    """Run the relations, or one, and return what was noted and what is wrong."""
    if only:
        monkeypatch.setattr(relations, "relations_of", lambda op: {only: (relations.GENERAL | ATTENTION)[only]})
    device, op = find_device("cpu"), operator(case.op)
    entry = Entry(impl, layout)
    trial = Trial.of(impl.load(), op.spec(case, layout, "cpu", impl.resolve_params({})), device)
    staged = op.build(case, PLAIN, layers=1, device="cpu").stage(layout)
    note = {}
    return note, check_relations(Subject.of(case, entry, trial, staged, {}, thorough=True), note)


@pytest.mark.parametrize("layout", [HND, NHD], ids=str)
@pytest.mark.parametrize("name", FAULTS)
def test_each_relation_finds_its_fault(name, layout, monkeypatch):
    """Entries that are right as long as nothing varies are wrong by the relation that varies it."""
    note, why = hold(toy(name), layout=layout, only=name, monkeypatch=monkeypatch)

    assert why
    assert why.startswith(f"relation {name}: ")
    assert note == {name: why.replace(f"relation {name}", "broken")}


@pytest.mark.parametrize("case", [CASE, CHUNKED, ONE_ROW], ids=str)
@pytest.mark.parametrize("name", STALE)
def test_who_reads_what_lies_in_its_outputs_is_wrong(name, case):
    """An engine's outputs hold the step before, not NaN."""
    _, why = hold(toy(name), case)

    assert why.startswith("relation repeat: ")


@pytest.mark.parametrize("name", ["two_plans", "same_addresses", "shared_prefix"])
def test_another_batch_is_judged_not_only_compared(name, monkeypatch):
    """Who is wrong on every other batch in the same way agrees with itself."""
    class Others(Right):
        """Right on the values that it first met."""

        seen = None

        def launch(self, query, key_cache, value_cache, out, lse):
            super().launch(query, key_cache, value_cache, out, lse)
            behind = value_cache.nan_to_num(0.0).sum().item()
            self.seen = behind if self.seen is None else self.seen
            out.mul_(1 if behind == self.seen else 1.01)

    monkeypatch.setitem(TOYS, "others", Others)
    _, why = hold(toy("others"), only=name, monkeypatch=monkeypatch)

    assert why.startswith(f"relation {name}: another batch, alone: ")


@pytest.mark.parametrize(
    "capacity",
    [
        lambda toy, query, _: len(query) != toy.spec.max_num_tokens,
        lambda toy, *_: toy.step.host_seq_lens.max() != toy.spec.max_seq_len,
    ],
    ids=["tokens", "longest"],
)
def test_who_takes_what_was_prepared_for_as_what_is_there_is_wrong(capacity, monkeypatch):
    """Steps of an engine are smaller than the largest one."""
    monkeypatch.setitem(TOYS, "capacity", erring(capacity))
    _, why = hold(toy("capacity"), only="smaller_step", monkeypatch=monkeypatch)

    assert why.startswith("relation smaller_step: ")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"seq_lens": (9,), "q_lens": ()}, "there are fewer than two sequences"),
        ({"seq_lens": (9, 5, 0), "q_lens": (1, 0, 1)}, "only the longest sequence has keys and query tokens"),
    ],
)
def test_there_may_be_no_smaller_step(fields, why, monkeypatch):
    """Without a sequence to leave out, or with nothing to attend to without it."""
    case = dataclasses.replace(CASE, **fields)

    held = hold(toy("right"), case, only="smaller_step", monkeypatch=monkeypatch)
    assert held == ({"smaller_step": f"not run: {why}"}, None)


def test_who_gives_no_lse_may_leave_it(monkeypatch):
    """What lies there is nobody's answer."""
    quiet = type("Toy", (Right,), {"launch": lambda self, *given: Right.launch(self, *given[:4], given[4].clone())})
    monkeypatch.setitem(TOYS, "quiet", quiet)

    assert hold(toy("quiet", lse=False), only="repeat", monkeypatch=monkeypatch) == ({"repeat": "bitwise"}, None)


@pytest.mark.parametrize("layout", [HND, NHD, CONTIGUOUS], ids=str)
@pytest.mark.parametrize("case", [CASE, CHUNKED], ids=str)
def test_the_right_hold_every_relation(case, layout):
    """None is broken, and which could not run says why."""
    name = "torch_contiguous" if layout is CONTIGUOUS else "right"
    fields = {"prepare": "impls.torch_contiguous:prepare"} if layout is CONTIGUOUS else {}
    note, why = hold(toy(name, **fields), case, layout)

    assert why is None
    assert set(note) == set(RELATIONS)
    assert all(held in ("bitwise", "tolerance") or held.startswith("not run: ") for held in note.values())
    assert note["repeat"] == "bitwise"
    assert note["graph"] == note["side_stream"] == note["replay"] == NO_GPU
    assert note["halves"].startswith("not run") == (case is CHUNKED or layout is CONTIGUOUS)


@pytest.mark.parametrize("added", ADDED)
def test_halves_are_the_whole_with_all_that_a_layer_adds(added, monkeypatch):
    """Windows, distances and sinks of a half are put right; who errs on short sequences alone is found by it."""
    case = dataclasses.replace(LONGER, **ADDED[added])
    everything = {"limits": Limits(features=FEATURES), "params": {}}
    held = hold(toy("featured", **everything), case, only="halves", monkeypatch=monkeypatch)
    _, why = hold(toy("featured_errs", **everything), case, only="halves", monkeypatch=monkeypatch)

    assert held in [({"halves": how}, None) for how in ("bitwise", "tolerance")]
    assert why.startswith("relation halves: ")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"q_lens": (3, 1, 1, 0, 1, 1)}, "halves are for decode: with several query tokens the mask would move"),
        ({"window": 10, "prefix": ((0, 0), (0, 8), *((0, 0),) * 4)},
         "sequences share blocks, in which what a window leaves would begin at another place"),
    ],
)  # fmt: skip
def test_halves_that_would_say_nothing_are_not_run(fields, why, monkeypatch):
    """And say why."""
    case = dataclasses.replace(LONGER, **fields)
    impl = toy("featured", limits=Limits(features=FEATURES), params={})

    assert hold(impl, case, only="halves", monkeypatch=monkeypatch) == ({"halves": f"not run: {why}"}, None)


def test_a_claim_of_bits_is_held_to_its_bits(monkeypatch):
    """A last bit more is within tolerance, but not what was claimed; `repeat` is claimed unless the entry says less."""
    _, why = hold(toy("repeat"), only="repeat", monkeypatch=monkeypatch)
    modest, nothing = hold(toy("repeat", claims={"repeat": "tolerance"}), only="repeat", monkeypatch=monkeypatch)

    assert why.startswith("relation repeat: claimed bitwise, but ")
    assert why.endswith(" elements differ")
    assert (modest, nothing) == ({"repeat": "tolerance"}, None)


def test_who_is_deterministic_holds_every_bit():
    """numpy.online sums each sequence alone, token by token: nothing that may vary moves a bit of it."""
    note, why = hold(toy("right", claims=DETERMINISTIC))

    assert why is None
    assert {name for name in DETERMINISTIC if note[name] == "bitwise"} == set(BITS)
    assert {note[name] for name in set(DETERMINISTIC) - set(BITS)} == {NO_GPU}


@pytest.mark.parametrize("name", BITS)
def test_who_claims_to_be_deterministic_and_is_not_is_wrong(name, monkeypatch):
    """One last bit, where something varies that may not matter: wrong for who claims DETERMINISTIC, right for who does not."""
    _, why = hold(toy(f"bits_{name}", claims=DETERMINISTIC), only=name, monkeypatch=monkeypatch)
    modest = {name: "tolerance"}
    note, nothing = hold(toy(f"bits_{name}", claims=modest), only=name, monkeypatch=monkeypatch)

    assert why.startswith(f"relation {name}: claimed bitwise, but ")
    assert (note, nothing) == ({name: "tolerance"}, None)


def test_an_error_of_its_own_is_no_wrong_answer():
    """Whoever takes no strided tensors says so, and the record keeps the words."""
    note, why = hold(toy("refuses"))

    assert why is None
    assert note["strided_query"] == note["strided_cache"] == "refused: ValueError: tensors must be contiguous"


def strictly(error):
    """Raises `error` where a tensor is not contiguous."""

    def launch(self, query, key_cache, value_cache, out, lse):
        if not (query.is_contiguous() and key_cache.is_contiguous()):
            raise error
        Right.launch(self, query, key_cache, value_cache, out, lse)

    return type("Toy", (Right,), {"launch": launch})


@pytest.mark.parametrize("name", ["strided_query", "strided_cache"])
@pytest.mark.parametrize("error", [
    NotImplementedError("no"), Unsupported("no"), AssertionError(), RuntimeError("query must have a contiguous last dimension"),
], ids=repr)  # fmt: skip
def test_it_is_an_error_that_says_so(error, name, monkeypatch):
    """In the ways in which libraries do."""
    monkeypatch.setitem(TOYS, "strict", strictly(error))
    note, why = hold(toy("strict"), only=name, monkeypatch=monkeypatch)

    assert why is None
    assert note[name].startswith(f"refused: {type(error).__name__}")


@pytest.mark.parametrize("name", ["strided_query", "strided_cache"])
@pytest.mark.parametrize("error", [IndexError("index 9 is out of range"), RuntimeError("misaligned address")], ids=repr)
def test_a_crash_is_no_refusal(error, name, monkeypatch):
    """Who falls over a stride does not say that it takes none."""
    monkeypatch.setitem(TOYS, "crashes", strictly(error))
    _, why = hold(toy("crashes"), only=name, monkeypatch=monkeypatch)

    assert why == f"relation {name}: raised {type(error).__name__}: {error}"


class Overruns(Right):
    """Where strides are wide, it writes past LSE, or `what` it was given to read."""

    what = None

    def launch(self, query, key_cache, value_cache, out, lse):
        super().launch(query, key_cache, value_cache, out, lse)
        if query.is_contiguous() and key_cache.is_contiguous():
            return
        if self.what is None:
            lse.as_strided((lse.numel() + 1,), (1,))[-1] = 0.0
        else:
            (query, key_cache)[self.what][0, 0] = 1.0


@pytest.mark.parametrize(
    ("name", "what", "why"),
    [
        ("strided_query", None, "guard: wrote 4 bytes past the end of lse"),
        ("strided_cache", None, "guard: wrote 4 bytes past the end of lse"),
        ("strided_query", 0, "changed its input: query"),
        ("strided_cache", 1, "changed its input: key_cache"),
    ],
)
def test_launches_on_strides_are_guarded_as_others(name, what, why, monkeypatch):
    """What surrounds their outputs and what they read is looked at."""
    monkeypatch.setitem(TOYS, "overruns", type("Toy", (Overruns,), {"what": what}))

    assert hold(toy("overruns"), only=name, monkeypatch=monkeypatch)[1] == f"relation {name}: {why}"


def test_limits_bound_what_is_varied():
    """An entry of one block size is not asked for another, nor one without splits for them."""
    only_four = toy("right", limits=Limits(block_sizes={4}), params={})
    note, why = hold(only_four)

    assert why is None
    assert note["block_size"] == "not run: the entry takes no other block size"
    assert note["splits"] == "not run: the entry declares no splits"


def test_a_variation_that_cannot_be_prepared_is_not_run(monkeypatch):
    """Unsupported is no fault."""

    def prepare(spec):
        if spec.params["splits"] == 2:
            raise Unsupported("not with 2")
        return Right(spec)

    monkeypatch.setitem(TOYS, "picky", prepare)
    note, why = hold(toy("picky"), only="splits", monkeypatch=monkeypatch)

    assert (note, why) == ({"splits": "not run: not with 2"}, None)


@pytest.mark.parametrize("case", [
    CacheWriteCase(name="tiny.write", num_kv_heads=1, head_dim=16, block_size=4, num_tokens=3, num_blocks=4),
    BlockCopyCase(name="tiny.copy", num_kv_heads=1, head_dim=16, block_size=4, num_copies=3, num_blocks=8, chained=True),
], ids=str)  # fmt: skip
def test_other_operators_are_held_to_what_applies(case):
    """A write and a copy are launched again, and on a GPU captured and on a side stream."""
    note, why = hold(Impl(name="some", op=case.op, prepare=f"impls.torch_{case.op}:prepare"), case)

    assert why is None
    assert note == {"repeat": "bitwise", "two_plans": "bitwise", "graph": NO_GPU, "side_stream": NO_GPU}


def run(impl, **options):
    (record,) = Session(Options(bench=False, **options), Registry([impl]), "cpu").measure([CASE], [Entry(impl, HND)])
    return record


def test_what_is_copied_on_a_side_stream_is_waited_for(monkeypatch):
    """It is compared on another stream than it was copied on, where a GPU that has other work, too, may be late."""
    words = torch.zeros(3)
    stream = types.SimpleNamespace(synchronize=lambda: words.fill_(1.0))
    cuda = types.SimpleNamespace(
        synchronize=lambda: None, _sleep=lambda cycles: None, Stream=lambda: stream, stream=contextlib.nullcontext
    )
    monkeypatch.setattr(relations, "torch", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(relations, "outputs", lambda trial, staged: [words])
    idle = types.SimpleNamespace(plan=lambda step: None, launch=lambda: None)
    subject = types.SimpleNamespace(
        require_cuda=lambda: None, device=find_device("cpu"), busy_s=0.0,
        trial=types.SimpleNamespace(plan=idle.plan, prepared=idle),
        staged=types.SimpleNamespace(soil=lambda layer: None, arguments=lambda layer: (), keywords=lambda layer: {}, step=None),
        again=lambda found: found[0].clone(),
    )

    assert [answer.tolist() for answer in relations.side_stream(subject)] == [[1.0, 1.0, 1.0]]


def test_the_record_says_which_ran(monkeypatch):
    """Small cases are held to relations by default, others only when asked; a broken one is wrong."""
    assert run(toy("right")).check["relations"]["batch_order"] == "bitwise"
    assert run(toy("right"), relations="none").check["relations"] == {"not run": "--relations none"}
    assert run(toy("batch_order")).reason.startswith("relation batch_order: ")
    monkeypatch.setattr("harness.checks.SMALL_BYTES", 100)
    assert run(toy("right")).check["relations"]["not run"].startswith("a cache holds more than ")
    assert run(toy("right"), relations="all").check["relations"]["batch_order"] == "bitwise"


def test_what_launches_slowly_is_left_to_all(monkeypatch):
    """An interpreter would take minutes."""
    monkeypatch.setattr(relations, "SMALL_S", 0.0)

    assert run(toy("right")).check["relations"]["not run"].startswith("one launch takes 0.")


@pytest.mark.parametrize("claims", [{"symmetry": "bitwise"}, {"repeat": "exact"}])
def test_claims_are_of_known_relations(claims):
    """A typing slip would claim nothing."""
    with pytest.raises(UsageError, match="claims"):
        toy("right", claims=claims)


def test_every_relation_has_a_default_claim():
    """The table of claims and the relations themselves name the same."""
    assert set(RELATIONS) == set(relations.GENERAL) | set(ATTENTION)


class Captured:
    """What stands for a CUDA graph on a CPU: it launches again, with the plan of then or of now."""

    def __init__(self, prepared, follows):
        self.prepared, self.follows = prepared, follows

    @contextlib.contextmanager
    def capture(self, graph):
        launch, step = self.prepared.launch, self.prepared.step

        def replay():
            self.prepared.step = self.prepared.step if self.follows else step
            launch(*self.arguments)

        self.prepared.launch = lambda *arguments: setattr(self, "arguments", arguments)
        yield
        self.prepared.launch, self.replay = launch, replay


@pytest.mark.parametrize("layout", [HND, NHD], ids=str)
@pytest.mark.parametrize(("follows", "windowed"), [(True, False), (False, False), (True, True)])
def test_a_replay_that_does_not_follow_its_plan_is_found(follows, windowed, layout, monkeypatch):
    """An engine plans anew before each replay; who reads the lengths of the capture is wrong."""
    monkeypatch.setattr(Subject, "require_cuda", lambda subject: None)
    case = dataclasses.replace(CASE, window=6) if windowed else CASE

    def graph():
        made = Captured(Captured.prepared, follows)
        monkeypatch.setattr(torch.cuda, "graph", made.capture)
        return made

    def load(impl):
        return lambda spec: setattr(Captured, "prepared", Right(spec)) or Captured.prepared

    monkeypatch.setattr(Impl, "load", load)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    limits = Limits(features={"window"})
    note, why = hold(toy("right", replays=True, limits=limits), case, layout, only="replay", monkeypatch=monkeypatch)

    assert (note["replay"] == "bitwise") == follows
    assert (why is None) == follows


def test_who_does_not_say_that_replays_follow_is_not_asked(monkeypatch):
    """And the record says so."""
    monkeypatch.setattr(Subject, "require_cuda", lambda subject: None)
    note, why = hold(toy("right"), only="replay", monkeypatch=monkeypatch)

    assert (note, why) == ({"replay": "not run: the entry says replays=False"}, None)
