"""torch.ops.pagedbench.paged_attention on a CPU: right, traceable, and planned by shapes. What only a GPU does is imitated."""

from __future__ import annotations

import dataclasses
import math
import sys
import types

import numpy as np
import pytest
import torch

import runtime.torch_op
from cases import SUITES
from harness.hazards import PLAIN
from harness.ops import operator
from harness.ops.attention import AttentionStep
from harness.ops.layouts import HND, HND_SWIZZLED, KV_NHD, NHD, X_PACKED
from impls.cuda import attention
from impls.cuda.attention import Attention
from impls.numpy_dense import prepare
from runtime import op_plan

CASES = [case for case in SUITES["smoke"] if case.op == "attention"]
LAYOUTS = (HND, NHD, KV_NHD, X_PACKED, HND_SWIZZLED)
PLAINLY = op_plan.Asked(scale=None, layout="HND", max_q_len=1, window=None, softcap=None)
#: relative L2 of a row's error
ALLOWED = {"f32": 1e-5, "f16": 2e-3, "bf16": 1.2e-2}


def attend(*tensors, **options):
    return torch.ops.pagedbench.paged_attention(*tensors, **options)


def arguments(num_seqs=3, *, layout=HND, seed=0, dtype=torch.float32, table=4):
    """A decode step of 4 query heads over 2, blocks of 8 and head_dim 32, as the operator takes it."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    caches = layout.arrange(normal(24, 2, 8, 32), normal(24, 2, 8, 32))
    tables = torch.randperm(24, generator=generator)[: num_seqs * table].view(num_seqs, table).int()
    seq_lens = torch.randint(1, table * 8, (num_seqs,), generator=generator).int()
    return [normal(num_seqs, 4, 32), *caches, tables, seq_lens, torch.arange(num_seqs + 1).int()]


def dense(tensors, scale, layout, block_size, num_kv_heads, *, window=None, softcap=None, **layer):
    """numpy.dense on the same tensors, in float64."""
    query, key_cache, value_cache, *of_step = tensors
    spec = types.SimpleNamespace(
        layout=layout, head_dim=query.shape[2], dtype="f32", scale=scale, block_size=block_size, num_kv_heads=num_kv_heads,
        num_q_heads=query.shape[1], group=query.shape[1] // num_kv_heads, cache_dtype="f32", window=window, softcap=softcap,
        alibi="alibi_slopes" in layer, sinks="sinks" in layer, kv_dtype="e4m3" if "k_scale" in layer else None,
    )
    prepared = prepare(spec)
    host = [t.numpy() for t in of_step]
    prepared.plan(AttentionStep(
        block_tables=of_step[0], seq_lens=of_step[1], query_start_loc=of_step[2],
        host_block_tables=host[0], host_seq_lens=host[1], host_query_start_loc=host[2],
    ))  # fmt: skip
    out, lse = torch.empty(query.shape, dtype=torch.float64), torch.empty(query.shape[:2], dtype=torch.float64)
    prepared.launch(query, key_cache, value_cache, out, lse, **layer)
    return out, lse


def assert_near(got, want, dtype):
    (out, lse), (true_out, true_lse) = got, want
    error = (out.double() - true_out).norm(dim=-1)
    seen = true_lse > -torch.inf

    assert (error <= ALLOWED[dtype] * true_out.norm(dim=-1)).all()
    assert torch.equal(seen, lse > -torch.inf)
    torch.testing.assert_close(lse.double()[seen], true_lse[seen], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_numpy_dense(case, layout):
    """On every attention case of the suite `smoke`, among poison, in every layout of a paged cache."""
    inputs = operator(case.op).build(case, dataclasses.replace(PLAIN, outlier=False), layers=1, device="cpu")
    made, step = inputs.layers[0], inputs.step
    tensors = [made.query, *inputs.arrange(made, layout), step.block_tables, step.seq_lens, step.query_start_loc]
    more = {"window": case.window, "softcap": case.softcap, **made.named}
    got = attend(*tensors, scale=case.softmax_scale, layout=layout.name, max_q_len=case.max_q_len, **more)

    assert_near(got, dense(tensors, case.softmax_scale, layout, case.block_size, case.num_kv_heads, **more), case.dtype)


def test_a_second_call_is_planned_anew():
    """Other lengths and other tables at the same addresses, then fewer sequences: only shapes are remembered."""
    tensors = arguments()
    before = attend(*tensors)[0].clone()
    tensors[3].copy_(tensors[3].flip(0))
    tensors[4].copy_(torch.tensor([31, 1, 0], dtype=torch.int32))
    fewer = [tensors[0][:1], *tensors[1:3], tensors[3][:1], tensors[4][:1], tensors[5][:2]]

    assert not torch.equal(attend(*tensors)[0], before)
    for called in (tensors, fewer):
        assert_near(attend(*called), dense(called, 32**-0.5, HND, 8, 2), "f32")


def test_one_plan_serves_capacities_up_to_a_power_of_two():
    """Three sequences and four share one, five take another; longer tables too; contents and addresses never count."""
    runtime.torch_op.release()
    counts = []
    for tensors in (arguments(3), arguments(4, seed=1), arguments(3, seed=2), arguments(5), arguments(3, table=5)):
        attend(*tensors)
        counts.append(len(op_plan._plans))

    assert counts == [1, 1, 1, 2, 3]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_blocks_may_be_strided(layout):
    """As those of a cache that holds all layers side by side."""
    tensors = arguments(layout=layout)
    strided = [torch.stack([cache, torch.full_like(cache, torch.nan)], dim=1)[:, 0] for cache in tensors[1:3]]

    got = attend(tensors[0], *strided, *tensors[3:], layout=layout.name)
    want = attend(*tensors, layout=layout.name)

    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_what_stands_before_a_window_is_not_looked_at():
    """A block that an engine has taken back may have any id in its place."""
    tensors = arguments()
    tensors[4].fill_(30)
    want = attend(*tensors, window=5)[0]
    tensors[3][:, 0] = -1

    assert torch.equal(attend(*tensors, window=5)[0], want)


def test_rows_of_padding_belong_to_no_sequence():
    """Query tokens past query_start_loc[-1] change nothing."""
    tensors = arguments()
    padded = [torch.cat([tensors[0], torch.full((2, 4, 32), torch.nan)]), *tensors[1:]]
    out, lse = attend(*padded)

    assert out.shape == (5, 4, 32)
    assert torch.equal(out[:3], attend(*tensors)[0])
    assert torch.equal(lse[:3], attend(*tensors)[1])


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_nothing_to_attend_to_is_no_error(num_tokens):
    """No sequences, with padding or without."""
    tensors = arguments()
    out, lse = attend(tensors[0][:num_tokens], *tensors[1:3], tensors[3][:0], tensors[4][:0], tensors[5][:1])

    assert (out.shape, lse.shape) == ((num_tokens, 4, 32), (num_tokens, 4))


# What tracers see

@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_opcheck_finds_nothing(layout):
    """Schema, aliasing, the fake kernel's shapes, types and strides, and tracing with dynamic shapes."""
    tensors = arguments(layout=layout)
    tensors[0] = torch.cat([tensors[0], tensors[0]], dim=1)[:, :4]  # strided tokens

    results = torch.library.opcheck(torch.ops.pagedbench.paged_attention.default, tensors, {"layout": layout.name})

    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("layout", [HND, KV_NHD], ids=str)
