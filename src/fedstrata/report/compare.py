"""Compares two run folders bit for bit, leaving out what is measured and who asked how often."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from fedstrata.errors import RunFolderError
from fedstrata.record.checkpoint import load_checkpoint
from fedstrata.record.files import TEMPORARY_SUFFIX, read_json
from fedstrata.report.stored import CLIENTS_FILE, ROUNDS_FILE, RUN_FILE, SUMMARY_FILE, read_any_records, read_any_run

MAX_LINES = 50
_MAX_LINES_PER_PART = 8
_SHOWN_CHARACTERS = 60
_MEASURED = "measured"
_IGNORED = {RUN_FILE: {"name", "spec.name"}, SUMMARY_FILE: {"name", "num_test_reads"}}
_FILES = (RUN_FILE, ROUNDS_FILE, CLIENTS_FILE, SUMMARY_FILE)
_FOLDERS = ("checkpoint", "best", "last", "adapter", "clients")
_CHECKPOINT = "checkpoint/state.safetensors"


def compare_runs(first: Path, second: Path) -> list[str]:
    """Every difference between two runs, one line each.

    Compared are the values of `run.json`, `rounds.jsonl`, `clients.jsonl` and `summary.json` (everything under a key
    `measured`, the run's name and `num_test_reads` aside) and the bytes of every file in `checkpoint/`, `best/`,
    `last/`, `adapter/` and `clients/`. The order of keys counts, as it is part of the bytes.

    Args:
        first: A run folder.
        second: Another one.

    Returns:
        Lines such as `rounds.jsonl line 3 (round 3): train_loss: 0.5 != 0.25`; empty if the runs are equal. At most
        50 differences are listed, at most 8 of one file or folder; further ones are counted.

    Raises:
        RunFolderError: If one of them is not a run folder, or its records are damaged.
    """
    for folder in (first, second):
        read_any_run(folder)
    found = {name: list(_file(first, second, name)) for name in _FILES}
    found |= {name + "/": list(_folder(first, second, name)) for name in _FOLDERS}
    return _shortened(found)


def _shortened(found: Mapping[str, list[str]]) -> list[str]:
    """The lines of all parts, long parts and the whole cut to their limits, with the number that was left out."""
    lines: list[str] = []
    left_out = 0
    for name, differences in found.items():
        shown = differences[: min(_MAX_LINES_PER_PART, max(MAX_LINES - len(lines), 0))]
        rest = len(differences) - len(shown)
        lines.extend(shown)
        if rest and shown:
            lines.append(f"{name}: {_further(rest)}")
        else:
            left_out += rest
    return [*lines, f"{_further(left_out)} in other files"] if left_out else lines


def _further(count: int) -> str:
    return f"{count} further difference{'s' if count > 1 else ''}"


def _file(first: Path, second: Path, name: str) -> Iterator[str]:
    """Compares one file of records."""
    a, b = first / name, second / name
    if not (a.exists() and b.exists()):
        if a.exists() or b.exists():
            yield f"{name}: only in {first if a.exists() else second}"
        return
    if name.endswith(".json"):
        yield from (f"{name}: {line}" for line in _values(read_json(a), read_json(b), _IGNORED[name]))
        return
    left, right = read_any_records(a), read_any_records(b)
    if len(left) != len(right):
        yield f"{name}: {len(left)} lines != {len(right)} lines"
    for number, (one, other) in enumerate(zip(left, right, strict=False), start=1):
        place = f"round {one.get('server_round')}" + (f", {one['client']}" if "client" in one else "")
        for line in _values(one, other):
            yield f"{name} line {number} ({place}): {line}"


def _values(a: Any, b: Any, ignored: set[str] | None = None, key: str = "") -> Iterator[str]:
    """Compares two JSON values; 0 and 0.0 differ, as they do in the file."""
    if isinstance(a, dict) and isinstance(b, dict):
        known = {k for k in a.keys() | b.keys() if k != _MEASURED and f"{key}{k}" not in (ignored or ())}
        for name in [*(k for k in a if k in known), *(k for k in b if k in known and k not in a)]:
            if name in a and name in b:
                yield from _values(a[name], b[name], ignored, f"{key}{name}.")
            else:
                side, value = ("first", a[name]) if name in a else ("second", b[name])
                yield f"{key}{name}: only in the {side}: {_cut(json.dumps(value, ensure_ascii=False), 0)}"
        orders = [[k for k in keys if k in known and k in a and k in b] for keys in (a, b)]
        if orders[0] != orders[1]:
            yield f"{key.rstrip('.') or 'top level'}: keys in another order: {_pair(*orders)}"
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _values(one, other, ignored, f"{key.rstrip('.')}[{i}].")
    elif json.dumps(a) != json.dumps(b):
        lengths = f"{len(a)} entries != {len(b)} entries: " if isinstance(a, list) and isinstance(b, list) else ""
        yield f"{key.rstrip('.')}: {lengths}{_pair(a, b)}"


def _pair(a: Any, b: Any) -> str:
    """Both values; of long ones the part where they begin to differ."""
    one, other = (json.dumps(v, ensure_ascii=False) for v in (a, b))
    same = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
    start = max(0, same - 12) if max(len(one), len(other)) > _SHOWN_CHARACTERS else 0
    return f"{_cut(one, start)} != {_cut(other, start)}"


def _cut(text: str, start: int) -> str:
    end = start + _SHOWN_CHARACTERS
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")


def _folder(first: Path, second: Path, name: str) -> Iterator[str]:
    """Compares every file below a folder, byte for byte."""
    left, right = _files_below(first, name), _files_below(second, name)
    for path in sorted(left | right):
        if path not in left or path not in right:
            yield f"{path}: only in {first if path in left else second}"
            continue
        a, b = (first / path).read_bytes(), (second / path).read_bytes()
        if a != b:
            yield from (f"{path}: {line}" for line in _bytes(a, b, first, second, path))


def _files_below(run: Path, name: str) -> set[str]:
    """Files below a folder as paths relative to the run, without what an interrupted write left."""
    relative = (p.relative_to(run) for p in (run / name).rglob("*") if p.is_file())
    return {p.as_posix() for p in relative if not any(part.endswith(TEMPORARY_SUFFIX) for part in p.parts)}


def _bytes(a: bytes, b: bytes, first: Path, second: Path, path: str) -> Iterator[str]:
    """Says what differs in two files with different bytes: tensors and state, keys, or the place of the first byte."""
    lines: list[str] = []
    try:
        if path == _CHECKPOINT:
            lines = list(_checkpoints(first / path, second / path))
        elif path.endswith(".safetensors"):
            lines = list(_tensors(load(a), load(b)))
        elif path.endswith(".json"):
            lines = list(_values(json.loads(a), json.loads(b)))
    except (RunFolderError, SafetensorError, ValueError, KeyError, TypeError):
        lines = []  # damaged, or of a type that numpy lacks: the bytes say enough
    if lines:
        yield from lines
        return
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    yield f"bytes differ from byte {place} on ({len(a)} bytes != {len(b)} bytes)"


def _checkpoints(first: Path, second: Path) -> Iterator[str]:
    (one, one_hash), (other, other_hash) = load_checkpoint(first), load_checkpoint(second)
    if one_hash != other_hash:
        yield f"spec_hash: {_pair(one_hash[:12], other_hash[:12])}"
    for a, b in ((one.tensors, other.tensors), (one.moments, other.moments)):
        yield from _tensors(a, b)
    yield from _tensors(one.base.to_tensors(), other.base.to_tensors())
    for group in sorted(one.groups.keys() | other.groups.keys()):
        yield from _tensors(one.groups.get(group, {}), other.groups.get(group, {}))
    for field in fields(one):
        if field.name not in ("tensors", "moments", "base", "groups"):
            a, b = (json.loads(json.dumps(getattr(state, field.name))) for state in (one, other))
            yield from _values(a, b, key=f"{field.name}.")


def _tensors(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Compares tensors by their bits, so that 0 and −0 differ."""
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other:
            yield f"tensor {name}: only in the {'first' if name in one else 'second'}"
            continue
        a, b = one[name], other[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            yield f"tensor {name}: {a.dtype} {list(a.shape)} != {b.dtype} {list(b.shape)}"
        elif a.tobytes() != b.tobytes():
            bits = [np.ascontiguousarray(t).reshape(-1).view(np.uint8).reshape(a.size, -1) for t in (a, b)]
            count = int(np.count_nonzero((bits[0] != bits[1]).any(axis=1)))
            with np.errstate(invalid="ignore", over="ignore"):
                largest = float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())
            yield f"tensor {name}: {count} of {a.size} values differ, by at most {largest:.3g}"
