"""Which examples make a batch, and the batch itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from fedstrata.core.rng import generator

CHUNK_BATCHES = 8
"""Batches whose examples are sorted together: long enough to save padding, short enough to stay random."""


class Examples(Protocol):
    """Encoded examples; texts have `input_ids`, pictures have `pixel_values`."""

    @property
    def input_ids(self) -> Sequence[np.ndarray] | None:
        """Token ids per text, int32 `[length]`."""

    @property
    def token_type_ids(self) -> Sequence[np.ndarray] | None:
        """0 for the first text of a pair and 1 for the second, or None."""

    @property
    def pixel_values(self) -> np.ndarray | None:
        """float32 `[N, channels, height, width]`, or None."""

    @property
    def labels(self) -> np.ndarray:
        """int64 `[N]`."""


def lengths_of(examples: Examples, indices: np.ndarray) -> np.ndarray:
    """Tokens per example, int64; zeros for pictures, which all have one size."""
    if examples.input_ids is None:
        return np.zeros(len(indices), np.int64)
    ids = examples.input_ids
    return np.fromiter((len(ids[i]) for i in indices), np.int64, len(indices))


def collate(examples: Examples, indices: np.ndarray, pad_id: int) -> dict[str, torch.Tensor]:
    """One batch, padded at the end to its own longest text.

    Args:
        examples: All examples.
        indices: Which of them, `[batch]`.
        pad_id: Token that fills short texts.

    Returns:
        `input_ids`, `attention_mask` and, where given, `token_type_ids`, int64 `[batch, longest]`; or
        `pixel_values`, float32 `[batch, channels, height, width]`; and `labels`, int64 `[batch]`.
    """
    labels = torch.from_numpy(np.asarray(examples.labels)[indices].astype(np.int64))
    if examples.pixel_values is not None:
        pixels = np.ascontiguousarray(examples.pixel_values[indices], np.float32)
        return {"pixel_values": torch.from_numpy(pixels), "labels": labels}
    lengths = lengths_of(examples, indices)
    size = (len(indices), int(lengths.max()))
    mask = np.arange(size[1])[None, :] < lengths[:, None]
    batch = {
        "input_ids": torch.from_numpy(_padded(examples.input_ids or (), indices, mask, pad_id)),
        "attention_mask": torch.from_numpy(mask.astype(np.int64)),
    }
    if examples.token_type_ids is not None:
        batch["token_type_ids"] = torch.from_numpy(_padded(examples.token_type_ids, indices, mask, 0))
    return batch | {"labels": labels}


def training_batches(
    indices: np.ndarray, lengths: np.ndarray, batch_size: int, seed_path: tuple[int, int, str]
) -> Iterator[np.ndarray]:
    """Batches without end: every epoch a new permutation, its last short batch kept.

    Where lengths differ, the examples of eight consecutive batches are sorted by length before they are cut, and the
    cut batches are shuffled; so most padding goes and the order stays random.

    Args:
        indices: The client's examples, `[n]`, n ≥ 1.
        lengths: Their lengths, `[n]`.
        batch_size: Examples per batch.
        seed_path: Seed, server round and client; they name the stream.
    """
    seed, server_round, client = seed_path
    rng = generator(seed, "batches", server_round, client)
    while True:
        order = rng.permutation(len(indices))
        for first in range(0, len(order), batch_size * CHUNK_BATCHES):
            chunk = order[first : first + batch_size * CHUNK_BATCHES]
            starts = np.arange(0, len(chunk), batch_size)
            if len(starts) > 1 and np.ptp(lengths[chunk]) > 0:
                chunk = chunk[np.argsort(lengths[chunk], kind="stable")]
                starts = rng.permutation(starts)
            for start in starts:
                yield indices[chunk[start : start + batch_size]]


def evaluation_batches(indices: np.ndarray, lengths: np.ndarray, batch_size: int) -> Iterator[np.ndarray]:
    """Batches in ascending length, then index: the same for the same set of examples, whatever their order."""
    order = np.lexsort((indices, lengths))
    for start in range(0, len(order), batch_size):
        yield indices[order[start : start + batch_size]]


def _padded(rows: Sequence[np.ndarray], indices: np.ndarray, mask: np.ndarray, fill: int) -> np.ndarray:
    values = np.full(mask.shape, fill, np.int64)
    values[mask] = np.concatenate([rows[i] for i in indices])
    return values
