"""The comparison of methods: its columns, its rows, and refusals that say which column says no."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from fedstrata.errors import ConfigError, did_you_mean
from fedstrata.method.registry import METHODS, MethodEntry, MethodFacts


@dataclass(frozen=True)
class Column:
    """One column of the comparison.

    Attributes:
        key: The field of `MethodFacts`.
        title: What the column is called.
        meaning: What a yes means.
        kind: `text`; `allows`: a no refuses a setting; `needs`: a yes refuses a setting that lacks it; `is`: either.
    """

    key: str
    title: str
    meaning: str
    kind: Literal["text", "allows", "needs", "is"]


COLUMNS: tuple[Column, ...] = (
    Column("trains", "trains", "what a client trains", "text"),
    Column("sends", "sends", "what a client sends", "text"),
    Column("exact", "exact", "the merged model is the weighted mean of the clients' models", "is"),
    Column("needs_server_data", "needs server data", "the server needs examples of its own", "needs"),
    Column("client_state", "client state", "clients keep something between rounds", "needs"),
    Column("partial_participation", "partial participation", "a round may take a part of the clients", "allows"),
    Column("unequal_ranks", "unequal ranks", "clients may have different LoRA ranks", "allows"),
    Column("unequal_depth", "unequal depth", "clients may train different blocks", "allows"),
    Column("personalised", "personalised", "every client ends with a model of its own", "is"),
)


def column(key: str) -> Column:
    """The column with this key.

    Raises:
        ConfigError: If there is none.
    """
    for one in COLUMNS:
        if one.key == key:
            return one
    raise ConfigError(f'There is no column "{key}"', do=did_you_mean(key, [c.key for c in COLUMNS]))


def yes_no(value: bool | None) -> str:
    """A cell in words; None where the question does not arise, or where it depends."""
    return "n/a" if value is None else "yes" if value else "no"


def refusal(
    name: str, facts: MethodFacts, key: str, setting: str, *, wanted: bool | None = None, do: str | None = None
) -> ConfigError | None:
    """The error for a method that a setting does not suit, with the column that says no; None where it suits.

    Args:
        name: The method.
        facts: What is known about it.
        key: The column, e.g. `unequal_ranks`.
        setting: What the experiment asks for, in words: "ranks differ between devices".
        wanted: The answer that the setting needs; left out, yes for what a method allows, no for what it needs.
        do: What else could be done; left out, the methods that suit are named.

    Example:
        >>> str(refusal("fedit", METHODS.find("fedit").facts, "unequal_ranks", "ranks differ")).splitlines()[0]
        'Method "fedit" is refused because ranks differ: its column "unequal ranks" says no'
    """
    where = column(key)
    if where.kind == "text" or (where.kind == "is" and wanted is None):
        raise ConfigError(f'The column "{where.title}" alone refuses nothing', expected="wanted = True or False")
    needed = (where.kind == "allows") if wanted is None else wanted
    answer = getattr(facts, key)
    if answer is None or answer == needed:
        return None
    suited = sorted(n for n, entry in METHODS.entries.items() if getattr(entry.facts, key) == needed)
    return ConfigError(
        f'Method "{name}" is refused because {setting}: its column "{where.title}" says {yes_no(answer)}',
        where="method.name",
        expected=f'"{yes_no(needed)}" ({where.meaning if needed else "not: " + where.meaning})',
        do=do or f"change the setting, or use one of: {', '.join(suited)}; `fedstrata methods --compare` has them all",
    )


def entries() -> list[MethodEntry]:
    """All methods that are loaded, by name; `METHODS.load_installed()` loads the installed ones."""
    return sorted(METHODS.entries.values(), key=lambda e: e.name)


def method_row(entry: MethodEntry) -> dict[str, Any]:
    """One method for `fedstrata methods --json`."""
    return {"name": entry.name, "summary": entry.summary, "aliases": list(entry.aliases), **asdict(entry.facts)}


def comparison_page() -> str:
    """`docs/methods.md`: the comparison of Fedstrata's own methods as a page."""
    own = [e for e in entries() if e.make.__module__.startswith("fedstrata.")]
    lines = [
        "# The methods",
        "",
        "Written by `python scripts/write_method_page.py docs/methods.md` from what each method states about itself; "
        "`fedstrata methods --compare` shows the same with the methods that you have installed.",
        "",
    ]
    marks = [c for c in COLUMNS if c.kind != "text"]
    lines += [_line(["method", *(c.title for c in marks)]), _line(["---"] * (len(marks) + 1))]
    lines += [_line([f"[`{e.name}`](#{e.name})", *(yes_no(getattr(e.facts, c.key)) for c in marks)]) for e in own]
    lines += ["", *(f"- **{c.title}**: {c.meaning}." for c in marks)]
    lines += [
        "- **n/a**: nothing is merged, or it depends on the adapter kind.",
        "",
        "A method that is refused for a setting says which column says no.",
    ]
    for e in own:
        lines += ["", f"## {e.name}", "", e.summary, ""]
        lines += [f"- trains: {e.facts.trains}", f"- sends: {e.facts.sends}", f"- source: {e.facts.paper}"]
        if e.aliases:
            lines.append(f"- also understood as: {', '.join(e.aliases)}")
    return "\n".join(lines) + "\n"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
