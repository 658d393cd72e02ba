"""What stays on a client between rounds, as one frame of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedstrata.core.tensors import Layout, NamedTensors, TensorSpec
from fedstrata.core.wire import CLIENT_STATE, Bytes, Payload, pack_frame, unpack_frame
from fedstrata.errors import PayloadError


@dataclass(frozen=True)
class ClientState:
    """What stays on the client between rounds.

    Attributes:
        held: Decoded downlink that it keeps (partial downlink), and per stratum `[version, rank]`.
        local: Strata that never leave it.
        residual: What its codec left unsent.
    """

    versions: Mapping[str, list[int]] = field(default_factory=dict)
    held: NamedTensors = field(default_factory=dict)
    local: NamedTensors = field(default_factory=dict)
    residual: NamedTensors = field(default_factory=dict)

    def to_bytes(self, server_round: int) -> Bytes:
        """One frame; empty bytes for an empty state."""
        parts = {"held": self.held, "local": self.local, "residual": self.residual}
        if not any(parts.values()):
            return b""
        header: dict[str, Any] = {"server_round": server_round, "versions": dict(self.versions)}
        header |= {k: [[n, list(t.shape)] for n, t in p.items()] for k, p in parts.items()}
        values = b"".join(np.ascontiguousarray(t, "<f4").tobytes() for p in parts.values() for t in p.values())
        return pack_frame(CLIENT_STATE, "float32", header, Payload(b"", values))

    @staticmethod
    def from_bytes(data: Bytes, server_layout: Layout) -> ClientState:
        """Reads a state; every tensor must fit into the server's layout.

        Raises:
            PayloadError: If it does not.
        """
        if not data:
            return ClientState()
        frame = unpack_frame(data, CLIENT_STATE, where="client state")
        versions = _state_versions(frame.header.get("versions", {}))
        offset, parts = 0, {}
        values = memoryview(frame.payload.values)
        for part in ("held", "local", "residual"):
            tensors: NamedTensors = {}
            entries = frame.header.get(part, [])
            if not isinstance(entries, list):
                raise PayloadError("The client state's header cannot be read", where=part)
            for entry in entries:
                name, shape = _state_entry(entry, server_layout)
                size = 4 * int(np.prod(shape, dtype=np.int64))
                if offset + size > len(values):
                    raise PayloadError("The client state is cut short", where=name)
                tensors[name] = np.frombuffer(values[offset : offset + size], "<f4").reshape(shape)
                offset += size
            parts[part] = tensors
        if offset != len(values):
            raise PayloadError("The client state is longer than it says", expected=str(offset), got=str(len(values)))
        return ClientState(versions=versions, **parts)


def _state_versions(value: Any) -> dict[str, list[int]]:
    """Versions as `{stratum: [version, rank]}`, or an error."""
    fits = isinstance(value, dict) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(n, int) for n in pair) for pair in value.values()
    )
    if not fits:
        raise PayloadError("The client state's header cannot be read", where="versions")
    return dict(value)


def _state_entry(entry: Any, layout: Layout) -> tuple[str, tuple[int, ...]]:
    try:
        name, shape = str(entry[0]), tuple(int(n) for n in entry[1])
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise PayloadError("The client state's header cannot be read") from error
    if name not in layout:
        raise PayloadError("The client state holds an unknown tensor", got=name[:200])
    spec: TensorSpec = layout[name]
    if len(shape) != len(spec.shape) or any(not 0 <= n <= m for n, m in zip(shape, spec.shape, strict=True)):
        raise PayloadError(f"The client state's {name} does not fit", expected=f"{spec.shape}", got=f"{shape}")
    return name, shape
