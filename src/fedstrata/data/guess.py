"""What a first experiment on somebody's data should look like, with the reasons."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from fedstrata.data.columns import MAX_GUESSED_CLASSES, ColumnChoice, choose_columns, looks_like_id
from fedstrata.data.config import DataConfig, PartitionConfig, TaskConfig
from fedstrata.data.examples import column_names, label_names, make_examples
from fedstrata.data.load import split_data
from fedstrata.data.sources import load_table
from fedstrata.data.table import RawTable, cell_text, is_missing
from fedstrata.errors import DataError

MAX_CLIENTS = 10
MAX_NATURAL_CLIENTS = 50
EXAMPLES_PER_CLIENT = 20
MAX_LENGTH = 128
_TOKENS_PER_WORD = 1.4
_ROLES_THAT_TRAIN = ("text", "text_pair", "label")


@dataclass(frozen=True)
class Guess:
    """A first experiment.

    Attributes:
        path: The file or folder.
        format: What it is.
        columns: Column by role, each with its reason.
        num_rows: Rows of the file.
        num_empty: Rows without a text or a label; they are dropped.
        class_sizes: Examples per class, in the order of the classes.
        num_clients: Pretend clients.
        clients_reason: Why so many.
        partition: How examples are spread over them.
        partition_reason: Why so.
        natural_column: A column that looks like a client id, used or not.
        max_length: Longest input in tokens.
        length_reason: Why so long.
        notes: What a user should be told.
    """

    path: Path
    format: str
    columns: dict[str, ColumnChoice]
    num_rows: int
    num_empty: int
    class_sizes: dict[str, int]
    num_clients: int
    clients_reason: str
    partition: Literal["natural", "dirichlet", "iid"]
    partition_reason: str
    natural_column: str | None
    max_length: int
    length_reason: str
    notes: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        """Classes."""
        return len(self.class_sizes)

    @property
    def experiment_columns(self) -> dict[str, str]:
        """The columns that the experiment names; none for a folder of texts, where they are fixed."""
        if self.format == "folder of texts":
            return {}
        needed = (*_ROLES_THAT_TRAIN, *(("client",) if self.partition == "natural" else ()))
        return {role: choice.column for role, choice in self.columns.items() if role in needed}


def guess_experiment(path: Path, named: Mapping[str, str] | None = None) -> Guess:
    """Looks at a data file or folder and proposes an experiment that runs.

    Args:
        path: A CSV, TSV, JSON, JSONL or Parquet file, or a folder with one sub-folder of texts per class.
        named: Columns by role that are known and need no guess.

    Raises:
        DataError: If it cannot be read, or the text or label column cannot be told.
    """
    path = path.resolve()
    table = load_table(DataConfig(source=str(path)), path.parent)
    columns = choose_columns(table, named or {})
    names = column_names(columns)
    roles = {role: column for role, column in names.items() if role in _ROLES_THAT_TRAIN}
    examples = make_examples(table, roles, empty="drop")
    counts = Counter(examples.labels)
    sizes = {name: counts[name] for name in label_names(examples.labels, where=table.source)}
    words = np.array([len(a.split()) + len(b.split()) for a, b in examples.keys])
    max_length, length_reason = _max_length(words)
    natural = columns["client"] if "client" in columns else _client_like(table, columns)
    if natural is not None:
        columns["client"] = natural

    num_clients = max(1, min(MAX_CLIENTS, len(examples) * 72 // 100 // EXAMPLES_PER_CLIENT))
    clients_reason = f"about {EXAMPLES_PER_CLIENT} or more training examples each, at most {MAX_CLIENTS} clients"
    partition: Literal["natural", "dirichlet", "iid"] = "dirichlet"
    partition_reason = "no column names a client; labels are spread unevenly, as real clients have them"
    if num_clients == 1:
        partition = "iid"
        partition_reason = "there are too few examples for several clients with different labels"
    if natural is not None:
        owners = len({cell_text(v) for v in table.columns[natural.column] if not is_missing(v)})
        problem = _natural_problem(path, roles, natural.column, owners)
        if problem is None:
            num_clients, partition = owners, "natural"
            clients_reason = f'the column "{natural.column}" has {owners} different values'
            partition_reason = f'"{natural.column}" names the client: {natural.reason}'
        else:
            partition_reason = f'the column "{natural.column}" looks like a client id but is not used: {problem}'
    guess = Guess(
        path=path,
        format=table.format,
        columns=columns,
        num_rows=table.num_rows,
        num_empty=table.num_rows - len(examples),
        class_sizes=sizes,
        num_clients=num_clients,
        clients_reason=clients_reason,
        partition=partition,
        partition_reason=partition_reason,
        natural_column=natural.column if natural is not None else None,
        max_length=max_length,
        length_reason=length_reason,
        notes=examples.notes,
    )
    _try(guess)
    return guess


def _max_length(words: np.ndarray) -> tuple[int, str]:
    """A multiple of 16 tokens that holds nine texts of ten, as far as training on a CPU allows."""
    typical = float(np.quantile(words, 0.9))
    wanted = 16 * math.ceil((typical * _TOKENS_PER_WORD + 2) / 16)
    reason = f"nine texts of ten have at most {typical:.0f} words, about {_TOKENS_PER_WORD} tokens each"
    if wanted > MAX_LENGTH:
        return MAX_LENGTH, f"{reason}; cut at {MAX_LENGTH} to stay fast, raise it if the end of a text matters"
    return wanted, reason


def _client_like(table: RawTable, columns: dict[str, ColumnChoice]) -> ColumnChoice | None:
    """A column of identifiers that repeat."""
    taken = {choice.column for choice in columns.values()}
    for column, values in table.columns.items():
        if column in taken or not looks_like_id(column) or any(map(is_missing, values)):
            continue
        distinct = len({cell_text(v) for v in values})
        if 2 <= distinct <= min(MAX_GUESSED_CLASSES, len(values) // 2):
            reason = f"it holds ids and has {distinct} different values that repeat"
            return ColumnChoice("client", column, reason)
    return None


def _natural_problem(path: Path, roles: dict[str, str], column: str, owners: int) -> str | None:
    """Why this column cannot be the client, None if it can."""
    if not 2 <= owners <= MAX_NATURAL_CLIENTS:
        return (
            f"it has {owners} different values, more than {MAX_NATURAL_CLIENTS}" if owners > 1 else "it has one value"
        )
    config = DataConfig(source=str(path), columns={**roles, "client": column}, empty="drop")
    try:
        split_data(
            config, TaskConfig(), PartitionConfig(kind="natural"), num_clients=owners, seed=0, base_dir=path.parent
        )
    except DataError as error:
        return error.what[0].lower() + error.what[1:]
    return None


def _try(guess: Guess) -> None:
    """Splits the data as the proposed experiment would, so that nothing is proposed that cannot run.

    Raises:
        DataError: If there are too few examples for any experiment.
    """
    config = DataConfig(source=str(guess.path), columns=guess.experiment_columns, empty="drop")
    kind = PartitionConfig(kind=guess.partition)
    split_data(config, TaskConfig(), kind, num_clients=guess.num_clients, seed=0, base_dir=guess.path.parent)
