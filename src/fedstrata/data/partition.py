"""How pooled examples are spread over clients: disjoint, complete, deterministic, nobody empty, or refused."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Sequence

import numpy as np

from fedstrata.core.rng import generator
from fedstrata.data.config import PartitionConfig
from fedstrata.data.table import count, name_some
from fedstrata.errors import DataError
from fedstrata.registry import FunctionTable

Assign = Callable[[PartitionConfig, np.ndarray, int, np.random.Generator], np.ndarray]
"""Options, labels [n], number of clients, stream → number of the owning client per example, shape [n]."""


def partition(
    config: PartitionConfig, labels: np.ndarray, groups: Sequence[str] | None, num_clients: int, seed: int
) -> dict[str, np.ndarray]:
    """Spreads examples over clients.

    Args:
        config: `partition` of `[simulation]`.
        labels: Class numbers of the pooled examples, shape [n].
        groups: Who owns each example (natural), otherwise None.
        num_clients: K.
        seed: The run's seed; the stream is named, so that nothing else of the run changes the result.

    Returns:
        Client ids in ascending order, each with the positions in `labels` that it owns, ascending.

    Raises:
        DataError: If the partition is impossible: too few examples, or other clients than devices.
    """
    if num_clients < 1:
        raise DataError("There is no client", where="simulation.devices", expected="at least one device")
    if config.kind == "natural":
        return _natural(config, groups, num_clients)
    if len(labels) < num_clients * config.min_examples:
        raise DataError(
            f"There are more clients than examples for them: {num_clients} clients, {len(labels)} examples",
            where="simulation.devices", expected=f"at least {count(config.min_examples, 'example')} per client",
            do=f"use at most {count(len(labels) // config.min_examples, 'device')}, or more data"
            if len(labels) >= config.min_examples else "lower min_examples, or use more data",
        )  # fmt: skip
    rng = generator(seed, "partition", config.kind)
    owner = _checked(PARTITIONS[config.kind](config, labels, num_clients, rng), len(labels), num_clients, config.kind)
    owner = _rebalance(owner, num_clients, config.min_examples, rng)
    order = np.argsort(owner, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(owner, minlength=num_clients))[:-1])
    return dict(zip(client_ids(num_clients), parts, strict=True))


def client_ids(num_clients: int) -> list[str]:
    """Ids that sort like numbers.

    Example:
        >>> client_ids(2)
        ['client-00', 'client-01']
    """
    width = max(2, len(str(num_clients - 1)))
    return [f"client-{k:0{width}}" for k in range(num_clients)]


def natural_ids(groups: Sequence[str]) -> dict[str, str]:
    """A client id for every owner: letters, digits, dots, dashes and underscores; unique without regard to case.

    Example:
        >>> natural_ids(["St. Mary", "st mary"])
        {'St. Mary': 'St.-Mary', 'st mary': 'st-mary'}
    """
    ids: dict[str, str] = {}
    taken: set[str] = set()
    for group in sorted(set(groups)):
        base = re.sub(r"[^A-Za-z0-9._-]+", "-", group).strip("-.")[:64] or "client"
        name, number = base, 1
        while name.lower() in taken:
            number += 1
            name = f"{base}-{number}"
        taken.add(name.lower())
        ids[group] = name
    return ids


def _natural(config: PartitionConfig, groups: Sequence[str] | None, num_clients: int) -> dict[str, np.ndarray]:
    if groups is None:
        raise DataError(
            "A natural partition needs a column that names the client", where="simulation.partition",
            do='set columns = { client = "…" } under [data]',
        )  # fmt: skip
    ids = natural_ids(groups)
    if len(ids) != num_clients:
        raise DataError(
            f"The data has {len(ids)} natural clients, the simulation {num_clients} devices",
            where="simulation.devices", expected=f"{len(ids)} devices in total", got=f"{num_clients}",
            do="change the numbers of devices, or use another kind of partition",
        )  # fmt: skip
    positions: dict[str, list[int]] = {group: [] for group in ids}
    for position, group in enumerate(groups):
        positions[group].append(position)
    small = [f"{ids[g]} ({len(p)})" for g, p in positions.items() if len(p) < config.min_examples]
    if small:
        raise DataError(
            f"Clients with fewer than {count(config.min_examples, 'example')}", got=name_some(small),
            where="simulation.partition", do="lower min_examples, or take these clients out of the data",
        )  # fmt: skip
    return {name: np.array(p, np.int64) for name, p in sorted((ids[g], p) for g, p in positions.items())}


def _iid(config: PartitionConfig, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
    """Equal shares of a shuffled pile; sizes differ by at most one."""
    owner = np.empty(len(labels), np.int64)
    owner[rng.permutation(len(labels))] = np.arange(len(labels)) % num_clients
    return owner


def _dirichlet(config: PartitionConfig, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
    """Per class c the shares p_c ~ Dirichlet(α·1); client k gets the part of the class between its cumulated shares."""
    owner = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(num_clients, config.alpha))
        ends = np.floor(np.cumsum(shares) * len(members) + 0.5).astype(np.int64).clip(0, len(members))
        ends[-1] = len(members)
        owner[members] = np.searchsorted(ends, np.arange(len(members)), side="right")
    return owner


def _shards(config: PartitionConfig, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
    """Sorted by label and cut into K·s shards of equal size; every client gets s of them at random."""
    num_shards = num_clients * config.shards_per_client
    if num_shards > len(labels):
        raise DataError(
            f"{num_shards} shards do not fit into {len(labels)} examples", where="simulation.partition",
            expected="at least one example per shard", got=f"{num_clients} clients × {config.shards_per_client} shards",
            do="lower shards_per_client or the number of devices",
        )  # fmt: skip
    shuffled = rng.permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    shard = np.arange(len(labels)) * num_shards // len(labels)
    owner = np.empty(len(labels), np.int64)
    owner[by_label] = (rng.permutation(num_shards) % num_clients)[shard]
    return owner


def _quantity(config: PartitionConfig, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
    """Labels as in the pool, sizes min + round((n − K·min)·p) with p ~ Dirichlet(α·1)."""
    spare = len(labels) - num_clients * config.min_examples
    shares = rng.dirichlet(np.full(num_clients, config.alpha))
    ends = np.floor(np.cumsum(shares) * spare + 0.5).astype(np.int64).clip(0, spare)
    ends[-1] = spare
    sizes = np.diff(ends, prepend=0) + config.min_examples
    owner = np.empty(len(labels), np.int64)
    owner[rng.permutation(len(labels))] = np.repeat(np.arange(num_clients), sizes)
    return owner


def _rebalance(owner: np.ndarray, num_clients: int, min_examples: int, rng: np.random.Generator) -> np.ndarray:
    """Fills clients below the minimum, in ascending id, from whoever has the most at that moment.

    A draw that leaves somebody short is repaired and not repeated: with small α a valid draw may practically never
    come. Moves are at most K·min.
    """
    sizes = np.bincount(owner, minlength=num_clients)
    short = np.flatnonzero(sizes < min_examples)
    if not len(short):
        return owner
    moved = owner.copy()
    order = np.lexsort((rng.random(len(owner)), owner))
    ends = np.cumsum(sizes)
    # Largest first, the lower id on a tie; what a donor gives is drawn at random.
    heap = [(-int(n), int(k)) for k, n in enumerate(sizes) if n > min_examples]
    heapq.heapify(heap)
    given = np.zeros(num_clients, np.int64)
    for client in short:
        for _ in range(min_examples - int(sizes[client])):
            size, donor = heapq.heappop(heap)
            given[donor] += 1
            moved[order[ends[donor] - given[donor]]] = client
            if -size - 1 > min_examples:
                heapq.heappush(heap, (size + 1, donor))
    return moved


def _checked(owner: np.ndarray, num_examples: int, num_clients: int, kind: str) -> np.ndarray:
    """Refuses what a partition from outside may return by mistake."""
    owner = np.asarray(owner)
    whole = owner.shape == (num_examples,) and np.issubdtype(owner.dtype, np.integer)
    if not whole or (num_examples and not (owner.min() >= 0 and owner.max() < num_clients)):
        numbers = owner.dtype.kind in "iuf"
        span = f", from {owner.min(initial=0)} to {owner.max(initial=0)}" if numbers else ""
        raise DataError(
            f'The partition "{kind}" does not give every example to a client', where="simulation.partition",
            expected=f"{num_examples} whole numbers from 0 to {num_clients - 1}",
            got=f"{owner.dtype} {list(owner.shape)}{span}",
        )  # fmt: skip
    return owner.astype(np.int64)


PARTITIONS: FunctionTable[Assign] = FunctionTable(
    "partition", {"iid": _iid, "dirichlet": _dirichlet, "shards": _shards, "quantity": _quantity}
)
"""By name; entry-point group `fedstrata.partitions`. `natural` follows a column and is no function."""
