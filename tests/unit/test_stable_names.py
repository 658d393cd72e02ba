"""The page for plug-ins: every name on it imports, and its method is the one that `new-method` writes."""

from __future__ import annotations

import re
from importlib import import_module, resources
from pathlib import Path

import pytest

from fedstrata.data.partition import PARTITIONS
from fedstrata.data.sources import SOURCES
from fedstrata.experiment.plugins import KINDS
from fedstrata.method.registry import GROUP

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "plugins.md").read_text("utf-8")
STABLE = PAGE[PAGE.index("## Names that stay") :]
NAMES = [
    (row[1], name)
    for row in re.finditer(r"^\| `([\w.]+)` \| (.+) \|$", STABLE, re.MULTILINE)
    for name in re.findall(r"`(\w+)`", row[2])
]


def test_the_table_was_read() -> None:
    assert len(NAMES) > 80
    assert ("fedstrata.method", "Method") in NAMES


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[".".join(n) for n in NAMES])
def test_every_name_that_is_promised_imports(module: str, name: str) -> None:
    assert getattr(import_module(module), name) is not None


def test_the_method_on_the_page_is_the_one_that_is_written_and_under_forty_lines() -> None:
    template = resources.files("fedstrata.examples.new_method").joinpath("method.py.txt").read_text("utf-8")
    method = template[template.index("@SELECTORS.register") :].replace("{{name}}", "my_method")
    assert method in PAGE
    assert len([line for line in method.splitlines() if line.strip()]) < 40


def test_every_group_of_entry_points_is_on_the_page() -> None:
    groups = [GROUP, PARTITIONS.group, SOURCES.group, *(k.registry.group for k in KINDS.values())]
    assert [g for g in groups if f"`{g}`" not in PAGE] == []
