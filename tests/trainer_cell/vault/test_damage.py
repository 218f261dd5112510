"""Whatever happens to the bytes or files of a checkpoint is noticed: by verifying, and by loading."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.trainer_cell.vault.checkpoints import ADDRESS, WHOLE, contents, new_vault, save
from trainer_cell.vault import shard_file
from trainer_cell.vault.errors import CheckpointDamaged
from trainer_cell.vault.layout import Vault
from trainer_cell.vault.manifest import read_manifest
from trainer_cell.vault.verify import read_tensors, verify_version

SAMPLED = 7


@pytest.fixture
def version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose shards have several chunks."""
    monkeypatch.setattr(shard_file, "CHUNK_SIZE", 64)
    vault = new_vault(tmp_path)
    return vault.version_dir(save(vault))


@contextmanager
def content(path: Path, raw: bytes) -> Iterator[None]:
    before = path.read_bytes()
    path.write_bytes(raw)
    yield
    path.write_bytes(before)


def check_refused(version: Path) -> None:
    assert verify_version(version)
    with pytest.raises(CheckpointDamaged):
        read_tensors(version, read_manifest(version), WHOLE)


def files(version: Path) -> list[Path]:
    return sorted(version.iterdir())


def check_flips(version: Path, stride: int) -> None:
    for path in files(version):
        raw = path.read_bytes()
        for at in range(0, len(raw), stride):
            for bit in (1, 0x20, 0x80):
                with content(path, raw[:at] + bytes([raw[at] ^ bit]) + raw[at + 1 :]):
                    check_refused(version)
    assert verify_version(version) == []
    assert read_tensors(version, read_manifest(version), WHOLE) == contents(1)


def check_truncations(version: Path, stride: int) -> None:
    for path in files(version):
        raw = path.read_bytes()
        for length in range(0, len(raw), stride):
            with content(path, raw[:length]):
                check_refused(version)
                assert verify_version(version, deep=False)


def test_a_flipped_bit_anywhere_is_refused(version: Path) -> None:
    check_flips(version, SAMPLED)


@pytest.mark.full
def test_a_flipped_bit_in_every_byte_is_refused(version: Path) -> None:
    check_flips(version, 1)


def test_a_truncated_file_is_refused(version: Path) -> None:
    check_truncations(version, SAMPLED)


@pytest.mark.full
def test_a_file_truncated_to_any_length_is_refused(version: Path) -> None:
    check_truncations(version, 1)


def test_bytes_at_the_end_of_any_file_are_refused(version: Path) -> None:
    for path in files(version):
        with content(path, path.read_bytes() + b"\0"):
            check_refused(version)


def test_zeros_instead_of_a_shard_are_refused(version: Path) -> None:
    for path in files(version):
        with content(path, bytes(path.stat().st_size)):
            check_refused(version)


def test_a_missing_file_is_refused_and_named(version: Path) -> None:
    for path in files(version):
        raw = path.read_bytes()
        path.unlink()
        check_refused(version)
        assert path.name in verify_version(version, deep=False)[0]
        path.write_bytes(raw)


def _link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


def _link_of_the_same_size(path: Path) -> None:
    size = path.stat().st_size
    path.rename(path.with_name("moved"))
    path.symlink_to("." + "/" * (size - len(".moved")) + "moved")
    assert path.lstat().st_size == size


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("replace", [_link, _link_of_the_same_size, _directory])
@pytest.mark.parametrize("name", ["manifest.json", "rank00000.safetensors"])
def test_what_is_not_a_regular_file_is_refused(version: Path, name: str, replace: Callable[[Path], None]) -> None:
    replace(version / name)
    check_refused(version)


@pytest.mark.parametrize("name", ["adapter_model.bin", "rank00002.safetensors", ".hidden"])
def test_an_extra_file_is_refused_and_named(version: Path, name: str) -> None:
    (version / name).write_bytes(b"cos\nsystem\n")
    check_refused(version)
    assert verify_version(version, deep=False) == [f"file {name} is not in the manifest"]


def test_a_manifest_of_another_version_is_refused(version: Path) -> None:
    vault = Vault(version.parents[2])
    other = vault.version_dir(save(vault, seed=2, overwrite=True))
    shutil.copy(version / "manifest.json", other / "manifest.json")
    check_refused(other)
    assert vault.resolve(ADDRESS) == str(other.relative_to(vault.root))
