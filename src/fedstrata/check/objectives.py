"""The laws of objectives; gradients come from torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstrata.check.common import config_law, copied, same_bits, show_values
from fedstrata.check.law import Law, LeftOut, Trial
from fedstrata.objective.base import OBJECTIVES, FinishingObjective, Objective

_SHAPES = {"b.0.q.lora_A": (4, 5), "b.0.q.lora_B": (6, 4), "b.1.q.lora_A": (4, 5), "b.1.q.lora_B": (6, 4)}


@dataclass(frozen=True)
class _World:
    trained: dict[str, np.ndarray]
    start: dict[str, np.ndarray]


def _world(trial: Trial) -> _World:
    """One pair, later two and a head; B is zero in the first worlds, and nothing has moved yet in every fourth."""
    names = list(_SHAPES)[: 2 if trial.index < 4 else 4]
    shapes = {n: _SHAPES[n] for n in names} | ({"head.weight": (3, 6)} if trial.index % 2 else {})
    rng = trial.rng("tensors")
    start = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    if trial.index < 2:
        start |= {n: np.zeros_like(t) for n, t in start.items() if n.endswith("lora_B")}
    still = trial.index % 4 == 0
    trained = {n: t if still else (t + rng.standard_normal(t.shape) * 0.1).astype(np.float32) for n, t in start.items()}
    trial.note(f"start: {show_values(start, 3)}")
    trial.note("trained: as at the start" if still else f"trained: {show_values(trained, 3)}")
    return _World(copied(trained), start)


def _penalty(objective: Objective, world: _World) -> tuple[float, dict[str, np.ndarray]]:
    """The penalty and its gradients."""
    import torch

    trained = {n: torch.tensor(t, requires_grad=True) for n, t in world.trained.items()}
    start = {n: torch.tensor(t) for n, t in world.start.items()}
    value: Any = objective.penalty(trained, start)
    if not isinstance(value, torch.Tensor):
        return float(value), {}
    if value.requires_grad:
        value.backward()  # type: ignore[no-untyped-call]
    gradients = {n: t.grad.numpy() for n, t in trained.items() if t.grad is not None}
    return float(value.detach().reshape(()).item()), gradients


def _plain(objective: Objective, trial: Trial) -> None:
    if not objective.is_plain:
        raise LeftOut("it is not plain")
    value, gradients = _penalty(objective, _world(trial))
    trial.demand(value == 0, f"it says is_plain, and its penalty is {value!r}; trainers skip it")
    moving = [n for n, g in gradients.items() if g.any()]
    trial.demand(not moving, f"it says is_plain, and has a gradient for {', '.join(moving)}")


def _finite(objective: Objective, trial: Trial) -> None:
    world = _world(trial)
    value, gradients = _penalty(objective, world)
    trial.demand(math.isfinite(value), f"the penalty is {value}")
    for name, gradient in gradients.items():
        trial.demand(
            bool(np.isfinite(gradient).all()),
            f"the gradient of {name} is {show_values({name: gradient}, 4)}",
            "a norm √Σx² has no gradient at 0; torch's vector_norm takes 0 there",
        )


def _felt(objective: Objective, trial: Trial) -> None:
    """Only where something has moved and nothing is zero: a penalty may well be 0 elsewhere."""
    if objective.is_plain:
        raise LeftOut("it is plain")
    if trial.index < 2 or trial.index % 4 == 0:
        raise LeftOut("nothing moves in this world")
    value, gradients = _penalty(objective, _world(trial))
    trial.demand(
        value != 0 or any(g.any() for g in gradients.values()),
        "it says that it is not plain, and has neither a penalty nor a gradient where everything moved",
    )


def _pure(objective: Objective, trial: Trial) -> None:
    world = _world(trial)
    kept = (copied(world.trained), copied(world.start))
    first, second = _penalty(objective, world), _penalty(objective, world)
    trial.demand(first[0] == second[0], f"the same tensors gave the penalties {first[0]!r} and {second[0]!r}")
    if isinstance(objective, FinishingObjective):
        one, two = (objective.finish(world.trained, world.start) for _ in range(2))
        trial.demand(one == two, f"finish() gave {one} and {two}")
    same = same_bits(kept[0], world.trained) and same_bits(kept[1], world.start)
    trial.demand(same, "it changed the tensors that it was given")


def _finish(objective: Objective, trial: Trial) -> None:
    if not isinstance(objective, FinishingObjective):
        raise LeftOut("it decides nothing after training")
    world = _world(trial)
    found = objective.finish(world.trained, world.start)
    rank = _SHAPES["b.0.q.lora_A"][0]
    trial.demand(
        found.rank is None or (isinstance(found.rank, int) and 1 <= found.rank <= rank),
        f"finish() keeps rank {found.rank!r}; expected None or 1 to {rank}",
    )
    bad = {k: v for k, v in found.numbers.items() if not (isinstance(v, float) and math.isfinite(v))}
    trial.demand(not bad, f"numbers for the reply's header that are no finite floats: {bad}")


OBJECTIVE_LAWS: tuple[Law[Objective], ...] = (
    config_law(OBJECTIVES),
    Law("plain", "is_plain means a penalty of 0 without a gradient", _plain),
    Law("finite", "penalty and gradients are finite, also at the start and where B = 0", _finite),
    Law("felt", "who is not plain is felt where everything moved", _felt),
    Law("pure", "the same tensors give the same penalty, and are left alone", _pure),
    Law("finish", "after training a rank of 1 to r is kept, and numbers are finite", _finish),
)
