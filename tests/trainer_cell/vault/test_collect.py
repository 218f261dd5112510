"""Collecting: what the rules say goes, name first, whatever interrupts it; what is read or held stays."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.trainer_cell.vault.checkpoints import contents, leftovers, load, new_vault, save
from tests.trainer_cell.vault.disks import Crash, CrashingDisk, FailingDisk, RecordingDisk, UnsyncedDisk
from tests.trainer_cell.vault.scenes import MODEL, copy_of, damage, freeze, named, state, version_of
from trainer_cell.vault.collect import Collected, Collector
from trainer_cell.vault.deletion import delete_checkpoint
from trainer_cell.vault.disk import Disk
from trainer_cell.vault.errors import CheckpointPinned, NamePinned
from trainer_cell.vault.layout import Vault
from trainer_cell.vault.publish import sweep_staging
from trainer_cell.vault.replaced_clock import ReplacedClock
from trainer_cell.vault.retention import Rules
from trainer_cell.vault.retention_record import NO_RECORD, RetentionRecord, write_records
from trainer_cell.vault.startup import recover

START = datetime(2026, 1, 1, tzinfo=UTC)
GRACE = Rules(replaced_grace_s=600)


@dataclass
class Clock:
    """Both clocks; they go together unless a test sets the one on the wall."""

    wall: datetime = START
    steady: float = 0.0

    def forward(self, seconds: float) -> None:
        self.wall += timedelta(seconds=seconds)
        self.steady += seconds

    def stamp(self, seconds: float = 0.0) -> str:
        return (self.wall + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


def collector(vault: Vault, clock: Clock, rules: Rules = GRACE, held: Collection[str] = ()) -> Collector:
    steady = ReplacedClock(lambda: clock.steady)
    return Collector(vault, rules, held=lambda: held, clock=steady, now=lambda: clock.wall)


def removed(collected: Collected) -> list[tuple[str, str]]:
    return [(due.address.name, due.reason) for due in collected.removed]


def num_versions(vault: Vault, name: str = "n") -> int:
    return len(list(vault.versions_dir(MODEL).glob(f"weights.{name}.*")))


def test_behind_a_damaged_version_the_last_good_one_is_not_replaced_whatever_the_grace(tmp_path: Path) -> None:
    vault, clock = new_vault(tmp_path), Clock()
    save(vault, named("n"), seed=1, created=clock.stamp())
    public = save(vault, named("n"), seed=2, created=clock.stamp(1), overwrite=True)
    save(vault, named("other"), seed=3, created=clock.stamp(2))
    no_grace = Rules(replaced_grace_s=0)
    clock.forward(60)
    (vault.version_dir(public) / "manifest.json").write_bytes(b"{}")
    assert removed(collector(vault, clock, no_grace).collect()) == []
    recover(vault)
    assert load(vault, named("n")) == contents(1)


def test_a_replaced_version_goes_after_its_grace_which_starts_when_it_was_replaced(tmp_path: Path) -> None:
    vault, clock = new_vault(tmp_path), Clock()
    save(vault, named("n"), seed=1, created=clock.stamp())
    collect = collector(vault, clock)
    clock.forward(10_000)
    assert removed(collect.collect()) == []
    save(vault, named("n"), seed=2, overwrite=True, created=clock.stamp())
    clock.forward(599)
    assert (removed(collect.collect()), num_versions(vault)) == ([], 2)
    clock.forward(1)
    assert collect.plan()[0][0].reason == "replaced"
    done = collect.collect()
    assert removed(done) == [("n", "replaced")]
    assert done.freed_bytes > 0
    assert (num_versions(vault), load(vault, named("n")), leftovers(vault)) == (1, contents(2), [])
    assert removed(collect.collect()) == []


@pytest.mark.parametrize("jump", [timedelta(hours=-1), timedelta(days=400)])
def test_a_clock_that_jumps_while_the_service_runs_changes_no_grace(tmp_path: Path, jump: timedelta) -> None:
    vault, clock = new_vault(tmp_path), Clock()
    save(vault, named("n"), seed=1, created=clock.stamp())
    collect = collector(vault, clock)
    collect.collect()
    clock.forward(60)
    save(vault, named("n"), seed=2, overwrite=True, created=clock.stamp())
    clock.wall += jump
    clock.forward(60)
    assert removed(collect.collect()) == []
    clock.forward(479)
    assert removed(collect.collect()) == [], "the sweep before cannot have seen it replaced"
    clock.forward(121)
    assert removed(collect.collect()) == [("n", "replaced")]


def test_one_look_with_the_service_down_believes_the_manifests(tmp_path: Path) -> None:
    vault, clock = new_vault(tmp_path), Clock()
    for seed in (1, 2):
        save(vault, named("n"), seed=seed, overwrite=True, created=clock.stamp())
    clock.forward(700)
    assert removed(collector(vault, clock).collect()) == [("n", "replaced")]


def test_an_expired_checkpoint_goes_with_what_it_replaced_also_when_it_is_the_last(tmp_path: Path) -> None:
    vault, clock = new_vault(tmp_path), Clock()
    for seed in (1, 2):
        save(vault, named("n"), seed=seed, overwrite=True, created=clock.stamp(), expires=clock.stamp(3600))
    collect = collector(vault, clock, Rules(replaced_grace_s=1e9))
    clock.forward(3599)
    assert removed(collect.collect()) == []
    clock.forward(1)
    assert removed(collect.collect()) == [("n", "expired"), ("n", "expired")]
    assert (load(vault, named("n")), num_versions(vault)) == (None, 0)
    assert list(vault.retention_dir(MODEL).iterdir()) == []
    save(vault, named("n"), seed=3)
    assert removed(collect.collect()) == []


def test_a_ttl_set_later_counts_and_one_that_was_removed_does_not(tmp_path: Path) -> None:
    vault, clock = new_vault(tmp_path), Clock()
    lengthened = version_of(save(vault, named("longer"), created=clock.stamp(), expires=clock.stamp(3600)))
    removed_ttl = version_of(save(vault, named("removed"), created=clock.stamp(), expires=clock.stamp(3600)))
    shortened = version_of(save(vault, named("shorter"), created=clock.stamp()))
    write_records(
        vault,
        MODEL,
        {
            lengthened: RetentionRecord(expires=clock.stamp(7200)),
            removed_ttl: RetentionRecord(expires=None),
            shortened: RetentionRecord(expires=clock.stamp(4000)),
        },
    )
    collect = collector(vault, clock)
    clock.forward(5000)
    assert removed(collect.collect()) == [("shorter", "expired")]
    clock.forward(5000)
    assert removed(collect.collect()) == [("longer", "expired")]
    clock.forward(1e8)
    assert removed(collect.collect()) == []


def test_a_pinned_checkpoint_stays_is_not_overwritten_and_not_deleted_until_it_is_unpinned(tmp_path: Path) -> None:
    vault, clock = new_vault(tmp_path), Clock()
    version = version_of(save(vault, named("n"), created=clock.stamp(), expires=clock.stamp(3600)))
    write_records(vault, MODEL, {version: RetentionRecord(pinned=True)})
    for name in ("later", "latest"):
        save(vault, named(name), created=clock.stamp())
    collect = collector(vault, clock, Rules(keep_last=1))
    clock.forward(1e6)
    assert removed(collect.collect()) == [("later", "not_kept")]
    before = state(tmp_path)
    with pytest.raises(CheckpointPinned):
        delete_checkpoint(vault, named("n"))
    with pytest.raises(NamePinned):
        save(vault, named("n"), seed=2, overwrite=True)
    assert state(tmp_path) == before
    write_records(vault, MODEL, {version: NO_RECORD})
    assert removed(collect.collect()) == [("n", "expired")]


def test_a_leased_or_held_version_stays_until_it_is_let_go(tmp_path: Path) -> None:
    vault, clock = new_vault(tmp_path), Clock()
    told = save(vault, named("n"), created=clock.stamp(), expires=clock.stamp(10))
    clock.forward(20)
    lease = vault.lease(told)
    assert lease is not None
    with lease:
        done = collector(vault, clock).collect()
        assert (removed(done), [due.version for due in done.kept]) == ([], [version_of(told)])
        assert vault.resolve(named("n")) is None, "the name is gone at once"
    done = collector(vault, clock, held={told}).collect()
    assert (removed(done), len(done.kept)) == ([], 1)
    assert removed(collector(vault, clock).collect()) == [("n", "expired")]


def test_what_a_deletion_had_to_leave_goes_with_the_next_collection_and_is_not_brought_back(tmp_path: Path) -> None:
    vault, clock = new_vault(tmp_path), Clock()
    told = save(vault, named("n"))
    lease = vault.lease(told)
    assert lease is not None
    with lease:
        delete_checkpoint(vault, named("n"))
        recover(vault)
        assert vault.resolve(named("n")) is None
        assert vault.version_dir(told).exists()
    assert removed(collector(vault, clock).collect()) == [("n", "deleted")]


def test_frozen_versions_are_left_for_a_start_up(tmp_path: Path) -> None:
    vault, clock = new_vault(tmp_path), Clock()
    save(vault, named("n"), created=clock.stamp())
    freeze(vault, named("n"), overwrite=True, created=clock.stamp())
    freeze(vault, named("m"), created=clock.stamp())
    clock.forward(1e6)
    assert removed(collector(vault, clock).collect()) == []


def test_the_last_good_version_behind_one_that_was_damaged_since_stays(tmp_path: Path) -> None:
    vault, clock = new_vault(tmp_path), Clock()
    save(vault, named("n"), seed=1, created=clock.stamp())
    told = save(vault, named("n"), seed=2, overwrite=True, created=clock.stamp())
    collect = collector(vault, clock)
    collect.collect()
    damage(vault, told)
    clock.forward(1e6)
    assert removed(collect.collect()) == []
    recover(vault)
    assert load(vault, named("n")) == contents(1)


def test_the_last_finite_version_behind_one_that_is_not_stays(tmp_path: Path) -> None:
    vault, clock = new_vault(tmp_path), Clock()
    for seed, non_finite in ((1, False), (2, True), (3, True)):
        save(vault, named("n"), seed=seed, overwrite=True, created=clock.stamp(), non_finite=non_finite)
    clock.forward(1e6)
    collect = collector(vault, clock)
    assert len(removed(collect.collect())) == 1
    kept = [version_of(str(path)) for path in vault.versions_dir(MODEL).iterdir()]
    assert len(kept) == 2
    save(vault, named("n"), seed=4, overwrite=True, created=clock.stamp())
    clock.forward(1e6)
    assert len(removed(collect.collect())) == 2


def test_with_keep_last_one_a_complete_checkpoint_is_there_after_every_save_that_fails_or_dies(tmp_path: Path) -> None:
    vault, clock = new_vault(tmp_path, UnsyncedDisk()), Clock()
    collect = collector(vault, clock, Rules(keep_last=1))
    save(vault, named("first"), created=clock.stamp())
    disk = RecordingDisk()
    save(Vault(tmp_path, disk), named("counted"), created=clock.stamp())
    for number in range(0, len(disk.calls), 3):
        clock.forward(1000)
        with pytest.raises(Crash):
            save(Vault(tmp_path, CrashingDisk(number)), named(f"n{number}"), created=clock.stamp())
        collect.collect()
        sweep_staging(vault)
        good = [path for path in vault.kind_dir(named("x")).iterdir() if load(vault, named(path.name)) == contents(1)]
        assert good, f"a save that died before call {number} cost the last checkpoint"


def prepared(root: Path, disk: Disk | None = None) -> tuple[Vault, Clock]:
    """An expired name with a version behind it, a replaced version, and one that keep-last drops."""
    vault, clock = new_vault(root, UnsyncedDisk()), Clock()
    for name, expires in (("expired", clock.stamp(3600)), ("replaced", None)):
        for seed in (1, 2):
            save(vault, named(name), seed=seed, overwrite=True, created=clock.stamp(), expires=expires)
    for name in ("dropped", "kept"):
        save(vault, named(name), created=clock.stamp())
    clock.forward(1e6)
    return vault, clock


KEEP_TWO = Rules(keep_last=2)


def check_deaths(root: Path, every: int, end: str) -> None:
    scene, clock = prepared(root / "scene")
    whole = copy_of(scene, root / "whole", UnsyncedDisk())
    assert len(collector(whole, clock, KEEP_TWO).collect().removed) == 4
    expected = state(whole.root)
    disk = RecordingDisk()
    collector(copy_of(scene, root / "counted", disk), clock, KEEP_TWO).collect()  # type: ignore[arg-type]
    for at in range(0, len(disk.calls), every):
        vault = copy_of(scene, root / str(at), UnsyncedDisk())
        with pytest.raises(Crash):
            collector(Vault(vault.root, CrashingDisk(at)), clock, KEEP_TWO).collect()
        if end == "recovered":
            recovered = recover(vault)
            assert {finding.what for finding in recovered.findings} <= {"deleted"}, "nothing comes back"
        collector(vault, clock, KEEP_TWO).collect()
        sweep_staging(vault)
        assert state(vault.root) == expected, f"died before call {at}"


@pytest.mark.parametrize("end", ["recovered", "collected"])
def test_a_collection_that_died_anywhere_is_ended_by_the_next(tmp_path: Path, end: str) -> None:
    check_deaths(tmp_path, 17, end)


@pytest.mark.full
@pytest.mark.parametrize("end", ["recovered", "collected"])
def test_a_collection_that_died_at_any_call_is_ended_by_the_next(tmp_path: Path, end: str) -> None:
    check_deaths(tmp_path, 1, end)


def test_an_error_in_one_model_is_told_and_the_others_are_collected(tmp_path: Path) -> None:
    vault, clock = new_vault(tmp_path), Clock()
    for model_id in ("a", "b"):
        for seed in (1, 2):
            save(vault, named("n", model_id), seed=seed, overwrite=True, created=clock.stamp())
    clock.forward(1e6)
    disk = FailingDisk(3)
    done = collector(Vault(tmp_path, disk), clock).collect()
    assert disk.failed is not None
    assert len(done.errors) == 1
    assert done.errors[0].startswith("a: ")
    assert [due.address.model_id for due in done.removed] == ["b"]
    assert [due.address.model_id for due in collector(vault, clock).collect().removed] == ["a"]


def test_a_dry_run_tells_all_and_changes_nothing(tmp_path: Path) -> None:
    scene, clock = prepared(tmp_path / "scene")
    before = state(scene.root)
    due, errors = collector(scene, clock, KEEP_TWO).plan()
    assert errors == []
    assert state(scene.root) == before
    done = collector(scene, clock, KEEP_TWO).collect()
    assert set(due) == set(done.removed)
