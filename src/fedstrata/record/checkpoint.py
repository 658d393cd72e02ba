"""The server's state: a value that is written atomically after every round."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fedstrata.core.merges import BaseLog
from fedstrata.core.tensors import NamedTensors
from fedstrata.core.wire import canonical_json
from fedstrata.errors import RunFolderError
from fedstrata.record.files import atomic_write

_SCHEMA = 1
_KEY = "fedstrata"
_BASE, _MOMENT, _GROUP = "base:", "moment:", "group:"
_TENSOR_FIELDS = frozenset({"tensors", "base", "moments", "groups"})


@dataclass(frozen=True)
class ServerState:
    """Everything that the next round depends on. All fields but `tensors` are JSON-ready.

    Attributes:
        tensors: The server's tensors by name, float32.
        server_round: The last finished round; 0 before the first.
        versions: Per stratum, the round that last changed it; 0 is the initial value.
        planner: The planner's state.
        selector: The selector's state.
        accepted: Per client, the round of its last accepted reply; its client state of that round counts.
        acknowledged: Per client and stratum, `[version, rank]` that the client holds (partial downlink).
        personal: Per client, its last evaluation sums (methods with parts that stay on the client).
        validation: One record per evaluated round: `{"server_round", metric: value, …}`.
        totals: The ledger: bytes by direction and section, predicted seconds, failures, client records.
        best: `{"server_round", "value"}` by the validation metric, or None.
        base: What the method has merged into the base model.
        merged: Per client, the merge that it stands at; 0 where nobody knows.
        moments: The server optimizer's, float64, by `<slot>/<tensor>`.
        optimizer_steps: How often it updated each tensor.
        groups: Tensors of candidates that are trained side by side, by candidate; empty where there is one model.
    """

    tensors: NamedTensors
    server_round: int = 0
    versions: Mapping[str, int] = field(default_factory=dict)
    planner: Mapping[str, Any] = field(default_factory=dict)
    selector: Mapping[str, Any] = field(default_factory=dict)
    accepted: Mapping[str, int] = field(default_factory=dict)
    acknowledged: Mapping[str, Mapping[str, list[int]]] = field(default_factory=dict)
    personal: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    validation: tuple[Mapping[str, Any], ...] = ()
    totals: Mapping[str, Any] = field(default_factory=dict)
    best: Mapping[str, Any] | None = None
    base: BaseLog = field(default_factory=BaseLog)
    merged: Mapping[str, int] = field(default_factory=dict)
    moments: NamedTensors = field(default_factory=dict)
    optimizer_steps: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, NamedTensors] = field(default_factory=dict)


def save_checkpoint(path: Path, state: ServerState, spec_hash: str) -> None:
    """Writes `path`, a safetensors file whose metadata hold the rest of the state as canonical JSON.

    Equal states give equal bytes.
    """
    rest = {f.name: getattr(state, f.name) for f in fields(state) if f.name not in _TENSOR_FIELDS}
    if state.base.number:
        rest["base"] = [state.base.number, state.base.snapshot_number]
    document = canonical_json({"schema": _SCHEMA, "spec_hash": spec_hash, "state": rest}).decode()
    named = dict(state.tensors)
    named |= {_BASE + n: t for n, t in state.base.to_tensors().items()}
    named |= {_MOMENT + n: t for n, t in state.moments.items()}
    named |= {f"{_GROUP}{g}/{n}": t for g, tensors in state.groups.items() for n, t in tensors.items()}
    atomic_write(path, save(named, metadata={_KEY: document}))


def load_checkpoint(path: Path) -> tuple[ServerState, str]:
    """The state and the hash of the spec that it belongs to.

    Raises:
        RunFolderError: If the file is damaged.
    """
    try:
        data = path.read_bytes()
        named = load(data)
        length = int.from_bytes(data[:8], "little")
        document = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_KEY])
        rest = document["state"]
        rest["validation"] = tuple(rest["validation"])
        number, snapshot_number = rest.get("base", (0, 0))
        rest["base"] = BaseLog.from_tensors(number, snapshot_number, _behind(_BASE, named))
        groups: dict[str, NamedTensors] = {}
        for name, tensor in _behind(_GROUP, named).items():
            group, rest_of_name = name.split("/", 1)
            groups.setdefault(group, {})[rest_of_name] = tensor
        own = {n: t for n, t in named.items() if not n.startswith((_BASE, _MOMENT, _GROUP))}
        state = ServerState(tensors=own, moments=_behind(_MOMENT, named), groups=groups, **rest)
        spec_hash = str(document["spec_hash"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(
            f"{path} cannot be read", got=f"{type(error).__name__}: {error}", do="start anew with --fresh"
        ) from error
    return state, spec_hash


def _behind(prefix: str, named: Mapping[str, np.ndarray]) -> NamedTensors:
    """The tensors whose name begins with `prefix`, without it, in the order of their names."""
    return {n.removeprefix(prefix): named[n] for n in sorted(named) if n.startswith(prefix)}
