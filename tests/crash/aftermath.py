"""What crashed processes leave behind, for others to clear up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from tests.crash.workload import ADDRESS, COMMAND, NEW, NUM_BYTES, OLD, prepared, save
from tests.trainer_cell.vault.disks import Crash, UnsyncedDisk
from trainer_cell.vault.deletion import delete_checkpoint
from trainer_cell.vault.layout import Vault
from trainer_cell.vault.publish import begin

T = TypeVar("T")


class DyingDisk(UnsyncedDisk):
    """Its process dies where a name is about to be changed."""

    def __init__(self, at: str) -> None:
        self._at = at

    def call(self, operation: str, path: Path, act: Callable[[], T]) -> T:
        if operation == self._at and path.parent.name == "weights":
            raise Crash(operation)
        return super().call(operation, path, act)


def overwritten(root: Path) -> None:
    save(prepared(root, overwrite=True), OLD, overwrite=True)


def crashed_overwrite(root: Path) -> None:
    """A frozen version that no name points at, a temporary link, and a staging directory."""
    vault = prepared(root, overwrite=True)
    begin(vault, ADDRESS, True, NUM_BYTES, "OTHER")
    for at in ("symlink", "rename"):
        with pytest.raises(Crash):
            save(Vault(root, DyingDisk(at)), NEW, overwrite=True, command=COMMAND if at == "rename" else "c-before")


def unanswered_overwrite(root: Path) -> None:
    """Complete, but nobody has heard of it."""
    save(prepared(root, overwrite=True), NEW, overwrite=True)


def crashed_delete(root: Path) -> None:
    """The name is gone, its versions are where they were."""

    class Dying(UnsyncedDisk):
        def rename(self, source: Path, target: Path) -> None:
            if target.parent.name == ".staging" and any(target.parent.glob("deleted.*")):
                raise Crash("rename")
            super().rename(source, target)

    overwritten(root)
    with pytest.raises(Crash):
        delete_checkpoint(Vault(root, Dying()), ADDRESS)
