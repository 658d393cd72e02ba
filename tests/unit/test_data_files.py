from __future__ import annotations

import csv
import hashlib
import json
import sys
from pathlib import Path

import pytest

from fedstrata.data.files import READERS, read_file, sniff_delimiter
from fedstrata.errors import AssetError, DataError


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_csv_keeps_commas_and_line_breaks_inside_quotes(tmp_path: Path) -> None:
    table = read_file(write(tmp_path / "a.csv", 'text,label\n"one, two\nthree",x\nfour,y\n'))
    assert table.columns == {"text": ["one, two\nthree", "four"], "label": ["x", "y"]}
    assert table.format == "CSV"


def test_a_row_is_named_by_the_line_it_starts_on(tmp_path: Path) -> None:
    table = read_file(write(tmp_path / "a.csv", 'text,label\n"one\ntwo",x\n\nfour,y\n'))
    assert [table.where(i) for i in range(2)] == ["a.csv line 2", "a.csv line 5"]


@pytest.mark.parametrize(("delimiter", "suffix"), [(",", "csv"), ("\t", "tsv"), (";", "csv"), ("|", "csv")])
def test_delimiter_is_found_although_texts_hold_the_others(tmp_path: Path, delimiter: str, suffix: str) -> None:
    others = " ".join(d for d in ",;|" if d != delimiter)
    rows = [["text", "label"], [f"a {others} b", "x"], ["c d", "y"]]
    path = write(tmp_path / f"a.{suffix}", "\n".join(delimiter.join(row) for row in rows))
    assert read_file(path).columns == {"text": [f"a {others} b", "c d"], "label": ["x", "y"]}


def test_header_alone_decides_where_no_delimiter_fits_every_row() -> None:
    assert sniff_delimiter("text;label\na;b;c\nd;e\n") == ";"


def test_row_of_another_length_is_named_with_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,label\ngood,x\nwell, well,x\n")
    with pytest.raises(DataError) as caught:
        read_file(path)
    assert caught.value.where == f"{path} line 3"
    assert caught.value.expected.startswith("2 columns")
    assert caught.value.got.startswith("3:")


def test_open_quotation_mark_is_named_with_its_line_and_swallows_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'text,label\nfine,x\n"never closed,x\nmore,y\n')
    with pytest.raises(DataError, match="quotation marks") as caught:
        read_file(path)
    assert caught.value.where == f"{path} line 3"


def test_tsv_may_hold_bare_quotation_marks(tmp_path: Path) -> None:
    table = read_file(write(tmp_path / "a.tsv", 'text\tlabel\n"Good" he said\tx\n"open\ty\n'))
    assert table.columns["text"] == ['"Good" he said', '"open']


def test_cell_longer_than_the_limit_of_the_csv_module_is_read_and_the_limit_put_back(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    long = "w" * (before + 1)
    table = read_file(write(tmp_path / "a.csv", f"text,label\n{long},x\n"))
    assert table.columns["text"] == [long]
    assert csv.field_size_limit() == before


def test_byte_order_mark_is_not_part_of_the_first_name(tmp_path: Path) -> None:
    assert list(read_file(write(tmp_path / "a.csv", b"\xef\xbb\xbftext,label\na,b\n")).columns) == ["text", "label"]


def test_latin_1_is_read_and_said(tmp_path: Path) -> None:
    table = read_file(write(tmp_path / "a.csv", "text,label\ncaf\xe9,x\n".encode("latin-1")))
    assert table.columns["text"] == ["café"]
    assert table.notes == ("a.csv is not UTF-8; it was read as latin-1",)


def test_utf_16_with_its_mark_is_read(tmp_path: Path) -> None:
    table = read_file(write(tmp_path / "a.csv", "text,label\ncafé,x\n".encode("utf-16")))
    assert table.columns == {"text": ["café"], "label": ["x"]}


def test_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a text file"):
        read_file(write(tmp_path / "a.csv", b"PAR1\0\0\1\0"))


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="same name"):
        read_file(write(tmp_path / "a.csv", "text,text\na,b\n"))


def test_nameless_index_column_gets_a_name(tmp_path: Path) -> None:
    assert list(read_file(write(tmp_path / "a.csv", ",text\n0,a\n")).columns) == ["column_1", "text"]


def test_jsonl_fills_missing_keys_and_skips_blank_lines(tmp_path: Path) -> None:
    table = read_file(write(tmp_path / "a.jsonl", '{"text": "a", "label": 1}\n\n{"text": "b", "more": 2}\n'))
    assert table.columns == {"text": ["a", "b"], "label": [1, None], "more": [None, 2]}
    assert table.where(1) == "a.jsonl line 3"


@pytest.mark.parametrize("broken", ['{"text": "b"', "[1]", '"text"', "[" * 100_000])
def test_broken_json_line_is_named_with_its_number(tmp_path: Path, broken: str) -> None:
    path = write(tmp_path / "a.jsonl", f'{{"text": "a"}}\n{broken}\n{{"text": "c"}}\n')
    with pytest.raises(DataError) as caught:
        read_file(path)
    assert caught.value.where == f"{path} line 2"


def test_json_array_is_read(tmp_path: Path) -> None:
    table = read_file(write(tmp_path / "a.json", json.dumps([{"text": "a", "label": "x"}])))
    assert table.columns == {"text": ["a"], "label": ["x"]}
    assert table.where(0) == "a.json row 1"


def test_json_object_around_one_list_is_read_and_said(tmp_path: Path) -> None:
    table = read_file(write(tmp_path / "a.json", json.dumps({"version": 1, "data": [{"text": "a"}]})))
    assert table.columns == {"text": ["a"]}
    assert table.notes == ('a.json is one object; its list "data" was read',)


def test_json_file_with_one_object_per_line_is_read_as_jsonl(tmp_path: Path) -> None:
    assert read_file(write(tmp_path / "a.json", '{"text": "a"}\n{"text": "b"}\n')).format == "JSONL"


def test_broken_json_is_named_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", '[\n{"text": "a"},\n{"text" "b"}]')
    with pytest.raises(DataError) as caught:
        read_file(path)
    assert caught.value.where == f"{path} line 3"


@pytest.mark.parametrize("content", ["3", '{"a": 1}', "[1, 2]", "[" * 100_000])
def test_json_that_is_no_list_of_objects_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(DataError):
        read_file(write(tmp_path / "a.json", content))


def test_parquet_is_read(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a", "b"], "label": [1, 0]}), tmp_path / "a.parquet")
    assert read_file(tmp_path / "a.parquet").columns == {"text": ["a", "b"], "label": [1, 0]}


def test_damaged_parquet_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match="not Parquet"):
        read_file(write(tmp_path / "a.parquet", b"PAR1 and then nothing"))


def test_parquet_without_pyarrow_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(AssetError, match=r"pip install 'fedstrata\[data\]'"):
        read_file(write(tmp_path / "a.parquet", b"PAR1"))


@pytest.mark.parametrize("content", ["", "text,label\n"])
def test_file_without_examples_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(DataError, match="no examples"):
        read_file(write(tmp_path / "a.csv", content))


def test_unknown_ending_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_file(write(tmp_path / "a.xlsx", "x"))
    assert all(suffix in caught.value.expected for suffix in READERS)


def test_hash_is_that_of_the_bytes(tmp_path: Path) -> None:
    content = b"text,label\na,b\n"
    assert read_file(write(tmp_path / "a.csv", content)).sha256 == hashlib.sha256(content).hexdigest()
