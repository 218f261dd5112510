"""Point: make a public name stand for a frozen version, at once and durably."""

from __future__ import annotations

import errno
import stat
from contextlib import suppress

from trainer_cell.vault.errors import (
    AlreadyThere,
    CheckpointDamaged,
    CheckpointExists,
    NamePinned,
    NotReplaceable,
    NotThere,
    PublishUnknown,
    StorageFailed,
)
from trainer_cell.vault.layout import CheckpointAddress, Vault, VersionName, link_target
from trainer_cell.vault.retention_record import read_record

_ATTEMPTS = 3


def check_name(vault: Vault, address: CheckpointAddress, overwrite: bool) -> None:
    """Raises `CheckpointExists` when the public name is taken: `NotReplaceable` by something that was not published,
    `NamePinned` by a checkpoint that is pinned."""
    try:
        found = vault.disk.stat(vault.public_path(address))
    except NotThere:
        return
    if not stat.S_ISLNK(found.st_mode):
        raise NotReplaceable(address.uri)
    if not overwrite:
        raise CheckpointExists(address.uri)
    pointed = pointed_version(vault, address)
    if pointed is not None and read_record(vault, address.model_id, pointed).pinned:
        raise NamePinned(address.uri)


def pointed_version(vault: Vault, address: CheckpointAddress) -> VersionName | None:
    """What a public name's link says, whether or not it is there; None for no link, or one that is not ours."""
    try:
        told = vault.resolve(address)
    except CheckpointDamaged:
        return None
    return VersionName.parse(told.rpartition("/")[2]) if told else None


def pointer_name(token: str) -> str:
    """Of the temporary link beside a public name; it tells its epoch, as the staging directory does."""
    return f".point.{token}"


class Pointer:
    """The public name of `address` on its way to `version`, which is durable. The caller holds the model's lock.

    token: of the attempt, `<epoch>.<ulid>`.
    """

    def __init__(self, vault: Vault, address: CheckpointAddress, version: VersionName, token: str) -> None:
        self._vault = vault
        self._disk = vault.disk
        self._address = address
        self._target = link_target(version)
        self._public = vault.public_path(address)
        self._temporary = vault.kind_dir(address) / pointer_name(token)

    def point(self, overwrite: bool) -> None:
        """When this returns the name points at the version, durably.

        Raises `CheckpointExists` or `StorageFailed` with the name as it was, or `PublishUnknown`.
        """
        try:
            if overwrite:
                self._replace()
            else:
                # Straight to the name: of two writers the kernel lets one win.
                self._disk.symlink(self._target, self._public)
        except StorageFailed as failure:
            if not self._is_pointed(failure):
                self._drop_temporary()
                if isinstance(failure, AlreadyThere) and not overwrite:
                    raise CheckpointExists(self._address.uri) from failure
                raise
            self.confirm()
            return
        try:
            self._disk.fsync_directory(self._public.parent)
        except StorageFailed:
            self.confirm()

    def confirm(self) -> None:
        """The name points at the version already, but maybe not durably: point once more, with a new link.

        Raises `PublishUnknown` when the disk does not confirm that either.
        """
        failed = StorageFailed("symlink", self._public, errno.EIO)
        for _ in range(_ATTEMPTS):
            try:
                self._drop_temporary()
                self._replace()
                self._disk.fsync_directory(self._public.parent)
                return
            except StorageFailed as failure:
                failed = failure
        raise PublishUnknown(failed.operation, self._public, failed.errno) from failed

    def _replace(self) -> None:
        check_name(self._vault, self._address, overwrite=True)
        self._disk.symlink(self._target, self._temporary)
        self._disk.rename(self._temporary, self._public)

    def _is_pointed(self, failure: StorageFailed) -> bool:
        """Whether the call that failed has changed the name all the same; raises `PublishUnknown` if nobody can say."""
        try:
            return self._disk.read_link(self._public) == self._target
        except NotThere:
            return False
        except StorageFailed as unreadable:
            if unreadable.errno == errno.EINVAL:  # no link
                return False
            raise PublishUnknown(failure.operation, self._public, failure.errno) from unreadable

    def _drop_temporary(self) -> None:
        with suppress(StorageFailed):
            self._disk.unlink(self._temporary)
