"""What was decided about a version after it was published: its TTL, a pin, its deletion, a remark.

Versions are immutable, so this lies beside them, in `<model>/.retention/<version>.json`; most versions have none. A
record is replaced whole (written aside, synced, renamed), so readers need no lock. Who writes holds the model's lock.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import msgspec
import xxhash

from trainer_cell.vault.disk import Disk
from trainer_cell.vault.errors import NotThere, StorageFailed
from trainer_cell.vault.layout import Vault, VersionName
from trainer_cell.vault.ulid import ULID_PATTERN, new_ulid

_SUFFIX = ".json"
_TEMPORARY = re.compile(rf"\.new\.{ULID_PATTERN}")
_MAX_BYTES = 64 << 10


class RetentionRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """expires: in place of the manifest's, None for never; unset where the manifest's holds.

    pinned: kept whatever the rules say. doomed: why it is being deleted; there is no way back from that.
    note: what its owner should know.
    """

    expires: str | msgspec.UnsetType | None = msgspec.UNSET
    pinned: bool = False
    doomed: str | None = None
    note: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.expires, str):
            moment(self.expires)

    def expires_over(self, stated: datetime | None) -> datetime | None:
        """When the version expires; `stated`: what its manifest says."""
        if isinstance(self.expires, msgspec.UnsetType):
            return stated
        return None if self.expires is None else moment(self.expires)


def moment(text: str) -> datetime:
    """A time with its zone, ISO 8601; raises `ValueError` for anything else."""
    parsed = datetime.fromisoformat(text)
    if parsed.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return parsed


NO_RECORD = RetentionRecord()
# A decision that cannot be read may have been to keep the version.
UNREADABLE = RetentionRecord(
    pinned=True, note="its retention record cannot be read: kept until it is pinned or unpinned"
)


class _Sealed(RetentionRecord, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """As it stands in the file. digest: xxh3-128 (hex) of the record without it; a flipped bit must decide nothing."""

    digest: str


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Sealed)


def read_record(vault: Vault, model_id: str, version: VersionName) -> RetentionRecord:
    """`NO_RECORD` where there is none, `UNREADABLE` for what is not one. Raises `StorageFailed`."""
    try:
        sealed = _decoder.decode(_read(vault.disk, _place(vault, model_id, version)))
    except NotThere:
        return NO_RECORD
    except msgspec.DecodeError:
        return UNREADABLE
    fields = RetentionRecord.__struct_fields__
    record = RetentionRecord(**{field: getattr(sealed, field) for field in fields})
    return record if _digest(record) == sealed.digest else UNREADABLE


def read_records(vault: Vault, model_id: str) -> dict[VersionName, RetentionRecord]:
    """All of a model's. Raises `StorageFailed`."""
    try:
        names = vault.disk.names(vault.retention_dir(model_id))
    except NotThere:
        return {}
    versions = [VersionName.parse(name.removesuffix(_SUFFIX)) for name in names if name.endswith(_SUFFIX)]
    return {version: read_record(vault, model_id, version) for version in versions if version is not None}


def write_records(vault: Vault, model_id: str, records: Mapping[VersionName, RetentionRecord]) -> None:
    """When this returns they are durable. Raises `StorageFailed`, with any of them written or not."""
    if not records:
        return
    directory = vault.retention_dir(model_id)
    vault.make_durable(directory)
    for version, record in records.items():
        _write(vault.disk, _place(vault, model_id, version), _sealed(record))
    vault.disk.fsync_directory(directory)


def _digest(record: RetentionRecord) -> str:
    return xxhash.xxh3_128_hexdigest(_encoder.encode(record))


def _sealed(record: RetentionRecord) -> bytes:
    fields = {field: getattr(record, field) for field in RetentionRecord.__struct_fields__}
    return _encoder.encode(_Sealed(digest=_digest(record), **fields))


def drop_records(vault: Vault, model_id: str, versions: Collection[VersionName]) -> None:
    """Of versions that are gone. Not synced: should a record come back with a power cut, it speaks of nothing."""
    for version in versions:
        with suppress(NotThere):
            vault.disk.unlink(_place(vault, model_id, version))


def stray_records(vault: Vault, model_id: str, versions: Collection[VersionName]) -> list[Path]:
    """What crashed writers left, and the records of all but these versions. Raises `StorageFailed`."""
    directory = vault.retention_dir(model_id)
    try:
        names = vault.disk.names(directory)
    except NotThere:
        return []
    return [directory / name for name in names if _is_stray(name, versions)]


def sweep_records(vault: Vault, model_id: str, versions: Collection[VersionName]) -> None:
    """Remove what `stray_records` tells. Raises `StorageFailed`."""
    for path in stray_records(vault, model_id, versions):
        vault.disk.unlink(path)


def _is_stray(name: str, versions: Collection[VersionName]) -> bool:
    version = VersionName.parse(name.removesuffix(_SUFFIX)) if name.endswith(_SUFFIX) else None
    return version not in versions if version is not None else _TEMPORARY.fullmatch(name) is not None


def _place(vault: Vault, model_id: str, version: VersionName) -> Path:
    return vault.retention_dir(model_id) / f"{version}{_SUFFIX}"


def _read(disk: Disk, path: Path) -> bytes:
    with disk.closing(disk.open_read(path), path) as descriptor:
        buffer = memoryview(bytearray(_MAX_BYTES))
        return bytes(buffer[: disk.read(descriptor, path, [buffer], 0)])


def _write(disk: Disk, path: Path, raw: bytes) -> None:
    temporary = path.parent / f".new.{new_ulid()}"
    try:
        with disk.closing(disk.open_new(temporary), temporary) as descriptor:
            disk.write(descriptor, temporary, [memoryview(raw)], 0)
            disk.fsync(descriptor, temporary)
        disk.rename(temporary, path)
    except StorageFailed:
        with suppress(StorageFailed):
            disk.unlink(temporary)
        raise
