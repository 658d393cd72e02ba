"""Examples for scoring blocks: held out by clients, or given to the server."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fedstrata.data.config import DataConfig, PartitionConfig, TaskConfig
from fedstrata.data.load import SplitData, split_data
from fedstrata.data.proxy import ProxySet, resolve_proxy
from fedstrata.data.splits import Splits, make_splits
from fedstrata.errors import DataError
from fedstrata.train.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer(300)  # [CLS] is 1, [SEP] is 2; one token per byte


def split(labels: Any, config: dict[str, Any] | None = None, **options: Any) -> Splits:
    arguments: dict[str, Any] = {
        "partition_config": PartitionConfig(), "keys": list(range(len(labels))), "groups": None, "num_clients": 2,
        "seed": 0, **options,
    }  # fmt: skip
    made = DataConfig(**(config or {}))
    return make_splits(made, arguments.pop("partition_config"), labels=np.array(labels, np.int64), **arguments)


def rows_of(splits: Splits) -> list[int]:
    parts = [splits.test, splits.server_validation, splits.proxy]
    parts += [rows for s in splits.clients.values() for rows in (s.train, s.validation, s.proxy)]
    return np.concatenate(parts).tolist()


# Held out by clients


@given(
    num=st.integers(150, 300), seed=st.integers(0, 99), num_clients=st.integers(1, 6),
    share=st.sampled_from([0.01, 0.1, 0.3]), own=st.sampled_from([0.0, 0.01, 0.3]),
    kind=st.sampled_from(["iid", "dirichlet", "quantity"]), given_by=st.sampled_from(["config", "caller"]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_every_client_holds_out_its_share_of_training_examples_and_at_least_eight(
    num: int, seed: int, num_clients: int, share: float, own: float, kind: Any, given_by: str
) -> None:
    config: dict[str, Any] = {"client_validation_fraction": own}
    config |= {"client_proxy_fraction": share} if given_by == "config" else {}
    made = split(
        np.arange(num) % 3, config, seed=seed, num_clients=num_clients,
        partition_config=PartitionConfig(kind=kind, alpha=0.1),
        client_proxy_fraction=None if given_by == "config" else share,
    )  # fmt: skip
    assert sorted(rows_of(made)) == list(range(num))
    for client in made.clients.values():
        before = len(client.train) + len(client.proxy)
        assert len(client.train) > 0
        assert len(client.proxy) == min(max(8, round(share * before)), before - 1)
        assert client.proxy.tolist() == sorted(client.proxy.tolist())


def test_nothing_else_moves_when_clients_hold_examples_out() -> None:
    without = split(np.arange(300) % 3, {"client_validation_fraction": 0.1})
    made = split(np.arange(300) % 3, {"client_validation_fraction": 0.1}, client_proxy_fraction=0.1)
    assert made.test.tolist() == without.test.tolist()
    assert made.server_validation.tolist() == without.server_validation.tolist()
    for name, client in made.clients.items():
        assert client.validation.tolist() == without.clients[name].validation.tolist()
        assert sorted([*client.train, *client.proxy]) == without.clients[name].train.tolist()
        assert len(without.clients[name].proxy) == 0
    assert made.sha256 != without.sha256


def test_without_held_out_examples_the_hash_of_the_splits_is_the_old_one() -> None:
    labels = np.arange(60) % 2
    made = split(labels)
    assert made.sha256 == split(labels, client_proxy_fraction=0.0).sha256
    digest = hashlib.sha256(json.dumps(list(made.clients), separators=(",", ":")).encode())
    clients = [rows for s in made.clients.values() for rows in (s.train, s.validation)]
    for rows in (made.test, made.server_validation, made.proxy, *clients):
        digest.update(len(rows).to_bytes(8, "little") + rows.astype("<i8").tobytes())
    assert made.sha256 == digest.hexdigest()


def test_held_out_examples_come_from_a_stream_of_their_own() -> None:
    labels = np.arange(300) % 3
    a = split(labels, client_proxy_fraction=0.1).clients["client-00"].proxy.tolist()
    b = split(labels, client_proxy_fraction=0.1).clients["client-00"].proxy.tolist()
    more = split(labels, client_proxy_fraction=0.2).clients["client-00"].proxy.tolist()
    assert a == b
    assert set(a) < set(more)


def test_the_callers_share_comes_before_the_files() -> None:
    made = split(np.arange(300) % 3, {"client_proxy_fraction": 0.3}, client_proxy_fraction=0.0)
    assert all(len(c.proxy) == 0 for c in made.clients.values())


def test_a_skewed_partition_leaves_everybody_enough_to_hold_out() -> None:
    made = split(
        np.arange(200) % 2, num_clients=10, client_proxy_fraction=0.1,
        partition_config=PartitionConfig(kind="dirichlet", alpha=0.01),
    )  # fmt: skip
    assert min(len(c.train) for c in made.clients.values()) >= 1
    assert all(len(c.proxy) >= 8 for c in made.clients.values())


def test_too_few_training_examples_name_the_clients_and_the_key() -> None:
    # 60 − 12 − 5 = 43 rows over 5 clients: 9, 9, 9, 8, 8; eight of nine can go, eight of eight cannot.
    with pytest.raises(DataError, match="too few training examples to hold 8 out") as caught:
        split(np.arange(60) % 2, num_clients=5, client_proxy_fraction=0.1)
    assert caught.value.where == "data.client_proxy_fraction = 0.1"
    assert caught.value.got == "client-03 (8), client-04 (8)"


def test_a_natural_client_with_too_few_examples_is_named() -> None:
    groups = ["big"] * 60 + ["small"] * 12
    with pytest.raises(DataError, match="too few training examples") as caught:
        split(
            np.arange(72) % 2, groups=groups, partition_config=PartitionConfig(kind="natural"),
            client_proxy_fraction=0.1, config={"test_fraction": 0.3},
        )  # fmt: skip
    assert "small" in str(caught.value.got)
    assert "big" not in str(caught.value.got)


def test_the_last_training_example_of_a_label_is_not_held_out() -> None:
    for seed in range(20):
        labels = np.array([0] * 100 + [1] * 4)
        made = split(labels, {"test_fraction": 0.01, "validation_fraction": 0.0}, seed=seed, client_proxy_fraction=0.9)
        left = np.concatenate([c.train for c in made.clients.values()])
        assert set(labels[left]) == {0, 1}


def test_a_share_of_one_is_refused() -> None:
    with pytest.raises(ValidationError):
        DataConfig(client_proxy_fraction=1.0)


# Given to the server


def write(folder: Path, name: str, rows: list[tuple[str, str]], header: str = "text,label") -> None:
    (folder / name).write_text("\n".join([header, *(",".join(row) for row in rows)]) + "\n")


def data_of(folder: Path, **config: Any) -> tuple[DataConfig, SplitData]:
    write(folder, "t.csv", [(f"text number {i}", "xyz"[i % 3]) for i in range(90)])
    made = DataConfig(**{"source": "t.csv", **config})
    return made, split_data(made, TaskConfig(), PartitionConfig(), num_clients=3, seed=0, base_dir=folder)


def resolve(folder: Path, source: Any, *, tokenizer: Any = TOKENIZER, seed: int = 0, **options: Any) -> ProxySet:
    number = options.pop("num_random", None)
    limit = options.pop("max_positions", None)
    config, data = data_of(folder, **options)
    return resolve_proxy(
        source, config, data, tokenizer=tokenizer, max_length=24, max_positions=limit, seed=seed, base_dir=folder,
        num_random=number,
    )  # fmt: skip


def words(found: ProxySet) -> list[str]:
    return [TOKENIZER.decode(ids, skip_special_tokens=True) for ids in found.examples.input_ids]


def test_public_examples_are_the_share_that_the_server_took_out(tmp_path: Path) -> None:
    _, data = data_of(tmp_path, proxy_fraction=0.1)
    found = resolve(tmp_path, "public", proxy_fraction=0.1)
    assert words(found) == [data.examples.texts[i] for i in data.splits.proxy]
    assert found.examples.labels.tolist() == data.labels[data.splits.proxy].tolist()
    assert found.name == "a share of t.csv (data.proxy_fraction = 0.1)"
    assert found.sha256 == found.examples.sha256
    trained = {data.examples.texts[i] for c in data.splits.clients.values() for i in c.train}
    assert trained.isdisjoint(words(found))


def test_public_examples_can_come_from_a_file_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, "p.csv", [("one", "z"), ("two", "x")])
    found = resolve(tmp_path, "public", proxy_source="p.csv")
    assert words(found) == ["one", "two"]
    assert found.examples.labels.tolist() == [2, 0]
    assert found.sha256 == hashlib.sha256((tmp_path / "p.csv").read_bytes()).hexdigest()
    assert found.to_json() == {
        "source": "public", "name": "p.csv", "sha256": found.sha256, "num_examples": 2, "notes": [],
    }  # fmt: skip


def test_a_file_of_its_own_may_have_other_columns(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"review": "one", "stars": "x"}\n{"review": "two", "stars": "y"}\n')
    columns = {"text": "text", "label": "label"}
    assert words(resolve(tmp_path, "public", proxy_source="p.jsonl", columns=columns)) == ["one", "two"]


def test_public_labels_that_the_task_does_not_know_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "p.csv", [("one", "z"), ("two", "good")])
    with pytest.raises(DataError, match="does not know: good") as caught:
        resolve(tmp_path, "public", proxy_source="p.csv")
    assert caught.value.where == 'data.proxy_source = "p.csv": p.csv line 3'


def test_labels_of_another_domain_stand_for_classes_in_order(tmp_path: Path) -> None:
    # bad, fair, good, mixed → 0, 1, 2, 3 mod 3; a name that the task knows keeps its class (y = 1).
    write(tmp_path, "p.csv", [("a", "good"), ("b", "bad"), ("c", "mixed"), ("d", "fair"), ("e", "y"), ("f", "bad")])
    found = resolve(tmp_path, "other_domain", proxy_source="p.csv")
    assert found.examples.labels.tolist() == [2, 0, 0, 1, 1, 0]
    assert found.notes == ("4 labels of the other domain stand for the task's classes in order",)


@pytest.mark.parametrize("source", ["public", "other_domain"])
@pytest.mark.parametrize("place", ["gone.csv", "package:gone"])
def test_a_missing_file_is_an_error_that_names_the_key(tmp_path: Path, source: Any, place: str) -> None:
    with pytest.raises(DataError) as caught:
        resolve(tmp_path, source, proxy_source=place)
    assert f'data.proxy_source = "{place}"' in str(caught.value.where)


def test_no_examples_at_all_name_the_keys_that_bring_some(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.proxy_fraction"):
        resolve(tmp_path, "public")
    with pytest.raises(DataError, match=r"data\.proxy_source"):
        resolve(tmp_path, "other_domain", proxy_fraction=0.1)
    write(tmp_path, "p.csv", [("one", "z"), ("two", "x")])
    with pytest.raises(DataError, match="given twice"):
        resolve(tmp_path, "public", proxy_fraction=0.1, proxy_source="p.csv")
    with pytest.raises(DataError, match="without a tokenizer"):
        resolve(tmp_path, "test_leaky", tokenizer=None)


def test_the_test_set_is_used_only_by_name(tmp_path: Path) -> None:
    _, data = data_of(tmp_path)
    found = resolve(tmp_path, "test_leaky")
    assert words(found) == [data.examples.texts[i] for i in data.splits.test]
    assert found.name == "the test set of t.csv"


def test_random_tokens_are_ordinary_ones_between_the_models_special_ones(tmp_path: Path) -> None:
    found = resolve(tmp_path, "random_tokens", num_random=400)
    ids = np.stack(found.examples.input_ids)
    assert ids.shape == (400, 24)
    assert (ids[:, 0] == 1).all()
    assert (ids[:, -1] == 2).all()
    # 256 ordinary tokens, numbers 4 to 259; 400 · 22 draws leave none out (chance of a gap below 256·e^−34)
    assert set(ids[:, 1:-1].ravel().tolist()) == set(range(4, 260))
    counts = np.bincount(found.examples.labels, minlength=3)
    assert counts.sum() == 400
    assert np.abs(counts - 400 / 3).max() < 5 * np.sqrt(400 * (1 / 3) * (2 / 3))


def test_random_tokens_follow_the_seed_and_the_models_longest_input(tmp_path: Path) -> None:
    first = resolve(tmp_path, "random_tokens")
    assert len(first.examples) == 64
    assert first.sha256 == resolve(tmp_path, "random_tokens").sha256 == first.examples.sha256
    assert first.sha256 != resolve(tmp_path, "random_tokens", seed=1).sha256
    short = resolve(tmp_path, "random_tokens", max_positions=7)
    assert set(short.examples.lengths.tolist()) == {7}
    with pytest.raises(DataError, match="Random tokens cannot be drawn"):
        resolve(tmp_path, "random_tokens", max_positions=2)
