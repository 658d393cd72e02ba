"""Options of methods and parts: what is wrong is told in a user's words, and nothing is taken for something else."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from fedstrata.options import check_options


def make(
    count: int = 1,
    rate: float = 0.5,
    strata: int | dict[str, int] | None = None,
    names: list[str] | None = None,
    plain: bool = False,
    mode: Literal["slow", "fast"] = "slow",
) -> None:
    """Takes one of each."""


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"count": True}, "count = True: a whole number is needed"),
        ({"count": "5"}, "count = '5': a whole number is needed"),
        ({"count": "x"}, "count = 'x': a whole number is needed"),
        ({"count": 2.5}, "count = 2.5: a whole number is needed"),
        ({"count": []}, "count = []: a whole number is needed"),
        ({"rate": True}, "rate = True: a number is needed"),
        ({"rate": "0.5"}, "rate = '0.5': a number is needed"),
        ({"strata": [1]}, "strata = [1]: a whole number or a table is needed"),
        ({"strata": {"a": 1.5}}, "strata['a'] = 1.5: a whole number is needed"),
        ({"strata": {"a": 1, "b": True}}, "strata['b'] = True: a whole number is needed"),
        ({"names": "a"}, "names = 'a': a list is needed"),
        ({"names": ["a", 3]}, "names[1] = 3: a text is needed"),
        ({"plain": 1}, "plain = 1: true or false is needed"),
        ({"plain": "yes"}, "plain = 'yes': true or false is needed"),
        ({"mode": "quick"}, "mode = 'quick': must be 'slow' or 'fast'"),
        ({"cuont": 1}, 'unknown option "cuont": did you mean "count"?'),
    ],
)
def test_a_wrong_value_is_told_with_its_place_and_what_is_needed(options: dict[str, Any], told: str) -> None:
    (problem,) = check_options(make, options)[1]
    assert problem.startswith(told)


def test_good_values_come_out_converted_and_mistakes_all_at_once() -> None:
    good = {"count": 3, "rate": 1, "strata": {"a": 2}, "names": ["x"], "plain": True, "mode": "fast"}
    assert check_options(make, good) == (good, [])
    assert check_options(make, {"strata": 2, "names": None}) == ({"strata": 2, "names": None}, [])
    assert len(check_options(make, {"count": "1", "rate": "x", "nope": 1})[1]) == 3


def test_a_needed_option_is_asked_for_unless_it_is_there_already() -> None:
    def needs(share: float, *more: int, **others: int) -> None: ...

    assert check_options(needs, {})[1] == ['option "share" is needed']
    assert check_options(needs, {}, given=["share"])[1] == []
