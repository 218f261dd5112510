"""Start-up recovery of a checkpoint root: what crashes, hands and bad disks left is settled before anything is served.

Of each model, in this order, each step durable before the next:

1. deletions that were decided are finished;
2. a public name whose version is missing or does not verify, or whose link is not the vault's, is pointed at the
   latest version of that name that verifies; where none does, the name is removed;
3. a version that verifies and is newer than what its name points at, or whose name is absent, is a save that was
   frozen and not pointed to: it is pointed to, unless its command is known to have failed, or the name is pinned;
   an older one was replaced, and stays for its grace;
4. a version that does not verify goes into quarantine.

Verifying is shallow here: manifest with its digest, files and their sizes. What cannot be read now (an I/O error) or
is of a newer format is left alone. All of it can be interrupted anywhere and run again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trainer_cell.vault.errors import NotThere, VaultError
from trainer_cell.vault.inventory import public_names
from trainer_cell.vault.layout import Vault
from trainer_cell.vault.locks import Lock
from trainer_cell.vault.model_recovery import Finding, ModelRecovery
from trainer_cell.vault.staging import sweep_staging

Outcome = Literal["succeeded", "failed"]
OutcomeOf = Callable[[str], Outcome | None]


@dataclass(frozen=True)
class RecoveryReport:
    """swept: names of what was removed from staging and beside public names. errors: one sentence for each model that
    could not be recovered in full; its checkpoints are as they were, or better."""

    swept: tuple[str, ...]
    findings: tuple[Finding, ...]
    errors: tuple[str, ...]


def recover(vault: Vault, outcome_of: OutcomeOf = lambda command_id: None) -> RecoveryReport:
    """The caller holds the root's lock; a cell of an earlier gateway may live.

    outcome_of: what is recorded of a command, None when nothing is. Raises `StorageFailed` only when the root itself
    cannot be read.
    """
    findings: list[Finding] = []
    errors: list[str] = []
    swept = sweep_staging(vault)
    for model_id in vault.models():
        try:
            lock = _lock(vault, model_id)
            if lock is None:
                continue
            model = ModelRecovery(vault, model_id, lambda command_id: outcome_of(command_id) == "failed")
            try:
                with lock:
                    model.run()
                for aside in model.aside:
                    vault.disk.remove_tree(aside)
            finally:
                findings += model.findings
                errors += model.errors
        except VaultError as error:
            errors.append(f"{model_id}: {error}")
    return RecoveryReport(tuple(swept), tuple(findings), tuple(errors))


def _lock(vault: Vault, model_id: str) -> Lock | None:
    """None for a model that has neither versions nor names."""
    try:
        return vault.lock_model(model_id)
    except NotThere:
        if not public_names(vault, model_id):
            return None
        vault.make_durable(vault.versions_dir(model_id))
        return vault.lock_model(model_id)
