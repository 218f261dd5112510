"""The directories alone tell which checkpoints there are; deleting takes the name first and is safe to repeat."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.trainer_cell.vault.checkpoints import ADDRESS, contents, leftovers, load, new_vault, save, tree
from tests.trainer_cell.vault.disks import Crash, CrashingDisk, FailingDisk, RecordingDisk
from trainer_cell.vault.deletion import delete_checkpoint, delete_expired
from trainer_cell.vault.errors import CheckpointDamaged, StorageFailed
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.listing import Listed, check_identity, find_checkpoint, list_checkpoints
from trainer_cell.vault.manifest import read_manifest
from trainer_cell.vault.publish import sweep_staging


def named(name: str, model_id: str = ADDRESS.model_id) -> CheckpointAddress:
    return CheckpointAddress(model_id, "weights", name)


def names(listed: list[Listed]) -> list[str]:
    return [entry.address.name for entry in listed]


def test_the_latest_save_comes_first_whatever_names_and_times_say(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    order = ["8", "9", "10", "0098", "final", "a10", "a9"]
    for name in order:
        save(vault, named(name))
    os.utime(vault.version_dir(vault.resolve(named("8")) or ""))
    save(vault, named("0098"), overwrite=True)
    assert names(list(list_checkpoints(vault))) == ["0098", "a9", "a10", "final", "10", "9", "8"]


def test_a_listed_checkpoint_tells_all_about_it(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    version = save(vault)
    (entry,) = list_checkpoints(vault)
    assert (entry.address, entry.version, entry.problem) == (ADDRESS, version, None)
    assert entry.manifest == read_manifest(vault.version_dir(version))
    assert entry.size_bytes == sum(path.stat().st_size for path in vault.version_dir(version).glob("*.safetensors"))
    assert find_checkpoint(vault, ADDRESS) == entry
    assert find_checkpoint(vault, named("free")) is None


def test_one_models_checkpoints_can_be_listed_alone(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    save(vault)
    save(vault, named("n", "other:train:0"))
    assert [entry.address.model_id for entry in list_checkpoints(vault, "other:train:0")] == ["other:train:0"]
    assert list(list_checkpoints(vault, "nobody")) == []
    assert list(list_checkpoints(Vault(tmp_path / "nowhere"))) == []


def test_strays_are_passed_over_and_left_alone(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    save(vault)
    model, kind = vault.model_dir(ADDRESS.model_id), vault.kind_dir(ADDRESS)
    for folder in (tmp_path, model, kind):
        for name in ("step_latest", ".tmp-123", "lost+found"):
            (folder / name).mkdir()
        (folder / "plain-file").write_text("")
        (folder / "dangling").symlink_to("nowhere")
        (folder / "loop").symlink_to("loop")
    (vault.versions_dir(ADDRESS.model_id) / "weights.n.old").mkdir()
    before = tree(tmp_path)
    assert names(list(list_checkpoints(vault))) == ["n"]
    save(vault, named("m"))
    assert load(vault, named("m")) == contents(1)
    assert set(before) < set(tree(tmp_path))


@pytest.mark.parametrize("damage", ["manifest.json", "rank00001.safetensors"])
def test_an_incomplete_checkpoint_is_listed_with_its_problem_and_the_others_without(
    tmp_path: Path, damage: str
) -> None:
    vault = new_vault(tmp_path)
    save(vault, named("good"))
    (vault.version_dir(save(vault)) / damage).unlink()
    bad, good = list_checkpoints(vault)
    assert damage in (bad.problem or "")
    assert good.problem is None


def test_a_version_removed_by_hand_is_listed_as_missing(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    shutil.rmtree(vault.version_dir(save(vault)))
    (entry,) = list_checkpoints(vault)
    assert entry.manifest is None
    assert "manifest.json is missing" in (entry.problem or "")
    assert delete_checkpoint(vault, ADDRESS)
    assert list(list_checkpoints(vault)) == []


def test_a_copied_directory_is_a_checkpoint_only_as_far_as_it_is_whole(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    source = vault.version_dir(save(vault))
    for name, missing in (("whole", ""), ("shardless", "rank00000.safetensors"), ("bare", "manifest.json")):
        shutil.copytree(source, vault.public_path(named(name)))
        if missing:
            (vault.public_path(named(name)) / missing).unlink()
    problems = {entry.address.name: entry.problem for entry in list_checkpoints(vault)}
    assert problems == {"n": None, "whole": None, "shardless": "file rank00000.safetensors is missing"}


def test_a_version_that_belongs_elsewhere_is_not_taken_for_this_one(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    mine = vault.version_dir(save(vault))
    others = vault.version_dir(save(vault, named("n", "other:train:0")))
    shutil.rmtree(mine)
    shutil.copytree(others, mine)
    entry = next(entry for entry in list_checkpoints(vault, ADDRESS.model_id))
    assert entry.problem == "manifest.json: model_id is other:train:0, not s-1:train:0"
    with pytest.raises(CheckpointDamaged):
        check_identity(mine, read_manifest(mine), ADDRESS)


def test_deleting_takes_the_name_the_version_and_those_it_replaced(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    save(vault, named("n.more"))
    for seed in range(3):
        save(vault, seed=seed, overwrite=True)
    assert delete_checkpoint(vault, ADDRESS)
    assert not delete_checkpoint(vault, ADDRESS)
    assert names(list(list_checkpoints(vault))) == ["n.more"]
    assert [path.name.rpartition(".")[0] for path in vault.versions_dir(ADDRESS.model_id).iterdir()] == [
        "weights.n.more"
    ]
    assert leftovers(vault) == []
    save(vault, seed=9)
    assert load(vault) == contents(9)


def test_deleting_what_never_was_is_false(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    assert not delete_checkpoint(vault, ADDRESS)
    save(vault)
    assert not delete_checkpoint(vault, CheckpointAddress(ADDRESS.model_id, "sampler_weights", "n"))
    assert load(vault) == contents(1)


def test_a_deletion_is_decided_durably_then_the_name_goes_durably_then_the_rest(tmp_path: Path) -> None:
    save(new_vault(tmp_path))
    disk = RecordingDisk()
    delete_checkpoint(Vault(tmp_path, disk), ADDRESS)
    done = [
        (operation, path.parent.name) for operation, path in disk.calls if operation in ("unlink", "fsync", "rename")
    ]
    decided = done.index(("rename", ".retention"))
    assert done[decided - 1 : decided + 6] == [
        ("fsync", ".retention"),
        ("rename", ".retention"),
        ("fsync", "s-1~train~0"),
        ("unlink", "weights"),
        ("fsync", "s-1~train~0"),
        ("rename", ".staging"),
        ("fsync", "s-1~train~0"),
    ]


def test_a_crash_at_any_call_of_a_delete_is_made_good_by_the_next(tmp_path: Path) -> None:
    disk = RecordingDisk()
    save(new_vault(tmp_path / "counted"))
    delete_checkpoint(Vault(tmp_path / "counted", disk), ADDRESS)
    assert len(disk.calls) > 15
    for at in range(len(disk.calls)):
        vault = new_vault(tmp_path / str(at))
        save(vault)
        with pytest.raises(Crash):
            delete_checkpoint(Vault(vault.root, CrashingDisk(at)), ADDRESS)
        assert load(vault) in (contents(1), None)
        delete_checkpoint(vault, ADDRESS)
        sweep_staging(vault)
        assert list(list_checkpoints(vault)) == []
        assert leftovers(vault) == []
        assert list(vault.versions_dir(ADDRESS.model_id).iterdir()) == []


def test_a_delete_that_the_disk_fails_can_be_repeated(tmp_path: Path) -> None:
    for at in range(200):
        vault = new_vault(tmp_path / str(at))
        save(vault)
        disk = FailingDisk(at)
        try:
            delete_checkpoint(Vault(vault.root, disk), ADDRESS)
        except StorageFailed:
            delete_checkpoint(vault, ADDRESS)
        sweep_staging(vault)
        assert (load(vault), leftovers(vault)) == (None, [])
        assert list(vault.versions_dir(ADDRESS.model_id).iterdir()) == []
        if disk.failed is None:
            return
    raise AssertionError("the sweep did not reach the end of a delete")


def test_a_checkpoint_that_was_replaced_before_the_lock_was_had_is_not_deleted_as_expired(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    save(vault, seed=1)
    save(vault, seed=2, overwrite=True)
    assert not delete_expired(vault, ADDRESS, lambda: False)
    assert load(vault) == contents(2)
    assert delete_expired(vault, ADDRESS, lambda: True)
    assert list(vault.versions_dir(ADDRESS.model_id).iterdir()) == []


def test_a_leased_version_survives_the_deletion_of_its_name(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    version = save(vault)
    lease = vault.lease(version)
    assert lease is not None
    with lease, vault.lease(version) or pytest.fail("readers exclude each other"):
        assert delete_checkpoint(vault, ADDRESS)
        assert vault.version_dir(version).exists()
        assert load(vault) is None
    assert not delete_checkpoint(vault, ADDRESS)
    assert not vault.version_dir(version).exists()
    assert vault.lease(version) is None


def test_a_plain_directory_can_be_deleted(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    shutil.copytree(vault.version_dir(save(vault)), vault.public_path(named("older")))
    assert delete_checkpoint(vault, named("older"))
    assert names(list(list_checkpoints(vault))) == ["n"]
    assert leftovers(vault) == []
