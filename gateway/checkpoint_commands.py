"""`cellgate checkpoints`: works on checkpoint directories as they lie on disk; no service need run.

Single checkpoints are deleted and pinned under the locks a service takes, too, so that is safe while one runs. `gc`
looks at the whole root and takes the lock of the root: a running service collects by itself, and `gc` then refuses.
Neither removes what a model in the journal of the state would be brought back from.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, Field
from pydantic_settings import CliApp, CliPositionalArg, CliSubCommand, CliToggleFlag

from gateway.format_commands import ExportCheckpoint
from gateway.held_versions import held_for_models
from gateway.scheduling.identity import timestamp
from gateway.settings import RetentionSettings, StateSettings
from gateway.state_directory import StateDirectory
from gateway.store.errors import JournalUnusable
from trainer_cell.vault.collect import Collector, Due
from trainer_cell.vault.deletion import delete_checkpoint
from trainer_cell.vault.errors import VaultError, VaultLocked
from trainer_cell.vault.layout import KINDS, CheckpointAddress, InvalidAddress, Vault
from trainer_cell.vault.lifetime import pin, unpin
from trainer_cell.vault.listing import Listed, list_checkpoints
from trainer_cell.vault.quarantine import Quarantined, empty_quarantine, list_quarantined
from trainer_cell.vault.staging import sweep_staging
from trainer_cell.vault.verify import verify_version


class ListCheckpoints(StateSettings):
    """List the published checkpoints, newest first: address, step, bytes, created, expires, pinned or -, state."""

    model_id: str | None = Field(None, description="of this model alone")
    quarantined: CliToggleFlag[bool] = Field(False, description="what a start-up set aside: path, bytes")

    def cli_cmd(self) -> None:
        vault = Vault(self.checkpoint_root)
        if self.quarantined:
            lines = [
                _quarantined(found) for found in list_quarantined(vault) if self.model_id in (None, found.model_id)
            ]
        else:
            lines = [_line(listed) for listed in list_checkpoints(vault, self.model_id)]
        if not lines:
            sys.stderr.write(f"no checkpoints under {self.checkpoint_root}\n")
        sys.stdout.write("".join(f"{line}\n" for line in lines))


def _line(listed: Listed) -> str:
    manifest, record = listed.manifest, listed.record
    if manifest is None:
        return "\t".join([listed.address.uri, "-", "-", "-", "-", "-", _state(listed)])
    expires = None if listed.problem else listed.expires
    return "\t".join(
        [
            listed.address.uri,
            f"step {manifest.step}",
            f"{listed.size_bytes} bytes",
            manifest.created,
            timestamp(expires) if expires is not None else "never",
            "pinned" if record.pinned else "-",
            _state(listed),
        ]
    )


def _state(listed: Listed) -> str:
    if listed.manifest is None or listed.problem:
        return f"damaged: {listed.problem}"
    if listed.record.doomed is not None:
        return f"being removed: {listed.record.doomed}"
    if listed.expires is not None and listed.expires <= datetime.now(UTC) and not listed.record.pinned:
        return "expired"
    optimizer = "with optimizer" if listed.manifest.has_optimizer else "without optimizer"
    return f"{optimizer}; {listed.record.note}" if listed.record.note else optimizer


def _quarantined(found: Quarantined) -> str:
    return f"{found.path}\t{found.num_bytes} bytes"


class VerifyCheckpoints(StateSettings):
    """Check checkpoints: files, sizes, manifest; with --deep every byte. Exit status 1 when one is damaged."""

    paths: CliPositionalArg[list[str]] = Field([], description="checkpoint directories or tinker:// addresses")
    all: CliToggleFlag[bool] = Field(False, description="every checkpoint under the root, recovery snapshots too")
    deep: CliToggleFlag[bool] = Field(False, description="read every byte")

    def cli_cmd(self) -> None:
        vault = Vault(self.checkpoint_root)
        if self.all == bool(self.paths):
            sys.exit("cellgate: give either paths or --all")
        addresses = [listed.address.uri for listed in list_checkpoints(vault, kinds=KINDS)] if self.all else self.paths
        missing = [address for address in addresses if not self._is_there(vault, address)]
        there = [address for address in addresses if address not in missing]
        num_damaged = sum(not self._is_good(vault, address) for address in there)
        not_found = f", {len(missing)} not found" if missing else ""
        sys.stdout.write(f"{len(there)} checked, {num_damaged} damaged{not_found}\n")
        sys.exit(1 if num_damaged or missing else 0)

    def _is_there(self, vault: Vault, address: str) -> bool:
        try:
            is_there = os.path.lexists(_directory(vault, address))
            reason = "there is no checkpoint"
        except InvalidAddress as error:
            is_there, reason = False, str(error)
        except VaultError:
            is_there = True  # something is, and it is no checkpoint
        if not is_there:
            sys.stdout.write(f"{address}: {reason}\n")
        return is_there

    def _is_good(self, vault: Vault, address: str) -> bool:
        try:
            problems = verify_version(_directory(vault, address), deep=self.deep)
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


class CollectCheckpoints(RetentionSettings):
    """Remove what the rules of retention say need not stay, as a service does at intervals; refused while one runs."""

    dry_run: CliToggleFlag[bool] = Field(False, description="tell what would go and why; also while a service runs")
    quarantined: CliToggleFlag[bool] = Field(False, description="also everything in quarantine")

    def cli_cmd(self) -> None:
        vault = Vault(self.checkpoint_root)
        if not vault.root.is_dir():
            sys.exit(f"cellgate: there is no checkpoint root {vault.root}")
        collector = Collector(vault, self.rules)
        try:
            if self.dry_run:
                due, errors = collector.plan()
                removed = list(list_quarantined(vault)) if self.quarantined else []
            else:
                with vault.lock(), held_for_models(StateDirectory(self.state), vault):
                    collected = collector.collect()
                    sweep_staging(vault)
                    removed = empty_quarantine(vault) if self.quarantined else []
                due, errors = list(collected.removed), list(collected.errors)
                for kept in collected.kept:
                    sys.stderr.write(f"in use, stays for now: {_due(kept)}\n")
        except VaultLocked:
            sys.exit("cellgate: a service runs on this root and collects by itself; stop it, or use --dry-run")
        except (VaultError, JournalUnusable) as error:
            sys.exit(f"cellgate: {error}")
        for line in [*map(_due, due), *map(_quarantined, removed)]:
            sys.stdout.write(f"{line}\n")
        freed = sum(one.num_bytes for one in due) + sum(found.num_bytes for found in removed)
        verb = "would be removed" if self.dry_run else "removed"
        sys.stdout.write(f"{len(due) + len(removed)} {verb}, {freed} bytes\n")
        sys.exit("".join(f"cellgate: {error}\n" for error in errors).rstrip() if errors else 0)


def _due(due: Due) -> str:
    return f"{due.address.uri}\t{due.version.ulid}\t{due.num_bytes} bytes\t{due.reason}"


class _OneCheckpoint(StateSettings):
    address: CliPositionalArg[str] = Field(description="tinker://<model_id>/<kind>/<name>")

    def _do(self, act: Callable[[Vault, CheckpointAddress], bool], done: str) -> None:
        try:
            address = CheckpointAddress.parse(self.address)
            if not act(Vault(self.checkpoint_root), address):
                sys.exit(f"cellgate: there is no checkpoint {address.uri}")
        except (VaultError, JournalUnusable) as error:
            sys.exit(f"cellgate: {error}")
        sys.stdout.write(f"{address.uri} {done}\n")


class DeleteCheckpoint(_OneCheckpoint):
    """Delete one checkpoint with all its versions, damaged or not; safe while a service runs."""

    def cli_cmd(self) -> None:
        self._do(self._delete, "deleted")

    def _delete(self, vault: Vault, address: CheckpointAddress) -> bool:
        with held_for_models(StateDirectory(self.state), vault):
            return delete_checkpoint(vault, address)


class PinCheckpoint(_OneCheckpoint):
    """Keep one checkpoint from TTL, rules, deletion and overwriting; safe while a service runs."""

    def cli_cmd(self) -> None:
        self._do(pin, "pinned")


class UnpinCheckpoint(_OneCheckpoint):
    """Take the pin from a checkpoint; safe while a service runs."""

    def cli_cmd(self) -> None:
        self._do(unpin, "unpinned")


class CheckpointCommands(BaseModel):
    """Look at checkpoints on disk, and tidy them."""

    list: CliSubCommand[ListCheckpoints] = Field(description="the published checkpoints, newest first")
    verify: CliSubCommand[VerifyCheckpoints] = Field(description="whether checkpoints are whole")
    gc: CliSubCommand[CollectCheckpoints] = Field(description="remove what need not stay")
    delete: CliSubCommand[DeleteCheckpoint] = Field(description="delete one checkpoint")
    pin: CliSubCommand[PinCheckpoint] = Field(description="keep one checkpoint")
    unpin: CliSubCommand[UnpinCheckpoint] = Field(description="keep it no longer")
    export: CliSubCommand[ExportCheckpoint] = Field(description="write one in another format")

    def cli_cmd(self) -> None:
        CliApp.run_subcommand(self)
