"""Methods and parts of installed packages: found by name, imported late, and named when they are broken or clash."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fedstrata.codec import CODECS
from fedstrata.data.config import PartitionConfig
from fedstrata.data.partition import PARTITIONS, partition
from fedstrata.discovery import look_again, origin_record, place_of
from fedstrata.errors import ConfigError
from fedstrata.method import METHODS
from fedstrata.registry import to_config
from fedstrata.select import SELECTORS

Install = Callable[..., None]

PART = """
from dataclasses import dataclass
from typing import ClassVar
from fedstrata.select.accept_all import AcceptAll
from fedstrata.select.base import Selector

@dataclass(frozen=True)
class Mine(Selector):
    id: ClassVar[str] = "{id}"
    portion: float = 0.5
    def init(self):
        return {{}}
    def select(self, state, proposal, context):
        return proposal, state, {{"accepted": []}}
"""
METHOD = """
from fedstrata.method.fedavg import fedavg

def {name}(weight_by: str = "uniform"):
    \"\"\"Mine: as FedAvg, but every client counts the same.\"\"\"
    return fedavg(weight_by)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a package with entry points on the path, as pip would; everything is gone afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    modules: list[str] = []

    def add(dist: str, module: str, code: str, **groups: str) -> None:
        (tmp_path / f"{module}.py").write_text(code)
        info = tmp_path / f"{dist.replace('-', '_')}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.5\n")
        (info / "top_level.txt").write_text(f"{module}\n")
        lines = [line for group, entry in groups.items() for line in (f"[fedstrata.{group}]", entry)]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        modules.append(module)
        look_again()

    look_again()
    yield add
    for module in modules:
        sys.modules.pop(module, None)
        SELECTORS.forget(module)
        CODECS.forget(module)
        METHODS.forget(module)
    look_again()


def test_an_installed_part_is_built_by_its_id(install: Install) -> None:
    install("fs-mine", "fs_mine_a", PART.format(id="mine_a"), selectors="mine_a = fs_mine_a:Mine")
    part = SELECTORS.build({"id": "mine_a", "portion": 0.25})
    assert to_config(part) == {"id": "mine_a", "portion": 0.25}
    assert "mine_a" in SELECTORS.names


def test_nothing_is_imported_before_a_name_is_looked_up(install: Install) -> None:
    install("fs-late", "fs_late", PART.format(id="late"), selectors="late = fs_late:Mine")
    assert "late" in SELECTORS.names
    SELECTORS.build("accept_all")
    with pytest.raises(ConfigError, match=r"known: .*late"):
        SELECTORS.build("laet")
    assert "fs_late" not in sys.modules
    SELECTORS.build("late")
    assert "fs_late" in sys.modules


def test_a_broken_plug_in_is_named_and_leaves_the_others_alone(install: Install) -> None:
    install("fs-bad", "fs_bad", "raise RuntimeError('no such luck')", selectors="bad = fs_bad:Mine")
    install("fs-good", "fs_good", PART.format(id="good"), selectors="good = fs_good:Mine")
    with pytest.raises(ConfigError) as caught:
        SELECTORS.build("bad")
    for word in (
        "fs-bad 1.5 (fs_bad:Mine)",
        "fedstrata.selectors",
        "RuntimeError: no such luck",
        "pip uninstall fs-bad",
    ):
        assert word in str(caught.value)
    assert SELECTORS.build("good").id == "good"
    (problem,) = SELECTORS.load_installed()
    assert "fs-bad 1.5" in problem


def test_two_packages_with_one_name_are_both_named(install: Install) -> None:
    for dist in ("fs-one", "fs-two"):
        module = dist.replace("-", "_")
        install(dist, module, PART.format(id="same"), selectors=f"same = {module}:Mine")
    with pytest.raises(ConfigError, match=r"fs-one 1\.5 \(fs_one:Mine\) and fs-two 1\.5 \(fs_two:Mine\)"):
        SELECTORS.build("same")


def test_a_package_with_the_name_of_a_part_of_our_own_is_a_clash_of_both(install: Install) -> None:
    install("fs-all", "fs_all", PART.format(id="accept_all"), selectors="accept_all = fs_all:Mine")
    with pytest.raises(ConfigError, match=r"fedstrata\.select\.accept_all\.AcceptAll and fs-all 1\.5"):
        SELECTORS.build("accept_all")


@pytest.mark.parametrize(
    ("code", "entry", "told"),
    [
        (PART.format(id="other"), "named = fs_odd:Mine", 'The entry point "named" holds the selector "other"'),
        ("Mine = 3", "named = fs_odd:Mine", "This is not a selector"),
        ("class Mine:\n    id = 'named'", "named = fs_odd:Mine", "a frozen dataclass"),
        ("", "named = fs_odd:Mine", "has no attribute 'Mine'"),
    ],
)
def test_what_an_entry_point_holds_is_checked(install: Install, code: str, entry: str, told: str) -> None:
    install("fs-odd", "fs_odd", code, selectors=entry)
    with pytest.raises(ConfigError, match=told):
        SELECTORS.build("named")


def test_an_installed_method_is_found_by_any_spelling_and_has_facts_of_its_parts(install: Install) -> None:
    install("fs-way", "fs_way", METHOD.format(name="my_way"), methods="my_way = fs_way:my_way")
    entry = METHODS.find("My-Way")
    assert entry.summary == "Mine: as FedAvg, but every client counts the same."
    assert METHODS.build("my_way", {}).aggregator.weight_by == "uniform"  # type: ignore[attr-defined]
    facts = entry.facts
    assert (facts.sends, facts.exact, facts.unequal_ranks) == ("differences as float32", False, False)
    assert (facts.unequal_depth, facts.client_state, facts.personalised) == (True, False, False)


def test_an_installed_method_that_is_called_like_ours_is_a_clash_of_both(install: Install) -> None:
    install("fs-avg", "fs_avg", METHOD.format(name="fedavg"), methods="fedavg = fs_avg:fedavg")
    with pytest.raises(ConfigError, match=r"fedstrata\.method\.fedavg\.fedavg and fs-avg 1\.5"):
        METHODS.find("FedAvg")
    assert METHODS.find("fedprox").name == "fedprox"
    assert len(METHODS.load_installed()) == 1


def test_a_method_that_returns_no_method_is_refused(install: Install) -> None:
    install("fs-nil", "fs_nil", "def nil():\n    '''Nothing.'''", methods="nil = fs_nil:nil")
    with pytest.raises(ConfigError, match='"nil" does not make a method'):
        METHODS.build("nil", {})


def test_the_record_of_an_installed_part_has_package_version_and_hash(install: Install) -> None:
    install("fs-rec", "fs_rec", PART.format(id="rec"), selectors="rec = fs_rec:Mine")
    record = origin_record(SELECTORS["rec"])
    assert record is not None
    assert record["object"] == "fs_rec:Mine"
    assert len(record["sha256"]) == 64
    assert origin_record(SELECTORS["accept_all"]) is None
    assert place_of(SELECTORS["accept_all"]) == "fedstrata.select.accept_all.AcceptAll"


def test_an_installed_partition_is_a_kind(install: Install) -> None:
    code = "import numpy as np\ndef odd(config, labels, num, rng):\n    return np.arange(len(labels)) % num"
    install("fs-odd-split", "fs_odd_split", code, partitions="odd = fs_odd_split:odd")
    parts = partition(PartitionConfig(kind="odd"), np.zeros(5, np.int64), None, 2, 0)
    assert {c: p.tolist() for c, p in parts.items()} == {"client-00": [0, 2, 4], "client-01": [1, 3]}
    assert "odd" in PARTITIONS.names
