"""Laws that all parts share: a part is a frozen dataclass that its config rebuilds, and it may be used twice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedstrata.check.law import Law, Trial
from fedstrata.errors import ConfigError
from fedstrata.registry import Registry, check_part_class, to_config


def config_law(registry: Registry[Any]) -> Law[Any]:
    """The config of a part survives JSON and builds an equal part."""

    def check(part: Any, trial: Trial) -> None:
        try:
            check_part_class(type(part), registry.choice, type(part).__qualname__)
            config = json.loads(json.dumps(to_config(part), allow_nan=False))
            again = registry.build(config)
        except (ConfigError, TypeError, ValueError) as error:
            trial.broken(f"part: {part!r}", str(error))
        trial.demand(again == part, f"part:     {part!r}", f"config:   {config}", f"builds:   {again!r}")

    return Law("config", "its config survives JSON and builds an equal part, found by its id", check)


def is_json(value: Any) -> bool:
    """Whether a value is the same after a way through JSON, without NaN."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False


def copied(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Copies of all tensors."""
    return {name: np.array(tensor) for name, tensor in tensors.items()}


def same_bits(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> bool:
    """Whether two sets of tensors have the same names, types, shapes and bits."""
    return list(first) == list(second) and all(
        first[n].dtype == second[n].dtype
        and first[n].shape == second[n].shape
        and first[n].tobytes() == second[n].tobytes()
        for n in first
    )


def first_difference(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> str:
    """Where two sets of tensors differ first, in words."""
    if list(first) != list(second):
        return f"the tensors are {list(first)} and {list(second)}"
    for name, one in first.items():
        other = second[name]
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{name} is {one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
        unequal = np.argwhere(~((one == other) & (np.signbit(one) == np.signbit(other))))
        if len(unequal):
            at = tuple(int(i) for i in unequal[0])
            return f"{name}{list(at)} is {one[at]!r} and {other[at]!r}"
    return "no value differs"


def show_values(tensors: Mapping[str, np.ndarray], most: int = 8) -> str:
    """The first numbers of every tensor."""
    parts = []
    for name, tensor in tensors.items():
        flat = [f"{x:.7g}" for x in tensor.reshape(-1)[:most]]
        parts.append(f"{name} {list(tensor.shape)} = [{', '.join(flat)}{', …' if tensor.size > most else ''}]")
    return "; ".join(parts) or "nothing"
