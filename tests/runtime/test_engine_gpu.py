"""The engine on a GPU: graphs give what launches give, entries agree, and 16 bits err no more than transformers' own."""

from __future__ import annotations

import json

import pytest
import torch

from runtime.model import load
from runtime.requests import Sampling
from tests.runtime.served import Watched, greedy, needs_transformers, prompts, reference

pytestmark = [needs_transformers, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
GREEDY = Sampling(max_tokens=40, ignore_eos=True)
WIDE = {
    "model_type": "qwen3", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 4096,
    "initializer_range": 0.1, "tie_word_embeddings": False, "rope_theta": 1e6,
}  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A config that the tensor-core kernels take."""
    path = tmp_path_factory.mktemp("config") / "wide.json"
    path.write_text(json.dumps(WIDE))
    return str(path)


def served(config, dtype="bf16", **changes):
    """An engine after serving six prompts, and their tokens."""
    changes = {"block_size": 16, "num_blocks": 64, **changes}
    engine = Watched(load(config, dtype=dtype, device="cuda"), **changes)
    for index, text in enumerate(prompts()):
        engine.submit(text, GREEDY, f"r{index}")
    return engine, engine.finish()


@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen3-moe-tiny"])
def test_float32_is_hugging_faces_on_a_gpu(name, tmp_path):
    """The tokens of generate() on a CPU wherever no tie is near."""
    reference(name).save_pretrained(tmp_path)
    engine = Watched(load(str(tmp_path), dtype="f32", device="cuda"), impl="cuda.split_kv")
    for index, text in enumerate(prompts()):
        engine.submit(text, GREEDY, f"r{index}")
    tokens = engine.finish()
    same = 0
    for index, text in enumerate(prompts()):
        wanted = greedy(tuple(text), name=name)
        end = min(wanted.ties, default=40)
        same += tokens[f"r{index}", 0][:end] == wanted.tokens[:end]

    assert same >= 5  # products of another device: one may meet a close call


@pytest.mark.parametrize(
    "impl", [None, "cuda.per_token[HND]", "cuda.split_kv[NHD]", "cuda.tensor_core[HND]", "cuda.tensor_core[HND_SWIZZLED]"]
)
def test_replays_are_launches(config, impl):
    """The same tokens with graphs and without, for each kernel; and graphs are what was used."""
    replayed, tokens = served(config, impl=impl)
    _, launched = served(config, impl=impl, graphs=False)

    assert replayed.why_no_graphs is None
    assert tokens == launched


def test_the_plainest_kernel_and_the_fastest_give_the_same_tokens(config):
    """Where they part, the two tokens were as likely as rounding tells: within 2% of the largest logit."""
    plain, wanted = served(config, impl="cuda.per_token[HND]")
    _, found = served(config, impl="cuda.tensor_core[HND]")
    for key, tokens in wanted.items():
        part = next((i for i, pair in enumerate(zip(tokens, found[key], strict=True)) if pair[0] != pair[1]), None)
        if part is not None:
            logits = plain.seen[key][part].float()
            assert logits[tokens[part]] - logits[found[key][part]] <= 0.02 * logits.abs().max()


def test_an_entry_that_deals_on_the_host_is_not_replayed(config):
    """torch.gather's launches depend on lengths: the trial finds that out, and the engine launches them one by one."""
    engine, tokens = served(config, impl="torch.gather[HND]")

    assert "torch.gather" in engine.why_no_graphs
    assert all(len(answer) == 40 for answer in tokens.values())


@pytest.mark.parametrize("impl", [None, "cuda.per_token[HND]", "cuda.tensor_core[HND]"])
def test_16_bits_err_at_most_twice_as_much_as_transformers(config, impl):
    """Against float32 over the same tokens, per position, beside eager attention in bf16."""
    engine, tokens = served(config, impl=impl)
    exact = load(config, dtype="f32", device="cuda", fuse=False).module
    eager = load(config, dtype="bf16", device="cuda", fuse=False).module
    exact.load_state_dict(eager.state_dict())
    for module in (exact, eager):
        module.set_attn_implementation("eager")
    ours, theirs = [], []
    for index, text in enumerate(prompts()):
        ids = torch.tensor([text + tokens[f"r{index}", 0]], device="cuda")
        with torch.inference_mode():
            truth, rounded = (module(ids).logits[0, len(text) - 1 : -1].float() for module in (exact, eager))
        ours.append((torch.stack(engine.seen[f"r{index}", 0]).float() - truth).norm(dim=-1))
        theirs.append((rounded - truth).norm(dim=-1))
    allowed = 2 * torch.cat(theirs).quantile(0.99).clamp_min(1e-6)

    assert (torch.cat(ours) <= torch.maximum(2 * torch.cat(theirs), allowed)).all()


@pytest.mark.parametrize("preempt_by", ["recompute", "swap"])
def test_preempted_requests_go_on(config, preempt_by):
    """A pool that thrashes gives the tokens of one that does not, but for near ties."""
    engine, tokens = served(config, num_blocks=12, block_size=8, preempt_by=preempt_by, num_host_blocks=32)
    _, wanted = served(config)

    assert engine.scheduler.num_preemptions > 0
    assert sum(tokens[key] == wanted[key] for key in wanted) >= 4
