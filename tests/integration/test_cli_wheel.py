"""The built wheel, as somebody without a clone gets it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w

from fedstrata import __version__

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.engine


def call(*words: str | Path, cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(w) for w in words], cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="building needs hatchling here")
def test_the_installed_wheel_plans_outside_the_clone(
    tmp_path: Path, make_world: Callable[[Path], None], tiny: Callable[..., dict[str, object]]
) -> None:
    call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", tmp_path / "dist", ROOT, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"fedstrata/examples/quickstart.toml", "fedstrata/device/profiles.toml"} <= names
    assert not [n for n in names if n.startswith(("tests", "benchmarks"))]
    site = tmp_path / "site"
    call(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", site, wheel, cwd=tmp_path)
    world = tmp_path / "world"
    world.mkdir()
    make_world(world)
    (world / "tiny.toml").write_text(tomli_w.dumps(tiny()))
    start = f"import sys; sys.path.insert(0, {str(site)!r}); from fedstrata.cli import main; main()"
    where = f"import sys; sys.path.insert(0, {str(site)!r}); import fedstrata; print(fedstrata.__file__)"
    assert Path(call(sys.executable, "-c", where, cwd=world).strip()).is_relative_to(site)
    assert call(sys.executable, "-c", start, "--version", cwd=world) == f"fedstrata {__version__}\n"
    assert len(json.loads(call(sys.executable, "-c", start, "methods", "--json", cwd=world))) >= 8
    plan = json.loads(call(sys.executable, "-c", start, "plan", "tiny.toml", "--json", cwd=world))
    assert [c["client"] for c in plan["clients"]] == sorted(c["client"] for c in plan["clients"])
    assert plan["num_blocks"] == 3
