"""Where a machine keeps the base model's updates: one log for all its clients, and plain words out of step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedstrata.core.merges import BaseLog, Merge
from fedstrata.errors import ClientError, RunFolderError
from fedstrata.record.site import SiteBase


def merge(number: int) -> Merge:
    """B·A of rank 1 on a map of 3 × 4, different for every number."""
    return Merge(number, {"q": (np.full((3, 1), number, np.float32), np.ones((1, 4), np.float32))})


def take(site: SiteBase, known: int, number: int, numbers: list[int]) -> BaseLog:
    return site.take("a", known, number, [merge(n) for n in numbers])


def bits(log: BaseLog) -> dict[str, bytes]:
    return {t: d.tobytes() for t, d in log.dense().items()}


def test_merges_are_added_once_for_all_clients_of_a_machine() -> None:
    """Client b needs what a has brought: 1 + 2 = 3 everywhere, not 1 + 2 + 1 + 2."""
    site = SiteBase()
    assert take(site, 0, 2, [1, 2]).number == 2
    assert take(site, 0, 2, [1, 2]).number == 2
    assert site.log.dense()["q"].tolist() == [[3.0] * 4] * 3
    assert take(site, 2, 3, [3]).dense()["q"].tolist() == [[6.0] * 4] * 3


def test_a_client_that_stands_at_the_number_needs_nothing() -> None:
    site = SiteBase()
    before = take(site, 0, 1, [1])
    assert take(site, 1, 1, []) is before


def test_whoever_lacks_a_merge_says_so() -> None:
    """The server thinks that the machine stands at 2, but its folder is new."""
    with pytest.raises(ClientError, match="does not stand where the server thinks") as error:
        take(SiteBase(), 2, 3, [3])
    assert "merge 2 or later" in str(error.value)
    assert "the server sends everything after a failure" in str(error.value)


def test_a_task_that_lacks_its_merges_is_refused_and_changes_nothing() -> None:
    site = SiteBase()
    take(site, 0, 1, [1])
    with pytest.raises(ClientError, match="merge 3"):
        take(site, 1, 3, [2])
    assert site.log.number == 1


def test_a_machine_that_is_ahead_refuses_an_older_task() -> None:
    site = SiteBase()
    take(site, 0, 3, [1, 2, 3])
    with pytest.raises(ClientError, match="merge 2"):
        take(site, 0, 2, [1, 2])


def test_the_log_survives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "base" / "merges"
    site = SiteBase(path)
    assert site.log.number == 0
    take(site, 0, 2, [1, 2])
    again = SiteBase(path)
    assert (again.log.number, bits(again.log)) == (2, bits(site.log))
    take(again, 2, 3, [3])
    assert bits(SiteBase(path).log) == bits(again.log)
    assert SiteBase(path).log.number == 3


def test_a_long_log_is_read_again_to_the_bit(tmp_path: Path) -> None:
    """Old merges have become one dense sum: 1 + 2 + … + 20 = 210."""
    site = SiteBase(tmp_path / "merges")
    for number in range(1, 21):
        take(site, number - 1, number, [number])
    again = SiteBase(tmp_path / "merges").log
    assert again.snapshot_number == site.log.snapshot_number > 0
    assert bits(again) == bits(site.log)
    assert again.dense()["q"][0, 0] == 210.0


def test_nothing_is_written_where_nothing_is_new(tmp_path: Path) -> None:
    site = SiteBase(tmp_path / "merges")
    take(site, 0, 0, [])
    assert not (tmp_path / "merges").exists()
    take(site, 0, 1, [1])
    before = (tmp_path / "merges").read_bytes()
    (tmp_path / "merges").unlink()
    take(site, 1, 1, [])
    assert not (tmp_path / "merges").exists()
    assert before


def test_what_an_evaluation_brings_does_not_stay(tmp_path: Path) -> None:
    """The round that it judges may be lost: its training is repeated at merge 1, where the machine still stands."""
    site = SiteBase(tmp_path / "merges")
    take(site, 0, 1, [1])
    before = (tmp_path / "merges").read_bytes()
    judged = site.take("a", 1, 2, [merge(2)], keep=False)
    assert judged.number == 2
    assert judged.dense()["q"].tolist() == [[3.0] * 4] * 3
    assert site.take("b", 0, 2, [merge(1), merge(2)], keep=False) is judged
    assert (tmp_path / "merges").read_bytes() == before
    assert take(site, 0, 1, [1]).number == site.log.number == 1
    assert take(site, 1, 2, [2]).number == SiteBase(tmp_path / "merges").log.number == 2


def test_an_evaluation_that_lacks_a_merge_is_refused_too() -> None:
    site = SiteBase()
    with pytest.raises(ClientError, match="merge 2"):
        site.take("a", 0, 2, [merge(1)], keep=False)
    with pytest.raises(ClientError, match="merge 3 or later"):
        site.take("a", 3, 3, [], keep=False)
    assert site.log.number == 0


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\x02\0\0\0\0\0\0\0{}"])
def test_a_damaged_file_is_refused_in_plain_words(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "merges").write_bytes(content)
    with pytest.raises(RunFolderError, match="cannot be read"):
        SiteBase(tmp_path / "merges")
