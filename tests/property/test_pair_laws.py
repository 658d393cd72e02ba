"""What becomes of the two factors of a pair: trained in turns, local, drawn, sliced, handed out at other scalings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.aggregate import sketch_slices
from fedstrata.core.lora import init_lora
from fedstrata.core.tensors import HEAD
from fedstrata.message import unpack_task
from fedstrata.objective import RankDecay
from fedstrata.optimize import NoOptimizer
from fedstrata.record.client_state import ClientState

SIZES = {"a": 30, "b": 7, "c": 12, "d": 1}  # a and c on big devices, b and d on small ones
BLOCKS = 3


def layouts_of(world: Any, client: str) -> Any:
    return unpack_task(world.payloads[client, "down"])[0].layouts(world.setup.layout)


def kinds(layout: Any) -> set[str]:
    return {s.kind for s in layout}


def truncated(product: np.ndarray, rank: int) -> np.ndarray:
    u, s, vt = np.linalg.svd(product)
    return np.asarray((u[:, :rank] * s[:rank]) @ vt[:rank])


def test_ffa_lora_never_sends_a_in_either_direction(lab: Any) -> None:
    """A is drawn from (seed, "lora_init", target) on both sides and stays for ever; B and the head travel."""
    world = lab.world(lab.method("ffa_lora"), sizes=SIZES, num_blocks=BLOCKS, trained_before=False)
    drawn = {n: t for n, t in init_lora(world.setup.seed, world.setup.layout).items() if n.endswith("lora_A")}
    for _ in range(3):
        _, clients = world.round()
        for client, line in clients.items():
            layouts = layouts_of(world, client)
            assert kinds(layouts.up) == {"lora_B", "weight"}
            assert kinds(layouts.down) <= {"lora_B", "weight"}
            assert line["bytes"]["uplink"]["values"] == 4 * layouts.up.num_values
            assert line["bytes"]["downlink"]["values"] == 4 * layouts.down.num_values
            assert all(np.array_equal(world.trainer.starts[client][n], a) for n, a in drawn.items())
        assert all(np.array_equal(world.state.tensors[n], a) for n, a in drawn.items())


def test_rolora_trains_b_in_odd_rounds_and_a_in_even_ones(lab: Any) -> None:
    world = lab.world(lab.method("rolora"), sizes=SIZES, num_blocks=BLOCKS, trained_before=False)
    for server_round in range(1, 5):
        _, clients = world.round()
        active, frozen = ("lora_B", "lora_A") if server_round % 2 else ("lora_A", "lora_B")
        for spec in (s for s in world.setup.layout if s.kind != "weight"):
            same = world.before.tensors[spec.name].tobytes() == world.state.tensors[spec.name].tobytes()
            assert same == (spec.kind == frozen)
        for client in clients:
            layouts = layouts_of(world, client)
            assert kinds(layouts.up) == kinds(layouts.trained) == {active, "weight"}
            assert kinds(layouts.down) == {"lora_A", "lora_B", "weight"}


def test_fedsa_lora_keeps_b_and_the_head_on_the_client(lab: Any) -> None:
    """Every client goes on from its own B; the server's B is never touched, whatever clients do."""
    world = lab.world(
        lab.method("fedsa_lora"), sizes=SIZES, num_blocks=BLOCKS, trained_before=False, clients_per_round=3
    )
    mine: dict[str, dict[str, np.ndarray]] = {}
    first = {n: t.copy() for n, t in world.state.tensors.items()}
    for server_round in range(1, 5):
        _, clients = world.round()
        for client in clients:
            layouts = layouts_of(world, client)
            assert kinds(layouts.up) == kinds(layouts.down) == {"lora_A"}
            start = world.trainer.starts[client]
            for spec in world.setup.layout:
                if spec.kind == "lora_A":
                    assert start[spec.name].tobytes() == world.before.tensors[spec.name].tobytes()
                else:
                    expected = mine.get(client, first)[spec.name]
                    assert start[spec.name].tobytes() == expected.tobytes()
            mine[client] = {n: t.copy() for n, t in world.trainer.local[client].items()}
            kept = ClientState.from_bytes(world.states.read(client, server_round), world.setup.layout).local
            assert set(kept) == {s.name for s in world.setup.layout if s.kind == "lora_B" or s.stratum == HEAD}
        for spec in world.setup.layout:
            same = first[spec.name].tobytes() == world.state.tensors[spec.name].tobytes()
            assert same == (spec.kind != "lora_A")
    assert len({m["layers.0.q.lora_B"].tobytes() for m in mine.values()}) == len(mine)


