"""SIGKILL, or an error, at every single call to the system that a save, a load, a delete or a recovery makes."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.crash.aftermath import crashed_delete, crashed_overwrite, overwritten, unanswered_overwrite
from tests.crash.injection import Driver, needs_strace
from tests.crash.workload import (
    ADDRESS,
    BYSTANDER,
    COMMAND,
    NEW,
    OLD,
    Pending,
    State,
    check_recovery,
    demand,
    prepared,
    states,
)

pytestmark = needs_strace

KILL = "signal=SIGKILL"
MAKES_OR_WRITES = frozenset(
    {
        "openat",
        "mkdir",
        "symlink",
        "rename",
        "fallocate",
        "pwrite64",
        "pwritev",
        "pwritev2",
        "write",
        "fsync",
        "ftruncate",
        "close",
    }
)
NAMES = frozenset({"openat", "mkdir", "rmdir", "symlink", "rename", "unlink", "getdents64", "readlink", "newfstatat"})
# What, and at which calls; None: at all.
FAULTS: dict[str, frozenset[str] | None] = {
    KILL: None,
    "error=EIO": None,
    "error=ENOSPC": MAKES_OR_WRITES,
    "error=EDQUOT": MAKES_OR_WRITES,
    "error=EACCES": NAMES,
    # Of a file system that takes no unbuffered writes.
    "error=EINVAL": frozenset({"fcntl", "pwrite64", "pwritev", "pwritev2"}),
}


@dataclass(frozen=True)
class Scenario:
    prepare: Callable[[Path], object]
    job: dict[str, object]
    before: State
    after: State
    pending: Pending | None = None
    # What is said of a success, if it is always the same; `...`: something.
    told: object = None


def _save(overwrite: bool, shards: int) -> Scenario:
    job = {"action": "save", "overwrite": overwrite, "shards": shards}
    before = OLD if overwrite else None
    return Scenario(
        partial(prepared, overwrite=overwrite, shards=shards), job, before, NEW, Pending(ADDRESS, NEW, overwrite)
    )


LOAD: dict[str, object] = {"action": "load"}
RECOVER: dict[str, object] = {"action": "recover", "overwrite": True}
SCENARIOS = {
    **{f"save by {shards}": _save(False, shards) for shards in (1, 2)},
    **{f"overwrite by {shards}": _save(True, shards) for shards in (1, 2)},
    **{
        f"load of {shards}": Scenario(partial(prepared, overwrite=True, shards=shards), LOAD, OLD, OLD, told=OLD
        )
        for shards in (1, 2)
    },
    "delete": Scenario(overwritten, {"action": "delete"}, OLD, None, told=True),
    "delete again": Scenario(crashed_delete, {"action": "delete"}, None, None, told=False),
    "start-up": Scenario(crashed_overwrite, {"action": "start-up"}, OLD, NEW, Pending(ADDRESS, NEW, True)),
    "recovery": Scenario(crashed_overwrite, RECOVER, OLD, NEW, Pending(ADDRESS, NEW, True)),
    "recovery of the unanswered": Scenario(unanswered_overwrite, RECOVER, NEW, NEW, Pending(ADDRESS, NEW, True), ...),
}  # fmt: skip
SAMPLE = 40


@dataclass(frozen=True)
class Point:
    scenario: str
    fault: str
    call: str
    number: int


def points(driver: Driver, name: str, scratch: Path) -> list[Point]:
    """Every call the scenario makes, with every fault that can come of it."""
    scenario = SCENARIOS[name]
    root = scratch / "counted"
    scenario.prepare(root)
    counted = driver.count({**scenario.job, "root": str(root)}, scratch / "trace")
    shutil.rmtree(root)
    assert counted["openat"] > 3
    return [
        Point(name, fault, call, number)
        for fault, calls in FAULTS.items()
        for call, count in sorted(counted.items())
        if calls is None or call in calls
        for number in range(1, count + 1)
    ]


def check(driver: Driver, point: Point, root: Path) -> str:
    """Inject and look what has become of it; how it ended."""
    scenario = SCENARIOS[point.scenario]
    scenario.prepare(root)
    inject = f"inject={point.call}:{point.fault}:when={point.number}"
    said = driver.run({**scenario.job, "root": str(root)}, "-e", inject)
    ending, allowed = judge(said, scenario)
    failed = [COMMAND] if ending == "failed" and said.get("failed") != "PublishUnknown" else []
    failed = failed if scenario.job["action"] == "save" else []
    if "done" in said and scenario.told is not None:
        demand(said["done"] == scenario.told or (scenario.told is ... and said["done"] is not None), str(said))
    check_recovery(root, states(allowed, [BYSTANDER]), scenario.pending, boots=point.number % 2 == 0, failed=failed)
    shutil.rmtree(root)
    return ending


def judge(said: dict[str, Any], scenario: Scenario) -> tuple[str, list[State]]:
    """How it ended, and what may be on disk then."""
    if "signal" in said:
        return "killed", [scenario.before, scenario.after]
    demand("untyped" not in said, f"an untyped failure: {said}")
    if scenario.job["action"] == "start-up":
        # What it could not recover it tells, and leaves.
        return "failed" if said.get("done") != [] else "done", [scenario.before, scenario.after]
    if "done" in said:
        return "done", [scenario.before if said["done"] is None else scenario.after]
    if said["failed"] == "PublishUnknown" or scenario.job["action"] in ("delete", "recover"):
        return "failed", [scenario.before, scenario.after]
    return "failed", [scenario.before]


def sweep(driver: Driver, chosen: list[Point], scratch: Path) -> set[str]:
    violations, endings = [], set()
    for number, point in enumerate(chosen):
        try:
            endings.add(check(driver, point, scratch / str(number)))
        except AssertionError as violation:
            violations.append(f"{point}: {violation}")
    assert violations == []
    return endings


def test_a_kill_or_an_error_at_a_call_leaves_the_old_or_the_new(driver: Driver, scratch: Path) -> None:
    every = list(itertools.chain(*(points(driver, name, scratch) for name in SCENARIOS)))
    assert len(every) > 1000
    endings = sweep(driver, random.Random(0).sample(every, SAMPLE), scratch)
    assert endings >= {"killed", "failed"}


@pytest.mark.full
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_kill_or_an_error_at_every_call_leaves_the_old_or_the_new(driver: Driver, scratch: Path, name: str) -> None:
    endings = sweep(driver, points(driver, name, scratch), scratch)
    assert endings >= {"killed", "failed"}
