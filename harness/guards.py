"""Canaries around every tensor that a kernel is given, and hashes of what it must not change.

    | 4 KiB of canary | the tensor | 4 KiB of canary |

Each tensor lies in an allocation of its own, so what is written past its end meets the canary and not a neighbour. The
canary is a NaN in every type, and no block id, so that reading past the end shows too.

Where a tool of compute-sanitizer watches (`watched_by`), it must see a tensor's true bounds and who wrote it first:
memcheck takes a canary for memory like any other, and initcheck takes what was filled for written. Under these two a
tensor is all of its allocation, nothing of it is filled, and the tool is the guard.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from harness.check import fill_unwritten

GUARD_BYTES = 4096
ALIGNMENT = 256  # bytes, of every tensor: as from CUDA's own allocator
#: 0x7FF5 is a NaN as f16, bf16, and twice as f32 and f64; as int32 it is far above every block id
_CANARY = 0x7FF5
#: tools of compute-sanitizer that watch allocations of exact size
EXACT = ("memcheck", "initcheck")
#: words hashed at a time
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 23}
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclasses.dataclass(eq=False, kw_only=True)
class Guarded:
    """One allocation, its tensor between two canaries or without any.

    name      what is in it, as a verdict calls it
    buffer    all of it, [bytes] uint8; the tensor's bytes are begin..begin + size
    sealed    what its bytes hashed to when `seal` was called, a number on the device
    """

    name: str
    buffer: torch.Tensor
    begin: int
    size: int
    sealed: torch.Tensor | None = None

    @functools.cached_property
    def words(self) -> torch.Tensor:
        """Its bytes as the widest integers that end where it ends."""
        widest = next(dtype for dtype in _WORDS if self.size % dtype.itemsize == 0)
        return self.buffer[self.begin : self.begin + self.size].view(widest)

    @property
    def has_canaries(self) -> bool:
        return len(self.buffer) > self.size

    @functools.cached_property
    def canaries(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The GUARD_BYTES before and those after, where it has them."""
        end = self.begin + self.size
        return self.buffer[self.begin - GUARD_BYTES : self.begin], self.buffer[end : end + GUARD_BYTES]

    def view(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The tensor itself, contiguous."""
        return self.buffer[self.begin : self.begin + self.size].view(dtype).view(tuple(shape))


@functools.cache
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers, all different: a word times one of them, modulo 2**64, tells what the word was."""
    return (2 * torch.arange(count, device=device) + 1) * 0x1E3779B97F4A7C15


def allocate(name: str, size: int, device: str | torch.device) -> Guarded:
    """Take `size` bytes between two canaries; what the bytes hold is canary, too. See `watched_by` for the exception."""
    if _tool.get() in EXACT:
        return Guarded(name=name, buffer=torch.empty(size, dtype=torch.uint8, device=device), begin=0, size=size)
    buffer = torch.empty(size + 2 * GUARD_BYTES + ALIGNMENT + 8, dtype=torch.uint8, device=device)
    begin = GUARD_BYTES + -(buffer.data_ptr() + GUARD_BYTES) % ALIGNMENT
    # Even in length and place: the canary is written as 16-bit words.
    guarded = Guarded(name=name, buffer=buffer[: len(buffer) // 2 * 2], begin=begin, size=size)
    guarded.buffer.view(torch.int16).fill_(_CANARY)
    return guarded


def empty(name: str, shape: Sequence[int], dtype: torch.dtype, device: str | torch.device) -> tuple[torch.Tensor, Guarded]:
    """Make a guarded tensor, contiguous, its content left open."""
    guarded = allocate(name, math.prod(shape) * dtype.itemsize, device)
    return guarded.view(shape, dtype), guarded


def empty_each(
    names: Sequence[str], shape: Sequence[int], dtype: torch.dtype, device: str | torch.device
) -> tuple[list[torch.Tensor], list[Guarded]]:
    """Make guarded tensors that are alike, each between canaries of its own, in one allocation: many are made at once."""
    size = math.prod(shape) * dtype.itemsize
    if _tool.get() in EXACT or len(names) < 2:
        held = [allocate(name, size, device) for name in names]
    else:
        pitch = -(-(size + 2 * GUARD_BYTES) // ALIGNMENT) * ALIGNMENT
        whole = torch.empty(len(names) * pitch + ALIGNMENT, dtype=torch.uint8, device=device)
        whole.view(torch.int16).fill_(_CANARY)
        buffers = whole[-whole.data_ptr() % ALIGNMENT :][: len(names) * pitch].view(len(names), pitch).unbind()
        held = [
            Guarded(name=name, buffer=buffer, begin=GUARD_BYTES, size=size) for name, buffer in zip(names, buffers, strict=True)
        ]
    return [guarded.view(shape, dtype) for guarded in held], held


def house(tensors: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[Guarded]]:
    """Copy tensors into guarded allocations, strides as they are; views of one storage that have gaps share one."""
    housed: list[torch.Tensor] = []
    shared: dict[int, Guarded] = {}
    found: list[Guarded] = []
    for name, tensor in tensors.items():
        if tensor.is_contiguous():
            copy, guarded = empty(name, tensor.shape, tensor.dtype, tensor.device)
            found.append(guarded)
            housed.append(copy.copy_(tensor))
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in shared:
            names = [other for other, view in tensors.items() if view.untyped_storage().data_ptr() == storage.data_ptr()]
            guarded = allocate(" and ".join(names), storage.nbytes(), tensor.device)
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            guarded.view((len(whole),), torch.uint8).copy_(whole)
            shared[storage.data_ptr()] = guarded
            found.append(guarded)
        flat = shared[storage.data_ptr()].view((-1,), tensor.dtype)
        offset = flat.storage_offset() + tensor.storage_offset()
        housed.append(flat.as_strided(tensor.shape, tensor.stride(), offset))
    return housed, found


def seal(held: Sequence[Guarded]) -> None:
    """Note what these hash to now; what is sealed already keeps its hash."""
    fresh = [guarded for guarded in held if guarded.sealed is None]
    for guarded, sealed in zip(fresh, hashes(fresh).unbind(), strict=True):
        guarded.sealed = sealed


def changed(held: Sequence[Guarded]) -> list[str]:
    """Names of what no longer is as it was sealed."""
    sealed = [guarded for guarded in held if guarded.sealed is not None]
    if not sealed:
        return []
    same = (hashes(sealed) == torch.stack([guarded.sealed for guarded in sealed if guarded.sealed is not None])).tolist()
    return [guarded.name for guarded, is_same in zip(sealed, same, strict=True) if not is_same]


def hashes(held: Sequence[Guarded]) -> torch.Tensor:
    """[n] int64, on the device, in the order of the current stream: a number that any change of a single word changes, and
    others with odds of 2**-64 not.

    Allocations of one size are hashed together: rotated inputs are many, and an operation on each would take the host longer
    than all their bytes take the device.
    """
    alike: dict[tuple[int, torch.dtype], list[int]] = {}
    for index, guarded in enumerate(held):
        alike.setdefault((len(guarded.words), guarded.words.dtype), []).append(index)
    order: list[int] = []
    found = [torch.empty(0, dtype=torch.int64)] if not held else []
    for (count, _), indices in alike.items():
        at_once = max(1, _CHUNK[held[0].buffer.device.type] // max(count, 1))
        for some in (indices[at : at + at_once] for at in range(0, len(indices), at_once)):
            order += some
            found.append(_hash([held[index].words for index in some]))
    by_size = torch.cat(found)
    if order == sorted(order):
        return by_size
    place = sorted(range(len(order)), key=order.__getitem__)
    return by_size[torch.tensor(place).to(by_size.device)]


def _hash(alike: Sequence[torch.Tensor]) -> torch.Tensor:
    """The numbers of words that are alike in length and type."""
    device = alike[0].device
    chunk = _CHUNK[device.type]
    total = None
    for begin in range(0, max(len(alike[0]), 1), chunk):
        pieces = [words[begin : begin + chunk] for words in alike]
        stacked = torch.stack(pieces) if len(pieces) > 1 else pieces[0][None]
        of_pieces = (stacked * _weights(chunk, device)[: stacked.shape[1]]).sum(1)
        total = of_pieces if total is None else 31 * total + of_pieces
    assert total is not None
    return total


def broken(held: Sequence[Guarded]) -> list[str]:
    """Say which canaries were written over, how far, and make them whole again."""
    held = [guarded for guarded in held if guarded.has_canaries]
    if not held:
        return []
    whole = _whole_canaries(held[0].buffer.device)
    odd = [place % 2 for guarded in held for place in (guarded.begin, guarded.begin + guarded.size)]
    wanted = whole[torch.tensor(odd).to(whole.device)] if any(odd) else whole[:1].expand(len(odd), -1)
    written = torch.stack([canary for guarded in held for canary in guarded.canaries]) != wanted
    counts = written.sum(1).tolist()
    if not any(counts):
        return []
    found = []
    for index, guarded in enumerate(held):
        for side, count in enumerate(counts[2 * index : 2 * index + 2]):
            if count:
                bytes_at = written[2 * index + side].nonzero()[:, 0].tolist()
                found.append(_overrun(guarded.name, side, bytes_at))
        if any(counts[2 * index : 2 * index + 2]):
            for canary, pattern in zip(guarded.canaries, wanted[2 * index :], strict=False):
                canary.copy_(pattern)
    return found


@functools.cache
def _whole_canaries(device: torch.device) -> torch.Tensor:
    """[2, GUARD_BYTES]: a canary at an even byte, and one at an odd byte, which begins with a word's second half: it was
    written as 16-bit words from the buffer's start."""
    whole = torch.tensor([0xF5, 0x7F] * (GUARD_BYTES // 2), dtype=torch.uint8, device=device)
    return torch.stack([whole, whole.roll(1)])


def _overrun(name: str, side: int, bytes_at: Sequence[int]) -> str:
    gap = bytes_at[0] if side else GUARD_BYTES - 1 - bytes_at[-1]
    where = "past the end of" if side else "before the start of"
    many = "byte" if len(bytes_at) == 1 else "bytes"
    return f"wrote {len(bytes_at)} {many} {where} {name}" + (f", {gap} bytes away" if gap else "")


def restore(held: Sequence[Guarded], fresh: Sequence[Guarded]) -> None:
    """Copy the content of `fresh`, made in the same way, back into `held`."""
    for guarded, source in zip(held, fresh, strict=True):
        guarded.words.copy_(source.words)


def swap(held: Sequence[Guarded], others: Sequence[Guarded]) -> None:
    """Exchange the contents of allocations made in the same way, and what they were sealed with."""
    for one, other in zip(held, others, strict=True):
        kept = one.words.clone()
        one.words.copy_(other.words)
        other.words.copy_(kept)
        one.sealed, other.sealed = other.sealed, one.sealed


_watched: contextvars.ContextVar[list[Guarded] | None] = contextvars.ContextVar("watched", default=None)
_tool: contextvars.ContextVar[str | None] = contextvars.ContextVar("tool", default=None)


@contextlib.contextmanager
def watched_by(tool: str | None) -> Iterator[None]:
    """Within, make allocations as `tool` of compute-sanitizer wants them; None is no tool."""
    token = _tool.set(tool)
    try:
        yield
    finally:
        _tool.reset(token)


def leaves_unwritten() -> bool:
    """Whether outputs and workspace are left as they were allocated: initcheck tells who reads them before they are written."""
    return _tool.get() == "initcheck"


@contextlib.contextmanager
def watch(found: list[Guarded]) -> Iterator[None]:
    """Guard every `workspace` taken within, and append it to `found`."""
    token = _watched.set(found)
    try:
        yield
    finally:
        _watched.reset(token)


def workspace(shape: int | Sequence[int], dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
    """Take workspace, uninitialised, as `torch.empty` does; under the harness it is guarded, and full of NaN or -1.

    An implementation that needs zeros writes them.
    """
    found = _watched.get()
    if found is None:
        return torch.empty(shape, dtype=dtype, device=device)
    sizes = (shape,) if isinstance(shape, int) else shape
    tensor, guarded = empty(f"workspace[{len(found)}]", sizes, dtype, device)
    if not leaves_unwritten():
        fill_unwritten(tensor)
    found.append(guarded)
    return tensor
