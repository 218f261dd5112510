"""Publishing in bad weather: a crash, or an error, at every single call to the file system."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.trainer_cell.vault.checkpoints import ADDRESS, contents, leftovers, load, new_vault, save
from tests.trainer_cell.vault.disks import Crash, CrashingDisk, FailingDisk, RecordingDisk, UnsyncedDisk
from trainer_cell.vault.disk import Disk
from trainer_cell.vault.errors import CheckpointExists, PublishUnknown, StorageFailed
from trainer_cell.vault.layout import Vault
from trainer_cell.vault.publish import sweep_staging
from trainer_cell.vault.verify import verify_version

OLD, NEW, NEXT = 1, 2, 3


def prepared(root: Path, overwrite: bool) -> Vault:
    vault = new_vault(root, UnsyncedDisk())
    if overwrite:
        save(vault, seed=OLD)
    return vault


def every_call(root: Path, overwrite: bool) -> Iterator[tuple[int, Vault]]:
    """For each call that a save makes, its number and a vault prepared for that save."""
    disk = RecordingDisk()
    save(Vault(prepared(root / "counted", overwrite).root, disk), seed=NEW, overwrite=overwrite)
    assert len(disk.calls) > 30
    for at in range(len(disk.calls)):
        yield at, prepared(root / f"call{at}", overwrite)


def failure_of(vault: Vault, overwrite: bool) -> StorageFailed | None:
    try:
        save(vault, seed=NEW, overwrite=overwrite)
    except StorageFailed as failure:
        return failure
    return None


def before(overwrite: bool) -> dict[str, bytes] | None:
    return contents(OLD) if overwrite else None


def is_confirmed(disk: FailingDisk, vault: Vault) -> bool:
    """Whether the last change of the public name is followed by a sync of its directory."""
    public = vault.public_path(ADDRESS)
    synced = max(at for at, call in enumerate(disk.succeeded) if call == ("fsync", public.parent))
    return synced > max(at for at, (_, path) in enumerate(disk.succeeded) if path == public)


def versions(vault: Vault) -> list[Path]:
    return list(vault.root.glob("*/.versions/*"))


def check_all_versions(vault: Vault) -> None:
    for version in versions(vault):
        assert verify_version(version) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_crash_at_any_call_leaves_the_old_or_the_new_and_the_next_save_works(tmp_path: Path, overwrite: bool) -> None:
    seen = []
    for at, vault in every_call(tmp_path, overwrite):
        with pytest.raises(Crash):
            save(Vault(vault.root, CrashingDisk(at)), seed=NEW, overwrite=overwrite)
        found = load(vault)
        assert found in (before(overwrite), contents(NEW))
        seen.append(found == contents(NEW))
        sweep_staging(vault)
        assert leftovers(vault) == []
        assert load(vault) == found
        save(vault, seed=NEXT, overwrite=True)
        assert load(vault) == contents(NEXT)
        check_all_versions(vault)
    # Visible from one call on, and never before.
    assert seen == sorted(seen)
    assert {False, True} == set(seen)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_one_error_at_any_call_fails_whole_or_succeeds_whole_and_a_retry_works(
    tmp_path: Path, overwrite: bool, late: bool, number: int
) -> None:
    outcomes = set()
    for at, vault in every_call(tmp_path, overwrite):
        disk = FailingDisk(at, number, late)
        failure = failure_of(Vault(vault.root, disk), overwrite)
        assert load(vault) == (before(overwrite) if failure else contents(NEW))
        assert failure is None or (type(failure), failure.errno) == (StorageFailed, number)
        assert failure or is_confirmed(disk, vault)
        outcomes.add("failed" if failure else "succeeded")
        assert leftovers(vault) == []
        assert len(versions(vault)) == overwrite + (failure is None)
        save(vault, seed=NEXT, overwrite=True)
        assert load(vault) == contents(NEXT)
        check_all_versions(vault)
        assert disk.failed is not None
    assert outcomes == {"failed", "succeeded"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_disk_that_goes_on_failing_never_makes_the_name_wrong(tmp_path: Path, overwrite: bool, number: int) -> None:
    visible = []
    for at, vault in every_call(tmp_path, overwrite):
        failure = failure_of(Vault(vault.root, FailingDisk(at, number, lasting=True)), overwrite)
        found = load(vault)
        assert found in (before(overwrite), contents(NEW))
        # Whoever is told a plain failure must not find the new version.
        assert (
            type(failure) is PublishUnknown
            or (type(failure) is StorageFailed and found == before(overwrite))
            or (failure is None and found == contents(NEW))
        )
        visible.append(found == contents(NEW))
        sweep_staging(vault)
        assert leftovers(vault) == []
        save(vault, seed=NEXT, overwrite=True)
        assert load(vault) == contents(NEXT)
    assert {False, True} == set(visible)


class _FailingAfterPoint(Disk):
    """The first `count` syncs of the public name's directory fail."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.renames = 0

    def fsync(self, descriptor: int, path: Path) -> None:
        if path.name == "weights" and self.left:
            self.left -= 1
            raise StorageFailed("fsync", path, errno.EIO)
        super().fsync(descriptor, path)

    def rename(self, source: Path, target: Path) -> None:
        self.renames += target.parent.name == "weights"
        super().rename(source, target)


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_unconfirmed_pointer_is_published_again_until_the_disk_confirms_it(tmp_path: Path, overwrite: bool) -> None:
    vault = prepared(tmp_path, overwrite)
    disk = _FailingAfterPoint(2)
    save(Vault(vault.root, disk), seed=NEW, overwrite=overwrite)
    assert load(vault) == contents(NEW)
    assert disk.renames == 2 + overwrite
    assert leftovers(vault) == []


