"""Where checkpoints are: addresses, names, and the paths they stand for.

    <root>/<model>/<kind>/<name>                       -> ../.versions/<kind>.<name>.<ulid>   (public path)
    <root>/<model>/.recovery/latest                    -> ../.versions/recovery.latest.<ulid>   (kind `recovery`)
    <root>/<model>/.versions/<kind>.<name>.<ulid>/     immutable, complete
    <root>/<model>/.retention/<kind>.<name>.<ulid>.json   what was decided about a version later: TTL, pin, deletion
    <root>/.staging/<epoch>.<ulid>/                    garbage once the lock <epoch>.lock is free
    <root>/.quarantine/<model>/<kind>.<name>.<ulid>.<ulid>/   a version that did not verify, set aside at a start

`<model>` is the model id with `:` written as `~`. Everything that comes from outside is matched in full against a
closed alphabet before it becomes part of a path.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from trainer_cell.vault.disk import LOCAL_DISK, Disk
from trainer_cell.vault.errors import (
    AlreadyThere,
    CheckpointDamaged,
    NotThere,
    StorageFailed,
    VaultError,
    VaultUnusable,
)
from trainer_cell.vault.locks import Lock, lock_epoch, lock_model, lock_root, lock_version
from trainer_cell.vault.ulid import ULID_PATTERN, new_ulid

__all__ = ["CheckpointAddress", "InvalidAddress", "Kind", "Vault", "new_ulid"]

Kind = Literal["weights", "sampler_weights", "recovery"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# What a service needs to bring a model back, and takes, replaces and removes by itself.
RECOVERY: Final = "recovery"
CLIENT_KINDS: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind != RECOVERY)

VERSIONS = ".versions"
RETENTION = ".retention"
STAGING = ".staging"
QUARANTINE = ".quarantine"
_SCHEME = "tinker://"
_MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,190}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_VERSION = re.compile(rf"({'|'.join(KINDS)})\.([A-Za-z0-9][A-Za-z0-9._-]{{0,127}})\.({ULID_PATTERN})")
# Less room than this serves nobody; it is found out at start-up, not at the first save.
_LEAST_FREE_BYTES = 4 << 20
# Of a path below the root, with every name in it at its longest. A shard's path in staging is shorter than in its
# version, so that under a root too deep a save would succeed and no load could open it.
_LONGEST_BELOW = 640


class InvalidAddress(VaultError, ValueError):
    """A model id, kind, name or address that cannot be one."""


@dataclass(frozen=True)
class CheckpointAddress:
    """What `tinker://<model_id>/<kind>/<name>` names; valid by construction, `InvalidAddress` otherwise."""

    model_id: str
    kind: Kind
    name: str

    def __post_init__(self) -> None:
        check_model_id(self.model_id)
        if self.kind not in KINDS:
            raise InvalidAddress(f"checkpoint kind must be one of {', '.join(KINDS)}, not {_shown(self.kind)}")
        check_name(self.name)

    @property
    def uri(self) -> str:
        return f"{_SCHEME}{self.model_id}/{self.kind}/{self.name}"

    @classmethod
    def parse(cls, uri: str) -> CheckpointAddress:
        """Raises `InvalidAddress` for anything but the three parts of a checkpoint's address."""
        parts = uri.removeprefix(_SCHEME).split("/")
        if not uri.startswith(_SCHEME) or len(parts) != 3:
            raise InvalidAddress(f"a checkpoint's address is {_SCHEME}<model_id>/<kind>/<name>, not {_shown(uri)}")
        model_id, kind, name = parts
        return cls(model_id, kind, name)  # type: ignore[arg-type]  # the kind is checked there


def check_model_id(model_id: str) -> None:
    if not _MODEL_ID.fullmatch(model_id):
        raise InvalidAddress(f"{_shown(model_id)} is not a model id")


