"""A power cut after every single change that a save, a delete or a recovery makes to the disk."""

from __future__ import annotations

import errno
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.crash.aftermath import crashed_delete, crashed_overwrite, overwritten, unanswered_overwrite
from tests.crash.power import STRATEGIES, Log, PoweredDisk, Strategy, SyncFailed, Wrote
from tests.crash.workload import (
    ADDRESS,
    BYSTANDER,
    COMMAND,
    NEW,
    NEXT_EPOCH,
    NUM_BYTES,
    OLD,
    Pending,
    State,
    Violation,
    check_recovery,
    pieces,
    prepared,
    save,
    states,
)
from tests.crash.wrong_orders import FirstTimes, RetryingDisk, SyncedTooEarly, ThroughDisk, reference_save
from trainer_cell.vault.collect import Collector
from trainer_cell.vault.deletion import delete_checkpoint
from trainer_cell.vault.errors import AlreadyThere, CheckpointExists, StorageFailed
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.publish import abandon, begin, sweep_staging
from trainer_cell.vault.recovery import settle_publish
from trainer_cell.vault.retention import Rules
from trainer_cell.vault.shard_file import write_shard
from trainer_cell.vault.startup import recover

SAME_MODEL = CheckpointAddress(ADDRESS.model_id, "weights", "m")


@dataclass(frozen=True)
class Scenario:
    """prepare: fills the root. act: what is cut. before, after: what `ADDRESS` holds."""

    prepare: Callable[[Path], object]
    act: Callable[[Vault], object]
    before: State
    after: State
    pending: Pending | None = None
    others: tuple[CheckpointAddress, ...] = (BYSTANDER,)
    # Whether the command is told to have failed, once the act is over.
    fails: bool = False


def _boot_and_save(vault: Vault) -> None:
    vault.create()
    save(vault, NEW, shards=2)


def _start_up(vault: Vault) -> None:
    vault.create()
    assert recover(vault).errors == ()


def _collect(vault: Vault) -> None:
    assert Collector(vault, Rules(replaced_grace_s=0)).collect().freed_bytes > 0


def _recover(vault: Vault) -> None:
    vault.create()
    sweep_staging(vault)
    assert settle_publish(vault, ADDRESS, COMMAND, True, NEXT_EPOCH) is not None
    sweep_staging(vault)


def _give_up(vault: Vault) -> None:
    staging = begin(vault, ADDRESS, True, NUM_BYTES, "EPOCH1")
    write_shard(staging, "rank00000.safetensors", pieces(NEW))
    abandon(staging)


FIRST, REPLACING = Pending(ADDRESS, NEW, False), Pending(ADDRESS, NEW, True)

SCENARIOS = {
    "the first save of all": Scenario(lambda root: None, _boot_and_save, None, NEW, FIRST, others=()),
    "a model's first save": Scenario(
        lambda root: prepared(root, overwrite=False), lambda vault: save(vault, NEW), None, NEW, FIRST
    ),
    "a model's second name": Scenario(
        lambda root: prepared(root, overwrite=False, also=(SAME_MODEL,)),
        lambda vault: save(vault, NEW, shards=2),
        None, NEW, FIRST, others=(SAME_MODEL,),
    ),
    "an overwrite": Scenario(
        lambda root: prepared(root, overwrite=True), lambda vault: save(vault, NEW, overwrite=True), OLD, NEW, REPLACING
    ),
    "an overwrite by two ranks": Scenario(
        lambda root: prepared(root, overwrite=True, shards=2),
        lambda vault: save(vault, NEW, overwrite=True, shards=2),
        OLD, NEW, REPLACING,
    ),
    "a save that is given up": Scenario(lambda root: prepared(root, overwrite=True), _give_up, OLD, OLD),
    "a delete": Scenario(overwritten, lambda vault: delete_checkpoint(vault, ADDRESS), OLD, None),
    "a delete of what a delete has left": Scenario(
        crashed_delete, lambda vault: delete_checkpoint(vault, ADDRESS), None, None
    ),
    "a recovery": Scenario(crashed_overwrite, _recover, OLD, NEW, REPLACING),
    "a start-up": Scenario(crashed_overwrite, _start_up, OLD, NEW, REPLACING),
    "a start-up after half a delete": Scenario(crashed_delete, _start_up, None, None),
    "a collection of what was replaced": Scenario(overwritten, _collect, OLD, OLD),
    "a recovery of what was not answered": Scenario(unanswered_overwrite, _recover, NEW, NEW, REPLACING),
}  # fmt: skip


