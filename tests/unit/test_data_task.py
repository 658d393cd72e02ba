from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedstrata.data.examples import Examples, label_ids, label_names, make_examples
from fedstrata.data.table import RawTable
from fedstrata.data.task import ClassificationTask, EncodedDataset
from fedstrata.errors import DataError

PAD, CLS, SEP = 0, 1, 2


class SlowTokenizer:
    """Words "3 4" are the tokens 3 and 4, between CLS and SEP."""

    is_fast = False

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        return 3 if pair else 2

    def __call__(
        self, text: list[str], text_pair: list[str] | None = None, *, truncation: bool = True,
        max_length: int = 10**9, return_attention_mask: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        out: dict[str, Any] = {"input_ids": [], "token_type_ids": []}
        for i, words in enumerate(text):
            first = [CLS, *map(int, words.split()), SEP]
            second = [*map(int, text_pair[i].split()), SEP] if text_pair else []
            ids, types = first + second, [0] * len(first) + [1] * len(second)
            if truncation and len(ids) > max_length:
                ids, types = [*ids[: max_length - 1], SEP], types[:max_length]
            out["input_ids"].append(ids)
            out["token_type_ids"].append(types)
        return out


@pytest.fixture(scope="module")
def fast_tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    vocab = {"[PAD]": PAD, "[CLS]": CLS, "[SEP]": SEP, **{str(i): i for i in range(3, 30)}}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[PAD]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="[PAD]", model_input_names=["input_ids", "token_type_ids"]
    )


def examples(texts: list[str], pairs: list[str] | None = None) -> Examples:
    return Examples(texts, pairs, ["x"] * len(texts), None, [f"row {i}" for i in range(len(texts))])


def encode(texts: list[str], tokenizer: Any, *, pairs: list[str] | None = None, **lengths: Any) -> EncodedDataset:
    task = ClassificationTask(("x", "y"))
    return task.encode(examples(texts, pairs), np.arange(len(texts)), tokenizer, **{"max_length": 6, **lengths})


