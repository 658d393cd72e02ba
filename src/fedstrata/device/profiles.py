"""Device profiles by name, and fleets made of them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from fedstrata.device.fleet import Client, DeviceProfile, Fleet
from fedstrata.errors import PlanError, did_you_mean


@cache
def _profiles() -> dict[str, DeviceProfile]:
    text = files("fedstrata.device").joinpath("profiles.toml").read_text("utf-8")
    return {name: DeviceProfile(name=name, **entry) for name, entry in tomllib.loads(text).items()}


def profile_names() -> tuple[str, ...]:
    """The device kinds that are known, in the order of the table."""
    return tuple(_profiles())


def device_profile(name: str) -> DeviceProfile:
    """The profile of a device kind.

    Raises:
        PlanError: If there is none.

    Example:
        >>> device_profile("jetson-tx2").memory_bytes
        6000000000
    """
    if name not in _profiles():
        raise PlanError(f'Unknown device kind "{name}"', do=did_you_mean(name, _profiles()))
    return _profiles()[name]


def build_fleet(devices: Mapping[str, int], num_examples: Mapping[str, int]) -> Fleet:
    """Gives device kinds to clients: ascending client ids take the kinds in the order of the table.

    Args:
        devices: How many clients have each kind.
        num_examples: Distinct training examples per client.

    Raises:
        PlanError: With every mistake at once: unknown kinds, negative numbers, another number of devices than
            clients.

    Example:
        >>> fleet = build_fleet({"jetson-nx": 1, "laptop-8gb": 2}, {"c2": 5, "c0": 9, "c1": 7})
        >>> [(c.id, c.device.name, c.num_examples) for c in fleet.clients]
        [('c0', 'jetson-nx', 9), ('c1', 'laptop-8gb', 7), ('c2', 'laptop-8gb', 5)]
    """
    problems = [
        f'unknown device kind "{kind}": {did_you_mean(kind, _profiles())}'
        for kind in devices
        if kind not in _profiles()
    ]
    problems += [
        f'"{kind}" = {count}: a number of clients is 0 or more' for kind, count in devices.items() if count < 0
    ]
    if sum(devices.values()) != len(num_examples):
        problems.append(f"{sum(devices.values())} devices for {len(num_examples)} clients")
    if problems:
        raise PlanError(
            "\n".join(["The fleet cannot be built", *(f"  - {p}" for p in problems)]), where="simulation.devices"
        )
    kinds = [kind for kind, count in devices.items() for _ in range(count)]
    members = zip(sorted(num_examples), kinds, strict=True)
    return Fleet(tuple(Client(client, device_profile(kind), num_examples[client]) for client, kind in members))