def test_it_compiles_as_one_graph(backend, layout):
    """Without a break, and for other batch sizes without another compilation."""
    compiled = []

    def layer(*tensors):
        return attend(*tensors, layout=layout.name)[0].float() * 2

    def counting(graph, example):
        compiled.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, example)

    torch._dynamo.reset()
    traced = torch.compile(layer, fullgraph=True, backend=counting, dynamic=True)

    for num_seqs in (5, 6, 3):
        tensors = arguments(num_seqs, layout=layout)
        assert torch.equal(traced(*tensors), layer(*tensors))
    assert len(compiled) == 1


def features():
    """All that a layer can add to `arguments`: caches in fp8 with scales by head, and the rest by name."""
    query, *caches, tables, seq_lens, starts = arguments()
    scales = torch.tensor([[0.5, 2.0], [3.0, 0.25]])
    caches = [(cache / scale[:, None, None]).to(torch.float8_e4m3fn) for cache, scale in zip(caches, scales, strict=True)]
    named = {
        "window": 9, "softcap": 5.0, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]),
        "sinks": torch.tensor([1.0, -3.0, 0.0, 2.0]), "k_scale": scales[0].clone(), "v_scale": scales[1].clone(),
    }  # fmt: skip
    return [query, *caches, tables, seq_lens, starts], named


