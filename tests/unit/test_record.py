"""Files that survive a kill or a full disk, the checkpoint, and what clients keep."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstrata.errors import ClientError, RunFolderError
from fedstrata.record.checkpoint import ServerState, load_checkpoint, save_checkpoint
from fedstrata.record.clients import FolderStates, MemoryStates
from fedstrata.record.files import (
    append_lines,
    atomic_write,
    keep_lines,
    read_json,
    read_lines,
    remove_leftovers,
    replace_folder,
    write_json,
)


class KillError(BaseException):
    """Stands for a process that ends here."""


def full(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def killed(*args: Any, **kwargs: Any) -> Any:
    raise KillError


@pytest.mark.parametrize("place", [(os, "fsync"), (Path, "replace"), (Path, "open")])
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any) -> None:
    path = tmp_path / "below" / "file"
    atomic_write(path, b"old")
    monkeypatch.setattr(*place, full)
    with pytest.raises(RunFolderError, match="No space left on device") as caught:
        atomic_write(path, b"new")
    monkeypatch.undo()
    assert "--out" in (caught.value.do or "")
    assert path.read_bytes() == b"old"
    remove_leftovers(tmp_path)
    assert [p.name for p in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("place", [(os, "fsync"), (Path, "replace")])
def test_a_kill_leaves_the_old_file_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"old")
    monkeypatch.setattr(*place, killed)
    with pytest.raises(KillError):
        atomic_write(path, b"new, and longer")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    atomic_write(path, b"new")
    assert path.read_bytes() == b"new"


def folder_with(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "inside").write_text(text)
    return path


@pytest.mark.parametrize("call", range(1, 6))
def test_a_folder_that_is_replaced_is_the_old_one_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    target = folder_with(tmp_path / "best", "old")
    new = folder_with(tmp_path / "best.new.partial", "new")
    counted = [0]

    def at(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def dies(*args: Any, **kwargs: Any) -> Any:
            counted[0] += 1
            if counted[0] == call:
                raise KillError
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, dies)

    at(Path, "replace")
    at(os, "fsync")
    at(shutil, "rmtree")
    with contextlib.suppress(KillError):
        replace_folder(new, target)
    monkeypatch.undo()
    remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["best"]
    assert (target / "inside").read_text() == ("old" if call < 3 else "new")
    assert counted[0] == min(call, 4)


def test_leftovers_inside_leftovers_go_with_them(tmp_path: Path) -> None:
    folder_with(tmp_path / "best.new.partial", "half")
    (tmp_path / "best.new.partial" / "file.partial").write_text("half")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file.partial").write_text("half")
    (tmp_path / "kept" / "file").write_text("whole")
    remove_leftovers(tmp_path)
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")) == ["kept", "kept/file"]


def test_lines_beyond_the_checkpoint_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    append_lines(path, [{"n": 1}, {"n": 2, "text": "ä"}])
    append_lines(path, [{"n": 3}])
    with path.open("ab") as file:
        file.write(b'{"n": 4')
    assert [r["n"] for r in read_lines(path)] == [1, 2, 3]
    keep_lines(path, 2)
    assert path.read_bytes() == '{"n":1}\n{"n":2,"text":"ä"}\n'.encode()
    keep_lines(path, 2)
    keep_lines(path, 0)
    assert path.read_bytes() == b""
    keep_lines(tmp_path / "none.jsonl", 0)
    assert (tmp_path / "none.jsonl").read_bytes() == b""


def test_a_file_with_fewer_lines_than_rounds_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":2')
    with pytest.raises(RunFolderError, match=r"damaged[\s\S]*at least 2 lines[\s\S]*got: 1"):
        keep_lines(path, 2)
    assert path.read_bytes() == b'{"n":1}\n{"n":2'


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "rounds.jsonl").write_bytes(b'{"n":1}\nnot json\n')
    with pytest.raises(RunFolderError, match=r"rounds\.jsonl cannot be read"):
        read_lines(tmp_path / "rounds.jsonl")


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff"])
def test_a_record_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(RunFolderError, match=r"run\.json"):
        read_json(tmp_path / "run.json")
    with pytest.raises(RunFolderError, match="missing"):
        read_json(tmp_path / "nothing.json")


def test_nan_is_never_written(tmp_path: Path) -> None:
    for write in (lambda v: write_json(tmp_path / "a.json", v), lambda v: append_lines(tmp_path / "a.jsonl", [v])):
        with pytest.raises(ValueError, match="JSON"):
            write({"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


def state() -> ServerState:
    rng = np.random.default_rng(0)
    return ServerState(
        {"b": rng.standard_normal((3, 2)).astype(np.float32), "a": np.array([-0.0, 1e-40], np.float32)},
        4,
        {"0": 4, "head": 3},
        planner={"x": [1, 2.5]},
        accepted={"site b": 4, "site a": 2},
        acknowledged={"site a": {"0": [1, 8]}},
        validation=({"server_round": 4, "accuracy": 0.1 + 0.2},),
        totals={"uplink": {"total": 2**53}},
        best={"server_round": 4, "value": 0.3},
    )


def test_a_checkpoint_holds_everything_to_the_bit(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "s", state(), "h" * 64)
    again, found = load_checkpoint(tmp_path / "s")
    assert found == "h" * 64
    assert {n: t.tobytes() for n, t in again.tensors.items()} == {n: t.tobytes() for n, t in state().tensors.items()}
    for name in ("server_round", "versions", "planner", "accepted", "acknowledged", "validation", "totals", "best"):
        assert getattr(again, name) == getattr(state(), name)


def test_equal_states_make_equal_bytes_whatever_their_order(tmp_path: Path) -> None:
    one = state()
    save_checkpoint(tmp_path / "one", one, "h")
    turned = ServerState(
        **{
            k: dict(reversed(v.items())) if isinstance(v, dict) else v
            for k, v in ((k, getattr(one, k)) for k in one.__dataclass_fields__)
        }
    )
    save_checkpoint(tmp_path / "two", turned, "h")
    save_checkpoint(tmp_path / "three", load_checkpoint(tmp_path / "one")[0], "h")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes() == (tmp_path / "three").read_bytes()


def damaged(data: bytes) -> list[bytes]:
    swaps = [(b'\\"spec_hash\\"', b'\\"spec_hush\\"'), (b'\\"state\\"', b'\\"stote\\"'), (b"versions", b"versiuns")]
    return [b"", data[:7], data[:100], data[:-1], data + b"x", *(data.replace(a, b) for a, b in swaps)]


def test_a_damaged_checkpoint_is_refused_in_plain_words(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "s", state(), "h" * 64)
    for data in damaged((tmp_path / "s").read_bytes()):
        (tmp_path / "t").write_bytes(data)
        with pytest.raises(RunFolderError, match=r"cannot be read[\s\S]*--fresh"):
            load_checkpoint(tmp_path / "t")
    with pytest.raises(RunFolderError):
        load_checkpoint(tmp_path / "absent")


@pytest.fixture(params=["folder", "memory"])
def states(request: pytest.FixtureRequest, tmp_path: Path) -> FolderStates | MemoryStates:
    return FolderStates(tmp_path / "clients") if request.param == "folder" else MemoryStates()


def test_the_state_of_a_round_counts_once_its_reply_was_accepted(states: FolderStates | MemoryStates) -> None:
    states.write("a", 0, 1, b"one")
    assert states.read("a", 0) == b""  # the reply of round 1 was lost: as if it had never been
    states.write("a", 0, 2, b"two")
    assert states.read("a", 2) == b"two"
    states.write("a", 2, 5, b"five")
    assert states.read("a", 2) == b"two"
    assert states.read("a", 5) == b"five"
    states.write("a", 5, 6, b"six")
    states.write("a", 5, 6, b"six again")
    assert (states.read("a", 5), states.read("a", 6)) == (b"five", b"six again")
    assert states.read("b", 0) == b""


def test_an_empty_state_after_a_full_one_counts_too(states: FolderStates | MemoryStates) -> None:
    states.write("a", 0, 1, b"one")
    states.write("a", 1, 2, b"")
    assert (states.read("a", 1), states.read("a", 2)) == (b"one", b"")
    states.write("a", 2, 3, b"")
    assert states.read("a", 3) == b""


def test_a_first_state_whose_reply_was_lost_leaves_the_empty_one_in_force(states: FolderStates | MemoryStates) -> None:
    states.write("a", 0, 1, b"")
    states.write("a", 1, 4, b"four")
    assert states.read("a", 1) == b""
    states.write("a", 1, 5, b"five")
    assert (states.read("a", 1), states.read("a", 5)) == (b"", b"five")


def test_states_of_other_rounds_are_dropped(tmp_path: Path) -> None:
    states = FolderStates(tmp_path / "clients")
    for accepted, server_round in ((0, 1), (1, 2), (1, 3), (3, 9)):
        states.write("../site/ä", accepted, server_round, b"x")
    (folder,) = (tmp_path / "clients").iterdir()
    assert sorted(p.name for p in folder.iterdir()) == ["3.state", "9.state"]
    with pytest.raises(ClientError, match=r"no state of round 7[\s\S]*3\.state, 9\.state"):
        states.read("../site/ä", 7)


def test_a_client_without_state_leaves_no_file(tmp_path: Path) -> None:
    states = FolderStates(tmp_path / "clients")
    states.write("a", 0, 1, b"")
    states.write("a", 1, 2, b"")
    assert states.read("a", 2) == b""
    assert not (tmp_path / "clients").exists()


def test_a_kill_while_a_state_is_kept_loses_no_accepted_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[tuple[Any, str]] = [(os, "fsync"), (Path, "replace"), (Path, "unlink")]
    for owner, name in places:
        states = FolderStates(tmp_path / name)
        states.write("a", 0, 1, b"one")
        states.write("a", 1, 2, b"two")
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, killed)
            with pytest.raises(KillError):
                states.write("a", 2, 3, b"three")
        remove_leftovers(tmp_path)
        assert states.read("a", 2) == b"two"
        states.write("a", 2, 3, b"three")
        assert (states.read("a", 2), states.read("a", 3)) == (b"two", b"three")