def record(scenario: Scenario, top: Path, on: Callable[[Path], PoweredDisk] = PoweredDisk) -> Log:
    top.mkdir()
    scenario.prepare(top / "root")
    disk = on(top)
    scenario.act(Vault(top / "root", disk))
    disk.say("acknowledged")
    return disk.log


@dataclass
class Sweep:
    points: int = 0
    disks: int = 0
    violations: list[str] = field(default_factory=list)
    seen: set[State] = field(default_factory=set)


def sweep(scenario: Scenario, log: Log, disks: Path, strategies: Sequence[Strategy], seed: int) -> Sweep:
    """Cut the power after each change, boot on what is left. Disks that look alike are looked at once."""
    done = Sweep()
    known: set[object] = set()
    disks.mkdir()
    for at in range(log.base, len(log.changes) + 1):
        is_acknowledged = bool(log.said_before(at))
        allowed = states([scenario.after] if is_acknowledged else [scenario.before, scenario.after], scenario.others)
        for number, strategy in enumerate(strategies):
            done.points += 1
            image = log.image(at, strategy, random.Random(f"{seed} {at} {number}"))
            look = (image.tree(), is_acknowledged)
            if look in known:
                continue
            known.add(look)
            top = disks / str(done.disks)
            done.disks += 1
            image.write(top)
            failed = [COMMAND] if scenario.fails else []
            try:
                # Half of them by a start-up: that makes a frozen save visible unless it is told to have failed.
                boots = done.disks % 2 == 0
                found = check_recovery(top / "root", allowed, scenario.pending, boots, failed)
                done.seen.add(found[ADDRESS])
            except Violation as violation:
                done.violations.append(f"after change {at}, {strategy}: {violation}")
            shutil.rmtree(top)
    return done


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_power_cut_after_any_change_leaves_what_was_acknowledged_and_nothing_mixed(scratch: Path, name: str) -> None:
    scenario = SCENARIOS[name]
    done = sweep(scenario, record(scenario, scratch / "recorded"), scratch / "disks", STRATEGIES, seed=0)
    assert done.violations == []
    assert {scenario.after} <= done.seen <= {scenario.before, scenario.after}
    assert done.points > 50


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("name", SCENARIOS)
def test_whatever_part_of_the_unsynced_a_power_cut_takes(scratch: Path, name: str, seed: int) -> None:
    scenario = SCENARIOS[name]
    log = record(scenario, scratch / "recorded")
    by_chance: tuple[Strategy, ...] = ("part of the journal", "part of each directory", "anything")
    assert sweep(scenario, log, scratch / "disks", by_chance * 4, seed).violations == []


def test_several_writes_make_a_shard_so_that_a_cut_comes_between_them(scratch: Path) -> None:
    scenario = SCENARIOS["a model's first save"]
    log = record(scenario, scratch / "recorded")
    writes = Counter(change.node for change in log.changes[log.base :] if isinstance(change, Wrote))
    assert max(writes.values()) > NUM_BYTES // 4096


REFERENCE = {
    False: Scenario(lambda root: prepared(root, False), lambda vault: reference_save(vault, NEW, 2), None, NEW),
    True: Scenario(lambda root: prepared(root, True), lambda vault: reference_save(vault, NEW, 2), OLD, NEW),
}


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_reference_order_is_caught_losing_what_it_acknowledged_and_publishing_what_is_damaged(
    scratch: Path, overwrite: bool
) -> None:
    scenario = REFERENCE[overwrite]
    done = sweep(scenario, record(scenario, scratch / "recorded"), scratch / "disks", STRATEGIES, seed=0)
    found = "\n".join(done.violations)
    assert "is published and damaged" in found
    assert f"holds {scenario.before}, not one of ['{NEW}']" in found


NEEDED_SYNCS: dict[str, Callable[[Path], bool]] = {
    "of a shard": lambda path: path.name == "rank00001.safetensors",
    "of the manifest": lambda path: path.name == "manifest.json",
    "of the staging directory": lambda path: path.parent.name == ".staging" and path.name.startswith("EPOCH1."),
    "of the versions": lambda path: path.name == ".versions",
    "of the names": lambda path: path.name == "weights",
    "of the model's directory": lambda path: path.name == "s-1~train~0",
    "of the root": lambda path: path.name == "root",
    "of the root's parent": lambda path: path.name == "recorded",
}


