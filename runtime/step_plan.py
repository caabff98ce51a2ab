"""A step that is planned on the host, once for all its layers: how a call on a GPU comes to read a shared prefix once.

    plan = StepPlan(query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, host=(tables, lens, starts))
    out, lse = torch.ops.pagedbench.paged_attention(query, ..., query_start_loc, plan=plan.id)    # a layer after the other
    plan.renew(block_tables, seq_lens, query_start_loc, host=(tables, lens, starts))              # the next step

A call of the operator alone sees no contents and finds nothing; a plan is given copies that an engine has on the host anyway.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from harness.ops.attention import AttentionStep
from runtime.op_plan import Asked, Plan, check_lengths, checked_spec, key_of

if TYPE_CHECKING:
    from runtime.op_plan import Tensors

_IDS = itertools.count(1)
_PLANS: weakref.WeakValueDictionary[int, StepPlan] = weakref.WeakValueDictionary()

OF_STEP = ("block_tables", "seq_lens", "query_start_loc")


class StepPlan:
    """What calls with `plan=self.id` launch, for one kind of layer: its shapes and options are those of the calls.

    tensors, options    as the operator takes them, of any layer of the kind
    host                copies of block_tables, seq_lens and query_start_loc on the host: NumPy arrays or tensors, int32

    It has a workspace of its own, and holds the step's tensors: keep it until its launches, and graphs of them, are done with.
    Raises ValueError for what does not go together.
    """

    def __init__(
        self, *tensors: torch.Tensor, host: Sequence[Any], scale: float | None = None, layout: str = "HND",
        max_q_len: int = 1, window: int | None = None, softcap: float | None = None,
        alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        named = {"alibi_slopes": alibi_slopes, "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale}
        layer = {name: tensor for name, tensor in named.items() if tensor is not None}
        self._asked = Asked(scale, layout, max_q_len, window, softcap)
        self._spec = checked_spec(tensors, layer, self._asked)
        _refuse_capture(tensors[0])
        self._plan = Plan(self._spec)
        self._fitting: set[Any] = set()  # forms of calls that were found to fit
        self.id = next(_IDS)
        self.renew(*tensors[3:], host=host)
        _PLANS[self.id] = self

    @property
    def ledger(self) -> dict[str, str]:
        """Remarks of the kernel's entry: how many runs of blocks are read once, and the like."""
        return dict(self._plan.prepared.ledger)

    def renew(
        self, block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, *, host: Sequence[Any]
    ) -> None:
        """Plan the next step, in these tensors: again the same ones where launches were captured. Not inside of a capture.

        What is shared is written to the device, for which the current stream is waited for.
        """
        of_step = (block_tables, seq_lens, query_start_loc)
        _refuse_capture(block_tables)
        if len(host) != len(of_step):
            raise ValueError(f"paged_attention: host must be copies of {', '.join(OF_STEP)} (got {len(host)} of them)")
        copies = [_on_host(name, copy, tensor) for name, copy, tensor in zip(OF_STEP, host, of_step, strict=True)]
        longest = block_tables.shape[1] * self._spec.block_size
        check_lengths(copies[1], copies[2], longest, self._spec.max_num_tokens, self._asked.max_q_len)
        step = AttentionStep(
            block_tables=block_tables, seq_lens=seq_lens, query_start_loc=query_start_loc,
            host_block_tables=copies[0], host_seq_lens=copies[1], host_query_start_loc=copies[2],
        )  # fmt: skip
        with torch.cuda.device_of(block_tables):  # type: ignore[no-untyped-call]
            self._plan.keep(step)
        self._num_tokens = step.num_tokens
        self._places = [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in of_step]

    def launch(
        self, tensors: Tensors, layer: dict[str, torch.Tensor], asked: Asked, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Attend to the step that was planned. Raises ValueError for a call of another kind of layer, or of other tables."""
        key = key_of(tensors, layer, asked)
        if key not in self._fitting:
            self._must_fit(checked_spec(tensors, layer, asked))
            self._fitting.add(key)
        if [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in tensors[3:]] != self._places:
            raise ValueError(f"paged_attention: {', '.join(OF_STEP)} must be the tensors that plan {self.id} was made of")
        query, end = tensors[0], self._num_tokens
        if end > len(query):
            raise ValueError(f"paged_attention: query must have the {end} tokens that plan {self.id} knows (got {len(query)})")
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            self._plan.launch(query[:end], *tensors[1:3], out[:end], lse[:end], **layer)

    def _must_fit(self, spec: Any) -> None:
        for name, planned in vars(self._spec).items():
            if (got := getattr(spec, name)) != planned:
                raise ValueError(f"paged_attention: plan {self.id} is for {name} {planned} (got {got})")


def find_plan(number: int) -> StepPlan:
    """The plan of this id. Raises ValueError where there is none, or none any more."""
    plan = _PLANS.get(number)
    if plan is None:
        raise ValueError(f"paged_attention: plan must be the id of a StepPlan that is alive (got {number})")
    return plan


def _on_host(name: str, copy: Any, tensor: torch.Tensor) -> np.ndarray:
    """A copy of `tensor` as an array of its own, which nobody writes to while it is planned by."""
    on_host = isinstance(copy, np.ndarray) or (isinstance(copy, torch.Tensor) and copy.device.type == "cpu")
    if not on_host:
        got = copy.device if isinstance(copy, torch.Tensor) else type(copy).__name__
        raise ValueError(f"paged_attention: host {name} must be a NumPy array, or a tensor on the CPU (got {got})")
    array = np.array(copy.numpy() if isinstance(copy, torch.Tensor) else copy)
    if array.shape != tuple(tensor.shape) or array.dtype != np.int32:
        rule = f"host {name} must have shape {tuple(tensor.shape)} and type int32, as the tensor has"
        raise ValueError(f"paged_attention: {rule} (got {array.shape} of {array.dtype})")
    return array


def _refuse_capture(tensor: torch.Tensor) -> None:
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("paged_attention: a step is planned on the host; do it before the capture of a CUDA graph")