def test_fedsvd_starts_orthonormal_and_stays_so(lab: Any) -> None:
    """A·Aᵀ = I before and after every round, s·B·A is the mean product: what clients had, with one common A."""
    world = lab.world(lab.method("fedsvd"), sizes=SIZES, num_blocks=BLOCKS)
    for _ in range(3):
        world.round()
        for target in world.setup.layout.targets:
            a, b = f"{target}.lora_A", f"{target}.lora_B"
            old = world.before.tensors[a].astype(np.float64)
            mean = sum(n * world.trainer.local[c][b].astype(np.float64) for c, n in SIZES.items()) / sum(SIZES.values())
            new_a, new_b = (world.state.tensors[n].astype(np.float64) for n in (a, b))
            np.testing.assert_allclose(old @ old.T, np.eye(3), atol=1e-6)
            np.testing.assert_allclose(new_a @ new_a.T, np.eye(3), atol=1e-6)
            np.testing.assert_allclose(new_b @ new_a, mean @ old, atol=2e-6)
            assert kinds(layouts_of(world, "a").up) == {"lora_B", "weight"}


def test_fed_sb_sends_r_squared_numbers_per_map(lab: Any) -> None:
    world = lab.world(lab.method("fed_sb"), "square", sizes=SIZES, num_blocks=BLOCKS)
    _, clients = world.round()
    head = sum(s.num_values for s in world.setup.layout.of(HEAD))
    for line in clients.values():  # 2 maps per block, r = 3
        assert line["bytes"]["uplink"]["values"] == 4 * (2 * BLOCKS * 3 * 3 + head)