def test_what_a_layer_adds_is_numpy_dense():
    """Everything at once; whatever is left out changes the answer, so that none of it is lost on the way."""
    tensors, named = features()
    got = attend(*tensors, **named)

    assert_near(got, dense(tensors, 32**-0.5, HND, 8, 2, **named), "f32")
    for name in ("window", "softcap", "alibi_slopes", "sinks"):
        assert not torch.allclose(attend(*tensors, **{**named, name: None})[1], got[1]), name
    for name in ("k_scale", "v_scale"):
        assert not torch.allclose(attend(*tensors, **{**named, name: torch.ones(2)})[0], got[0]), name


def test_what_a_layer_adds_is_traced():
    """opcheck finds nothing, and torch.compile makes one graph of it, for other batch sizes too."""
    tensors, named = features()
    masks = {name: value for name, value in named.items() if "scale" not in name}
    operator = torch.ops.pagedbench.paged_attention.default
    results = torch.library.opcheck(operator, arguments(), masks)
    # That the schema tells of what is written is asked by arithmetic, which torch has none of in fp8.
    rest = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    of_fp8 = torch.library.opcheck(operator, tensors, named, test_utils=rest)
    compiled, counts = [], []

    def layer(*tensors):
        return attend(*tensors, **named)[0].float() * 2

    def counting(graph, example):
        compiled.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    torch._dynamo.reset()
    traced = torch.compile(layer, fullgraph=True, backend=counting, dynamic=True)

    assert {*results.values(), *of_fp8.values()} == {"SUCCESS"}
    for num_seqs in (5, 6, 3):
        query, _, _, *of_step = arguments(num_seqs)
        step = (query, *tensors[1:3], *of_step)
        assert torch.equal(traced(*step), layer(*step))
        counts.append(len(compiled))
    assert len(set(counts)) == 1  # Dynamo may begin anew once, when it has found that softcap is a constant


def test_tables_may_share_blocks():
    """Two sequences that begin with the same blocks have the answers of two with copies of them."""
    tensors = arguments()
    tensors[4].copy_(torch.tensor([30, 25, 9], dtype=torch.int32))
    copied = [tensor.clone() for tensor in tensors]
    for cache in copied[1:3]:
        cache[tensors[3][1, :2].long()] = cache[tensors[3][0, :2].long()]
    tensors[3][1, :2] = tensors[3][0, :2]

    assert torch.equal(attend(*tensors)[0], attend(*copied)[0])


# What is refused

@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"k_scale": None}, r"caches of e4m3 need k_scale and v_scale"),
        ({"k_scale": torch.ones(3)}, r"k_scale must have shape \(2,\)"),
        ({"v_scale": torch.ones(1)}, r"v_scale must have shape \(2,\)"),
        ({"sinks": torch.ones(2)}, r"sinks must have shape \(4,\)"),
        ({"alibi_slopes": torch.ones(4).half()}, r"alibi_slopes must have .* type float32"),
        ({"alibi_slopes": torch.ones(8)[::2]}, "alibi_slopes must be contiguous"),
        ({"window": 0}, "window must be None or at least 1"),
        ({"softcap": 0.0}, "softcap must be None or above 0"),
        ({"softcap": math.inf}, "softcap must be None or above 0 and finite"),
        ({"scale": math.nan}, "scale must be None or finite"),
    ],
    ids=str,
)
def test_what_a_layer_cannot_add_is_refused(change, rule):
    """With the rule and what was got."""
    tensors, named = features()

    with pytest.raises(ValueError, match=rule):
        attend(*tensors, **{**named, **change})


def test_scales_without_a_quantised_cache_are_refused():
    """They would be forgotten."""
    with pytest.raises(ValueError, match=r"k_scale and v_scale are for fp8 caches \(got caches of f32\)"):
        attend(*arguments(), k_scale=torch.ones(1), v_scale=torch.ones(1))


