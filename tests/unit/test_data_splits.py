from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.data.config import DataConfig, PartitionConfig
from fedstrata.data.splits import Splits, make_splits
from fedstrata.errors import DataError


def split(labels: list[int] | np.ndarray, config: dict[str, Any] | None = None, **options: Any) -> Splits:
    arguments: dict[str, Any] = {
        "partition_config": PartitionConfig(), "keys": list(range(len(labels))), "groups": None, "num_clients": 2,
        "seed": 0, **options,
    }  # fmt: skip
    return make_splits(
        DataConfig(**(config or {})), arguments.pop("partition_config"), labels=np.array(labels, np.int64), **arguments
    )


def all_rows(splits: Splits) -> list[int]:
    parts = [splits.test, splits.server_validation, splits.proxy]
    parts += [rows for s in splits.clients.values() for rows in (s.train, s.validation)]
    return np.concatenate(parts).tolist()


@given(
    num=st.integers(60, 200), num_classes=st.integers(2, 5), seed=st.integers(0, 99), num_clients=st.integers(1, 6),
    validation=st.sampled_from([0.0, 0.01, 0.1, 0.3]), proxy=st.sampled_from([0.0, 0.01, 0.2]),
    own=st.sampled_from([0.0, 0.01, 0.5]), repeats=st.booleans(),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_splits_are_disjoint_complete_and_not_empty_where_asked(
    num: int, num_classes: int, seed: int, num_clients: int, validation: float, proxy: float, own: float, repeats: bool
) -> None:
    labels = np.arange(num) % num_classes
    keys = [i // 2 if repeats and i % 10 == 1 else -i - 1 if i % 10 else i // 2 for i in range(num)]
    config = {"validation_fraction": validation, "proxy_fraction": proxy, "client_validation_fraction": own}
    made = split(labels, config, keys=keys, num_clients=num_clients, seed=seed)
    rows = all_rows(made)
    first = {key: i for i, key in reversed(list(enumerate(keys)))}
    assert sorted(rows) == sorted(first.values())
    assert len(made.test) > 0
    assert (len(made.server_validation) > 0) == (validation > 0)
    assert (len(made.proxy) > 0) == (proxy > 0)
    assert len(made.clients) == num_clients
    for client in made.clients.values():
        assert len(client.train) > 0
        assert (len(client.validation) > 0) == (own > 0)


def test_same_arguments_give_the_same_splits_and_another_seed_other_ones() -> None:
    labels = np.arange(100) % 3
    assert split(labels).sha256 == split(labels).sha256
    assert split(labels).sha256 != split(labels, seed=1).sha256


def test_test_set_does_not_depend_on_the_number_of_clients_or_the_partition() -> None:
    labels = np.arange(100) % 3
    a = split(labels, num_clients=2)
    b = split(labels, num_clients=7, partition_config=PartitionConfig(kind="dirichlet"))
    assert a.test.tolist() == b.test.tolist()
    assert a.server_validation.tolist() == b.server_validation.tolist()


def test_test_set_holds_each_class_in_its_share() -> None:
    # 0.2 · 100 = 20 rows over classes of 70, 20 and 10: 14, 4 and 2.
    labels = np.repeat([0, 1, 2], [70, 20, 10])
    assert np.bincount(labels[split(labels).test]).tolist() == [14, 4, 2]


def test_shares_are_rounded_by_largest_remainder() -> None:
    # 0.2 · 20 = 4 rows over 9, 8 and 3: 1.8, 1.6, 0.6 → floors 1, 1, 0, the two missing go to 0.8 and to the first 0.6.
    labels = np.repeat([0, 1, 2], [9, 8, 3])
    assert np.bincount(labels[split(labels).test], minlength=3).tolist() == [2, 2, 0]


def test_fractions_count_after_the_test_set_was_taken() -> None:
    made = split(np.zeros(100), {"validation_fraction": 0.1, "proxy_fraction": 0.1, "client_validation_fraction": 0.25})
    # 100 · 0.2 = 20; (100 − 20) · 0.1 = 8 each; 64 over two clients are 32 each, a quarter of which is 8.
    assert (len(made.test), len(made.server_validation), len(made.proxy)) == (20, 8, 8)
    assert [(len(c.train), len(c.validation)) for c in made.clients.values()] == [(24, 8), (24, 8)]


def test_last_example_of_a_class_stays_in_training() -> None:
    made = split([0] * 20 + [1], {"test_fraction": 0.9, "validation_fraction": 0.0})
    assert 20 in np.concatenate([c.train for c in made.clients.values()])


def test_repeated_texts_are_dropped_and_conflicting_labels_counted() -> None:
    made = split([0, 1, 0, 1, 0, 0] + [0, 1] * 10, keys=["a", "a", "a", "b", "b", "c", *range(20)])
    # Of "a" the first of three rows stays (one of the others differs), of "b" the first of two (the other differs).
    assert (made.num_duplicates, made.num_conflicts) == (3, 2)
    assert not {1, 2, 4} & set(all_rows(made))
    assert {0, 3, 5} <= set(all_rows(made))


def test_repeated_texts_stay_where_the_user_wants_them() -> None:
    made = split([0, 1] * 10, {"deduplicate": False}, keys=["a"] * 20)
    assert made.num_duplicates == 0
    assert sorted(all_rows(made)) == list(range(20))


def test_own_test_set_is_used_and_its_texts_leave_training() -> None:
    labels = [0, 1] * 10 + [0, 1, 1]
    made = split(labels, keys=[*range(20), 4, "new", "new"], num_own_test=3)
    assert made.test.tolist() == [20, 21]
    assert 4 not in all_rows(made)
    assert (made.num_leaked, made.num_duplicates, made.num_conflicts) == (1, 1, 0)


def test_limit_draws_that_many_rows_in_the_classes_shares() -> None:
    labels = np.repeat([0, 1], [80, 20])
    made = split(labels, {"limit": 50})
    assert np.bincount(labels[all_rows(made)]).tolist() == [40, 10]


def test_compact_keeps_who_sees_what() -> None:
    labels = np.repeat([0, 1], [80, 20])
    made = split(labels, {"limit": 50, "proxy_fraction": 0.1, "client_validation_fraction": 0.2})
    used, moved = made.compact()
    assert sorted(all_rows(moved)) == list(range(50))
    assert used[all_rows(moved)].tolist() == all_rows(made)


def test_label_that_no_client_trains_is_refused_by_name() -> None:
    # The only training row of class 1 has a text of the test set, so it is dropped.
    with pytest.raises(DataError, match="seen only in the test set: rare"):
        split([0] * 30 + [1, 1], keys=[*range(30), "x", "x"], num_own_test=1, label_names=["often", "rare"])


def test_class_that_the_test_cannot_measure_is_said() -> None:
    made = split([0] * 20 + [1], label_names=["often", "rare"])
    assert made.notes == ("The test set has no example of: rare",)


def test_client_validation_needs_two_examples_of_everybody() -> None:
    owners = ["a"] * 20 + ["b"] * 20 + ["c"] * 20
    config = {"client_validation_fraction": 0.1}
    made = split(
        np.arange(60) % 2, config, groups=owners, num_clients=3, partition_config=PartitionConfig(kind="natural")
    )
    assert list(made.clients) == ["a", "b", "c"]
    keys = [*range(40), *["same"] * 19, "other"]
    with pytest.raises(DataError, match="c"):
        split(
            np.arange(60) % 2, {**config, "test_fraction": 0.5, "validation_fraction": 0.9}, keys=keys, groups=owners,
            num_clients=3, partition_config=PartitionConfig(kind="natural"),
        )  # fmt: skip


def test_client_validation_never_takes_the_last_training_example_of_a_class() -> None:
    labels = np.array([0] * 20 + [1] * 3)
    for seed in range(20):
        made = split(labels, {"client_validation_fraction": 0.9}, num_clients=3, seed=seed)
        assert set(labels[np.concatenate([c.train for c in made.clients.values()])]) == {0, 1}


def test_client_whose_examples_cannot_be_spared_is_named() -> None:
    config = {"client_validation_fraction": 0.5, "validation_fraction": 0.0}
    with pytest.raises(DataError, match='client "client-00"'):
        split([0, 1, 0], config, keys=[0, 1, "test"], num_own_test=1, num_clients=1)


def test_natural_client_that_lost_all_examples_is_named() -> None:
    owners = ["a"] * 10 + ["late"] * 3
    keys = [*range(10), 0, 1, 2]
    with pytest.raises(DataError, match="nothing to train on: late"):
        split(np.arange(13) % 2, keys=keys, groups=owners, partition_config=PartitionConfig(kind="natural"))


def test_fractions_that_leave_nothing_are_refused() -> None:
    with pytest.raises(DataError, match="Nothing would be left"):
        split(np.arange(50) % 2, {"validation_fraction": 0.5, "proxy_fraction": 0.5})


def test_too_few_examples_for_a_test_set_are_refused() -> None:
    with pytest.raises(DataError, match="too few examples"):
        split([0, 1])
