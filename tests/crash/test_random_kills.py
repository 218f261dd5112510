"""SIGKILL at random moments of many saves, overwrites and deletes at once, and of the recovery after it."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.crash.churn import ADDRESSES, Oracle
from tests.crash.injection import Driver
from tests.crash.workload import NEXT_EPOCH, Violation, demand, save, state_of, versions
from tests.trainer_cell.vault.checkpoints import leftovers
from tests.trainer_cell.vault.disks import UnsyncedDisk
from trainer_cell.vault.deletion import delete_checkpoint
from trainer_cell.vault.layout import Vault
from trainer_cell.vault.listing import list_checkpoints
from trainer_cell.vault.publish import sweep_staging
from trainer_cell.vault.recovery import settle_publish
from trainer_cell.vault.verify import verify_version

_LONGEST_LIFE_S = 0.15


class Rounds:
    """One vault that is killed over and over; the oracle knows what it must hold."""

    def __init__(self, driver: Driver, scratch: Path, seed: int) -> None:
        self.driver, self.scratch, self.seed = driver, scratch, seed
        self.chance = random.Random(seed)
        self.vault = Vault(scratch / "root", UnsyncedDisk())
        self.vault.create()
        self.oracle = Oracle()
        self.known_good: set[Path] = set()
        self.in_flight = 0

    def one(self, number: int) -> None:
        book = self.scratch / f"book{number}"
        job = {"action": "churn", "root": str(self.vault.root), "book": str(book), "epoch": f"E{number}"}
        self.kill({**job, "seed": self.seed * 1000 + number}, _LONGEST_LIFE_S)
        self.oracle.read(book.read_text().splitlines() if book.exists() else [])
        self.in_flight += len(self.oracle.pending)
        if number % 3 == 0:
            self.kill({"action": "recover", "root": str(self.vault.root), "overwrite": True}, _LONGEST_LIFE_S / 20)
        self.recover()
        self.check()

    def kill(self, job: dict[str, object], longest_s: float) -> None:
        child = os.pidfd_open(self.driver.start(job))
        self.driver.go()
        time.sleep(self.chance.random() * longest_s)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(child, signal.SIGKILL)
        os.close(child)
        answer = self.driver.answer()
        demand("failed" not in answer and "untyped" not in answer, str(answer))

    def recover(self) -> None:
        """What the next gateway does; then the oracle knows again what each name holds."""
        self.vault.create()
        allowed = self.oracle.allowed()
        found = {address: state_of(self.vault, address) for address in ADDRESSES}
        for address, state in found.items():
            demand(state in allowed[address], f"{address.uri} holds {state}, not one of {allowed[address]}")
        for pending in self.oracle.saves:
            settled = settle_publish(self.vault, pending.address, pending.command, pending.overwrite, NEXT_EPOCH)
            expected = pending.seed if settled else found[pending.address]
            demand(state_of(self.vault, pending.address) == expected, f"{pending} was settled wrongly")
            found[pending.address] = expected
        sweep_staging(self.vault)
        self.oracle.states = found

    def check(self) -> None:
        demand(leftovers(self.vault) == [], f"left over: {leftovers(self.vault)}")
        found = {address: state_of(self.vault, address) for address in ADDRESSES}
        demand(found == self.oracle.states, "recovery has changed what a name holds")
        demand(all(entry.problem is None for entry in list_checkpoints(self.vault)), "a damaged checkpoint is listed")
        there = set(versions(self.vault))
        for version in there - self.known_good:
            demand(verify_version(version) == [], f"{version.name} is damaged")
        self.known_good = there
        address = self.chance.choice(ADDRESSES)
        save(self.vault, -1, address, overwrite=True, epoch=NEXT_EPOCH)
        demand(state_of(self.vault, address) == -1, "the next save does not work")
        delete_checkpoint(self.vault, address)
        self.oracle.states[address] = None


def run(driver: Driver, scratch: Path, seed: int, kills: int) -> Rounds:
    rounds = Rounds(driver, scratch, seed)
    for number in range(kills):
        try:
            rounds.one(number)
        except Violation as violation:
            raise Violation(f"seed {seed}, round {number}: {violation}") from violation
    return rounds


def test_ten_random_kills_lose_nothing_that_was_acknowledged(driver: Driver, scratch: Path) -> None:
    rounds = run(driver, scratch, seed=0, kills=10)
    assert rounds.oracle.answers > 0
    assert rounds.in_flight > 0


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 6))
def test_many_random_kills_lose_nothing_that_was_acknowledged(driver: Driver, scratch: Path, seed: int) -> None:
    rounds = run(driver, scratch, seed, kills=50)
    assert rounds.in_flight > 50


def test_an_acknowledged_checkpoint_that_goes_or_changes_is_seen(driver: Driver, scratch: Path) -> None:
    rounds = Rounds(driver, scratch, seed=7)
    address = ADDRESSES[0]
    save(rounds.vault, 5, address)
    rounds.oracle.states[address] = 5
    rounds.recover()
    rounds.vault.public_path(address).unlink()
    with pytest.raises(Violation, match="holds None"):
        rounds.recover()
    save(rounds.vault, 6, address)
    with pytest.raises(Violation, match="holds 6"):
        rounds.recover()
