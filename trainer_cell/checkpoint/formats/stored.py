"""A published checkpoint as an export reads it: one version, kept from deletion, every byte verified; without torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainer_cell.checkpoint.formats.errors import SourceDamaged, UnknownFormat
from trainer_cell.vault.disk import LOCAL_DISK
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.locks import lock_version
from trainer_cell.vault.manifest import Manifest, TensorDType, read_manifest
from trainer_cell.vault.verify import Wanted, read_tensors


@dataclass(frozen=True)
class StoredTensor:
    """One part of one tensor, whole; data: little-endian, C order."""

    name: str
    part: str
    dtype: TensorDType
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True)
class Stored:
    directory: Path
    manifest: Manifest

    def tensors(self, *, weights_only: bool) -> list[StoredTensor]:
        """In order of their keys. Raises `VaultError` when anything is not as it was published."""
        records = self.manifest.tensors
        chosen = [key for key in sorted(records) if not weights_only or key.endswith("/weight")]
        wanted = {key: Wanted(None, 0, records[key].shape) for key in chosen}
        buffers = read_tensors(self.directory, self.manifest, wanted, records.keys() - wanted.keys())
        return [
            StoredTensor(*_name_and_part(key), records[key].dtype, records[key].shape, buffers[key]) for key in chosen
        ]


def _name_and_part(key: str) -> tuple[str, str]:
    name, _, part = key.rpartition("/")
    return name, part


@contextmanager
def open_stored(checkpoint: str, root: Path) -> Iterator[Stored]:
    """checkpoint: a tinker:// address under the checkpoint root, or a version's directory.

    Raises `UnknownFormat` when it is not there, `SourceDamaged` for NaN or infinity, or `VaultError`.
    """
    directory = _directory(checkpoint, root)
    lease = lock_version(LOCAL_DISK, directory, exclusive=False)
    if lease is None:
        raise UnknownFormat(f"{checkpoint}: there is no checkpoint")
    with lease:
        manifest = read_manifest(directory)
        if manifest.non_finite:
            raise SourceDamaged(f"{checkpoint}: holds NaN or infinite values")
        yield Stored(directory, manifest)


def _directory(checkpoint: str, root: Path) -> Path:
    if not checkpoint.startswith("tinker://"):
        return Path(checkpoint).resolve()
    vault = Vault(root)
    version = vault.resolve(CheckpointAddress.parse(checkpoint))
    if version is None:
        raise UnknownFormat(f"{checkpoint}: there is no checkpoint")
    return vault.version_dir(version)
