"""The server's state: a value that is written atomically after every round."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load, save

from fedstrata.core.tensors import NamedTensors
from fedstrata.core.wire import canonical_json
from fedstrata.errors import RunFolderError
from fedstrata.record.files import atomic_write

_SCHEMA = 1
_KEY = "fedstrata"


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


def save_checkpoint(path: Path, state: ServerState, spec_hash: str) -> None:
    """Writes `path`, a safetensors file whose metadata hold the rest of the state as canonical JSON.

    Equal states give equal bytes.
    """
    rest = {f.name: getattr(state, f.name) for f in fields(state) if f.name != "tensors"}
    document = canonical_json({"schema": _SCHEMA, "spec_hash": spec_hash, "state": rest}).decode()
    atomic_write(path, save(dict(state.tensors), metadata={_KEY: document}))


def load_checkpoint(path: Path) -> tuple[ServerState, str]:
    """The state and the hash of the spec that it belongs to.

    Raises:
        RunFolderError: If the file is damaged.
    """
    try:
        data = path.read_bytes()
        tensors = load(data)
        length = int.from_bytes(data[:8], "little")
        document = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_KEY])
        rest = document["state"]
        rest["validation"] = tuple(rest["validation"])
        state, spec_hash = ServerState(tensors=tensors, **rest), str(document["spec_hash"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(
            f"{path} cannot be read", got=f"{type(error).__name__}: {error}", do="start anew with --fresh"
        ) from error
    return state, spec_hash
