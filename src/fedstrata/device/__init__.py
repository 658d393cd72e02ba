"""The world: what each device can do, and what a plan costs it."""

from fedstrata.device.cost import RoundTime, count_flop_per_step, predict_client_seconds
from fedstrata.device.fleet import Client, DeviceProfile, Fleet
from fedstrata.device.profiles import build_fleet, device_profile, profile_names

__all__ = [
    "Client",
    "DeviceProfile",
    "Fleet",
    "RoundTime",
    "build_fleet",
    "count_flop_per_step",
    "device_profile",
    "predict_client_seconds",
    "profile_names",
]