@pytest.mark.parametrize(
    ("place", "change", "rule"),
    [
        (0, lambda t: t[0], "query must be"),
        (0, lambda t: t.double(), "query must be f32, f16 or bf16"),
        (0, lambda t: t[..., :16], "one head_dim"),
        (0, lambda t: t[:, :3], "multiple of KV heads"),
        (1, lambda t: t[:, :1], r"key_cache must have shape \(24, 2, 8, 32\)"),
        (2, lambda t: t[0], "value_cache of HND must have 4 dimensions"),
        (3, lambda t: t.long(), "block_tables must have .* type torch.int32"),
        (3, lambda t: t.T.contiguous().T, "contiguous along its last dimension"),
        (4, lambda t: t[:2], "block_tables must have shape"),
        (5, lambda t: t[:3], r"query_start_loc must have shape \(4,\)"),
        (4, lambda t: t + 100, "seq_lens must be at most 32"),
        (5, lambda t: t * 2, r"query_start_loc\[-1\] must be at most 3"),
        (3, lambda t: t - 100, "block ids in use must be 0 to 23, the cache's blocks"),
        (3, lambda t: t + 100, r"block ids in use must be 0 to 23, the cache's blocks \(got 1"),
        (4, lambda t: t - 100, "seq_lens must be at least 0"),
        (5, lambda t: t.clamp(min=1), r"query_start_loc\[0\] must be at most 0"),
        (5, lambda t: t[[0, 2, 1, 3]], "query tokens of a sequence must be at least 0"),
    ],
)
def test_tensors_that_do_not_go_together_are_refused(place, change, rule):
    """With the rule and what was got; a CPU sees contents, too."""
    tensors = arguments()
    tensors[place] = change(tensors[place])

    with pytest.raises(ValueError, match=rule):
        attend(*tensors)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"layout": "CONTIGUOUS"}, "layout must be one of HND, NHD, KV_NHD, X_PACKED, HND_SWIZZLED"),
        ({"max_q_len": 0}, "max_q_len must be at least 1"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(options, rule):
    """With what there is."""
    with pytest.raises(ValueError, match=rule):
        attend(*arguments(), **options)


def test_more_query_tokens_than_announced_are_refused():
    """max_q_len chooses the kernel: 1 would take one that reads the first query token of a sequence only."""
    tensors = arguments()
    tensors[5] = torch.tensor([0, 2, 3, 3], dtype=torch.int32)

    with pytest.raises(ValueError, match="query tokens of a sequence must be at most 1"):
        attend(*tensors)
    attend(*tensors, max_q_len=2)


@pytest.mark.parametrize("of", [0, 2, "sinks"])
def test_a_gradient_is_refused(of):
    """Instead of one that is silently zero: of the query, a cache, or what a layer adds."""
    tensors, layer = arguments(), {"sinks": torch.ones(4)}
    (layer if of == "sinks" else tensors)[of].requires_grad_()

    with pytest.raises(RuntimeError, match="no backward"):
        attend(*tensors, **layer)
    with torch.no_grad():
        attend(*tensors, **layer)


def test_where_nothing_fits_every_reason_is_told(monkeypatch):
    """One an entry."""
    monkeypatch.setattr(op_plan, "PREFERRED", {"cpu": ("cuda.tensor_core", "cuda.split_kv")})
    runtime.torch_op.release()

    with pytest.raises(NotImplementedError, match=r"cuda.tensor_core: layout must .*; cuda.split_kv: layout must"):
        attend(*arguments(layout=X_PACKED), layout="X_PACKED")


# What a GPU does

class Recorded(Attention):
    """Keeps what would be launched."""

    def _enqueue(self, stream, values):
        self.launched = values


def test_bounds_launch_what_contents_do(monkeypatch):
    """On a GPU lengths are not read back: a step that knows their bounds alone passes the kernel the same values."""
    monkeypatch.setattr(attention, "device_index", lambda device: 0)
    monkeypatch.setattr(attention, "raw_stream", lambda index: 0)
    tensors = arguments(dtype=torch.bfloat16)
    spec = op_plan._spec(tuple(tensors), {}, PLAINLY)
    out, lse = torch.empty_like(tensors[0]), torch.empty(3, 4)
    launched = []
    for host in ([t.numpy() for t in tensors[3:]], op_plan.find_form(tuple(tensors), {}, PLAINLY).host):
        kernel = Recorded(spec)
        kernel.plan(runtime.torch_op._step(tuple(tensors), host))
        kernel.launch(*tensors[:3], out, lse)
        launched.append(kernel.launched)

    assert launched[0] == launched[1]
    assert not np.array_equal(host[1], tensors[4].numpy())


@pytest.mark.parametrize("name", op_plan.PREFERRED["cuda"])
def test_kernels_of_a_gpu_ask_for_capacities_alone(name):
    """They plan as Attention does, whose launches follow from the device's lengths; or look for what tables share, too."""
    from impls import IMPLS
    from impls.cuda.tensor_core import TensorCore

    (impl,) = (impl for impl in IMPLS if impl.name == name)
    page = sys.modules[impl.load().__module__]
    classes = [kind for kind in vars(page).values() if isinstance(kind, type) and issubclass(kind, Attention)]

    assert len(classes) > 1
    assert {kind.plan for kind in classes} <= {Attention.plan, TensorCore.plan}


def test_tables_that_stay_on_the_device_share_nothing():
    """Where no table is on the host no block can be found in two of them."""
    from impls.cuda.prefix import Prefixes

    tensors = arguments(dtype=torch.bfloat16)
    host = op_plan.find_form(tuple(tensors), {}, PLAINLY).host

    assert Prefixes._begin_apart(None, runtime.torch_op._step(tuple(tensors), host).host_block_tables)


def test_streams_that_share_a_workspace_wait(monkeypatch):
    """A call on another stream than the last one's waits for it; one on the same stream, or in a capture, does not."""
    waited = []
    streams = {n: types.SimpleNamespace(wait_stream=lambda other, n=n: waited.append((n, other))) for n in (1, 2)}
    now = {"stream": 1, "capturing": False}
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: now["stream"], raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: streams[now["stream"]])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now["capturing"])
    plan = op_plan.Plan(op_plan._spec(tuple(arguments()), {}, PLAINLY))
    plan.index = 0

    for stream, capturing in ((1, False), (1, False), (2, False), (1, True), (2, False), (1, False)):
        now.update(stream=stream, capturing=capturing)
        plan._wait()

    assert waited == [(2, streams[1]), (1, streams[2])]


