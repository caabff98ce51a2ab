"""Cases of the user's own: --shape on the command line, --case-file on disk, and --case to choose by name.

Nothing that is read is executed, and every mistake is one line: where it stands, which rule, what was got.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.names import UsageError, nearest, read_text
from harness.ops import tuples
from harness.ops.attention import AttentionCase
from harness.ops.block_copy import BlockCopyCase
from harness.ops.cache_write import CacheWriteCase
from harness.ops.case import Case, CaseError

#: sequences that LENxCOUNT may spell; a slip of the finger must not fill memory
MAX_SEQS = 1 << 20

_CASE_TYPES: dict[str, type[Case]] = {kind.op: kind for kind in (AttentionCase, CacheWriteCase, BlockCopyCase)}
_SHAPE_KEYS = (
    "q", "kv", "d", "bs", "lens", "qlens", "dtype", "name", "window", "softcap", "alibi", "sinks", "kv_dtype", "kv_scales",
    "prefix",
)
_SHAPE_NEEDS = ("q", "kv", "d", "lens")


def parse_shape(text: str) -> AttentionCase:
    """Return the case of a --shape such as "q=32,kv=8,d=128,bs=16,lens=8192x64+17".

    q, kv, d, bs    query heads, KV heads, head_dim, block size (16 if left out)
    lens, qlens     LEN or LENxCOUNT, joined by "+"; qlens left out is decode
    dtype, name     bf16 and a name made of the shape if left out
    window          keys that a token sees at most; softcap: a number; alibi, sinks: 1 or 0
    kv_dtype        e4m3 or e5m2, with kv_scales tensor (if left out) or head
    prefix          tokens that every sequence shares with the first, whole blocks

    Raises UsageError with the key, the rule and what was got.
    """
    values: dict[str, str] = {}
    for part in text.replace(" ", "").split(","):
        key, equals, value = part.partition("=")
        if key not in _SHAPE_KEYS:
            raise UsageError(f"--shape {text}: unknown key {key!r}; the keys are {', '.join(_SHAPE_KEYS)}")
        if not equals or not value:
            raise UsageError(f"--shape {text}: {key} needs a value, as in {key}=...")
        if key in values:
            raise UsageError(f"--shape {text}: {key} is given twice")
        values[key] = value
    missing = [key for key in _SHAPE_NEEDS if key not in values]
    if missing:
        raise UsageError(f"--shape {text}: lacks {', '.join(missing)}; for example q=32,kv=8,d=128,bs=16,lens=8192x64")
    try:
        return AttentionCase(
            name=values.get("name", _shape_name(values)),
            num_q_heads=_whole("q", values["q"]),
            num_kv_heads=_whole("kv", values["kv"]),
            head_dim=_whole("d", values["d"]),
            block_size=_whole("bs", values.get("bs", "16")),
            seq_lens=parse_lengths("lens", values["lens"]),
            q_lens=parse_lengths("qlens", values["qlens"]) if "qlens" in values else (),
            dtype=values.get("dtype", "bf16"),
            **_features(values),
        )
    except (CaseError, ValueError) as error:
        raise UsageError(f"--shape {text}: {error}") from error


def _features(values: Mapping[str, str]) -> dict[str, Any]:
    """Fields of what a shape asks for besides its lengths."""
    fields: dict[str, Any] = {key: values[key] for key in ("kv_dtype", "kv_scales") if key in values}
    if "window" in values:
        fields["window"] = _whole("window", values["window"])
    if "softcap" in values:
        fields["softcap"] = _number("softcap", values["softcap"])
    for key in ("alibi", "sinks"):
        if key in values:
            if values[key] not in ("0", "1"):
                raise ValueError(f"{key} must be 1 or 0 (got {values[key]!r})")
            fields[key] = values[key] == "1"
    if "prefix" in values:
        others = len(parse_lengths("lens", values["lens"])) - 1
        fields["prefix"] = ((0, 0), *((0, _whole("prefix", values["prefix"])),) * others)
    return fields


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{key} must be a number (got {text!r})") from None


def parse_lengths(key: str, text: str) -> tuple[int, ...]:
    """Return the lengths of LEN or LENxCOUNT, joined by "+": 4096x2+17 is (4096, 4096, 17). Raises ValueError.

    No sequences at all are a case of the suite `edges`; here a count of 0 is a slip, and would check nothing.
    """
    lengths: list[int] = []
    for part in text.split("+"):
        length, times, count = part.partition("x")
        repeats = _whole(key, count) if times else 1
        if not repeats:
            raise ValueError(f"{key} must spell at least one sequence in each LENxCOUNT (got {part!r})")
        if len(lengths) + repeats > MAX_SEQS:
            raise ValueError(f"{key} must spell at most {MAX_SEQS} sequences (got {text!r})")
        lengths += [_whole(key, length)] * repeats
    return tuple(lengths)


def _whole(key: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise ValueError(f"{key} must be a whole number, or for lengths LENxCOUNT joined by '+' (got {text!r})")
    return int(text)


def _shape_name(values: dict[str, str]) -> str:
    """A name that tells shapes apart: shape.q32_kv8_d128_bs16_lens8192x64-17."""
    text = "_".join(key + value for key, value in values.items() if key != "name")
    return "shape." + re.sub(r"[^a-z0-9_.]", "-", text.lower())


def load_case_file(path: str) -> tuple[Case, ...]:
    """Return the cases of a JSON or TOML file: a list (in TOML: [[case]] tables) of {"op": ..., "name": ..., fields}.

    `op` left out is "attention"; lengths are lists of numbers, or text as in --shape ("8192x64+17").
    Raises UsageError with the file, the entry, the rule and what was got.
    """
    entries = _read(path)
    cases: dict[str, Case] = {}
    for index, entry in enumerate(entries, 1):
        label = f"--case-file {path}, entry {index}"
        case = _case(label, entry)
        if case.name in cases:
            raise UsageError(f"{label}: a case named {case.name!r} stands in the file already; rename one")
        cases[case.name] = case
    return tuple(cases.values())


def _each_once(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; the reader alone would keep the last of two values and drop the other."""
    names = [name for name, _ in fields]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} is given twice in one object")
    return dict(fields)


