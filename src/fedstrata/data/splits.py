"""Who may see which example: test, server validation, proxy, and every client's training and validation."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from fedstrata.core.rng import generator
from fedstrata.core.wire import canonical_json
from fedstrata.data.config import DataConfig, PartitionConfig
from fedstrata.data.partition import natural_ids, partition
from fedstrata.data.table import count, name_some
from fedstrata.errors import DataError

MIN_CLIENT_PROXY = 8
"""Fewest examples that a client holds out for scoring, where any are wanted."""

_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class ClientSplit:
    """One client's examples, as ascending row numbers of the data set.

    Attributes:
        train: For training.
        validation: For its own validation.
        proxy: For scoring blocks (Fisher); never trained on.
    """

    train: np.ndarray
    validation: np.ndarray
    proxy: np.ndarray = field(default_factory=_NO_ROWS.copy)


@dataclass(frozen=True, eq=False)
class Splits:
    """Disjoint row numbers, each ascending.

    Attributes:
        test: Read once, at the end.
        server_validation: The server's own examples for choosing a state.
        proxy: The server's own examples for methods that need some.
        clients: By client id, ascending.
        num_duplicates: Rows dropped because their text stood there before.
        num_conflicts: Dropped rows whose label was another one.
        num_leaked: Training rows dropped because their text stands in the test set's own source.
    """

    test: np.ndarray
    server_validation: np.ndarray
    proxy: np.ndarray
    clients: Mapping[str, ClientSplit]
    num_duplicates: int = 0
    num_conflicts: int = 0
    num_leaked: int = 0
    notes: tuple[str, ...] = field(default=())

    def compact(self) -> tuple[np.ndarray, Splits]:
        """The rows that somebody sees, ascending, and the same splits as positions among them."""
        used = np.sort(np.concatenate(self._parts()))

        def at(rows: np.ndarray) -> np.ndarray:
            return np.searchsorted(used, rows)

        clients = {c: ClientSplit(at(s.train), at(s.validation), at(s.proxy)) for c, s in self.clients.items()}
        moved = replace(
            self,
            test=at(self.test),
            server_validation=at(self.server_validation),
            proxy=at(self.proxy),
            clients=clients,
        )
        return used, moved

    def _parts(self) -> list[np.ndarray]:
        clients = [rows for split in self.clients.values() for rows in (split.train, split.validation)]
        proxies = [split.proxy for split in self.clients.values() if len(split.proxy)]
        return [self.test, self.server_validation, self.proxy, *clients, *proxies]

    @cached_property
    def sha256(self) -> str:
        """Hash of who sees which row."""
        digest = hashlib.sha256(canonical_json(list(self.clients)))
        for rows in self._parts():
            digest.update(len(rows).to_bytes(8, "little") + rows.astype("<i8").tobytes())
        return digest.hexdigest()


def make_splits(
    config: DataConfig,
    partition_config: PartitionConfig,
    *,
    labels: np.ndarray,
    keys: Sequence[Hashable],
    groups: Sequence[str] | None,
    num_clients: int,
    seed: int,
    num_own_test: int = 0,
    label_names: Sequence[str] = (),
    client_proxy_fraction: float | None = None,
) -> Splits:
    """Splits the rows of a data set.

    In this order: repeated texts are dropped (the first row stays), `limit` rows are drawn, the test set is taken
    out or comes from its own source, then the server's validation and proxy sets, then the rest is spread over the
    clients, then every client's validation set, then its proxy set. Sets that the server takes are stratified: each
    class gives its share, rounded by largest remainder, and keeps at least one row for training.

    Args:
        config: `[data]`.
        partition_config: `partition` of `[simulation]`.
        labels: Class numbers, shape [n]; rows of the test set's own source stand last.
        keys: What makes two rows the same example.
        groups: Who owns each row, for a natural partition.
        num_clients: K.
        seed: The run's seed.
        num_own_test: How many rows come from the test set's own source.
        label_names: For messages.
        client_proxy_fraction: Share p of every client's n training rows that becomes its proxy set, max(8, round(p·n))
            rows; None takes what `config` says, 0 if it says nothing.

    Raises:
        DataError: If a set that is asked for would be empty, or a client would have nothing to train on.
    """
    num_pool = len(labels) - num_own_test
    pool, own_test = np.arange(num_pool), np.arange(num_pool, len(labels))
    duplicates = conflicts = leaked = 0
    if config.deduplicate:
        pool, own_test, duplicates, conflicts, leaked = _deduplicate(pool, own_test, labels, keys)
    if config.limit is not None and config.limit < len(pool):
        pool = _take(labels, pool, config.limit, generator(seed, "split", "limit"), keep_one=False)
    natural = partition_config.kind == "natural" and groups is not None
    owners = sorted({groups[i] for i in range(num_pool)}) if natural and groups is not None else []

    if num_own_test:
        test = own_test
    else:
        test = _held_out(labels, pool, config.test_fraction, generator(seed, "split", "test"), "test_fraction")
        pool = np.setdiff1d(pool, test, assume_unique=True)
    if config.validation_fraction + config.proxy_fraction >= 1:
        raise DataError(
            "Nothing would be left for the clients", where="data",
            got=f"validation_fraction {config.validation_fraction} + proxy_fraction {config.proxy_fraction}",
            expected="a sum below 1",
        )  # fmt: skip
    rest = pool
    validation = _held_out(
        labels, rest, config.validation_fraction, generator(seed, "split", "server_validation"), "validation_fraction"
    )
    pool = np.setdiff1d(pool, validation, assume_unique=True)
    proxy = _held_out(
        labels, pool, config.proxy_fraction, generator(seed, "split", "proxy"), "proxy_fraction", of=len(rest)
    )
    pool = np.setdiff1d(pool, proxy, assume_unique=True)

    share = config.client_proxy_fraction if client_proxy_fraction is None else client_proxy_fraction
    partition_config = _roomy(config, partition_config, len(pool) // max(1, num_clients), share or 0.0)
    clients = _clients(config, partition_config, labels, pool, groups if natural else None, owners, num_clients, seed)
    if share:
        clients = _client_proxies(share, labels, clients, seed)
    notes = _check_classes(labels, test, clients, label_names)
    return Splits(test, validation, proxy, clients, duplicates, conflicts, leaked, notes)


def _deduplicate(
    pool: np.ndarray, own_test: np.ndarray, labels: np.ndarray, keys: Sequence[Hashable]
) -> tuple[np.ndarray, np.ndarray, int, int, int]:
    """Keeps the first row of every key; a text of the own test set does not stay in training either."""
    conflicts = duplicates = leaked = 0
    first_test: dict[Hashable, int] = {}
    first_train: dict[Hashable, int] = {}
    for row in own_test.tolist():
        kept = first_test.setdefault(keys[row], row)
        duplicates += kept != row
        conflicts += labels[kept] != labels[row]
    for row in pool.tolist():
        if keys[row] in first_test:
            leaked += 1
            conflicts += labels[first_test[keys[row]]] != labels[row]
            continue
        kept = first_train.setdefault(keys[row], row)
        duplicates += kept != row
        conflicts += labels[kept] != labels[row]
    train, test = (np.array(sorted(d.values()), np.int64) for d in (first_train, first_test))
    return train, test, int(duplicates), int(conflicts), leaked


def _held_out(
    labels: np.ndarray, rows: np.ndarray, share: float, rng: np.random.Generator, option: str, of: int | None = None
) -> np.ndarray:
    """A stratified share of the rows, at least one if any is asked for."""
    if share == 0:
        return rows[:0]
    wanted = max(1, round(share * (len(rows) if of is None else of)))
    taken = _take(labels, rows, wanted, rng, keep_one=True)
    if not len(taken):
        raise DataError(
            "There are too few examples to hold some out", where=f"data.{option} = {share}",
            got=f"{count(len(rows), 'example')} left", expected="a class with at least two examples",
            do="use more data; repeated texts are dropped unless data.deduplicate = false",
        )  # fmt: skip
    return taken


def _take(labels: np.ndarray, rows: np.ndarray, count: int, rng: np.random.Generator, *, keep_one: bool) -> np.ndarray:
    """Draws rows so that every class gives its share: ⌊count·n_c/n⌋, then one more by largest remainder.

    Args:
        labels: Class numbers of the whole data set.
        rows: Where to draw from.
        count: How many rows; fewer come back only where `keep_one` forbids more.
        rng: A named stream.
        keep_one: Whether every class keeps at least one row.
    """
    classes, sizes = np.unique(labels[rows], return_counts=True)
    room = sizes - 1 if keep_one else sizes
    exact = count * sizes / max(1, len(rows))
    quota = np.minimum(np.floor(exact).astype(np.int64), room)
    by_remainder = np.argsort(-(exact - np.floor(exact)), kind="stable")
    while quota.sum() < min(count, room.sum()):
        for c in by_remainder:
            if quota[c] < room[c] and quota.sum() < count:
                quota[c] += 1
    taken = [rng.permutation(rows[labels[rows] == c])[:q] for c, q in zip(classes, quota, strict=True)]
    return np.sort(np.concatenate(taken)) if taken else rows[:0]


def _clients(
    config: DataConfig, partition_config: PartitionConfig, labels: np.ndarray, pool: np.ndarray,
    groups: Sequence[str] | None, owners: Sequence[str], num_clients: int, seed: int,
) -> dict[str, ClientSplit]:  # fmt: skip
    share = config.client_validation_fraction
    own = None if groups is None else [groups[i] for i in pool.tolist()]
    gone = sorted(set(owners) - set(own or ()))
    if gone:
        ids = natural_ids(owners)
        raise DataError(
            f"Clients that would have nothing to train on: {name_some([ids[g] for g in gone])}",
            where="data", got="all their examples are repeated, or went to the server's sets",
            do="take these clients out of the data, or lower test_fraction and validation_fraction",
        )  # fmt: skip
    parts = partition(partition_config, labels[pool], own, num_clients, seed)
    if not share:
        return {client: ClientSplit(pool[positions], pool[:0]) for client, positions in parts.items()}
    clients: dict[str, ClientSplit] = {}
    left = np.bincount(labels[pool], minlength=1)
    for client, positions in parts.items():
        rows = pool[positions]
        rng = generator(seed, "split", "client_validation", client)
        validation = _spared(labels, rows, _num_validation(share, len(rows)), left, rng)
        if not len(validation):
            raise DataError(
                f'No example of the client "{client}" can be spared for validation', where="data",
                got="they are the only training examples of their labels",
                do="set client_validation_fraction = 0, or use more examples",
            )  # fmt: skip
        clients[client] = ClientSplit(np.setdiff1d(rows, validation, assume_unique=True), validation)
    return clients


def _roomy(config: DataConfig, partition_config: PartitionConfig, possible: int, proxy_share: float) -> PartitionConfig:
    """The partition with as many rows for everybody as the sets need that are taken from every client.

    Somebody with one row cannot have both a training and a validation set, and a proxy set needs eight more; where
    there are not as many, whoever has too few is named later.
    """
    share, wanted = config.client_validation_fraction, partition_config.min_examples
    if share:
        wanted = max(2, wanted)
    if proxy_share:
        enough = MIN_CLIENT_PROXY + 1
        while share and enough - _num_validation(share, enough) <= MIN_CLIENT_PROXY:
            enough += 1
        if partition_config.kind != "natural" and possible >= enough:
            wanted = max(enough, wanted)
    return partition_config.model_copy(update={"min_examples": wanted})


def _num_validation(share: float, num_rows: int) -> int:
    return min(max(1, round(share * num_rows)), num_rows - 1)


def _spared(labels: np.ndarray, rows: np.ndarray, count: int, left: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draws `count` of the rows, ascending; the last training row of a class, by the counts in `left`, is never taken.

    Fewer come back where there are no more; `left` is counted down.
    """
    taken: list[int] = []
    for row in rng.permutation(rows).tolist():
        if len(taken) < count and left[labels[row]] > 1:
            left[labels[row]] -= 1
            taken.append(row)
    return np.sort(np.array(taken, np.int64))


