"""What the vault raises, as failures of a command. One table, by type."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.vault import errors as vault_errors
from trainer_cell.vault.layout import InvalidAddress

_KINDS: tuple[tuple[type[Exception], ErrorKind], ...] = (
    (InvalidAddress, ErrorKind.BAD_COMMAND),
    (vault_errors.CheckpointExists, ErrorKind.CHECKPOINT_EXISTS),
    (vault_errors.UnsupportedFormat, ErrorKind.CHECKPOINT_INCOMPATIBLE),
    (vault_errors.CheckpointDamaged, ErrorKind.CHECKPOINT_CORRUPT),
    (vault_errors.StorageFailed, ErrorKind.STORAGE_FAILED),
)


@contextmanager
def vault_failures() -> Iterator[None]:
    """Inside, an error of the vault becomes the `CommandFailed` of its kind."""
    try:
        yield
    except tuple(kind for kind, _ in _KINDS) as error:
        for of_vault, kind in _KINDS:
            if isinstance(error, of_vault):
                raise CommandFailed(kind, str(error)) from error
        raise
