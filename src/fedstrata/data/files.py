"""Readers of single files: CSV, TSV, JSON, JSONL and Parquet. Mistakes are named with file and line."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedstrata.data.table import RawTable, count, name_some
from fedstrata.errors import AssetError, DataError

DELIMITERS = (",", "\t", ";", "|")
_NAMES = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
_SNIFFED_ROWS = 50
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_JSON_KINDS = {
    dict: "an object",
    list: "an array",
    str: "a text",
    bool: "true or false",
    int: "a number",
    float: "a number",
}


def decode(data: bytes, where: str) -> tuple[str, str | None]:
    """Text from bytes: UTF-8 (with or without a mark), UTF-16 with a mark, otherwise latin-1.

    Returns:
        The text, and a note when it was neither.

    Raises:
        DataError: If this is no text at all.
    """
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        try:
            return data.decode("utf-16"), None
        except UnicodeDecodeError as error:
            raise DataError("The file starts like UTF-16 but is not", where=where, got=error.reason) from error
    if b"\0" in data:
        raise DataError(
            "This is not a text file", where=where, got="zero bytes",
            expected="UTF-8 text; a Parquet file must end in .parquet",
        )  # fmt: skip
    try:
        return data.decode("utf-8-sig"), None
    except UnicodeDecodeError:
        return data.decode("latin-1"), f"{where} is not UTF-8; it was read as latin-1"


def read_file(path: Path) -> RawTable:
    """Reads a file by its ending.

    Raises:
        DataError: If it cannot be read, is empty, of an unknown format, or damaged.
        AssetError: If a Parquet file needs a package that is missing.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            "This kind of file cannot be read", where=str(path), got=path.suffix or "no ending",
            expected=f"one of {', '.join(READERS)}, or a folder with one sub-folder of .txt files per class",
        )  # fmt: skip
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError("The data file cannot be read", where=str(path), got=error.strerror or str(error)) from error
    table = reader(path, data)
    if not table.num_rows:
        raise DataError("The data file holds no examples", where=str(path), got=f"{len(data)} bytes")
    return table


def _read_csv(path: Path, data: bytes) -> RawTable:
    text, note = decode(data, path.name)
    with _large_fields():
        delimiter = sniff_delimiter(text, prefer="\t" if path.suffix.lower() in (".tsv", ".tab") else None)
        try:
            header, rows = _csv_rows(path, text, delimiter, csv.QUOTE_MINIMAL)
        except DataError:
            if delimiter != "\t":
                raise
            # Tab-separated files often hold bare quotation marks.
            try:
                header, rows = _csv_rows(path, text, delimiter, csv.QUOTE_NONE)
            except DataError:
                header, rows = _csv_rows(path, text, delimiter, csv.QUOTE_MINIMAL)
    columns: dict[str, list[Any]] = {name: [row[i] for _, row in rows] for i, name in enumerate(header)}
    kind = "TSV" if delimiter == "\t" else "CSV"
    notes = [note] if note else []
    if delimiter in ";|":
        notes.append(f"{path.name} is separated by {_NAMES[delimiter]}")
    return _table(path, data, kind, columns, [line for line, _ in rows], notes)


def sniff_delimiter(text: str, prefer: str | None = None) -> str:
    r"""The delimiter that cuts the first rows into the same number of columns, the most if several do.

    Example:
        >>> sniff_delimiter("text;label\nyes, it is;good\n")
        ';'
    """
    best: tuple[bool, bool, int] = (False, False, 0)
    chosen = prefer or ","
    for delimiter in DELIMITERS:
        try:
            reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
            rows = [row for row, _ in zip(reader, range(_SNIFFED_ROWS), strict=False) if row]
        except csv.Error:
            continue
        width = len(rows[0]) if rows else 0
        score = (width > 1 and all(len(row) == width for row in rows), width > 1 and delimiter == prefer, width)
        if width > 1 and score > best:
            best, chosen = score, delimiter
    return chosen


def _csv_rows(path: Path, text: str, delimiter: str, quoting: Any) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The header, and the rows with the line that each starts on."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True, quoting=quoting)
    rows: list[tuple[int, list[str]]] = []
    header: list[str] | None = None
    start = 1
    try:
        for row in reader:
            line, start = start, reader.line_num + 1
            if not any(row):
                continue
            if header is None:
                header = _header(path, row)
            elif len(row) != len(header):
                raise DataError(
                    "A row has another length than the header", where=f"{path} line {line}",
                    expected=f"{len(header)} columns separated by {_NAMES[delimiter]}: {name_some(header)}",
                    got=f"{len(row)}: {name_some([repr(cell[:30]) for cell in row])}",
                    do='put texts that contain the separator between "quotation marks"',
                )  # fmt: skip
            else:
                rows.append((line, row))
    except csv.Error as error:
        raise DataError(
            "The file's quotation marks do not match", where=f"{path} line {start}", got=str(error),
            do='a quotation mark inside a quoted text is written twice: ""',
        ) from error  # fmt: skip
    return header or [], rows