def check_name(name: str) -> None:
    """A name is one path segment. One that ends in a dot is refused: some file systems drop the dot."""
    if not _NAME.fullmatch(name) or name.endswith("."):
        raise InvalidAddress(
            f"{_shown(name)} is not a checkpoint name: 1 to 128 letters, digits, '.', '_' and '-', "
            "the first a letter or digit, the last not a dot"
        )


def _shown(text: str) -> str:
    return repr(text if len(text) <= 200 else f"{text[:200]}…")


def kind_directory(kind: Kind) -> str:
    """Of a kind's public names under a model's directory; that of recovery snapshots is hidden."""
    return f".{kind}" if kind == RECOVERY else kind


def directory_name(model_id: str) -> str:
    """Of a model's directory under the root."""
    check_model_id(model_id)
    return model_id.replace(":", "~")


def model_id_of(directory: str) -> str | None:
    """The inverse of `directory_name`; None for a directory that is not a model's."""
    model_id = directory.replace("~", ":")
    return model_id if ":" not in directory and _MODEL_ID.fullmatch(model_id) else None


@dataclass(frozen=True)
class VersionName:
    """The name of a version's directory, `<kind>.<name>.<ulid>`."""

    kind: Kind
    name: str
    ulid: str

    def __str__(self) -> str:
        return f"{self.kind}.{self.name}.{self.ulid}"

    def is_of(self, address: CheckpointAddress) -> bool:
        return (self.kind, self.name) == (address.kind, address.name)

    @classmethod
    def parse(cls, text: str) -> VersionName | None:
        match = _VERSION.fullmatch(text)
        return cls(*match.groups()) if match else None  # type: ignore[arg-type]  # the pattern holds the kinds


