"""A record: what came of one implementation on one case, as one line of JSON. SI units throughout."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

SCHEMA = 1
STATUSES = ("ok", "wrong", "unsupported", "skipped", "failed", "timeout")


class RecordError(ValueError):
    """A line that is no record of this schema; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples:
    """A measured quantity: one median a visit, its own median and the confidence interval over visits. Seconds."""

    median: float
    low: float
    high: float
    samples: tuple[float, ...]


#: How a flag begins that says what each of two timers measured, which differ by more than they may.
TIMERS_DISAGREE = "timers disagree"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One row of a run. `None` is "not measured"; `reason` says why where the status is not "ok".

    run, suite, started_at          the run's stamp, the suite's name, ISO 8601 in UTC
    case, case_digest, shape        the case's name, digest, and all its fields
    impl, layout, role, params      the entry, its layout, "implementation", "control" or "reader", parameters used
    status, reason, flags           one of STATUSES; flags are doubts and remarks: "throttled", "never converged", ...
    device, device_kind             "nvidia-h200", "cuda"
    unit                            which one of its kind: {"name": "cuda:1", "uuid": "GPU-..."}, "node" in a cluster
    toolchain                       versions of what built and ran it, and the project's revision
    check                           by input family ("plain", "needles"): worst error over what was allowed, and where
    format_error                    what a quantised cache changes in the output, whoever reads it: median L2 of rows, a share
    launch_s, plan_s                GPU or wall seconds of one launch; of one plan from an idle device until it is idle again
    host_s, plan_host_s             seconds after which a launch, a plan has returned to the host, in steady state
    traffic_bytes, flops            what must be moved and computed at least
    ceiling_s, ceiling_by           seconds in which the best reader reads the same blocks, and its name
    ceiling_share                   ceiling_s / launch_s
    floor_s                         seconds of a launch that does nothing, timed in the same way: no row takes less
    workspace_bytes, memory         declared; {"allocator_peak_bytes", "nvml_bytes"} as measured
    nvml                            clocks, temperature, throttle reasons around the samples
    power_w, energy_j               instantaneous power, and energy a launch, over a window of their own
    kernels                         name, registers, shared_bytes, spill_bytes, digest of each compiled kernel
    ledger                          what was inside the timed region and what was not
    serving                         of a row of `serve`, whose launch_s is a whole run: tokens/s, TTFT, TPOT, ITL, steps
    """

    run: str
    suite: str
    started_at: str
    op: str
    case: str
    case_digest: str
    shape: Mapping[str, Any]
    impl: str
    layout: str
    status: str
    device: str
    device_kind: str
    toolchain: Mapping[str, str]
    role: str = "implementation"
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reason: str | None = None
    flags: tuple[str, ...] = ()
    check: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    format_error: float | None = None
    launch_s: Samples | None = None
    plan_s: Samples | None = None
    host_s: float | None = None
    plan_host_s: float | None = None
    traffic_bytes: int | None = None
    flops: int | None = None
    unit: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ceiling_s: float | None = None
    ceiling_by: str | None = None
    ceiling_share: float | None = None
    floor_s: float | None = None
    workspace_bytes: int | None = None
    memory: Mapping[str, int] = dataclasses.field(default_factory=dict)
    nvml: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    power_w: float | None = None
    energy_j: float | None = None
    kernels: tuple[Mapping[str, Any], ...] = ()
    ledger: Mapping[str, str] = dataclasses.field(default_factory=dict)
    serving: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise RecordError(f"status must be one of {', '.join(STATUSES)} (got {self.status!r})")
        if self.status != "ok" and not self.reason:
            raise RecordError(f"a record with status {self.status!r} must give its reason")

    @property
    def row(self) -> str:
        """The implementation as shown everywhere: cuda.split_kv[NHD]."""
        return f"{self.impl}[{self.layout}]"

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What may be compared across runs: case digest, implementation, layout, device."""
        return (self.case_digest, self.impl, self.layout, self.device)

    def to_line(self) -> str:
        """Return one line of strict JSON; a number that JSON lacks (NaN, infinity) becomes its name."""
        return json.dumps(_plain(dataclasses.asdict(self)), separators=(",", ":"), allow_nan=False)


def unit_of(device: Mapping[str, Any]) -> dict[str, str]:
    """Return the `unit` of a device's facts (harness.device.Device): as torch names it and, of a GPU, its UUID."""
    return {name: device[name] for name in ("name", "uuid") if device.get(name)}


