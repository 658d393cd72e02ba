"""Every method is the composition that it is published as: parts, defaults and arms, written down a second time."""

from __future__ import annotations

from typing import Any

import pytest

from fedstrata.method import METHODS, PairRule

PLAIN, BY_N = {"id": "task_loss"}, {"weight_by": "num_examples"}
FLOAT, ALL = {"id": "float32"}, {"id": "accept_all"}
RANKS, EVERYTHING = {"id": "client_ranks", "ranks": None}, {"id": "all"}
HOLDERS = {"id": "holders_mean", "moments": False, **BY_N}
DRAWN = {"id": "random_k", "strata": None}
LORA, ANY = {"lora"}, {"lora", "full"}
ONLY_B = PairRule(trained=(("lora_B",),))


def parts(plan: Any = EVERYTHING, aggregate: Any = HOLDERS, **others: Any) -> dict[str, Any]:
    usual = {
        "objective": PLAIN, "codec": FLOAT, "select": ALL, "optimize": {"id": "none"}, "send": "delta",
        "topology": "federated", "scaling": "shared", "head": None, "skips_blocks": False, "pairs": PairRule(),
        "adapters": LORA,
    }  # fmt: skip
    return usual | {"plan": plan, "aggregate": aggregate} | others


def mean(part: str, **options: Any) -> dict[str, Any]:
    return {"id": part, **BY_N, **options}


def robust(part: str, **options: Any) -> dict[str, Any]:
    return {"id": part, "fallback": "mean", **options}


SCORING = {
    "importance": "fisher", "source": "client_heldout", "fisher_on": "factors", "examples": None,
    "mapped": "proportional", "control": "none", "refresh": None, "strata": None,
}  # fmt: skip
TOP = {"id": "top_blocks", "portion": 0.5, "score": "consistency", "score_on": "factors", "update_singletons": True}
LEGEND = {
    "id": "depth_and_rank", "rank_budget": None, "rank_step": None, "rank_start": None, "min_depth": 1,
    "max_wait": 0.2, "target_s": None, "infeasible": "error", "frozen": "present", "arm": "legend", "forward_s": None,
    "backward_s": None, "upload_s": None, "fixed_s": None, "smoothing": 0.3, "rank_limit": None,
}  # fmt: skip
WINDOWS = {"id": "windows", "window": 5, "start_depth": 1, "start_width": 8, "step": 8, "max_width": 64}

COMPOSED: dict[str, dict[str, Any]] = {
    "fedtlu": parts(select=TOP, adapters=ANY),
    "fed_hello": parts({"id": "hello", "pattern": "bottleneck", "warm_rounds": None, **SCORING}, held_out=0.1),
    "gradualdiff": parts(
        aggregate={"id": "factor_mean", "weight_by": "uniform"}, codec={"id": "nf4", "block": 64}
    ),
    "legend": parts(LEGEND, scaling=2.0),
    "fedavg": parts(adapters=ANY),
    "fedprox": parts(objective={"id": "proximal", "mu": 0.01}, adapters=ANY),
    "fedit": parts(aggregate=mean("factor_mean")),
    "hetlora": parts(
        RANKS, mean("norm_weighted_pad"),
        objective={"id": "rank_decay", "gamma": 0.99, "weight": 1e-3, "min_rank": 1},
    ),
    "flexlora": parts(RANKS, mean("product_mean"), scaling="by_rank"),
    "flora": parts(
        RANKS, mean("stack", recompress=True), scaling="by_rank",
        pairs=PairRule(drawn=("lora_A", "lora_B"), redrawn=True),
    ),
    "fedra_freeze": parts(DRAWN),
    "fedra_skip": parts(DRAWN, skips_blocks=True),
    "fedadapter": parts(WINDOWS, mean("rank_slice_mean"), adapters={"bottleneck"}),
    "exclusive": parts({"id": "exclusive", "kinds": None}, mean("factor_mean")),
    "local_only": parts(topology="alone", adapters=ANY),
    "central": parts(topology="pooled", adapters=ANY),
    "ffa_lora": parts(
        aggregate=mean("factor_mean"), pairs=PairRule(trained=(("lora_B",),), drawn=("lora_A",))
    ),
    "fedex_lora": parts(aggregate=mean("fedex")),
    "lora_fair": parts(aggregate=mean("lora_fair", ridge=0.01)),
    "fedsvd": parts(aggregate=mean("svd_mean"), pairs=PairRule(trained=(("lora_B",),), start="orthonormal")),
    "rolora": parts(aggregate=mean("factor_mean"), pairs=PairRule(trained=(("lora_B",), ("lora_A",)))),
    "fedsa_lora": parts(aggregate=mean("factor_mean"), pairs=PairRule(local=("lora_B",)), head="local"),
    "rank_slice_mean": parts(RANKS, mean("rank_slice_mean")),
    "raflora": parts(RANKS, mean("raflora"), scaling="by_rank"),
    "fslora": parts(RANKS, mean("sketch_mean"), scaling="by_sketch", pairs=PairRule(slices="drawn")),
    "fed_sb": parts(
        {"id": "after_gradient", "examples": 64}, mean("factor_mean"), pairs=PairRule(trained=(("lora_R",),)),
        adapters={"square"},
    ),
    "median": parts(aggregate=robust("median"), adapters=ANY),
    "trimmed_mean": parts(aggregate=robust("trimmed_mean", beta=0.2), adapters=ANY),
    "krum": parts(aggregate=robust("krum", f=1, multi=1), adapters=ANY),
    "clipped_mean": parts(aggregate=robust("clipped_mean"), adapters=ANY),
    "last_k": parts({"id": "last_k", "k": 1}, adapters=ANY),
    "suffix_by_device": parts({"id": "suffix_by_device", "depth": None}, adapters=ANY),
}  # fmt: skip


