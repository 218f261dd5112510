from __future__ import annotations

import stat
from pathlib import Path

import pytest

from gateway.state_directory import StateDirectory, StateUnusable


def created(path: Path) -> StateDirectory:
    state = StateDirectory(path)
    state.create()
    return state


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_one_service_may_hold_a_state(tmp_path: Path) -> None:
    created(tmp_path / "one").lock()
    with pytest.raises(StateUnusable, match="another cellgate"):
        created(tmp_path / "one").lock()
    created(tmp_path / "two").lock()


def test_the_generated_key_is_made_once_and_is_for_nobody_else(tmp_path: Path) -> None:
    keys, is_fresh = created(tmp_path / "state").generated_key()
    assert is_fresh
    [(key, tenant)] = keys.items()
    assert key.startswith("tml-")
    assert len(key) > 40
    assert tenant == "default"
    assert mode(tmp_path / "state/api_key") == 0o600
    assert mode(tmp_path / "state") == 0o700
    assert created(tmp_path / "state").generated_key() == (keys, False)
    assert created(tmp_path / "another").generated_key()[0] != keys


def test_a_key_file_that_was_spoilt_is_told_without_the_key(tmp_path: Path) -> None:
    state = created(tmp_path)
    (tmp_path / "api_key").write_text("sk-secret=alice\n")
    with pytest.raises(StateUnusable, match="api_key") as refused:
        state.generated_key()
    assert "sk-secret" not in str(refused.value)


def test_the_tenant_secret_stays_the_same(tmp_path: Path) -> None:
    secret = created(tmp_path).tenant_secret()
    assert len(secret) == 32
    assert created(tmp_path).tenant_secret() == secret
    assert mode(tmp_path / "tenant_secret") == 0o600


def test_the_socket_lies_under_the_state_unless_the_path_is_too_long_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert created(tmp_path / "s").socket_path() == tmp_path / "s/run/cell.sock"
    (tmp_path / "runtime").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    deep = tmp_path / ("d" * 100)
    short = created(deep).socket_path()
    assert short.parent.parent == tmp_path / "runtime"
    assert mode(short.parent) == 0o700
    assert created(deep).socket_path() == short, "a restarted gateway is found where the cell dials"


def test_a_short_directory_that_others_can_enter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runtime").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    state = created(tmp_path / ("d" * 100))
    directory = state.socket_path().parent
    directory.chmod(0o755)
    with pytest.raises(StateUnusable, match="alone"):
        state.socket_path()
    directory.rmdir()
    directory.symlink_to(tmp_path)
    with pytest.raises(StateUnusable, match="alone"):
        state.socket_path()


def test_a_state_that_cannot_be_made_is_told_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateUnusable, match="file"):
        created(tmp_path / "file/state")
