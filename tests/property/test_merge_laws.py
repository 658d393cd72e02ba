"""Methods that move the base: what was missed is sent and counted, the log stays small, all have the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstrata.core.tensors import parse_stratum
from fedstrata.core.wire import unpack_frame
from fedstrata.message import unpack_task
from fedstrata.method import METHODS
from fedstrata.plan import PLANNERS
from fedstrata.record.checkpoint import save_checkpoint
from fedstrata.record.site import SiteBase
from fedstrata.select import AcceptLast, AcceptRandom
from fedstrata.server.tasks import cohort_of

SIZES = {"a": 30, "b": 7, "c": 12, "d": 1, "e": 8}
MOVING = ["fedex_lora", "flora"]
moving = pytest.mark.parametrize("name", MOVING)


def own_sites(world: Any) -> dict[str, SiteBase]:
    """Lets every client be a machine of its own."""
    sites: dict[str, SiteBase] = {}

    def take(client: str, known: int, number: int, merges: Any, *, keep: bool) -> None:
        world.trainer.site = sites.setdefault(client, SiteBase())
        world.trainer.site.take(client, known, number, merges, keep=keep)

    world.trainer.take_merges = take
    return sites


def bits(named: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {n: t.tobytes() for n, t in sorted(named.items())}


def merge_bytes(task: Any, layout: Any) -> int:
    """4 bytes per number: R·(out + in) per factor pair, out·in per dense sum."""
    total = 0
    for _, ranks in task.merges:
        for target, rank in zip(layout.targets, ranks, strict=True):
            n_out, n_in = layout[f"{target}.lora_B"].shape[0], layout[f"{target}.lora_A"].shape[1]
            total += n_out * n_in if rank == -1 else rank * (n_out + n_in)
    return 4 * total


def test_both_methods_are_here(lab: Any) -> None:
    assert {n for n in METHODS.entries if lab.method(n).aggregator.moves_base} == set(MOVING)


@moving
def test_everybody_who_trains_stands_where_the_server_stands(lab: Any, name: str) -> None:
    """Three of five clients per round on machines of their own; some fail and get everything anew."""
    world = lab.world(lab.method(name), sizes=SIZES, clients_per_round=3, trained_before=False, num_blocks=2, rank=1)
    sites, layout = own_sites(world), world.setup.layout
    known, gaps, resent = dict.fromkeys(SIZES, 0), set(), 0
    dense_ways, factor_ways = 0, 0
    for server_round in range(1, 25):
        cohort = cohort_of(world.setup, server_round)
        world.trainer.habits = {cohort[0]: "raise"} if server_round in (3, 6, 7, 12) else {}
        _, clients = world.round()
        base = world.before.base
        for client, line in clients.items():
            task, frame = unpack_task(world.payloads[client, "down"])
            assert task.base == [known[client], base.number]
            numbers = [number for number, _ in task.merges]
            assert numbers == ([] if known[client] == base.number else numbers)
            assert not numbers or (numbers[-1] == base.number and numbers[0] > known[client])
            down = task.layouts(layout).down
            assert len(frame.payload.values) == merge_bytes(task, layout) + 4 * down.num_values
            assert line["bytes"]["downlink"]["values"] == len(frame.payload.values)
            gaps.add(base.number - known[client])
            resent += known[client] == 0 and client in world.state.accepted and bool(base.number)
            dense_ways += any(-1 in ranks for _, ranks in task.merges)
            factor_ways += any(r > 0 for _, ranks in task.merges for r in ranks)
            known[client] = base.number if line["status"] == "ok" else 0
            if base.number and line["status"] == "ok":
                assert bits(sites[client].log.dense()) == bits(base.dense())
        assert world.state.base.number == base.number + 1
        assert {c: n for c, n in known.items() if n} == {c: n for c, n in world.state.merged.items() if n}
    assert max(gaps) >= 3
    assert resent > 0
    assert dense_ways > 0
    assert factor_ways > 0


def test_the_log_stays_small_over_hundreds_of_rounds(lab: Any, tmp_path: Path) -> None:
    """Never more than twice the numbers of the dense sums, on the server, on a machine and in the checkpoint."""
    sizes = {"width": 12, "height": 12, "rank": 1, "num_blocks": 1, "sizes": {"a": 2, "b": 3}}
    world = lab.world(lab.method("flora"), trained_before=False, exactness_values=0, **sizes)
    layout = world.setup.layout
    dense = sum(layout[f"{t}.lora_B"].shape[0] * layout[f"{t}.lora_A"].shape[1] for t in layout.targets)
    files, most = [], 0
    for server_round in range(1, 301):
        world.round()
        for log in (world.state.base, world.trainer.site.log):
            held = sum(d.size for d in log.snapshot.values()) + sum(m.num_values for m in log.merges)
            most = max(most, held)
            assert held <= 2 * dense
        if server_round % 100 == 0:
            save_checkpoint(tmp_path / "state", world.state, "hash")
            files.append((tmp_path / "state").stat().st_size)
    assert most > dense  # factors stand beside sums
    assert world.state.base.number == 300
    assert files[2] <= files[0] + 4 * dense
    assert bits(world.trainer.site.log.dense()) == bits(world.before.base.dense())


def test_a_round_of_flora_moves_the_base_by_the_mean_product_and_leaves_no_adapter(lab: Any) -> None:
    """base += Σ p_k·s_k·B_k·A_k with s_k = alpha/r_k; the pair of the next round adds nothing."""
    world = lab.world(lab.method("flora"), sizes=SIZES, num_blocks=2)
    for _ in range(2):
        world.round()
        total = sum(SIZES.values())
        for target in world.setup.layout.targets:
            mean = 0.0
            for client, n in SIZES.items():
                a, b = world.pair(client, target, world.trainer.local[client])
                mean += n / total * world.client_scaling(client, target) * (b @ a)
            gained = world.weight(target, world.state.base) - world.weight(target, world.before.base)
            np.testing.assert_allclose(gained, mean, rtol=1e-5, atol=1e-5)
            assert not world.state.tensors[f"{target}.lora_B"].any()
        scalings = {world.client_scaling(c, "layers.0.q") for c in SIZES}
        assert scalings == {4.5 / 3, 4.5 / 1}


def test_pairs_that_are_drawn_never_go_down(lab: Any) -> None:
    world = lab.world(lab.method("flora"), sizes=SIZES, num_blocks=2)
    for _ in range(2):
        world.round()
        for client in SIZES:
            task = world.trainer.tasks[client]
            layouts = task.layouts(world.setup.layout)
            assert {s.kind for s in layouts.down} == {"weight"}
            assert {s.kind for s in layouts.up} == {"weight", "lora_A", "lora_B"}
            starts = world.trainer.starts[client]
            assert not any(t.any() for n, t in starts.items() if n.endswith("lora_B"))


@moving
@pytest.mark.parametrize("selector", [AcceptLast(0.5), AcceptRandom(0.25)], ids=lambda s: s.id)
def test_a_block_that_the_selector_rejects_does_not_move_the_base(lab: Any, name: str, selector: Any) -> None:
    world = lab.world(lab.method(name).with_parts(selector=selector), sizes=SIZES, num_blocks=4)
    for _ in range(2):
        record, _ = world.round()
        accepted = {parse_stratum(s) for s in record["selection"]["accepted"]}
        before, after = world.before.base.dense(), world.state.base.dense()
        layout = world.setup.layout
        for target in layout.targets:
            stratum = layout[f"{target}.lora_A"].stratum
            moved = before.get(target, np.zeros(1)).tobytes() != after.get(target, np.zeros(1)).tobytes()
            assert moved == (stratum in accepted)
            if not moved:
                pair = [f"{target}.lora_{x}" for x in "AB"]
                assert all(world.before.tensors[n].tobytes() == world.state.tensors[n].tobytes() for n in pair)
        assert 0 < len(accepted - {"head"}) < 4
        assert max(world.state.base.merges, key=lambda m: m.number).factors.keys() <= {
            t for t in layout.targets if layout[f"{t}.lora_A"].stratum in accepted
        }


@moving
def test_a_target_that_was_merged_late_is_caught_up_with_the_others(lab: Any, name: str) -> None:
    """Blocks are held in turns, so that targets enter the log in different rounds and some merges miss some of them."""
    planner = PLANNERS.build({"id": "random_k", "strata": 2})
    method = lab.method(name).with_parts(planner=planner)
    sizes = {"width": 12, "height": 12, "rank": 1, "num_blocks": 5, "sizes": SIZES}
    world = lab.world(method, clients_per_round=2, trained_before=False, **sizes)
    sites = own_sites(world)
    for _ in range(25):
        _, clients = world.round()
        for client in clients if world.before.base.number else ():
            assert bits(sites[client].log.dense()) == bits(world.before.base.dense())
    assert len(world.state.base.dense()) == 10
    assert len(sites) == 5
    assert any(len(m.factors) < 10 for m in world.state.base.merges)


def test_a_merge_is_read_from_the_frame_that_carries_it(lab: Any) -> None:
    """The bytes behind the header: merges first, then the codec's values, and nothing else."""
    world = lab.world(lab.method("fedex_lora"), sizes=SIZES, num_blocks=2)
    world.round()
    task, _ = unpack_task(world.payloads["a", "down"])
    frame = unpack_frame(world.payloads["a", "down"], 1, where="test")
    first = world.setup.layout.targets[0]
    n_out = world.setup.layout[f"{first}.lora_B"].shape[0]
    b = np.frombuffer(bytes(frame.payload.values)[: 4 * n_out], "<f4")
    merge = world.before.base.since(0)[0]
    assert task.merges[0][1][0] == 1
    assert b.tobytes() == merge.factors[first][0].tobytes()
