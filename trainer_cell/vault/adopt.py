"""Taking in a checkpoint from elsewhere: a verified copy, byte for byte, published under an address of this root."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Literal

import msgspec
import xxhash

from trainer_cell.vault.errors import CheckpointDamaged, UnsupportedFormat
from trainer_cell.vault.layout import CheckpointAddress, Vault, new_ulid
from trainer_cell.vault.manifest import FileRecord, Manifest, read_manifest
from trainer_cell.vault.publish import begin, finish
from trainer_cell.vault.staging import Staging, abandon
from trainer_cell.vault.verify import verify_version

# Of every epoch that is not a cell's; the rest is drawn afresh.
_EPOCH = "adopting-"


def adopt_version(vault: Vault, source: Path, model_id: str, tenant_digest: str) -> CheckpointAddress:
    """Publish the checkpoint in the directory `source` as a `weights` checkpoint of that model and tenant that never
    expires, named after its content: taking in the same one again finds it there.

    Raises `CheckpointDamaged` naming file, tensor or field, `UnsupportedFormat`, or `StorageFailed`; nothing is
    published then.
    """
    manifest = read_manifest(source, vault.disk)
    for problem in verify_version(source, disk=vault.disk):
        raise CheckpointDamaged(source, problem)
    told = xxhash.xxh3_128_hexdigest(f"{manifest.manifest_digest}/{tenant_digest}".encode())
    for address in names_for(model_id, f"adopted-{told[:16]}"):
        found = content_of(vault, address)
        if found == "nothing":
            _copy(vault, source, manifest, address, tenant_digest)
            return address
        if isinstance(found, Manifest) and found.files == manifest.files:
            return address
    raise AssertionError("names do not end")


def names_for(model_id: str, name: str) -> Iterator[CheckpointAddress]:
    """The names under which something may be found or put: the first, and others for when it is taken.

    Names are their tenant's to overwrite and to pin, so nothing is put in the place of what lies there.
    """
    yield CheckpointAddress(model_id, "weights", name)
    for number in count(2):
        yield CheckpointAddress(model_id, "weights", f"{name}-{number}")


def content_of(vault: Vault, address: CheckpointAddress) -> Manifest | Literal["nothing", "something else"]:
    """The manifest of what a name stands for, if every byte of it is good. Raises `StorageFailed`."""
    try:
        version = vault.resolve(address)
        if version is None:
            return "nothing"
        directory = vault.version_dir(version)
        is_good = not verify_version(directory, disk=vault.disk)
        return read_manifest(directory, vault.disk) if is_good else "something else"
    except (CheckpointDamaged, UnsupportedFormat):
        return "something else"


def _copy(vault: Vault, source: Path, manifest: Manifest, address: CheckpointAddress, tenant_digest: str) -> None:
    epoch = f"{_EPOCH}{new_ulid()}"
    with vault.hold_epoch(epoch):
        staging = begin(vault, address, overwrite=False, num_bytes=manifest.size_bytes, epoch=epoch)
        try:
            for name, record in manifest.files.items():
                _copy_file(staging, source / name, record)
        except BaseException:
            abandon(staging)
            raise
        copied = msgspec.structs.replace(
            manifest,
            command_id=staging.token,
            model_id=address.model_id,
            kind=address.kind,
            name=address.name,
            tenant_digest=tenant_digest,
            expires=None,
        )
        finish(vault, staging, copied, overwrite=False)


def _copy_file(staging: Staging, path: Path, record: FileRecord) -> None:
    """What is written is what the digests were made of, whatever happens to the source meanwhile."""
    disk, target = staging.disk, staging.directory / path.name
    buffer = memoryview(bytearray(min(record.chunk_size, record.size)))
    with disk.closing(disk.open_read(path), path) as reader, disk.closing(disk.open_new(target), target) as writer:
        disk.allocate(writer, target, record.size)
        for index, expected in enumerate(record.chunk_digests):
            begin = index * record.chunk_size
            chunk = buffer[: min(record.chunk_size, record.size - begin)]
            count = disk.read(reader, path, [chunk], begin)
            if count != len(chunk) or xxhash.xxh3_128_hexdigest(chunk) != expected:
                raise CheckpointDamaged(path, f"bytes {begin} to {begin + len(chunk)} do not match their digest")
            disk.write(writer, target, [chunk], begin)
        disk.fsync(writer, target)