@settings(max_examples=3, deadline=None)
@given(rank=st.integers(2, 5), seed=st.integers(0, 2**31))
def test_fslora_hands_out_the_drawn_slices_and_takes_back_the_same(lab: Any, rank: int, seed: int) -> None:
    """A client starts from A[S, :] and B[:, S]; the server adds p_k·Δ_k there and keeps all other slices' bits."""
    world = lab.world(lab.method("fslora"), sizes=SIZES, num_blocks=2, rank=rank, seed=seed)
    for _ in range(2):
        _, clients = world.round()
        total = sum(SIZES.values())
        for spec in (s for s in world.setup.layout if s.kind != "weight"):
            turn = (lambda x: x) if spec.kind == "lora_A" else (lambda x: x.T)
            old = turn(world.before.tensors[spec.name]).astype(np.float64)
            expected, covered = old.copy(), set()
            for client in clients:
                count = rank if client in "ac" else max(1, rank // 2)
                drawn = list(sketch_slices(seed, world.state.server_round, client, rank, count))
                start = turn(world.trainer.starts[client][spec.name])
                assert start.tobytes() == turn(world.before.tensors[spec.name])[drawn].tobytes()
                local = turn(world.trainer.local[client][spec.name]).astype(np.float64)
                expected[drawn] += SIZES[client] / total * (local - start)
                covered |= set(drawn)
            np.testing.assert_allclose(turn(world.state.tensors[spec.name]), expected, rtol=2e-6, atol=2e-6)
            absent = sorted(set(range(rank)) - covered)
            new = turn(world.state.tensors[spec.name])
            assert new[absent].tobytes() == turn(world.before.tensors[spec.name])[absent].tobytes()
        s = world.setup.scaling["layers.0.q"]  # s·(r/k_k)
        assert world.client_scaling("a", "layers.0.q") == pytest.approx(s)
        assert world.client_scaling("b", "layers.0.q") == pytest.approx(s * rank / max(1, rank // 2))


def test_fslora_with_all_slices_is_fedit_with_the_cohort_as_denominator(lab: Any) -> None:
    """K = r for everybody, and everybody holds everything: W + Σ p_k·Δ_k = Σ p_k·W_k up to the cast to float32."""
    worlds = [
        lab.world(lab.method(name), sizes=SIZES, num_blocks=BLOCKS, kinds=["big"]) for name in ("fslora", "fedit")
    ]
    for _ in range(3):
        for world in worlds:
            world.round()
        for name, tensor in worlds[0].state.tensors.items():
            np.testing.assert_allclose(tensor, worlds[1].state.tensors[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["flexlora", "raflora"])
def test_products_are_handed_out_at_the_rank_and_scaling_of_the_client(lab: Any, name: str) -> None:
    """After a round s_k·B_k·A_k is the rank-r_k truncation of the server's product, with s_k = alpha/r_k."""
    world = lab.world(lab.method(name), sizes=SIZES, num_blocks=BLOCKS)
    world.round()
    _, clients = world.round()
    for target in world.setup.layout.targets:
        server = world.effective(world.before, target) - world.weight(target, world.before.base)
        for client in clients:
            rank = 3 if client in "ac" else 1
            scaling = world.client_scaling(client, target)
            a, b = (world.trainer.starts[client][f"{target}.lora_{x}"].astype(np.float64) for x in "AB")
            assert scaling == pytest.approx(4.5 / rank)
            assert a.shape[0] == b.shape[1] == rank
            np.testing.assert_allclose(scaling * (b @ a), truncated(server, rank), atol=2e-5)


@pytest.mark.parametrize("name", ["hetlora", "rank_slice_mean"])
def test_clients_that_share_slices_share_one_scaling_too(lab: Any, name: str) -> None:
    """The start of a smaller client is the first rows of A and columns of B, bit for bit."""
    world = lab.world(lab.method(name), sizes=SIZES, num_blocks=BLOCKS)
    _, clients = world.round()
    for client in clients:
        rank = 3 if client in "ac" else 1
        for target in world.setup.layout.targets:
            assert world.client_scaling(client, target) == world.setup.scaling[target]
            a, b = (world.before.tensors[f"{target}.lora_{x}"] for x in "AB")
            start = world.trainer.starts[client]
            assert start[f"{target}.lora_A"].tobytes() == a[:rank].tobytes()
            assert start[f"{target}.lora_B"].tobytes() == np.ascontiguousarray(b[:, :rank]).tobytes()


def tails(world: Any, client: str, tensors: dict[str, np.ndarray], kept: int) -> float:
    """Σ over targets of ‖B[:, m:]‖·‖A[m:, :]‖."""
    pairs = [(tensors[f"{t}.lora_A"], tensors[f"{t}.lora_B"]) for t in world.setup.layout.targets]
    return float(sum(np.linalg.norm(b[:, kept:]) * np.linalg.norm(a[kept:]) for a, b in pairs))


def test_hetloras_rank_shrinks_for_good_once_a_reply_was_accepted(lab: Any) -> None:
    """M = ⌊0.6·r⌋ where the tail shrank. A lost reply leaves the rank; b's first replies are damaged on the way."""
    method = lab.method("hetlora", gamma=0.6)
    world = lab.world(method, sizes=SIZES, rank=5, num_blocks=2, width=6)
    rank = {c: 5 if c in "ac" else 2 for c in SIZES}
    shrunk, lost, grew = set(), 0, 0
    for server_round in range(4, 12):
        world.line.damage = {"a", "b"} if server_round < 6 else set()
        world.trainer.noise = 1.0 if server_round == 7 else 0.02
        _, clients = world.round()
        for client, line in clients.items():
            assert line["planned"]["0"] == rank[client]
            kept = int(0.6 * rank[client])
            local, start = world.trainer.local[client], world.trainer.starts[client]
            shrinks = (
                kept >= 1
                and rank[client] > 1
                and 0 < tails(world, client, start, kept) > tails(world, client, local, kept)
            )
            sent = world.sent_rank(client, 0)
            assert sent == (kept if shrinks else rank[client])
            if line["status"] == "ok":
                assert line["numbers"]["kept_rank"] == sent
                rank[client] = sent
                shrunk |= {client} if shrinks else set()
            else:
                lost += shrinks
            grew += kept >= 1 and not shrinks
        assert all(rank[c] == r for c, r in world.state.planner["kept"].items())
    assert len(shrunk) == 4
    assert lost > 0
    assert grew > 0
    assert min(rank.values()) == 1


def test_hetlora_weighs_by_norms_and_pads_with_zeros(lab: Any) -> None:
    """A[h] = Σ_{k: r_k > h} ω_k·A_k[h], ω_k = ‖B_k·A_k‖/Σ ‖B_j·A_j‖: slices that few have shrink."""
    world = lab.world(lab.method("hetlora"), sizes=SIZES, num_blocks=BLOCKS)
    world.round()
    for target in world.setup.layout.targets:
        pairs = {c: world.pair(c, target, world.trainer.local[c]) for c in SIZES}
        norms = {c: np.linalg.norm(b @ a) for c, (a, b) in pairs.items()}
        a = sum(norms[c] * np.pad(x, ((0, 3 - len(x)), (0, 0))) for c, (x, _) in pairs.items()) / sum(norms.values())
        covered = max(len(x) for x, _ in pairs.values())
        np.testing.assert_allclose(world.state.tensors[f"{target}.lora_A"][:covered], a[:covered], atol=2e-6)


def test_the_decaying_objective_is_the_methods_own(lab: Any) -> None:
    method = lab.method("hetlora", gamma=0.5, decay=0.25, min_rank=2)
    assert method.objective == RankDecay(0.5, 0.25, 2)
    assert method.optimizer == NoOptimizer()