def _header(path: Path, row: list[str]) -> list[str]:
    names = [name.strip() or f"column_{i + 1}" for i, name in enumerate(row)]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DataError(
            "Two columns have the same name", where=f"{path} line 1", got=name_some(repeated),
            expected="a first row with one name per column",
        )  # fmt: skip
    return names


@contextmanager
def _large_fields() -> Iterator[None]:
    """Lets a cell be longer than csv's 131,072 characters, and puts the limit back."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _read_jsonl(path: Path, data: bytes) -> RawTable:
    text, note = decode(data, path.name)
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                "A line is not JSON", where=f"{path} line {number}", got=f"{error}: {line.strip()[:60]!r}",
                expected="one JSON object per line",
            ) from error  # fmt: skip
        if not isinstance(value, dict):
            raise DataError(
                "A line is not a JSON object", where=f"{path} line {number}", got=_JSON_KINDS.get(type(value), "null"),
                expected='an object such as {"text": "…", "label": "…"}',
            )  # fmt: skip
        rows.append(value)
        lines.append(number)
    columns, broken = _columns(rows)
    return _table(path, data, "JSONL", columns, lines, [*([note] if note else []), *_broken_note(path, broken)])


def _read_json(path: Path, data: bytes) -> RawTable:
    text, note = decode(data, path.name)
    notes = [note] if note else []
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise DataError("The file is not JSON", where=str(path), got="too many nested brackets") from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            return _read_jsonl(path, data)
        raise DataError(
            "The file is not JSON", where=f"{path} line {error.lineno}", got=error.msg,
            expected="an array of objects; one object per line belongs into a .jsonl file",
        ) from error  # fmt: skip
    except ValueError as error:
        raise DataError("The file is not JSON", where=str(path), got=str(error)) from error
    if isinstance(value, dict):
        lists = {k: v for k, v in value.items() if isinstance(v, list) and v and isinstance(v[0], dict)}
        if len(lists) == 1:
            key, value = next(iter(lists.items()))
            notes.append(f'{path.name} is one object; its list "{key}" was read')
    if not isinstance(value, list):
        raise DataError(
            "The file does not hold a list of examples", where=str(path), got=_JSON_KINDS.get(type(value), "null"),
            expected='an array such as [{"text": "…", "label": "…"}]',
        )  # fmt: skip
    for i, row in enumerate(value):
        if not isinstance(row, dict):
            raise DataError(
                "An example is not a JSON object", where=f"{path} item {i + 1}", got=_JSON_KINDS.get(type(row), "null"),
                expected='an object such as {"text": "…", "label": "…"}',
            )  # fmt: skip
    columns, broken = _columns(value)
    return _table(path, data, "JSON", columns, [], [*notes, *_broken_note(path, broken)])


def _read_parquet(path: Path, data: bytes) -> RawTable:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise AssetError(
            "Reading Parquet needs the package pyarrow", where=str(path), do="run `pip install 'fedstrata[data]'`"
        ) from error
    try:
        columns: dict[str, list[Any]] = pq.read_table(pa.BufferReader(data)).to_pydict()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError("The file is not Parquet", where=str(path), got=str(error).splitlines()[0]) from error
    return _table(path, data, "Parquet", columns, [], [])


def _columns(rows: Iterable[dict[str, Any]]) -> tuple[dict[str, list[Any]], int]:
    r"""Columns from objects, and how many cells were mended; a key that an object lacks is None.

    JSON can hold one half of a surrogate pair, e.g. `"\ud83d"` where an emoji was cut. It is no character: U+FFFD
    takes its place.
    """
    rows = list(rows)
    names = list(dict.fromkeys(key for row in rows for key in row))
    cells = {name: [_whole(row.get(name)) for row in rows] for name in names}
    broken = sum(value is not row.get(name) for name in names for value, row in zip(cells[name], rows, strict=True))
    return {_whole(name): values for name, values in cells.items()}, broken


def _whole(value: Any) -> Any:
    return _HALF_PAIR.sub("\ufffd", value) if isinstance(value, str) and _HALF_PAIR.search(value) else value


def _broken_note(path: Path, broken: int) -> list[str]:
    if not broken:
        return []
    return [f"{path.name}: {count(broken, 'cell')} with half a character (a cut emoji); U+FFFD stands there now"]


def _table(
    path: Path, data: bytes, kind: str, columns: dict[str, list[Any]], lines: list[int], notes: list[str]
) -> RawTable:
    return RawTable(columns, path.name, kind, hashlib.sha256(data).hexdigest(), lines, tuple(notes))


READERS = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".tab": _read_csv,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".parquet": _read_parquet,
}
