"""A deletion that died is none, or is done: a start never undoes one."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from tests.trainer_cell.vault.checkpoints import contents, leftovers, load, new_vault, save
from tests.trainer_cell.vault.disks import Crash, CrashingDisk, RecordingDisk, UnsyncedDisk
from tests.trainer_cell.vault.scenes import (
    MODEL,
    named,
)
from trainer_cell.vault.deletion import delete_checkpoint
from trainer_cell.vault.errors import StorageFailed
from trainer_cell.vault.layout import Vault
from trainer_cell.vault.startup import recover

T = TypeVar("T")


@pytest.mark.parametrize("overwritten", [False, True])
def test_a_deletion_that_died_at_any_call_is_never_undone_by_a_start(tmp_path: Path, overwritten: bool) -> None:
    """Once the name is gone it stays gone, and the bytes go; while it is there it is whole."""
    disk = RecordingDisk()
    counted = new_vault(tmp_path / "counted", UnsyncedDisk())
    for seed in range(1, 2 + overwritten):
        save(counted, named("n"), seed=seed, overwrite=True)
    delete_checkpoint(Vault(counted.root, disk), named("n"))
    outcomes = set()
    for at in range(len(disk.calls)):
        vault = new_vault(tmp_path / str(at), UnsyncedDisk())
        for seed in range(1, 2 + overwritten):
            save(vault, named("n"), seed=seed, overwrite=True)
        with pytest.raises(Crash):
            delete_checkpoint(Vault(vault.root, CrashingDisk(at)), named("n"))
        was_there = vault.resolve(named("n")) is not None
        recover(vault)
        is_there = vault.resolve(named("n")) is not None
        assert is_there <= was_there, f"died before call {at}: the deleted name is back"
        assert load(vault, named("n")) == (contents(1 + overwritten) if is_there else None)
        assert is_there or list(vault.versions_dir(MODEL).iterdir()) == []
        assert leftovers(vault) == []
        outcomes.add((was_there, is_there))
    assert outcomes == {(True, True), (True, False), (False, False)}


class FullDisk(UnsyncedDisk):
    """Nothing new fits."""

    def call(self, operation: str, path: Path, act: Callable[[], T]) -> T:
        if operation in ("create", "mkdir", "write", "allocate"):
            raise StorageFailed(operation, path, errno.ENOSPC)
        return super().call(operation, path, act)


class DyingFullDisk(CrashingDisk, FullDisk):
    pass


def overwritten_once(root: Path) -> Vault:
    vault = new_vault(root, UnsyncedDisk())
    for seed in (1, 2):
        save(vault, named("n"), seed=seed, overwrite=True)
    return vault


def test_on_a_full_disk_a_deletion_works_and_one_that_died_was_none_or_is_done(tmp_path: Path) -> None:
    counted = overwritten_once(tmp_path / "counted")
    assert delete_checkpoint(Vault(counted.root, FullDisk()), named("n"))
    assert list(counted.versions_dir(MODEL).iterdir()) == []
    outcomes = set()
    for at in itertools.count():
        vault = overwritten_once(tmp_path / str(at))
        try:
            delete_checkpoint(Vault(vault.root, DyingFullDisk(at)), named("n"))
            break
        except Crash:
            recover(vault)
            held = load(vault, named("n"))
            assert held in (contents(2), None), f"died before call {at}: an older version came up"
            outcomes.add(held is None)
    assert outcomes == {False, True}


def test_on_a_full_disk_what_is_being_read_is_marked_as_soon_as_there_is_room(tmp_path: Path) -> None:
    vault = overwritten_once(tmp_path)
    lease = vault.lease(vault.resolve(named("n")) or "")
    assert lease is not None
    with lease:
        with pytest.raises(StorageFailed):
            delete_checkpoint(Vault(tmp_path, FullDisk()), named("n"))
        assert load(vault, named("n")) is None
        assert not delete_checkpoint(vault, named("n"))
        recover(vault)
        assert load(vault, named("n")) is None
    assert {(finding.what, finding.address.name) for finding in recover(vault).findings} == {("deleted", "n")}


def test_without_the_mark_a_deleted_checkpoint_would_come_back(tmp_path: Path) -> None:
    """The control: the order `unlink, then remove` alone, stopped in between."""
    vault = new_vault(tmp_path)
    save(vault, named("n"))
    vault.public_path(named("n")).unlink()
    assert {(finding.what, finding.address.name) for finding in recover(vault).findings} == {("adopted", "n")}
