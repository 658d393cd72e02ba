"""Examples that a server was given for scoring blocks, and the record of whose they were."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from fedstrata.core.rng import generator
from fedstrata.data.columns import choose_columns
from fedstrata.data.config import DataConfig
from fedstrata.data.examples import Examples, column_names, make_examples
from fedstrata.data.load import SplitData
from fedstrata.data.sources import load_table
from fedstrata.data.table import count, name_some
from fedstrata.data.task import EncodedDataset, Tokenizer
from fedstrata.errors import AssetError, DataError

ServerSource: TypeAlias = Literal["public", "other_domain", "random_tokens", "test_leaky"]
NUM_RANDOM = 64
"""How many examples of random tokens are drawn if nobody says."""


class WordTokenizer(Tokenizer, Protocol):
    """What random tokens need beside."""

    all_special_ids: list[int]

    def get_vocab(self) -> dict[str, int]:
        """Token numbers by token."""


@dataclass(frozen=True, eq=False)
class ProxySet:
    """A proxy set, ready for the model.

    Attributes:
        source: What the planner asked for.
        name: Whose data they are, in words.
        sha256: Of the file's content; of the tokens and labels where no file of its own holds them.
        examples: Tokens and class numbers.
        notes: What a user should be told.
    """

    source: ServerSource
    name: str
    sha256: str
    examples: EncodedDataset
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """What the run's record says about it."""
        return {
            "source": self.source,
            "name": self.name,
            "sha256": self.sha256,
            "num_examples": len(self.examples),
            "notes": list(self.notes),
        }


def resolve_proxy(
    source: ServerSource,
    config: DataConfig,
    data: SplitData,
    *,
    tokenizer: WordTokenizer | None,
    max_length: int,
    max_positions: int | None,
    seed: int,
    base_dir: Path,
    num_random: int | None = None,
) -> ProxySet:
    """The server's examples for scoring blocks.

        public           the set that `proxy_fraction` took out, or the file `proxy_source`, with the task's labels
        other_domain     the file `proxy_source`; labels that the task does not know are numbered in order, modulo its
                         number of classes (ours: a gradient needs a class)
        random_tokens    ordinary tokens and labels, uniform, from generator(seed, "proxy", "random_tokens"), each of
                         the longest length, with the model's special tokens around them
        test_leaky       the test set: to check a claim, never to compare methods by

    Args:
        source: Which.
        config: `[data]`.
        data: The run's data.
        tokenizer: The model's.
        max_length: Longest input in tokens.
        max_positions: Longest input of the model; None without a limit.
        seed: The run's seed.
        base_dir: What relative paths are relative to.
        num_random: How many examples of random tokens; None: 64.

    Raises:
        DataError: If there are no such examples, or they do not fit the task; names the key.
        AssetError: If a package is missing.
    """
    if tokenizer is None:
        raise DataError("Blocks cannot be scored with texts: the model came without a tokenizer", where="model.source")
    length = max_length if max_positions is None else min(max_length, max_positions)
    if source == "random_tokens":
        drawn = _random(tokenizer, len(data.label_names), length, num_random or NUM_RANDOM, seed)
        return ProxySet(source, f"random tokens of seed {seed}", drawn.sha256, drawn)
    if source == "test_leaky":
        name = f"the test set of {config.test_source or config.source}"
        return _own(source, name, data, data.splits.test, tokenizer, length)
    if source == "public" and config.proxy_source is None:
        if not len(data.splits.proxy):
            raise DataError(
                "The server has no public examples to score blocks with", where="data.proxy_fraction = 0",
                do="set data.proxy_fraction, or name a file with data.proxy_source",
            )  # fmt: skip
        name = f"a share of {config.source} (data.proxy_fraction = {config.proxy_fraction:g})"
        return _own(source, name, data, data.splits.proxy, tokenizer, length)
    if config.proxy_source is None:
        raise DataError(
            "There are no examples of another domain to score blocks with", where="data.proxy_source",
            do="name a file, a folder or a package with data.proxy_source",
        )  # fmt: skip
    if source == "public" and config.proxy_fraction:
        raise DataError(
            "The server's public examples are given twice", where="data",
            got=f'proxy_fraction = {config.proxy_fraction:g} and proxy_source = "{config.proxy_source}"',
            do="keep one of the two keys",
        )  # fmt: skip
    return _file(source, config.proxy_source, config, data, tokenizer, length, base_dir)


