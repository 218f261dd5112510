"""The gateway's process, started as an operator starts it without a cell."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.trainer_cell.vault.checkpoints import new_vault, save
from tests.trainer_cell.vault.scenes import MODEL, damage, freeze, named


def start(state: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gateway", "--state", str(state), "--port", "0", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    started = start(tmp_path)
    yield started
    started.kill()
    started.communicate()


def words(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout
    return process.stdout.readline().split()


def test_it_prints_a_key_and_its_address_answers_without_a_cell_and_stops_cleanly(
    process: subprocess.Popen[str], tmp_path: Path
) -> None:
    key = words(process)[3]
    url, socket_path = words(process)[2], tmp_path / "run/cell.sock"
    assert httpx.get(f"{url}/healthz").status_code == 200
    assert httpx.get(f"{url}/readyz").status_code == 503
    assert httpx.get(f"{url}/v1/checkpoints").status_code == 401
    assert httpx.get(f"{url}/v1/checkpoints", headers={"X-API-Key": key}).status_code == 200
    assert socket_path.is_socket()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert not socket_path.exists()


def test_two_gateways_never_share_a_checkpoint_root(process: subprocess.Popen[str], tmp_path: Path) -> None:
    words(process), words(process)
    second = start(tmp_path / "another", "--checkpoints", str(tmp_path / "checkpoints"))
    _, err = second.communicate(timeout=30)
    assert second.returncode == 1
    assert "is locked by another process" in err


def test_a_checkpoint_root_that_cannot_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    process = start(tmp_path / "state", "--checkpoints", str(tmp_path / "file"))
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert f"checkpoint root {tmp_path / 'file'}" in err
    assert "Traceback" not in err


def test_a_start_settles_the_checkpoint_root_before_it_serves_and_says_so(tmp_path: Path) -> None:
    vault = new_vault(tmp_path / "checkpoints")
    frozen = freeze(vault, named("frozen"))
    damage(vault, save(vault, named("hopeless")))
    process = start(tmp_path)
    words(process)
    # Its signals are its own once it answers.
    assert httpx.get(f"{words(process)[2]}/healthz").is_success
    assert vault.resolve(named("frozen")) == vault.version(MODEL, frozen)
    assert vault.resolve(named("hopeless")) is None
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert f"adopted {named('frozen').uri}" in err
    assert f"unnamed {named('hopeless').uri}" in err
    assert f"quarantined {named('hopeless').uri}" in err
