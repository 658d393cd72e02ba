"""What a planner believes about a client's seconds, and how it learns from rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fedstrata.core.tensors import HEAD, Stratum
from fedstrata.device.cost import count_step_flop
from fedstrata.device.fleet import Client, Fleet
from fedstrata.device.plan_cost import PlanCost
from fedstrata.plan.checks import name_problems

Ranks = Mapping[Stratum, int]


@dataclass(frozen=True)
class ClientTimes:
    """The four numbers of one client's round.

    Attributes:
        forward_s: t̂, forward pass of one local step.
        backward_s: μ, backward pass of one step per trained block.
        upload_s: β, upload of one unit of rank of one block.
        fixed_s: c, whatever does not depend on the depth: download, the head's upload, and the like.
    """

    forward_s: float
    backward_s: float
    upload_s: float
    fixed_s: float = 0.0

    def round_s(self, steps: int, depth: int, rank_sum: int) -> float:
        """Seconds of one round.

            t(k) = c + τ·(t̂ + k·μ) + β·Σ_{l ≥ L−k} r_l

        Args:
            steps: τ.
            depth: k.
            rank_sum: The ranks of the k blocks together.

        Example:
            >>> ClientTimes(1.0, 0.2, 0.002).round_s(1, 1, 13)
            1.226
        """
        return self.fixed_s + steps * (self.forward_s + depth * self.backward_s) + self.upload_s * rank_sum

    def to_json(self) -> dict[str, float]:
        """For the planner's state."""
        return asdict(self)


def time_problems(
    given: Mapping[str, Mapping[str, float] | None], fixed_s: Mapping[str, float] | None, fleet: Fleet
) -> list[str]:
    """What is wrong with given seconds per device kind.

    Args:
        given: The tables that come together or not at all, by option name.
        fixed_s: A further table, which needs them.
        fleet: Whose kinds must be in each table.
    """
    missing = [name for name, table in given.items() if table is None]
    problems = []
    if missing and len(missing) < len(given):
        problems.append(f"{', '.join(missing)} missing: {', '.join(given)} are given together")
    if fixed_s is not None and missing:
        problems.append(f"fixed_s is given without {', '.join(missing)}")
    for name, table in {**given, "fixed_s": fixed_s}.items():
        if table is not None:
            problems += name_problems(name, table, fleet)
            wrong = {kind: s for kind, s in table.items() if not (math.isfinite(s) and s >= 0)}
            problems += [f'{name}["{kind}"] = {value}: seconds are 0 or more' for kind, value in wrong.items()]
    return problems


def times_from_profile(client: Client, cost: PlanCost, ranks: Ranks, *, head: bool) -> ClientTimes:
    """First estimates from the device's profile: the cost of training every block, shared out evenly.

    t̂ is its forward pass; μ its backward pass divided by L; β the mean upload of a unit of rank; c the download of all
    adapters and the upload of the head. With clients that do not receive what lies below their depth c is an upper
    bound.

    Args:
        client: Who.
        cost: The workload.
        ranks: Ranks of all blocks on the server.
        head: Whether the head is trained.
    """
    everything: dict[Stratum, int] = {**ranks, **({HEAD: 1} if head else {})}
    flop = count_step_flop(cost.shape, everything, cost.tokens_per_step, adapter=cost.adapter)
    device = client.device
    unit_bytes = cost.num_values(ranks) / max(sum(ranks.values()), 1) * cost.up_bytes_per_value
    head_up = cost.upload_bytes({HEAD: 1}) if head else 0
    return ClientTimes(
        forward_s=flop.forward / device.flop_per_s,
        backward_s=flop.backward / device.flop_per_s / max(len(ranks), 1),
        upload_s=unit_bytes / device.up_bytes_per_s,
        fixed_s=cost.download_bytes(everything) / device.down_bytes_per_s + head_up / device.up_bytes_per_s,
    )


def head_in_units_of_rank(cost: PlanCost, ranks: Ranks, *, head: bool) -> float:
    """How many units of rank of one block have as many numbers as the head: its share of an upload."""
    unit = cost.num_values(ranks) / max(sum(ranks.values()), 1)
    return cost.num_values({HEAD: 1}) / unit if head and unit else 0.0


def learn_times(
    old: ClientTimes, client_record: Mapping[str, Any], *, smoothing: float, head_units: float
) -> ClientTimes:
    """Moves the estimates towards what a round took: new = (1 − a)·old + a·observed.

    Observed are, with τ steps over k blocks of ranks r_l: t̂ = forward/τ, μ = backward/(τ·k),
    β = upload/(Σ r_l + h), c = download + β·h. The seconds are those of the record's `times` (the run's chosen
    clock), else its `predicted` ones.

    Args:
        old: Before.
        client_record: Line of `clients.jsonl`: `num_steps`, `planned`, and `forward_s`, `backward_s`, `upload_s`,
            `download_s` under `times` or `predicted`.
        smoothing: a, the weight of the newest.
        head_units: h of `head_in_units_of_rank`.

    Returns:
        The new estimates; unchanged where the client failed or a number is missing.
    """
    seconds = client_record.get("times") or client_record.get("predicted") or {}
    parts = [float(seconds.get(key, math.nan)) for key in ("forward_s", "backward_s", "upload_s", "download_s")]
    steps = client_record.get("num_steps", 0)
    if client_record.get("status") != "ok" or steps < 1 or not all(math.isfinite(x) and x >= 0 for x in parts):
        return old
    forward, backward, upload, download = parts
    ranks = [r for s, r in client_record.get("planned", {}).items() if str(s).isdecimal() and r > 0]
    units = sum(ranks) + head_units

    def mixed(before: float, newest: float) -> float:
        return (1 - smoothing) * before + smoothing * newest

    per_unit = upload / units if units else old.upload_s
    return ClientTimes(
        forward_s=mixed(old.forward_s, forward / steps),
        backward_s=mixed(old.backward_s, backward / steps / len(ranks)) if ranks else old.backward_s,
        upload_s=mixed(old.upload_s, per_unit),
        fixed_s=mixed(old.fixed_s, download + per_unit * head_units),
    )
