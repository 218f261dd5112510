"""Leftovers of dead epochs are swept; nothing of a living one, and nothing else, is touched."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.trainer_cell.vault.checkpoints import ADDRESS, contents, leftovers, load, new_vault, save, tree
from tests.trainer_cell.vault.disks import Crash, CrashingDisk, FailingDisk
from trainer_cell.vault import locks
from trainer_cell.vault.disk import Disk
from trainer_cell.vault.errors import StorageFailed, VaultLocked
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.publish import abandon, begin, sweep_staging

_HOLD_AND_WAIT = """
import sys
from pathlib import Path
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.publish import begin
vault = Vault(Path(sys.argv[1]))
with vault.hold_epoch("ALIVE"):
    begin(vault, CheckpointAddress("m", "weights", "n"), False, 0, "ALIVE")
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_staging_of_a_living_epoch_stays_until_its_process_is_dead(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    dead = begin(vault, ADDRESS, False, 0, "DEAD")
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD_AND_WAIT, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as cell:
        try:
            assert cell.stdout is not None
            assert cell.stdout.readline() == b"held\n"
            assert sweep_staging(vault) == [dead.token]
            assert [name.startswith(".staging/ALIVE.") for name in leftovers(vault)] == [True]
        finally:
            cell.kill()
            cell.wait()
    assert len(sweep_staging(vault)) == 1
    assert leftovers(vault) == []
    assert list(vault.staging_root.iterdir()) == []


def test_a_temporary_link_of_a_dead_epoch_is_swept(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    save(vault)
    for at in range(10_000):
        with pytest.raises(Crash):
            save(Vault(tmp_path, CrashingDisk(at)), seed=2, overwrite=True)
        if any("/.point." in name for name in leftovers(vault)):
            break
    assert any("/.point." in name for name in leftovers(vault))
    with vault.hold_epoch("EPOCH1"):
        sweep_staging(vault)
        assert any("/.point." in name for name in leftovers(vault))
    sweep_staging(vault)
    assert leftovers(vault) == []
    assert load(vault) == contents(1)


def test_strays_are_neither_swept_nor_in_the_way(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    save(vault)
    (tmp_path / "lost+found").mkdir()
    (tmp_path / ".staging/notes").write_text("")
    (vault.model_dir(ADDRESS.model_id) / "step_latest").mkdir()
    (tmp_path / "plain-file").write_text("")
    before = tree(tmp_path)
    assert sweep_staging(vault) == []
    assert tree(tmp_path) == before


def test_one_directory_that_cannot_be_removed_does_not_stop_the_sweep(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    for epoch in ("A", "B", "C"):
        begin(vault, ADDRESS, False, 0, epoch)
    for at in range(2, 40):
        sweep_staging(Vault(tmp_path, FailingDisk(at, errno.EIO)))
        assert len(leftovers(vault)) <= 1
    sweep_staging(vault)
    assert leftovers(vault) == []


def test_an_epoch_has_one_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_EPOCH_PATIENCE_S", 0.0)
    vault = new_vault(tmp_path)
    with vault.hold_epoch("E"), pytest.raises(VaultLocked, match="cell epoch E"), Vault(tmp_path).hold_epoch("E"):
        pass


def test_who_knows_that_an_epoch_lives_on_does_not_wait_for_its_end(tmp_path: Path) -> None:
    """Were it waited for, it would be for 30 seconds."""
    vault = new_vault(tmp_path)
    asked = list[bool]()

    def is_in_vain() -> bool:
        asked.append(True)
        return len(asked) == 3

    with vault.hold_epoch("E"), pytest.raises(VaultLocked), Vault(tmp_path).hold_epoch("E", is_in_vain):
        pass
    assert len(asked) == 3


class _SweptBetween(Disk):
    """A sweep that takes the epoch for dead comes between opening its lock file and locking it, once."""

    def __init__(self) -> None:
        self.swept = False

    def try_lock(self, descriptor: int, path: Path, exclusive: bool) -> bool:
        if not self.swept:
            self.swept = True
            path.unlink()
        return super().try_lock(descriptor, path, exclusive)


def test_a_lock_on_a_file_that_a_sweep_has_removed_does_not_count(tmp_path: Path) -> None:
    new_vault(tmp_path)
    vault = Vault(tmp_path, _SweptBetween())
    with vault.hold_epoch("E"):
        assert locks.try_lock_epoch(vault.disk, vault.staging_root, "E") is None


def test_an_epoch_outwaits_the_sweep_that_holds_its_lock(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    sweep = locks.try_lock_epoch(vault.disk, vault.staging_root, "E")
    assert sweep is not None
    held = threading.Event()

    def live() -> None:
        with vault.hold_epoch("E"):
            held.set()

    cell = threading.Thread(target=live)
    cell.start()
    locks.epoch_lock_path(vault.staging_root, "E").unlink()
    sweep.release()
    assert held.wait(30)
    cell.join()


def test_a_model_lock_that_is_never_freed_is_a_typed_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_MODEL_PATIENCE_S", 0.0)
    vault = new_vault(tmp_path)
    save(vault)
    with vault.lock_model(ADDRESS.model_id), pytest.raises(StorageFailed, match="ETIMEDOUT"):
        save(vault, overwrite=True)
    assert leftovers(vault) == []
    save(vault, CheckpointAddress("other", "weights", "n"))


def test_abandoning_is_idempotent_and_never_fails(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    staging = begin(vault, ADDRESS, False, 0, "E")
    failing = type(staging)(staging.directory, staging.token, FailingDisk(0))
    abandon(failing)
    assert staging.directory.exists()
    abandon(staging)
    abandon(staging)
    assert not staging.directory.exists()
