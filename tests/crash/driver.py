"""The process that works on vaults in children; a job is `{"action": …, "root": …, …}`. See `tests.crash.children`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.crash import children
from tests.crash.children import Say
from tests.crash.churn import churn
from tests.crash.workload import ADDRESS, COMMAND, NEW, NEXT_EPOCH, contents, save, small_chunks, state_of
from trainer_cell.vault.deletion import delete_checkpoint
from trainer_cell.vault.errors import CheckpointDamaged, VaultError
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.listing import find_checkpoint, list_checkpoints
from trainer_cell.vault.manifest import read_manifest
from trainer_cell.vault.publish import sweep_staging
from trainer_cell.vault.recovery import settle_publish
from trainer_cell.vault.startup import recover
from trainer_cell.vault.verify import Wanted, read_tensors


def load(vault: Vault) -> int | None:
    """The seed of what a load reads; unlike `state_of` it fails as the vault does."""
    found = find_checkpoint(vault, ADDRESS)
    if found is None:
        return None
    directory = vault.version_dir(found.version)
    lease = vault.lease(found.version)
    if found.problem is not None or lease is None:
        raise CheckpointDamaged(directory, found.problem or "is gone")
    with lease:
        manifest = read_manifest(directory, vault.disk)
        wanted = {key: Wanted(None, 0, record.shape) for key, record in manifest.tensors.items()}
        read = read_tensors(directory, manifest, wanted, disk=vault.disk)
    if read != contents(manifest.iteration):
        raise RuntimeError("a load returned what was never saved")
    return manifest.iteration


def act(job: dict[str, Any]) -> object:
    """What is said when it went well."""
    vault = Vault(Path(job["root"]))
    if job["action"] == "save":
        return save(
            vault,
            job.get("seed", NEW),
            CheckpointAddress.parse(job.get("address", ADDRESS.uri)),
            overwrite=job["overwrite"],
            shards=job["shards"],
        )
    if job["action"] == "load":
        return load(vault)
    if job["action"] == "delete":
        return delete_checkpoint(vault, ADDRESS)
    if job["action"] == "list":
        return [entry.address.uri for entry in list_checkpoints(vault)]
    if job["action"] == "churn":
        return churn(vault, Path(job["book"]), job["epoch"], job["seed"])
    if job["action"] == "start-up":
        vault.create()
        return recover(vault).errors
    assert job["action"] == "recover"
    vault.create()
    sweep_staging(vault)
    settled = settle_publish(vault, ADDRESS, COMMAND, job["overwrite"], NEXT_EPOCH)
    sweep_staging(vault)
    return settled and settled[0]


def prepare(job: dict[str, Any], say: Say) -> Callable[[], None]:
    def work() -> None:
        try:
            say({"done": act(job)})
        except VaultError as error:
            say({"failed": type(error).__name__, "text": str(error)})

    return work


def serve(warm: Path) -> None:
    """warm: a new directory, to try everything out on before anybody looks."""
    vault = Vault(warm)
    vault.create()
    save(vault, NEW)
    assert state_of(vault) == load(vault) == NEW
    act({"action": "recover", "root": warm, "overwrite": True})
    act({"action": "start-up", "root": warm})
    delete_checkpoint(vault, ADDRESS)
    children.serve(prepare)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with small_chunks():
        serve(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
