"""Addresses are matched in full, and every path stays inside the vault."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer_cell.vault.checkpoints import ADDRESS, new_vault, save
from trainer_cell.vault.disk import Disk
from trainer_cell.vault.errors import CheckpointDamaged, StorageFailed, VaultLocked, VaultUnusable
from trainer_cell.vault.layout import (
    CheckpointAddress,
    InvalidAddress,
    Vault,
    VersionName,
    check_name,
    directory_name,
    model_id_of,
)

# The right version, told from the wrong place.
OTHER_FORM = "weights.n.01KB9ZZZZZZZZZZZZZZZZZZZZZ"
BAD_SEGMENTS = [
    "", ".", "..", "../x", "/etc/x", "a/b", "x%2f..%2fy", "x\0", "x\n", "\nx", "x ", " x", "x.", ".x", "-x", "_x",
    "x\u00e9", "\u0663", "x\\y", "~x", "x" * 300,
]  # fmt: skip


@pytest.mark.parametrize("name", [*BAD_SEGMENTS, "a:b", "x" * 129])
def test_a_name_that_is_not_one_plain_segment_is_refused(name: str) -> None:
    with pytest.raises(InvalidAddress):
        check_name(name)
    with pytest.raises(InvalidAddress):
        CheckpointAddress.parse(f"tinker://s:train:0/weights/{name}")


@pytest.mark.parametrize("model_id", [segment for segment in BAD_SEGMENTS if segment != "x."] + ["x" * 192, "a~b"])
def test_a_model_id_that_is_not_one_plain_segment_is_refused(model_id: str) -> None:
    with pytest.raises(InvalidAddress):
        CheckpointAddress(model_id, "weights", "n")
    with pytest.raises(InvalidAddress):
        directory_name(model_id)


@pytest.mark.parametrize(
    "uri",
    [
        "tinker://m/weights/../../x", "tinker://m/weights/x/y", "tinker://m/weights", "tinker://m/optimizer/x",
        "m/weights/x", "file:///etc/passwd", "http://m/weights/x", "tinker:///weights/x", "tinker://m//x", "org/repo",
        "", "TINKER://m/weights/x", " tinker://m/weights/x", "tinker://m/weights/x\n", "tinker://tinker://m/weights/x",
    ],
)  # fmt: skip
def test_what_is_not_a_three_part_address_is_refused(uri: str) -> None:
    with pytest.raises(InvalidAddress):
        CheckpointAddress.parse(uri)


@pytest.mark.parametrize("name", ["lora", "weight", "weights", "sampler_weights", "CON", "000001", "a..b", "x" * 128])
def test_unusual_but_plain_names_are_addresses(name: str) -> None:
    address = CheckpointAddress("startup:train:0", "sampler_weights", name)
    assert CheckpointAddress.parse(address.uri) == address


@given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=40))
def test_no_accepted_address_leaves_its_models_folder(model_id: str, kind: str, name: str) -> None:
    try:
        address = CheckpointAddress.parse(f"tinker://{model_id}/{kind}/{name}")
    except InvalidAddress:
        return
    vault = Vault(Path("/root-of-the-vault"))
    public = Path(os.path.normpath(vault.public_path(address)))
    assert public.parts == ("/", "root-of-the-vault", directory_name(address.model_id), address.kind, address.name)


def test_a_model_id_and_its_directory_tell_each_other() -> None:
    assert directory_name("s-1:train:0") == "s-1~train~0"
    assert model_id_of("s-1~train~0") == "s-1:train:0"
    assert [model_id_of(name) for name in (".staging", "lost+found", ".lock", "a:b", "")] == [None] * 5


def test_a_version_name_reads_back_when_the_name_holds_dots() -> None:
    version = VersionName("weights", "a.b.c", "01KB9ZZZZZZZZZZZZZZZZZZZZZ")
    assert VersionName.parse(str(version)) == version
    assert VersionName.parse("weights.a.b") is None


@pytest.mark.parametrize(
    "version", ["../x", "m/../x", "m/.versions/x", "/etc", "m/weights/..", "m/.versions/..", "m/weights/a/b", "m"]
)
def test_a_version_that_is_not_one_is_refused(tmp_path: Path, version: str) -> None:
    with pytest.raises(InvalidAddress):
        Vault(tmp_path).version_dir(version)


def test_resolving_tells_a_version_relative_to_the_root(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    assert vault.resolve(ADDRESS) is None
    version = save(vault)
    assert vault.resolve(ADDRESS) == version
    assert version.startswith("s-1~train~0/.versions/weights.n.")
    assert os.readlink(vault.public_path(ADDRESS)) == f"../.versions/{Path(version).name}"


@pytest.mark.parametrize(
    "target", ["../../other/.versions/weights.n.01KB9ZZZZZZZZZZZZZZZZZZZZZ", "/etc", "../.versions/x", OTHER_FORM]
)
def test_a_link_that_leads_anywhere_but_to_a_version_of_its_name_is_refused(tmp_path: Path, target: str) -> None:
    vault = new_vault(tmp_path)
    save(vault)
    vault.public_path(ADDRESS).unlink()
    vault.public_path(ADDRESS).symlink_to(target)
    with pytest.raises(CheckpointDamaged):
        vault.resolve(ADDRESS)


def test_a_link_to_the_version_of_another_name_is_refused(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    version = save(vault)
    other = CheckpointAddress(ADDRESS.model_id, "weights", "other")
    vault.public_path(other).symlink_to(f"../.versions/{Path(version).name}")
    with pytest.raises(CheckpointDamaged):
        vault.resolve(other)


def test_a_missing_root_is_made_and_a_rehearsal_leaves_nothing(tmp_path: Path) -> None:
    Vault(tmp_path / "a/b").create()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["a", "a/b", "a/b/.staging"]


def test_a_root_that_is_a_file_is_unusable(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("")
    with pytest.raises(VaultUnusable, match="ENOTDIR"):
        Vault(tmp_path / "root").create()


def test_the_root_has_one_holder_at_a_time(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    with vault.lock(), pytest.raises(VaultLocked):
        Vault(tmp_path).lock()
    Vault(tmp_path).lock().release()


class FullDisk(Disk):
    """No room for a single block."""

    def allocate(self, descriptor: int, path: Path, size: int) -> None:
        raise StorageFailed("allocate", path, errno.ENOSPC)

    def free_bytes(self, path: Path) -> int:
        return 0


def test_a_full_disk_refuses_a_new_root_but_not_one_that_holds_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(VaultUnusable, match="ENOSPC"):
        Vault(tmp_path / "new", FullDisk()).create()
    new_vault(tmp_path / "old")
    Vault(tmp_path / "old", FullDisk()).create()


def test_a_root_that_cannot_even_be_looked_for_is_unusable(tmp_path: Path) -> None:
    with pytest.raises(VaultUnusable, match="File name too long"):
        Vault(tmp_path / ("x" * 300)).create()


def test_a_root_that_leaves_no_room_for_the_longest_path_below_is_unusable(tmp_path: Path) -> None:
    with pytest.raises(VaultUnusable, match="path is too long"):
        Vault(tmp_path.joinpath(*["d" * 200] * 18)).create()
