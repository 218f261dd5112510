"""Recovery of one model's directory; `startup` tells the steps and their reasons."""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from trainer_cell.vault.deletion import set_versions_aside, unlink_name
from trainer_cell.vault.errors import CheckpointDamaged, CheckpointExists, StorageFailed, UnsupportedFormat, VaultError
from trainer_cell.vault.inventory import Contents, public_names, public_versions, read_contents, version_names
from trainer_cell.vault.layout import CheckpointAddress, Vault, VersionName
from trainer_cell.vault.manifest import read_manifest
from trainer_cell.vault.point import Pointer, pointed_version
from trainer_cell.vault.quarantine import quarantine_link, quarantine_version
from trainer_cell.vault.retention_record import (
    NO_RECORD,
    RetentionRecord,
    read_records,
    sweep_records,
    write_records,
)
from trainer_cell.vault.ulid import new_ulid

_EPOCH = "startup"

What = Literal["deleted", "repaired", "unnamed", "adopted", "collected", "quarantined"]


@dataclass(frozen=True)
class Finding:
    """What recovery did about one name or version, in words in `detail`.

    deleted: a deletion was finished · repaired: a name points at an earlier version now · unnamed: a name had no good
    version and was removed · adopted: a frozen version was pointed to · collected: one was removed, its save had
    failed · quarantined. tenant_digest: whose it is, where any manifest of the model tells.
    """

    what: What
    address: CheckpointAddress
    detail: str
    tenant_digest: str | None