class Vault:
    """The checkpoint root. Versions are told as paths relative to it: `<model>/.versions/<kind>.<name>.<ulid>`."""

    def __init__(self, root: Path, disk: Disk = LOCAL_DISK) -> None:
        self.root = root
        self.disk = disk
        # Directories whose own entry this process has made durable, so that no later publish pays for it again.
        self._durable: set[Path] = set()

    def create(self) -> None:
        """Make the root if it is missing and try out everything a publish does; raises `VaultUnusable`.

        A full disk is a reason only for a root that is new: one that holds checkpoints serves them, and lets its
        tenants delete some, while saves fail.
        """
        is_new = True
        if len(os.fsencode(self.root.absolute())) + _LONGEST_BELOW > os.pathconf("/", "PC_PATH_MAX"):
            raise VaultUnusable(self.root, "its path is too long")
        try:
            is_new = not self.staging_root.exists()
            missing = [path for path in (self.root, *self.root.parents) if not path.exists()]
            self.make_durable(*reversed(missing), self.staging_root)
            free = self.disk.free_bytes(self.root)
            self._rehearse()
        except (StorageFailed, OSError) as error:
            if not is_new and error.errno in (errno.ENOSPC, errno.EDQUOT):
                return
            raise VaultUnusable(self.root, str(error)) from error
        if is_new and free < _LEAST_FREE_BYTES:
            raise VaultUnusable(self.root, f"{free} bytes are free, at least {_LEAST_FREE_BYTES} are needed")

    def _rehearse(self) -> None:
        disk, directory = self.disk, self.staging_root / f"rehearsal.{new_ulid()}"
        disk.make_directory(directory)
        try:
            path = directory / "file"
            with disk.closing(disk.open_new(path), path) as descriptor:
                disk.allocate(descriptor, path, 4096)
                disk.write(descriptor, path, [memoryview(bytes(4096))], 0)
                disk.fsync(descriptor, path)
            disk.symlink("file", directory / "link")
            disk.rename(directory / "link", directory / "pointer")
            disk.fsync_directory(directory)
        finally:
            with suppress(StorageFailed):
                disk.remove_tree(directory)

    def make_durable(self, *directories: Path) -> None:
        """Make each directory, outermost first, and fsync its parent: also when another had only just made it."""
        for path in directories:
            try:
                self.disk.make_directory(path)
            except AlreadyThere:
                if path in self._durable:
                    continue
            self.disk.fsync_directory(path.parent)
            self._durable.add(path)

    # Paths

    @property
    def staging_root(self) -> Path:
        return self.root / STAGING

    @property
    def quarantine_root(self) -> Path:
        return self.root / QUARANTINE

    def models(self) -> list[str]:
        """The ids of all models that have a directory here."""
        return [model_id for model_id in map(model_id_of, self.disk.names(self.root)) if model_id is not None]

    def model_dir(self, model_id: str) -> Path:
        return self.root / directory_name(model_id)

    def versions_dir(self, model_id: str) -> Path:
        return self.model_dir(model_id) / VERSIONS

    def retention_dir(self, model_id: str) -> Path:
        return self.model_dir(model_id) / RETENTION

    def kind_dir(self, address: CheckpointAddress) -> Path:
        return self.model_dir(address.model_id) / kind_directory(address.kind)

    def public_path(self, address: CheckpointAddress) -> Path:
        return self.kind_dir(address) / address.name

    def version(self, model_id: str, name: VersionName) -> str:
        """A version as it is told to others."""
        return f"{directory_name(model_id)}/{VERSIONS}/{name}"

    def version_dir(self, version: str) -> Path:
        """Where a version told by `resolve` or by a publish is; raises `InvalidAddress` for anything else."""
        model, _, rest = version.partition("/")
        holder, _, name = rest.partition("/")
        is_linked = holder == VERSIONS and VersionName.parse(name) is not None
        is_plain = holder in CLIENT_KINDS and _NAME.fullmatch(name) is not None
        if model_id_of(model) is None or not (is_linked or is_plain):
            raise InvalidAddress(f"{_shown(version)} is not a version")
        return self.root / version

    def resolve(self, address: CheckpointAddress) -> str | None:
        """The version the public name stands for now, None when the name is free. The link is read once.

        Raises `CheckpointDamaged` when the public name is anything but a link to a version of that name, or a
        plain directory (which an older layout left there; it knew no recovery snapshots).
        """
        public = self.public_path(address)
        try:
            found = self.disk.stat(public)
            if stat.S_ISLNK(found.st_mode):
                target = self.disk.read_link(public)
                return self.version(address.model_id, self._version_at(address, target))
        except NotThere:
            return None
        if not stat.S_ISDIR(found.st_mode) or address.kind == RECOVERY:
            raise CheckpointDamaged(public, "is neither a link to a version nor a directory")
        return str(public.relative_to(self.root))

    def _version_at(self, address: CheckpointAddress, target: str) -> VersionName:
        version = VersionName.parse(target.removeprefix(f"../{VERSIONS}/"))
        if version is None or target != link_target(version) or not version.is_of(address):
            raise CheckpointDamaged(self.public_path(address), "does not point at a version of this name")
        return version

    # Locks

    def lock(self) -> Lock:
        """The whole root's, held by the gateway; raises `VaultLocked` when another holds it."""
        return lock_root(self.disk, self.root)

    @contextmanager
    def hold_epoch(self, epoch: str, is_in_vain: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """While held, nobody sweeps its staging; raises `VaultLocked` when another keeps it, or waiting is vain."""
        self.make_durable(self.staging_root)
        with lock_epoch(self.disk, self.staging_root, epoch, is_in_vain):
            yield

    def lock_model(self, model_id: str) -> Lock:
        """Between those who freeze, point or delete; waits for its holder, not for ever.

        Raises `NotThere` before the model's first publish, or `StorageFailed` (ETIMEDOUT).
        """
        return lock_model(self.disk, self.versions_dir(model_id))

    def lease(self, version: str) -> Lock | None:
        """While held, nobody deletes the version; None when it is gone or going."""
        return lock_version(self.disk, self.version_dir(version), exclusive=False)


def link_target(version: VersionName) -> str:
    """What a public name's link holds."""
    return f"../{VERSIONS}/{version}"
