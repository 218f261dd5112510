"""`cellgate checkpoints`: reads checkpoint directories as they lie on disk; no service need run, none is disturbed."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import BaseModel, Field
from pydantic_settings import CliApp, CliPositionalArg, CliSubCommand, CliToggleFlag

from gateway.format_commands import ExportCheckpoint
from gateway.settings import StateSettings
from trainer_cell.vault.errors import VaultError
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.listing import Listed, list_checkpoints
from trainer_cell.vault.verify import verify_version


class ListCheckpoints(StateSettings):
    """List the published checkpoints, newest first."""

    model_id: str | None = Field(None, description="of this model alone")

    def cli_cmd(self) -> None:
        found = list(list_checkpoints(Vault(self.checkpoint_root), self.model_id))
        if not found:
            sys.stderr.write(f"no checkpoints under {self.checkpoint_root}\n")
        for listed in found:
            sys.stdout.write(f"{listed.address.uri}\t{listed.size_bytes} bytes\t{_state(listed)}\n")


def _state(listed: Listed) -> str:
    if listed.manifest is None or listed.problem:
        return f"damaged: {listed.problem}"
    return f"step {listed.manifest.step}, {'with' if listed.manifest.has_optimizer else 'without'} optimizer"


class VerifyCheckpoints(StateSettings):
    """Check checkpoints: files, sizes, manifest; with --deep every byte. Exit status 1 when one is damaged."""

    paths: CliPositionalArg[list[str]] = Field([], description="checkpoint directories or tinker:// addresses")
    all: CliToggleFlag[bool] = Field(False, description="every checkpoint under the root")
    deep: CliToggleFlag[bool] = Field(False, description="read every byte")

    def cli_cmd(self) -> None:
        vault = Vault(self.checkpoint_root)
        if self.all == bool(self.paths):
            sys.exit("cellgate: give either paths or --all")
        addresses = [listed.address.uri for listed in list_checkpoints(vault)] if self.all else self.paths
        num_damaged = sum(not self._is_good(vault, address) for address in addresses)
        sys.stdout.write(f"{len(addresses)} checked, {num_damaged} damaged\n")
        sys.exit(1 if num_damaged else 0)

    def _is_good(self, vault: Vault, address: str) -> bool:
        try:
            directory = _directory(vault, address)
            problems = verify_version(directory, deep=self.deep) if directory.exists() else ["there is no checkpoint"]
        except VaultError as error:
            problems = [str(error)]
        sys.stdout.write("".join(f"{address}: {line}\n" for line in problems or ["good"]))
        return not problems


def _directory(vault: Vault, address: str) -> Path:
    if not address.startswith("tinker://"):
        return Path(address)
    parsed = CheckpointAddress.parse(address)
    version = vault.resolve(parsed)
    return vault.root / version if version else vault.public_path(parsed)


class CheckpointCommands(BaseModel):
    """Look at checkpoints on disk."""

    list: CliSubCommand[ListCheckpoints] = Field(description="the published checkpoints, newest first")
    verify: CliSubCommand[VerifyCheckpoints] = Field(description="whether checkpoints are whole")
    export: CliSubCommand[ExportCheckpoint] = Field(description="write one in another format")

    def cli_cmd(self) -> None:
        CliApp.run_subcommand(self)
