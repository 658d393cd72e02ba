"""The log of what was merged into the base: one float32 recursion, however the merges travel and are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.core.merges import DENSE, BaseLog, Merge, add_product, pack_merges, unpack_merges
from fedstrata.core.tensors import Layout, TensorSpec
from fedstrata.errors import PayloadError
from fedstrata.record.checkpoint import ServerState, load_checkpoint, save_checkpoint

SIZES = {"q": (6, 9), "v": (5, 4)}
LAYOUT = Layout(
    tuple(
        spec
        for t, (n_out, n_in) in SIZES.items()
        for spec in (
            TensorSpec(f"{t}.lora_A", (3, n_in), 0, "lora_A"),
            TensorSpec(f"{t}.lora_B", (n_out, 3), 0, "lora_B"),
        )
    )
)
DENSE_VALUES = sum(n_out * n_in for n_out, n_in in SIZES.values())


def factors(number: int, rank: int, targets: Any = ("q", "v")) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(number)
    return {
        t: (
            rng.standard_normal((SIZES[t][0], rank)).astype(np.float32),
            rng.standard_normal((rank, SIZES[t][1])).astype(np.float32),
        )
        for t in targets
    }


def log_of(updates: list[Any]) -> BaseLog:
    log = BaseLog()
    for update in updates:
        log = log.append(update)
    return log


def recursion(updates: list[Any]) -> dict[str, bytes]:
    """D_m = float32(D_{m−1} + B_m·A_m), in plain numpy."""
    sums: dict[str, np.ndarray] = {}
    for update in updates:
        for target, (b, a) in update.items():
            total = b.astype(np.float64) @ a.astype(np.float64) + sums.get(target, np.float64(0))
            sums[target] = total.astype(np.float32)
    return bits(sums)


def bits(named: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {n: np.ascontiguousarray(t).tobytes() for n, t in sorted(named.items())}


def num_values(log: BaseLog) -> int:
    return sum(d.size for d in log.snapshot.values()) + sum(m.num_values for m in log.merges)


def carried(merges: Any) -> list[Merge]:
    """The merges after a trip over the line."""
    entries, data = pack_merges(merges, LAYOUT)
    found, rest = unpack_merges(entries, data, LAYOUT)
    assert not len(rest)
    return found


update_lists = st.lists(
    st.tuples(st.integers(1, 4), st.sets(st.sampled_from(["q", "v"]), min_size=1)), min_size=1, max_size=12
).map(lambda many: [factors(k, rank, sorted(targets)) for k, (rank, targets) in enumerate(many)])


@settings(max_examples=60, deadline=None)
@given(updates=update_lists)
def test_the_sum_is_the_float32_recursion_whatever_the_log_keeps(updates: list[Any]) -> None:
    log = log_of(updates)
    assert log.number == len(updates)
    assert bits(log.dense()) == recursion(updates)


@settings(max_examples=60, deadline=None)
@given(updates=update_lists, data=st.data())
def test_merges_in_any_chunks_give_the_same_bits(updates: list[Any], data: st.DataObject) -> None:
    """Somebody asks now and then, and stands at every moment where the log stood then."""
    log, mine = BaseLog(), BaseLog()
    for number, update in enumerate(updates, 1):
        log = log.append(update)
        if data.draw(st.booleans()) or number == len(updates):
            for merge in carried(log.since(mine.number)):
                mine = mine.take(merge)
            assert mine.number == log.number
            assert bits(mine.dense()) == bits(log.dense())
            assert num_values(mine) <= 2 * DENSE_VALUES


@settings(max_examples=40, deadline=None)
@given(updates=update_lists, known=st.integers(0, 12))
def test_whoever_is_ahead_ignores_what_it_has(updates: list[Any], known: int) -> None:
    """Everything is sent again after a failure; what was merged before is not merged twice."""
    log = log_of(updates)
    mine = log_of(updates[:known])
    for merge in carried(log.since(0)):
        mine = mine.take(merge)
    assert (mine.number, bits(mine.dense())) == (log.number, bits(log.dense()))


def test_a_long_log_holds_at_most_twice_the_dense_numbers() -> None:
    """300 merges of rank 1: 15 + 9 numbers each, 6·9 + 5·4 = 74 dense ones."""
    log, mine, sent = BaseLog(), BaseLog(), []
    updates = [factors(k, 1) for k in range(300)]
    for number, update in enumerate(updates, 1):
        log = log.append(update)
        assert num_values(log) <= 2 * DENSE_VALUES
        if number % 7 == 0:
            merges = log.since(mine.number)
            sent.append(sum(m.num_values for m in merges))
            for merge in merges:
                mine = mine.take(merge)
    assert bits(log.dense()) == recursion(updates)
    assert bits(mine.dense()) == recursion(updates[:294])
    assert max(sent) <= DENSE_VALUES  # never more than the dense sums


def test_factors_are_sent_while_they_are_smaller_and_dense_sums_afterwards() -> None:
    """q: R·(6 + 9) > 6·9 from R = 4 on; v: R·(5 + 4) > 5·4 from R = 3 on."""
    log = log_of([factors(k, 1) for k in range(3)])
    ways = {known: [(m.number, sorted(m.factors), sorted(m.dense)) for m in log.since(known)] for known in range(4)}
    assert ways[2] == [(3, ["q", "v"], [])]
    assert ways[1] == [(2, ["q", "v"], []), (3, ["q", "v"], [])]
    assert ways[0] == [(1, ["q"], []), (2, ["q"], []), (3, ["q"], ["v"])]
    assert ways[3] == []
    later = log.append(factors(3, 1))
    assert [(sorted(m.factors), sorted(m.dense)) for m in later.since(0)][-1] == ([], ["q", "v"])


def test_a_target_that_was_never_merged_is_not_in_the_sum() -> None:
    log = log_of([factors(0, 1, ["v"])])
    assert set(log.dense()) == {"v"}
    assert [entry for (entry,) in zip(pack_merges(log.since(0), LAYOUT)[0], strict=True)] == [[1, [0, 1]]]


def test_nothing_to_merge_leaves_the_log_alone() -> None:
    log = log_of([factors(0, 1)])
    assert log.append({}) is log
    assert log.since(5) == ()


def test_the_product_is_added_in_float64_and_cast_once() -> None:
    """1 + 3·2⁻²⁴ lies between 1 + 2⁻²³ and 1 + 2⁻²², rounds to even; 2⁻²⁴ added three times would stay at 1."""
    pair = (np.full((1, 3), 2.0**-24, np.float32), np.ones((3, 1), np.float32))
    one = np.ones((1, 1), np.float32)
    assert add_product(one, pair).tolist() == [[1 + 2.0**-22]]
    assert add_product(None, pair).tolist() == [[3 * 2.0**-24]]


@settings(max_examples=20, deadline=None)
@given(updates=update_lists)
def test_a_checkpoint_keeps_the_log_to_the_bit(tmp_path_factory: pytest.TempPathFactory, updates: list[Any]) -> None:
    log = log_of(updates)
    path: Path = tmp_path_factory.mktemp("log") / "state"
    save_checkpoint(path, ServerState({"w": np.zeros(1, np.float32)}, base=log), "hash")
    found = load_checkpoint(path)[0].base
    assert (found.number, found.snapshot_number) == (log.number, log.snapshot_number)
    assert bits(found.to_tensors()) == bits(log.to_tensors())
    assert bits(found.dense()) == bits(log.dense())
    more = factors(99, 2)
    assert bits(found.append(more).to_tensors()) == bits(log.append(more).to_tensors())


def test_merges_cross_the_line_to_the_byte() -> None:
    """Entries name R per target in the layout's order, the bytes are B and A, or D, in the same order."""
    pair = factors(1, 2, ["q"])["q"]
    dense = np.arange(20, dtype=np.float32).reshape(5, 4)
    entries, data = pack_merges([Merge(4, {"q": pair}), Merge(7, {}, {"v": dense})], LAYOUT)
    assert entries == [[4, [2, 0]], [7, [0, DENSE]]]
    assert data == pair[0].tobytes() + pair[1].tobytes() + dense.tobytes()
    found, rest = unpack_merges(entries, data + b"tail", LAYOUT)
    assert bytes(rest) == b"tail"
    assert [m.number for m in found] == [4, 7]
    assert found[0].factors["q"][1].tobytes() == pair[1].tobytes()
    assert np.array_equal(found[1].dense["v"], dense)


@pytest.mark.parametrize(
    "entries",
    [
        [[0, [1, 1]]],
        [[2, [1, 1]], [2, [1, 1]]],
        [[1, [1]]],
        [[1, [7, 0]]],
        [[1, [0, 5]]],
        [[1, [-2, 0]]],
        [[1.0, [1, 1]]],
        [[True, [1, 1]]],
        [[1, [True, 0]]],
        [["1", [1, 1]]],
        [[1, "11"]],
        ["11"],
        [[1]],
        [None],
    ],
    ids=str,
)
def test_entries_that_make_no_sense_are_refused(entries: list[Any]) -> None:
    with pytest.raises(PayloadError, match="make no sense"):
        unpack_merges(entries, b"\0" * 10000, LAYOUT)


def test_short_or_infinite_merges_are_refused() -> None:
    entries, data = pack_merges([Merge(1, factors(1, 2))], LAYOUT)
    for cut in (0, 1, len(data) - 1):
        with pytest.raises(PayloadError, match="cut short"):
            unpack_merges(entries, data[:cut], LAYOUT)
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(PayloadError, match="NaN or infinite"):
            unpack_merges(entries, data[:-4] + np.float32(bad).tobytes(), LAYOUT)
