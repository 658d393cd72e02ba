"""What all planners share: their mistakes in one error, and plans at one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fedstrata.core.shape import ModelShape
from fedstrata.core.tensors import Stratum
from fedstrata.core.wire import canonical_json
from fedstrata.device.fleet import Fleet
from fedstrata.discovery import place_of
from fedstrata.errors import PlanError, did_you_mean
from fedstrata.plan.base import PlanContext, RoundPlan, client_plan

_SHOWN = 5


def refuse(planner: str, problems: Iterable[str]) -> None:
    """Raises one `PlanError` with all mistakes, if there are any."""
    found = list(problems)
    if found:
        lines = [f'The plan "{planner}" cannot be carried out', *(f"  - {p}" for p in found)]
        raise PlanError("\n".join(lines), where="[method] or [plan]")


def count_problems(name: str, count: int, shape: ModelShape) -> list[str]:
    """What is wrong with a number of blocks; 0 trains the head only."""
    if count < 0:
        return [f"{name} = {count}: a number of blocks is 0 or more"]
    if count > shape.num_blocks:
        return [f"{name} = {count}, but the model has {shape.num_blocks} blocks"]
    return []


def name_problems(name: str, table: Mapping[str, Any], fleet: Fleet) -> list[str]:
    """What is wrong with the device kinds of a table: exactly those of the fleet are wanted."""
    problems = [
        f'{name} names the device kind "{kind}", which no client has: {did_you_mean(kind, fleet.kinds)}'
        for kind in table
        if kind not in fleet.kinds
    ]
    return problems + [
        f'{name} says nothing about the device kind "{kind}"' for kind in fleet.kinds if kind not in table
    ]


def kind_problems(name: str, table: Mapping[str, int], shape: ModelShape, fleet: Fleet) -> list[str]:
    """What is wrong with a table of device kinds and numbers of blocks."""
    problems = name_problems(name, table, fleet)
    for kind, count in table.items():
        problems += count_problems(f'{name}["{kind}"]', count, shape)
    return problems


def uniform_server_ranks(shape: ModelShape, max_rank: int) -> dict[Stratum, int]:
    """The same rank in every block.

    Raises:
        PlanError: If the rank is below 1, or above min(in, out) of a map that carries a pair.
    """
    if max_rank < 1:
        raise PlanError("The largest rank is too small", where="adapter.max_rank", expected="1 or more")
    ranks: dict[Stratum, int] = dict.fromkeys(shape.blocks, max_rank)
    check_map_sizes(shape, ranks)
    return ranks


def check_map_sizes(shape: ModelShape, ranks: Mapping[Stratum, int], *, where: str = "adapter.max_rank") -> None:
    """Refuses ranks that a map cannot have.

    Raises:
        PlanError: If a rank is above min(in, out) of a map that carries a pair; names the maps.
    """
    sizes = {t.name: (min(t.in_features, t.out_features), ranks.get(t.block, 0)) for t in shape.targets}
    small = {name: size for name, (size, rank) in sizes.items() if size < rank}
    if small:
        shown = ", ".join(f"{name} ({size})" for name, size in list(small.items())[:_SHOWN])
        more = f" and {len(small) - _SHOWN} more" if len(small) > _SHOWN else ""
        raise PlanError(
            f"Rank {max(sizes[name][1] for name in small)} is larger than some of the maps that it should adapt",
            where=where,
            expected=f"at most {min(small.values())}, the smaller side of the smallest map",
            got=shown + more,
            do=f"lower {where}, or leave these maps out of adapter.targets",
        )


def check_own_ranks(planner: str, ranks: Mapping[Stratum, int], max_rank: int, *, is_set: bool) -> None:
    """Compares a planner's own ranks with the run's largest rank.

    Args:
        planner: Its id.
        ranks: What `Planner.server_ranks` returned.
        max_rank: The run's largest rank.
        is_set: Whether the user set it; a default gives way to the planner's own ranks.

    Raises:
        PlanError: If a rank is no whole number, or above a `max_rank` that the user set.
    """
    is_table = isinstance(ranks, Mapping) and all(type(r) is int and r >= 0 for r in ranks.values())
    if not is_table:
        raise PlanError(
            f'The plan "{planner}" gives the server no ranks',
            where="server_ranks",
            expected="a whole number of 0 or more for every block",
            got=f"{ranks!r}"[:200],
        )
    largest = max(ranks.values(), default=0)
    if is_set and largest > max_rank:
        raise PlanError(
            f'The plan "{planner}" needs rank {largest}',
            where="adapter.max_rank",
            expected=f"{largest} or more",
            got=str(max_rank),
            do="raise adapter.max_rank, leave it out, or ask for smaller ranks",
        )


def check_state(part: Any, state: Any, step: str) -> dict[str, Any]:
    """The state that a planner or a selector handed back, if a checkpoint can hold it.

    Args:
        part: Whose it is.
        state: What it handed back.
        step: Which of its functions did.

    Raises:
        PlanError: If it is no table, or is not JSON: NaN, arrays and objects are not.
    """
    problem = "" if isinstance(state, Mapping) else f"{state!r}"
    try:
        canonical_json(state)
    except (TypeError, ValueError) as error:
        problem = str(error)
    if problem:
        raise PlanError(
            f'The state of "{part.id}" cannot be stored',
            where=f"{place_of(type(part))}, {step}",
            expected="a dict of numbers, texts, lists and dicts, without NaN",
            got=problem[:200],
        )
    return dict(state)


def trainable_blocks(context: PlanContext) -> list[int]:
    """Blocks that have something to train, from the input."""
    return sorted(s for s in context.strata if isinstance(s, int))


def enough_blocks(count: int, client: str, context: PlanContext) -> list[int]:
    """The trainable blocks, if there are at least `count`.

    Raises:
        PlanError: If there are fewer; the model may have blocks without an adapted map.
    """
    blocks = trainable_blocks(context)
    if count > len(blocks):
        raise PlanError(
            f"Client {client} should train {count} blocks, but only {len(blocks)} can be trained",
            got=f"blocks {blocks}",
            do="adapter.targets decides which blocks carry adapters",
        )
    return blocks


def plan_each(
    context: PlanContext, choose: Callable[[str], Sequence[Stratum]], why: Mapping[str, Any] | None = None
) -> RoundPlan:
    """One plan per client of the cohort, in ascending id, every block at the run's largest rank.

    Args:
        context: The world.
        choose: The strata that a client trains besides the head; must depend on nothing but the client.
        why: For the record.
    """
    plans = []
    for client in sorted(context.cohort):
        trained: dict[Stratum, int] = {s: context.max_rank if isinstance(s, int) else 1 for s in choose(client)}
        plans.append(client_plan(client, trained, context))
    return RoundPlan(context.server_round, tuple(plans), why or {})