def composed(name: str, **options: Any) -> dict[str, Any]:
    method = METHODS.build(name, options)
    return method.to_config() | {"pairs": method.pairs, "adapters": set(method.adapters)}


def test_every_method_is_written_down_here() -> None:
    assert set(COMPOSED) == set(METHODS.entries)


@pytest.mark.parametrize("name", sorted(COMPOSED))
def test_a_method_is_composed_as_published(name: str) -> None:
    assert composed(name) == COMPOSED[name]


PATTERN = {"strata": None, "pattern": "bottleneck"}
FISHER = {"id": "fisher", "warm_rounds": 0, **SCORING}
HELLO = COMPOSED["fed_hello"]["plan"]
MOMENTS = HOLDERS | {"moments": True}


@pytest.mark.parametrize(
    ("name", "options", "changed"),
    [
        ("fed_hello", {"arm": "pattern"}, {"plan": {"id": "pattern", **PATTERN}}),
        ("fed_hello", {"arm": "random_pattern"}, {"plan": {"id": "random_pattern", **PATTERN}}),
        ("fed_hello", {"arm": "uniform"}, {"plan": DRAWN}),
        ("fed_hello", {"arm": "importance"}, {"plan": FISHER}),
        ("fed_hello", {"control": "permuted"}, {"plan": HELLO | {"control": "permuted"}}),
        ("fed_hello", {"control": "inverted"}, {"plan": HELLO | {"control": "inverted"}}),
        ("fed_hello", {"importance": "updates"}, {"plan": HELLO | {"importance": "updates"}, "aggregate": MOMENTS}),
        (
            "fed_hello",
            {"importance": "zico_clients"},
            {"plan": HELLO | {"importance": "zico_clients"}, "aggregate": MOMENTS},
        ),
        ("fedtlu", {"mu": 0.1}, {"objective": {"id": "proximal", "mu": 0.1}}),
        ("fedtlu", {"score": "magnitude"}, {"select": TOP | {"score": "magnitude"}}),
        ("fedtlu", {"score": "zico_clients"}, {"select": TOP | {"score": "zico_clients"}, "aggregate": MOMENTS}),
        ("fedtlu", {"score_on": "product"}, {"select": TOP | {"score_on": "product"}}),
        ("fedtlu", {"score": "all"}, {"select": ALL}),
        (
            "fedtlu",
            {"score": "random", "portion": 0.25},
            {"select": {"id": "random_blocks", "portion": 0.25, "update_singletons": True}},
        ),
        (
            "fedtlu",
            {"score": "last", "update_singletons": False},
            {"select": {"id": "last_blocks", "portion": 0.5, "update_singletons": False}},
        ),
        ("gradualdiff", {"send": "weights"}, {"send": "weights"}),
        ("gradualdiff", {"bits": 32}, {"codec": FLOAT}),
        ("gradualdiff", {"bits": 8, "block": 32}, {"codec": {"id": "int8", "block": 32, "rounding": "nearest"}}),
        ("gradualdiff", {"quantile": False}, {"codec": {"id": "int4", "block": 64, "rounding": "nearest"}}),
        (
            "gradualdiff",
            {"error_feedback": True},
            {"codec": {"id": "error_feedback", "inner": {"id": "nf4", "block": 64}}},
        ),
        *(
            ("legend", {"arm": arm}, {"plan": LEGEND | {"arm": arm}})
            for arm in ("uniform_rank", "reversed_rank", "uniform_depth", "random_strata")
        ),
        ("legend", {"frozen": "absent", "max_wait": 0.1}, {"plan": LEGEND | {"frozen": "absent", "max_wait": 0.1}}),
        ("legend", {"scaling": "alpha_over_r"}, {"scaling": "shared"}),
        ("fed_sb", {"init": "orthonormal"}, {"plan": EVERYTHING}),
    ],
)
def test_arms_and_controls_change_what_they_should_and_nothing_else(
    name: str, options: dict[str, Any], changed: dict[str, Any]
) -> None:
    assert composed(name, **options) == COMPOSED[name] | changed


@pytest.mark.parametrize("name", sorted(COMPOSED))
def test_means_can_be_unweighted_everywhere(name: str) -> None:
    """Robust means are by themselves, and nothing is merged where clients are alone or pooled."""
    if name in ("median", "trimmed_mean", "krum", "clipped_mean", "local_only", "central"):
        assert "weight_by" not in composed(name)["aggregate"] or name in ("local_only", "central")
        return
    assert composed(name, weight_by="uniform")["aggregate"]["weight_by"] == "uniform"
