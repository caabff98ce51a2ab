"""mine.decode: paged decode attention of torch calls, every sequence padded to the longest."""

import math

import torch

from harness.ops.layouts import HND
from harness.registry import Impl, Limits, Prepared

IMPLS = (Impl(name="mine.decode", op="attention", prepare="kernels:Decode", layouts=(HND,), limits=Limits(max_q_len=1)),)


class Decode(Prepared):
    ledger = {"casts": "query, keys and values to float32", "allocates": "K and V of the step in float32, scores, weights"}

    def __init__(self, spec):
        self.spec = spec

    def plan(self, step):
        """Keep the blocks of the step's sequences, and which of their slots hold a token."""
        block_size = self.spec.block_size
        num_blocks = max(1, -(-max(step.host_seq_lens, default=0) // block_size))
        slots = torch.arange(num_blocks * block_size, device=step.seq_lens.device)
        self.used = (slots < step.seq_lens[:, None])[:, None, :, None]  # [num_seqs, 1, num_slots, 1]
        # Entries past a sequence's last block may be anything: no block has such a number.
        self.tables = step.block_tables[:, :num_blocks].where(self.used[:, 0, ::block_size, 0], 0).long()
        # A sequence may have no query token in this step.
        self.rows = (step.query_start_loc[1:] > step.query_start_loc[:-1]).nonzero().flatten()

    def launch(self, query, key_cache, value_cache, out, lse):
        tables, used = self.tables[self.rows], self.used[self.rows]
        # Slots without a token may hold anything, NaN included, which a weight of 0 would not remove.
        key, value = (
            cache[tables].transpose(1, 2).flatten(2, 3).float().where(used, 0.0) for cache in (key_cache, value_cache)
        )
        heads = query.unflatten(1, (self.spec.num_kv_heads, self.spec.group)).float()
        scores = (heads @ key.mT * self.spec.scale).where(used.mT, -math.inf)
        logs = scores.logsumexp(-1)
        weights = (scores - logs[..., None]).exp().where(used.mT, 0.0)  # without a token: -inf - -inf is NaN
        out.copy_((weights @ value).flatten(1, 2))
        lse.copy_(logs.flatten(1))
