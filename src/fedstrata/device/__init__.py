"""The world: what each device can do, and what a plan costs it."""

from fedstrata.device.cost import (
    RoundTime,
    StepFlop,
    count_flop_per_step,
    count_step_flop,
    count_values,
    predict_client_seconds,
)
from fedstrata.device.fleet import Client, DeviceProfile, Fleet
from fedstrata.device.plan_cost import PlanCost, PlanNeeds
from fedstrata.device.profiles import build_fleet, device_profile, profile_names

__all__ = [
    "Client",
    "DeviceProfile",
    "Fleet",
    "PlanCost",
    "PlanNeeds",
    "RoundTime",
    "StepFlop",
    "build_fleet",
    "count_flop_per_step",
    "count_step_flop",
    "count_values",
    "device_profile",
    "predict_client_seconds",
    "profile_names",
]
