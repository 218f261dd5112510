"""What ext4 and xfs really keep of a save when their disk goes away in the middle of it."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.crash.block import CutOffDisk, copy_image, make_image, mounted, skip_without, sync_something_else
from tests.crash.block_log import logging_disk, read_log, replay
from tests.crash.workload import (
    ADDRESS,
    BYSTANDER,
    BYSTANDING,
    NEW,
    OLD,
    Allowed,
    Pending,
    Violation,
    check_recovery,
    save,
    states,
)
from tests.crash.wrong_orders import reference_save
from tests.trainer_cell.vault.disks import Crash
from trainer_cell.vault.layout import Vault

KINDS = ("ext4", "xfs")
Save = Callable[[Vault], object]
ORDERS: dict[str, Save] = {
    "ours": lambda vault: save(vault, NEW, overwrite=True, shards=2),
    "the reference": lambda vault: reference_save(vault, NEW, shards=2),
}


@pytest.fixture
def fresh(scratch: Path) -> Callable[[str, bool], Path]:
    """An image with a vault on it, that of `prepared` but durable."""

    def make(kind: str, overwrite: bool) -> Path:
        skip_without(kind)
        image = scratch / f"{kind}-{overwrite}"
        make_image(kind, image)
        with mounted(image, scratch / "mount") as mount:
            vault = Vault(mount / "root")
            vault.create()
            save(vault, BYSTANDING, BYSTANDER, command="c-other")
            if overwrite:
                save(vault, OLD, command="c-old")
        return image

    return make


def cut_off(image: Path, mount: Path, act: Save, at: int) -> bool:
    """Whether the save was acknowledged before its file system was cut off, at change `at` or at the end."""
    with mounted(image, mount):
        disk = CutOffDisk(mount, at)
        try:
            act(Vault(mount / "root", disk))
        except Crash:
            return False
        disk.cut_off()
        return True


def check(image: Path, mount: Path, is_acknowledged: bool, overwrite: bool, with_settlement: bool = True) -> None:
    allowed: Allowed = states([NEW] if is_acknowledged else [OLD if overwrite else None, NEW])
    with mounted(image, mount):
        pending = Pending(ADDRESS, NEW, True) if with_settlement else None
        check_recovery(mount / "root", allowed, pending, boots=not with_settlement)


def violations(fresh: Path, scratch: Path, act: Save, overwrite: bool, points: Iterator[int]) -> tuple[int, list[str]]:
    """How many points there were, and what was wrong after which."""
    found = []
    image = scratch / "cut"
    for number, at in enumerate(points, 1):
        copy_image(fresh, image)
        is_acknowledged = cut_off(image, scratch / "mount", act, at)
        try:
            check(image, scratch / "mount", is_acknowledged, overwrite, with_settlement=number % 2 == 0)
        except Violation as violation:
            found.append(f"change {at}: {violation}")
        if is_acknowledged:
            return number, found
    raise AssertionError("no point was the last")


def test_ext4_keeps_an_acknowledged_save_and_not_that_of_the_reference_order(
    fresh: Callable[[str, bool], Path], scratch: Path
) -> None:
    image = fresh("ext4", True)
    found = {name: violations(image, scratch, act, True, iter([10_000]))[1] for name, act in ORDERS.items()}
    assert found["ours"] == []
    assert len(found["the reference"]) == 1


@pytest.mark.full
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_goes_away_at_any_change_leaves_the_old_or_the_new(
    fresh: Callable[[str, bool], Path], scratch: Path, kind: str, overwrite: bool
) -> None:
    image = fresh(kind, overwrite)
    points, found = violations(image, scratch, ORDERS["ours"], overwrite, count())
    assert found == []
    assert points > 20


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_order_is_caught_losing_data_on(
    fresh: Callable[[str, bool], Path], scratch: Path, kind: str
) -> None:
    _, found = violations(fresh(kind, True), scratch, ORDERS["the reference"], True, count(0, 4))
    assert any("is published and damaged" in violation for violation in found), found


def need_fuse() -> None:
    try:
        importlib.import_module("mfusepy")
    except (ImportError, OSError) as error:
        pytest.skip(f"mfusepy does not work here: {error}")
    if not Path("/dev/fuse").exists():
        pytest.skip("no /dev/fuse")


def crash_images(fresh: Path, scratch: Path, act: Save, seed: int) -> tuple[int, list[str]]:
    """Log a save's writes to its disk; then replay each prefix that a flush ends, with any of the writes after it."""
    log = scratch / "log"
    live = scratch / "live"
    copy_image(fresh, live)
    with logging_disk(live, log, scratch / "fuse") as disk:
        with mounted(disk, scratch / "mount") as mount:
            act(Vault(mount / "root"))
            acknowledged_at = log.stat().st_size
            sync_something_else(mount)
    epochs, starts = read_log(log)
    found = []
    for until in range(len(epochs)):
        image = scratch / "replayed"
        copy_image(fresh, image)
        replay(epochs, until, image, random.Random(f"{seed} {until}"))
        try:
            check(image, scratch / "mount", starts[until] >= acknowledged_at, overwrite=True)
        except Violation as violation:
            found.append(f"flush {until}: {violation}")
    return len(epochs), found


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_disk_has_written_after_any_flush_is_the_old_or_the_new(
    fresh: Callable[[str, bool], Path], scratch: Path, kind: str, seed: int
) -> None:
    need_fuse()
    images, found = crash_images(fresh(kind, True), scratch, ORDERS["ours"], seed)
    assert found == []
    assert images > 8


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_the_block_log_catches_the_reference_order_on(
    fresh: Callable[[str, bool], Path], scratch: Path, kind: str
) -> None:
    need_fuse()
    _, found = crash_images(fresh(kind, True), scratch, ORDERS["the reference"], 0)
    assert found != []