def test_a_pointer_that_is_never_confirmed_is_told_as_unknown_and_its_version_kept(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    with pytest.raises(PublishUnknown, match="power cut"):
        save(Vault(vault.root, _FailingAfterPoint(99)))
    assert load(vault) == contents(1)


class _TakenMeanwhile(Disk):
    """Another writer takes the free name just before this one's link."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def symlink(self, target: str, path: Path) -> None:
        other = Vault(self._root)
        version = next(other.versions_dir(ADDRESS.model_id).glob("weights.n.*"))
        path.symlink_to(f"../.versions/{version.name[:-1]}{'0' if version.name[-1] != '0' else '1'}")
        super().symlink(target, path)


def test_a_name_taken_at_the_last_moment_stays_the_others_and_the_frozen_version_goes(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    with pytest.raises(CheckpointExists):
        save(Vault(tmp_path, _TakenMeanwhile(tmp_path)))
    assert list(vault.versions_dir(ADDRESS.model_id).iterdir()) == []
    assert vault.public_path(ADDRESS).is_symlink()
    assert leftovers(vault) == []


def test_a_plain_file_in_place_of_the_models_directory_fails_that_model_only(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    vault.model_dir(ADDRESS.model_id).write_text("in the way")
    with pytest.raises(StorageFailed, match="ENOTDIR"):
        save(vault)
    assert leftovers(vault) == []
    vault.model_dir(ADDRESS.model_id).unlink()
    save(vault)
    assert load(vault) == contents(1)


def _publish_in_place(vault: Vault) -> None:
    """What the order of publish is there to prevent: written under the public name itself."""
    source = vault.version_dir(save(vault, seed=OLD))
    public = vault.public_path(ADDRESS)
    vault.disk.unlink(public)
    vault.disk.make_directory(public)
    for path in sorted(source.iterdir()):
        descriptor = vault.disk.open_new(public / path.name)
        with vault.disk.closing(descriptor, public / path.name):
            vault.disk.write(descriptor, path, [memoryview(path.read_bytes())], 0)


def _finds_damage(publish: Callable[[Vault], None], root: Path) -> bool:
    for at in itertools.count():
        vault = new_vault(root / str(at))
        try:
            publish(Vault(vault.root, CrashingDisk(at)))
        except Crash:
            version = vault.resolve(ADDRESS)
            if version and verify_version(vault.version_dir(version)):
                return True
        else:
            return False
    return False


def test_the_crash_sweep_sees_a_publish_that_writes_under_the_public_name(tmp_path: Path) -> None:
    assert _finds_damage(_publish_in_place, tmp_path / "in-place")
    assert not _finds_damage(save, tmp_path / "ours")  # type: ignore[arg-type]