@pytest.mark.parametrize("which", NEEDED_SYNCS)
def test_a_single_sync_left_out_is_caught(scratch: Path, which: str) -> None:
    def on(top: Path) -> PoweredDisk:
        return PoweredDisk(top, ignores=NEEDED_SYNCS[which])

    scenario = SCENARIOS["the first save of all"]
    log = record(scenario, scratch / "recorded", on)
    assert sweep(scenario, log, scratch / "disks", STRATEGIES, seed=0).violations != []


def test_a_delete_whose_names_are_not_synced_is_caught(scratch: Path) -> None:
    def on(top: Path) -> PoweredDisk:
        return PoweredDisk(top, ignores=lambda path: path.name == "weights")

    scenario = SCENARIOS["a delete"]
    log = record(scenario, scratch / "recorded", on)
    assert sweep(scenario, log, scratch / "disks", STRATEGIES, seed=0).violations != []


def test_data_written_after_its_sync_is_caught(scratch: Path) -> None:
    scenario = SCENARIOS["an overwrite"]
    log = record(scenario, scratch / "recorded", SyncedTooEarly)
    found = "\n".join(sweep(scenario, log, scratch / "disks", STRATEGIES, seed=0).violations)
    assert "is published and damaged" in found


@pytest.mark.parametrize("name", ["a model's first save", "an overwrite"])
def test_a_name_whose_first_syncs_fail_is_durable_once_it_is_acknowledged(scratch: Path, name: str) -> None:
    def on(top: Path) -> PoweredDisk:
        return PoweredDisk(top, fails=FirstTimes(2, lambda path: path.name == "weights"))

    scenario = SCENARIOS[name]
    log = record(scenario, scratch / "recorded", on)
    assert sum(isinstance(change, SyncFailed) for change in log.changes) == 2
    done = sweep(scenario, log, scratch / "disks", STRATEGIES, seed=0)
    assert done.violations == []
    assert done.seen == {scenario.before, scenario.after}


def _save_in_vain(vault: Vault) -> None:
    with pytest.raises(StorageFailed, match="EIO"):
        save(vault, NEW, overwrite=True, shards=2)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 9))])
@pytest.mark.parametrize("which", ["rank00001.safetensors", "manifest.json", ".versions"])
def test_a_save_whose_sync_fails_changes_nothing_whatever_comes_then(scratch: Path, which: str, seed: int) -> None:
    def on(top: Path) -> PoweredDisk:
        return PoweredDisk(top, fails=FirstTimes(1, lambda path: path.name == which))

    scenario = Scenario(lambda root: prepared(root, overwrite=True), _save_in_vain, OLD, OLD, fails=True)
    log = record(scenario, scratch / "recorded", on)
    by_chance: tuple[Strategy, ...] = ("anything",) * 4
    assert sweep(scenario, log, scratch / "disks", STRATEGIES + by_chance, seed).violations == []


def _save_over_a_taken_name(vault: Vault) -> None:
    """The name is taken between the freeze and the link."""
    with pytest.raises(CheckpointExists):
        save(Vault(vault.root, TakenAtTheLast(vault.disk)), NEW)


class TakenAtTheLast(ThroughDisk):
    def symlink(self, target: str, path: Path) -> None:
        if path.name == "n":
            raise AlreadyThere("symlink", path, errno.EEXIST)
        super().symlink(target, path)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 9))])
def test_a_frozen_version_that_is_taken_back_never_comes_back_in_part(scratch: Path, seed: int) -> None:
    scenario = Scenario(lambda root: prepared(root, overwrite=False), _save_over_a_taken_name, None, None, fails=True)
    log = record(scenario, scratch / "recorded")
    by_chance: tuple[Strategy, ...] = ("anything",) * 12
    assert sweep(scenario, log, scratch / "disks", STRATEGIES + by_chance, seed).violations == []


def test_a_failed_sync_that_is_tried_again_on_the_same_file_is_caught(scratch: Path) -> None:
    scenario = SCENARIOS["an overwrite"]
    log = record(scenario, scratch / "recorded", RetryingDisk)
    found = "\n".join(sweep(scenario, log, scratch / "disks", STRATEGIES, seed=0).violations)
    assert "is published and damaged" in found
