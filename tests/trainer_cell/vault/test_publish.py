"""Publishing in good weather: the order of the calls, who wins, and what is refused."""

from __future__ import annotations

import os
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.trainer_cell.vault.checkpoints import (
    ADDRESS,
    EPOCH,
    contents,
    leftovers,
    load,
    manifest_of,
    new_vault,
    save,
    tree,
    whole_pieces,
)
from tests.trainer_cell.vault.disks import RecordingDisk
from trainer_cell.vault import ulid
from trainer_cell.vault.disk import Disk
from trainer_cell.vault.errors import CheckpointDamaged, CheckpointExists, NotReplaceable, StorageFailed
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.manifest import read_manifest
from trainer_cell.vault.publish import Staging, begin, finish
from trainer_cell.vault.shard_file import write_shard
from trainer_cell.vault.verify import verify_version


def changes(disk: RecordingDisk, root: Path) -> list[str]:
    """What was changed or made durable, in order; ids are written as `*`."""
    told = []
    for operation, path in disk.calls:
        if operation in ("create", "mkdir", "fsync", "rename", "symlink", "unlink"):
            name = str(path.relative_to(root)) if path != root else "."
            told.append(f"{operation} {name.replace(_ulid(name), '*') if _ulid(name) else name}")
    return told


def _ulid(path: str) -> str:
    return next((part for segment in path.split("/") for part in segment.split(".") if len(part) == 26), "")


def test_a_first_save_syncs_every_file_and_every_new_directory_before_and_the_name_after(tmp_path: Path) -> None:
    new_vault(tmp_path)
    disk = RecordingDisk()
    save(Vault(tmp_path, disk))
    assert changes(disk, tmp_path) == [
        "mkdir .staging", "fsync .", f"mkdir .staging/{EPOCH}.*",
        f"create .staging/{EPOCH}.*/rank00000.safetensors", f"fsync .staging/{EPOCH}.*/rank00000.safetensors",
        f"create .staging/{EPOCH}.*/rank00001.safetensors", f"fsync .staging/{EPOCH}.*/rank00001.safetensors",
        f"create .staging/{EPOCH}.*/manifest.json", f"fsync .staging/{EPOCH}.*/manifest.json",
        f"fsync .staging/{EPOCH}.*",
        "mkdir s-1~train~0", "fsync .",
        "mkdir s-1~train~0/.versions", "fsync s-1~train~0",
        "mkdir s-1~train~0/weights", "fsync s-1~train~0",
        "rename s-1~train~0/.versions/weights.n.*", "fsync s-1~train~0/.versions",
        "symlink s-1~train~0/weights/n", "fsync s-1~train~0/weights",
    ]  # fmt: skip


def test_an_overwrite_points_by_renaming_a_new_link_over_the_name(tmp_path: Path) -> None:
    save(new_vault(tmp_path))
    disk = RecordingDisk()
    vault = Vault(tmp_path, disk)
    save(vault, CheckpointAddress(ADDRESS.model_id, "weights", "other"))
    disk.calls.clear()
    save(vault, overwrite=True)
    assert changes(disk, tmp_path)[-5:] == [
        "rename s-1~train~0/.versions/weights.n.*",
        "fsync s-1~train~0/.versions",
        f"symlink s-1~train~0/weights/.point.{EPOCH}.*",
        "rename s-1~train~0/weights/n",
        "fsync s-1~train~0/weights",
    ]


def test_another_process_syncs_directories_that_it_only_found(tmp_path: Path) -> None:
    save(new_vault(tmp_path))
    disk = RecordingDisk()
    save(Vault(tmp_path, disk), overwrite=True)
    told = changes(disk, tmp_path)
    assert told.index("fsync s-1~train~0") > told.index("mkdir s-1~train~0")


