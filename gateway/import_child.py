"""One import of the REST face, in a process of its own: torch is never in the gateway's, nor is a stranger's file."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from gateway.child_process import ChildProcess
from gateway.format_commands import formats_command, formats_environment
from gateway.scheduling.catalog import Catalog
from gateway.scheduling.requests import ImportRequest
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import StateSaved
from trainer_cell.vault.errors import StorageFailed, VaultError
from trainer_cell.vault.layout import CheckpointAddress
from trainer_cell.vault.recovery import settle_publish


class _Imported(msgspec.Struct, frozen=True):
    version: str
    step: int
    iteration: int
    has_optimizer: bool
    size_bytes: int


class _Refused(msgspec.Struct, frozen=True):
    kind: ErrorKind
    message: str


class ImportChild:
    """catalog: of the checkpoints; base_model: what imports sit on, prepared in `cache`."""

    def __init__(self, catalog: Catalog, base_model: str, cache: Path) -> None:
        self._catalog = catalog
        self._base_model = base_model
        self._cache = cache

    async def run(
        self, tenant: str, model_id: str, request: ImportRequest, command_id: str
    ) -> StateSaved | CommandFailed:
        """Pickles are never trusted here. When this is cancelled the process is killed. Again with the same
        `command_id`: what was published before is found."""
        try:
            made = await asyncio.to_thread(self._made_before, model_id, request, command_id)
        except VaultError as error:
            return CommandFailed(ErrorKind.STORAGE_FAILED, str(error))
        if made is not None:
            return made
        await asyncio.to_thread(self._catalog.clear_name, CheckpointAddress(model_id, "weights", request.name))
        try:
            quota = await self._quota(tenant)
        except StorageFailed as error:
            return CommandFailed(ErrorKind.STORAGE_FAILED, str(error))
        command = [*self._command(tenant, model_id, request), "--command-id", command_id, *quota]
        child = ChildProcess("import", command, formats_environment())
        try:
            status = await child.wait()
        finally:
            child.kill()
            if request.overwrite:
                self._catalog.saves.on_replaced()
        return _outcome(child.last_line, status)

    def _made_before(self, model_id: str, request: ImportRequest, command_id: str) -> StateSaved | None:
        address = CheckpointAddress(model_id, "weights", request.name)
        found = settle_publish(self._catalog.vault, address, command_id, request.overwrite, "import")
        if found is None:
            return None
        version, told = found
        return StateSaved(command_id, version, told.step, told.iteration, told.has_optimizer, told.size_bytes)

    async def _quota(self, tenant: str) -> list[str]:
        """What the tenant has and may have, as options."""
        saves = self._catalog.saves
        if saves.quota_bytes is None:
            return []
        return ["--quota", str(await saves.used_bytes(tenant)), str(saves.quota_bytes)]

    def _command(self, tenant: str, model_id: str, request: ImportRequest) -> list[str]:
        arguments = ["import", request.path, "--within", request.within, "--json"]
        arguments += ["--model-id", model_id, "--name", request.name, "--base-model", self._base_model]
        arguments += ["--tenant-digest", self._catalog.tenant_digest(tenant)]
        arguments += ["--checkpoints", str(self._catalog.vault.root), "--cache", str(self._cache)]
        arguments += ["--format", request.format] if request.format else []
        arguments += ["--alpha", str(request.alpha)] if request.alpha is not None else []
        arguments += ["--weights-only"] * (not request.load_optimizer) + ["--overwrite"] * request.overwrite
        return formats_command(*arguments)


def _outcome(last_line: str, status: int) -> StateSaved | CommandFailed:
    try:
        if status == 0:
            done = msgspec.json.decode(last_line, type=_Imported)
            return StateSaved("", done.version, done.step, done.iteration, done.has_optimizer, done.size_bytes)
        refused = msgspec.json.decode(last_line, type=_Refused)
        return CommandFailed(refused.kind, refused.message)
    except msgspec.DecodeError:
        return CommandFailed(ErrorKind.RANK_FAILED, f"the import's process ended with status {status}; see the log")
