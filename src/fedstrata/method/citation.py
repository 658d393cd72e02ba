"""Where something was published, and its BibTeX entry."""

from __future__ import annotations

from dataclasses import dataclass

_SPECIAL = {"&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_"}


@dataclass(frozen=True)
class Citation:
    """A publication, with what is known about it; what is not known stays empty and is left out.

    Attributes:
        key: Of the BibTeX entry.
        authors: Family names, or full names; `others` at the end stands for the rest ("et al.").
        title: As printed; empty where nobody checked it.
        year: Of publication.
        venue: Conference or journal, as one names it.
        arxiv: Number of the preprint, e.g. `1602.05629`.
        doi: Without the resolver.
        note: Anything else that a reader needs.
    """

    key: str
    authors: tuple[str, ...]
    title: str = ""
    year: int | None = None
    venue: str = ""
    arxiv: str = ""
    doi: str = ""
    note: str = ""

    @property
    def text(self) -> str:
        """One line for people.

        Example:
            >>> Citation("x", ("Cho", "others"), "On Ranks", 2024, "EMNLP").text
            'Cho et al., On Ranks, EMNLP 2024'
        """
        names = [name.rsplit(" ", 1)[-1] for name in self.authors]
        is_long = len(names) > 2 or names[-1:] == ["others"]
        who = f"{names[0]} et al." if is_long else " and ".join(names)
        when = f"{self.venue} {self.year or ''}".strip()
        return ", ".join(part for part in (who, self.title, when) if part)

    @property
    def bibtex(self) -> str:
        """The entry: `@inproceedings` with a venue, else `@misc`.

        Example:
            >>> print(Citation("x", ("Cho", "others"), "On Ranks", 2024).bibtex)
            @misc{x,
              author = {Cho and others},
              title = {{On Ranks}},
              year = {2024},
            }
        """
        kind = "inproceedings" if self.venue else "misc"
        arxiv = {"eprint": self.arxiv, "archivePrefix": "arXiv"} if self.arxiv else {}
        fields = {
            "author": " and ".join(map(_escape, self.authors)),
            "title": f"{{{_escape(self.title)}}}" if self.title else "",  # inner braces keep the capitals
            "booktitle": _escape(self.venue),
            "year": str(self.year or ""),
            **arxiv,
            "doi": self.doi,
            "note": _escape(self.note),
        }
        lines = [f"  {name} = {{{value}}}," for name, value in fields.items() if value]
        return "\n".join([f"@{kind}{{{self.key},", *lines, "}"])


def _escape(text: str) -> str:
    return "".join(_SPECIAL.get(c, c) for c in text)


FEDERATED_AVERAGING = Citation(
    "mcmahan2017communication",
    ("Brendan McMahan", "Eider Moore", "Daniel Ramage", "Seth Hampson", "Blaise Agüera y Arcas"),
    "Communication-Efficient Learning of Deep Networks from Decentralized Data",
    2017,
    "AISTATS",
    arxiv="1602.05629",
)
LORA = Citation(
    "hu2022lora",
    (
        "Edward J. Hu",
        "Yelong Shen",
        "Phillip Wallis",
        "Zeyuan Allen-Zhu",
        "Yuanzhi Li",
        "Shean Wang",
        "Lu Wang",
        "Weizhu Chen",
    ),
    "LoRA: Low-Rank Adaptation of Large Language Models",
    2022,
    "ICLR",
    arxiv="2106.09685",
)
PROXIMAL = Citation(
    "li2020federated",
    ("Tian Li", "Anit Kumar Sahu", "Manzil Zaheer", "Maziar Sanjabi", "Ameet Talwalkar", "Virginia Smith"),
    "Federated Optimization in Heterogeneous Networks",
    2020,
    "MLSys",
    arxiv="1812.06127",
)
NORMAL_FLOAT = Citation(
    "dettmers2023qlora",
    ("Tim Dettmers", "Artidoro Pagnoni", "Ari Holtzman", "Luke Zettlemoyer"),
    "QLoRA: Efficient Finetuning of Quantized LLMs",
    2023,
    "NeurIPS",
    arxiv="2305.14314",
)
SERVER_OPTIMIZERS = Citation(
    "reddi2021adaptive", ("Reddi", "others"), "Adaptive Federated Optimization", 2021, "ICLR", arxiv="2003.00295"
)

CITED_PARTS = {
    "proximal": PROXIMAL,
    "nf4": NORMAL_FLOAT,
    "momentum": SERVER_OPTIMIZERS,
    "adam": SERVER_OPTIMIZERS,
    "yogi": SERVER_OPTIMIZERS,
    "adagrad": SERVER_OPTIMIZERS,
}
"""Parts that were published on their own, by id; a part from outside says so with a class attribute `citation`."""


def fedstrata_citation(version: str) -> Citation:
    """How a run names the software that made it."""
    return Citation(
        "fedstrata",
        ("The Fedstrata authors",),
        "Fedstrata: federated fine-tuning, stratum by stratum",
        note=f"Software, version {version}",
    )
