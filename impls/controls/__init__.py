"""Controls: wrong on purpose, so that the checker can be checked. Plain data; docs/audit.md says how they are used.

Most are edits: a right implementation with a few words replaced. The others compute rightly and behave wrongly.
"""

from __future__ import annotations

from harness.control import Control, Shows
from impls.controls import cuda_edits, feature_edits, numpy_edits, torch_edits, triton_edits

_ANY = Shows(at_least={"max_seq_len": 1})


def _behaviour(name: str, prepare: str, fault: str, **entry: object) -> Control:
    fields = {"op": "attention", "shows": _ANY, **entry}
    return Control(name=f"control.{name}", prepare=f"impls.controls.behaviour:{prepare}", fault=fault, note=fault, **fields)  # type: ignore[arg-type]


BEHAVIOURS = (
    _behaviour("stale_result", "stale", "once warm, an earlier launch's answer is given to every other one", only_timed=True),
    _behaviour("result_of_another_case", "remembered", "an answer is remembered by shape, whatever the values"),
    _behaviour("late", "late", "once warm, work is done in a thread, past the timer", only_timed=True, graph=False),
    _behaviour("first_plan", "first_plan", "the plan of another batch is used (vllm#17283)"),
    _behaviour(
        "plan_by_address", "plan_by_address", "a plan is kept by the address of tables that are written anew each step",
        shows=Shows(at_least={"num_blocks_of_longest": 2}),
    ),
    _behaviour("right_where_watched", "watched", "right where memory is poisoned, as under a checker, and nowhere else"),
    _behaviour("largest_of_outputs", "largest_of_outputs", "a maximum is begun with what lay in the output, not with -inf"),
    _behaviour("own_judge", "own_judge", "functions by which it is judged are replaced by its own"),
    _behaviour(
        "first_slots", "first_slots", "a stale slot_mapping in a reused buffer (vllm-ascend#3482)",
        op="cache_write", shows=Shows(at_least={"num_written": 1}),
    ),
    _behaviour(
        "flushed_writes", "flushed_writes", "a write passes through arithmetic, which flushes subnormals",
        op="cache_write", shows=Shows(at_least={"num_written": 1}),
    ),
)  # fmt: skip

CONTROLS: tuple[Control, ...] = (
    *numpy_edits.EDITS, *torch_edits.EDITS, *triton_edits.EDITS, *cuda_edits.EDITS, *feature_edits.EDITS, *BEHAVIOURS,
)  # fmt: skip
