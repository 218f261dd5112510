"""A publish that died before its answer is settled from the disk: a success only if the command's bytes are there."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.trainer_cell.vault.checkpoints import ADDRESS, EPOCH, contents, leftovers, load, new_vault, save
from tests.trainer_cell.vault.disks import Crash, CrashingDisk, RecordingDisk, UnsyncedDisk
from trainer_cell.vault.disk import Disk
from trainer_cell.vault.errors import StorageFailed
from trainer_cell.vault.layout import Vault
from trainer_cell.vault.publish import sweep_staging
from trainer_cell.vault.recovery import settle_publish

COMMAND = "c-lost"


def crashes(root: Path, overwrite: bool) -> Iterator[Vault]:
    """A vault for every call at which a save, of a name that is free or held by an older version, can die."""
    disk = RecordingDisk()
    counted = new_vault(root / "counted", UnsyncedDisk())
    if overwrite:
        save(counted)
    save(Vault(counted.root, disk), overwrite=overwrite)
    for at in range(len(disk.calls)):
        vault = new_vault(root / str(at), UnsyncedDisk())
        if overwrite:
            save(vault)
        with pytest.raises(Crash):
            save(Vault(vault.root, CrashingDisk(at)), seed=2, overwrite=overwrite, command_id=COMMAND)
        yield vault


def frozen(vault: Vault) -> Path | None:
    """The version of the lost command, pointed to or not."""
    for path in vault.root.glob("*/.versions/*/manifest.json"):
        if COMMAND in path.read_text():
            return path.parent
    return None


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_frozen_version_is_made_visible_and_an_unfinished_one_is_not(tmp_path: Path, overwrite: bool) -> None:
    settled = []
    for vault in crashes(tmp_path, overwrite):
        expected = frozen(vault)
        found = settle_publish(vault, ADDRESS, COMMAND, overwrite, EPOCH)
        assert (found is not None) == (expected is not None)
        if found is not None:
            version, manifest = found
            assert vault.version_dir(version) == expected
            assert manifest.command_id == COMMAND
            assert load(vault) == contents(2)
            again = settle_publish(vault, ADDRESS, COMMAND, overwrite, EPOCH)
            assert again == found
        else:
            assert load(vault) == (contents(1) if overwrite else None)
        settled.append(found is not None)
        sweep_staging(vault)
        assert leftovers(vault) == []
    assert {False, True} == set(settled)


def orphaned(root: Path, overwrite: bool) -> Vault:
    """A vault in which the lost command's version is frozen and the name does not point at it."""
    for vault in crashes(root, overwrite):
        version = frozen(vault)
        if version is not None and load(vault) != contents(2):
            return vault
    raise AssertionError("no crash came between freeze and point")


def test_an_orphan_whose_name_has_a_later_version_is_collected(tmp_path: Path) -> None:
    vault = orphaned(tmp_path, overwrite=True)
    save(vault, seed=3, overwrite=True)
    assert settle_publish(vault, ADDRESS, COMMAND, True, EPOCH) is None
    assert load(vault) == contents(3)
    assert frozen(vault) is None


def test_an_orphan_whose_name_is_taken_and_not_to_be_overwritten_is_collected(tmp_path: Path) -> None:
    vault = orphaned(tmp_path, overwrite=False)
    save(vault, seed=3)
    assert settle_publish(vault, ADDRESS, COMMAND, False, EPOCH) is None
    assert load(vault) == contents(3)
    assert frozen(vault) is None


def test_an_orphan_that_does_not_verify_is_neither_made_visible_nor_removed(tmp_path: Path) -> None:
    vault = orphaned(tmp_path, overwrite=False)
    version = frozen(vault)
    assert version is not None
    (version / "rank00000.safetensors").write_bytes(b"")
    assert settle_publish(vault, ADDRESS, COMMAND, False, EPOCH) is None
    assert load(vault) is None
    assert version.exists()


class _Unreadable(Disk):
    def read(self, descriptor: int, path: Path, views: Sequence[memoryview], offset: int) -> int:
        if path.suffix == ".safetensors":
            raise StorageFailed("read", path, errno.EIO)
        return super().read(descriptor, path, views, offset)


def test_a_version_that_the_disk_does_not_let_be_read_is_not_taken_for_one_that_is_not_there(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    version = save(vault, command_id=COMMAND)
    with pytest.raises(StorageFailed, match="EIO"):
        settle_publish(Vault(tmp_path, _Unreadable()), ADDRESS, COMMAND, False, EPOCH)
    found = settle_publish(vault, ADDRESS, COMMAND, False, EPOCH)
    assert found is not None
    assert found[0] == version


def test_a_command_that_left_nothing_has_no_outcome(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    assert settle_publish(vault, ADDRESS, COMMAND, False, EPOCH) is None
    save(vault)
    assert settle_publish(vault, ADDRESS, COMMAND, True, EPOCH) is None
    assert load(vault) == contents(1)