def test_what_was_saved_is_there_whole_and_nothing_else(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    version = save(vault)
    assert load(vault) == contents(1)
    assert verify_version(vault.version_dir(version)) == []
    assert sorted(path.name for path in vault.version_dir(version).iterdir()) == [
        "manifest.json", "rank00000.safetensors", "rank00001.safetensors",
    ]  # fmt: skip
    assert leftovers(vault) == []


def test_a_taken_name_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    save(vault)
    before = tree(tmp_path)
    with pytest.raises(CheckpointExists, match=ADDRESS.uri):
        save(vault, seed=2)
    assert tree(tmp_path) == before
    assert load(vault) == contents(1)


def test_overwriting_keeps_the_old_version_for_its_readers(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    old = save(vault)
    new = save(vault, seed=2, overwrite=True)
    assert load(vault) == contents(2)
    assert old < new
    assert verify_version(vault.version_dir(old)) == []


def test_versions_rise_although_the_clock_went_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vault = new_vault(tmp_path)
    old = save(vault)
    # A second process, whose clock says 1970.
    monkeypatch.setattr(ulid, "_sequence", ulid._Sequence())
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert save(vault, seed=2, overwrite=True) > old


def test_the_kinds_of_one_name_stand_side_by_side(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    save(vault)
    sampler = CheckpointAddress(ADDRESS.model_id, "sampler_weights", "n")
    save(vault, sampler, seed=2)
    assert (load(vault), load(vault, sampler)) == (contents(1), contents(2))


def test_a_plain_directory_at_the_name_is_read_and_not_overwritten(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    older = CheckpointAddress(ADDRESS.model_id, "weights", "older")
    shutil.copytree(vault.version_dir(save(vault)), vault.public_path(older))
    assert load(vault, older) == contents(1)
    for overwrite in (False, True):
        with pytest.raises(NotReplaceable, match="pick another name"):
            save(vault, older, overwrite=overwrite)
    assert load(vault, older) == contents(1)


def test_more_than_the_disk_holds_is_refused_at_once(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    with pytest.raises(StorageFailed, match="ENOSPC"):
        begin(vault, ADDRESS, False, 1 << 60, EPOCH)
    assert leftovers(vault) == []


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda staging: (staging / "rank00001.safetensors").unlink(), "rank00001.safetensors is missing"),
        (lambda staging: (staging / "stray").write_text(""), "stray is not in the manifest"),
        (lambda staging: os.truncate(staging / "rank00000.safetensors", 9), "is 9 bytes long"),
    ],
)
def test_files_that_are_not_those_of_the_manifest_are_not_published(tmp_path: Path, spoil: object, named: str) -> None:
    vault = new_vault(tmp_path)
    staging = begin(vault, ADDRESS, False, 0, EPOCH)
    shards = [write_shard(staging, f"rank{rank:05d}.safetensors", whole_pieces(1)[rank::2]) for rank in range(2)]
    spoil(staging.directory)  # type: ignore[operator]
    with pytest.raises(CheckpointDamaged, match=named):
        finish(vault, staging, manifest_of(shards), False)
    assert vault.resolve(ADDRESS) is None
    assert leftovers(vault) == []


def test_an_index_that_does_not_cover_its_tensors_is_not_published(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    staging = begin(vault, ADDRESS, False, 0, EPOCH)
    shard = write_shard(staging, "rank00000.safetensors", whole_pieces(1))
    with pytest.raises(CheckpointDamaged, match="holds none"):
        finish(vault, staging, manifest_of([shard], tensors={}), False)
    assert vault.resolve(ADDRESS) is None


def test_ranks_find_the_staging_by_its_token_and_by_nothing_else(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    staging = begin(vault, ADDRESS, False, 0, EPOCH)
    assert Staging.attach(vault, staging.token) == staging
    for token in ("../x", "", EPOCH, f"{staging.token}/.."):
        with pytest.raises(ValueError, match="token"):
            Staging.attach(vault, token)
    assert not any(str(ADDRESS.model_id) in str(value) or "weights" in str(value) for value in vars(staging).values())


def test_an_epoch_that_could_be_a_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not an epoch"):
        begin(new_vault(tmp_path), ADDRESS, False, 0, "../x")


class _Meeting(Disk):
    """Both writers are shown the name as free before either takes it."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self._barrier = barrier

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        if path.parent.name == ".staging":
            self._barrier.wait(30)


@pytest.mark.parametrize("round_", range(20))
def test_of_two_writers_of_one_free_name_exactly_one_wins(tmp_path: Path, round_: int) -> None:
    new_vault(tmp_path)
    barrier = threading.Barrier(2)

    def attempt(seed: int) -> int | None:
        try:
            save(Vault(tmp_path, _Meeting(barrier)), seed=seed)
        except CheckpointExists:
            return None
        return seed

    with ThreadPoolExecutor(2) as pool:
        won = [seed for seed in pool.map(attempt, (1, 2)) if seed]
    vault = Vault(tmp_path)
    assert len(won) == 1
    assert load(vault) == contents(won[0])
    assert leftovers(vault) == []
    assert len(list(vault.versions_dir(ADDRESS.model_id).iterdir())) == 1


def test_readers_under_constant_overwriting_never_see_a_mixture(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    save(vault, seed=0)
    done = threading.Event()

    def write() -> None:
        try:
            for seed in range(1, 60):
                save(vault, seed=seed, overwrite=True)
        finally:
            done.set()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        seen = set()
        while not done.is_set():
            found = load(vault)
            seen.add(next(seed for seed in range(60) if contents(seed) == found))
        writing.result()
    assert load(vault) == contents(59)
    assert len(seen) > 1


def test_many_models_saving_one_name_at_once_never_mix(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    addresses = [CheckpointAddress(f"s{at}:train:0", "weights", "n") for at in range(8)]

    def repeat(at: int) -> None:
        for _ in range(10):
            save(vault, addresses[at], seed=at, overwrite=True)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(repeat, range(8)))
    assert [load(vault, address) for address in addresses] == [contents(at) for at in range(8)]
    assert leftovers(vault) == []


@pytest.fixture(params=[0o022, 0o027, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_the_modes_of_everything_follow_the_umask_also_after_a_replacement(tmp_path: Path, umask: int) -> None:
    vault = new_vault(tmp_path / "root")
    first = vault.version_dir(save(vault))
    first.joinpath("manifest.json").chmod(0o600)
    save(vault, seed=2, overwrite=True)
    version = vault.version_dir(vault.resolve(ADDRESS) or "")
    files = [path for path in (tmp_path / "root").rglob("*") if not path.is_symlink() and first not in path.parents]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in files}
    assert all(mode == (0o777 if path.is_dir() else 0o666) & ~umask for path, mode in modes.items())
    assert len([path for path in modes if path.parent == version]) == 3


def test_two_hundred_saves_leave_no_descriptor_open(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    save(vault)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        save(vault, overwrite=True)
        with pytest.raises(CheckpointExists):
            save(vault)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_manifest_on_disk_says_what_was_asked(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    manifest = read_manifest(vault.version_dir(save(vault, command_id="c-77")))
    assert (manifest.command_id, manifest.model_id, manifest.name) == ("c-77", ADDRESS.model_id, ADDRESS.name)
