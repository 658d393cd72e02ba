"""What methods say about themselves: the page of methods, refusals by column, and citations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedstrata.errors import ConfigError
from fedstrata.experiment.citations import cite
from fedstrata.method import METHODS
from fedstrata.method.citation import Citation, fedstrata_citation
from fedstrata.method.columns import COLUMNS, comparison_page, entries, refusal
from fedstrata.method.registry import MethodFacts, facts_of

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_methods_is_what_its_command_writes() -> None:
    written = (ROOT / "docs" / "methods.md").read_text("utf-8")
    assert written == comparison_page(), "run `python scripts/write_method_page.py docs/methods.md`"


def test_every_fact_that_can_be_compared_is_a_column() -> None:
    fields = set(MethodFacts.__dataclass_fields__) - {"paper", "citation"}
    assert {c.key for c in COLUMNS} == fields


@pytest.mark.parametrize("entry", entries(), ids=lambda e: e.name)
def test_stated_facts_do_not_contradict_the_parts(entry) -> None:  # type: ignore[no-untyped-def]
    """What the parts know for sure: personal models, state on clients, and exactness that an aggregator promises."""
    method = entry.make()
    known = facts_of(method)
    assert entry.facts.personalised == known.personalised
    if known.client_state:
        assert entry.facts.client_state
    if method.aggregator.exact and method.topology == "federated":
        assert entry.facts.exact
    if entry.facts.unequal_ranks:
        assert method.aggregator.unequal_ranks


def test_a_refusal_says_which_column_says_no_and_who_could() -> None:
    error = refusal("fedit", METHODS.find("fedit").facts, "unequal_ranks", "ranks differ between devices")
    assert error is not None
    text = str(error)
    assert 'Method "fedit" is refused because ranks differ between devices: its column "unequal ranks" says no' in text
    assert "hetlora" in text
    assert refusal("hetlora", METHODS.find("hetlora").facts, "unequal_ranks", "ranks differ between devices") is None


def test_a_need_is_refused_where_the_setting_lacks_it() -> None:
    facts = MethodFacts(paper="p", trains="t", sends="s", exact=None, needs_server_data=True)
    error = refusal("needy", facts, "needs_server_data", "the server has no examples")
    assert error is not None
    assert 'its column "needs server data" says yes' in str(error)
    assert refusal("needy", facts, "exact", "an exact mean is asked for", wanted=True) is None  # n/a refuses nothing


def test_columns_that_refuse_nothing_and_unknown_ones_are_mistakes() -> None:
    facts = METHODS.find("fedit").facts
    with pytest.raises(ConfigError, match="alone refuses nothing"):
        refusal("fedit", facts, "exact", "x")
    with pytest.raises(ConfigError, match='did you mean "sends"'):
        refusal("fedit", facts, "send", "x")


def test_an_entry_holds_what_is_known_and_nothing_else() -> None:
    entry = Citation("k", ("Ann Lee", "Bo & Co"), "On 100% of R_k", 2024, "X", doi="10.1/2", note="n")
    assert entry.bibtex.splitlines() == [
        "@inproceedings{k,",
        r"  author = {Ann Lee and Bo \& Co},",
        r"  title = {{On 100\% of R\_k}},",
        "  booktitle = {X},",
        "  year = {2024},",
        "  doi = {10.1/2},",
        "  note = {n},",
        "}",
    ]
    assert Citation("k", ("Ann Lee",)).bibtex == "@misc{k,\n  author = {Ann Lee},\n}"


@pytest.mark.parametrize(
    ("authors", "text"),
    [(("Ann Lee",), "Lee"), (("A Lee", "B Wu"), "Lee and Wu"), (("Lee", "others"), "Lee et al."),
     (("A Lee", "B Wu", "C Ma"), "Lee et al.")],
)  # fmt: skip
def test_authors_are_named_as_one_names_them(authors: tuple[str, ...], text: str) -> None:
    assert Citation("k", authors).text == text


def test_a_method_cites_its_paper_first_then_its_parts_and_lora_each_once() -> None:
    keys = {name: [c.key for c in cite(name)[0]] for name in ("gradualdiff", "fedavg", "fedit", "hetlora")}
    assert keys == {
        "gradualdiff": ["faiyaz2025gradualdiff", "dettmers2023qlora", "hu2022lora"],
        "fedavg": ["mcmahan2017communication"],
        "fedit": ["zhang2024fedit", "hu2022lora"],
        "hetlora": ["cho2024hetlora", "hu2022lora"],
    }
    found, missing = cite("last_k")
    assert ([c.key for c in found], missing) == (["mcmahan2017communication"], ["last_k"])


def test_keys_name_one_publication_each() -> None:
    found: dict[str, Citation] = {}
    for entry in entries():
        if entry.facts.citation is not None:
            assert found.setdefault(entry.facts.citation.key, entry.facts.citation) == entry.facts.citation
            assert re.fullmatch(r"[a-z]+\d{4}[a-z]+", entry.facts.citation.key)
    assert len(found) > 15


def test_the_software_is_cited_with_its_version() -> None:
    assert "note = {Software, version 1.2}" in fedstrata_citation("1.2").bibtex


def test_nothing_is_cited_for_a_name_that_nobody_knows() -> None:
    with pytest.raises(ConfigError, match='did you mean "hetlora"'):
        cite("hetlra")
