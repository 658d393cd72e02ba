"""Everything between `[data]` and training: read, check, split, spread over clients, tokenize."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedstrata.core.wire import canonical_json
from fedstrata.data.columns import ColumnChoice, choose_columns, require_column
from fedstrata.data.config import DataConfig, PartitionConfig, TaskConfig
from fedstrata.data.examples import Examples, column_names, label_ids, make_examples
from fedstrata.data.sources import load_table, load_test_table
from fedstrata.data.splits import Splits, make_splits
from fedstrata.data.table import RawTable, count
from fedstrata.data.task import TASKS, ClassificationTask, EncodedDataset
from fedstrata.errors import DataError


@dataclass(frozen=True, eq=False)
class SplitData:
    """Data that is split and spread over clients, not yet tokenized: enough for planning.

    `data.task.encode(data.examples, data.labels, …)` turns it into tokens, row by row.

    Attributes:
        examples: The rows that somebody sees; those of the test set's own source stand last.
        task: The classes.
        labels: Their class numbers, int64.
        splits: Who sees which row.
        columns: Which column was taken for what, and why.
        notes: What a user should be told: what was guessed, dropped, read differently.
        hashes: For the provenance: of the sources, of the splits and of the label names.
    """

    examples: Examples
    task: ClassificationTask
    labels: np.ndarray
    splits: Splits
    columns: Mapping[str, ColumnChoice]
    notes: tuple[str, ...]
    hashes: Mapping[str, str]

    @property
    def label_names(self) -> tuple[str, ...]:
        """Class names; a class's number is its place."""
        return self.task.label_names

    @property
    def client_ids(self) -> tuple[str, ...]:
        """Client ids, ascending."""
        return tuple(self.splits.clients)

    @property
    def num_examples(self) -> dict[str, int]:
        """n_k: training examples by client id."""
        return {client: len(split.train) for client, split in self.splits.clients.items()}


def split_data(
    config: DataConfig,
    task: TaskConfig,
    partition: PartitionConfig,
    *,
    num_clients: int,
    seed: int,
    base_dir: Path,
    client_proxy_fraction: float | None = None,
) -> SplitData:
    """Reads and splits the data and spreads it over clients; needs no tokenizer, so that planning can call it.

    Args:
        config: `[data]`.
        task: `[task]`.
        partition: `partition` of `[simulation]`.
        num_clients: Devices of the simulation.
        seed: The run's seed.
        base_dir: What relative paths are relative to.
        client_proxy_fraction: Share of every client's training examples that is held out for scoring blocks, where
            the method decides; None takes what `config` says, 0 if it says nothing.

    Raises:
        DataError: With the place of the mistake, before anything runs.
        AssetError: If a package is missing.
    """
    table = load_table(config, base_dir)
    test_table = load_test_table(config, base_dir)
    choices = choose_columns(table, config.columns)
    names = column_names(choices)
    group_column = _group_column(table, names, partition)
    roles: dict[str, str] = {role: names[role] for role in ("text", "text_pair", "label") if role in names}
    examples = make_examples(table, roles, empty=config.empty, group_column=group_column)
    num_train, where = len(examples), f"{table.source}, column {names['label']}"
    made_task = TASKS[task.kind].from_labels(examples.labels, where=where)
    hashes = {"source": table.sha256}
    if test_table is not None:
        examples = examples + make_examples(test_table, roles, empty=config.empty)
        hashes["test_source"] = test_table.sha256
    labels = label_ids(
        examples, made_task.label_names, num_train=num_train, source=test_table.source if test_table else ""
    )
    splits = make_splits(
        config, partition, labels=labels, keys=examples.keys, groups=examples.groups, num_clients=num_clients,
        seed=seed, num_own_test=len(examples) - num_train, label_names=made_task.label_names,
        client_proxy_fraction=client_proxy_fraction,
    )  # fmt: skip
    used, splits = splits.compact()
    examples, labels = examples.take(used), labels[used]
    hashes |= {"splits": splits.sha256, "labels": _hash_names(made_task.label_names)}
    notes = (*_column_notes(table, config, choices), *examples.notes, *_drop_notes(splits), *splits.notes)
    return SplitData(examples, made_task, labels, splits, choices, notes, hashes)


def _group_column(table: RawTable, names: Mapping[str, str], partition: PartitionConfig) -> str | None:
    if partition.kind != "natural":
        return None
    if partition.column in names:
        return names[partition.column]
    if partition.column in table.columns:
        return partition.column
    if partition.column in ("client", "group"):
        raise DataError(
            f'A natural partition needs the column role "{partition.column}"', where="simulation.partition",
            got=f"the columns {', '.join(table.columns)}",
            do=f'set columns = {{ {partition.column} = "…" }} under [data]',
        )  # fmt: skip
    return require_column(table, partition.column, "simulation.partition.column")


def _column_notes(table: RawTable, config: DataConfig, choices: Mapping[str, ColumnChoice]) -> list[str]:
    """Guesses that the names of the columns do not explain by themselves."""
    return [
        f'{table.source}: the column "{c.column}" was taken as the {role}, because {c.reason}'
        for role, c in choices.items()
        if role not in config.columns and c.column.lower() != role and role in ("text", "text_pair", "label")
    ]


def _drop_notes(splits: Splits) -> list[str]:
    notes = []
    if splits.num_duplicates:
        notes.append(f"Dropped {count(splits.num_duplicates, 'row')} whose text stood there before")
    if splits.num_leaked:
        notes.append(f"Dropped {count(splits.num_leaked, 'training row')} whose text stands in the test set")
    if splits.num_conflicts:
        notes.append(f"Dropped rows with another label than the row that stayed: {splits.num_conflicts:,}")
    return notes


def length_notes(dataset: EncodedDataset, max_length: int) -> list[str]:
    """What a user should be told about the lengths of texts.

    Args:
        dataset: The tokens.
        max_length: What the user asked for.
    """
    notes = []
    if dataset.max_length < max_length:
        notes.append(
            f"The model reads at most {dataset.max_length} tokens, so max_length {max_length} "
            f"became {dataset.max_length}"
        )
    if dataset.num_truncated:
        share = dataset.num_truncated / len(dataset)
        notes.append(
            f"{dataset.num_truncated:,} of {count(len(dataset), 'text')} ({share:.0%}) longer than "
            f"{dataset.max_length} tokens: cut"
        )
    return notes


def _hash_names(names: tuple[str, ...]) -> str:
    return hashlib.sha256(canonical_json(list(names))).hexdigest()