def _client_proxies(
    share: float, labels: np.ndarray, clients: Mapping[str, ClientSplit], seed: int
) -> dict[str, ClientSplit]:
    """Takes max(8, round(share·n)) of every client's n training rows for its proxy set."""
    left = np.bincount(labels[np.concatenate([s.train for s in clients.values()])])
    moved: dict[str, ClientSplit] = {}
    small: list[str] = []
    for client, split in clients.items():
        rows = split.train
        wanted = min(max(MIN_CLIENT_PROXY, round(share * len(rows))), len(rows) - 1)
        proxy = _spared(labels, rows, wanted, left, generator(seed, "split", "client_proxy", client))
        if len(proxy) < MIN_CLIENT_PROXY:
            small.append(f"{client} ({len(rows)})")
        moved[client] = ClientSplit(np.setdiff1d(rows, proxy, assume_unique=True), split.validation, proxy)
    if small:
        raise DataError(
            f"Clients with too few training examples to hold {MIN_CLIENT_PROXY} out for scoring blocks",
            where=f"data.client_proxy_fraction = {share}", got=name_some(small),
            expected=f"at least {MIN_CLIENT_PROXY + 1} training examples, none of them the last one of its label",
            do="use fewer devices or more data, set client_proxy_fraction = 0, or let the method use examples of the "
            'server\'s (its option source, e.g. "public")',
        )  # fmt: skip
    return moved


def _check_classes(
    labels: np.ndarray, test: np.ndarray, clients: Mapping[str, ClientSplit], label_names: Sequence[str]
) -> tuple[str, ...]:
    """Refuses test labels that no client can learn; says which labels the test cannot measure."""
    trained = set(np.unique(labels[np.concatenate([split.train for split in clients.values()])]).tolist())
    tested = set(np.unique(labels[test]).tolist())

    def names(numbers: set[int]) -> str:
        return name_some([label_names[i] if label_names else f"class {i}" for i in sorted(numbers)])

    if tested - trained:
        raise DataError(
            f"Labels that are seen only in the test set: {names(tested - trained)}", where="data",
            expected="every label of the test set among the clients' training examples",
            do="use more training examples of these labels, or a larger limit",
        )  # fmt: skip
    notes = []
    if trained - tested:
        notes.append(f"The test set has no example of: {names(trained - tested)}")
    gone = set(range(len(label_names))) - trained
    if gone:
        notes.append(f"No client has a training example of: {names(gone)}")
    return tuple(notes)
