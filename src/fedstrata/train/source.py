"""Where a model comes from: a package, a folder, the hub, or a configuration without weights."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transformers.utils import cached_file

from fedstrata.data.assets import find_asset, list_assets
from fedstrata.errors import AssetError, ModelError, did_you_mean

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
CHUNK_BYTES = 1 << 20
RELATIVE = "check the path; a relative one starts at the folder of the experiment file"


@dataclass(frozen=True)
class Source:
    """A resolved `model.source`.

    Attributes:
        spec: As the user wrote it; adapters name their base by it.
        kind: `folder` (packages too), `hub` or `config`.
        location: What transformers loads: a path, or a hub id.
        revision: Of a hub model.
    """

    spec: str
    kind: Literal["folder", "hub", "config"]
    location: str
    revision: str | None = None

    @property
    def folder(self) -> Path:
        """The folder that holds the model's files; for the hub, its local copy after loading."""
        if self.kind == "hub":
            return Path(str(cached_file(self.location, "config.json", revision=self.revision))).parent
        path = Path(self.location)
        return path.parent if self.kind == "config" else path


def resolve_source(spec: str, base_dir: Path, revision: str | None = None) -> Source:
    """Finds a model.

    Args:
        spec: `package:NAME`, `config:FILE`, a folder, or a hub id.
        base_dir: Relative paths start here: the folder of the experiment file.
        revision: Branch, tag or commit of a hub model.

    Raises:
        AssetError: If the package, file or folder is missing.
        ModelError: If the text is none of the four.
    """
    if spec.startswith("package:"):
        name = spec.removeprefix("package:")
        models = [a.name for a in list_assets() if a.kind == "model"]
        if name not in models:
            raise AssetError(
                f'There is no packaged model "{name}"', where="model.source", do=did_you_mean(name, models)
            )
        return Source(spec, "folder", str(find_asset(name)))
    if spec.startswith("config:"):
        path = base_dir / Path(spec.removeprefix("config:")).expanduser()
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise AssetError(f"The model configuration {path} is missing", where="model.source", got=spec, do=RELATIVE)
        return Source(spec, "config", str(path))
    path = base_dir / Path(spec).expanduser()
    if path.is_file():
        raise ModelError(
            f"{path} is a file",
            where="model.source",
            expected="the folder of a saved transformers model",
            do=f'write "config:{spec}" for a configuration without weights',
        )
    if spec and path.is_dir():
        if not (path / "config.json").is_file():
            raise AssetError(
                f"{path} holds no config.json",
                where="model.source",
                do="name the folder of a saved transformers model (model.save_pretrained(folder))",
            )
        return Source(spec, "folder", str(path))
    if spec.startswith(("/", "./", "../", "~")):
        raise AssetError(f"The model folder {path} is missing", where="model.source", got=spec, do=RELATIVE)
    if not HUB_ID.fullmatch(spec):
        raise ModelError(
            f'"{spec}" names no model',
            where="model.source",
            expected='a hub id "org/name", a folder, "package:NAME" or "config:FILE"',
        )
    return Source(spec, "hub", spec, revision)


def identity_of(source: Source, seed: int) -> str:
    """SHA-256 over the files that make the base model: its config.json and its safetensors files, sorted by name.

    For a configuration without weights: over the file and the seed that draws them.
    """
    digest = hashlib.sha256()
    if source.kind == "config":
        digest.update(f"base_init:{seed}:".encode())
        files = [Path(source.location)]
    else:
        folder = source.folder
        files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    for path in files:
        digest.update(f"{path.name}:{path.stat().st_size}:".encode())
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