def test_a_step_is_let_go_of_after_the_launch():
    """The memory of a CUDA graph must not be held by those who were only called in it."""
    plan = op_plan.Plan(op_plan._spec(tuple(arguments()), {}, PLAINLY))
    planned = []
    plan.prepared = types.SimpleNamespace(plan=planned.append, launch=lambda *tensors: None)
    step = dataclasses.replace(plan._nothing)
    plan.run(step)

    assert planned == [step, plan._nothing]


# On a GPU

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


def on_gpu(tensors):
    return [t.cuda() for t in tensors]


def assert_as_on_cpu(got, tensors, **options):
    """Within what 16 bits round."""
    want = attend(*(t.cpu() for t in tensors), **options)
    torch.testing.assert_close(got[0].cpu(), want[0], rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(got[1].cpu(), want[1], rtol=1e-3, atol=1e-3)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_gpu_says_what_a_cpu_does(layout, dtype):
    """In every layout that a kernel takes, and a second call of the shapes does not wait for the device."""
    if layout is HND_SWIZZLED and dtype == torch.float32:
        pytest.skip("no kernel takes it")
    options = {"layout": layout.name}
    attend(*on_gpu(arguments(layout=layout, dtype=dtype)), **options)
    tensors = on_gpu(arguments(layout=layout, dtype=dtype, seed=1))
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = attend(*tensors, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert_as_on_cpu(got, tensors, **options)


@needs_gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_captured_call_follows_lengths_and_tables():
    """Replayed after they changed in place; a capture of new shapes is refused, and leaves the stream usable."""
    runtime.torch_op.release()
    tensors = on_gpu(arguments(dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="call it once with them before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        attend(*tensors)
    attend(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [attend(*tensors) for _ in range(3)]
    for seed in (1, 2):
        for tensor, other in zip(tensors, arguments(dtype=torch.bfloat16, seed=seed), strict=True):
            tensor.copy_(other)
        graph.replay()

        for results in got:
            assert_as_on_cpu(results, tensors)


@needs_gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own first one, into which nothing goes
def test_compiled_with_cuda_graphs():
    """`reduce-overhead` warms up, captures and replays; its pool finds nothing held that it does not know."""
    runtime.torch_op.release()
    torch._dynamo.reset()
    traced = torch.compile(lambda *tensors: attend(*tensors)[0] * 2, fullgraph=True, mode="reduce-overhead")
    for seed in range(5):
        tensors = on_gpu(arguments(dtype=torch.bfloat16, seed=seed))

        torch.testing.assert_close(traced(*tensors), attend(*tensors)[0] * 2)


@needs_gpu
def test_streams_share_a_workspace_in_turn():
    """Calls dealt over streams, with no other order between them, give what one stream gives."""
    tensors = on_gpu(arguments(2, dtype=torch.bfloat16, table=12))
    want = attend(*tensors)[0]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    got = []
    for turn in range(60):
        with torch.cuda.stream(streams[turn % 3]):
            got.append(attend(*tensors)[0])
    torch.cuda.synchronize()

    assert all(torch.equal(out, want) for out in got)
