"""Models and fleets for the laws of planners and methods; device kinds and clients follow the options."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedstrata.check.law import Trial
from fedstrata.core.shape import ModelShape, TargetShape
from fedstrata.core.tensors import EMBEDDINGS, HEAD, TensorSpec
from fedstrata.device.fleet import Client, Fleet
from fedstrata.device.profiles import device_profile, profile_names

_KINDS = ("laptop-16gb", "jetson-nx", "jetson-tx2")
_DEPTHS = (12, 4, 2, 13, 24)
"""Twelve blocks first: options of one's own are most likely made for a model of that depth, and 1 is not 10 or 11."""


@dataclass(frozen=True)
class Names:
    """Device kinds and clients that the options of a part speak of.

    Attributes:
        kinds: Device kinds of the fleet.
        clients: Clients that must exist; empty where any will do.
        closed: Whether no other client may exist.
    """

    kinds: tuple[str, ...]
    clients: tuple[str, ...] = ()
    closed: bool = False


def names_in(options: Any) -> Names:
    """Reads device kinds and client ids out of options (keys of tables, entries of lists called `kinds`).

    Example:
        >>> names_in({"depth": {"laptop-16gb": 3, "jetson-nx": 1}}).kinds
        ('laptop-16gb', 'jetson-nx')
    """
    keys = list(dict.fromkeys(_keys(options)))
    kinds = tuple(k for k in keys if k in profile_names())
    clients = tuple(sorted(k for k in keys if k not in kinds))
    return Names(kinds or _KINDS, clients, bool(clients) and not kinds)


def _keys(value: Any) -> Iterator[str]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if not isinstance(value, Mapping):
        return
    for name, inner in value.items():
        if isinstance(inner, Mapping) or (name == "kinds" and isinstance(inner, list | tuple)):
            yield from (str(k) for k in inner)
        elif dataclasses.is_dataclass(inner):
            yield from _keys(inner)


def make_fleet(names: Names, count: int, trial: Trial) -> Fleet:
    """At least `count` clients, the device kinds in turn; more where the options name more."""
    ids = set(names.clients)
    if not names.closed:
        ids |= {f"client-{k:02}" for k in range(max(count, len(names.kinds)) - len(ids))}
    rng = trial.rng("fleet")
    kinds = [device_profile(k) for k in names.kinds]
    clients = tuple(Client(c, kinds[i % len(kinds)], int(rng.integers(1, 60))) for i, c in enumerate(sorted(ids)))
    trial.note("fleet: " + ", ".join(f"{c.id} ({c.device.name}, {c.num_examples} examples)" for c in clients))
    return Fleet(clients)


def make_shape(trial: Trial, *, wide: int = 17, high: int = 19) -> ModelShape:
    """A model whose maps are not square; twelve blocks in the first world, other depths afterwards."""
    return shape_of(_DEPTHS[trial.index % len(_DEPTHS)], wide, high)


def shape_of(num_blocks: int, wide: int, high: int) -> ModelShape:
    """Per block a map `q` of [high, wide] and a map `v` of [wide, high + 1], embeddings and a head."""
    targets, parameters = [], [TensorSpec("words", (4, wide), EMBEDDINGS)]
    for block in range(num_blocks):
        for name, n_in, n_out in (("q", wide, high), ("v", high + 1, wide)):
            targets.append(TargetShape(f"layers.{block}.{name}", block, n_in, n_out))
            parameters.append(TensorSpec(f"layers.{block}.{name}.weight", (n_out, n_in), block))
    head = (TensorSpec("classifier.weight", (3, wide), HEAD), TensorSpec("classifier.bias", (3,), HEAD))
    return ModelShape("Toy", num_blocks, wide, 16, tuple(targets), head, (*parameters, *head), 4000)
