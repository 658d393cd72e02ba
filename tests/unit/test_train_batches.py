"""Batches: what they hold and which examples go into them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pytest

from fedstrata.train.batches import collate, evaluation_batches, lengths_of, training_batches


@dataclass
class Texts:
    input_ids: list[np.ndarray] | None
    labels: np.ndarray
    token_type_ids: list[np.ndarray] | None = None
    pixel_values: np.ndarray | None = None


def texts(*lengths: int) -> Texts:
    ids = [np.arange(10, 10 + n, dtype=np.int32) for n in lengths]
    return Texts(ids, np.arange(len(lengths)) % 3, [np.full(n, 1, np.int32) for n in lengths])


def test_a_batch_is_padded_at_the_end_to_its_own_longest_text() -> None:
    batch = collate(texts(9, 2, 3), np.array([2, 1]), pad_id=7)
    assert batch["input_ids"].tolist() == [[10, 11, 12], [10, 11, 7]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["token_type_ids"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [2, 1]


def test_token_types_are_left_out_where_there_are_none() -> None:
    examples = texts(2, 3)
    examples.token_type_ids = None
    assert set(collate(examples, np.array([0, 1]), 0)) == {"input_ids", "attention_mask", "labels"}


def test_a_batch_of_pictures_has_pixels_and_labels_only() -> None:
    pixels = np.arange(2 * 3 * 2 * 2, dtype=np.float32).reshape(2, 3, 2, 2)
    examples = Texts(None, np.array([1, 0]), None, pixels)
    batch = collate(examples, np.array([1]), 0)
    assert set(batch) == {"pixel_values", "labels"}
    assert np.array_equal(batch["pixel_values"].numpy(), pixels[1:])
    assert lengths_of(examples, np.array([0, 1])).tolist() == [0, 0]


@pytest.mark.parametrize("lengths", [np.full(21, 4), np.arange(21)])
def test_an_epoch_holds_every_example_once_and_its_last_batch_is_short(lengths: np.ndarray) -> None:
    indices = np.arange(100, 121)
    epoch = list(islice(training_batches(indices, lengths, 4, (0, 1, "a")), 6))  # ceil(21 / 4) = 6
    assert Counter(len(b) for b in epoch) == {4: 5, 1: 1}
    assert sorted(np.concatenate(epoch)) == indices.tolist()


def test_epochs_rounds_and_clients_have_their_own_order() -> None:
    indices, lengths = np.arange(16), np.full(16, 4)

    def first_two_epochs(server_round: int, client: str) -> list[list[int]]:
        batches = training_batches(indices, lengths, 16, (0, server_round, client))
        return [b.tolist() for b in islice(batches, 2)]

    one = first_two_epochs(1, "a")
    assert one == first_two_epochs(1, "a")
    assert one[0] != one[1]
    assert first_two_epochs(2, "a")[0] != one[0] != first_two_epochs(1, "b")[0]


def test_grouping_by_length_saves_most_of_the_padding() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 129, 512)
    indices = np.arange(512)

    def padded(batches: list[np.ndarray]) -> int:
        return sum(len(b) * int(lengths[b].max()) for b in batches)

    grouped = padded(list(islice(training_batches(indices, lengths, 16, (0, 1, "a")), 32)))
    plain = padded(np.split(rng.permutation(512), 32))
    assert grouped - lengths.sum() < 0.35 * (plain - lengths.sum())


def test_evaluation_batches_do_not_depend_on_the_callers_order() -> None:
    lengths = np.array([5, 3, 5, 2])
    indices = np.array([7, 1, 4, 9])
    batches = [b.tolist() for b in evaluation_batches(indices, lengths, 3)]
    assert batches == [[9, 1, 4], [7]]  # lengths 2, 3, 5, then 5
    turned = [b.tolist() for b in evaluation_batches(indices[::-1], lengths[::-1], 3)]
    assert turned == batches