@pytest.fixture(params=["fast", "slow"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue("fast_tokenizer") if request.param == "fast" else SlowTokenizer()


def test_texts_longer_than_the_limit_are_cut_and_counted(tokenizer: Any) -> None:
    data = encode(["3 4 5 6", "3 4 5 6 7", "3"], tokenizer)
    assert [data.input_ids[i].tolist() for i in range(3)] == [[1, 3, 4, 5, 6, 2], [1, 3, 4, 5, 6, 2], [1, 3, 2]]
    assert data.num_truncated == 1
    assert data.lengths.tolist() == [6, 6, 3]
    assert data.token_type_ids is None


def test_limit_above_the_models_positions_is_cut_to_them(tokenizer: Any) -> None:
    data = encode(["3 4 5 6"], tokenizer, max_length=100, max_positions=5)
    assert data.max_length == 5
    assert data.input_ids[0].tolist() == [1, 3, 4, 5, 2]
    assert data.num_truncated == 1


def test_pairs_carry_segment_numbers(tokenizer: Any) -> None:
    data = encode(["3 4"], tokenizer, pairs=["5"])
    assert data.input_ids[0].tolist() == [1, 3, 4, 2, 5, 2]
    assert data.token_type_ids is not None
    assert data.token_type_ids[0].tolist() == [0, 0, 0, 0, 1, 1]


def test_more_texts_than_one_chunk_keep_their_order(fast_tokenizer: Any) -> None:
    texts = [str(3 + i % 20) for i in range(2500)]
    data = encode(texts, fast_tokenizer)
    assert [int(data.input_ids[i][1]) for i in range(2500)] == [int(t) for t in texts]


def test_model_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(DataError, match="without a tokenizer"):
        encode(["3"], None)


def test_limit_without_room_for_a_text_is_refused() -> None:
    with pytest.raises(DataError, match="no room"):
        encode(["3"], SlowTokenizer(), max_length=2)


def test_content_hash_follows_tokens_and_labels() -> None:
    first, same, other = (encode(texts, SlowTokenizer()) for texts in (["3 4", "5"], ["3 4", "5"], ["3", "4 5"]))
    assert first.sha256 == same.sha256
    assert first.sha256 != other.sha256
    relabeled = ClassificationTask(("x", "y")).encode(examples(["3 4", "5"]), np.array([1, 0]), SlowTokenizer(), 6)
    assert relabeled.sha256 != first.sha256


def table(**columns: list[Any]) -> RawTable:
    return RawTable(columns, "t.csv", "CSV", "0" * 64, list(range(2, 2 + len(next(iter(columns.values()))))))


ROLES = {"text": "text", "label": "label"}


def test_empty_texts_are_refused_with_count_and_first_rows() -> None:
    with pytest.raises(DataError, match="Rows without a text: 7 of 8") as caught:
        make_examples(table(text=["a", *[" "] * 7], label=["x"] * 8), ROLES, empty="error")
    assert caught.value.where.startswith("t.csv line 3, t.csv line 4")
    assert caught.value.where.endswith("and 2 more")
    assert 'empty = "drop"' in caught.value.do


def test_missing_labels_are_refused() -> None:
    with pytest.raises(DataError, match="Rows without a label: 2 of 3"):
        make_examples(table(text=["a", "b", "c"], label=["x", None, float("nan")]), ROLES, empty="error")


def test_empty_rows_can_be_dropped_and_are_counted() -> None:
    made = make_examples(table(text=["a", "", "c"], label=["x", "y", None]), ROLES, empty="drop")
    assert made.texts == ["a"]
    assert made.places == ["t.csv line 2"]
    assert made.notes == (
        "t.csv: dropped 1 row of 3 without a text",
        "t.csv: dropped 1 row of 3 without a label",
    )


def test_table_of_empty_rows_is_refused_even_when_dropping() -> None:
    with pytest.raises(DataError, match="No row has both"):
        make_examples(table(text=[""], label=["x"]), ROLES, empty="drop")


def test_numbers_that_mean_the_same_are_one_label() -> None:
    made = make_examples(table(text=["a", "b", "c"], label=[1, 1.0, "1 "]), ROLES, empty="error")
    assert made.labels == ["1", "1", "1"]


@pytest.mark.parametrize("value", [0.5, ["x"], {"a": 1}])
def test_labels_that_are_no_classes_are_refused(value: Any) -> None:
    with pytest.raises(DataError, match="does not hold classes"):
        make_examples(table(text=["a"], label=[value]), ROLES, empty="error")


def test_texts_that_are_lists_are_refused() -> None:
    with pytest.raises(DataError, match="does not hold texts"):
        make_examples(table(text=[["a"]], label=["x"]), ROLES, empty="error")


def test_missing_owner_of_a_row_is_refused() -> None:
    with pytest.raises(DataError, match="which client owns them: 1"):
        make_examples(table(text=["a", "b"], label=["x", "y"], who=["u", ""]), ROLES, empty="error", group_column="who")


def test_label_numbers_are_sorted_by_value() -> None:
    assert label_names(["10", "9", "-1", "10"], where="") == ("-1", "9", "10")
    assert label_names(["b", "a", "B"], where="") == ("B", "a", "b")


def test_single_class_is_refused() -> None:
    with pytest.raises(DataError, match="single class"):
        label_names(["x"] * 5, where="t.csv")


def test_column_of_nearly_unique_values_is_no_label() -> None:
    with pytest.raises(DataError, match="does not hold classes"):
        label_names([f"id {i}" for i in range(20)], where="t.csv")


def test_label_seen_only_in_the_test_source_is_named_with_its_row() -> None:
    rows = Examples(["a", "b", "c"], None, ["x", "y", "z"], None, ["p", "q", "t.csv line 9"])
    with pytest.raises(DataError, match="seen only in the test set: z") as caught:
        label_ids(rows, ("x", "y"), num_train=2, source="t.csv")
    assert "t.csv line 9" in caught.value.where
    assert label_ids(rows.take(np.array([1, 0])), ("x", "y"), num_train=2, source="").tolist() == [1, 0]
