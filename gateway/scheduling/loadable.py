"""Whether a checkpoint can go into a model, told from its manifest; a refusal here touches no rank."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gateway.scheduling.admission import check_rank, load_address
from gateway.scheduling.catalog import Catalog
from gateway.scheduling.errors import CheckpointUnreadable, CheckpointUnsupported, UnknownCheckpoint
from trainer_cell.protocol.commands import AdapterSpec
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import Hello
from trainer_cell.vault.errors import StorageFailed
from trainer_cell.vault.locks import Lock
from trainer_cell.vault.manifest import Manifest


@dataclass(frozen=True)
class Loadable:
    """A version, relative to the checkpoint root, that fits; the public link has been read once.

    lease: while held, nobody deletes the version.
    """

    version: str
    adapter: AdapterSpec
    lease: Lock


async def find_loadable(
    catalog: Catalog, tenant: str, path: str, with_optimizer: bool, hello: Hello, into: AdapterSpec | None
) -> Loadable:
    """Resolve `path` and check it against the cell and, where the load is in place, the model's adapter `into`.

    Raises `CommandFailed`.
    """
    try:
        entry = await catalog.find(tenant, load_address(path))
        lease = await asyncio.to_thread(catalog.vault.lease, entry.version)
        if lease is None:
            raise UnknownCheckpoint(f"no checkpoint {path}")
    except UnknownCheckpoint as error:
        raise CommandFailed(ErrorKind.CHECKPOINT_NOT_FOUND, error.message) from error
    except CheckpointUnsupported as error:
        raise CommandFailed(ErrorKind.CHECKPOINT_INCOMPATIBLE, error.message) from error
    except CheckpointUnreadable as error:
        raise CommandFailed(ErrorKind.CHECKPOINT_CORRUPT, error.message) from error
    except StorageFailed as error:
        raise CommandFailed(ErrorKind.STORAGE_FAILED, str(error)) from error
    try:
        _check_fit(entry.manifest, path, with_optimizer, hello, into)
    except CommandFailed:
        lease.release()
        raise
    return Loadable(entry.version, entry.manifest.adapter, lease)


def _check_fit(manifest: Manifest, path: str, with_optimizer: bool, hello: Hello, into: AdapterSpec | None) -> None:
    _check_base(manifest, hello)
    if into is None:
        check_rank(manifest.adapter.rank, hello)
    else:
        _check_adapter(manifest.adapter, into)
    if with_optimizer and not manifest.has_optimizer and not hello.no_load_optim:
        raise CommandFailed(
            ErrorKind.NO_OPTIMIZER_STATE, f"{path} holds no optimizer state; load it without the optimizer"
        )


def _check_base(manifest: Manifest, hello: Hello) -> None:
    served = hello.base_model
    if manifest.base_digest != served.digest:
        raise CommandFailed(
            ErrorKind.CHECKPOINT_INCOMPATIBLE,
            f"base_digest: the checkpoint was made over other base weights ({manifest.base_model}, "
            f"{manifest.base_digest}) than are served here ({served.name}, {served.digest})",
        )


def _check_adapter(stored: AdapterSpec, live: AdapterSpec) -> None:
    for field in AdapterSpec.__struct_fields__:
        if getattr(stored, field) != getattr(live, field):
            raise CommandFailed(
                ErrorKind.CHECKPOINT_INCOMPATIBLE,
                f"{field} is {getattr(stored, field)} in the checkpoint and {getattr(live, field)} in the model",
            )
