"""A checkpoint from elsewhere comes into a root whole and verified, once, or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import xxhash

from tests.trainer_cell.vault.checkpoints import contents, leftovers, load, new_vault, save, tree
from trainer_cell.vault import shard_file
from trainer_cell.vault.adopt import adopt_version
from trainer_cell.vault.disk import Disk
from trainer_cell.vault.errors import CheckpointDamaged, StorageFailed, UnsupportedFormat
from trainer_cell.vault.layout import Vault
from trainer_cell.vault.lifetime import pin
from trainer_cell.vault.manifest import read_manifest
from trainer_cell.vault.verify import verify_version

MODEL = "startup:train:0"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a version, in no root; its shards have several chunks."""
    monkeypatch.setattr(shard_file, "CHUNK_SIZE", 64)
    vault = new_vault(tmp_path / "elsewhere")
    shutil.copytree(vault.version_dir(save(vault, expires="2025-12-01T00:00:00Z")), tmp_path / "copied")
    return tmp_path / "copied"


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    return new_vault(tmp_path / "root")


def test_the_copy_is_the_same_state_of_the_new_model_and_tenant(vault: Vault, source: Path) -> None:
    address = adopt_version(vault, source, MODEL, "mine")
    assert load(vault, address) == contents(1)
    version = vault.resolve(address)
    assert version is not None
    assert verify_version(vault.version_dir(version)) == []
    manifest, original = read_manifest(vault.version_dir(version)), read_manifest(source)
    assert (manifest.model_id, manifest.kind, manifest.tenant_digest, manifest.expires) == (
        MODEL,
        "weights",
        "mine",
        None,
    )
    for field in ("files", "tensors", "step", "iteration", "adam_params", "created", "user_metadata", "base_digest"):
        assert getattr(manifest, field) == getattr(original, field)
    assert leftovers(vault) == []


def test_the_same_again_is_found_there_and_another_tenants_is_another(vault: Vault, source: Path) -> None:
    first = adopt_version(vault, source, MODEL, "mine")
    before = tree(vault.root)
    assert adopt_version(vault, source, MODEL, "mine") == first
    assert tree(vault.root) == before
    assert adopt_version(vault, source, MODEL, "another") != first


@pytest.mark.parametrize("since", ["damaged", "overwritten", "pinned and damaged"])
def test_nothing_is_put_in_the_place_of_what_has_become_of_a_copy(vault: Vault, source: Path, since: str) -> None:
    first = adopt_version(vault, source, MODEL, "mine")
    version = vault.resolve(first)
    assert version is not None
    if since.startswith("pinned"):
        pin(vault, first)
    if since == "overwritten":
        save(vault, first, seed=2, overwrite=True, tenant_digest="mine")
    else:
        (vault.version_dir(version) / "rank00001.safetensors").unlink()
    before = tree(vault.public_path(first).resolve())
    second = adopt_version(vault, source, MODEL, "mine")
    assert second.name == f"{first.name}-2"
    assert load(vault, second) == contents(1)
    assert tree(vault.public_path(first).resolve()) == before
    assert adopt_version(vault, source, MODEL, "mine") == second


@pytest.mark.parametrize("name", ["manifest.json", "rank00000.safetensors", "rank00001.safetensors"])
@pytest.mark.parametrize("how", ["missing", "short", "flipped"])
def test_what_is_damaged_is_not_taken_in(vault: Vault, source: Path, name: str, how: str) -> None:
    before = tree(vault.root)
    path = source / name
    raw = path.read_bytes()
    path.unlink()
    if how != "missing":
        path.write_bytes(raw[:-1] if how == "short" else raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:])
    with pytest.raises(CheckpointDamaged, match=name):
        adopt_version(vault, source, MODEL, "mine")
    assert tree(vault.root) == before


def test_a_format_of_the_future_is_not_taken_in(vault: Vault, source: Path) -> None:
    path = source / "manifest.json"
    body = path.read_bytes().replace(b'"format_version": 1', b'"format_version": 9').rpartition(b",\n")[0]
    path.write_bytes(body + f',\n  "manifest_digest": "{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode())
    with pytest.raises(UnsupportedFormat):
        adopt_version(vault, source, MODEL, "mine")


class ChangingDisk(Disk):
    """A source that changes after it has been verified, or a target that fails."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def open_new(self, path: Path) -> int:
        if path.name == "rank00001.safetensors":
            if self.fails:
                raise StorageFailed("open", path, 28)
            source = path.parents[3] / "copied" / path.name
            source.write_bytes(source.read_bytes()[:-4] + b"\0\0\0\1")
        return super().open_new(path)


@pytest.mark.parametrize("fails", [True, False])
def test_what_goes_wrong_midway_leaves_nothing(tmp_path: Path, source: Path, fails: bool) -> None:
    vault = new_vault(tmp_path / "root", ChangingDisk(fails))
    with pytest.raises(StorageFailed if fails else CheckpointDamaged):
        adopt_version(vault, source, MODEL, "mine")
    assert leftovers(vault) == []
    assert not list((tmp_path / "root").glob("startup*/weights/*"))
