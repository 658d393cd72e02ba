"""From the server's tensors to what a client receives, and to what the server knows that it then has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from fedstrata.aggregate.product import hand_out
from fedstrata.aggregate.sketch import sketch_slices
from fedstrata.core.merges import pack_merges
from fedstrata.core.rng import generator
from fedstrata.core.tensors import Layout, NamedTensors, Stratum, slice_tensors
from fedstrata.core.wire import Bytes, Payload
from fedstrata.message import Task, TaskLayouts, drawn_tensors, pack_task
from fedstrata.record.checkpoint import ServerState
from fedstrata.server.setup import RoundSetup

Slices: TypeAlias = dict[Stratum, tuple[int, ...]]


@dataclass(frozen=True)
class Packed:
    """A task, ready to be sent.

    Attributes:
        task: Its header.
        data: Its bytes.
        slices: Which rank slices the client is given, where they are not the leading ones.
    """

    task: Task
    data: Bytes
    slices: Slices


class Downlink:
    """Encodes the server's tensors once per distinct part of them, not once per client.

    Args:
        setup: What all rounds share.
        state: The server's tensors and what was merged into the base.
    """

    _KEPT = 4

    def __init__(self, setup: RoundSetup, state: ServerState) -> None:
        self._setup, self._state = setup, state
        self._payloads: dict[tuple[Layout, float, tuple[tuple[Stratum, tuple[int, ...]], ...]], Payload] = {}
        self._merges: dict[int, tuple[list[list[object]], bytes]] = {}

    def pack(self, task: Task) -> Packed:
        """The task with its tensors and the merges that its client lacks."""
        layouts, slices = task.layouts(self._setup.layout), self.slices(task)
        payload = self._payload(task, layouts.down, slices)
        known = task.base[0]
        if known < self._state.base.number:
            if known not in self._merges:
                self._merges[known] = pack_merges(self._state.base.since(known), self._setup.base_layout)
            entries, values = self._merges[known]
            payload = Payload(payload.side, b"".join((values, payload.values)))
            task = replace(task, merges=entries)
        return Packed(task, pack_task(task, self._setup.downlink, payload), slices)

    def start(self, task: Task, layouts: TaskLayouts, slices: Slices) -> NamedTensors:
        """What a client has after decoding everything that it was ever sent for what it shares with the server."""
        sent = layouts.shared.without(task.drawn_kinds)
        if self._setup.downlink.lossless:
            values = self._values(task, sent, slices)
        else:
            values = self._setup.downlink.decode(self._payload(task, sent, slices), sent)
        return values | drawn_tensors(task, layouts.shared)

    def slices(self, task: Task) -> Slices:
        """The drawn rank slices of a task, per stratum; empty where clients have the leading ones."""
        if self._setup.method.pairs.slices == "leading" or task.job != "train":
            return {}
        ranks = {s.stratum: s.rank for s in task.layouts(self._setup.layout).present if s.rank}
        return {
            stratum: sketch_slices(task.seed, task.server_round, task.client, self._setup.server_ranks[stratum], rank)
            for stratum, rank in ranks.items()
        }

    def _payload(self, task: Task, layout: Layout, slices: Slices) -> Payload:
        """The encoded tensors of a layout."""
        key = (layout, task.scaling_power, tuple(slices.items()))
        if key not in self._payloads:
            if len(self._payloads) >= self._KEPT:
                self._payloads.pop(next(iter(self._payloads)))
            tensors = self._values(task, layout, slices)
            self._payloads[key] = self._setup.downlink.encode(tensors, layout, {}, generator(0, "downlink"))[0]
        return self._payloads[key]

    def _values(self, task: Task, layout: Layout, slices: Slices) -> NamedTensors:
        """The server's tensors as the client sees them: its slices, in its own scaling."""
        tensors = self._state.tensors
        if slices:
            return {s.name: _take(tensors[s.name], s.kind, slices.get(s.stratum)) for s in layout}
        values = slice_tensors(tensors, layout)
        return _handed_out(self._setup, task, layout, values) if task.scaling_power else values


def _take(tensor: np.ndarray, kind: str, slices: tuple[int, ...] | None) -> np.ndarray:
    if slices is None or kind == "weight":
        return tensor
    which = list(slices)
    return np.ascontiguousarray(tensor[which] if kind == "lora_A" else tensor[:, which])


def _handed_out(setup: RoundSetup, task: Task, layout: Layout, values: Mapping[str, np.ndarray]) -> NamedTensors:
    """Pairs whose product stays the same although the client scales it with its own s_k."""
    scalings = task.scalings(setup.scaling, setup.layout, layout)
    found: NamedTensors = dict(values)
    for target, mine in scalings.items():
        a, b = f"{target}.lora_A", f"{target}.lora_B"
        if a in found and b in found:
            pair = hand_out(found[a], found[b], layout[a].rank, scaling=setup.scaling[target], client_scaling=mine)
            found[a], found[b] = (np.ascontiguousarray(x, np.float32) for x in pair)
    return found
