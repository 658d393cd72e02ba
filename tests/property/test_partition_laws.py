"""Laws of every kind of partition: disjoint, complete, nobody below the minimum, deterministic, or refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.data.config import PARTITION_KINDS, PartitionConfig
from fedstrata.data.partition import client_ids, natural_ids, partition
from fedstrata.errors import DataError

POOLED = [kind for kind in PARTITION_KINDS if kind != "natural"]


@st.composite
def cases(draw: st.DrawFn) -> tuple[PartitionConfig, np.ndarray, list[str], int, int]:
    kind = draw(st.sampled_from(PARTITION_KINDS))
    config = PartitionConfig(
        kind=kind,
        alpha=draw(st.sampled_from([1e-8, 0.01, 0.5, 10.0, 1e8])),
        shards_per_client=draw(st.integers(1, 3)),
        min_examples=draw(st.integers(1, 4)),
    )
    num_clients = draw(st.integers(1, 12))
    per_client = max(config.min_examples, config.shards_per_client)
    num = num_clients * per_client + draw(st.integers(0, 60))
    labels = np.array(draw(st.lists(st.integers(0, 4), min_size=num, max_size=num)), np.int64)
    extra = draw(st.lists(st.integers(0, num_clients - 1), min_size=num, max_size=num))
    groups = [f"owner {i // per_client if i < num_clients * per_client else extra[i]}" for i in range(num)]
    return config, labels, groups, num_clients, draw(st.integers(0, 2**32))


@given(cases())
@settings(max_examples=200, deadline=None)
def test_every_partition_is_disjoint_complete_and_leaves_nobody_short(case) -> None:
    config, labels, groups, num_clients, seed = case
    parts = partition(config, labels, groups, num_clients, seed)
    assert len(parts) == num_clients
    assert list(parts) == sorted(parts)
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(len(labels)))
    assert min(len(rows) for rows in parts.values()) >= config.min_examples
    assert all((np.diff(rows) > 0).all() for rows in parts.values())


@given(cases())
@settings(max_examples=50, deadline=None)
def test_every_partition_is_a_function_of_its_arguments(case) -> None:
    config, labels, groups, num_clients, seed = case
    first = partition(config, labels, groups, num_clients, seed)
    np.random.default_rng().random(3)
    second = partition(config, labels, groups, num_clients, seed)
    assert {c: rows.tolist() for c, rows in first.items()} == {c: rows.tolist() for c, rows in second.items()}


@pytest.mark.parametrize("kind", POOLED)
def test_another_seed_gives_another_partition(kind: str) -> None:
    labels = np.arange(200) % 4
    a, b = (partition(PartitionConfig(kind=kind), labels, None, 5, seed) for seed in (0, 1))
    assert any(a[c].tolist() != b[c].tolist() for c in a)


@pytest.mark.parametrize("kind", POOLED)
def test_more_clients_than_examples_are_refused(kind: str) -> None:
    with pytest.raises(DataError, match="more clients than examples") as caught:
        partition(PartitionConfig(kind=kind, min_examples=2), np.zeros(9, np.int64), None, 5, 0)
    assert "at most 4 devices" in caught.value.do


@pytest.mark.parametrize("kind", POOLED)
def test_ten_thousand_clients_all_get_their_minimum(kind: str) -> None:
    config = PartitionConfig(kind=kind, alpha=0.05, min_examples=3, shards_per_client=3)
    parts = partition(config, np.arange(40_000) % 10, None, 10_000, 0)
    assert sum(len(rows) for rows in parts.values()) == 40_000
    assert min(len(rows) for rows in parts.values()) >= 3
    assert list(parts)[-1] == "client-9999"


def test_iid_sizes_differ_by_at_most_one() -> None:
    parts = partition(PartitionConfig(kind="iid"), np.zeros(103, np.int64), None, 10, 0)
    assert sorted(len(rows) for rows in parts.values()) == [10] * 7 + [11] * 3


def test_dirichlet_with_large_alpha_gives_everybody_the_pools_labels() -> None:
    labels = np.arange(1000) % 5
    parts = partition(PartitionConfig(kind="dirichlet", alpha=1e8), labels, None, 10, 0)
    # Shares are 1/10 within rounding: 200 examples of a class over 10 clients are 20 each.
    for rows in parts.values():
        assert np.bincount(labels[rows], minlength=5).tolist() == pytest.approx([20] * 5, abs=1)


def test_dirichlet_with_small_alpha_gives_a_class_to_few_clients() -> None:
    labels = np.arange(1000) % 5
    parts = partition(PartitionConfig(kind="dirichlet", alpha=0.01), labels, None, 10, 0)
    largest = [max(np.sum(labels[rows] == c) for rows in parts.values()) for c in range(5)]
    assert min(largest) > 100


def test_shards_give_a_client_at_most_as_many_labels_as_shards() -> None:
    labels = np.repeat(np.arange(10), 20)
    parts = partition(PartitionConfig(kind="shards", shards_per_client=2), labels, None, 10, 3)
    # 200 examples in 20 shards of 10: every shard lies inside one class.
    assert all(len(rows) == 20 and len(set(labels[rows].tolist())) <= 2 for rows in parts.values())


def test_quantity_skews_sizes_and_not_labels() -> None:
    labels = np.arange(4000) % 2
    parts = partition(PartitionConfig(kind="quantity", alpha=0.5), labels, None, 8, 0)
    sizes = sorted(len(rows) for rows in parts.values())
    assert sizes[-1] > 3 * sizes[0]
    largest = max(parts.values(), key=len)
    assert np.mean(labels[largest]) == pytest.approx(0.5, abs=0.05)


def test_shards_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="20 shards do not fit into 12"):
        partition(PartitionConfig(kind="shards", shards_per_client=5), np.zeros(12, np.int64), None, 4, 0)


def test_natural_partition_gives_every_owner_its_own_rows() -> None:
    parts = partition(PartitionConfig(kind="natural"), np.zeros(4, np.int64), ["B", "a b", "B", "a b"], 2, 0)
    assert {c: rows.tolist() for c, rows in parts.items()} == {"B": [0, 2], "a-b": [1, 3]}


def test_natural_partition_with_another_number_of_devices_is_refused() -> None:
    with pytest.raises(DataError, match="2 natural clients, the simulation 3 devices"):
        partition(PartitionConfig(kind="natural"), np.zeros(2, np.int64), ["a", "b"], 3, 0)


def test_natural_partition_names_clients_that_are_too_small() -> None:
    with pytest.raises(DataError, match="fewer than 2 examples") as caught:
        partition(PartitionConfig(kind="natural", min_examples=2), np.zeros(3, np.int64), ["a", "b", "a"], 2, 0)
    assert caught.value.got == "b (1)"


def test_natural_partition_without_owners_is_refused() -> None:
    with pytest.raises(DataError, match="needs a column"):
        partition(PartitionConfig(kind="natural"), np.zeros(3, np.int64), None, 2, 0)


def test_no_client_is_refused() -> None:
    with pytest.raises(DataError, match="no client"):
        partition(PartitionConfig(), np.zeros(3, np.int64), None, 0, 0)


def test_client_ids_sort_like_their_numbers() -> None:
    assert client_ids(3) == ["client-00", "client-01", "client-02"]
    assert client_ids(101)[-1] == "client-100"
    assert client_ids(1001) == sorted(client_ids(1001))


@given(st.lists(st.text(max_size=80), min_size=1, max_size=20, unique=True))
@settings(deadline=None)
def test_natural_ids_are_safe_file_names_and_unique_without_regard_to_case(groups: list[str]) -> None:
    ids = natural_ids(groups)
    assert len({name.lower() for name in ids.values()}) == len(groups)
    for name in ids.values():
        assert name
        assert name[0] not in ".-"
        assert all(c.isascii() and (c.isalnum() or c in "._-") for c in name)
