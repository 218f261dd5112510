"""SIGKILL, or an error, at every single call to the system that the journal makes on its files."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.store.journal import Journal
from tests.crash.injection import Driver, needs_strace, running_driver
from tests.crash.journal_work import SEED_STEPS, STEPS, Working, check, seed
from tests.crash.workload import Violation, demand
from tests.gateway.store.rows import url_of

pytestmark = needs_strace

KILL = "signal=SIGKILL"
WRITES = frozenset({"pwrite64", "write", "fdatasync", "fsync", "ftruncate", "openat", "fallocate"})
LOCKS = frozenset({"fcntl", "flock"})
READS = frozenset({"pread64", "read", "newfstatat", "fstat", "lstat", "stat", "unlink", "close", "getdents64"})
# What, and at which calls; None: at all.
FAULTS: dict[str, frozenset[str] | None] = {
    KILL: None,
    "error=EIO": WRITES | READS,
    "error=ENOSPC": WRITES,
    "error=ENOLCK": LOCKS,
}
# SQLite waits for ten seconds for a lock that it could not let go of: one in so many of them is tried.
EVERY_LOCK = 12
SAMPLE = 40


@dataclass(frozen=True)
class Scenario:
    """has_seed: the seed is there before; was_killed: left by a process that did not close it. dies_refused: whoever is
    refused is killed at once."""

    has_seed: bool
    was_killed: bool
    opens: bool
    dies_refused: bool = False

    def prepare(self, root: Path) -> None:
        root.mkdir()
        if self.has_seed:
            asyncio.run(_seeded(root, self.was_killed))

    def job(self, root: Path) -> dict[str, object]:
        return {"root": str(root), "opens": self.opens, "seeds": not self.has_seed, "dies_refused": self.dies_refused}

    @property
    def before(self) -> tuple[str, ...]:
        return SEED_STEPS if self.has_seed else ()


SCENARIOS = {
    "a new journal": Scenario(has_seed=False, was_killed=False, opens=True),
    "a journal of before": Scenario(has_seed=True, was_killed=False, opens=False),
    "a journal of one who dies refused": Scenario(has_seed=True, was_killed=False, opens=False, dies_refused=True),
    "a journal after a crash": Scenario(has_seed=True, was_killed=True, opens=True),
}


async def _seeded(root: Path, was_killed: bool) -> None:
    journal = Journal.open(url_of(root))
    await seed(Working(journal, lambda *_: None))
    if was_killed:
        shutil.copytree(root, root.with_suffix(".killed"), ignore=shutil.ignore_patterns("*-shm"))
    await journal.close()
    if was_killed:
        shutil.rmtree(root)
        root.with_suffix(".killed").rename(root)
        assert (root / "journal.sqlite3-wal").stat().st_size > 0


@dataclass(frozen=True)
class Point:
    scenario: str
    fault: str
    call: str
    number: int
    # Also at every later call.
    lasts: bool = False


def on_its_files(root: Path) -> list[str]:
    """Options for strace."""
    files = [root, *(root / f"journal.sqlite3{end}" for end in ("", "-wal", "-shm", ".lock"))]
    return [option for file in files for option in ("-P", str(file))]


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with running_driver(tmp_path_factory.mktemp("driver") / "warm", "tests.crash.journal_driver") as driver:
        yield driver


def points(journals: Driver, name: str, scratch: Path) -> list[Point]:
    """Every call that the scenario makes, with every fault that can come of it."""
    root = scratch / "counted"
    SCENARIOS[name].prepare(root)
    counted = journals.count(SCENARIOS[name].job(root), scratch / "trace", *on_its_files(root))
    shutil.rmtree(root)
    assert counted["pwrite64"] > 10
    assert counted["fdatasync"] > 5
    return [
        Point(name, fault, call, number)
        for fault, calls in FAULTS.items()
        for call, count in sorted(counted.items())
        if calls is None or call in calls
        for number in range(1, count + 1, EVERY_LOCK if fault == "error=ENOLCK" else 1)
    ]


def inject(journals: Driver, point: Point, root: Path) -> str:
    """How it ended, once it is seen that it ended well."""
    scenario = SCENARIOS[point.scenario]
    scenario.prepare(root)
    fault = f"inject={point.call}:{point.fault}:when={point.number}{'+' * point.lasts}"
    said = journals.run(scenario.job(root), *on_its_files(root), "-e", fault)
    demand("untyped" not in said, f"an untyped failure: {said}")
    # Nothing but opening and reading it at the start may fail; the rest is tried again.
    demand(said.get("failed") in (None, "JournalUnusable"), f"an open journal failed: {said}")
    if "done" in said:
        demand(set(STEPS) <= set(said["durable"]), f"not all was written: {said}")
    check(root, said, scenario.before)
    shutil.rmtree(root)
    if said.get("refusals"):
        return "refused"
    return "killed" if "signal" in said else "failed" if "failed" in said else "done"


def sweep(journals: Driver, chosen: list[Point], scratch: Path) -> set[str]:
    violations, endings = [], set()
    for number, point in enumerate(chosen):
        try:
            endings.add(inject(journals, point, scratch / str(number)))
        except AssertionError as violation:
            violations.append(f"{point}: {violation}")
    assert violations == []
    return endings


def test_a_kill_or_an_error_at_a_call_loses_nothing_and_halves_nothing(journals: Driver, scratch: Path) -> None:
    every = list(itertools.chain(*(points(journals, name, scratch) for name in SCENARIOS)))
    assert len(every) > 300
    endings = sweep(journals, random.Random(0).sample(every, SAMPLE), scratch)
    assert endings >= {"killed", "done"}


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_kill_or_an_error_at_every_call_loses_nothing_and_halves_nothing(
    journals: Driver, scratch: Path, name: str, fault: str
) -> None:
    chosen = [point for point in points(journals, name, scratch) if point.fault == fault]
    endings = sweep(journals, chosen, scratch)
    assert endings & ({"killed"} if fault == KILL else {"done", "refused"})


@pytest.mark.parametrize("lasts", [False, True])
def test_what_was_refused_because_the_sync_failed_does_not_come_back(
    journals: Driver, scratch: Path, lasts: bool
) -> None:
    """The log holds the whole transaction then, and the process dies before anything else is asked for."""
    refusals = 0
    # Later ones are of what is kept, and tried for ever.
    for number in range(1, 5 if lasts else 9):
        point = Point("a journal of one who dies refused", "error=EIO", "fdatasync", number, lasts)
        refusals += inject(journals, point, scratch / str(number)) == "refused"
    assert refusals > 1


def unsynced(lines: list[str], most: int) -> list[str]:
    """Which of the first answers, so many at `most`, were given while the log held what had not been synced; of a trace
    with file names."""
    is_dirty, found, num_answers = False, [], 0
    for line in lines:
        if re.search(r"pwrite64\(\d+<[^>]*-wal>", line):
            is_dirty = True
        elif re.search(r"(fsync|fdatasync)\(\d+<[^>]*-wal>\) += 0", line):
            is_dirty = False
        elif "writev(" in line and "durable" in line and num_answers < most:
            num_answers += 1
            found += [line] if is_dirty else []
    return found


@pytest.mark.parametrize("careless", [False, True])
def test_nothing_is_acknowledged_before_the_log_is_synced(journals: Driver, scratch: Path, careless: bool) -> None:
    scenario = SCENARIOS["a new journal"]
    scenario.prepare(scratch / "root")
    job = {**scenario.job(scratch / "root"), "careless": careless}
    lines = journals.trace(job, scratch / "trace", "-y", "-e", "trace=pwrite64,fsync,fdatasync,writev")
    assert sum("writev(" in line for line in lines) >= len(STEPS)
    # The last three are asked for at once: the log may take in one of them while another is answered.
    assert bool(unsynced(lines, most=len(SEED_STEPS) + len(STEPS) - 3)) == careless


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("DELETE FROM commands WHERE moment = 1", "accept 1 was acknowledged and is not there"),
        ("DELETE FROM payloads", "its payload is not what was accepted"),
        ("UPDATE payloads SET data = x'00'", "its payload is not what was accepted"),
        ("DELETE FROM outcomes", "half an outcome of 0"),
        ("UPDATE models SET facts = x'00'", "the model's facts"),
        ("UPDATE models SET snapshot = 'early'", "the snapshot came before"),
        ("DELETE FROM models", "half of a model's first command"),
    ],
)
def test_what_is_lost_or_halved_would_be_seen(scratch: Path, damage: str, told: str) -> None:
    root = scratch / "root"
    SCENARIOS["a journal of before"].prepare(root)
    check(root, {}, SEED_STEPS)
    connection = sqlite3.connect(root / "journal.sqlite3", isolation_level=None)
    connection.execute(damage)
    connection.close()
    with pytest.raises(Violation, match=told):
        check(root, {}, SEED_STEPS)


def test_a_refused_command_that_is_there_would_be_seen(scratch: Path) -> None:
    root = scratch / "root"
    SCENARIOS["a journal of before"].prepare(root)
    with pytest.raises(Violation, match="refused and is there"):
        check(root, {"refused": ["accept 1"]}, ())
