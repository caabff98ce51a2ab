"""What a step tells the device, in one copy: arrays side by side in a buffer of pinned memory, and its twin on the device.

There are two buffers on the host. While the device may still read the one of the step before, the next step fills the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harness.ops.attention import AttentionStep
from harness.ops.cache_write import CacheWriteStep
from runtime.batch import Batch

ALIGNMENT = 16  # bytes, of every array
PADDING_SLOT = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrays:
    """The arrays of one buffer, as tensors.

    tokens, positions, slots      [max_num_tokens]       int64; tokens of -1 are in `states` of their row
    states                        [max_num_seqs]         int64, of rows with one token
    sampled_from, sampled_states  [max_num_seqs]         int64, query tokens that are sampled from, and where the sample goes
    seq_lens                      [max_num_seqs]         int32
    starts                        [max_num_seqs + 1]     int32, query_start_loc of all rows
    late_starts                   [max_num_seqs + 1]     int32, the same of rows with several tokens, from 0
    block_tables                  [max_num_seqs, width]  int32, last, so that a copy ends with the rows in use
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    states: torch.Tensor
    sampled_from: torch.Tensor
    sampled_states: torch.Tensor
    seq_lens: torch.Tensor
    starts: torch.Tensor
    late_starts: torch.Tensor
    block_tables: torch.Tensor


class Host:
    """One buffer on the host: its bytes, and its arrays as NumPy's."""

    def __init__(self, buffer: torch.Tensor, arrays: Arrays) -> None:
        self.buffer = buffer
        self.arrays: dict[str, NDArray[Any]] = {name: tensor.numpy() for name, tensor in vars(arrays).items()}



class StepBuffers:
    """Room for steps of up to `num_tokens` tokens of `num_seqs` sequences with tables of `width` blocks."""

    def __init__(self, *, num_tokens: int, num_seqs: int, width: int, device: str, no_state: int) -> None:
        self._no_state = no_state
        shapes = {
            **dict.fromkeys(("tokens", "positions", "slots"), ((num_tokens,), torch.int64)),
            **dict.fromkeys(("states", "sampled_from", "sampled_states"), ((num_seqs,), torch.int64)),
            "seq_lens": ((num_seqs,), torch.int32),
            **dict.fromkeys(("starts", "late_starts"), ((num_seqs + 1,), torch.int32)),
            "block_tables": ((num_seqs, width), torch.int32),
        }
        places, end = {}, 0
        for name, (shape, dtype) in shapes.items():
            size = int(np.prod(shape)) * dtype.itemsize
            places[name] = (end, size, shape, dtype)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self._tables_at = places["block_tables"][0]
        pinned = device.startswith("cuda")
        buffers = [torch.zeros(end, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._hosts = [Host(buffer, _arrays(buffer, places)) for buffer in buffers]
        self._buffer = torch.zeros(end, dtype=torch.uint8, device=device)
        self.device = _arrays(self._buffer, places)
        self.host = self._hosts[0]

    def fill(self, batch: Batch, num_rows: int) -> None:
        """Write a step down, padded to `num_rows` rows."""
        self._turn()
        host = self.host.arrays
        used, tokens = len(batch.rows), batch.num_tokens
        host["tokens"][:tokens] = batch.tokens
        host["slots"][:tokens] = batch.slots
        host["seq_lens"][:used] = batch.seq_lens
        host["starts"][1 : used + 1] = np.cumsum(batch.q_lens)
        if batch.is_decode:
            np.subtract(batch.seq_lens, 1, out=host["positions"][:tokens])
            ones = used
        else:
            ones = batch.num_ones
            first = batch.seq_lens - batch.q_lens - host["starts"][:used]  # position of a row's first token, less its place
            host["positions"][:tokens] = np.arange(tokens) + np.repeat(first, batch.q_lens)
            host["late_starts"][: used - ones + 1] = host["starts"][ones : used + 1] - host["starts"][ones]
        host["states"][:ones] = [row.state for row in batch.rows[:ones]]
        host["block_tables"][:used, : batch.block_tables.shape[1]] = batch.block_tables
        self._pad(used, num_rows, tokens)

    def fill_padding(self, num_rows: int) -> None:
        """Write down a step of which every row is padding."""
        self._turn()
        self._pad(0, num_rows, 0)

    def fill_lengths(self, lengths: Sequence[int]) -> None:
        """Write down sequences of these lengths, one token each, in blocks 0, 1, 2, ..., shared by all."""
        self._turn()
        self._pad(0, len(lengths), 0)
        host = self.host.arrays
        host["seq_lens"][: len(lengths)] = lengths
        host["block_tables"][: len(lengths)] = np.arange(host["block_tables"].shape[1])

    def _turn(self) -> None:
        self.host = self._hosts[self.host is self._hosts[0]]

    def _pad(self, begin: int, end: int, num_tokens: int) -> None:
        """Rows [begin, end) of one token that is written nowhere and sees no key: one that saw a key would be a sequence more.

        Neighbours in the line that a kernel deals in shares of equal tiles, they would be one share's, which all wait for.
        """
        if begin == end:
            return
        host, rows, tokens = self.host.arrays, slice(begin, end), slice(num_tokens, num_tokens + end - begin)
        host["tokens"][tokens] = host["positions"][tokens] = 0
        host["slots"][tokens] = PADDING_SLOT
        host["seq_lens"][rows] = 0
        host["block_tables"][rows, 0] = 0
        host["starts"][begin + 1 : end + 1] = num_tokens + np.arange(1, end - begin + 1)
        host["states"][rows] = self._no_state

    def fill_samples(self, places: list[int], states: list[int]) -> None:
        """Write down which query tokens are sampled from, and which states take what comes of it."""
        self.host.arrays["sampled_from"][: len(places)] = places
        self.host.arrays["sampled_states"][: len(states)] = states

    def upload(self, num_rows: int) -> None:
        """Copy to the device all but the tables of rows that are not in use; on the current stream, without waiting."""
        end = self._tables_at + 4 * num_rows * self.device.block_tables.shape[1]
        self._buffer[:end].copy_(self.host.buffer[:end], non_blocking=True)

    def write_step(self, num_tokens: int) -> CacheWriteStep:
        """The slots of a step."""
        host = self.host.arrays["slots"]
        return CacheWriteStep(slot_mapping=self.device.slots[:num_tokens], host_slot_mapping=host[:num_tokens])

    def attention_step(self, begin: int, end: int, late: bool = False) -> AttentionStep:
        """The tables of rows [begin, end); `late` where query tokens are counted from row `begin` on."""
        starts = "late_starts" if late else "starts"
        rows, edges = slice(begin, end), slice(0, end - begin + 1)
        device, host = self.device, self.host.arrays
        return AttentionStep(
            block_tables=device.block_tables[rows], seq_lens=device.seq_lens[rows],
            query_start_loc=getattr(device, starts)[edges], host_block_tables=host["block_tables"][rows],
            host_seq_lens=host["seq_lens"][rows], host_query_start_loc=host[starts][edges],
        )  # fmt: skip


def _arrays(buffer: torch.Tensor, places: dict[str, tuple[int, int, tuple[int, ...], torch.dtype]]) -> Arrays:
    return Arrays(**{
        name: buffer[begin : begin + size].view(dtype).view(shape) for name, (begin, size, shape, dtype) in places.items()
    })  # fmt: skip