class ModelRecovery:
    """One run over a model; the caller holds its lock. has_failed: whether a command is known to have failed.

    aside: directories to be removed when the lock is free again.
    """

    def __init__(self, vault: Vault, model_id: str, has_failed: Callable[[str], bool]) -> None:
        self.findings: list[Finding] = []
        self.errors: list[str] = []
        self.aside: list[Path] = []
        self._vault = vault
        self._model_id = model_id
        self._has_failed = has_failed
        self._good: dict[VersionName, Contents] = {}
        self._bad: dict[VersionName, str] = {}
        # Of a newer format, or not to be read just now.
        self._untold: set[VersionName] = set()
        self._records: dict[VersionName, RetentionRecord] = {}
        self._owner: str | None = None

    def run(self) -> None:
        """Raises `StorageFailed`, with what was done so far in `findings`."""
        self._records = read_records(self._vault, self._model_id)
        for version in version_names(self._vault, self._model_id):
            self._look(version)
        self._finish_deletions()
        for address in public_names(self._vault, self._model_id):
            self._mend_name(address)
        for address in {CheckpointAddress(self._model_id, one.kind, one.name): None for one in self._good}:
            self._settle_unpointed(address)
        self._set_bad_apart()

    def _look(self, version: VersionName) -> None:
        try:
            contents = read_contents(self._vault, self._model_id, version)
            self._good[version] = contents
            self._owner = self._owner or contents.tenant_digest
        except CheckpointDamaged as damage:
            self._bad[version] = damage.what if damage.path.name == str(version) else str(damage)
            self._owner = self._owner or self._owner_of(version)
        except UnsupportedFormat:
            self._untold.add(version)
        except StorageFailed as failure:
            self._untold.add(version)
            self.errors.append(f"{self._model_id}: {version}: {failure}")

    def _owner_of(self, version: VersionName) -> str | None:
        try:
            manifest = read_manifest(self._vault.versions_dir(self._model_id) / str(version), self._vault.disk)
        except VaultError:
            return None
        return manifest.tenant_digest if manifest.model_id == self._model_id else None

    def _finish_deletions(self) -> None:
        known = [*self._good, *self._bad, *self._untold]
        doomed = [version for version in known if self._record(version).doomed is not None]
        for address in public_names(self._vault, self._model_id):
            if pointed_version(self._vault, address) in doomed:
                unlink_name(self._vault, address)
        gone = set_versions_aside(self._vault, self._model_id, doomed)
        self.aside += gone.values()
        for version in doomed:
            self._good.pop(version, None)
            self._bad.pop(version, None)
            self._untold.discard(version)
            if version in gone:
                self._tell("deleted", self._address(version), f"{version}: a deletion that was begun is finished")

    def _mend_name(self, address: CheckpointAddress) -> None:
        if not stat.S_ISLNK(self._vault.disk.stat(self._vault.public_path(address)).st_mode):
            return
        pointed = pointed_version(self._vault, address)
        if pointed is not None and (pointed in self._good or pointed in self._untold):
            return
        problem = _problem(pointed, self._bad)
        heir = max((one for one in self._good if one.is_of(address)), key=lambda one: one.ulid, default=None)
        if heir is not None:
            self._repoint(address, heir, pointed, problem)
        elif any(one.is_of(address) for one in self._untold):
            self.errors.append(f"{address.uri}: {problem}, and whether another version is good cannot be told now")
        else:
            if pointed is None:
                quarantine_link(self._vault, address)
            else:
                unlink_name(self._vault, address)
            self._tell("unnamed", address, f"{problem}; no version of it is good, so the name was removed")

    def _repoint(
        self, address: CheckpointAddress, heir: VersionName, pointed: VersionName | None, problem: str
    ) -> None:
        """The heir is marked first, so that nobody finds it under the name without the remark. A pin goes over."""
        note = f"repaired at a start: {problem}; this is the latest version that verifies"
        old = self._record(pointed) if pointed is not None else NO_RECORD
        record = self._record(heir)
        write_records(
            self._vault,
            self._model_id,
            {heir: msgspec.structs.replace(record, pinned=record.pinned or old.pinned, note=note)},
        )
        if pointed is not None and old.pinned:
            # A pinned name is not pointed elsewhere.
            write_records(self._vault, self._model_id, {pointed: NO_RECORD})
        self._pointer(address, heir).point(overwrite=True)
        self._tell("repaired", address, f"{problem}; it is {heir} now")

    def _settle_unpointed(self, address: CheckpointAddress) -> None:
        """Of the versions newer than what the name points at the latest is adopted; the others it replaces."""
        try:
            told = self._vault.resolve(address)
        except CheckpointDamaged:
            return  # something that was put there by hand, and is no link
        pointed = VersionName.parse(told.rpartition("/")[2]) if told is not None else None
        if told is not None and pointed is None:
            return  # a plain directory
        newer = [one for one in self._good if one.is_of(address) and (pointed is None or one.ulid > pointed.ulid)]
        for version in sorted(newer, key=lambda one: one.ulid, reverse=True):
            if self._has_failed(self._good[version].command_id):
                self._collect(address, version, "its save has failed")
                continue
            try:
                self._vault.make_durable(self._vault.kind_dir(address))
                self._pointer(address, version).point(overwrite=pointed is not None)
            except CheckpointExists as refusal:
                self._collect(address, version, str(refusal))
                continue
            self._tell("adopted", address, f"{version} was complete, and its name points at it now")
            return

    def _collect(self, address: CheckpointAddress, version: VersionName, why: str) -> None:
        gone = set_versions_aside(self._vault, self._model_id, [version])
        self.aside += gone.values()
        if gone:
            self._tell("collected", address, f"{version} was never pointed to: {why}")

    def _set_bad_apart(self) -> None:
        """Not what a name still points at, for want of knowing better: its record is needed when that is mended."""
        pointed = set(public_versions(self._vault, self._model_id))
        for version, problem in self._bad.items():
            if version not in pointed and quarantine_version(self._vault, self._model_id, version) is not None:
                self._tell("quarantined", self._address(version), f"{version}: {problem}")
        sweep_records(self._vault, self._model_id, {*version_names(self._vault, self._model_id), *pointed})

    def _pointer(self, address: CheckpointAddress, version: VersionName) -> Pointer:
        return Pointer(self._vault, address, version, f"{_EPOCH}.{new_ulid()}")

    def _record(self, version: VersionName) -> RetentionRecord:
        return self._records.get(version, NO_RECORD)

    def _address(self, version: VersionName) -> CheckpointAddress:
        return CheckpointAddress(self._model_id, version.kind, version.name)

    def _tell(self, what: What, address: CheckpointAddress, detail: str) -> None:
        self.findings.append(Finding(what, address, detail, self._owner))


def _problem(pointed: VersionName | None, bad: dict[VersionName, str]) -> str:
    if pointed is None:
        return "its link did not lead to a version of this name"
    return f"{pointed} is {'damaged: ' + bad[pointed] if pointed in bad else 'missing'}"
