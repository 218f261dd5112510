"""One name overwritten steadily, read and collected all the while: disk use is bounded, and no reader is disturbed."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.trainer_cell.vault.checkpoints import WHOLE, contents, leftovers, load, new_vault, save
from tests.trainer_cell.vault.disks import UnsyncedDisk
from tests.trainer_cell.vault.scenes import MODEL, named
from tests.trainer_cell.vault.test_collect import Clock, collector
from trainer_cell.vault.collect import Collected
from trainer_cell.vault.layout import Vault
from trainer_cell.vault.manifest import read_manifest
from trainer_cell.vault.publish import sweep_staging
from trainer_cell.vault.retention import Rules
from trainer_cell.vault.verify import read_tensors

NUM_READERS = 2
SAVES_PER_ROUND = 5
# In saves: the clock goes on by one second with each.
GRACE_S = 3.0
NAME = named("n")
# The public one, those within their grace, what is saved while a round runs and until the next, and what is read.
MOST_VERSIONS = 1 + int(GRACE_S) + 2 * SAVES_PER_ROUND + NUM_READERS


class Reader(threading.Thread):
    """Resolve once, lease, read: what a load does, over and over. num_read: versions read in full."""

    def __init__(self, vault: Vault) -> None:
        super().__init__()
        self.num_read = 0
        self.num_missed = 0
        self.failure: BaseException | None = None
        self.is_over = threading.Event()
        self._vault = vault

    def run(self) -> None:
        try:
            while not self.is_over.is_set():
                self._read()
        except BaseException as failure:
            self.failure = failure

    def _read(self) -> None:
        version = self._vault.resolve(NAME)
        assert version is not None, "the name was absent for a moment"
        lease = self._vault.lease(version)
        if lease is None:
            self.num_missed += 1
            return
        with lease:
            directory = self._vault.version_dir(version)
            manifest = read_manifest(directory)
            tensors = read_tensors(directory, manifest, WHOLE)
            assert {key: bytes(data) for key, data in tensors.items()} == contents(manifest.iteration), "mixed bytes"
        self.num_read += 1


def disk_use(vault: Vault) -> tuple[int, int]:
    """Versions and bytes, what is being removed among them."""
    versions = list(vault.versions_dir(MODEL).iterdir())
    sizes = []
    for folder, _, files in os.walk(vault.root):
        for name in files:
            with suppress(FileNotFoundError):
                sizes.append(Path(folder, name).lstat().st_size)
    return len(versions), sum(sizes)


def overwrite(root: Path, num_saves: int, measure_every: int) -> None:
    # What this is about is visible without syncs, which take most of a small save's time.
    vault, clock = new_vault(root, UnsyncedDisk()), Clock()
    collect = collector(vault, clock, Rules(replaced_grace_s=GRACE_S))
    save(vault, NAME, seed=0, iteration=0, created=clock.stamp())
    (one_version,) = (sum(path.stat().st_size for path in made.iterdir()) for made in vault.root.glob("*/.versions/*"))
    readers = [Reader(vault) for _ in range(NUM_READERS)]
    for reader in readers:
        reader.start()
    most_versions = most_bytes = 0
    with ThreadPoolExecutor(1) as pool:
        rounds: list[Future[Collected]] = []
        try:
            for number in range(1, num_saves + 1):
                clock.forward(1)
                save(vault, NAME, seed=number, iteration=number, overwrite=True, created=clock.stamp())
                if number % measure_every == 0:
                    versions, num_bytes = disk_use(vault)
                    most_versions, most_bytes = max(most_versions, versions), max(most_bytes, num_bytes)
                if number % SAVES_PER_ROUND == 0:
                    if rounds:
                        assert rounds[-1].result().errors == ()
                    rounds.append(pool.submit(collect.collect))
        finally:
            for reader in readers:
                reader.is_over.set()
                reader.join()
    for reader in readers:
        if reader.failure is not None:
            raise reader.failure
        assert reader.num_read > num_saves / 50
    assert 0 < most_versions <= MOST_VERSIONS
    # Whatever is being written or removed at the moment comes on top, once.
    assert most_bytes <= (MOST_VERSIONS + SAVES_PER_ROUND + NUM_READERS) * one_version * 1.1
    clock.forward(GRACE_S + 1)
    assert sum(len(done.result().removed) for done in rounds) + len(collect.collect().removed) == num_saves
    sweep_staging(vault)
    assert (len(list(vault.versions_dir(MODEL).iterdir())), leftovers(vault)) == (1, [])
    assert load(vault, NAME) == contents(num_saves)


def test_a_hundred_and_fifty_overwrites_use_bounded_disk_and_disturb_no_reader(tmp_path: Path) -> None:
    overwrite(tmp_path, 150, measure_every=3)


@pytest.mark.full
def test_two_thousand_overwrites_use_bounded_disk_and_disturb_no_reader(tmp_path: Path) -> None:
    overwrite(tmp_path, 2000, measure_every=10)


def test_a_reader_without_a_lease_would_lose_its_version(tmp_path: Path) -> None:
    """The control: the lease is what keeps the files there."""
    vault, clock = new_vault(tmp_path), Clock()
    version = save(vault, NAME, seed=1, created=clock.stamp())
    save(vault, NAME, seed=2, overwrite=True, created=clock.stamp())
    clock.forward(GRACE_S)
    lease = vault.lease(version)
    assert lease is not None
    with lease:
        collector(vault, clock, Rules(replaced_grace_s=GRACE_S)).collect()
        assert vault.version_dir(version).exists()
    collector(vault, clock, Rules(replaced_grace_s=GRACE_S)).collect()
    assert not vault.version_dir(version).exists()