def _own(
    source: ServerSource, name: str, data: SplitData, rows: np.ndarray, tokenizer: Tokenizer, length: int
) -> ProxySet:
    """Rows of the run's own data."""
    encoded = data.task.encode(data.examples.take(rows), data.labels[rows], tokenizer, length)
    return ProxySet(source, name, encoded.sha256, encoded)


def _file(
    source: ServerSource, place: str, config: DataConfig, data: SplitData, tokenizer: Tokenizer, length: int,
    base_dir: Path,
) -> ProxySet:  # fmt: skip
    """A source of its own, read like the training data; its columns are guessed where the training's do not exist."""
    where = f'data.proxy_source = "{place}"'
    alone = config.model_copy(update={"source": place, "subset": None, "revision": None, "split": "train"})
    try:
        table = load_table(alone, base_dir)
        known = {role: column for role, column in config.columns.items() if column in table.columns}
        names = column_names(choose_columns(table, known))
        roles: dict[str, str] = {role: names[role] for role in ("text", "text_pair", "label") if role in names}
        examples = make_examples(table, roles, empty=config.empty)
    except (DataError, AssetError) as error:
        parts = {"expected": error.expected, "got": error.got, "do": error.do}
        raise type(error)(error.what, where=f"{where}: {error.where}" if error.where else where, **parts) from error
    labels, notes = _class_numbers(examples, data.label_names, source == "other_domain", where)
    encoded = data.task.encode(examples, labels, tokenizer, length)
    return ProxySet(source, table.source, table.sha256, encoded, (*examples.notes, *notes))


def _class_numbers(
    examples: Examples, names: tuple[str, ...], is_foreign: bool, where: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Class numbers of a file's labels."""
    number = dict(zip(names, range(len(names)), strict=True))
    unknown = sorted(set(examples.labels) - number.keys())
    if unknown and not is_foreign:
        first = next(i for i, label in enumerate(examples.labels) if label in unknown)
        raise DataError(
            f"Labels that the task does not know: {name_some(unknown)}", where=f"{where}: {examples.places[first]}",
            expected=f"the labels of the training data: {name_some(list(names), 10)}",
            do='correct them, or let the planner ask for "other_domain"',
        )  # fmt: skip
    number |= {label: i % len(names) for i, label in enumerate(unknown)}
    said = f"{count(len(unknown), 'label')} of the other domain stand for the task's classes in order"
    return np.array([number[label] for label in examples.labels], np.int64), (said,) if unknown else ()


def _random(tokenizer: WordTokenizer, num_classes: int, length: int, number: int, seed: int) -> EncodedDataset:
    special = set(tokenizer.all_special_ids)
    ordinary = np.array(sorted(set(tokenizer.get_vocab().values()) - special), np.int32)
    before, after = _frame(tokenizer)
    num_words = length - len(before) - len(after)
    if not len(ordinary) or num_words < 1:
        raise DataError(
            "Random tokens cannot be drawn", where="model", expected="ordinary tokens, and room for one of them",
            got=f"{count(len(ordinary), 'ordinary token')}, inputs of {count(length, 'token')}",
        )  # fmt: skip
    rng = generator(seed, "proxy", "random_tokens")
    words = ordinary[rng.integers(0, len(ordinary), (number, num_words))]
    labels = rng.integers(0, num_classes, number, np.int64)
    sides = [np.tile(np.array(side, np.int32), (number, 1)) for side in (before, after)]
    tokens = np.concatenate([sides[0], words, sides[1]], axis=1)  # [number, length]
    return EncodedDataset(tokens.ravel(), np.arange(number + 1, dtype=np.int64) * length, labels, None, 0, length)


def _frame(tokenizer: WordTokenizer) -> tuple[list[int], list[int]]:
    """The special tokens that stand before and after a text."""
    encoding = tokenizer("a", return_special_tokens_mask=True)
    ids, mask = list(encoding["input_ids"]), list(encoding["special_tokens_mask"])
    words = [i for i, is_special in enumerate(mask) if not is_special]
    if not words:
        raise DataError("The tokenizer leaves nothing of a text", where="model.source")
    return ids[: words[0]], ids[words[-1] + 1 :]
