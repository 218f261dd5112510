"""Recovery snapshots in the vault: published as checkpoints are, and kept apart from them."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from tests.trainer_cell.vault.checkpoints import contents, leftovers, load, new_vault, save
from tests.trainer_cell.vault.disks import Crash, CrashingDisk, UnsyncedDisk
from tests.trainer_cell.vault.scenes import MODEL, copy_of, damage, freeze, named, version_of
from tests.trainer_cell.vault.test_collect import Clock, collector, removed
from trainer_cell.vault.deletion import delete_checkpoint
from trainer_cell.vault.errors import CheckpointDamaged
from trainer_cell.vault.inventory import Inventory
from trainer_cell.vault.layout import KINDS, CheckpointAddress, InvalidAddress, Vault
from trainer_cell.vault.listing import find_checkpoint, list_checkpoints
from trainer_cell.vault.recovery import settle_publish
from trainer_cell.vault.retention import Rules
from trainer_cell.vault.startup import recover

LATEST = CheckpointAddress(MODEL, "recovery", "latest")
KEEP_ONE = Rules(replaced_grace_s=600, keep_last=1, keep_every=1000)


def snapshot(vault: Vault, seed: int, **facts: object) -> str:
    return save(vault, LATEST, seed=seed, overwrite=True, user_metadata={"turn": str(seed)}, **facts)  # type: ignore[arg-type]


def snapshots(vault: Vault) -> list[str]:
    return sorted(path.name for path in vault.versions_dir(MODEL).glob("recovery.*"))


def test_a_snapshot_has_an_address_and_a_hidden_place_of_its_own(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    told = snapshot(vault, 1)
    assert LATEST == CheckpointAddress.parse(f"tinker://{MODEL}/recovery/latest")
    link = tmp_path / "s-1~train~0" / ".recovery" / "latest"
    assert str(link.readlink()) == f"../.versions/{version_of(told)}"
    assert str(version_of(told)).startswith("recovery.latest.")
    assert vault.resolve(LATEST) == told
    assert load(vault, LATEST) == contents(1)
    found = find_checkpoint(vault, LATEST)
    assert found is not None
    assert found.manifest is not None
    assert found.manifest.user_metadata == {"turn": "1"}
    # No older layout has left a directory there, so that one is something else.
    for version in ("s-1~train~0/.recovery/latest", "s-1~train~0/recovery/latest"):
        with pytest.raises(InvalidAddress):
            vault.version_dir(version)
    link.unlink()
    link.mkdir()
    with pytest.raises(CheckpointDamaged):
        vault.resolve(LATEST)


def test_a_snapshot_is_neither_listed_nor_counted_unless_it_is_asked_for(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    save(vault, named("n"), command_id="c-of-a-client")
    snapshot(vault, 1)
    assert [listed.address for listed in list_checkpoints(vault)] == [named("n")]
    assert {listed.address for listed in list_checkpoints(vault, kinds=KINDS)} == {named("n"), LATEST}
    inventory = Inventory(vault)
    for _ in range(2):
        assert [one.command_id for one in inventory.contents()] == ["c-of-a-client"]
        assert {str(one.version.kind) for one in inventory.versions(MODEL)} == {"weights", "recovery"}


def test_a_replaced_snapshot_goes_with_the_next_sweep_where_a_checkpoint_has_its_grace(tmp_path: Path) -> None:
    vault, clock = new_vault(tmp_path), Clock()
    for seed in (1, 2):
        snapshot(vault, seed, created=clock.stamp())
        save(vault, named("n"), seed=seed, overwrite=True, created=clock.stamp())
    sweeping = collector(vault, clock)
    assert removed(sweeping.collect()) == [("latest", "replaced")]
    assert load(vault, LATEST) == contents(2)
    assert len(list(vault.versions_dir(MODEL).glob("weights.n.*"))) == 2
    assert removed(sweeping.collect()) == []


def test_a_snapshot_that_is_being_read_stays_until_it_no_longer_is(tmp_path: Path) -> None:
    vault, clock = new_vault(tmp_path), Clock()
    lease = vault.lease(snapshot(vault, 1, created=clock.stamp()))
    assert lease is not None
    snapshot(vault, 2, created=clock.stamp())
    with lease:
        assert removed(collector(vault, clock).collect()) == []
    assert removed(collector(vault, clock).collect()) == [("latest", "replaced")]


def test_behind_a_damaged_snapshot_the_last_good_one_stays(tmp_path: Path) -> None:
    vault, clock = new_vault(tmp_path), Clock()
    snapshot(vault, 1, created=clock.stamp())
    damage(vault, snapshot(vault, 2, created=clock.stamp()))
    assert removed(collector(vault, clock).collect()) == []


def test_a_finite_snapshot_has_no_better_claim_than_the_one_that_replaced_it(tmp_path: Path) -> None:
    vault, clock = new_vault(tmp_path), Clock()
    for non_finite in (False, True):
        snapshot(vault, 1 + non_finite, created=clock.stamp(), non_finite=non_finite)
        save(vault, named("n"), overwrite=True, created=clock.stamp(), non_finite=non_finite)
    clock.forward(10_000)
    # The control: of checkpoints the last finite one stays.
    assert removed(collector(vault, clock).collect()) == [("latest", "replaced")]


def test_rules_for_checkpoints_say_nothing_of_snapshots(tmp_path: Path) -> None:
    vault, clock = new_vault(tmp_path), Clock()
    snapshot(vault, 1, created=clock.stamp(), iteration=3)
    for name in ("a", "b", "c"):
        save(vault, named(name), created=clock.stamp(), iteration=3)
    clock.forward(10_000)
    assert sorted(removed(collector(vault, clock, KEEP_ONE).collect())) == [("a", "not_kept"), ("b", "not_kept")]
    assert load(vault, LATEST) == contents(1)


def test_a_deleted_snapshot_is_gone(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    snapshot(vault, 1)
    snapshot(vault, 2)
    assert delete_checkpoint(vault, LATEST)
    assert (vault.resolve(LATEST), snapshots(vault)) == (None, [])


def test_a_snapshot_that_was_frozen_and_not_pointed_to_is_settled_by_its_command(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    snapshot(vault, 1)
    frozen = freeze(vault, LATEST, overwrite=True, seed=2, command_id="c-lost")
    settled = settle_publish(vault, LATEST, "c-lost", overwrite=True, epoch="E")
    assert settled is not None
    assert settled[0].endswith(str(frozen))
    assert load(vault, LATEST) == contents(2)


def test_a_start_adopts_the_last_snapshot_mends_a_damaged_one_and_sweeps_its_links(tmp_path: Path) -> None:
    vault = new_vault(tmp_path, UnsyncedDisk())
    snapshot(vault, 1)
    freeze(vault, LATEST, overwrite=True, seed=2)
    stray = vault.kind_dir(LATEST) / ".point.DEAD.01M8PF99MZ5P65BR6PAJSDETTH"
    stray.symlink_to("nowhere")
    report = recover(vault)
    assert [(finding.what, finding.address) for finding in report.findings] == [("adopted", LATEST)]
    assert load(vault, LATEST) == contents(2)
    assert not stray.is_symlink()
    damage(vault, vault.resolve(LATEST) or "")
    report = recover(vault)
    assert [(finding.what, finding.address) for finding in report.findings] == [
        ("repaired", LATEST),
        ("quarantined", LATEST),
    ]
    assert load(vault, LATEST) == contents(1)
    assert recover(vault).findings == ()


def test_a_crash_at_any_call_of_a_replacement_or_a_start_leaves_a_whole_snapshot(tmp_path: Path) -> None:
    before = new_vault(tmp_path / "before", UnsyncedDisk())
    snapshot(before, 1)
    seen = set()
    for at in count():
        root = tmp_path / str(at)
        vault = copy_of(before, root, UnsyncedDisk())
        is_through = _until_crash(Vault(root, CrashingDisk(at)))
        assert load(vault, LATEST) in (contents(1), contents(2)), at
        try:
            recover(Vault(root, CrashingDisk(at)))
        except Crash:
            recover(vault)
        state = load(vault, LATEST)
        assert state in (contents(1), contents(2)), at
        seen.add(state == contents(2))
        assert leftovers(vault) == [], at
        if is_through:
            break
    assert seen == {False, True}


def _until_crash(vault: Vault) -> bool:
    try:
        snapshot(vault, 2)
    except Crash:
        return False
    return True
