"""What the vault raises.

    VaultError
    ├── InvalidAddress (in layout)   a name, id or address that is not one
    ├── VaultUnusable                the checkpoint root cannot hold checkpoints
    ├── VaultLocked                  somebody else holds a lock that was asked for
    ├── CheckpointExists             the public name is taken
    │   ├── NotReplaceable           ... by something the vault did not publish, so overwriting it is refused too
    │   └── NamePinned               ... by a checkpoint that is pinned, so overwriting it is refused too
    ├── CheckpointPinned             it is to be deleted, and is pinned
    ├── CheckpointDamaged            bytes, files or fields are not what was published
    │   └── TensorsDisagree          ... or not the tensors the reader expects
    ├── UnsupportedFormat            written in a format version that this code does not read
    └── StorageFailed                the file system said no
        ├── NotThere                 ENOENT, ENOTDIR
        ├── AlreadyThere             EEXIST
        └── PublishUnknown           the new version is visible, whether it is durable cannot be told

Messages name the last segment of a path only: they reach clients. The whole path is in the attribute.
"""

from __future__ import annotations

import errno as errno_names
import os
from pathlib import Path


class VaultError(Exception):
    """Anything the vault refuses or fails to do."""


class VaultUnusable(VaultError):
    def __init__(self, root: Path, reason: str) -> None:
        super().__init__(root, reason)
        self.root = root
        self.reason = reason

    def __str__(self) -> str:
        return f"checkpoint root {self.root}: {self.reason}"


class VaultLocked(VaultError):
    def __init__(self, path: Path, what: str) -> None:
        super().__init__(path, what)
        self.path = path
        self.what = what

    def __str__(self) -> str:
        return f"{self.what} is locked by another process"


class CheckpointExists(VaultError):
    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.uri = uri

    def __str__(self) -> str:
        return f"{self.uri} exists already; pick another name or ask for it to be overwritten"


class NotReplaceable(CheckpointExists):
    def __str__(self) -> str:
        return f"{self.uri} is not a checkpoint that can be overwritten; pick another name"


class NamePinned(CheckpointExists):
    def __str__(self) -> str:
        return f"{self.uri} is pinned; unpin it or pick another name"


class CheckpointPinned(VaultError):
    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.uri = uri

    def __str__(self) -> str:
        return f"{self.uri} is pinned; unpin it first"


class CheckpointDamaged(VaultError):
    """`what` names the file, tensor or field and what is wrong with it; `path` is where it was found."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(path, what)
        self.path = path
        self.what = what

    def __str__(self) -> str:
        return f"{self.path.name}: {self.what}"


class TensorsDisagree(CheckpointDamaged):
    """The checkpoint is whole, but its tensors are not those asked for."""


class UnsupportedFormat(VaultError):
    def __init__(self, path: Path, version: int, supported: int) -> None:
        super().__init__(path, version, supported)
        self.path = path
        self.version = version
        self.supported = supported

    def __str__(self) -> str:
        return f"{self.path.name}: format version {self.version} is not supported, only {self.supported} is"


class StorageFailed(VaultError):
    """operation: the name of the call in `Disk`; errno: as the kernel gave it."""

    def __init__(self, operation: str, path: Path, errno: int) -> None:
        super().__init__(operation, path, errno)
        self.operation = operation
        self.path = path
        self.errno = errno

    @property
    def is_no_space(self) -> bool:
        return self.errno in (errno_names.ENOSPC, errno_names.EDQUOT)

    @property
    def errno_name(self) -> str:
        return errno_names.errorcode.get(self.errno, str(self.errno))

    def __str__(self) -> str:
        return f"{self.operation} {self.path.name}: {self.errno_name} ({os.strerror(self.errno)})"


class NotThere(StorageFailed):
    pass


class AlreadyThere(StorageFailed):
    pass


class PublishUnknown(StorageFailed):
    def __str__(self) -> str:
        return f"{super().__str__()}; the checkpoint is visible but may not survive a power cut"


_BY_ERRNO = {
    errno_names.ENOENT: NotThere,
    errno_names.ENOTDIR: NotThere,
    errno_names.EEXIST: AlreadyThere,
}


def storage_failed(operation: str, path: Path, error: OSError) -> StorageFailed:
    """The error of ours for one of the kernel's."""
    number = error.errno or errno_names.EIO
    return _BY_ERRNO.get(number, StorageFailed)(operation, path, number)
