"""Classification: label names to numbers, texts to tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from fedstrata.core.wire import canonical_json
from fedstrata.data.examples import Examples, label_names
from fedstrata.data.table import count, name_some
from fedstrata.errors import DataError

_CHUNK = 1024


class Tokenizer(Protocol):
    """What is asked of a transformers tokenizer."""

    is_fast: bool

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """Tokens that the model needs around a text."""

    def __call__(self, text: Any, text_pair: Any = None, **options: Any) -> Any:
        """Token numbers of a batch of texts."""


@dataclass(frozen=True, eq=False)
class EncodedDataset:
    """Ragged tokens in flat arrays; attention is implied by the lengths.

    Attributes:
        tokens: Token numbers of all examples behind each other, int32.
        offsets: Example i holds `tokens[offsets[i]:offsets[i + 1]]`, int64, shape [n + 1].
        labels: Class numbers, int64, shape [n].
        type_ids: Segment numbers beside `tokens`, int8; None for single texts and models without segments.
        num_truncated: Examples that were cut.
        max_length: Longest input in tokens that was allowed.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray
    type_ids: np.ndarray | None
    num_truncated: int
    max_length: int

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens per example, int64, shape [n]."""
        return np.diff(self.offsets)

    @cached_property
    def input_ids(self) -> list[np.ndarray]:
        """Token numbers per example, views of int32 and shape [length]."""
        return np.split(self.tokens, self.offsets[1:-1])

    @cached_property
    def token_type_ids(self) -> list[np.ndarray] | None:
        """Segment numbers per example, 0 for the first text and 1 for the second; None for single texts."""
        return None if self.type_ids is None else np.split(self.type_ids, self.offsets[1:-1])

    @property
    def pixel_values(self) -> None:
        """Texts have none."""
        return None

    @cached_property
    def sha256(self) -> str:
        """Hash of the content; the same on every machine."""
        digest = hashlib.sha256(canonical_json({"max_length": self.max_length, "num_examples": len(self)}))
        for array, dtype in ((self.tokens, "<i4"), (self.offsets, "<i8"), (self.labels, "<i8")):
            digest.update(np.ascontiguousarray(array, dtype).tobytes())
        if self.type_ids is not None:
            digest.update(np.ascontiguousarray(self.type_ids, "i1").tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class ClassificationTask:
    """Which classes there are; a class's number is its place in `label_names`."""

    label_names: tuple[str, ...]

    @staticmethod
    def from_labels(labels: list[str], *, where: str) -> ClassificationTask:
        """The task that training labels describe: numbers sorted by value, other names by character.

        Raises:
            DataError: If there is a single class, or nearly one per example.
        """
        return ClassificationTask(label_names(labels, where=where))

    def encode(
        self,
        examples: Examples,
        labels: np.ndarray,
        tokenizer: Tokenizer | None,
        max_length: int,
        max_positions: int | None = None,
    ) -> EncodedDataset:
        """Turns texts into tokens.

        Args:
            examples: Texts.
            labels: Class numbers, shape [num_examples].
            tokenizer: The model's; None where it came without one, which is refused.
            max_length: Longest input in tokens; longer ones are cut at the end and counted.
            max_positions: Longest input of the model; None without a limit.

        Raises:
            DataError: If there is no tokenizer, or if nothing is left of a text.
        """
        if tokenizer is None:
            raise DataError(
                "The model came without a tokenizer, so texts cannot be read", where="model.source",
                do="put the tokenizer's files beside the model's, or name a model for texts",
            )  # fmt: skip
        length = max_length if max_positions is None else min(max_length, max_positions)
        num_special = tokenizer.num_special_tokens_to_add(pair=examples.pairs is not None)
        if length <= num_special:
            raise DataError(
                "The longest input has no room for a text", where="model.max_length", got=count(length, "token"),
                expected=f"more than the {num_special} tokens that the model needs around it",
            )  # fmt: skip
        tokens: list[np.ndarray] = []
        type_ids: list[np.ndarray] = []
        num_truncated = 0
        for start in range(0, len(examples), _CHUNK):
            stop = start + _CHUNK
            texts = examples.texts[start:stop]
            pairs = None if examples.pairs is None else examples.pairs[start:stop]
            encoding = _tokenize(tokenizer, texts, pairs, truncation=True, max_length=length)
            num_truncated += _count_truncated(tokenizer, encoding, texts, pairs, length)
            tokens.extend(np.array(ids, np.int32) for ids in encoding["input_ids"])
            if pairs is not None and "token_type_ids" in encoding:
                type_ids.extend(np.array(ids, np.int8) for ids in encoding["token_type_ids"])
        lengths = np.array([len(ids) for ids in tokens], np.int64)
        nothing = [examples.places[i] for i in np.flatnonzero(lengths == 0)]
        if nothing:
            raise DataError(
                f"The tokenizer leaves nothing of {count(len(nothing), 'text')}", where=name_some(nothing),
                do="take these rows out, or raise max_length",
            )  # fmt: skip
        return EncodedDataset(
            tokens=_join(tokens, np.int32),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            labels=labels,
            type_ids=_join(type_ids, np.int8) if type_ids else None,
            num_truncated=num_truncated,
            max_length=length,
        )


TASKS = {"classification": ClassificationTask}


def _join(arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _tokenize(tokenizer: Tokenizer, texts: list[str], pairs: list[str] | None, **options: Any) -> Any:
    try:
        return tokenizer(texts, pairs, return_attention_mask=False, **options)
    except Exception as error:
        # The tokenizers library raises bare exceptions, e.g. where its vocabulary lacks a token that it needs.
        raise DataError(
            "The model's tokenizer cannot read the texts", where="model.source", got=str(error).split("\n", 1)[0],
            do="mend the tokenizer's files beside the model's, or name another model",
        ) from error  # fmt: skip


def _count_truncated(
    tokenizer: Tokenizer, encoding: Any, texts: list[str], pairs: list[str] | None, length: int
) -> int:
    if tokenizer.is_fast:
        return sum(1 for e in encoding.encodings if e.overflowing)
    whole: Iterable[Any] = _tokenize(tokenizer, texts, pairs, truncation=False)["input_ids"]
    return sum(1 for ids in whole if len(ids) > length)
