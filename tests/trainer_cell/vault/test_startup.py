"""A start-up settles what crashes, hands and bad disks left; interrupted anywhere and run again it ends the same."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest
import xxhash

from tests.trainer_cell.vault.checkpoints import contents, leftovers, load, new_vault, save
from tests.trainer_cell.vault.disks import Crash, CrashingDisk, FailingDisk, RecordingDisk, UnsyncedDisk
from tests.trainer_cell.vault.scenes import (
    FAILED,
    MODEL,
    copy_of,
    damage,
    everything,
    freeze,
    named,
    state,
    version_of,
)
from trainer_cell.vault.errors import StorageFailed
from trainer_cell.vault.layout import Vault
from trainer_cell.vault.listing import find_checkpoint, list_checkpoints
from trainer_cell.vault.quarantine import empty_quarantine, list_quarantined
from trainer_cell.vault.retention_record import UNREADABLE, RetentionRecord, read_record, write_records
from trainer_cell.vault.startup import Outcome, RecoveryReport, recover
from trainer_cell.vault.verify import verify_version

T = TypeVar("T")


def known(command_id: str) -> Outcome | None:
    return "failed" if command_id == FAILED else None


def found(report: RecoveryReport) -> set[tuple[str, str]]:
    return {(finding.what, finding.address.name) for finding in report.findings}


def names_of(vault: Vault) -> dict[str, dict[str, bytes] | None]:
    return {
        listed.address.name: load(vault, listed.address) for listed in list_checkpoints(vault) if not listed.problem
    }


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Vault:
    """Not to be changed: copies are."""
    return everything(tmp_path_factory.mktemp("scene") / "root")


def test_everything_is_settled_and_said(scene: Vault, tmp_path: Path) -> None:
    vault = copy_of(scene, tmp_path / "root", UnsyncedDisk())
    report = recover(vault, known)
    assert found(report) == {
        ("adopted", "frozen"),
        ("adopted", "frozen-over"),
        ("collected", "failed"),
        ("repaired", "bad"),
        ("repaired", "pinned"),
        ("unnamed", "hopeless"),
        ("unnamed", "missing"),
        ("unnamed", "foreign"),
        ("unnamed", "n"),
        ("deleted", "doomed"),
        ("deleted", "half-deleted"),
        ("quarantined", "bad"),
        ("quarantined", "hopeless"),
        ("quarantined", "pinned"),
    }
    assert report.errors == ()
    assert names_of(vault) == {
        "kept": contents(1),
        "replaced": contents(2),
        "frozen": contents(3),
        "frozen-over": contents(2),
        "bad": contents(1),
        "pinned": contents(1),
        "plain": contents(1),
    }
    assert leftovers(vault) == []
    assert len(list(vault.versions_dir(MODEL).glob("weights.replaced.*"))) == 2, "a replaced version has its grace"
    bad = find_checkpoint(vault, named("bad"))
    assert bad is not None
    assert "rank00001.safetensors is missing" in (bad.record.note or "")
    pinned = find_checkpoint(vault, named("pinned"))
    assert pinned is not None
    assert pinned.record.pinned, "a pin goes over"
    assert {finding.tenant_digest for finding in report.findings if finding.address.model_id == MODEL} == {"7e"}


def test_a_second_start_finds_nothing_to_do(scene: Vault, tmp_path: Path) -> None:
    vault = copy_of(scene, tmp_path / "root", UnsyncedDisk())
    recover(vault, known)
    once = state(vault.root)
    again = recover(vault, known)
    assert (again.swept, again.findings, again.errors) == ((), (), ())
    assert state(vault.root) == once


def interrupted(scene: Vault, root: Path, every: int) -> Iterator[tuple[int, Vault]]:
    """A copy for every call of a recovery, or for a part of them, always the last among them."""
    disk = RecordingDisk()
    recover(copy_of(scene, root / "counted", disk), known)  # type: ignore[arg-type]
    for at in range(len(disk.calls) - 1, -1, -every):
        place = root / str(at)
        yield at, copy_of(scene, place, UnsyncedDisk())
        shutil.rmtree(place)


def check_interrupted(scene: Vault, root: Path, every: int) -> None:
    whole = copy_of(scene, root / "whole", UnsyncedDisk())
    recover(whole, known)
    expected = state(whole.root)
    tried = 0
    for at, vault in interrupted(scene, root, every):
        with pytest.raises(Crash):
            recover(Vault(vault.root, CrashingDisk(at)), known)
        recover(vault, known)
        assert state(vault.root) == expected, f"died before call {at}"
        tried += 1
    assert tried > 10


def test_a_recovery_that_died_anywhere_ends_the_same_when_run_again(scene: Vault, tmp_path: Path) -> None:
    check_interrupted(scene, tmp_path, every=29)


@pytest.mark.full
def test_a_recovery_that_died_at_any_call_ends_the_same_when_run_again(scene: Vault, tmp_path: Path) -> None:
    check_interrupted(scene, tmp_path, every=1)


def check_failing(scene: Vault, root: Path, every: int) -> None:
    whole = copy_of(scene, root / "whole", UnsyncedDisk())
    recover(whole, known)
    expected = state(whole.root)
    good = {name: held for name, held in names_of(scene).items() if name in names_of(whole)}
    for at, vault in interrupted(scene, root, every):
        disk = FailingDisk(at, errno.EIO)
        with suppress(StorageFailed):  # the root itself could not be listed
            recover(Vault(vault.root, disk), known)
        now = names_of(vault)
        assert good.keys() <= now.keys(), f"an error at call {at} ({disk.failed}) took a name away"
        recover(vault, known)
        assert state(vault.root) == expected, f"EIO at call {at} ({disk.failed})"


@pytest.mark.full
def test_an_error_of_the_disk_at_any_call_is_made_good_by_the_next_start(scene: Vault, tmp_path: Path) -> None:
    check_failing(scene, tmp_path, every=1)


def test_an_error_of_the_disk_is_told_and_takes_no_good_checkpoint_away(scene: Vault, tmp_path: Path) -> None:
    check_failing(scene, tmp_path, every=37)


def test_an_orphan_whose_name_has_a_later_version_stays_as_replaced(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    freeze(vault, named("n"), seed=1)
    save(vault, named("n"), seed=2)
    assert recover(vault).findings == ()
    assert load(vault, named("n")) == contents(2)


def test_of_several_frozen_versions_the_latest_is_adopted(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    for seed in (1, 2, 3):
        freeze(vault, named("n"), seed=seed, command_id=FAILED if seed == 3 else f"c-{seed}")
    assert found(recover(vault, known)) == {("collected", "n"), ("adopted", "n")}
    assert load(vault, named("n")) == contents(2)


def test_a_frozen_version_does_not_take_a_pinned_name(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    told = save(vault, named("n"), seed=1)
    freeze(vault, named("n"), seed=2, overwrite=True)
    write_records(vault, MODEL, {version_of(told): RetentionRecord(pinned=True)})
    assert found(recover(vault)) == {("collected", "n")}
    assert load(vault, named("n")) == contents(1)


def test_a_version_of_a_newer_format_is_left_alone(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    told = save(vault, named("newer"))
    place = vault.version_dir(told) / "manifest.json"
    body = (
        place.read_bytes()
        .rpartition(b',\n  "manifest_digest"')[0]
        .replace(b'"format_version": 1', b'"format_version": 99')
    )
    place.write_bytes(body + f',\n  "manifest_digest": "{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode())
    before = state(tmp_path)
    assert recover(vault).findings == ()
    assert state(tmp_path) == before


def test_a_version_that_is_being_read_is_not_moved(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    told = save(vault, named("n"))
    damage(vault, told)
    lease = vault.lease(told)
    assert lease is not None
    with lease:
        recover(vault)
        assert vault.version_dir(told).exists()
    assert ("quarantined", "n") in found(recover(vault))


def test_quarantine_keeps_every_byte_until_it_is_emptied(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    told = save(vault, named("n"))
    damage(vault, told)
    held = {path.name: path.read_bytes() for path in vault.version_dir(told).iterdir()}
    recover(vault)
    (entry,) = list_quarantined(vault)
    assert (entry.model_id, entry.what) == (MODEL, str(version_of(told)))
    assert {path.name: path.read_bytes() for path in entry.path.iterdir()} == held
    assert entry.num_bytes == sum(map(len, held.values()))
    assert empty_quarantine(vault) == [entry]
    assert list(list_quarantined(vault)) == []


def test_every_good_checkpoint_of_two_tenants_outlives_three_starts_with_its_bytes(tmp_path: Path) -> None:
    vault = new_vault(tmp_path, UnsyncedDisk())
    for index in range(10):
        save(vault, named(f"n{index}", f"s-{index % 2}:train:0"), seed=index, tenant_digest=f"{index % 2}")
    for _ in range(3):
        before = state(tmp_path)
        assert recover(vault).findings == ()
        assert state(tmp_path) == before
    listed = list(list_checkpoints(vault))
    assert len(listed) == 10
    for entry in listed:
        assert verify_version(vault.version_dir(entry.version)) == []
        assert load(vault, entry.address) == contents(int(entry.address.name[1:]))


def test_a_flipped_bit_of_a_retention_record_decides_nothing_but_to_keep_the_version(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    version = version_of(save(vault, named("n")))
    write_records(vault, MODEL, {version: RetentionRecord(expires="2027-11-30T00:00:00Z", note="n")})
    file = vault.retention_dir(MODEL) / f"{version}.json"
    good = file.read_bytes()
    assert read_record(vault, MODEL, version) != UNREADABLE
    for place in range(len(good)):
        for bit in (1, 4, 64):
            file.write_bytes(good[:place] + bytes([good[place] ^ bit]) + good[place + 1 :])
            assert read_record(vault, MODEL, version) == UNREADABLE, (place, bit)


def test_an_unreadable_retention_record_counts_as_a_pin(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    version = version_of(save(vault, named("n")))
    write_records(vault, MODEL, {version: RetentionRecord(doomed="deleted")})
    (vault.retention_dir(MODEL) / f"{version}.json").write_bytes(b"\0\0")
    assert read_record(vault, MODEL, version).pinned
    assert recover(vault).findings == ()
    assert load(vault, named("n")) == contents(1)
