from __future__ import annotations

import pytest

from fedstrata.data.columns import choose_columns
from fedstrata.data.examples import column_names
from fedstrata.data.table import RawTable
from fedstrata.errors import DataError

LONG = [f"quite a long text with number {i}" for i in range(8)]
TWO = ["x", "y"] * 4


def table(**columns: list[object]) -> RawTable:
    return RawTable(columns, "t.csv", "CSV", "0" * 64)


def chosen(t: RawTable, **wanted: str) -> dict[str, str]:
    return column_names(choose_columns(t, wanted))


def test_columns_named_by_the_user_are_taken() -> None:
    assert chosen(table(a=LONG, b=TWO, c=TWO), text="a", label="c") == {"text": "a", "label": "c"}


def test_usual_names_are_taken_without_regard_to_case() -> None:
    assert chosen(table(ID=list(range(8)), Review=LONG, Sentiment=TWO)) == {"text": "Review", "label": "Sentiment"}


def test_the_roles_own_name_wins_over_other_usual_names() -> None:
    assert chosen(table(content=LONG, text=LONG, category=TWO, label=TWO)) == {"text": "text", "label": "label"}


def test_longest_of_several_usual_text_columns_is_taken() -> None:
    assert chosen(table(title=["short " + str(i) for i in range(8)], body=LONG, label=TWO))["text"] == "body"


def test_content_decides_where_names_say_nothing() -> None:
    choices = choose_columns(table(u=list(range(8)), v=LONG, w=TWO), {})
    assert column_names(choices) == {"text": "v", "label": "w"}
    assert choices["text"].reason == "its texts are the longest, 31 characters on average"
    assert choices["label"].reason == "it has 2 different values that repeat"


def test_usual_names_of_a_pair_are_taken_as_a_pair() -> None:
    found = chosen(table(premise=LONG, hypothesis=LONG, label=TWO))
    assert found == {"text": "premise", "text_pair": "hypothesis", "label": "label"}


def test_explicit_text_turns_the_guess_of_a_pair_off() -> None:
    assert chosen(table(sentence1=LONG, sentence2=LONG, label=TWO), text="sentence2") == {
        "text": "sentence2",
        "label": "label",
    }


def test_client_column_is_found_by_name_and_is_no_label() -> None:
    assert chosen(table(words=LONG, user_id=TWO, mood=["p", "q"] * 4)) == {
        "text": "words", "label": "mood", "client": "user_id",
    }  # fmt: skip


def test_several_possible_labels_are_an_error_that_lists_the_columns() -> None:
    with pytest.raises(DataError, match="Several columns could be the label") as caught:
        chosen(table(words=LONG, p=TWO, q=TWO))
    assert caught.value.got == "p, q"
    assert "words, p, q" in caught.value.do


def test_several_possible_texts_are_an_error() -> None:
    with pytest.raises(DataError, match="Several columns could be the text"):
        chosen(table(p=LONG, q=LONG, label=TWO))


def test_no_possible_label_is_an_error_that_says_what_one_looks_like() -> None:
    with pytest.raises(DataError, match="No column looks like the label") as caught:
        chosen(table(text=LONG, score=[0.1 * i for i in range(8)]))
    assert "2 to 100 different values" in caught.value.expected


def test_unknown_column_gets_did_you_mean() -> None:
    with pytest.raises(DataError, match='did you mean "review"'):
        chosen(table(review=LONG, label=TWO), text="reviw")


def test_unknown_role_gets_did_you_mean() -> None:
    with pytest.raises(DataError, match='did you mean "label"'):
        chosen(table(text=LONG, y=TWO), labels="y")


def test_one_column_cannot_have_two_roles() -> None:
    with pytest.raises(DataError, match="two roles"):
        chosen(table(text=LONG, label=TWO), text="text", label="text")
