"""torch.compile of the model: as few graphs as there should be, none of them broken, and the same tokens."""

from __future__ import annotations

import pytest
import torch

from runtime.fusing import First
from runtime.model import Model, load
from runtime.requests import Sampling
from tests.runtime.served import NEW, Watched, faults, greedy, needs_transformers, prompts

pytestmark = needs_transformers


@pytest.fixture
def serve_compiled(monkeypatch):
    """Serve four prompts on a compiled model; the backend of torch's own tests counts what it is given."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter, compiled = CompileCounterWithBackend("eager"), Model.compile
    monkeypatch.setattr(Model, "compile", lambda self, what: compiled(self, what, counter))
    return lambda what: served(Watched(load("qwen3-tiny", dtype="f32"), compile=what), counter)


def served(engine, counter):
    """How many graphs it took, and which requests are wrong."""
    texts = prompts(4)
    for index, text in enumerate(texts):
        engine.submit(text, Sampling(max_tokens=NEW, ignore_eos=True), f"r{index}")
    tokens = engine.finish()
    return counter.frame_count, faults(engine, tokens, {f"r{i}": greedy(tuple(text)) for i, text in enumerate(texts)})[0]


@pytest.mark.parametrize("what", ["layer", "model"])
def test_a_compiled_model_is_one_graph(serve_compiled, what):
    """Three layers, prompts in chunks, and buckets of any size."""
    assert serve_compiled(what) == (1, [])


def test_a_graph_that_breaks_is_an_error(serve_compiled, monkeypatch):
    """No silent fallback: what a compiler cannot trace stops the engine."""
    forward = First.forward

    def broken(self, states):
        torch._dynamo.graph_break()
        return forward(self, states)

    monkeypatch.setattr(First, "forward", broken)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        serve_compiled("layer")


def test_one_more_graph_for_every_layer_shows(serve_compiled, monkeypatch):
    """The count would tell if layers were compiled apart: by a number of their own that a graph depends on."""
    forward = First.forward
    monkeypatch.setattr(First, "forward", lambda self, states: forward(self, states * self.number) / self.number)
    made = []

    def numbered(self, projections, init=First.__init__):
        init(self, projections)
        made.append(self)
        self.number = [1, 2, 4][len(made) // 2 % 3]

    monkeypatch.setattr(First, "__init__", numbered)
    assert serve_compiled("layer")[0] == 3
