"""What an ordinary machine refuses: room, inodes, long files, long paths, directories of somebody else."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from tests.crash.workload import (
    ADDRESS,
    BYSTANDER,
    NEW,
    NUM_BYTES,
    OLD,
    check_recovery,
    demand,
    prepared,
    save,
    state_of,
    states,
    versions,
)
from tests.trainer_cell.vault.checkpoints import leftovers
from tests.trainer_cell.vault.disks import UnsyncedDisk
from trainer_cell.vault.deletion import delete_checkpoint
from trainer_cell.vault.errors import StorageFailed, VaultUnusable
from trainer_cell.vault.layout import CheckpointAddress, Vault

_NOBODY = 65534
_PATH_MAX = 4096


def fails(vault: Vault, *names: str) -> bool:
    """Overwrite; whether it failed, and then with one of these and nothing changed."""
    before = state_of(vault)
    try:
        save(vault, NEW, overwrite=True, shards=2)
    except StorageFailed as failure:
        demand(failure.errno_name in names and state_of(vault) == before, str(failure))
        return True
    assert state_of(vault) == NEW
    return False


@contextmanager
def longest_file(size: int) -> Iterator[None]:
    """Python ignores SIGXFSZ, so that a longer file is EFBIG, after as much as fits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_may_not_grow_so_long_is_a_typed_failure_wherever_it_stops(scratch: Path) -> None:
    endings = []
    for size in range(0, NUM_BYTES, 512):
        vault = prepared(scratch / str(size), overwrite=True)
        with longest_file(size):
            failed = fails(vault, "EFBIG")
        endings.append(failed)
        check_recovery(vault.root, states([OLD if failed else NEW]))
    # From some limit on everything fits, and below it nothing did.
    assert endings == sorted(endings, reverse=True)
    assert {True, False} == set(endings)


@contextmanager
def an_ordinary_user() -> Iterator[None]:
    """Root may do everything; so let it be somebody else for a while."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A directory that an ordinary user can reach, as those of pytest may not be."""
    with tempfile.TemporaryDirectory(prefix="crash-") as name:
        Path(name).chmod(0o777)
        with an_ordinary_user():
            if not os.access(name, os.W_OK, effective_ids=True):
                pytest.skip("an ordinary user cannot reach the directory for temporary files")
        yield Path(name)


@pytest.mark.parametrize("closed", [".", ".staging", "s-1~train~0/.versions", "s-1~train~0/weights"])
def test_a_directory_that_may_not_be_written_fails_the_save_and_changes_nothing(open_to_all: Path, closed: str) -> None:
    with an_ordinary_user():
        vault = prepared(open_to_all / "root", overwrite=True)
        directory = vault.root / closed
        directory.chmod(0o555)
        try:
            # A model that has its directories needs the root's leave no more.
            assert fails(vault, "EACCES") == (closed != ".")
        finally:
            directory.chmod(0o755)
        assert leftovers(vault) == []
        check_recovery(vault.root, states([OLD, NEW]))


@pytest.mark.parametrize("closed", [".staging", "s-1~train~0/.versions", "s-1~train~0/weights"])
def test_a_delete_that_may_not_is_a_typed_failure_and_works_later(open_to_all: Path, closed: str) -> None:
    with an_ordinary_user():
        vault = prepared(open_to_all / "root", overwrite=True)
        directory = vault.root / closed
        directory.chmod(0o555)
        try:
            with pytest.raises(StorageFailed, match="EACCES"):
                delete_checkpoint(vault, ADDRESS)
        finally:
            directory.chmod(0o755)
        delete_checkpoint(vault, ADDRESS)
        assert state_of(vault) is None
        assert len(versions(vault)) == 1
        check_recovery(vault.root, states([None]))


def test_a_root_that_may_not_be_written_is_refused_at_start_up(open_to_all: Path) -> None:
    (open_to_all / "root").mkdir(mode=0o755)
    (open_to_all / "root").chmod(0o555)
    with an_ordinary_user(), pytest.raises(VaultUnusable, match="EACCES"):
        Vault(open_to_all / "root" / "below").create()


def test_a_root_so_deep_that_a_version_could_not_be_opened_is_refused_at_start_up(scratch: Path) -> None:
    address = CheckpointAddress("m" * 191, "sampler_weights", "n" * 128)
    endings = []
    for length in range(_PATH_MAX - 800, _PATH_MAX, 16):
        vault = Vault(padded(scratch / str(length), length), UnsyncedDisk())
        try:
            vault.create()
        except VaultUnusable:
            endings.append("unusable")
            continue
        save(vault, OLD, address)
        assert state_of(vault, address) == OLD
        endings.append("saved")
    assert set(endings) == {"saved", "unusable"}


def padded(directory: Path, length: int) -> Path:
    """A directory below, which is to be made, of a path of that many bytes."""
    while (left := length - len(str(directory)) - 1) > 0:
        directory /= "d" * (left if left <= 200 else 100)
    return directory


@cache
def why_no_mount() -> str | None:
    tried = subprocess.run(["unshare", "-Urm", "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"no mounts of one's own: {tried.stderr.strip()}"


def on_its_own_mount(scratch: Path, module: str, *arguments: str) -> list[str]:
    """What the module said, which is given a directory that it may mount something on."""
    reason = why_no_mount()
    if reason is not None:
        pytest.skip(reason)
    mounted = scratch / "mounted"
    mounted.mkdir()
    done = subprocess.run(
        ["unshare", "-Urm", sys.executable, "-m", module, str(mounted), *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("limit", ["bytes", pytest.param("bytes thoroughly", marks=pytest.mark.full), "inodes"])
def test_a_disk_that_fills_up_anywhere_in_a_save_fails_it_whole_and_serves_on(scratch: Path, limit: str) -> None:
    endings = on_its_own_mount(scratch, "tests.crash.small_disk", limit)
    assert {"failed", "saved"} == set(endings)
    assert len(endings) > 10


def test_a_disk_that_fills_up_under_the_journal_refuses_commands_whole_and_keeps_the_rest(scratch: Path) -> None:
    endings = on_its_own_mount(scratch, "tests.crash.small_journal")
    assert {"refused", "accepted"} == set(endings)
    assert len(endings) > 30


def test_a_bystander_is_read_while_the_limits_hold(scratch: Path) -> None:
    vault = prepared(scratch / "root", overwrite=True)
    with longest_file(100):
        assert fails(vault, "EFBIG")
        assert state_of(vault, BYSTANDER) is not None
