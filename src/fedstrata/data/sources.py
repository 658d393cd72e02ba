"""Where examples come from: a package, a file, a folder per class, or a hub data set."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from fedstrata.core.wire import canonical_json
from fedstrata.data.assets import find_asset, list_assets
from fedstrata.data.config import DataConfig
from fedstrata.data.files import READERS, decode, read_file
from fedstrata.data.table import RawTable, count, name_some
from fedstrata.discovery import place_of
from fedstrata.errors import AssetError, DataError, did_you_mean
from fedstrata.registry import FunctionTable

PACKAGE = "package:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def load_table(config: DataConfig, base_dir: Path) -> RawTable:
    """Reads the training source.

    Args:
        config: `[data]`.
        base_dir: What relative paths are relative to: the folder of the experiment file.

    Raises:
        DataError: If the source does not exist or cannot be read.
        AssetError: If a package is missing; names the command that brings it.
    """
    return _load(config.source, config, base_dir, split=config.split)


def load_test_table(config: DataConfig, base_dir: Path) -> RawTable | None:
    """Reads the test set's own source, None where `test_source` is not set.

    `test_source` is a source like any other, or the name of a split of the hub data set that `source` names.
    """
    if config.test_source is None:
        return None
    if is_hub_id(config.source, base_dir) and re.fullmatch(r"\w+", config.test_source):
        return _load(config.source, config, base_dir, split=config.test_source)
    return _load(config.test_source, config, base_dir, split="test")


def local_path(source: str, base_dir: Path) -> Path:
    """The path that a source would be; a relative one starts at `base_dir`."""
    return base_dir / Path(source).expanduser()


def is_hub_id(source: str, base_dir: Path) -> bool:
    """Whether a source can only be a hub id: no package, no path that exists, and not written like a path."""
    if source.startswith(PACKAGE) or local_path(source, base_dir).exists():
        return False
    looks_like_file = Path(source).suffix.lower() in READERS or source.startswith((".", "/", "~"))
    return not looks_like_file and _HUB_ID.fullmatch(source) is not None


def _load(source: str, config: DataConfig, base_dir: Path, *, split: str) -> RawTable:
    prefix, colon, rest = (source, ":", "") if SOURCES.is_referred(source) else source.partition(":")
    if colon and prefix in SOURCES:
        table: Any = SOURCES[prefix](rest, base_dir, split)
        if not isinstance(table, RawTable):
            raise DataError(
                f'The source "{prefix}" gives no table',
                where=place_of(SOURCES[prefix]),
                expected="a function (rest, folder, split) that returns fedstrata.data.table.RawTable",
                got=f"{table!r}"[:200],
            )
        return table
    path = local_path(source, base_dir)
    if path.is_dir():
        return read_folder(path, path.name)
    if path.exists():
        return read_file(path)
    if is_hub_id(source, base_dir):
        return _read_hub(source, config, split)
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = did_you_mean(path.name, [s for s in siblings if Path(s).suffix.lower() in READERS])
    raise DataError(
        "The data file does not exist", where=str(path), got=source,
        do=f"in that folder: {hint}" if siblings else "check the path; it is relative to the experiment file",
    )  # fmt: skip


def _read_package(name: str, base_dir: Path, split: str) -> RawTable:
    known = {a.name for a in list_assets() if a.kind == "data"}
    if name not in known:
        raise DataError(f'There is no packaged data set "{name}"', where="data.source", do=did_you_mean(name, known))
    return read_folder(find_asset(name), PACKAGE + name)


Read: TypeAlias = Callable[[str, Path, str], RawTable]
"""What stands behind the prefix, the folder of relative paths, the split → the rows."""

SOURCES: FunctionTable[Read] = FunctionTable("source", {"package": _read_package})
"""By prefix (`package:NAME`); entry-point group `fedstrata.sources`."""


def read_folder(folder: Path, source: str) -> RawTable:
    """Reads a folder with one sub-folder of `.txt` files per class; a file is one example.

    Args:
        folder: The folder.
        source: What messages call it.

    Raises:
        DataError: If there is no such sub-folder; says what is there instead.
    """
    try:
        classes = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith((".", "__")))
        files = {c: sorted(p for p in c.iterdir() if p.suffix.lower() == ".txt" and p.is_file()) for c in classes}
    except OSError as error:
        raise DataError("The data folder cannot be read", where=str(folder), got=error.strerror) from error
    if not any(files.values()):
        raise _not_a_class_folder(folder, classes)
    digest = hashlib.sha256()
    texts: list[Any] = []
    labels: list[Any] = []
    places: list[int | str] = []
    not_utf8: list[str] = []
    for path in (p for c in classes for p in files[c]):
        data = path.read_bytes()
        place = f"{path.parent.name}/{path.name}"
        digest.update(f"{place}\0{hashlib.sha256(data).hexdigest()}\n".encode())
        text, note = decode(data, f"{source}: {place}")
        if note:
            not_utf8.append(place)
        texts.append(text)
        labels.append(path.parent.name)
        places.append(f"{source}: {place}")
    notes = []
    if not_utf8:
        notes.append(f"{source}: {count(len(not_utf8), 'file')} not in UTF-8, read as latin-1 ({name_some(not_utf8)})")
    empty = [c.name for c in classes if not files[c]]
    if empty:
        notes.append(f"{source}: folders without .txt files were passed over ({name_some(empty)})")
    columns = {"text": texts, "label": labels}
    return RawTable(columns, source, "folder of texts", digest.hexdigest(), places, tuple(notes))


def _not_a_class_folder(folder: Path, classes: list[Path]) -> DataError:
    deeper = [c.name for c in classes if any(c.glob("*/*.txt"))]
    data_files = sorted(p.name for p in folder.iterdir() if p.suffix.lower() in READERS)
    if deeper:
        do = f'name one of them: "{folder.name}/{deeper[0]}", and another one as test_source'
    elif data_files:
        do = f'name the file: "{folder.name}/{data_files[0]}"'
    else:
        do = "put each class into a sub-folder that carries its name"
    found = [*(f"{c.name}/" for c in classes), *data_files]
    return DataError(
        "This folder holds no class folders", where=str(folder),
        expected="one sub-folder of .txt files per class", got=name_some(found) or "nothing that can be read", do=do,
    )  # fmt: skip


def _read_hub(source: str, config: DataConfig, split: str) -> RawTable:
    try:
        import datasets
    except ImportError as error:
        raise AssetError(
            "Hub data sets need the package datasets", where=f"data.source = {source!r}",
            do="run `pip install 'fedstrata[data]'`",
        ) from error  # fmt: skip
    try:
        loaded = datasets.load_dataset(source, name=config.subset, split=split, revision=config.revision)
    except Exception as error:
        # The library raises a dozen unrelated kinds of error here; all of them mean: not loaded.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(
            f'The hub data set "{source}" cannot be loaded', where=f"split {split}",
            got=f"{type(error).__name__}: {reason[0]}",
            do="check its name, subset and split; without a network, name a local file or folder, or run once "
            "with a network so that it is cached",
        ) from error  # fmt: skip
    columns: dict[str, list[Any]] = {}
    for name, feature in loaded.features.items():
        values = list(loaded[name])
        names = getattr(feature, "names", None)
        if names is not None:
            # A class label is stored as a number, -1 where it is unknown.
            values = [names[v] if isinstance(v, int) and 0 <= v < len(names) else None for v in values]
        columns[name] = values
    digest = hashlib.sha256()
    for name, values in columns.items():
        digest.update(canonical_json([name, [str(v) for v in values]]))
    table = RawTable(columns, f"{source}[{split}]", "hub data set", digest.hexdigest())
    if not table.num_rows:
        raise DataError("The hub data set holds no examples", where=table.source)
    return table