def parse_line(line: str) -> Record:
    """Return the record of one line. Raises RecordError for anything else; executes nothing, trusts nothing."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not JSON: {error}") from error
    if not isinstance(data, dict):
        raise RecordError(f"not an object (got {type(data).__name__})")
    if is_deep(data):
        raise RecordError(f"nested more than {DEEPEST} deep")
    if data.get("schema") is True or data.get("schema") != SCHEMA:
        raise RecordError(f"schema must be {SCHEMA} (got {data.get('schema')!r})")
    known = {field.name: field for field in dataclasses.fields(Record)}
    missing = [name for name, field in known.items() if _required(field) and name not in data]
    if missing:
        raise RecordError(f"lacks {', '.join(missing)}")
    values = {name: _typed(name, value) for name, value in data.items() if name in known}
    return Record(**values)


_TEXTS = {
    "run",
    "suite",
    "started_at",
    "op",
    "case",
    "case_digest",
    "impl",
    "layout",
    "status",
    "device",
    "device_kind",
    "role",
}
_LARGEST = 1e300
#: levels of lists and objects in each other; ours have five, and what copies or writes a record calls itself for each
DEEPEST = 50
_OPTIONAL_TEXTS = {"reason", "ceiling_by"}
_NUMBERS = {
    "format_error", "host_s", "plan_host_s", "traffic_bytes", "flops", "ceiling_s", "ceiling_share", "floor_s",
    "workspace_bytes", "power_w", "energy_j",
}
_MAPPINGS = {"shape", "params", "check", "memory", "nvml", "serving"}
#: mappings of names to texts
_FACTS = {"unit", "toolchain"}


def _typed(name: str, value: Any) -> Any:
    """Check one field's type, so that what reads records need not."""
    if name in ("launch_s", "plan_s"):
        return _samples(name, value)
    if name in ("flags", "kernels"):
        of = str if name == "flags" else dict
        return tuple(
            _checked(name, value, list, all(isinstance(item, of) for item in value) if isinstance(value, list) else False)
        )
    if name in _TEXTS:
        return _checked(name, value, str)
    if name in _FACTS:
        return _checked(name, value, dict, isinstance(value, dict) and all(isinstance(fact, str) for fact in value.values()))
    if name == "ledger":
        return {topic: _text(remark) for topic, remark in _checked(name, value, dict).items()}
    if name in _MAPPINGS:
        return _checked(name, value, dict)
    if value is not None and name in _OPTIONAL_TEXTS:
        return _checked(name, value, str)
    if value is not None and name in _NUMBERS:
        return _checked(name, value, (int, float), _is_number(value))
    return value


def _checked(name: str, value: Any, of: Any, also: bool = True) -> Any:
    if not isinstance(value, of) or not also:
        raise RecordError(f"{name} has the wrong type (got {type(value).__name__})")
    return value


def _text(remark: Any) -> str:
    """A remark of a ledger; whatever else an implementation left there, as JSON."""
    return remark if isinstance(remark, str) else json.dumps(remark)


def _samples(name: str, value: Any) -> Samples | None:
    if value is None:
        return None
    _checked(name, value, dict)
    samples = value.get("samples")
    numbers = [value.get("median"), value.get("low"), value.get("high"), *(samples if isinstance(samples, list) else [None])]
    _checked(name, value, dict, bool(samples) and all(_is_number(n) and n > 0 for n in numbers))
    return Samples(median=value["median"], low=value["low"], high=value["high"], samples=tuple(value["samples"]))


def is_deep(value: Any) -> bool:
    """Whether lists and objects lie in each other more than DEEPEST levels deep."""
    level = [value]
    for _ in range(DEEPEST + 1):
        inner = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        level = [item for items in inner for item in items]
    return bool(level)


def _is_number(value: Any) -> bool:
    """Whether it is one, and finite; JSON knows whole numbers that no float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _plain(value: Any) -> Any:
    """Turn mappings and sequences into what JSON has, a non-finite number into its name, anything else into its text.

    An implementation says of itself what it likes; no run shall end for it.
    """
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    item = getattr(value, "item", None)  # a NumPy or torch scalar
    return _plain(item()) if callable(item) and getattr(value, "ndim", None) == 0 else str(value)