def _read(path: str) -> list[Any]:
    try:
        text = read_text(Path(path))
        data = tomllib.loads(text) if path.endswith(".toml") else json.loads(text, object_pairs_hook=_each_once)
    except OSError as error:
        raise UsageError(f"--case-file {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--case-file {path}: not {'TOML' if path.endswith('.toml') else 'JSON'}: {error}") from error
    if isinstance(data, dict) and set(data) == {"case"}:
        data = data["case"]
    if not isinstance(data, list) or not data:
        raise UsageError(f"--case-file {path}: must hold a list of at least one case (got {type(data).__name__})")
    return data


def _case(label: str, entry: Any) -> Case:
    if not isinstance(entry, dict):
        raise UsageError(f"{label}: must be an object of fields (got {type(entry).__name__})")
    op = entry.get("op", "attention")
    if not isinstance(op, str) or op not in _CASE_TYPES:
        raise UsageError(f"{label}: op must be one of {', '.join(_CASE_TYPES)} (got {op!r})")
    fields = {field.name: field for field in dataclasses.fields(_CASE_TYPES[op])}
    given = {key: value for key, value in entry.items() if key != "op"}
    for key in given:
        if key not in fields:
            raise UsageError(f"{label}: {op} has no field {key!r}; the fields are {', '.join(fields)}")
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in given]
    if missing:
        raise UsageError(f"{label}: lacks {', '.join(missing)}")
    try:
        return _CASE_TYPES[op](**{key: _typed(key, value, str(fields[key].type)) for key, value in given.items()})
    except (CaseError, ValueError) as error:
        raise UsageError(f"{label}: {error}") from error


def _typed(key: str, value: Any, annotation: str) -> Any:
    """Turn one JSON value into the field's type, or raise ValueError: the cases check values, not types."""
    if annotation.startswith("tuple"):
        if isinstance(value, str):
            return parse_lengths(key, value)
        return tuples(value)  # the case refuses anything else
    kinds: dict[str, Any] = {"int": int, "str": str, "bool": bool, "float": (int, float)}
    wanted = kinds[annotation.removesuffix(" | None")]
    if value is None and annotation.endswith(" | None"):
        return None
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise ValueError(f"{key} must be of type {annotation} (got {value!r})")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key} must be finite (got {value!r})")
    return value


def select(cases: Iterable[Case], patterns: Sequence[str]) -> list[Case]:
    """Return the cases whose names match one of the globs, in their own order; no pattern is all of them.

    Raises UsageError, with the nearest names, for a pattern that matches nothing.
    """
    every = list(cases)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(case.name, pattern) for case in every):
            raise UsageError(f"no case matches {pattern!r}{nearest(pattern, [case.name for case in every])}")
    return [case for case in every if not patterns or any(fnmatch.fnmatchcase(case.name, p) for p in patterns)]
